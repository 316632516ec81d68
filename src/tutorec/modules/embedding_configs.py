"""Configuration of tables: name, rows, columns, features, pooling, number format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from math import sqrt
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutorec.types import DataType
from tutorec.types import data_type_to_dtype as data_type_to_dtype
from tutorec.types import dtype_to_data_type as dtype_to_data_type

# Bits per element of the formats of quantized and float tables.
DATA_TYPE_NUM_BITS: dict[DataType, int] = {
    DataType.FP32: 32,
    DataType.FP16: 16,
    DataType.BF16: 16,
    DataType.INT8: 8,
    DataType.UINT8: 8,
    DataType.INT4: 4,
    DataType.INT2: 2,
    DataType.NFP8: 8,
}


@unique
class PoolingType(Enum):
    """How the rows of a bag are pooled; TorchRec's ``PoolingType`` with an additional SQRTN.

    SUM adds the n rows (times their weights), MEAN divides the sum by n, SQRTN divides it by the
    square root of n, or of the sum of squared weights; NONE does not pool. An empty bag returns
    zeros.

    Example:
        >>> PoolingType.MEAN.value
        'MEAN'
    """

    SUM = "SUM"
    MEAN = "MEAN"
    SQRTN = "SQRTN"
    NONE = "NONE"


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """The name of a pooling in kernels.

    Args:
        pooling_type: SUM, MEAN or SQRTN.

    Returns:
        ``"sum"``, ``"mean"`` or ``"sqrtn"``; the first two are modes of ``torch.nn.EmbeddingBag``.

    Raises:
        ValueError: NONE, which is not a pooling.

    Example:
        >>> pooling_type_to_str(PoolingType.MEAN)
        'mean'

    See Also:
        TorchRec's ``torchrec.modules.embedding_configs.pooling_type_to_str``.
    """
    if not isinstance(pooling_type, PoolingType) or pooling_type is PoolingType.NONE:
        raise ValueError(
            f"{pooling_type} pools nothing: a bag is pooled by SUM, MEAN or SQRTN; "
            "EmbeddingCollection returns rows"
        )
    return pooling_type.value.lower()


def common_width(tables: "Sequence[BaseEmbeddingConfig]") -> int:
    """Number of columns D of every table; -1 without tables.

    Raises:
        ValueError: Tables differ in D.
    """
    widths = {table.name: table.embedding_dim for table in tables}
    if len(set(widths.values())) > 1:
        raise ValueError(
            f"the tables have no common embedding_dim: {widths}; ask embedding_configs() for each"
        )
    return next(iter(widths.values()), -1)


_ONE_BUCKET = "total_num_buckets", 1
_FIXED_ROWS = "a table has num_embeddings rows from the first batch on: hash ids to them"
_UNSUPPORTED = {
    "need_pos": "pass weights with the batch",
    "input_dim": "leave it out",
    "total_num_buckets": _FIXED_ROWS,
    "virtual_table_eviction_policy": _FIXED_ROWS,
    "enable_embedding_update": "write rows through the table's weight",
    "stash_weights": "leave it out",
}


@dataclass
class BaseEmbeddingConfig:
    """A table of R rows and D columns, and the features that look rows up in it.

    Args:
        num_embeddings: R, rows.
        embedding_dim: D, columns.
        name: Name of the table; its weight is ``embedding_bags.<name>.weight``.
        data_type: Format of the weights.
        feature_names: Features whose ids are rows of this table.
        weight_init_max: Upper end of the uniform initial values, by default ``1 / sqrt(R)``.
        weight_init_min: Lower end, by default ``-1 / sqrt(R)``.
        num_embeddings_post_pruning: Rows left after pruning, for a quantized table.
        init_fn: Fills the weight [R, D], or returns its initial values, instead of the uniform
            distribution.
        need_pos: TorchRec's position weights; not supported, leave it False.
        input_dim: TorchRec's; not supported, like the next one and the last three: leave them at
            their defaults.
        total_num_buckets: Buckets of a table that grows; 1 is the same as None.
        use_virtual_table: Whether R is a cap. Rows are zeros; they take memory and get initial
            values when the table's `GrowingManagedCollisionModule` admits an id to them.
        virtual_table_eviction_policy: Eviction of such rows.
        enable_embedding_update: Updates of rows during serving.
        stash_weights: Moves rows off the device between steps.

    Raises:
        NotImplementedError: A field requests something that is not supported.
        ValueError: Rows or columns are not positive integers, a feature is named twice, or
            ``feature_names`` is not a list of names.
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
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: object | None = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        for size, number in (
            ("num_embeddings", self.num_embeddings),
            ("embedding_dim", self.embedding_dim),
        ):
            if not isinstance(number, Integral) or number <= 0:
                raise ValueError(
                    f"table {self.name!r}: {size} must be a positive whole number, got {number!r}"
                )

        if isinstance(self.feature_names, str):
            raise ValueError(
                f"table {self.name!r}: feature_names must be a list of names, got the string "
                f"{self.feature_names!r}; write [{self.feature_names!r}]"
            )
        if not isinstance(self.feature_names, Sequence) or not all(
            isinstance(name, str) for name in self.feature_names
        ):
            raise ValueError(
                f"table {self.name!r}: feature_names must be a list of names, got "
                f"{self.feature_names!r}"
            )
        if len(set(self.feature_names)) != len(self.feature_names):
            raise ValueError(
                f"table {self.name!r}: feature_names {self.feature_names} name a feature twice"
            )

        for field_name, remedy in _UNSUPPORTED.items():
            # one bucket is the whole table
            if getattr(self, field_name) and (field_name, self.total_num_buckets) != _ONE_BUCKET:
                raise NotImplementedError(
                    f"table {self.name!r}: {field_name}={getattr(self, field_name)!r} is not "
                    f"supported; {remedy}"
                )

    def get_weight_init_max(self) -> float:
        """Upper end of the initial values."""
        return (
            sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max
        )

    def get_weight_init_min(self) -> float:
        """Lower end of the initial values."""
        return (
            -sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min
        )

    def num_features(self) -> int:
        """Number of features that look rows up in this table."""
        return len(self.feature_names)

    def init_weight(self, weight: Tensor) -> None:
        """Initialize a weight [R, D], or some of its rows, by ``init_fn`` or uniformly."""
        if self.init_fn is None:
            weight.uniform_(self.get_weight_init_min(), self.get_weight_init_max())
            return

        rows = self.init_fn(weight)
        if isinstance(rows, Tensor) and rows is not weight:
            # A function may return new values instead of filling the weight.
            if rows.shape != weight.shape:
                raise ValueError(
                    f"table {self.name!r}: init_fn returned shape {list(rows.shape)} for a weight "
                    f"of shape {list(weight.shape)}; return that shape, or fill the weight in place"
                )
            weight.copy_(rows)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table with pooling; TorchRec's ``EmbeddingBagConfig``.

    Args:
        pooling: SUM, MEAN or SQRTN; an empty bag returns zeros.

    Example:
        >>> EmbeddingBagConfig(
        ...     num_embeddings=4096, embedding_dim=64, name="user"
        ... ).get_weight_init_max()
        0.015625
    """

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table without pooling; TorchRec's ``EmbeddingConfig``.

    Example:
        >>> EmbeddingConfig(
        ...     num_embeddings=10, embedding_dim=4, name="user", feature_names=["user_id"]
        ... ).num_features()
        1
    """


class QuantConfig(NamedTuple):
    """The number formats of a quantized collection; TorchRec's ``QuantConfig``.

    A format is given as in torch's quantization, by an observer or an observer factory, of which
    only the ``dtype`` is used:
    ``torch.ao.quantization.PlaceholderObserver.with_args(dtype=torch.int8)``. A plain
    ``torch.dtype`` or ``DataType`` is accepted, too.

    Args:
        activation: Format of the returned rows.
        weight: Format of the tables.
        per_table_weight_dtype: Other formats for some tables, by name.

    Example:
        >>> QuantConfig(torch.float, torch.int8, {"user_table": torch.quint4x2}).weight
        torch.int8
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: Mapping[str, torch.dtype | DataType] | None = None
