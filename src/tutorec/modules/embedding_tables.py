"""What every collection asks of its tables: names that can be paths, formats that can be trained, names of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from tutorec._kernels.unwritten import unwritten_zeros
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.types import DataType, data_type_to_dtype

_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)
_TRAINED = (DataType.FP32, DataType.FP16, DataType.BF16)


def checked_tables(owner: str, tables: Sequence[_Config], kind: type[_Config], trained: bool = True) -> list[_Config]:
    """The tables of a collection, each with at least one feature, after what one config alone cannot know is checked.

    A table without ``feature_names`` is looked up by the feature of its own name, as TorchRec does; the caller's config
    is left as it is.

    Args:
        owner: The collection's class, for messages.
        tables: What each table is.
        kind: The config that this collection takes.
        trained: Whether the tables are to be trained, which a quantized one cannot be.

    Returns:
        The tables, in order.

    Raises:
        TypeError: A table is described by another kind of config.
        ValueError: Two tables have one name, a name cannot be part of a path, or a number format cannot be trained.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingConfig
        >>> checked_tables("EmbeddingCollection", [EmbeddingConfig(10, 4, "item")], EmbeddingConfig)[0].feature_names
        ['item']
    """
    for table in tables:
        if not isinstance(table, kind):
            raise TypeError(
                f"{owner} takes tables of {kind.__name__}, got {type(table).__name__}: EmbeddingBagConfig goes with "
                "EmbeddingBagCollection, EmbeddingConfig with EmbeddingCollection"
            )
    names = [table.name for table in tables]
    repeated = sorted(name for name, count in Counter(names).items() if count > 1)
    if repeated:
        raise ValueError(
            f"tables {repeated} are named more than once in {names}; a name is a table's key in state_dict"
        )
    for table in tables:
        _check_table(table, trained)
    return [table if table.feature_names else replace(table, feature_names=[table.name]) for table in tables]


def _check_table(table: BaseEmbeddingConfig, trained: bool) -> None:
    """Check one table's name and number format."""
    if not table.name or "." in table.name:
        raise ValueError(f"table name {table.name!r} must not be empty or contain a dot; it becomes part of a path")
    if hasattr(nn.ModuleDict, table.name) or table.name == "training":
        raise ValueError(
            f"table name {table.name!r} is taken by an attribute of torch.nn.ModuleDict, which holds the tables; "
            f"call it {table.name + '_table'!r}"
        )
    if trained and table.data_type not in _TRAINED:
        raise ValueError(
            f"table {table.name!r}: data_type {table.data_type} cannot be trained; use FP32, FP16 or BF16 here, "
            "and quantize the finished collection"
        )


def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """The names of the results, table by table: the feature, or ``feature@table`` where several tables share it.

    Args:
        tables: The tables, in order.

    Returns:
        For each table the name of each feature's result.

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
        [f"{feature}@{table.name}" if feature in shared else feature for feature in table.feature_names]
        for table in tables
    ]


def empty_weight(config: BaseEmbeddingConfig, device: torch.device) -> torch.Tensor:
    """A weight [R, D] that is to be drawn; of a virtual table zeros that take no memory until they are written."""
    shape, dtype = (config.num_embeddings, config.embedding_dim), data_type_to_dtype(config.data_type)
    if config.use_virtual_table:
        return unwritten_zeros(shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device)


def draw_weights(configs: Sequence[BaseEmbeddingConfig], tables: nn.ModuleDict) -> None:
    """Fill the tables with initial values; not on the meta device, nor virtual tables, whose rows get theirs later."""
    with torch.no_grad():
        for config, table in zip(configs, tables.values(), strict=True):
            weight = table.get_parameter("weight")
            if not (weight.is_meta or config.use_virtual_table):
                config.init_weight(weight)
