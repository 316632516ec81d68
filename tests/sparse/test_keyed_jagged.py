import copy
import pickle
from collections.abc import Iterator
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DrawnBatch, DrawnVariableBatch, examples, jagged_batches, variable_batches

from tutorec._kernels.backend import backend, use_backend
from tutorec._validation import validation
from tutorec.sparse import layout, validate
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import FEW_LISTS

# The fixtures hold one setting for all examples of a test, as they should.
FEW_EXAMPLES = examples(25)
BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
any_batch = st.one_of(jagged_batches(), variable_batches())


@pytest.fixture(params=BACKENDS, autouse=True)
def _both_backends(request: pytest.FixtureRequest) -> Iterator[None]:
    with use_backend(request.param):
        yield


@pytest.fixture(params=[0, FEW_LISTS], ids=["by tensor operations", "in Python"], autouse=True)
def _few_and_many_lists(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of few lists are looked at in another way than large ones: small batches go both ways
    here.
    """
    for module in (layout, validate):
        monkeypatch.setattr(module, "FEW_LISTS", request.param)


def lists_of(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    """The batch as plain lists, read from values, lengths and strides alone."""
    values, lengths, strides = (
        batch.values().tolist(),
        iter(batch.lengths().tolist()),
        batch.stride_per_key(),
    )
    out: dict[str, list[list[int]]] = {}
    position = 0
    for key, stride in zip(batch.keys(), strides, strict=True):
        out[key] = []
        for _ in range(stride):
            length = next(lengths)
            out[key].append(values[position : position + length])
            position += length
    assert (position, list(lengths)) == (len(values), [])
    return out


def assert_is(batch: KeyedJaggedTensor, drawn: DrawnBatch, keys: list[str]) -> None:
    """The batch holds these keys of the drawn lists, in every form in which it can be asked."""
    ids = {key: drawn.ids[key] for key in keys}
    strides = [len(ids[key]) for key in keys]
    assert batch.keys() == keys
    assert batch.stride() == drawn.samples
    assert batch.stride_per_key() == strides
    assert batch.lengths_offset_per_key() == list(accumulate(strides, initial=0))
    assert lists_of(batch) == ids
    assert batch.length_per_key() == [sum(len(bag) for bag in ids[key]) for key in keys]
    offsets = list(accumulate((len(bag) for key in keys for bag in ids[key]), initial=0))
    assert batch.offsets().tolist() == offsets
    assert batch.offset_per_key() == [offsets[bound] for bound in batch.lengths_offset_per_key()]
    assert batch.index_per_key() == {key: index for index, key in enumerate(keys)}
    assert batch.values().dtype == drawn.ids_dtype
    assert batch.lengths().dtype == batch.offsets().dtype == drawn.lengths_dtype
    assert batch.variable_stride_per_key() == isinstance(drawn, DrawnVariableBatch)
    if isinstance(drawn, DrawnVariableBatch):
        assert batch.stride_per_key_per_rank() == [
            drawn.ranks[drawn.keys.index(key)] for key in keys
        ]
    else:
        assert batch.stride_per_key_per_rank() == []
    if drawn.weights is None:
        assert batch.weights_or_none() is None
    else:
        assert batch.weights().tolist() == [
            one for key in keys for bag in drawn.weights[key] for one in bag
        ]


def assert_feature_is(feature: JaggedTensor, drawn: DrawnBatch, key: str) -> None:
    """The jagged tensor holds this key of the drawn lists."""
    bags = drawn.ids[key]
    assert [row.tolist() for row in feature.to_dense()] == bags
    assert feature.lengths().tolist() == [len(bag) for bag in bags]
    assert feature.offsets().tolist() == list(accumulate((len(bag) for bag in bags), initial=0))
    assert feature.offsets().dtype == feature.lengths().dtype == drawn.lengths_dtype
    weights = feature.to_dense_weights()
    assert (None if weights is None else [row.tolist() for row in weights]) == (
        drawn.weights or {}
    ).get(key)


@FEW_EXAMPLES
@given(any_batch)
def test_constructors_hold_the_lists(drawn: DrawnBatch) -> None:
    batch = drawn.kjt()
    assert_is(batch, drawn, drawn.keys)
    ranks = batch.stride_per_key_per_rank() or None
    parts = {"stride": None if ranks else drawn.samples, "stride_per_key_per_rank": ranks}
    by_lengths = KeyedJaggedTensor.from_lengths_sync(
        batch.keys(), batch.values(), batch.lengths(), batch.weights_or_none(), **parts
    )
    by_offsets = KeyedJaggedTensor.from_offsets_sync(
        batch.keys(), batch.values(), batch.offsets(), batch.weights_or_none(), **parts
    )
    by_both = KeyedJaggedTensor(
        batch.keys(),
        batch.values(),
        batch.weights_or_none(),
        batch.lengths(),
        batch.offsets(),
        **parts,
    )
    assert by_lengths.length_per_key_or_none() is not None
    assert by_offsets.offset_per_key_or_none() is not None
    for made in (by_lengths, by_offsets, by_both):
        assert_is(made, drawn, drawn.keys)
        assert made.unsync().length_per_key_or_none() is None
        assert_is(made, drawn, drawn.keys)


@FEW_EXAMPLES
@given(any_batch)
def test_without_validation_every_road_gives_the_same(drawn: DrawnBatch) -> None:
    with validation(False):
        assert_is(drawn.kjt(), drawn, drawn.keys)
        assert drawn.kjt().length_per_key() == [sum(map(len, bags)) for bags in drawn.ids.values()]
        for key, feature in drawn.kjt().to_dict().items():
            assert_feature_is(feature, drawn, key)
            assert_feature_is(drawn.kjt()[key], drawn, key)
        for part in drawn.kjt().split([1] * len(drawn.keys)):
            assert_is(part, drawn, part.keys())


@FEW_EXAMPLES
@given(any_batch)
def test_to_dict_and_indexing_return_one_feature(drawn: DrawnBatch) -> None:
    parts = drawn.kjt().to_dict()
    assert list(parts) == drawn.keys
    for key, part in parts.items():
        assert part.offsets_or_none() is not None
        assert_feature_is(part, drawn, key)
        assert_feature_is(drawn.kjt()[key], drawn, key)
        assert_feature_is(drawn.kjt().to_dict(compute_offsets=False)[key], drawn, key)


@FEW_EXAMPLES
@given(any_batch)
def test_from_jt_dict_inverts_to_dict(drawn: DrawnBatch) -> None:
    made = KeyedJaggedTensor.from_jt_dict(drawn.kjt().to_dict())
    strides = [len(bags) for bags in drawn.ids.values()]
    assert lists_of(made) == drawn.ids
    assert made.variable_stride_per_key() == (len(set(strides)) > 1)
    assert made.stride_per_key_per_rank() == (
        [[one] for one in strides] if len(set(strides)) > 1 else []
    )
    assert (made.stride(), made.stride_per_key()) == (max(strides), strides)
    assert made.length_per_key_or_none() == [sum(map(len, bags)) for bags in drawn.ids.values()]
    assert (
        None if made.weights_or_none() is None else made.weights().tolist()
    ) == drawn.flat_weights


@FEW_EXAMPLES
@given(any_batch, st.data())
def test_split_cuts_the_keys(drawn: DrawnBatch, data: st.DataObject) -> None:
    keys = drawn.keys
    cuts = sorted(data.draw(st.lists(st.integers(0, len(keys)), max_size=3)))
    bounds = data.draw(st.sampled_from([[0, *cuts, len(keys)], list(range(len(keys) + 1))]))
    segments = [high - low for low, high in pairwise(bounds)]
    batch = drawn.kjt()
    parts = batch.split(segments)
    assert len(parts) == len(segments)
    for part, (low, high) in zip(parts, pairwise(bounds), strict=True):
        assert_is(part, drawn, keys[low:high])
        if part.values().numel():
            assert (
                part.values().untyped_storage().data_ptr()
                == batch.values().untyped_storage().data_ptr()
            )


@FEW_EXAMPLES
@given(any_batch, st.data())
def test_permute_reorders_repeats_and_leaves_out(drawn: DrawnBatch, data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, len(drawn.keys) - 1), max_size=6))
    permuted = drawn.kjt().permute(order)
    keys = [drawn.keys[index] for index in order]
    assert permuted.keys() == keys
    assert permuted.stride() == drawn.samples
    assert permuted.stride_per_key() == [len(drawn.ids[key]) for key in keys]
    assert permuted.lengths().tolist() == [len(bag) for key in keys for bag in drawn.ids[key]]
    assert permuted.values().tolist() == [
        one for key in keys for bag in drawn.ids[key] for one in bag
    ]
    if drawn.weights is not None:
        assert permuted.weights().tolist() == [
            one for key in keys for bag in drawn.weights[key] for one in bag
        ]
    if len(set(keys)) == len(keys):
        assert_is(permuted, drawn, keys)


@FEW_EXAMPLES
@given(any_batch, st.data())
def test_concat_inverts_split(drawn: DrawnBatch, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(drawn.keys)))
    for segments in ([1] * len(drawn.keys), [cut, len(drawn.keys) - cut]):
        parts = [part for part in drawn.kjt().split(segments) if part.keys()]
        assert_is(KeyedJaggedTensor.concat(parts), drawn, drawn.keys)
    assert_is(KeyedJaggedTensor.concat([drawn.kjt()]), drawn, drawn.keys)


@FEW_EXAMPLES
@given(any_batch)
def test_copies_hold_the_lists(drawn: DrawnBatch) -> None:
    batch, cpu = drawn.kjt(), torch.device("cpu")
    for copied in (
        KeyedJaggedTensor.empty_like(batch, cpu).copy_(batch),
        pickle.loads(pickle.dumps(batch)),
        copy.deepcopy(batch),
        batch.to(cpu),
        batch.to(cpu, dtype=torch.float64),
        batch.flatten_lengths(),
        KeyedJaggedTensor.concat([batch]),
    ):
        assert_is(copied, drawn, drawn.keys)


@FEW_EXAMPLES
@given(any_batch)
def test_empty_like_keeps_strides_and_dtypes(drawn: DrawnBatch) -> None:
    batch = drawn.kjt()
    none = KeyedJaggedTensor.empty_like(batch)
    assert (none.keys(), none.stride(), none.to_dict()) == ([], batch.stride(), {})
    assert none.stride_per_key_per_rank() == batch.stride_per_key_per_rank()
    assert (none.values().dtype, none.values().numel()) == (drawn.ids_dtype, 0)
    assert (none.lengths().dtype, none.lengths().numel()) == (drawn.lengths_dtype, 0)
    assert (none.weights_or_none() is None) == (drawn.weights is None)
    same = KeyedJaggedTensor.empty_like(batch, torch.device("meta"))
    assert (same.keys(), same.stride_per_key(), same.device().type) == (
        drawn.keys,
        batch.stride_per_key(),
        "meta",
    )
    assert same.values().shape == batch.values().shape


@FEW_EXAMPLES
@given(any_batch)
def test_size_in_bytes_is_that_of_the_parts(drawn: DrawnBatch) -> None:
    batch = drawn.kjt()
    batch.lengths(), batch.offsets()
    ids, lists = len(drawn.flat_ids), len(drawn.lengths)
    expected = ids * drawn.ids_dtype.itemsize + (2 * lists + 1) * drawn.lengths_dtype.itemsize
    expected += 0 if drawn.weights is None else 4 * ids
    if isinstance(drawn, DrawnVariableBatch):
        expected += sum(map(len, drawn.ranks)) * (8 if drawn.ranks_as_tensor else 4)
    assert batch.size_in_bytes() == expected


@FEW_EXAMPLES
@given(any_batch)
def test_the_printed_form_shows_one_list_per_sample(drawn: DrawnBatch) -> None:
    lines = []
    for key, bags in drawn.ids.items():
        text = str(bags)
        if drawn.weights is not None:
            text = f'{{\n        "values": {bags},\n        "weights": {drawn.weights[key]}\n    }}'
        lines.append(f'    "{key}": {text}')
    assert str(drawn.kjt()) == "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"


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
    assert (batch.offset_per_key(), batch.length_per_key(), batch.stride()) == (
        [0, 4, 8],
        [4, 4],
        2,
    )
    assert (batch.stride_per_key(), batch.variable_stride_per_key()) == ([2, 2], False)


def test_features_with_equal_samples_can_be_a_variable_batch() -> None:
    batch = documents_batch()
    variable = KeyedJaggedTensor.from_jt_dict(batch.to_dict(), force_variable_stride=True)
    assert variable.stride_per_key_per_rank() == [[2], [2]]
    assert variable.lengths().tolist() == batch.lengths().tolist()


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
    assert (batch.keys(), batch.stride(), batch.to_dict(), batch.length_per_key()) == (
        [],
        0,
        {},
        [],
    )
    assert KeyedJaggedTensor.from_jt_dict({}).keys() == []


def test_a_batch_without_samples_keeps_its_keys() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([], dtype=torch.int64), lengths=torch.tensor([], dtype=torch.int64)
    )
    assert (batch.stride(), batch.length_per_key(), list(batch.to_dict())) == (
        0,
        [0, 0],
        ["a", "b"],
    )
    assert batch.permute([1]).keys() == ["b"]
    assert batch["b"].offsets().tolist() == [0]


def test_to_casts_weights_only() -> None:
    batch = KeyedJaggedTensor(
        ["a"], torch.tensor([1]), torch.tensor([1.0]), lengths=torch.tensor([1])
    )
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
    assert KeyedJaggedTensor(names, torch.tensor([1, 2]), lengths=torch.tensor([1, 1])).permute(
        [1]
    ).keys() == ["b"]  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [[0, 7], [-1]])
def test_permute_to_a_position_without_a_key_names_it_and_the_keys(positions):
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with pytest.raises(
        ValueError, match=rf"permute: position {positions[-1]} is outside of 0 to 1; .*'a', 'b'"
    ):
        kjt.permute(positions)


def variable_batch(**more: object) -> KeyedJaggedTensor:
    """user: 2 lists, item: 3; three samples, of which the last two mean the same list of user."""
    return KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([7, 1, 2, 3, 4]),
        lengths=torch.tensor([1, 0, 2, 1, 1]),
        stride_per_key_per_rank=[[2], [3]],
        **{"inverse_indices": (["user", "item"], torch.tensor([[0, 1, 1], [0, 1, 2]])), **more},
    )


def test_inverse_indices_say_the_samples_of_the_whole_batch() -> None:
    batch = variable_batch()
    keys, indices = batch.inverse_indices()
    assert (keys, indices.tolist()) == (["user", "item"], [[0, 1, 1], [0, 1, 2]])
    assert (batch.stride(), batch.stride_per_key()) == (3, [2, 3])
    assert variable_batch(inverse_indices=None).stride() == 3
    with pytest.raises(ValueError, match=r"no.*indices; pass inverse_indices="):
        variable_batch(inverse_indices=None).inverse_indices()


def test_inverse_indices_stay_with_the_whole_batch() -> None:
    batch, cpu = variable_batch(), torch.device("cpu")
    for whole in (
        batch.to(cpu),
        batch.flatten_lengths(),
        batch.split([2])[0],
        batch.split([0, 2])[1],
        copy.deepcopy(batch),
        pickle.loads(pickle.dumps(batch)),
        KeyedJaggedTensor.concat([batch]),
        KeyedJaggedTensor.empty_like(batch, cpu).copy_(batch),
    ):
        assert whole.inverse_indices()[0] == ["user", "item"]
        assert whole.inverse_indices()[1].tolist() == [[0, 1, 1], [0, 1, 2]]
    for part in (*batch.split([1, 1]), batch.permute([1, 0])):
        assert part.inverse_indices_or_none() is None
        assert part.stride() == 3


def test_inverse_indices_of_joined_batches_stand_below_each_other() -> None:
    other = KeyedJaggedTensor(
        ["shop"],
        torch.tensor([5]),
        lengths=torch.tensor([1]),
        stride_per_key_per_rank=[[1]],
        inverse_indices=(["shop"], torch.tensor([[0, 0, 0]])),
    )
    joined = KeyedJaggedTensor.concat([variable_batch(), other])
    assert joined.inverse_indices()[0] == ["user", "item", "shop"]
    assert joined.inverse_indices()[1].tolist() == [[0, 1, 1], [0, 1, 2], [0, 0, 0]]
    assert joined.stride_per_key_per_rank() == [[2], [3], [1]]


def test_strides_of_keys_alone_make_a_variable_batch() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1]), stride_per_key=[1, 2]
    )
    assert (batch.variable_stride_per_key(), batch.stride_per_key_per_rank()) == (True, [[1], [2]])
    assert lists_of(batch) == {"a": [[1]], "b": [[2], [3]]}
    equal = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]), stride_per_key=[1, 1]
    )
    assert not equal.variable_stride_per_key()


def test_a_variable_batch_without_lists_has_no_samples() -> None:
    none = torch.tensor([], dtype=torch.int64)
    batch = KeyedJaggedTensor(["a"], none, lengths=none, stride_per_key_per_rank=[[]])
    assert (batch.stride(), batch.stride_per_key(), batch["a"].lengths().numel()) == (0, [0], 0)


def test_lengths_by_key_and_sample_are_flattened() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([[1, 0], [0, 2]])
    )
    assert (batch.stride(), batch.lengths().tolist()) == (2, [1, 0, 0, 2])
    assert batch.flatten_lengths().lengths().tolist() == [1, 0, 0, 2]


def test_a_batch_without_keys_needs_neither_lengths_nor_offsets() -> None:
    batch = KeyedJaggedTensor([], torch.tensor([], dtype=torch.int64))
    assert (str(batch), batch.lengths().numel(), batch.stride()) == ("KeyedJaggedTensor()\n", 0, 0)


def test_empty_lengths_and_offsets_may_have_any_dtype() -> None:
    none = torch.tensor([])
    first = KeyedJaggedTensor(["a"], none, lengths=none)
    second = KeyedJaggedTensor(["b"], none, offsets=none)
    both = KeyedJaggedTensor.concat([first, second])
    assert (both["a"].lengths().numel(), both["b"].values().numel(), list(both.to_dict())) == (
        0,
        0,
        ["a", "b"],
    )
    matrix = KeyedJaggedTensor.from_lengths_sync(["a", "b"], none, torch.tensor([[], []]))
    assert (matrix.length_per_key(), matrix.to_dict()["b"].lengths().numel()) == ([0, 0], 0)


def test_on_the_meta_device_ids_per_key_are_a_stand_in() -> None:
    meta = torch.device("meta")
    batch = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.empty(7, device=meta),
        lengths=torch.empty(6, dtype=torch.int64, device=meta),
    )
    assert batch.sync().length_per_key() == [3, 2, 2]
    assert batch.unsync().offset_per_key() == [0, 3, 5, 7]
    assert KeyedJaggedTensor.from_jt_dict(batch.to_dict()).values().shape == (7,)


def test_copy_takes_over_what_the_other_knows() -> None:
    source = variable_batch().sync()
    target = KeyedJaggedTensor.empty_like(source, torch.device("cpu"))
    before = target.to_dict()
    assert target.copy_(source) is target
    assert target.to_dict() is not before
    assert target["item"].to_dense()[0].tolist() == [1, 2]
    unweighted = KeyedJaggedTensor(
        ["a"], torch.tensor([1]), torch.ones(1), lengths=torch.tensor([1])
    )
    with pytest.raises(ValueError, match="has no weights"):
        unweighted.copy_(KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])))
    with pytest.raises(ValueError, match=r"no weights.*empty_like"):
        KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1])).copy_(unweighted)
    with pytest.raises(ValueError, match=r"keys \['a'\].*\['b'\]"):
        KeyedJaggedTensor(["b"], torch.tensor([1]), torch.ones(1), lengths=torch.tensor([1])).copy_(
            unweighted
        )


def test_clear_storage_gives_the_memory_back() -> None:
    batch = KeyedJaggedTensor(["a"], torch.arange(4), torch.ones(4), lengths=torch.tensor([1, 3]))
    batch.offsets()
    assert batch.clear_storage() == 4 * 8 + 4 * 4 + 2 * 8 + 3 * 8
    assert batch.values().untyped_storage().nbytes() == 0


def test_many_single_keys_have_their_offsets() -> None:
    batch = KeyedJaggedTensor.from_jt_dict(
        {
            f"f{index}": JaggedTensor(torch.arange(index), lengths=torch.tensor([index, 0]))
            for index in range(6)
        }
    )
    parts = batch.split([1] * 6)
    assert [part.offsets().tolist() for part in parts] == [[0, index, index] for index in range(6)]
