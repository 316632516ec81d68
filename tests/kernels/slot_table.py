"""The hash table of ``tutorec._kernels.hash_slots`` as lists and loops, one id after the other: the
tests' oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

_WORD = 2**64


def _turned(word: int, places: int) -> int:
    return (word << places | word >> (64 - places)) % _WORD


def _mixed(word: int) -> int:
    word = (word ^ word >> 33) * 0xFF51AFD7ED558CCD % _WORD
    word = (word ^ word >> 33) * 0xC4CEB9FE1A85EC53 % _WORD
    return word ^ word >> 33


@cache
def murmur3(number: int) -> int:
    """The two halves of MurmurHash3_x64_128 of 16 bytes, the number and zeros, seed 0; one XOR the
    other.
    """
    first = _turned(number * 0x87C37B91114253D5 % _WORD, 31) * 0x4CF5AD432745937F % _WORD
    first = (_turned(first, 27) * 5 + 0x52DCE729) % _WORD
    second = (first * 5 + 0x38495AB5) % _WORD ^ 16
    first = ((first ^ 16) + second) % _WORD
    second = _mixed((first + second) % _WORD)
    first = (_mixed(first) + second) % _WORD
    return first ^ (first + second) % _WORD


@dataclass
class SlotTable:
    """A hash table in two lists; ``evicts`` is ``"never"``, ``"first"`` or ``"oldest"``."""

    rows: int
    buckets: int = 1
    max_probe: int = 8
    reserved: int = 0
    evicts: str = "never"
    fallback: bool = True

    def __post_init__(self) -> None:
        self.ids, self.scores = [-1] * self.rows, [-1] * self.rows

    def probed(self, number: int) -> list[int]:
        size = self.rows // self.buckets
        block = size - self.reserved
        return [
            number % self.buckets * size + (murmur3(number) + step) % block
            for step in range(self.max_probe)
        ]

    def slot(self, number: int) -> int | None:
        return next((slot for slot in self.probed(number) if self.ids[slot] == number), None)

    def answer(self, number: int) -> int:
        slot, size = self.slot(number), self.rows // self.buckets
        if slot is not None or not self.fallback:
            return -1 if slot is None else slot
        shared = (
            size - self.reserved + murmur3(number) % self.reserved
            if self.reserved
            else murmur3(number) % size
        )
        return number % self.buckets * size + shared

    def learn(
        self, batch: Sequence[int], scores: Sequence[int], threshold: int
    ) -> tuple[list[int], set[int]]:
        best = {
            number: max(s for n, s in zip(batch, scores, strict=True) if n == number)
            for number in batch
        }
        known = {number: slot for number in best if (slot := self.slot(number)) is not None}
        for number, slot in known.items():
            self.scores[slot] = max(self.scores[slot], best[number])
        evicted = set()
        for number in sorted(best.keys() - known.keys()):
            free = [slot for slot in self.probed(number) if self.ids[slot] == -1]
            old = [
                slot
                for slot in self.probed(number)
                if slot not in free and self.scores[slot] < threshold
            ]
            if self.evicts == "never":
                old = []
            elif self.evicts == "oldest":
                old = [] if free else sorted(old, key=lambda slot: self.scores[slot])[:1]
            choice = [slot for slot in self.probed(number) if slot in free or slot in old]
            if choice:
                evicted |= set(choice[:1]) & set(old)
                self.ids[choice[0]], self.scores[choice[0]] = number, best[number]
        return [self.answer(number) for number in batch], evicted
