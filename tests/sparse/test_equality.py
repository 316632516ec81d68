import pytest
import torch
from hypothesis import given
from strategies import DrawnBatch, jagged_batches

from tutorec.sparse.equality import jt_is_equal, kjt_is_equal, kt_is_equal
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@given(jagged_batches(), jagged_batches())
def test_batches_are_equal_as_their_lists_are(one: DrawnBatch, two: DrawnBatch) -> None:
    same = one.ids == two.ids and one.weights == two.weights and one.samples == two.samples
    assert kjt_is_equal(one.kjt(), two.kjt()) is same
    assert kjt_is_equal(one.kjt(), one.kjt())
    key = one.keys[0]
    other = two.keys[0]
    weights = None if one.weights is None else one.weights[key]
    other_weights = None if two.weights is None else two.weights[other]
    assert jt_is_equal(one.kjt()[key], two.kjt()[other]) is (
        one.ids[key] == two.ids[other] and weights == other_weights
    )


def jagged(
    values: list[float], lengths: list[int], weights: list[float] | None = None
) -> JaggedTensor:
    return JaggedTensor(
        torch.tensor(values),
        None if weights is None else torch.tensor(weights),
        lengths=torch.tensor(lengths),
    )


ONE = jagged([1.0, 2.0, 3.0], [1, 2], [0.5, 1.0, 2.0])
DIFFERENT = {
    "values": jagged([1.0, 2.0, 4.0], [1, 2], [0.5, 1.0, 2.0]),
    "lengths": jagged([1.0, 2.0, 3.0], [2, 1], [0.5, 1.0, 2.0]),
    "samples": jagged([1.0, 2.0, 3.0], [1, 2, 0], [0.5, 1.0, 2.0]),
    "weights": jagged([1.0, 2.0, 3.0], [1, 2], [0.5, 1.0, 2.5]),
    "no weights": jagged([1.0, 2.0, 3.0], [1, 2]),
    "type": "a string",
}


@pytest.mark.parametrize("other", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_jagged_tensors_that_differ_are_not_equal(other: object) -> None:
    assert not jt_is_equal(ONE, other)
    assert not jt_is_equal(other, ONE)


def test_numbers_are_compared_not_representations() -> None:
    from_offsets = JaggedTensor(
        ONE.values().double(), ONE.weights(), offsets=torch.tensor([0, 1, 3], dtype=torch.int32)
    )
    assert jt_is_equal(ONE, from_offsets)
    assert jt_is_equal(ONE, jagged([1.0, 2.0, 3.0 + 1e-7], [1, 2], [0.5, 1.0, 2.0]))


def test_batches_that_differ_in_keys_samples_or_inverse_indices_are_not_equal() -> None:
    values, lengths = torch.tensor([5, 7, 1]), torch.tensor([1, 0, 0, 2])
    batch = KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
    others = [
        KeyedJaggedTensor(["b", "a"], values, lengths=lengths),
        KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride_per_key_per_rank=[[1], [3]]),
        KeyedJaggedTensor(["a"], values, lengths=lengths),
        batch["a"],
    ]
    assert [kjt_is_equal(batch, other) for other in others] == [False] * 4
    strides, keys = [[1], [3]], ["a", "b"]
    inverse = [(keys, torch.tensor([[0, 0, 0], order])) for order in ([0, 1, 2], [0, 2, 1])]
    one, two = (
        KeyedJaggedTensor(
            keys, values, lengths=lengths, stride_per_key_per_rank=strides, inverse_indices=indices
        )
        for indices in inverse
    )
    assert kjt_is_equal(one, one)
    assert not kjt_is_equal(one, two)


def test_keyed_tensors_that_differ_are_not_equal() -> None:
    values = torch.ones(2, 2)
    one = KeyedTensor(["a", "b"], [1, 1], values)
    assert kt_is_equal(one, KeyedTensor(["a", "b"], [1, 1], torch.ones(2, 2)))
    others = [
        KeyedTensor(["a", "c"], [1, 1], values),
        KeyedTensor(["a", "b"], [0, 2], values),
        KeyedTensor(["a", "b"], [1, 1], values, key_dim=0),
        KeyedTensor(["a", "b"], [1, 1], values * 2),
        values,
    ]
    assert [kt_is_equal(one, other) for other in others] == [False] * 5
