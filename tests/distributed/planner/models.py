"""Models that several tests plan for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

MIB = 1024**2


def bags(*shapes: tuple[int, int], prefix: str = "t") -> EmbeddingBagCollection:
    """A collection on the meta device of tables ``prefix0``, ``prefix1`` ... with these rows and
    columns.
    """
    tables = [
        EmbeddingBagConfig(rows, columns, f"{prefix}{index}", feature_names=[f"{prefix}f{index}"])
        for index, (rows, columns) in enumerate(shapes)
    ]
    return EmbeddingBagCollection(tables, device=torch.device("meta"))


def rows(*shapes: tuple[int, int], prefix: str = "s") -> EmbeddingCollection:
    """The same, of rows that are not pooled; they have one width."""
    tables = [
        EmbeddingConfig(count, columns, f"{prefix}{index}", feature_names=[f"{prefix}f{index}"])
        for index, (count, columns) in enumerate(shapes)
    ]
    return EmbeddingCollection(tables, device=torch.device("meta"))


class Both(nn.Module):
    """Pooled tables, tables that are not pooled, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict(
            {"bags": bags((1000, 16), (50, 8)), "rows": rows((300, 8), (20, 8))}
        )
        self.over = nn.Linear(8, 1)


def documents_tables() -> EmbeddingBagCollection:
    """Two large and two small tables, as *Exploring TorchRec sharding* has them."""
    tables = []
    for size, count in (("large", 4096), ("small", 1024)):
        for index in range(2):
            name = f"{size}_table_{index}"
            feature = f"{size}_table_feature_{index}"
            tables.append(EmbeddingBagConfig(count, 64, name, feature_names=[feature]))
    return EmbeddingBagCollection(tables, device=torch.device("meta"))


def only(
    names: Sequence[str], sharding_type: str, **words: object
) -> dict[str, ParameterConstraints]:
    """Every table may be sharded in this way alone."""
    return {name: ParameterConstraints(sharding_types=[sharding_type], **words) for name in names}  # type: ignore[arg-type]


def pieces(entry: ParameterSharding) -> list[tuple[list[int], list[int], str]]:
    """Offsets, sizes and placement of each shard of a plan's entry."""
    return [
        (shard.shard_offsets, shard.shard_sizes, str(shard.placement)) for shard in entry.shards()
    ]
