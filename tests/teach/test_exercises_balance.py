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


def test_whole_features_by_size_are_placed_as_by_the_library():
    exercise = check.find("19.2")
    assert exercise.cases is not None
    for rows, ranks in exercise.cases:
        manager = LoadBalanceManager(rows, ranks, do_fair=False, disable_random_behavior=True)
        loads = sorted(manager.get_num_embeddings_on_rank(rank) for rank in range(ranks))
        assert loads == exercise.solution(rows, ranks)
