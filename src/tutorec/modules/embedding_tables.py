"""Checks of a collection's tables, names of its results, and initialization of its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from tutorec._kernels.table_specs import memory_of_tables
from tutorec._kernels.unwritten import unwritten_zeros
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.types import DataType, data_type_to_dtype

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
        >>> from tutorec.modules.embedding_configs import EmbeddingConfig
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
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
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
    dtype = data_type_to_dtype(config.data_type)
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
