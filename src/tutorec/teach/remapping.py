"""One batch of a managed collision mapping: raw ids, rows read, rows reassigned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tutorec.modules.mc_modules import MCHManagedCollisionModule
from tutorec.sparse.jagged import JaggedTensor
from tutorec.teach.canvas import ACCENT, Chart
from tutorec.teach.diagram import WIDTH, Diagram

__all__ = ["RemappedBatch", "remapping"]

_LEFT = 13.0
_PANEL = 11.0


@dataclass(frozen=True)
class RemappedBatch:
    """What a forward in training mode with these ids does to a mapping; :meth:`of` runs it.

    Attributes:
        ids: Of the batch.
        rows: The row that each of them reads.
        size: R, the shared row included.
        before: Row -> the id that has it, before the batch.
        after: The same after it.
    """

    ids: Sequence[int]
    rows: Sequence[int]
    size: int
    before: Mapping[int, int]
    after: Mapping[int, int]

    @classmethod
    def of(cls, mapping: MCHManagedCollisionModule, ids: Sequence[int]) -> RemappedBatch:
        """Remap the ids, and note who has which row."""
        before = _held(mapping)
        values = torch.tensor(ids, device=mapping.device)
        lists = JaggedTensor(values, lengths=torch.tensor([len(ids)], device=mapping.device))
        rows = mapping({"": lists})[""].values().tolist()
        return cls(ids, rows, mapping.output_size(), before, _held(mapping))

    @property
    def evicted(self) -> Mapping[int, int]:
        """Row -> the id that lost it."""
        return {row: old for row, old in self.before.items() if self.after.get(row) != old}

    @property
    def shared(self) -> int:
        """Ids of the batch that read the shared row."""
        return self.rows.count(self.size - 1)


def remapping(batches: Mapping[str, RemappedBatch], *, claim: str) -> Chart:
    """A panel for each batch: ids above, rows and their ids below, an arrow for each id.

    A filled id has a row of its own. A row with a thick frame was taken from another id.

    Args:
        batches: Title to what a batch did.
        claim: Title; may use {ids}, {shared} (ids that read the shared row) and {evicted}, of all
            batches.
    """
    diagram = Diagram(lines=_PANEL * len(batches))
    for position, (title, batch) in enumerate(batches.items()):
        _panel(diagram, _PANEL * position, title, batch)
    return diagram.chart(
        claim,
        ids=sum(len(batch.ids) for batch in batches.values()),
        shared=sum(batch.shared for batch in batches.values()),
        evicted=sum(len(batch.evicted) for batch in batches.values()),
    )


def _panel(diagram: Diagram, top: float, title: str, batch: RemappedBatch) -> None:
    shared = batch.size - 1
    cell = min(8.0, (WIDTH - _LEFT) / max(len(batch.ids), batch.size))
    diagram.text(0, top + 0.6, title, bold=True)
    for name, y in {"raw ids": 2.2, "id of the row": 6.4, "row": 8.0}.items():
        diagram.text(0, top + y, name)

    names = [batch.after.get(row, "") for row in range(shared)]
    cells = [*names, "all others"]
    diagram.strip(_LEFT, top + 5.8, cells, marked=batch.evicted.keys(), cell=cell)
    notes = {row: f"was {old}" for row, old in batch.evicted.items()} | {shared: "shared"}
    for row in range(batch.size):
        x = _LEFT + cell * (row + 0.5)
        diagram.text(x, top + 8.0, str(row), align="center")
        diagram.text(x, top + 9.0, notes.get(row, ""), align="center")

    for position, (identifier, row) in enumerate(zip(batch.ids, batch.rows, strict=True)):
        rank = None if row == shared else ACCENT
        x = _LEFT + cell * position
        node = diagram.strip(x, top + 1.6, [identifier], rank=rank, cell=cell)
        diagram.arrow(node.bottom, (_LEFT + cell * (row + 0.5), top + 5.8))


def _held(mapping: MCHManagedCollisionModule) -> dict[int, int]:
    """Row -> the id that has it."""
    rows = mapping._mch_remapped_ids_mapping.tolist()
    ids = mapping._mch_sorted_raw_ids.tolist()
    empty = torch.iinfo(torch.int64).max
    return {row: old for row, old in zip(rows, ids, strict=True) if old != empty}
