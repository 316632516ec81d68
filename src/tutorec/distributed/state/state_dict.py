"""Saved state of sharded modules: weights and optimizer states, each table once, as a whole.

A table has its unsharded name, and is a `ShardedTensor` [R, D], which knows the shape of the whole
table and the rectangle of each rank: every rank's state dict names every table. Replicated tables,
and tables without a process group, are plain tensors.

An optimizer state of the table's shape is a `ShardedTensor` [R, D], too. A row-wise state is [R],
or [S * R] for a table with S column shards, each of which has its own values, in shard order. Step
counts are plain tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata

from tutorec._loaded import value_problem
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.tables import LocalShards, Table
from tutorec.distributed.plan.geometry import TableShard, placement
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.state.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)

# A part of a tensor: its offsets, its sizes, the rank that holds it.
Rectangle = tuple[list[int], list[int], int]


def sharded_state(
    tables: Sequence[Table],
    local: Mapping[str, Sequence[torch.Tensor]],
    env: ShardingEnv,
    device: torch.device,
) -> dict[str, ShardedTensor | torch.Tensor]:
    """Table name -> the whole table as a `ShardedTensor`; a replicated table is a plain tensor.

    Nothing is sent: the plan has all metadata. In a world of 1 without a process group all tables
    are plain tensors; one with several shards is concatenated, which copies it.

    Args:
        tables: Every table, including those of other ranks.
        local: Table name -> rows of each shard on this rank, in the order of
            ``Table.shards``. The state shares their memory.
        env: The ranks; several ranks need a process group.
        device: Device of the tables.
    """
    state: dict[str, ShardedTensor | torch.Tensor] = {}

    for table in tables:
        shards = local.get(table.name, ())
        replicated = table.sharding_type is ShardingType.DATA_PARALLEL
        if env.process_group is None and env.world_size == 1 and len(shards) > 1:
            state[table.name] = _put_together(table, shards)
        elif not replicated and (env.process_group is not None or env.world_size > 1):
            state[table.name] = sharded_tensor(
                (table.rows, table.columns),
                rectangles_of(table.shards),
                shards,
                table.dtype,
                env,
                device,
            )
        elif shards:
            state[table.name] = shards[0]
    return state


def local_state(
    tables: Sequence[Table], loaded: Mapping[str, Any], rank: int
) -> dict[str, list[torch.Tensor]]:
    """This rank's part of a loaded state: table name -> rows of each of its shards, in order.

    Args:
        tables: Every table.
        loaded: Table name -> `ShardedTensor`, or the whole table as a plain tensor, the form of
            unsharded modules and replicated tables.
        rank: This rank.

    Raises:
        TypeError: A loaded value is not a tensor.
        ValueError: Shapes differ, a conversion to the table's dtype would change numbers, or the
            state was saved under another plan.
    """
    state: dict[str, list[torch.Tensor]] = {}
    for table in tables:
        value = loaded.get(table.name)
        if value is None:
            continue
        if not isinstance(value, ShardedTensor | torch.Tensor):
            raise TypeError(
                f"table {table.name!r}: the loaded value is a {type(value).__name__}, not a tensor"
            )

        size = list(whole_size(value))
        if size != [table.rows, table.columns]:
            raise ValueError(
                f"table {table.name!r} is [{table.rows}, {table.columns}], and the loaded "
                f"table is {size}"
            )

        subject = f"table {table.name!r}"
        own_shards = [shard for shard in table.shards if shard.rank == rank]
        shards = [
            local_shard(value, shard.offsets, shard.sizes, subject)
            if isinstance(value, ShardedTensor)
            else shard.view(value)
            for shard in own_shards
        ]

        for rows in shards:
            problem = value_problem(subject, table.dtype, rows)
            if problem is not None:
                raise ValueError(problem)
        if own_shards:
            state[table.name] = shards
    return state


def whole_size(value: ShardedTensor | torch.Tensor) -> tuple[int, ...]:
    """Shape of a whole tensor."""
    # Not size(), which goes through ShardedTensor's dispatch and warns at each call.
    return tuple(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)


def rectangles_of(shards: Sequence[TableShard]) -> list[Rectangle]:
    """The rectangles of a table's shards."""
    return [(shard.offsets, shard.sizes, shard.rank) for shard in shards]


def sharded_tensor(
    size: Sequence[int],
    rectangles: Sequence[Rectangle],
    local: Sequence[torch.Tensor],
    dtype: torch.dtype,
    env: ShardingEnv,
    device: torch.device,
) -> ShardedTensor:
    """Build a ShardedTensor from this rank's shards, without communication or copy.

    Args:
        size: Shape of the whole tensor.
        rectangles: How it is divided over the ranks.
        local: This rank's shards, in order.
        dtype: Its dtype.
        env: The ranks.
        device: Device recorded for the shards of other ranks.

    Raises:
        ValueError: The number of shards is wrong, or there are several ranks and no process group.
    """
    group = env.group_for("a state dict")
    # torch uses global ranks, even if the tables are on some of the ranks only.
    ranks = range(env.world_size) if group is None else dist.get_process_group_ranks(group)
    # Ranks that share a device, as in tests on one GPU, are not where counting by host puts them.
    own_placement = f"rank:{ranks[env.rank]}/{local[0].device}" if local else ""

    shards = [
        ShardMetadata(
            offsets,
            sizes,
            own_placement
            if own_placement and rank == env.rank
            else placement(ranks[rank], device.type, env.local_size),
        )
        for offsets, sizes, rank in rectangles
    ]
    own_metadata = [
        shard for shard, (*_, rank) in zip(shards, rectangles, strict=True) if rank == env.rank
    ]
    if local and len(local) != len(own_metadata):
        raise ValueError(
            f"{len(local)} tensors for this rank's {len(own_metadata)} shards in {rectangles}"
        )

    metadata = ShardedTensorMetadata(
        shards_metadata=shards,
        size=torch.Size(size),
        tensor_properties=TensorProperties(dtype=dtype),
    )
    contiguous = [
        rows
        if rows.is_contiguous()
        else torch.empty_like(rows, memory_format=torch.contiguous_format)
        for rows in local
    ]
    own_shards = [Shard(rows, shard) for rows, shard in zip(contiguous, own_metadata, strict=False)]

    with warnings.catch_warnings():
        # torch recommends DTensor, which cannot represent a table that is whole on one rank.
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
            own_shards, metadata, process_group=group
        )

    # ShardedTensor accepts contiguous rows only. Rows of a padded table are not contiguous, and a
    # copy would lose what is written to it, as torch.distributed.checkpoint does when it loads in
    # place.
    for shard, rows in zip(tensor.local_shards(), local, strict=False):
        shard.tensor = rows
    return tensor


def _put_together(table: Table, held: Sequence[torch.Tensor]) -> torch.Tensor:
    table_rows = held[0].new_empty(table.rows, table.columns)
    for rows, shard in zip(held, table.shards, strict=True):
        shard.view(table_rows).copy_(rows)
    return table_rows


def local_shard(
    value: ShardedTensor, offsets: Sequence[int], sizes: Sequence[int], what: str
) -> torch.Tensor:
    """Return this rank's shard of a ShardedTensor.

    Args:
        value: The ShardedTensor.
        offsets: Offset of the shard.
        sizes: Size of the shard.
        what: Its name, for the message.

    Raises:
        ValueError: This rank does not have that shard.
    """
    expected = (list(offsets), list(sizes))
    shards = []
    for shard in value.local_shards():
        shards.append((shard.metadata.shard_offsets, shard.metadata.shard_sizes))
        if shards[-1] == expected:
            return shard.tensor
    raise ValueError(
        f"{what}: this rank holds the shard at {expected[0]} of size {expected[1]}, and the loaded "
        f"tensor has shards (offsets, sizes) {shards} here: it was saved under another plan; load "
        "it under that plan, or save and load with tutorec.distributed.checkpoint"
    )


def register_state_hooks(module: nn.Module) -> None:
    """Register the hooks by which a sharded module saves and loads each table whole."""
    module.register_state_dict_post_hook(_store_sharded)
    module.register_load_state_dict_pre_hook(_load_sharded)


def copy_when_loading(table: nn.Module) -> None:
    """Make loading copy the rows of a table, even with ``assign=True``.

    Operators read the rows from their own memory and would not use a new tensor.
    """
    table.register_load_state_dict_pre_hook(_copy_in)


def keep_parameters(table: nn.Module, name: str) -> None:
    """Refuse other parameters in the place of those of a table, which operators would not use.

    Args:
        table: The module with the parameters of a table.
        name: Name of the table.
    """
    table._parameters = _OwnParameters(name, table._parameters)


class _OwnParameters(dict[str, nn.Parameter | None]):
    """The parameters of a sharded table, which ``torch.func.functional_call`` cannot exchange."""

    def __init__(self, table: str, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self._table = table

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._table, dict(self))

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        if self.get(name, value) is not value:
            raise ValueError(
                f"{name!r} of the sharded table {self._table!r} cannot be exchanged: lookups read "
                "the memory of the parameter that it has, and would ignore another one, also that "
                "of torch.func.functional_call; copy the rows into it, parameter.copy_(rows), or "
                "call the unsharded collection"
            )
        super().__setitem__(name, value)


def _local_keys(module: Any, state_dict: Mapping[str, Any], prefix: str, table: Table) -> list[str]:
    """State dict keys of this rank's shards of a table, in plan order."""
    stem = f"{prefix}{module._tables_path}.{table.name}.weight"
    shards = sum(shard.rank == module._env.rank for shard in table.shards)
    names = [stem, *(f"{stem}_{index}" for index in range(1, shards))]
    return [name for name in names if name in state_dict]


def _store_sharded(
    module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Save hook: every table as a ShardedTensor, or as a tensor without a process group."""
    module.flush()
    if module._env.process_group is None and module._env.world_size > 1:
        return

    local = {
        table.name: [state_dict.pop(key) for key in _local_keys(module, state_dict, prefix, table)]
        for table in module._tables
    }
    for name, value in sharded_state(module._tables, local, module._env, module._device).items():
        state_dict[f"{prefix}{module._tables_path}.{name}.weight"] = value


def _copy_in(
    module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    local_metadata["assign_to_params_buffers"] = False


def _load_sharded(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load hook: reduce the state dict to this rank's shards."""
    module.flush()
    stem = f"{prefix}{module._tables_path}."
    keys = {table.name: f"{stem}{table.name}.weight" for table in module._tables}
    loaded = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
    for name, shards in local_state(module._tables, loaded, module._env.rank).items():
        for index, rows in enumerate(shards):
            state_dict[keys[name] if index == 0 else f"{keys[name]}_{index}"] = rows


class ShardedStates:
    """Converts the states of one operator's tables to and from their saved form.

    Args:
        tables: The tables of the collection, with this rank's shards; tables of other operators are
            ignored.
        names: Parameters of the operator: the table's name, with ``_1``, ``_2`` and so on for
            further shards here.
        env: The ranks.
        device: Device of the tables.
    """

    def __init__(
        self,
        tables: Sequence[LocalShards],
        names: Sequence[str],
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        self._env = env
        self._device = device

        self._own_shards: dict[str, list[tuple[str, Table, TableShard]]] = {}
        for table in tables:
            for index, shard in enumerate(table.shards):
                name = f"{table.name}_{index}" if index else table.name
                if name in names:
                    # A table with shards in two operators, which have different widths, is saved by
                    # each of them separately.
                    first = next(
                        (
                            known
                            for known, own in self._own_shards.items()
                            if own[0][1] is table.table
                        ),
                        name,
                    )
                    self._own_shards.setdefault(first, []).append((name, table.table, shard))

    def stored(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """State by parameter -> state by table; tensors are live views if they are contiguous."""
        by_table: dict[str, dict[str, Any]] = {}
        for name, own in self._own_shards.items():
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
            name: dict(value) for name, value in loaded.items() if name not in self._own_shards
        }

        for name, own in self._own_shards.items():
            for parameter, table, shard in own if name in loaded else ():
                current = state.get(parameter, {})
                by_parameter[parameter] = {
                    key: _loaded_part(value, current[key], table, shard, f"{key!r} of {name!r}")
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


def _loaded_part(value: Any, here: Any, table: Table, shard: TableShard, what: str) -> Any:
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
