"""Indices of ids: the row of many ids at once, for managed collisions, growing and hash mappings.

An index is derived from the state of a mapping and is never saved. `IdIndex`, on the CPU, is a
cuckoo hash table in arrays. The indices of several tables share one array (`IdIndices`), so that
the ids of all tables are looked up in one call. On other devices sorted ids are searched.

The slots of a cuckoo table have two halves, and an id is in one slot of the first or of the second
half, which two hash functions choose. A lookup reads the first slot of each id, and the second slot
of the ids that are not in their first. An id that is inserted takes its slot from the id that is
there, which moves to the other half.

A hash function multiplies the id, whose bits have been mixed, by an odd factor, modulo 2**64. The
product determines the id. Its first bits are the number of the slot, so that a slot stores only the
remaining bits, followed by the row: 8 bytes. A table doubles its slots when its ids need more: slot
s becomes slots 2s and 2s + 1, and the next bit of an id selects one of them. numpy computes,
because it shifts and compares unsigned numbers; torch reads the slots, because its `index_select`
reads more at once.

Source:
    Pagh and Rodler, "Cuckoo hashing", 2004; the slots: Knuth, TAOCP, volume 3, exercise 6.4-13.
"""

# No import of annotations: TorchScript reads them from the functions.

import random
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutorec._kernels.memory import unwritten_zeros

# Insertion moves many ids in halves that are nearly full.
_LEAST_SLOTS_PER_ROW = 1.1
_FEWEST_BITS = 5
# Two halves, each of at most twice the least number of slots, 8 bytes each.
BYTES_PER_ID = 36
_FREE = 2**64 - 1
_SLOTS_PER_DOUBLING_STEP = 1 << 12
# Moves of an id, and pairs of hash functions, before insertion fails.
_MAX_MOVES = 100
_MAX_SEEDS = 16
# Fewer ids are inserted one by one; numpy would keep the memory of such small arrays.
_FEWEST_IDS_AT_ONCE = 128
# An odd number; Knuth's for a generator of random numbers.
_MIXER = 0x5851F42D4C957F2D

Unsigned: TypeAlias = NDArray[np.uint64]
Signed: TypeAlias = NDArray[np.int64]


def has_index(ids: Tensor) -> bool:
    """Whether ids on their device are looked up in an `IdIndex` instead of a sorted search."""
    return ids.is_cpu and not ids.is_inference() and not torch.compiler.is_compiling()


def search_sorted_ids(
    sorted_ids: Tensor, rows: Tensor, ids: Tensor, absent_row: int = -1
) -> Tensor:
    """The row of each id [N] by a binary search; TorchScript compiles it.

    Args:
        sorted_ids: Ids that have a row, rising [R], R > 0.
        rows: Their rows [R].
        ids: Ids that are looked up [N].
        absent_row: The row of an id that is not in ``sorted_ids``.

    Example:
        >>> search_sorted_ids(
        ...     torch.tensor([3, 10]), torch.tensor([1, 0]), torch.tensor([10, 4, 99])
        ... ).tolist()
        [0, -1, -1]
    """
    position = torch.searchsorted(sorted_ids[:-1], ids)
    return torch.where(sorted_ids[position] == ids, rows[position], absent_row)


class IdIndex:
    """The index of one table on the CPU: id -> row.

    Args:
        indices: The indices of all tables, which share their hash functions.
        slots: Room for those of this table, a power of two; few of them are used at first.

    Example:
        >>> [index] = IdIndices([9]).tables
        >>> index.fill(torch.tensor([10**12, -1]), torch.tensor([7, 8]))
        >>> index.find(torch.tensor([-1, 5, 10**12])).tolist()
        [8, -1, 7]
        >>> index.replace(torch.tensor([-1]), torch.tensor([5]), torch.tensor([8]))
        >>> index.find(torch.tensor([-1, 5, 10**12])).tolist()
        [-1, 8, 7]
    """

    def __init__(self, indices: "IdIndices", slots: Tensor) -> None:
        self._indices = indices
        self._slots = slots
        self._entries = _unsigned(slots)
        self._max_bits = len(slots).bit_length() - 2
        self.bits = _FEWEST_BITS
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return 16 << self.bits

    def fill(self, ids: Tensor, rows: Tensor) -> None:
        """Store these distinct ids [N] with their rows [N], and no others.

        Of ids with the same first slot the last one gets it.
        """
        self.bits = _FEWEST_BITS
        self.clear()
        self._add(ids, rows)

    def find(self, ids: Tensor, absent_row: int = -1) -> Tensor:
        """The row of each id [N], ``absent_row`` for an id that is not stored."""
        rows, absent = self._indices.look_up(self._slots, ids, 0, self.bits)
        rows[absent] = absent_row
        return torch.from_numpy(rows)

    def replace(self, removed: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Remove ids [L], and add other ids [N] with their rows [N]."""
        mixed = self._indices.mix(removed)
        for half, factor in enumerate(self._indices.factors):
            slot, remainder = _hash(mixed, factor, self.bits)
            slot += half << self.bits
            is_stored = (self._entries[slot] ^ remainder) >> self.bits == 0
            self._entries[slot[is_stored]] = _FREE
            self._count -= int(is_stored.sum())

        self._add(ids, rows)

    def clear(self) -> None:
        """Remove all ids."""
        self._count = 0
        self._entries[: 2 << self.bits].fill(_FREE)

    def stored(self) -> tuple[Unsigned, Unsigned]:
        """The mixed ids [N] and their rows [N]."""
        slot = np.flatnonzero(self._entries[: 2 << self.bits] != _FREE).view(np.uint64)
        return self._decode(slot, self._entries[slot])

    def insert(self, ids: Unsigned, rows: Unsigned) -> tuple[Unsigned, Unsigned]:
        """Insert mixed ids [N] with their rows [N]; returns those that got no slot, if any."""
        move = 0
        while len(ids) >= _FEWEST_IDS_AT_ONCE and move < _MAX_MOVES:
            half = move % 2
            slot, entries = _hash(ids, self._indices.factors[half], self.bits)
            slot += half << self.bits
            entries |= rows
            before = self._entries[slot]
            self._entries[slot] = entries

            # Of ids that wrote the same slot one has it; it and they move the id from before.
            lost = self._entries[slot] != entries
            is_moved = ~lost & (before != _FREE)
            moved_ids, moved_rows = self._decode(slot[is_moved], before[is_moved])
            ids = np.concatenate([ids[lost], moved_ids])
            rows = np.concatenate([rows[lost], moved_rows])
            move += 1

        unplaced: list[tuple[int, int]] = []
        for id, row in zip(ids.tolist(), rows.tolist(), strict=True):
            pair = self._insert_one(id, row)
            if pair is not None:
                unplaced.append(pair)

        pairs = np.array(unplaced, np.uint64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _insert_one(self, id: int, row: int) -> tuple[int, int] | None:
        """Insert one mixed id; returns the id that got no slot, if any, and its row."""
        bits = self.bits
        low_bits = (1 << bits) - 1
        for move in range(_MAX_MOVES):
            half = move % 2
            factor = self._indices.factors[half]
            product = id * factor & _FREE
            slot = (product >> 64 - bits) + (half << bits)
            before = int(self._entries[slot])
            self._entries[slot] = product << bits & _FREE | row
            if before == _FREE:
                return None

            product = before >> bits | (slot & low_bits) << 64 - bits
            id = product * _inverse(factor) & _FREE
            row = before & low_bits

        return id, row

    def _decode(self, slot: Unsigned, entries: Unsigned) -> tuple[Unsigned, Unsigned]:
        """The mixed ids [N] and rows [N] that are stored in these slots [N]."""
        low_bits = (1 << self.bits) - 1
        product = (entries >> self.bits) | (slot << (64 - self.bits))
        first, second = (product * _inverse(factor) for factor in self._indices.factors)
        return np.where(slot > low_bits, second, first), np.bitwise_and(entries, low_bits)

    def _add(self, ids: Tensor, rows: Tensor) -> None:
        """Insert ids [N] with their rows [N]; doubles the slots as often as needed."""
        self._count += len(ids)
        largest_row = int(rows.max()) if len(rows) else 0
        while self.bits < _bits_for(max(self._count, largest_row + 1)):
            self._double()

        unplaced = self.insert(self._indices.mix(ids), _unsigned(rows))
        while len(unplaced[0]) > 0:
            if self.bits == self._max_bits:
                self._indices.rehash(self, unplaced)
                break

            self._double()
            unplaced = self.insert(*unplaced)

    def _double(self) -> None:
        """Turn each slot into two, the last slots first."""
        row_bits = (1 << self.bits) - 1
        for first in reversed(range(0, 2 << self.bits, _SLOTS_PER_DOUBLING_STEP)):
            end = min(first + _SLOTS_PER_DOUBLING_STEP, 2 << self.bits)
            entries = self._entries[first:end].copy()
            slot = np.flatnonzero(entries != _FREE)
            self._entries[2 * first : 2 * end] = _FREE
            entries = entries[slot]
            rows = entries & row_bits
            slot = 2 * (first + slot) + (entries >> 63).view(np.int64)
            self._entries[slot] = (entries - rows << 1) | rows

        self.bits += 1


class IdIndices:
    """The indices of several tables on the CPU, one after the other in one array.

    Args:
        sizes: Rows of each table.
        absent_rows: The row of an absent id of each table; the last one by default.
        are_mixed: Whether the bits of ids have been mixed by the caller.

    Attributes:
        tables: The index of each table.
        factors: Those of the two hash functions.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        absent_rows: Sequence[int] | None = None,
        are_mixed: bool = False,
    ) -> None:
        widths = [2 << _bits_for(size) for size in sizes]
        self._seed = 0
        self.factors = _factors(0)
        self.mix = _unsigned if are_mixed else _mixed

        with torch.inference_mode(False):  # slots are written in other modes later
            self._slots = unwritten_zeros(sum(widths), torch.int64)

        self._first_slots = np.array([0, *accumulate(widths[:-1])], np.uint64)
        self._absent_rows = np.array(absent_rows or [size - 1 for size in sizes])
        self.tables = [IdIndex(self, slots) for slots in self._slots.split(widths)]

    def find(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The row of each id [N], its table's for absent ones; absent ids of each table.

        Args:
            ids: Ids [N], by table.
            counts: Number of the ids of each table.
        """
        table_bits = [table.bits for table in self.tables]
        first_slots = self._first_slots.repeat(counts)
        bits: Unsigned | int = table_bits[0]
        if len(set(table_bits)) > 1:
            bits = np.array(table_bits, np.uint64).repeat(counts)

        rows, absent = self.look_up(self._slots, ids, first_slots, bits)
        misses = np.diff(np.searchsorted(absent, [0, *accumulate(counts)]))
        rows[absent] = self._absent_rows.repeat(misses)
        return torch.from_numpy(rows), misses.tolist()

    def look_up(
        self, slots: Tensor, ids: Tensor, first_slots: Unsigned | int, bits: Unsigned | int
    ) -> tuple[Signed, Signed]:
        """The row of each id [N], any number if absent; the positions of absent ids, rising.

        Args:
            slots: Those of one table or of all.
            ids: Ids [N].
            first_slots: The first slot of each id's table [N], or of all.
            bits: Its halves have ``2 ** bits`` slots.
        """
        mixed = self.mix(ids)
        slot, remainder = _hash(mixed, self.factors[0], bits)
        slot += first_slots
        remainder ^= _read(slots, slot)

        # Only the row remains of an id that is stored there: less than 2 ** bits - 1. A free slot
        # leaves that or more, the slot of another id more.
        others = np.flatnonzero(remainder >= (1 << bits) - 1)
        first_slots = _select(first_slots, others)
        bits = _select(bits, others)
        slot, second = _hash(mixed[others], self.factors[1], bits)
        slot += first_slots
        slot += 1 << bits
        second ^= _read(slots, slot)
        remainder[others] = second

        return remainder.view(np.int64), others[np.flatnonzero(second >= (1 << bits) - 1)]

    def rehash(self, table: IdIndex, unplaced: tuple[Unsigned, Unsigned]) -> None:
        """Insert all ids again by other hash functions, since some ids of a table got no slot.

        Raises:
            RuntimeError: No functions give each id a slot: an id occurs more than twice in a table.
        """
        pairs = [index.stored() for index in self.tables]
        number = self.tables.index(table)
        ids, rows = pairs[number]
        pairs[number] = np.concatenate([ids, unplaced[0]]), np.concatenate([rows, unplaced[1]])

        for _ in range(_MAX_SEEDS):
            self._seed += 1
            self.factors = _factors(self._seed)
            for index in self.tables:
                index.clear()

            if self._insert_all(pairs):
                return

        raise RuntimeError(
            f"no slot for {len(unplaced[0])} ids in an index: each may be there once"
        )

    def _insert_all(self, pairs: Sequence[tuple[Unsigned, Unsigned]]) -> bool:
        """Insert the mixed ids and rows of each table; whether each id got a slot."""
        for index, (ids, rows) in zip(self.tables, pairs, strict=True):
            if len(index.insert(ids, rows)[0]) > 0:
                return False

        return True


def _bits_for(rows: int) -> int:
    """Bits of a slot number: so many that halves have slots enough for this many rows."""
    return max(_FEWEST_BITS, int(_LEAST_SLOTS_PER_ROW * rows).bit_length())


def _unsigned(numbers: Tensor) -> Unsigned:
    """The same numbers [N] in the same memory, unsigned."""
    return numbers.numpy().view(np.uint64)


def _read(slots: Tensor, slot: Unsigned) -> Unsigned:
    """The entries of these slots [N]."""
    return _unsigned(slots.index_select(0, torch.from_numpy(slot.view(np.int64))))


def _select(values: Unsigned | int, positions: Signed) -> Unsigned | int:
    """The values at these positions; a single number is the value at each position."""
    return values if isinstance(values, int) else values[positions]


def _factors(seed: int) -> tuple[int, int]:
    """Two odd factors."""
    draw = random.Random(seed)
    return draw.getrandbits(63) | 1, draw.getrandbits(63) | 1


@cache
def _inverse(factor: int) -> int:
    """The number that undoes a multiplication by an odd factor, modulo 2**64."""
    return pow(factor, -1, 1 << 64)


def _mixed(ids: Tensor) -> Unsigned:
    """Another number for each id [N], whose low bits depend on all bits of the id."""
    product = _unsigned(ids) * _MIXER
    product ^= product >> 32
    return product


def _hash(
    mixed: Unsigned, factor: Unsigned | int, bits: Unsigned | int
) -> tuple[Unsigned, Unsigned]:
    """The number of each id's slot [N], and its remaining bits, before the bits of a row [N]."""
    product = mixed * factor
    slot = np.right_shift(product, 64 - bits)
    product <<= bits
    return slot, product
