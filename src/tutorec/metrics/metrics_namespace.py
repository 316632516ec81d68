"""Names of metrics, with TorchRec's spelling."""

from __future__ import annotations

from enum import Enum


class _Text(Enum):
    """A member is printed as its text."""

    def __str__(self) -> str:
        return self.value


class MetricNameBase(_Text):
    """Base of the enumerations of names: subclass it for a metric of your own."""


class MetricName(MetricNameBase):
    """The quantity that is computed."""

    NE = "ne"
    LOG_LOSS = "logloss"
    MSE = "mse"
    RMSE = "rmse"
    R_SQUARED = "r_squared"
    MAE = "mae"
    ACCURACY = "accuracy"
    AUC = "auc"
    GROUPED_AUC = "grouped_auc"
    GAUC = "gauc"
    GAUC_NUM_SAMPLES = "gauc_num_samples"


class MetricPrefix(_Text):
    """Over which samples: all since the start, or the last ``window_size``."""

    LIFETIME = "lifetime_"
    WINDOW = "window_"
