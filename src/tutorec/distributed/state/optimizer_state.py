"""Saved state of fused optimizers: each table once, whole, under its unsharded name.

A state of the table's shape is a `ShardedTensor` [R, D]. A row-wise state is [R], or [S * R] for a
table with S column shards, each of which has its own values, in shard order. States of replicated
tables, states without a process group, and step counts are plain tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.tables import LocalShards, Table
from tutorec.distributed.plan.geometry import TableShard
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.state.sharded_tensor import ShardedTensor
from tutorec.distributed.state.state_dict import (
    Rectangle,
    local_shard,
    rectangles_of,
    sharded_tensor,
    whole_size,
)


class ShardedStates:
    """Converts the states of one operator's tables to and from their saved form.

    Args:
        held: The tables of the collection, with this rank's shards; tables of other operators are
            ignored.
        names: Parameters of the operator: the table's name, with ``_1``, ``_2`` and so on for
            further shards here.
        env: The ranks.
        device: Device of the tables.
    """

    def __init__(
        self,
        held: Sequence[LocalShards],
        names: Sequence[str],
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        self._env = env
        self._device = device

        self._pieces: dict[str, list[tuple[str, Table, TableShard]]] = {}
        for table in held:
            for index, shard in enumerate(table.shards):
                name = f"{table.name}_{index}" if index else table.name
                if name in names:
                    # A table with shards in two operators, which have different widths, is saved by
                    # each of them separately.
                    first = next(
                        (known for known, own in self._pieces.items() if own[0][1] is table.table),
                        name,
                    )
                    self._pieces.setdefault(first, []).append((name, table.table, shard))

    def stored(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """State by parameter -> state by table; tensors are live views if they are contiguous."""
        by_table: dict[str, dict[str, Any]] = {}
        for name, own in self._pieces.items():
            states = [state[parameter] for parameter, _, _ in own if parameter in state]
            if len(states) == len(own):
                by_table[name] = {
                    key: self._whole(own, [values[key] for values in states]) for key in states[0]
                }
        return by_table

    def local(
        self, loaded: Mapping[str, Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """State by table -> state by parameter, of this rank's shards.

        Args:
            loaded: State in the form of ``stored``: ShardedTensors of the same plan, or whole
                tensors.
            state: The state of the parameters here, for shapes.

        Raises:
            ValueError: The state was saved under another plan, or shapes differ.
        """
        by_parameter = {
            name: dict(value) for name, value in loaded.items() if name not in self._pieces
        }

        for name, own in self._pieces.items():
            for parameter, table, shard in own if name in loaded else ():
                current = state.get(parameter, {})
                by_parameter[parameter] = {
                    key: _piece_of(value, current[key], table, shard, f"{key!r} of {name!r}")
                    if key in current
                    else value
                    for key, value in loaded[name].items()
                }
        return by_parameter

    def _whole(
        self, own: Sequence[tuple[str, Table, TableShard]], parts: Sequence[torch.Tensor]
    ) -> Any:
        table = own[0][1]
        shards = [shard for _, _, shard in own]
        alone = self._env.process_group is None and self._env.world_size == 1

        if (
            parts[0].dim() == 0
            or table.sharding_type is ShardingType.DATA_PARALLEL
            or (alone and len(parts) == 1)
        ):
            return parts[0]
        others = [
            shard for shard in table.shards if shard.rank != self._env.rank or shard in shards
        ]
        size, rectangles = _rectangles(table, others, parts[0].dim())
        if not alone:
            return sharded_tensor(size, rectangles, parts, parts[0].dtype, self._env, self._device)

        state = parts[0].new_empty(size)
        for tensor, shard in zip(parts, shards, strict=True):
            _part_of(state, table, shard).copy_(tensor)
        return state


def _rectangles(
    table: Table, shards: Sequence[TableShard], dimensions: int
) -> tuple[tuple[int, ...], list[Rectangle]]:
    """Shape of a whole state, and its rectangles."""
    if dimensions > 1:
        return (table.rows, table.columns), rectangles_of(shards)
    return (len(table.slice_widths) * table.rows,), [
        ([table.first_row_state(shard)], [shard.rows], shard.rank) for shard in shards
    ]


def _part_of(whole: torch.Tensor, table: Table, shard: TableShard) -> torch.Tensor:
    """A shard's part of a whole state; a column-sharded table's [R] is used for each shard."""
    if whole.dim() == 1:
        first = shard.row_offset if len(whole) == table.rows else table.first_row_state(shard)
        return whole[first : first + shard.rows]
    return shard.view(whole)


def _piece_of(value: Any, here: Any, table: Table, shard: TableShard, what: str) -> Any:
    if not isinstance(value, torch.Tensor) or not isinstance(here, torch.Tensor) or here.dim() == 0:
        return value

    by_row = here.dim() == 1
    size = whole_size(value)
    rows = len(table.slice_widths) * table.rows
    if size not in ([(rows,), (table.rows,)] if by_row else [(table.rows, table.columns)]):
        expected = [rows] if by_row else [table.rows, table.columns]
        raise ValueError(
            f"optimizer state {what} is {expected} as a whole, and the loaded state is {list(size)}"
        )

    if not isinstance(value, ShardedTensor):
        return _part_of(value, table, shard)
    offsets = [table.first_row_state(shard)] if by_row else shard.offsets
    return local_shard(value, offsets, list(here.shape), f"optimizer state {what}")


__all__ = ["ShardedStates"]
