"""Indices of ids: cuckoo hash tables in tensors, in which many ids are looked up at once.

The slots of a table have two halves, and an id is in one slot of the first or of the second half,
which two hash functions choose. A lookup reads the first slot of each id, and the second slot of
the ids that are not in their first. An id that is inserted takes its slot from the id that is
there, which moves to the other half.

A hash function multiplies the id, whose bits have been mixed, by an odd factor, modulo 2**64. The
product determines the id. Its first bits are the number of the slot, so that a slot holds only the
others, and the row in the place of the first: 8 bytes.

Source:
    Pagh and Rodler, "Cuckoo hashing", 2004; the slots: Knuth, TAOCP, volume 3, exercise 6.4-13.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

# Insertion moves many ids in halves that are nearly full.
_LEAST_SLOTS_PER_ROW = 1.1
_FEWEST_BITS = 5
BYTES_PER_ID = 36  # two halves, each of at most twice the least number of slots, 8 bytes each
_FREE = -1
_ROUNDS, _SEEDS = 100, 16
_MIXER = 0x5851F42D4C957F2D  # an odd number; Knuth's for a generator of random numbers
_LOW_32 = 2**32 - 1


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
        self._bits = len(slots).bit_length() - 2

    def fill(self, ids: Tensor, rows: Tensor) -> None:
        """Hold these distinct ids [N] with their rows [N], and no others.

        Of ids with the same first slot the last one gets it, as a rule.
        """
        self.clear()
        self._put(ids, rows)

    def find(self, ids: Tensor) -> Tensor:
        """The row of each id [N], -1 for an id that is not there."""
        return self._indices.look_up(self._slots, ids, 0, self._bits, self._rows)[0]

    def replace(self, left: Tensor, came: Tensor, rows: Tensor) -> None:
        """Remove ids [L], and add others [N] with their rows [N]."""
        mixed = _mixed(left)
        for half, factor in enumerate(self._indices.factors):
            place, rest = _hash(mixed, factor, self._bits)
            place += half << self._bits
            is_there = (self._slots[place] ^ rest) >> self._bits == 0
            self._slots[place[is_there]] = _FREE
        self._put(came, rows)

    def clear(self) -> None:
        """Remove all ids."""
        self._slots.fill_(_FREE)

    def held(self) -> tuple[Tensor, Tensor]:
        """The mixed ids [N] and their rows [N]."""
        place = (self._slots != _FREE).nonzero().view(-1)
        return self._ids_of(place, self._slots[place])

    def place(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Insert mixed ids [N] with their rows [N]; returns those that found no slot, if any."""
        owner, in_second = torch.empty_like(self._slots), torch.zeros_like(ids, dtype=torch.bool)
        for _ in range(_ROUNDS):
            if not len(ids):
                break
            (first, rest), (second, other) = (
                _hash(ids, factor, self._bits) for factor in self._indices.factors
            )
            place = torch.where(in_second, second + (1 << self._bits), first)
            order = torch.arange(len(ids))
            owner[place] = order
            won = owner[place] == order
            taken = place[won]
            before = self._slots[taken]
            self._slots[taken] = torch.where(in_second, other, rest)[won] | rows[won]
            moves = before != _FREE
            moved, rows_moved = self._ids_of(taken[moves], before[moves])
            ids, rows = torch.cat([ids[~won], moved]), torch.cat([rows[~won], rows_moved])
            in_second = torch.cat([~in_second[~won], taken[moves] < 1 << self._bits])
        return ids, rows

    def _ids_of(self, place: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed ids [N] and rows [N] that these slots [N] hold."""
        low, bits = (1 << self._bits) - 1, self._bits
        product = ((held >> bits) & ((1 << 64 - bits) - 1)) | ((place & low) << (64 - bits))
        first, second = (product * _inverse(factor) for factor in self._indices.factors)
        return torch.where(place > low, second, first), held & low

    def _put(self, ids: Tensor, rows: Tensor) -> None:
        left = self.place(_mixed(ids), rows)
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
            self._slots = torch.full((sum(widths),), _FREE)
        self._firsts = torch.tensor([0, *accumulate(widths[:-1])])
        self._bits, self._rows = _one_or_each(bits), _one_or_each(sizes)
        self.tables = [
            IdIndex(self, slots, size)
            for slots, size in zip(self._slots.split(widths), sizes, strict=True)
        ]

    def find(self, ids: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each id [N], -1 if absent, and the positions of absent ids, rising.

        Args:
            ids: Ids [N], by table.
            counts: Number of the ids of each table.
        """
        firsts, bits, rows = (
            each.repeat_interleave(counts, output_size=len(ids))
            if isinstance(each, Tensor)
            else each
            for each in (self._firsts, self._bits, self._rows)
        )
        return self.look_up(self._slots, ids, firsts, bits, rows)

    def look_up(
        self,
        slots: Tensor,
        ids: Tensor,
        firsts: Tensor | int,
        bits: Tensor | int,
        rows: Tensor | int,
    ) -> tuple[Tensor, Tensor]:
        """The row of each id [N], -1 if absent, and the positions of absent ids, rising.

        Args:
            slots: Those of one table or of all.
            ids: Ids [N].
            firsts: The first slot of each id's table [N], or of all.
            bits: Its halves have ``2 ** bits`` slots.
            rows: Its rows.
        """
        mixed = _mixed(ids)
        place, rest = _hash(mixed, self.factors[0], bits)
        found = slots.index_select(0, place.add_(firsts)).bitwise_xor_(rest)
        others = _positions((found < 0) | (found >= rows))
        firsts, bits, rows = (_selected(each, others) for each in (firsts, bits, rows))
        place, rest = _hash(mixed.index_select(0, others), self.factors[1], bits)
        second = slots.index_select(0, place.add_(firsts).add_(1 << bits)).bitwise_xor_(rest)
        is_absent = (second < 0) | (second >= rows)
        found.index_copy_(0, others, second.masked_fill_(is_absent, -1))
        return found, others.index_select(0, _positions(is_absent))

    def rehash(self, table: IdIndex, left: tuple[Tensor, Tensor]) -> None:
        """Insert all ids anew by other hash functions, since some of a table found no slot.

        Raises:
            RuntimeError: No functions are found: an id occurs more than twice in a table.
        """
        held = [each.held() for each in self.tables]
        at = self.tables.index(table)
        held[at] = torch.cat([held[at][0], left[0]]), torch.cat([held[at][1], left[1]])
        for _ in range(_SEEDS):
            self._seed += 1
            self.factors = _factors(self._seed)
            for each in self.tables:
                each.clear()
            if not any(
                len(each.place(*pairs)[0]) for each, pairs in zip(self.tables, held, strict=True)
            ):
                return
        raise RuntimeError(
            f"an index of ids has no slot for {len(left[0])} ids: each may be there once"
        )


def _positions(mask: Tensor) -> Tensor:
    """Where a mask is true, rising; numpy finds that in a seventh of torch's time."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def _one_or_each(values: Sequence[int]) -> Tensor | int:
    """One number where all tables have the same; it is not gathered for each id."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values)


def _selected(of_ids: Tensor | int, chosen: Tensor) -> Tensor | int:
    """The numbers of some ids; one number is that of all ids."""
    return of_ids.index_select(0, chosen) if isinstance(of_ids, Tensor) else of_ids


def _factors(seed: int) -> tuple[int, int]:
    """Two odd factors."""
    draw = random.Random(seed)
    return draw.getrandbits(63) | 1, draw.getrandbits(63) | 1


def _inverse(factor: int) -> int:
    """The number by which the product with a factor is multiplied to get the id, as an int64."""
    inverse = pow(factor, -1, 1 << 64)
    return inverse - (1 << 64) if inverse >> 63 else inverse


def _mixed(ids: Tensor) -> Tensor:
    """Another number for each id [N], whose low bits depend on all bits of the id."""
    product = ids * _MIXER
    return product.bitwise_xor_((product >> 32).bitwise_and_(_LOW_32))


def _hash(mixed: Tensor, factor: int, bits: Tensor | int) -> tuple[Tensor, Tensor]:
    """The number of each id's slot [N], and its further bits, before the bits of a row [N]."""
    product = mixed * factor
    place = (product >> (64 - bits)).bitwise_and_((1 << bits) - 1)
    return place, product.bitwise_left_shift_(bits)
