"""An index from ids to rows: a growing hash table with open addressing, in tensors."""

from __future__ import annotations

from collections.abc import Sequence

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
        return find_in_indices([(self, ids)], values, [len(values)])

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


def find_in_indices(
    indices: Sequence[tuple[RowIndex, Tensor]], values: Tensor, counts: Sequence[int]
) -> Tensor:
    """Row of each id [N] in the index of its table, or R - 1.

    Slots and ids are read table by table, and all else is computed for all tables at once.

    Args:
        indices: Each table's index, and the id of each row [R].
        values: Ids that are looked up [N], by table.
        counts: Number of the ids of each table.
    """
    slots = [vars(index)["_buffers"]["_slots"] for index, _ in indices]
    of_rows, sizes = [ids for _, ids in indices], [each.numel() for each in slots]
    repeats = torch.tensor(counts, device=values.device)

    def of_ids(numbers: list[int]) -> Tensor | int:
        if len({*numbers}) == 1:
            return numbers[0]
        return repeats.new_tensor(numbers).repeat_interleave(repeats, output_size=len(values))

    shift, mask = (
        of_ids([65 - each.bit_length() for each in sizes]),
        of_ids([each - 1 for each in sizes]),
    )
    place = (values >> shift) & mask
    near = _read(slots, place, counts)
    left = (_read(of_rows, near, counts) != values).nonzero().view(-1)
    rows, table = near.long(), torch.searchsorted(repeats.cumsum(0), left, right=True)
    no_row = repeats.new_tensor([index._no_row for index, _ in indices])
    masks = repeats.new_tensor(sizes) - 1
    # an id that is not before an empty slot is not there: slots are never emptied
    further = rows[left] != no_row[table]
    left, table = left[further], table[further]
    rows[left], place = no_row[table], place[left] + 1
    ahead = torch.arange(_WINDOW, device=values.device)
    while len(left):
        window = (place[:, None] + ahead) & masks[table, None]
        near = _read(slots, window.view(-1), _by_table(table.repeat_interleave(_WINDOW), slots))
        full = near.view_as(window) != no_row[table, None]
        of_left, near = full.nonzero()[:, 0], near[full.view(-1)]
        at = left[of_left]
        hit = _read(of_rows, near, _by_table(table[of_left], slots)) == values[at]
        rows[at[hit]] = near[hit].long()
        further = full.all(1)
        further[of_left[hit]] = False
        left, table, place = left[further], table[further], place[further] + _WINDOW
    return rows


def _by_table(table: Tensor, tables: Sequence[Tensor]) -> list[int]:
    return table.bincount(minlength=len(tables)).tolist()


def _read(tensors: Sequence[Tensor], at: Tensor, counts: Sequence[int]) -> Tensor:
    """The entries [N] of the tensor of each table, which has so many of them."""
    parts = zip(tensors, at.split(list(counts)), strict=True)
    return torch.cat([one.index_select(0, part) for one, part in parts])
