"""Mappings of raw ids in a checkpoint: by row, as the tables, so that any plan can cut them.

What a mapping keeps for each row is stored in the order of the rows, the state of a sharded mapping
as that of an unsharded one. Which row has which id is then the place of the id, and what a rank
loads are the ids of its rows. Those that it does not own under its plan are moved afterwards
(`mc_resharding`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tutorec.distributed.checkpoint.entries import Entry, Form, Part
from tutorec.distributed.mc_modules import ShardedManagedCollisionCollection, TableMapping
from tutorec.distributed.plan.geometry import ShardPiece
from tutorec.modules.mc_base import ManagedCollisionModule

# What holds the state, or None on a rank without rows; a copy of the state by the module's names;
# the same copies, which are stored, or filled by a load, by their names in the model.
StoredMapping = tuple[ManagedCollisionModule | None, dict[str, torch.Tensor], dict[str, Entry]]


def stored_mappings(
    prefix: str, part: ShardedManagedCollisionCollection | ManagedCollisionModule
) -> Iterator[StoredMapping]:
    """The mappings of a sharded collection, or the one that an unsharded module is.

    Args:
        prefix: Path of the part, and a dot.
        part: The part.
    """
    if isinstance(part, ManagedCollisionModule):
        state = part.state_by_row()
        paths = {f"{prefix}{name}": Part(value) for name, value in state.items()}
        entries = {
            path: Entry(("model", path), Form.WHOLE, (value,)) for path, value in paths.items()
        }
        yield part, state, entries
        return
    for mapping in part.mappings:
        yield _of_table(
            f"{prefix}_managed_collision_modules.{mapping.table.name}.", mapping, part.rank
        )


def _of_table(prefix: str, mapping: TableMapping, rank: int) -> StoredMapping:
    pieces = [piece for piece in mapping.table.pieces if piece.rows]
    table = replace(mapping.table, pieces=tuple(pieces))
    # A rank without rows has shapes, too, which all ranks compare.
    mine = next(
        (piece for piece in pieces if piece.rank == rank), ShardPiece(rank, 0, 0, 0, table.columns)
    )
    state = mapping.held.state_by_row() if mapping.held is not None else {}
    entries: dict[str, Entry] = {}
    for name, whole in mapping.whole.state_by_row().items():
        once = name in mapping.whole.once_per_table
        value = state.get(name)
        if value is None:
            shape = whole.shape if once else (0, *whole.shape[1:])
            value = torch.zeros(shape, dtype=whole.dtype)
        form = Form.WHOLE if once else Form.ROWS
        part = Part(value) if once else Part(value, mine)
        entries[f"{prefix}{name}"] = Entry(("model", f"{prefix}{name}"), form, (part,), table)
    return mapping.held, state, entries
