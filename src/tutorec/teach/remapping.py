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
        return {
            row: identifier
            for row, identifier in self.before.items()
            if self.after.get(row) != identifier
        }

    @property
    def shared(self) -> int:
        """Ids of the batch that read the shared row."""
        return sum(row == self.size - 1 for row in self.rows)


def remapping(batches: Mapping[str, RemappedBatch], *, claim: str | None = None) -> Chart:
    """A panel for each batch: ids above, rows and their ids below, an arrow for each id.

    A filled id has a row of its own. A row with a thick frame was taken from another id.

    Args:
        batches: Title to what a batch did.
        claim: Title; may use {ids}, {shared} (ids that read the shared row) and {evicted}, of all
            batches.
    """
    all_batches = list(batches.values())
    diagram = Diagram(lines=_PANEL * len(batches))
    for position, (title, batch) in enumerate(batches.items()):
        _panel(diagram, _PANEL * position, title, batch)
    counts = {
        name: sum(len(getattr(batch, name)) for batch in all_batches) for name in ("ids", "evicted")
    }
    claim = (
        claim
        or "{shared} of {ids} ids read the shared row; {evicted} rows were taken from another id"
    )

    return diagram.chart(claim, shared=sum(batch.shared for batch in all_batches), **counts)


def _panel(diagram: Diagram, top: float, title: str, one: RemappedBatch) -> None:
    cell = min(8.0, (WIDTH - _LEFT) / max(len(one.ids), one.size))
    has_row = [row != one.size - 1 for row in one.rows]
    diagram.text(0, top + 0.6, title, bold=True)
    diagram.text(0, top + 2.2, "raw ids")
    diagram.text(0, top + 6.4, "id of the row")
    diagram.text(0, top + 8.0, "row")

    for position, (identifier, row, filled) in enumerate(
        zip(one.ids, one.rows, has_row, strict=True)
    ):
        drawn = diagram.strip(
            _LEFT + cell * position,
            top + 1.6,
            [identifier],
            rank=ACCENT if filled else None,
            cell=cell,
        )
        diagram.arrow(drawn.bottom, (_LEFT + cell * (row + 0.5), top + 5.8))

    names = [one.after.get(row, "") for row in range(one.size - 1)]
    diagram.strip(_LEFT, top + 5.8, [*names, "all others"], marked=[*one.evicted], cell=cell)
    for row in range(one.size):
        was = (
            f"was {one.evicted[row]}"
            if row in one.evicted
            else "shared"
            if row == one.size - 1
            else ""
        )
        diagram.text(_LEFT + cell * (row + 0.5), top + 8.0, str(row), align="center")
        diagram.text(_LEFT + cell * (row + 0.5), top + 9.0, was, align="center")


def _held(mapping: MCHManagedCollisionModule) -> dict[int, int]:
    """Row -> the id that has it."""
    pairs = zip(
        mapping._mch_remapped_ids_mapping.tolist(),
        mapping._mch_sorted_raw_ids.tolist(),
        strict=True,
    )
    return {
        row: identifier for row, identifier in pairs if identifier != torch.iinfo(torch.int64).max
    }
