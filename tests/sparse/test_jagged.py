import pytest
import torch
from hypothesis import given
from strategies import PROPERTY, DrawnBatch, jagged_batches

from tutorec._kernels.backend import backend, use_backend
from tutorec.sparse.jagged import JaggedTensor

one_feature = jagged_batches(max_features=1)


def first(drawn: DrawnBatch) -> tuple[JaggedTensor, list[list[int]], list[list[float]] | None]:
    key = drawn.keys[0]
    return drawn.kjt()[key], drawn.ids[key], None if drawn.weights is None else drawn.weights[key]


@PROPERTY
@given(one_feature)
def test_to_dense_returns_the_lists(drawn: DrawnBatch) -> None:
    jagged, ids, weights = first(drawn)
    assert [row.tolist() for row in jagged.to_dense()] == ids
    dense_weights = jagged.to_dense_weights()
    assert (weights is None and dense_weights is None) or [row.tolist() for row in dense_weights or []] == weights


@PROPERTY
@given(one_feature)
def test_lengths_and_offsets_are_derived_from_each_other(drawn: DrawnBatch) -> None:
    jagged, ids, _ = first(drawn)
    from_lengths = JaggedTensor(jagged.values(), lengths=torch.tensor([len(bag) for bag in ids], dtype=torch.int64))
    from_offsets = JaggedTensor(jagged.values(), offsets=from_lengths.offsets())
    assert from_lengths.lengths().tolist() == from_offsets.lengths().tolist() == [len(bag) for bag in ids]
    assert from_lengths.offsets()[-1] == sum(len(bag) for bag in ids)
    assert from_offsets.lengths_or_none() is not None


@pytest.mark.parametrize("name", ["fbgemm", "torch"])
@PROPERTY
@given(drawn=one_feature)
def test_to_padded_dense_cuts_and_fills(name: str, drawn: DrawnBatch) -> None:
    if name == "fbgemm" and backend().name != "fbgemm":
        pytest.skip("fbgemm is not here")
    with use_backend(name):
        jagged, ids, weights = first(drawn)
        for wanted in (None, 2):
            width = max([len(bag) for bag in ids], default=0) if wanted is None else wanted
            rows = jagged.to_padded_dense(wanted, padding_value=-1.0)
            assert rows.tolist() == [(bag + [-1] * width)[:width] for bag in ids]
            if weights is not None:
                padded = jagged.to_padded_dense_weights(wanted, padding_value=0.0)
                assert padded is not None
                assert padded.tolist() == [(bag + [0.0] * width)[:width] for bag in weights]


@PROPERTY
@given(one_feature)
def test_from_dense_inverts_to_dense(drawn: DrawnBatch) -> None:
    jagged, ids, _ = first(drawn)
    if not ids:
        with pytest.raises(ValueError, match=r"no samples given; JaggedTensor.empty\(\)"):
            JaggedTensor.from_dense([])
        return
    again = JaggedTensor.from_dense(jagged.to_dense(), jagged.to_dense_weights())
    assert torch.equal(again.values(), jagged.values())
    assert again.lengths().tolist() == jagged.lengths().tolist()
    padded = JaggedTensor.from_dense_lengths(jagged.to_padded_dense(), jagged.lengths().long())
    assert torch.equal(padded.values(), jagged.values())


def test_offsets_of_the_documents_example_start_with_zero() -> None:
    jagged = JaggedTensor(values=torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    assert jagged.offsets().tolist() == [0, 1, 3]
    assert [row.tolist() for row in jagged.to_dense()] == [[5], [7, 1]]


def test_values_may_be_rows() -> None:
    rows = torch.arange(6.0).view(3, 2)
    jagged = JaggedTensor(rows, lengths=torch.tensor([1, 0, 2]))
    assert [part.shape[0] for part in jagged.to_dense()] == [1, 0, 2]
    assert str(jagged) == "JaggedTensor({\n    [[[0.0, 1.0]], [], [[2.0, 3.0], [4.0, 5.0]]]\n})\n"


def test_weights_of_an_unweighted_tensor_are_an_error() -> None:
    jagged = JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1]))
    assert jagged.weights_or_none() is None
    with pytest.raises(ValueError, match="no weights"):
        jagged.weights()


def test_copy_fills_what_empty_like_made() -> None:
    source = JaggedTensor(torch.tensor([5, 7, 1]), torch.tensor([0.5, 1.0, 2.0]), lengths=torch.tensor([1, 2]))
    target = JaggedTensor.empty_like(source, torch.device("cpu")).copy_(source)
    assert str(target) == str(source)
    assert target.values().data_ptr() != source.values().data_ptr()
    assert target.size_in_bytes() == 3 * 8 + 3 * 4 + 2 * 8 + 3 * 8


def test_empty_has_no_sample() -> None:
    jagged = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert (jagged.to_dense(), jagged.weights().numel(), jagged.offsets().tolist()) == ([], 0, [0])


def test_to_moves_every_part() -> None:
    moved = JaggedTensor(torch.tensor([5]), torch.tensor([1.0]), lengths=torch.tensor([1])).to(torch.device("meta"))
    assert moved.device().type == moved.lengths().device.type == moved.weights().device.type == "meta"
