"""Indices of ids: cuckoo hash tables in arrays, in which many ids are looked up at once.

The slots of a table have two halves, and an id is in one slot of the first or of the second half,
which two hash functions choose. A lookup reads the first slot of each id, and the second slot of
the ids that are not in their first. An id that is inserted takes its slot from the id that is
there, which moves to the other half.

A hash function multiplies the id, whose bits have been mixed, by an odd factor, modulo 2**64. The
product determines the id. Its first bits are the number of the slot, so that a slot holds only the
others, and the row in the place of the first: 8 bytes. numpy computes, because it shifts and
compares unsigned numbers; torch reads the slots, because its `index_select` reads more at once.

Source:
    Pagh and Rodler, "Cuckoo hashing", 2004; the slots: Knuth, TAOCP, volume 3, exercise 6.4-13.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Insertion moves many ids in halves that are nearly full.
_LEAST_SLOTS_PER_ROW = 1.1
_FEWEST_BITS = 5
BYTES_PER_ID = 36  # two halves, each of at most twice the least number of slots, 8 bytes each
_FREE = 2**64 - 1
_ROUNDS, _SEEDS = 100, 16
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
        slots: Those of this table, a power of two.
        rows: R, rows of the table.

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

    def __init__(self, indices: IdIndices, slots: Tensor, rows: int) -> None:
        self._indices, self._slots, self._rows = indices, slots, rows
        self._words, self._bits = _words(slots), len(slots).bit_length() - 2

    def fill(self, ids: Tensor, rows: Tensor) -> None:
        """Hold these distinct ids [N] with their rows [N], and no others.

        Of ids with the same first slot the last one gets it.
        """
        self.clear()
        self._put(ids, rows)

    def find(self, ids: Tensor) -> Tensor:
        """The row of each id [N], -1 for an id that is not there."""
        rows, absent = self._indices.look_up(self._slots, ids, 0, self._bits, self._rows)
        rows[absent] = -1
        return torch.from_numpy(rows)

    def replace(self, left: Tensor, came: Tensor, rows: Tensor) -> None:
        """Remove ids [L], and add others [N] with their rows [N]."""
        mixed = _mixed(left)
        for half, factor in enumerate(self._indices.factors):
            place, rest = _hash(mixed, factor, self._bits)
            place += half << self._bits
            is_there = (self._words[place] ^ rest) >> self._bits == 0
            self._words[place[is_there]] = _FREE
        self._put(came, rows)

    def clear(self) -> None:
        """Remove all ids."""
        self._words.fill(_FREE)

    def held(self) -> tuple[Words, Words]:
        """The mixed ids [N] and their rows [N]."""
        place = np.flatnonzero(self._words != _FREE).view(np.uint64)
        return self._ids_of(place, self._words[place])

    def place(self, ids: Words, rows: Words) -> tuple[Words, Words]:
        """Insert mixed ids [N] with their rows [N]; returns those that found no slot, if any."""
        owner, in_second = np.empty(len(self._words), np.int64), np.zeros(len(ids), bool)
        for _ in range(_ROUNDS):
            if not len(ids):
                break
            (first, rest), (second, other) = (
                _hash(ids, factor, self._bits) for factor in self._indices.factors
            )
            place = np.where(in_second, second + (1 << self._bits), first)
            order = np.arange(len(ids))
            owner[place] = order
            won = owner[place] == order
            taken = place[won]
            before = self._words[taken]
            self._words[taken] = np.where(in_second, other, rest)[won] | rows[won]
            moves = before != _FREE
            moved, rows_moved = self._ids_of(taken[moves], before[moves])
            ids = np.concatenate([ids[~won], moved])
            rows = np.concatenate([rows[~won], rows_moved])
            in_second = np.concatenate([~in_second[~won], taken[moves] < 1 << self._bits])
        return ids, rows

    def _ids_of(self, place: Words, held: Words) -> tuple[Words, Words]:
        """The mixed ids [N] and rows [N] that these slots [N] hold."""
        bits, low = self._bits, (1 << self._bits) - 1
        product = (held >> bits) | (place << (64 - bits))
        first, second = (product * pow(factor, -1, 1 << 64) for factor in self._indices.factors)
        return np.where(place > low, second, first), np.bitwise_and(held, low)

    def _put(self, ids: Tensor, rows: Tensor) -> None:
        left = self.place(_mixed(ids), _words(rows))
        if len(left[0]):
            self._indices.rehash(self, left)


class IdIndices:
    """The indices of several tables, side by side in one array.

    Args:
        sizes: Rows of each table.

    Attributes:
        tables: The index of each table.
        factors: Of the two hash functions.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        bits = [max(_FEWEST_BITS, int(_LEAST_SLOTS_PER_ROW * size).bit_length()) for size in sizes]
        widths = [2 << each for each in bits]
        self._seed, self.factors = 0, _factors(0)
        with torch.inference_mode(False):  # slots are written in other modes later
            self._slots = torch.full((sum(widths),), -1)
        self._firsts = np.array([0, *accumulate(widths[:-1])], np.uint64)
        self._bits, self._rows = _one_or_each(bits), _one_or_each(sizes)
        self._last = np.array(sizes) - 1
        self.tables = [
            IdIndex(self, slots, size)
            for slots, size in zip(self._slots.split(widths), sizes, strict=True)
        ]

    def find(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The row of each id [N], its table's last one if absent; absent ids of each table.

        Args:
            ids: Ids [N], by table.
            counts: Number of the ids of each table.
        """
        firsts, bits, rows = (
            each if isinstance(each, int) else each.repeat(counts)
            for each in (self._firsts, self._bits, self._rows)
        )
        positions, absent = self.look_up(self._slots, ids, firsts, bits, rows)
        misses = np.diff(np.searchsorted(absent, [0, *accumulate(counts)]))
        positions[absent] = self._last.repeat(misses)
        return torch.from_numpy(positions), misses.tolist()

    def look_up(
        self,
        slots: Tensor,
        ids: Tensor,
        firsts: Words | int,
        bits: Words | int,
        rows: Words | int,
    ) -> tuple[Rows, Rows]:
        """The row of each id [N], any number if absent; the positions of absent ids, rising.

        Args:
            slots: Those of one table or of all.
            ids: Ids [N].
            firsts: The first slot of each id's table [N], or of all.
            bits: Its halves have ``2 ** bits`` slots.
            rows: Its rows.
        """
        mixed = _mixed(ids)
        place, rest = _hash(mixed, self.factors[0], bits)
        place += firsts
        rest ^= _read(slots, place)
        others = np.flatnonzero(rest >= rows)
        firsts, bits, rows = (
            each if isinstance(each, int) else each[others] for each in (firsts, bits, rows)
        )
        place, second = _hash(mixed[others], self.factors[1], bits)
        place += firsts
        place += 1 << bits
        second ^= _read(slots, place)
        rest[others] = second
        return rest.view(np.int64), others[np.flatnonzero(second >= rows)]

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


def _mixed(ids: Tensor) -> Words:
    """Another number for each id [N], whose low bits depend on all bits of the id."""
    product = _words(ids) * _MIXER
    product ^= product >> 32
    return product


def _hash(mixed: Words, factor: int, bits: Words | int) -> tuple[Words, Words]:
    """The number of each id's slot [N], and its further bits, before the bits of a row [N]."""
    product = mixed * factor
    place = np.right_shift(product, 64 - bits)
    product <<= bits
    return place, product
