"""Indices of ids: cuckoo hash tables in arrays, in which many ids are looked up at once.

The slots of a table have two halves, and an id is in one slot of the first or of the second half,
which two hash functions choose. A lookup reads the first slot of each id, and the second slot of
the ids that are not in their first. An id that is inserted takes its slot from the id that is
there, which moves to the other half.

A hash function multiplies the id, whose bits have been mixed, by an odd factor, modulo 2**64. The
product determines the id. Its first bits are the number of the slot, so that a slot holds only the
others, and the row in the place of the first: 8 bytes. A table doubles its slots when its ids need
more: slot s becomes slots 2s and 2s + 1, and the next bit of an id says which of them is its own.
numpy computes, because it shifts and compares unsigned numbers; torch reads the slots, because its
`index_select` reads more at once.

Source:
    Pagh and Rodler, "Cuckoo hashing", 2004; the slots: Knuth, TAOCP, volume 3, exercise 6.4-13.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tutorec._kernels.unwritten import unwritten_zeros

# Insertion moves many ids in halves that are nearly full.
_LEAST_SLOTS_PER_ROW = 1.1
_FEWEST_BITS = 5
BYTES_PER_ID = 36  # two halves, each of at most twice the least number of slots, 8 bytes each
_FREE = 2**64 - 1
_DOUBLED_AT_ONCE = 1 << 12
_ROUNDS = 100
_SEEDS = 16
_MANY = 128  # fewer ids are inserted one by one; numpy would keep the memory of such small arrays
_MIXER = 0x5851F42D4C957F2D  # an odd number; Knuth's for a generator of random numbers

Words: TypeAlias = NDArray[np.uint64]
Rows: TypeAlias = NDArray[np.int64]


def has_index(ids: Tensor) -> bool:
    """Whether ids on their device are looked up in an index instead of a sorted search."""
    return ids.is_cpu and not ids.is_inference() and not torch.compiler.is_compiling()


class IdIndex:
    """The index of one table: id -> row.

    Args:
        indices: The indices of all tables, which share their hash functions.
        slots: Room for those of this table, a power of two; they begin as few.

    Example:
        >>> import torch
        >>> [index] = IdIndices([9]).tables
        >>> index.fill(torch.tensor([10**12, -1]), torch.tensor([7, 8]))
        >>> index.find(torch.tensor([-1, 5, 10**12])).tolist()
        [8, -1, 7]
        >>> index.replace(torch.tensor([-1]), torch.tensor([5]), torch.tensor([8]))
        >>> index.find(torch.tensor([-1, 5, 10**12])).tolist()
        [-1, 8, 7]
    """

    def __init__(self, indices: IdIndices, slots: Tensor) -> None:
        self._indices = indices
        self._slots = slots
        self._words = _words(slots)
        self._most_bits = len(slots).bit_length() - 2
        self.bits = _FEWEST_BITS
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in use."""
        return 16 << self.bits

    def fill(self, ids: Tensor, rows: Tensor) -> None:
        """Hold these distinct ids [N] with their rows [N], and no others.

        Of ids with the same first slot the last one gets it.
        """
        self.bits = _FEWEST_BITS
        self.clear()
        self._put(ids, rows)

    def find(self, ids: Tensor, otherwise: int = -1) -> Tensor:
        """The row of each id [N], another number for an id that is not there."""
        rows, absent = self._indices.look_up(self._slots, ids, 0, self.bits)
        rows[absent] = otherwise
        return torch.from_numpy(rows)

    def replace(self, left: Tensor, came: Tensor, rows: Tensor) -> None:
        """Remove ids [L], and add others [N] with their rows [N]."""
        mixed = self._indices.mixed(left)
        for half, factor in enumerate(self._indices.factors):
            place, rest = _hash(mixed, factor, self.bits)
            place += half << self.bits
            is_there = (self._words[place] ^ rest) >> self.bits == 0
            self._words[place[is_there]] = _FREE
            self._held -= int(is_there.sum())

        self._put(came, rows)

    def clear(self) -> None:
        """Remove all ids."""
        self._held = 0
        self._words[: 2 << self.bits].fill(_FREE)

    def held(self) -> tuple[Words, Words]:
        """The mixed ids [N] and their rows [N]."""
        place = np.flatnonzero(self._words[: 2 << self.bits] != _FREE).view(np.uint64)
        return self._ids_of(place, self._words[place])

    def place(self, ids: Words, rows: Words) -> tuple[Words, Words]:
        """Insert mixed ids [N] with their rows [N]; returns those that found no slot, if any."""
        step = 0
        while len(ids) >= _MANY and step < _ROUNDS:
            place, words = _hash(ids, self._indices.factors[step % 2], self.bits)
            place += step % 2 << self.bits
            words |= rows
            before = self._words[place]
            self._words[place] = words
            lost = self._words[place] != words
            moves = ~lost & (before != _FREE)
            moved, rows_moved = self._ids_of(place[moves], before[moves])
            ids = np.concatenate([ids[lost], moved])
            rows = np.concatenate([rows[lost], rows_moved])
            step += 1

        left = [self._walk(*pair) for pair in zip(ids.tolist(), rows.tolist(), strict=True)]
        pairs = np.array([pair for pair in left if pair], np.uint64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def _walk(self, id: int, row: int) -> tuple[int, int] | None:
        """Insert one mixed id; returns the one that found no slot, if any, and its row."""
        bits = self.bits
        low = (1 << self.bits) - 1
        for step in range(_ROUNDS):
            product = id * self._indices.factors[step % 2] & _FREE
            place = (product >> 64 - bits) + (step % 2 << bits)
            before = int(self._words[place])
            self._words[place] = product << bits & _FREE | row
            if before == _FREE:
                return None

            product = before >> bits | (place & low) << 64 - bits
            id = product * _undone(self._indices.factors[step % 2]) & _FREE
            row = before & low

        return id, row

    def _ids_of(self, place: Words, held: Words) -> tuple[Words, Words]:
        """The mixed ids [N] and rows [N] that these slots [N] hold."""
        bits = self.bits
        low = (1 << self.bits) - 1
        product = (held >> bits) | (place << (64 - bits))
        first, second = (product * _undone(factor) for factor in self._indices.factors)
        return np.where(place > low, second, first), np.bitwise_and(held, low)

    def _put(self, ids: Tensor, rows: Tensor) -> None:
        self._held += len(ids)
        left = (self._indices.mixed(ids), _words(rows))
        last = rows.max() if len(rows) else 0
        while self.bits < _bits_for(max(self._held, int(last) + 1)):
            self._double()

        while len((left := self.place(*left))[0]):
            if self.bits == self._most_bits:
                self._indices.rehash(self, left)
                break

            self._double()

    def _double(self) -> None:
        """Make two slots of each, the last ones first."""
        mask = (1 << self.bits) - 1
        for first in reversed(range(0, 2 << self.bits, _DOUBLED_AT_ONCE)):
            words = self._words[first : min(first + _DOUBLED_AT_ONCE, 2 << self.bits)].copy()
            place = np.flatnonzero(words != _FREE)
            self._words[2 * first : 2 * (first + len(words))] = _FREE
            words = words[place]
            rows = words & mask
            place = 2 * (first + place) + (words >> 63).view(np.int64)
            self._words[place] = (words - rows << 1) | rows

        self.bits += 1


class IdIndices:
    """The indices of several tables, side by side in one array.

    Args:
        sizes: Rows of each table.
        otherwise: The row of an absent id of each table; the last one by default.
        are_mixed: Whether the bits of ids have been mixed by the caller.

    Attributes:
        tables: The index of each table.
        factors: Of the two hash functions.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        otherwise: Sequence[int] | None = None,
        are_mixed: bool = False,
    ) -> None:
        widths = [2 << _bits_for(size) for size in sizes]
        self._seed = 0
        self.factors = _factors(0)
        self.mixed = _words if are_mixed else _mixed

        with torch.inference_mode(False):  # slots are written in other modes later
            self._slots = unwritten_zeros(sum(widths), torch.int64)

        self._firsts = np.array([0, *accumulate(widths[:-1])], np.uint64)
        self._otherwise = np.array(otherwise or [size - 1 for size in sizes])
        self.tables = [IdIndex(self, slots) for slots in self._slots.split(widths)]

    def find(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The row of each id [N], its table's for absent ones; absent ids of each table.

        Args:
            ids: Ids [N], by table.
            counts: Number of the ids of each table.
        """
        bits = _one_or_each([table.bits for table in self.tables])
        firsts, bits = (
            each if isinstance(each, int) else each.repeat(counts) for each in (self._firsts, bits)
        )
        rows, absent = self.look_up(self._slots, ids, firsts, bits)
        misses = np.diff(np.searchsorted(absent, [0, *accumulate(counts)]))
        rows[absent] = self._otherwise.repeat(misses)

        return torch.from_numpy(rows), misses.tolist()

    def look_up(
        self, slots: Tensor, ids: Tensor, firsts: Words | int, bits: Words | int
    ) -> tuple[Rows, Rows]:
        """The row of each id [N], any number if absent; the positions of absent ids, rising.

        Args:
            slots: Those of one table or of all.
            ids: Ids [N].
            firsts: The first slot of each id's table [N], or of all.
            bits: Its halves have ``2 ** bits`` slots.
        """
        mixed = self.mixed(ids)
        place, rest = _hash(mixed, self.factors[0], bits)
        place += firsts
        rest ^= _read(slots, place)

        # a free slot leaves 2 ** bits - 1 or more, that of another id more
        others = np.flatnonzero(rest >= (1 << bits) - 1)
        firsts, bits = (each if isinstance(each, int) else each[others] for each in (firsts, bits))
        place, second = _hash(mixed[others], self.factors[1], bits)
        place += firsts
        place += 1 << bits
        second ^= _read(slots, place)
        rest[others] = second

        return rest.view(np.int64), others[np.flatnonzero(second >= (1 << bits) - 1)]

    def rehash(self, table: IdIndex, left: tuple[Words, Words]) -> None:
        """Insert all ids anew by other hash functions, since some of a table found no slot.

        Raises:
            RuntimeError: No functions are found: an id occurs more than twice in a table.
        """
        held = [each.held() for each in self.tables]
        at = self.tables.index(table)
        held[at] = np.concatenate([held[at][0], left[0]]), np.concatenate([held[at][1], left[1]])
        for _ in range(_SEEDS):
            self._seed += 1
            self.factors = _factors(self._seed)
            for each in self.tables:
                each.clear()

            if not any(
                len(each.place(*pairs)[0]) for each, pairs in zip(self.tables, held, strict=True)
            ):
                return

        raise RuntimeError(f"no slot for {len(left[0])} ids in an index: each may be there once")


def _bits_for(rows: int) -> int:
    """Halves of so many bits have slots enough for ids that have these rows."""
    return max(_FEWEST_BITS, int(_LEAST_SLOTS_PER_ROW * rows).bit_length())


def _words(numbers: Tensor) -> Words:
    """The same numbers [N] in the same memory, unsigned."""
    return numbers.numpy().view(np.uint64)


def _read(slots: Tensor, place: Words) -> Words:
    """What these slots [N] hold."""
    return _words(slots.index_select(0, torch.from_numpy(place.view(np.int64))))


def _one_or_each(values: Sequence[int]) -> Words | int:
    """One number where all tables have the same; it is not repeated for each id."""
    return values[0] if len(set(values)) == 1 else np.array(values, np.uint64)


def _factors(seed: int) -> tuple[int, int]:
    """Two odd factors."""
    draw = random.Random(seed)
    return draw.getrandbits(63) | 1, draw.getrandbits(63) | 1


@cache
def _undone(factor: int) -> int:
    """Multiplication by this factor undoes the one by the other."""
    return pow(factor, -1, 1 << 64)


def _mixed(ids: Tensor) -> Words:
    """Another number for each id [N], whose low bits depend on all bits of the id."""
    product = _words(ids) * _MIXER
    product ^= product >> 32
    return product


def _hash(mixed: Words, factor: Words | int, bits: Words | int) -> tuple[Words, Words]:
    """The number of each id's slot [N], and its further bits, before the bits of a row [N]."""
    product = mixed * factor
    place = np.right_shift(product, 64 - bits)
    product <<= bits
    return place, product
