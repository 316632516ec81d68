"""What a batch sends by labels and how it is rebuilt: TorchRec's numbers, and any deal of keys to
any ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

PLAIN = KeyedJaggedTensor(
    ["a", "b", "c"],
    torch.tensor([1, 2, 3, 4, 5]),
    torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),
    lengths=torch.tensor([1, 0, 2, 0, 1, 1]),
)
VARIABLE = KeyedJaggedTensor(
    ["a", "b"],
    torch.tensor([1, 2, 3]),
    lengths=torch.tensor([1, 0, 2]),
    stride_per_key_per_rank=[[2], [1]],
)


def test_labels_splits_and_tensors_are_torchrecs():
    assert PLAIN.dist_labels() == ["lengths", "values", "weights"]
    assert PLAIN.dist_splits([2, 1]) == [[4, 2], [3, 2], [3, 2]]
    assert PLAIN.dist_splits([0, 3]) == [[0, 6], [0, 5], [0, 5]]
    assert [tensor.tolist() for tensor in PLAIN.dist_tensors()] == [
        [1, 0, 2, 0, 1, 1],
        [1, 2, 3, 4, 5],
        [1.0, 2.0, 3.0, 4.0, 5.0],
    ]
    assert VARIABLE.dist_labels() == ["lengths", "values", "strides"]
    assert VARIABLE.dist_splits([1, 1]) == [[2, 1], [1, 2], [1, 1]]
    assert VARIABLE.dist_splits([2, 0]) == [[3, 0], [3, 0], [2, 0]]
    assert [tensor.tolist() for tensor in VARIABLE.dist_tensors()] == [[1, 0, 2], [1, 2, 3], [2, 1]]


# Arguments after the keys ["a", "b"]; then values, lengths, weights and lists of each key and rank
# of TorchRec 1.8.0.
GOLDEN: dict[str, tuple[list[Any], list[Any]]] = {
    "ranks of equal B": (
        [[[1, 0, 2, 1, 0, 2, 1, 1], [1, 2, 3, 4, 5, 6, 7, 8]], False, 2, [0, 2, 1, 3], [2, 2]],
        [[1, 5, 6, 2, 3, 4, 7, 8], [1, 0, 0, 2, 2, 1, 1, 1], None, []],
    ),
    "ranks of different B, with weights": (
        [
            [[1, 2, 0, 2, 1, 1], [1, 2, 3, 4, 5, 6, 7], [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]],
            *[False, 2, [0, 2, 3, 1, 4, 5], [1, 2]],
        ],
        [[1, 4, 5, 2, 3, 6, 7], [1, 0, 2, 2, 1, 1], [0.5, 2.0, 2.5, 1.0, 1.5, 3.0, 3.5], []],
    ),
    "variable batch, with weights": (
        [
            [[1, 0, 2, 0, 1], [1, 2, 3, 4], [2, 1, 0, 2], [0.5, 1.0, 1.5, 2.0]],
            True,
            2,
            [0, 2, 1, 3],
            None,
        ],
        [[1, 2, 3, 4], [1, 0, 2, 0, 1], [0.5, 1.0, 1.5, 2.0], [[2, 0], [1, 2]]],
    ),
    "two hosts of two ranks": (
        [[[1] * 8, list(range(8))], False, 4, [0, 4, 2, 6, 1, 5, 3, 7], [1] * 4],
        [[0, 4, 2, 6, 1, 5, 3, 7], [1] * 8, None, []],
    ),
    "variable batch, two hosts of two ranks": (
        [
            [[1] * 9, list(range(9)), [1, 1, 1, 1, 2, 1, 1, 1]],
            True,
            4,
            [0, 4, 2, 6, 1, 5, 3, 7],
            None,
            2,
        ],
        [[0, 4, 5, 2, 7, 1, 6, 3, 8], [1] * 9, None, [[1, 2, 1, 1], [1, 1, 1, 1]]],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_arrived_becomes_torchrecs_batch(name: str):
    (tensors, variable, ranks, recat, *rest), (values, lengths, weights, strides) = GOLDEN[name]
    arrived = [torch.tensor(numbers) for numbers in tensors]
    batch = KeyedJaggedTensor.dist_init(
        ["a", "b"], arrived, variable, ranks, torch.tensor(recat), *rest
    )
    assert batch.keys() == ["a", "b"]
    assert (batch.values().tolist(), batch.lengths().tolist()) == (values, lengths)
    assert (batch.weights().tolist() if batch.weights_or_none() is not None else None) == weights
    assert batch.stride_per_key_per_rank() == strides
    assert batch.variable_stride_per_key() == variable


def test_one_key_is_left_as_it_arrived():
    arrived = [torch.tensor([1, 0, 2]), torch.tensor([1, 2, 3])]
    batch = KeyedJaggedTensor.dist_init(["a"], arrived, False, 2, None, [1, 2])
    assert batch.values() is arrived[1]
    assert (batch.stride(), batch.length_per_key()) == (3, [3])


Bags = list[list[int]]


@st.composite
def deals(draw: st.DrawFn) -> tuple[list[list[Bags]], list[int], bool, bool]:
    """``bags[rank][key][sample]``, the keys of each rank, whether weighted, whether variable."""
    ranks, keys = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    variable, bag = draw(st.booleans()), st.lists(st.integers(0, 99), max_size=3)
    bags = []
    for _ in range(ranks):
        samples = draw(st.integers(0, 3))
        counts = [draw(st.integers(0, 3)) if variable else samples for _ in range(keys)]
        bags.append([[draw(bag) for _ in range(count)] for count in counts])
    ends = sorted(draw(st.lists(st.integers(0, keys), min_size=ranks - 1, max_size=ranks - 1)))
    return (
        bags,
        [b - a for a, b in zip([0, *ends], [*ends, keys], strict=True)],
        draw(st.booleans()),
        variable,
    )


def batch_of(bags: list[Bags], weighted: bool, variable: bool) -> KeyedJaggedTensor:
    ids = torch.tensor([number for key in bags for bag in key for number in bag], dtype=torch.int64)
    return KeyedJaggedTensor(
        [f"f{index}" for index in range(len(bags))],
        ids,
        ids / 2 if weighted else None,
        lengths=torch.tensor([len(bag) for key in bags for bag in key], dtype=torch.int32),
        stride_per_key_per_rank=[[len(key)] for key in bags] if variable else None,
    )


def order_of_pieces(keys: int, strides: list[int] | None, ranks: int) -> Tensor | None:
    """Positions in what arrived rank after rank, in the order key after key: of keys,
    or of lists.
    """
    if keys == 0:
        return None
    if strides is None or len(set(strides)) == 1:
        return torch.arange(ranks * keys, dtype=torch.int32).view(ranks, keys).t().reshape(-1)
    owner = [
        (key, rank) for rank in range(ranks) for key in range(keys) for _ in range(strides[rank])
    ]
    return torch.tensor(
        sorted(range(len(owner)), key=lambda place: owner[place]), dtype=torch.int32
    )


@given(deals())
def test_keys_dealt_to_ranks_arrive_with_the_bags_of_all_ranks(
    deal: tuple[list[list[Bags]], list[int], bool, bool],
):
    bags, key_splits, weighted, variable = deal
    batches = [batch_of(of_rank, weighted, variable) for of_rank in bags]
    tensors = [batch.dist_tensors() for batch in batches]
    splits = [batch.dist_splits(key_splits) for batch in batches]
    strides = None if variable else [batch.stride() for batch in batches]
    first = 0
    for rank, count in enumerate(key_splits):
        keys = batches[0].keys()[first : first + count]
        arrived = [
            torch.cat(
                [
                    sent[label].split(sizes[label])[rank]
                    for sent, sizes in zip(tensors, splits, strict=True)
                ]
            )
            for label in range(len(tensors[0]))
        ]
        recat = order_of_pieces(count, strides, len(bags))
        got = KeyedJaggedTensor.dist_init(keys, arrived, variable, len(bags), recat, strides)
        due = [
            [bag for of_rank in bags for bag in of_rank[key]] for key in range(first, first + count)
        ]
        flat = [number for of_key in due for bag in of_key for number in bag]
        assert (got.keys(), got.values().tolist()) == (keys, flat)
        assert got.lengths().tolist() == [len(bag) for of_key in due for bag in of_key]
        assert got.length_per_key() == [sum(len(bag) for bag in of_key) for of_key in due]
        assert (got.weights_or_none() is not None) == weighted
        if weighted:
            assert got.weights().tolist() == [number / 2 for number in flat]
        if strides is not None:
            assert got.stride() == sum(strides)
        else:
            assert got.stride_per_key_per_rank() == [
                [len(of_rank[first + key]) for of_rank in bags] for key in range(count)
            ]
        first += count


def test_splits_of_other_keys_are_refused():
    with pytest.raises(ValueError, match=r"dist_splits.*\[1, 1\].*2 keys.*3"):
        PLAIN.dist_splits([1, 1])


def test_tensors_that_the_labels_do_not_name_are_refused():
    one = torch.tensor([1])
    with pytest.raises(ValueError, match=r"4.*pass 2 \(lengths.*3"):
        KeyedJaggedTensor.dist_init(["a"], [one] * 4, False, 1, None, [1])
    with pytest.raises(ValueError, match=r"2.*pass 3 \(lengths.*4"):
        KeyedJaggedTensor.dist_init(["a"], [one] * 2, True, 1, None, None)
    with pytest.raises(ValueError, match="stride_per_rank is None"):
        KeyedJaggedTensor.dist_init(["a"], [one] * 2, False, 1, None, None)
