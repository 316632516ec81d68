"""An index from ids to rows for devices: a growing hash table with open addressing, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

# Slots for each row that has an id, at least, when slots are made; they are made anew when a third
# is filled.
_SLOTS_PER_ROW, _MOST_FILLED = 4, 3
_FEWEST_SLOTS = 64
_REBUILT_AT_ONCE = 1 << 14
# Slots that are read at once for an id that is not in its first slot.
_WINDOW = 8


class RowIndex:
    """Ids to rows: open addressing, linear probing (Knuth, TAOCP, volume 3, section 6.4).

    A slot holds the number of a row, and the row's id is compared with the id that is looked up. So
    a slot takes 4 bytes, and a row that is given to another id needs no deletion: its old slot
    compares unequal from then on. The bits of ids are mixed by the caller; the highest ones choose
    the first slot.

    Args:
        rows: R, of which the last never has an id: it stands for "no row".
        device: Where the slots live.

    Example:
        >>> index, ids = RowIndex(rows=8), torch.zeros(8, dtype=torch.int64)
        >>> ids[:2] = torch.tensor([5 << 60, -7])
        >>> index.add(torch.tensor([0, 1]), ids, held=2)
        >>> index.find(torch.tensor([-7, 3, 5 << 60]), ids).tolist()
        [1, 7, 0]
    """

    def __init__(self, rows: int, device: torch.device | None = None) -> None:
        self._no_row, self._filled = rows - 1, 0
        self.device = torch.device(device or "cpu")
        self._slots = self._empty(_FEWEST_SLOTS)

    @property
    def nbytes(self) -> int:
        """Bytes of the slots."""
        return self._slots.nbytes

    def find(self, values: Tensor, ids: Tensor) -> Tensor:
        """Row of each id [N], or R - 1.

        Args:
            values: Ids that are looked up [N].
            ids: Id of each row [R].
        """
        rows = torch.full_like(values, self._no_row)
        left, place = torch.arange(len(values), device=values.device), self._first_slot(values)
        ahead = torch.arange(_WINDOW, device=values.device)
        while len(left):
            near = self._slots[(place[:, None] + ahead) & (len(self._slots) - 1)]
            full = near != self._no_row
            hit = full & (ids[near] == values[left, None])
            rows[left[hit.nonzero()[:, 0]]] = near[hit].long()
            # an id that is not before an empty slot is not there: slots are never emptied
            further = full.all(1) & ~hit.any(1)
            left, place = left[further], place[further] + _WINDOW
        return rows

    def add(self, rows: Tensor, ids: Tensor, held: int) -> None:
        """Insert rows [U] by their ids, none of which is present; doubles slots when they fill.

        Args:
            rows: Different rows.
            ids: Id of each row [R].
            held: How many rows have an id, these included.
        """
        if _MOST_FILLED * (self._filled + rows.numel()) > self._slots.numel():
            self._rebuild(self._slots, ids, held)
        self._insert(rows.to(torch.int32), ids)

    def replace(self, rows: Tensor, ids: Tensor) -> None:
        """Forget everything, and make rows [U] known by their ids."""
        self._rebuild(rows.to(torch.int32), ids, rows.numel())

    def _rebuild(self, rows: Tensor, ids: Tensor, held: int) -> None:
        """Take rows [...] into new slots; duplicates once, "no row" not at all."""
        slots = max(_FEWEST_SLOTS, 1 << (_SLOTS_PER_ROW * held - 1).bit_length())
        self._slots, self._filled = self._empty(slots), 0
        for part in rows.split(_REBUILT_AT_ONCE):
            self._insert(part[part != self._no_row], ids)

    def _insert(self, rows: Tensor, ids: Tensor) -> None:
        """Put each row into the first empty slot from its id's own; ties take turns."""
        place = self._first_slot(ids[rows])
        while rows.numel():
            empty = self._slots[place] == self._no_row
            self._slots[place[empty]] = rows[empty]
            left = self._slots[place] != rows
            self._filled += int((empty & ~left).sum())
            rows, place = rows[left], (place[left] + 1) & (self._slots.numel() - 1)

    def _first_slot(self, values: Tensor) -> Tensor:
        slots = self._slots.numel()
        return (values >> (65 - slots.bit_length())).bitwise_and_(slots - 1)

    def _empty(self, slots: int) -> Tensor:
        return torch.full((slots,), self._no_row, dtype=torch.int32, device=self.device)
