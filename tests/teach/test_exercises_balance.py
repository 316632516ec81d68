"""The solutions of chapter 19's exercises, against the library that they are about."""

from __future__ import annotations

import torch

from tutorec.balance import LoadBalanceManager
from tutorec.teach import check


def test_a_place_by_hand_is_that_of_the_library():
    place = check.find("19.1").solution
    rows, ranks = [5, 26, 1, 9], 3
    manager = LoadBalanceManager(rows, ranks)
    bounds = [rank * sum(rows) // ranks for rank in range(ranks + 1)]
    for feature, count in enumerate(rows):
        for identifier in range(count):
            x = torch.zeros(1, len(rows), dtype=torch.int64)
            x[0, feature] = identifier
            found = []
            for rank in range(ranks):
                local = dict(
                    zip(
                        manager.get_group(rank),
                        manager.shard_tensor(x, rank)[0].tolist(),
                        strict=True,
                    )
                )
                if local.get(feature, -1) >= 0:
                    found.append([rank, local[feature]])
            assert found == [place(rows, bounds, feature, identifier)]


def test_a_bag_over_ranges_of_rows_has_the_sums_of_one_process():
    exercise = check.find("19.2")
    assert exercise.measure is not None
    # Row r holds 10 to the power r, so a sum shows its rows. Features begin at rows 0, 2 and 7.
    expected = [[[10_000_000 + 1_000_000 + 1], [10_000_000 + 10_000 + 10]],
                [[10_000_000 + 100 + 10], [10_000_000 + 1_000 + 10]]]  # fmt: skip
    assert [sums.tolist() for sums in exercise.measure(exercise.solution)] == expected
