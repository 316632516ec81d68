from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tutorec.datasets.random import RandomRecDataset
from tutorec.datasets.utils import Batch


def _numbers(batch: Batch) -> list[Any]:
    kjt = batch.sparse_features
    return [
        kjt.lengths().tolist(),
        kjt.values().tolist(),
        batch.dense_features.tolist(),
        batch.labels.tolist(),
    ]


def test_shapes_types_and_ranges_are_those_that_were_asked_for() -> None:
    data = RandomRecDataset(
        ["a", "b"],
        50,
        hash_sizes=[3, 1000],
        ids_per_features=[1, 4],
        min_ids_per_features=[1, 2],
        num_dense=5,
    )
    batch = next(iter(data))
    kjt = batch.sparse_features
    assert (
        batch.dense_features.shape == (50, 5)
        and batch.labels.shape == (50,)
        and kjt.keys() == ["a", "b"]
    )
    assert (
        kjt.lengths().dtype == torch.int32
        and kjt.values().dtype == batch.labels.dtype == torch.int64
    )
    assert kjt["a"].lengths().tolist() == [1] * 50 and kjt["a"].values().unique().tolist() == [
        0,
        1,
        2,
    ]
    assert kjt["b"].lengths().unique().tolist() == [2, 3, 4] and kjt["b"].values().max() > 500
    assert batch.labels.unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("sizes", "bags"),
    [
        ({}, {0, 1, 2}),
        ({"ids_per_feature": 3}, {3}),
        ({"ids_per_feature": 3, "min_ids_per_feature": 2}, {2, 3}),
    ],
)
def test_the_fewest_ids_of_a_bag_are_as_many_as_the_most_unless_said(
    sizes: dict[str, int], bags: set[int]
) -> None:
    lengths = next(iter(RandomRecDataset(["a"], 100, **sizes))).sparse_features.lengths()
    assert set(lengths.tolist()) == bags


def test_a_seed_draws_lengths_and_ids_by_feature_then_dense_then_labels() -> None:
    batch = next(
        iter(
            RandomRecDataset(["a", "b"], 4, 9, num_dense=2, manual_seed=7, num_generated_batches=1)
        )
    )
    generator = torch.Generator().manual_seed(7)
    lengths, values = [], []
    for _ in "ab":
        lengths.append(torch.randint(0, 3, (4,), dtype=torch.int32, generator=generator))
        values.append(torch.randint(0, 9, (int(lengths[-1].sum()),), generator=generator))
    assert torch.equal(batch.sparse_features.lengths(), torch.cat(lengths))
    assert torch.equal(batch.sparse_features.values(), torch.cat(values))
    assert torch.equal(batch.dense_features, torch.randn(4, 2, generator=generator))
    assert torch.equal(batch.labels, torch.randint(0, 2, (4,), generator=generator))


def test_generated_batches_come_again_in_turn_and_in_every_pass() -> None:
    data = RandomRecDataset(["a"], 2, num_batches=5, num_generated_batches=2)
    first, second = list(data), list(data)
    assert len(data) == 5 and [first[0] is batch for batch in first] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_batches_without_end_and_without_repetition() -> None:
    data = RandomRecDataset(["a"], 2, num_generated_batches=-1)
    batches = [_numbers(batch) for batch in islice(data, 12)]
    assert all(batches.count(batch) == 1 for batch in batches)
    with pytest.raises(TypeError, match="num_batches="):
        len(data)


def test_a_data_loader_gives_the_batches_out_as_they_are() -> None:
    data = RandomRecDataset(["a"], 2, num_batches=3)
    assert list(map(_numbers, DataLoader(data, batch_size=None))) == list(map(_numbers, data))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hash_sizes": [1]}, r"hash_sizes has 1 number\(s\), and there are 2 keys"),
        ({"ids_per_features": [1, 2, 3]}, "ids_per_features has 3"),
        ({"min_ids_per_features": [1]}, "min_ids_per_features has 1"),
        (
            {"ids_per_features": [1, 2], "min_ids_per_features": [1, 3]},
            "'b': bags of at least 3 and at most 2",
        ),
        ({"num_generated_batches": 0}, "num_generated_batches=0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomRecDataset(["a", "b"], 2, **wrong)
