import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DrawnBatch, jagged_batches

from tutorec._kernels.backend import backend, use_backend
from tutorec._kernels.jagged import _padded_in_torch
from tutorec.sparse.equality import jt_is_equal
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts

one_feature = jagged_batches(max_features=1)


def first(drawn: DrawnBatch) -> tuple[JaggedTensor, list[list[int]], list[list[float]] | None]:
    key = drawn.keys[0]
    return drawn.kjt()[key], drawn.ids[key], None if drawn.weights is None else drawn.weights[key]


@given(one_feature)
def test_to_dense_returns_the_lists(drawn: DrawnBatch) -> None:
    jagged, ids, weights = first(drawn)
    assert [row.tolist() for row in jagged.to_dense()] == ids
    dense_weights = jagged.to_dense_weights()
    assert (weights is None and dense_weights is None) or [
        row.tolist() for row in dense_weights or []
    ] == weights


@given(one_feature)
def test_lengths_and_offsets_are_derived_from_each_other(drawn: DrawnBatch) -> None:
    jagged, ids, _ = first(drawn)
    from_lengths = JaggedTensor(
        jagged.values(), lengths=torch.tensor([len(bag) for bag in ids], dtype=torch.int64)
    )
    from_offsets = JaggedTensor(jagged.values(), offsets=from_lengths.offsets())
    assert (
        from_lengths.lengths().tolist()
        == from_offsets.lengths().tolist()
        == [len(bag) for bag in ids]
    )
    assert from_lengths.offsets()[-1] == sum(len(bag) for bag in ids)
    assert from_offsets.lengths_or_none() is not None


@pytest.mark.parametrize("name", ["fbgemm", "torch"])
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
    source = JaggedTensor(
        torch.tensor([5, 7, 1]), torch.tensor([0.5, 1.0, 2.0]), lengths=torch.tensor([1, 2])
    )
    target = JaggedTensor.empty_like(source, torch.device("cpu")).copy_(source)
    assert str(target) == str(source)
    assert target.values().data_ptr() != source.values().data_ptr()
    target.offsets()
    assert target.size_in_bytes() == 3 * 8 + 3 * 4 + 2 * 8 + 3 * 8


def test_empty_has_no_sample() -> None:
    jagged = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64)
    assert (jagged.to_dense(), jagged.weights().numel(), jagged.offsets().tolist()) == ([], 0, [0])


def test_to_moves_every_part() -> None:
    moved = JaggedTensor(torch.tensor([5]), torch.tensor([1.0]), lengths=torch.tensor([1])).to(
        torch.device("meta")
    )
    assert (
        moved.device().type == moved.lengths().device.type == moved.weights().device.type == "meta"
    )


def test_to_returns_the_parts_that_are_there_already() -> None:
    jagged = JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1]))
    assert jagged.to(torch.device("cpu"), non_blocking=True).values() is jagged.values()
    assert jagged.to(torch.device("cpu")).offsets_or_none() is None
    jagged.offsets()
    assert jagged.to(torch.device("cpu")).offsets_or_none() is jagged.offsets()


def test_empty_like_without_a_device_has_no_samples() -> None:
    source = JaggedTensor(
        torch.tensor([5, 7, 1]), torch.tensor([0.5, 1.0, 2.0]), lengths=torch.tensor([1, 2])
    )
    empty = JaggedTensor.empty_like(source)
    assert (empty.values().numel(), empty.lengths().numel(), empty.weights().numel()) == (0, 0, 0)
    assert (empty.values().dtype, empty.lengths().dtype, empty.weights().dtype) == (
        torch.int64,
        torch.int64,
        torch.float32,
    )
    assert JaggedTensor.empty_like(source, torch.device("meta")).values().shape == (3,)


def test_copying_between_weighted_and_unweighted_is_refused() -> None:
    plain = JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1]))
    weighted = JaggedTensor(torch.tensor([5]), torch.tensor([1.0]), lengths=torch.tensor([1]))
    message = r"the source has weights and the target has no weights.*empty_like\(source, device\)"
    with pytest.raises(ValueError, match=message):
        plain.copy_(weighted)
    with pytest.raises(ValueError, match="source has no weights"):
        weighted.copy_(plain)


def test_from_dense_counts_in_int32_as_torchrec_does() -> None:
    jagged = JaggedTensor.from_dense(
        [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    )
    assert (jagged.lengths().dtype, jagged.offsets().dtype) == (torch.int32, torch.int32)
    assert jagged.offsets().tolist() == [0, 1, 1, 3]


def test_from_dense_with_other_weights_names_the_sample() -> None:
    values = [torch.tensor([1]), torch.tensor([2, 3])]
    with pytest.raises(ValueError, match="sample 1 has 2 values and 1 weights"):
        JaggedTensor.from_dense(values, [torch.ones(1), torch.ones(1)])
    with pytest.raises(ValueError, match="2 samples of values, 1 of weights"):
        JaggedTensor.from_dense(values, [torch.ones(1)])


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4), st.data()
)
def test_from_dense_lengths_takes_the_first_of_each_row(
    rows: list[list[int]], data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    values = torch.tensor(rows)
    jagged = JaggedTensor.from_dense_lengths(values, torch.tensor(lengths), values * 0.5)
    expected = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    assert [row.tolist() for row in jagged.to_dense()] == expected
    dense = jagged.to_dense_weights()
    assert dense is not None
    assert [row.tolist() for row in dense] == [[number * 0.5 for number in row] for row in expected]
    traced = torch.fx.symbolic_trace(JaggedTensor.from_dense_lengths)
    assert jt_is_equal(traced(values, torch.tensor(lengths), values * 0.5), jagged)
    unweighted = traced(values=values, lengths=torch.tensor(lengths))
    assert unweighted.weights_or_none() is None
    assert torch.equal(unweighted.values(), jagged.values())


@given(one_feature, st.integers(0, 5))
def test_rows_gathered_in_a_graph_are_those_of_the_kernels(drawn: DrawnBatch, width: int) -> None:
    jagged, _, _ = first(drawn)
    gathered = _padded_in_torch(jagged.values(), jagged.offsets(), width, -1.0)
    assert torch.equal(gathered, jagged.to_padded_dense(width, -1.0))
    columns = torch.stack([jagged.values(), jagged.values() + 1], 1)
    two = JaggedTensor(columns, lengths=jagged.lengths())
    assert torch.equal(
        _padded_in_torch(columns, two.offsets(), width, 2.0), two.to_padded_dense(width, 2.0)
    )


def through_every_method(
    values: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """For TorchScript, whose classes know no default arguments from outside their file: all are
    given.
    """
    jagged = JaggedTensor(values, weights, lengths, None)
    again = JaggedTensor.from_dense(jagged.to_dense(), jagged.to_dense_weights()).to(
        torch.device("cpu"), False
    )
    padded = again.to_padded_dense_weights(2, 0.5)
    assert padded is not None
    first = JaggedTensor.from_dense_lengths(values.view(3, 1), torch.tensor([1, 0, 1]), None)
    return (
        again.to_padded_dense(None, -1.0),
        padded,
        first.values(),
        JaggedTensor.empty().to_dense(),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_conversions_run_in_torchscript(dtype: torch.dtype) -> None:
    given = (
        torch.tensor([1, 2, 3]),
        torch.tensor([2, 0, 1], dtype=dtype),
        torch.tensor([0.5, 1.0, 2.0]),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(through_every_method)
        assert torch.jit.script(JaggedTensor.empty)().to_dense() == []
    padded, weights, first_entries, nothing = scripted(*given)
    assert padded.tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert weights.tolist() == [[0.5, 1.0], [0.5, 0.5], [2.0, 0.5]]
    assert (first_entries.tolist(), nothing) == ([1, 3], [])


def test_record_stream_reaches_every_part() -> None:
    seen = []

    class Part(torch.Tensor):
        def record_stream(self, s: object) -> None:
            seen.append((s, self.numel()))

    def part(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers).as_subclass(Part)

    jagged_from_parts(part(1.0), part(1.0), part(1.0), part(0.0, 1.0)).record_stream("stream")
    assert seen == [("stream", 1), ("stream", 1), ("stream", 1), ("stream", 2)]
