"""What a table is, before it exists: name, rows, columns, features, pooling, number format."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from math import sqrt

from torch import Tensor

from tutorec.types import DataType


@unique
class PoolingType(Enum):
    """How the rows of a bag become one row; TorchRec's ``PoolingType``.

    Example:
        >>> PoolingType.MEAN.value
        'MEAN'
    """

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@dataclass
class BaseEmbeddingConfig:
    """One table: R rows of D columns, and the features that look rows up in it.

    Args:
        num_embeddings: R, rows.
        embedding_dim: D, columns.
        name: Name of the table; its weight is ``embedding_bags.<name>.weight``.
        data_type: Format of the weights.
        feature_names: Features whose ids are rows of this table.
        weight_init_max: Upper end of the uniform initial values, by default ``1 / sqrt(R)``.
        weight_init_min: Lower end, by default ``-1 / sqrt(R)``.
        num_embeddings_post_pruning: Rows left after pruning, for a quantized table.
        init_fn: Fills the weight in place of the uniform draw.
        need_pos: Position-weighted tables are not supported: leave it False.

    Raises:
        ValueError: Rows or columns are not positive, or a feature is named twice.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[Tensor], Tensor | None] | None = None
    need_pos: bool = False

    def __post_init__(self) -> None:
        for what, number in (("num_embeddings", self.num_embeddings), ("embedding_dim", self.embedding_dim)):
            if number <= 0:
                raise ValueError(f"table {self.name!r}: {what} must be positive, got {number}")
        if len(set(self.feature_names)) != len(self.feature_names):
            raise ValueError(f"table {self.name!r}: feature_names {self.feature_names} name a feature twice")
        if self.need_pos:
            raise NotImplementedError(f"table {self.name!r}: need_pos is not supported; pass weights with the batch")

    def get_weight_init_max(self) -> float:
        """Upper end of the initial values."""
        return sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Lower end of the initial values."""
        return -sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Features that look rows up in this table."""
        return len(self.feature_names)

    def init_weight(self, weight: Tensor) -> None:
        """Fill a weight [R, D], or rows of one, with initial values."""
        if self.init_fn is None:
            weight.uniform_(self.get_weight_init_min(), self.get_weight_init_max())
        else:
            self.init_fn(weight)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose rows are pooled per bag; TorchRec's ``EmbeddingBagConfig``.

    Args:
        pooling: SUM or MEAN; a bag without ids gives zeros for both.

    Example:
        >>> EmbeddingBagConfig(num_embeddings=4096, embedding_dim=64, name="user").get_weight_init_max()
        0.015625
    """

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose rows are returned one per id; TorchRec's ``EmbeddingConfig``.

    Example:
        >>> EmbeddingConfig(num_embeddings=10, embedding_dim=4, name="user", feature_names=["user_id"]).num_features()
        1
    """
