"""The solutions of chapters 17 and 17b, against the library that they are about."""

from __future__ import annotations

import torch

from tutorec.distributed.cache import RowCache, hit_rate
from tutorec.teach import check


def test_the_cache_with_the_states_of_adam_and_its_index_fits():
    slot, index, factor = 4 * 128 + 2 * 4 * 128 + 24, 8 * 40_000_000, check.find("17.1").right
    assert factor == 0.029
    assert (
        factor * 40_000_000 * slot + index
        <= 2 * 2**30
        < (factor + 0.001) * 40_000_000 * slot + index
    )


def test_slots_are_shared_so_that_most_lookups_hit():
    exercise = check.find("17b.2")
    for (first, second, slots), right in zip(exercise.cases, exercise.right, strict=True):
        # lookups of both tables, with settled LFU caches
        def hits(own, first=first, second=second, slots=slots):
            tables = ((first, own), (second, slots - own))
            return sum(
                sum(counts) * hit_rate(torch.tensor(counts), rows, "lfu", ids=0.001)  # type: ignore[arg-type]
                for counts, rows in tables
            )

        possible = range(max(0, slots - len(second)), min(slots, len(first)) + 1)
        assert max(possible, key=hits) == right


def test_the_hit_rate_of_lfu_is_the_one_that_a_replay_measures():
    exercise = check.find("17.2")
    p, slots, ids = exercise.cases[1]
    source = torch.Generator().manual_seed(0)
    batches = p.float().multinomial(3000 * ids, replacement=True, generator=source).split(ids)
    measured = RowCache([len(p)], [slots], "lfu").replay(batches, settle=2000).hit_rate
    assert abs(exercise.right[1] - measured) < 0.02


def test_popular_rows_take_fewer_bytes_in_slots_than_in_pages():
    pages, cache = check.find("17b.1").right
    assert pages == 100_000 * 4096 == 409_600_000
    assert cache == 100_000 * (16 * 4 + 4 + 24) + 8 * 10_000_000 == 89_200_000
