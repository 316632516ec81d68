"""Configuration of tables: name, rows, columns, features, pooling, number format; its checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, unique
from math import sqrt
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tutorec._kernels.memory import unwritten_zeros
from tutorec._kernels.specs import memory_of_tables
from tutorec.types import DTYPES, DataType
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


def common_width(tables: Sequence[BaseEmbeddingConfig]) -> int:
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

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the weights."""
        return DTYPES[self.data_type]

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


_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)
_TRAINED = (DataType.FP32, DataType.FP16, DataType.BF16)
_TOO_LARGE = (
    "make the collection with device=torch.device('meta') and shard it: a rank then allocates its "
    "own shards only, and in a file with the compute kernel 'fused_uvm_caching': "
    "ParameterConstraints(compute_kernels=['fused_uvm_caching'])"
)
# Names that a module has for itself, those that it makes at its construction among them.
_TAKEN = frozenset(dir(nn.ModuleDict()))


def checked_tables(
    owner: str, tables: Sequence[_Config], kind: type[_Config], trained: bool = True
) -> list[_Config]:
    """Check the tables of a collection together, and add missing feature names.

    A table without ``feature_names`` is looked up by the feature of its own name, as in TorchRec;
    the caller's config is not changed.

    Args:
        owner: The collection's class, for messages.
        tables: Configuration of each table.
        kind: Class of the configs.
        trained: Whether the tables will be trained, which a quantized format does not support.

    Returns:
        The tables, in order, each with at least one feature.

    Raises:
        TypeError: ``tables`` is not a list, or a config has another class.
        ValueError: Two tables have the same name, a name cannot be part of a path, two results have
            the same name, or a number format cannot be trained.

    Example:
        >>> checked_tables(
        ...     "EmbeddingCollection", [EmbeddingConfig(10, 4, "item")], EmbeddingConfig
        ... )[0].feature_names
        ['item']
    """
    if isinstance(tables, BaseEmbeddingConfig):
        raise TypeError(
            f"{owner} takes a list of tables, got the config of {tables.name!r}; write [config]"
        )
    for table in tables:
        if not isinstance(table, kind):
            raise TypeError(
                f"{owner} takes tables of {kind.__name__}, got {type(table).__name__}: "
                "EmbeddingBagConfig goes with EmbeddingBagCollection, EmbeddingConfig with "
                "EmbeddingCollection"
            )

    names = [table.name for table in tables]
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ValueError(f"tables {repeated} are named more than once in {names}")
    for table in tables:
        _check_table(table, trained)

    tables = [
        table if table.feature_names else replace(table, feature_names=[table.name])
        for table in tables
    ]
    _check_results(owner, tables)
    return tables


def _check_table(table: BaseEmbeddingConfig, trained: bool) -> None:
    """Check one table's name and number format."""
    if not isinstance(table.name, str):
        raise TypeError(f"table name {table.name!r} must be a string")
    if not table.name or "." in table.name:
        raise ValueError(f"table name {table.name!r} must not be empty or contain a dot")
    if table.name in _TAKEN:
        raise ValueError(
            f"table name {table.name!r} is taken by an attribute of torch.nn.ModuleDict, which "
            f"holds the tables; call it {table.name + '_table'!r}"
        )

    if trained and table.data_type not in _TRAINED:
        raise ValueError(
            f"table {table.name!r}: data_type {table.data_type} cannot be trained; use FP32, FP16 "
            "or BF16 here, and quantize the finished collection"
        )


def _check_results(owner: str, tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Check that no feature is called as the result of a shared feature, ``feature@table``, is."""
    names_by_table = get_embedding_names_by_table(tables)
    names = [name for table_names in names_by_table for name in table_names]
    if len(set(names)) == len(names):
        return

    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    readers = [
        table.name
        for table, table_names in zip(tables, names_by_table, strict=True)
        if not set(repeated).isdisjoint(table_names)
    ]
    raise ValueError(
        f"{owner}: keys occur twice: {repeated} in {names}; each key names one feature. Tables "
        f"{readers} return them: the result of a feature that several tables read is named "
        "feature@table, so call the feature of that name otherwise"
    )


def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """Names of the results, table by table: the feature, or ``feature@table`` for shared features.

    Args:
        tables: The tables, in order.

    Returns:
        For each table the result name of each feature.

    Example:
        >>> one = EmbeddingBagConfig(10, 4, "t1", feature_names=["item", "user"])
        >>> two = EmbeddingBagConfig(10, 4, "t2", feature_names=["item"])
        >>> get_embedding_names_by_table([one, two])
        [['item@t1', 'user'], ['item@t2']]

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.get_embedding_names_by_table``.
    """
    readers = Counter(feature for table in tables for feature in table.feature_names)
    shared = {feature for feature, count in readers.items() if count > 1}
    return [
        [
            f"{feature}@{table.name}" if feature in shared else feature
            for feature in table.feature_names
        ]
        for table in tables
    ]


def empty_weight(config: BaseEmbeddingConfig, device: torch.device) -> torch.Tensor:
    """An uninitialised weight [R, D]; of a virtual table, zeros that use no memory yet."""
    shape = config.num_embeddings, config.embedding_dim
    dtype = config.dtype
    needed = (config.name, *shape, config.embedding_dim * dtype.itemsize)

    with memory_of_tables([needed], _TOO_LARGE):
        if config.use_virtual_table:
            return unwritten_zeros(shape, dtype, device)
        return torch.empty(shape, dtype=dtype, device=device)


def draw_weights(configs: Sequence[BaseEmbeddingConfig], tables: nn.ModuleDict) -> None:
    """Initialize the tables, except on the meta device and except growing (virtual) tables."""
    with torch.no_grad():
        for config, table in zip(configs, tables.values(), strict=True):
            weight = table.get_parameter("weight")
            if not (weight.is_meta or config.use_virtual_table):
                config.init_weight(weight)
