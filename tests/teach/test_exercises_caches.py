"""The solutions of chapter 17's exercises, against the library that they are about."""

from __future__ import annotations

import torch

from tutorec.distributed.hit_rate import hit_rate
from tutorec.teach import check


def test_the_cache_with_the_states_of_adam_and_its_index_fits():
    slot, index, factor = 4 * 128 + 2 * 4 * 128 + 24, 8 * 40_000_000, check.find("17.1").solution
    assert factor == 0.029
    assert (
        factor * 40_000_000 * slot + index
        <= 2 * 2**30
        < (factor + 0.001) * 40_000_000 * slot + index
    )


def test_slots_are_shared_so_that_most_lookups_hit():
    exercise = check.find("17.2")
    assert exercise.cases is not None
    for first, second, slots in exercise.cases:
        # lookups of both tables, with settled LFU caches
        def hits(own, first=first, second=second, slots=slots):
            tables = ((first, own), (second, slots - own))
            return sum(
                sum(counts) * hit_rate(torch.tensor(counts), rows, "lfu", ids=0.001)  # type: ignore[arg-type]
                for counts, rows in tables
            )

        possible = range(max(0, slots - len(second)), min(slots, len(first)) + 1)
        assert max(possible, key=hits) == exercise.solution(first, second, slots)
