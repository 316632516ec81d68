"""Names of fused optimizers, as in fbgemm, without importing fbgemm."""

from __future__ import annotations

import enum


class EmbOptimType(enum.Enum):
    """An optimizer that runs inside backward. Names and values are fbgemm's.

    SGD, Adagrad, row-wise Adagrad, Adam and partial row-wise Adam are supported; the others are
    refused. All are exact, whatever their name: gradients of repeated ids in a batch are summed
    before one update of their row.

    Example:
        >>> EmbOptimType.EXACT_ROWWISE_ADAGRAD.value
        'exact_row_wise_adagrad'
    """

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"

    def __str__(self) -> str:
        return self.value
