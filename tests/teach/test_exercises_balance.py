"""The solutions of chapter 19's exercises, against the library that they are about."""

from __future__ import annotations

import torch

from tutorec.balance import LoadBalanceManager
from tutorec.teach import check


def test_a_place_by_hand_is_that_of_the_library():
    exercise = check.find("19.1")
    for (rows, bounds, feature, identifier), place in zip(
        exercise.cases, exercise.right, strict=True
    ):
        ranks = len(bounds) - 1
        manager = LoadBalanceManager(rows, ranks)
        x = torch.zeros(1, len(rows), dtype=torch.int64)
        x[0, feature] = identifier
        found = []
        for rank in range(ranks):
            groups = manager.get_group(rank)
            local = dict(zip(groups, manager.shard_tensor(x, rank)[0].tolist(), strict=True))
            if local.get(feature, -1) >= 0:
                found.append((rank, local[feature]))
        assert found == [place]


def test_a_bag_over_ranges_of_rows_has_the_sums_of_one_process():
    # Row r holds 10 to the power r, so a sum shows its rows. Features begin at rows 0, 2 and 7.
    expected = [[[10_000_000 + 1_000_000 + 1], [10_000_000 + 10_000 + 10]],
                [[10_000_000 + 100 + 10], [10_000_000 + 1_000 + 10]]]  # fmt: skip
    assert check.find("19.2").right == expected
