import copy
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROPERTY, DrawnBatch, jagged_batches

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def lists_of(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    """The batch as plain lists, read from values and lengths alone."""
    values, lengths = batch.values().tolist(), batch.lengths().tolist()
    out: dict[str, list[list[int]]] = {}
    position = 0
    for index, key in enumerate(batch.keys()):
        out[key] = []
        for length in lengths[index * batch.stride() : (index + 1) * batch.stride()]:
            out[key].append(values[position : position + length])
            position += length
    assert position == len(values)
    return out


def assert_is(batch: KeyedJaggedTensor, drawn: DrawnBatch, keys: list[str]) -> None:
    """The batch holds these keys of the drawn lists, in every form in which it can be asked."""
    ids = {key: drawn.ids[key] for key in keys}
    assert batch.keys() == keys
    assert batch.stride() == drawn.samples
    assert lists_of(batch) == ids
    assert batch.length_per_key() == [sum(len(bag) for bag in ids[key]) for key in keys]
    offsets = [0]
    for key in keys:
        for bag in ids[key]:
            offsets.append(offsets[-1] + len(bag))
    assert batch.offsets().tolist() == offsets
    assert batch.offset_per_key() == [offsets[index * drawn.samples] for index in range(len(keys) + 1)]
    assert batch.values().dtype == drawn.ids_dtype
    assert batch.lengths().dtype == batch.offsets().dtype == drawn.lengths_dtype
    if drawn.weights is None:
        assert batch.weights_or_none() is None
    else:
        assert batch.weights().tolist() == [one for key in keys for bag in drawn.weights[key] for one in bag]


@PROPERTY
@given(jagged_batches())
def test_constructors_hold_the_lists(drawn: DrawnBatch) -> None:
    assert_is(drawn.kjt(), drawn, drawn.keys)
    batch = drawn.kjt()
    by_lengths = KeyedJaggedTensor.from_lengths_sync(
        batch.keys(), batch.values(), batch.lengths(), batch.weights_or_none(), stride=drawn.samples
    )
    by_offsets = KeyedJaggedTensor.from_offsets_sync(
        batch.keys(), batch.values(), batch.offsets(), batch.weights_or_none(), stride=drawn.samples
    )
    assert by_lengths.length_per_key_or_none() is not None
    assert by_offsets.offset_per_key_or_none() is not None
    assert_is(by_lengths, drawn, drawn.keys)
    assert_is(by_offsets, drawn, drawn.keys)
    assert by_lengths.unsync().length_per_key_or_none() is None


@PROPERTY
@given(jagged_batches())
def test_from_jt_dict_inverts_to_dict(drawn: DrawnBatch) -> None:
    parts = drawn.kjt().to_dict()
    assert list(parts) == drawn.keys
    for key, part in parts.items():
        assert [row.tolist() for row in part.to_dense()] == drawn.ids[key]
        assert part.offsets()[0] == 0
        assert part.offsets().dtype == drawn.lengths_dtype
    assert_is(KeyedJaggedTensor.from_jt_dict(parts), drawn, drawn.keys)


@PROPERTY
@given(jagged_batches())
def test_indexing_returns_one_feature(drawn: DrawnBatch) -> None:
    batch = drawn.kjt()
    for key in drawn.keys:
        assert [row.tolist() for row in batch[key].to_dense()] == drawn.ids[key]
        weights = batch[key].to_dense_weights()
        assert weights is None or drawn.weights is not None
        assert weights is None or [row.tolist() for row in weights] == (drawn.weights or {})[key]
    assert batch.index_per_key() == {key: index for index, key in enumerate(drawn.keys)}


@PROPERTY
@given(jagged_batches(), st.data())
def test_split_cuts_the_keys(drawn: DrawnBatch, data: st.DataObject) -> None:
    keys = drawn.keys
    cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=3)))
    bounds = [0, *cuts, len(keys)]
    segments = [high - low for low, high in pairwise(bounds)]
    batch = drawn.kjt()
    parts = batch.split(segments)
    assert len(parts) == len(segments)
    for part, (low, high) in zip(parts, pairwise(bounds), strict=True):
        assert_is(part, drawn, keys[low:high])
        if part.values().numel():
            assert part.values().untyped_storage().data_ptr() == batch.values().untyped_storage().data_ptr()


@PROPERTY
@given(jagged_batches(), st.data())
def test_permute_reorders_repeats_and_leaves_out(drawn: DrawnBatch, data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(drawn.keys) - 1), max_size=6))
    permuted = drawn.kjt().permute(order)
    keys = [drawn.keys[index] for index in order]
    assert permuted.keys() == keys
    assert permuted.stride() == drawn.samples
    assert permuted.lengths().tolist() == [len(bag) for key in keys for bag in drawn.ids[key]]
    assert permuted.values().tolist() == [one for key in keys for bag in drawn.ids[key] for one in bag]
    if len(set(keys)) == len(keys):
        assert_is(permuted, drawn, keys)


@PROPERTY
@given(jagged_batches())
def test_concat_inverts_split(drawn: DrawnBatch) -> None:
    parts = drawn.kjt().split([1] * len(drawn.keys))
    assert_is(KeyedJaggedTensor.concat(parts), drawn, drawn.keys)
    assert_is(KeyedJaggedTensor.concat([drawn.kjt()]), drawn, drawn.keys)


@PROPERTY
@given(jagged_batches())
def test_copies_hold_the_lists(drawn: DrawnBatch) -> None:
    batch = drawn.kjt()
    assert_is(KeyedJaggedTensor.empty_like(batch, torch.device("cpu")).copy_(batch), drawn, drawn.keys)
    assert_is(pickle.loads(pickle.dumps(batch)), drawn, drawn.keys)
    assert_is(copy.deepcopy(batch), drawn, drawn.keys)
    assert_is(batch.to(torch.device("cpu")), drawn, drawn.keys)
    assert_is(batch.flatten_lengths(), drawn, drawn.keys)


def documents_batch() -> KeyedJaggedTensor:
    product = JaggedTensor(values=torch.tensor([1, 2, 1, 5]), lengths=torch.tensor([3, 1]))
    user = JaggedTensor(values=torch.tensor([2, 3, 4, 1]), lengths=torch.tensor([2, 2]))
    return KeyedJaggedTensor.from_jt_dict({"product": product, "user": user})


def test_documents_batch_has_its_offsets() -> None:
    batch = documents_batch()
    assert batch.keys() == ["product", "user"]
    assert batch.lengths().tolist() == [3, 1, 2, 2]
    assert batch.values().tolist() == [1, 2, 1, 5, 2, 3, 4, 1]
    assert batch.offsets().tolist() == [0, 3, 4, 6, 8]
    assert (batch.offset_per_key(), batch.length_per_key(), batch.stride()) == ([0, 4, 8], [4, 4], 2)
    assert (batch.stride_per_key(), batch.variable_stride_per_key()) == ([2, 2], False)


def test_to_dict_is_kept() -> None:
    batch = documents_batch()
    assert batch.to_dict() is batch.to_dict()
    assert batch.permute([0]).to_dict() is not batch.to_dict()


def test_to_dict_shares_the_ids_memory() -> None:
    batch = documents_batch()
    batch.to_dict()["user"].values()[0] = 9
    assert batch.values()[4] == 9


def test_to_dict_without_offsets_derives_them_when_asked() -> None:
    parts = documents_batch().to_dict(compute_offsets=False)
    assert parts["user"].offsets_or_none() is None
    assert parts["user"].offsets().tolist() == [0, 2, 4]


def test_empty_has_no_key() -> None:
    batch = KeyedJaggedTensor.empty(is_weighted=True)
    assert (batch.keys(), batch.stride(), batch.to_dict(), batch.length_per_key()) == ([], 0, {}, [])
    assert KeyedJaggedTensor.from_jt_dict({}).keys() == []


def test_a_batch_without_samples_keeps_its_keys() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([], dtype=torch.int64), lengths=torch.tensor([], dtype=torch.int64)
    )
    assert (batch.stride(), batch.length_per_key(), list(batch.to_dict())) == (0, [0, 0], ["a", "b"])
    assert batch.permute([1]).keys() == ["b"]
    assert batch["b"].offsets().tolist() == [0]


def test_to_casts_weights_only() -> None:
    batch = KeyedJaggedTensor(["a"], torch.tensor([1]), torch.tensor([1.0]), lengths=torch.tensor([1]))
    moved = batch.to(torch.device("cpu"), dtype=torch.float64)
    assert (moved.values().dtype, moved.weights().dtype) == (torch.int64, torch.float64)


def test_to_another_device_keeps_what_is_known() -> None:
    batch = documents_batch().sync()
    moved = batch.to(torch.device("meta"))
    assert moved.device().type == "meta"
    assert moved.length_per_key() == [4, 4]


def test_size_in_bytes_counts_every_part() -> None:
    batch = KeyedJaggedTensor(
        ["a"], torch.tensor([1, 2]), torch.ones(2), lengths=torch.tensor([1, 1], dtype=torch.int32)
    )
    assert batch.offsets().numel() == 3
    assert batch.size_in_bytes() == 2 * 8 + 2 * 4 + 2 * 4 + 3 * 4


def test_host_facts_given_by_the_caller_are_used() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2]),
        lengths=torch.tensor([1, 1]),
        length_per_key=[1, 1],
        offset_per_key=[0, 1, 2],
        index_per_key={"a": 0, "b": 1},
    )
    assert batch.length_per_key() == [1, 1]
    assert batch["b"].values().tolist() == [2]


def test_keys_are_copied_from_any_sequence() -> None:
    keys = ["a", "b"]
    batch = KeyedJaggedTensor(keys, torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    keys.reverse()
    assert batch.keys() == ["a", "b"]
    names = dict.fromkeys(["a", "b"]).keys()
    assert KeyedJaggedTensor(names, torch.tensor([1, 2]), lengths=torch.tensor([1, 1])).permute([1]).keys() == ["b"]  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [[0, 7], [-1]])
def test_permute_to_a_position_without_a_key_names_it_and_the_keys(positions):
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=rf"permute: positions \[{positions[-1]}\] are outside of 0 to 1; .*'a', 'b'"):
        kjt.permute(positions)
