"""What a sharded module stores and loads: each table once, under its unsharded name, as a `ShardedTensor`.

A ``ShardedTensor`` knows the shape of the whole table and which rank holds which rectangle of it, so that every rank's
state dict names every table. It is torch's, and private (``torch.distributed._shard``): this file is the one that
touches it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.shard_geometry import placement
from tutorec.distributed.tables import PlacedTable


def sharded_state(
    tables: Sequence[PlacedTable], local: Mapping[str, torch.Tensor], env: ShardingEnv, device: torch.device
) -> dict[str, ShardedTensor]:
    """Table name -> the whole table as a `ShardedTensor`. No communication: the plan says it all.

    Args:
        tables: Every table, those of other ranks included.
        local: Table name -> rows of this rank's shard; live, and copied only where the backend pads them.
        env: The ranks; needs a process group.
        device: Where tables live.
    """
    return {table.name: _sharded_tensor(table, local.get(table.name), env, device) for table in tables}


def local_state(tables: Sequence[PlacedTable], loaded: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """What of a loaded state this rank holds: table name -> rows of its shard.

    Args:
        tables: Every table.
        loaded: Table name -> `ShardedTensor`, or the whole table as a plain tensor, as an unsharded module stores it.
        rank: This rank.

    Raises:
        ValueError: Shapes differ, or what is loaded was sharded by another plan.
    """
    state: dict[str, torch.Tensor] = {}
    for table in tables:
        value = loaded.get(table.name)
        if value is None:
            continue
        if list(value.size()) != [table.rows, table.columns]:
            raise ValueError(
                f"table {table.name!r} is [{table.rows}, {table.columns}], and what is loaded is {list(value.size())}"
            )
        for piece in table.pieces:
            if piece.rank != rank:
                continue
            if isinstance(value, ShardedTensor):
                state[table.name] = _local_shard(value, table, piece.row_offset, piece.column_offset)
            else:
                rows = slice(piece.row_offset, piece.row_offset + piece.rows)
                state[table.name] = value[rows, piece.column_offset : piece.column_offset + piece.columns]
    return state


def _sharded_tensor(
    table: PlacedTable, local: torch.Tensor | None, env: ShardingEnv, device: torch.device
) -> ShardedTensor:
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", env.world_size))
    shards = [
        ShardMetadata(
            [piece.row_offset, piece.column_offset],
            [piece.rows, piece.columns],
            # Ranks that share a device, as tests on one GPU do, are not where counting by host puts them.
            f"rank:{piece.rank}/{local.device}"
            if local is not None and piece.rank == env.rank
            else placement(piece.rank, device.type, local_size),
        )
        for piece in table.pieces
    ]
    mine = [shard for shard, piece in zip(shards, table.pieces, strict=True) if piece.rank == env.rank]
    metadata = ShardedTensorMetadata(
        shards_metadata=shards,
        size=torch.Size([table.rows, table.columns]),
        tensor_properties=TensorProperties(dtype=table.dtype),
    )
    # ShardedTensor takes contiguous rows only: those of a padded table are copied.
    held = [Shard(local.contiguous(), shard) for shard in mine] if local is not None else []
    with warnings.catch_warnings():
        # torch recommends DTensor, which cannot say that one rank holds a whole table.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            held, metadata, process_group=env.group_for("a state dict")
        )


def _local_shard(value: ShardedTensor, table: PlacedTable, row: int, column: int) -> torch.Tensor:
    offsets = []
    for shard in value.local_shards():
        if list(shard.metadata.shard_offsets) == [row, column]:
            return shard.tensor
        offsets.append(shard.metadata.shard_offsets)
    raise ValueError(
        f"table {table.name!r}: this rank holds the shard at [{row}, {column}], and what is loaded has shards at "
        f"{offsets} here: it was stored under another plan; load it under that plan"
    )
