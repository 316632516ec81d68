"""An index from ids to rows: a growing hash table with open addressing, in tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutorec._kernels.unwritten import unwritten_zeros

# Slots for each row that has an id, at least, when slots are made; they are made anew when a third
# is filled.
_SLOTS_PER_ROW, _MOST_FILLED = 4, 3
MOST_BYTES_PER_ROW = 2 * 4 * _SLOTS_PER_ROW  # slots of 4 bytes, a power of two of them
_FEWEST_SLOTS = 64
_REBUILT_AT_ONCE = 1 << 14
# Slots that are read at once for an id that is not in its first slot.
_WINDOW = 8


class RowIndex(nn.Module):
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

    _slots: Tensor

    def __init__(self, rows: int, device: torch.device | None = None) -> None:
        super().__init__()
        self._no_row = rows - 1
        self._filled = 0
        self.register_buffer("_slots", self._empty(_FEWEST_SLOTS, device), persistent=False)

    def find(self, values: Tensor, ids: Tensor) -> Tensor:
        """Row of each id [N], or R - 1.

        Args:
            values: Ids that are looked up [N].
            ids: Id of each row [R].
        """
        place = self._first_slot(values)
        rows = self._slots.index_select(0, place)
        left = (ids.index_select(0, rows) != values).nonzero().view(-1)
        rows = rows.long()
        if left.numel():
            further = self._find_further(
                place.index_select(0, left), values.index_select(0, left), ids
            )
            rows.index_copy_(0, left, further)
        return rows

    def _find_further(self, place: Tensor, values: Tensor, ids: Tensor) -> Tensor:
        """Row of each id [N], or R - 1, from its first slot on."""
        rows = torch.full_like(values, self._no_row)
        which = torch.arange(len(values), device=values.device)
        ahead = torch.arange(_WINDOW, device=values.device)
        while True:
            slots = (place.unsqueeze(1) + ahead).bitwise_and_(self._slots.numel() - 1)
            near = self._slots.index_select(0, slots.view(-1))
            hits = (ids.index_select(0, near).view_as(slots) == values.unsqueeze(1)).view(-1)
            hits = hits.logical_and_(near != self._no_row).nonzero().view(-1)
            at = hits.div(_WINDOW, rounding_mode="floor")
            rows.index_copy_(0, which.index_select(0, at), near.index_select(0, hits).long())
            left = torch.ones_like(values, dtype=torch.bool).index_fill_(0, at, False)
            # an id that is not before an empty slot is not there: slots are never emptied
            if left.any():
                left &= (near != self._no_row).view_as(slots).all(1)
            left = left.nonzero().view(-1)
            if not len(left):
                return rows
            place, values, which = (each.index_select(0, left) for each in (place, values, which))
            place = place + _WINDOW

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
        self._slots, self._filled = self._empty(slots, self._slots.device), 0
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

    def _empty(self, slots: int, device: torch.device | None) -> Tensor:
        # Not from torch's allocator, which would keep the memory of slots that were doubled.
        return unwritten_zeros(slots, torch.int32, device or "cpu").fill_(self._no_row)
