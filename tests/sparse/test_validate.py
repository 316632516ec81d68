import runpy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tutorec import _validation
from tutorec._validation import validation, validation_enabled
from tutorec.sparse import layout, validate
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def kjt(**parts: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**{"keys": ["item", "user"], "values": ints(7, 8, 9, 4, 5), **parts})


BAD_BATCHES = {
    "neither": ({}, "neither lengths nor offsets"),
    "sum too small": (
        {"lengths": ints(2, 1, 0, 1)},
        "add up to 4, and there are 5 values.*one of the 4 lists",
    ),
    "sum too large": ({"lengths": ints(2, 1, 1, 2)}, "add up to 6, and there are 5 values"),
    "negative": ({"lengths": ints(2, 1, -1, 3)}, r"lengths\[2\] = -1 \(feature 'user', sample 0\)"),
    "negative, sum right": (
        {"lengths": ints(-1, 3, 1, 2)},
        r"lengths\[0\] = -1 \(feature 'item', sample 0\)",
    ),
    "falling": (
        {"offsets": ints(0, 2, 1, 3, 5)},
        r"offsets\[1\] = 2 and offsets\[2\] = 1 \(feature 'item', sample 1\)",
    ),
    "start": ({"offsets": ints(1, 2, 3, 3, 5)}, r"start at 0, got offsets\[0\] = 1"),
    "end": ({"offsets": ints(0, 2, 3, 3, 4)}, "offsets end at 4, and there are 5 values"),
    "disagree": (
        {"lengths": ints(2, 1, 0, 2), "offsets": ints(0, 2, 3, 4, 5)},
        r"lengths\[2\] = 0, and the offsets give 1 \(feature 'user', sample 0\)",
    ),
    "different counts": (
        {"lengths": ints(2, 1, 0, 2), "offsets": ints(0, 2, 3, 5)},
        "4 lengths and 4 offsets",
    ),
    "no multiple": (
        {"lengths": ints(2, 1, 2)},
        "3 lists of ids for 2 keys.*3 is not a multiple of 2",
    ),
    "stride": (
        {"lengths": ints(2, 1, 0, 2), "stride": 3},
        "4 lists of ids for 2 keys.*stride says 3",
    ),
    "weights": ({"lengths": ints(2, 1, 0, 2), "weights": torch.ones(4)}, "4 weights for 5 values"),
    "duplicate": (
        {"keys": ["item", "item"], "lengths": ints(2, 1, 0, 2)},
        r"occur twice: \['item'\]",
    ),
    "string": (
        {"keys": "item", "lengths": ints(2, 1, 0, 2)},
        r"got the string 'item'; write \['item'\]",
    ),
    "float lengths": (
        {"lengths": torch.tensor([2.0, 1.0, 0.0, 2.0])},
        "int32 or int64, got torch.float32",
    ),
    "shape": ({"offsets": ints(0, 2, 3, 3).view(2, 2)}, r"one dimension, got shape \[2, 2\]"),
    "no offsets": ({"offsets": ints()}, "lengths add up to 0, and there are 5 values"),
    "device": ({"lengths": ints(2, 1, 0, 2).to("meta")}, "lengths are on meta and values on cpu"),
    "few strides": (
        {"lengths": ints(2, 1, 0, 2), "stride_per_key_per_rank": [[4]]},
        r"shape \[1, 1\] and there are 2 keys.*such as \[\[2\], \[3\]\]",
    ),
    "negative stride": (
        {"lengths": ints(2, 1, 0, 2), "stride_per_key_per_rank": [[5, 0], [0, -1]]},
        "says -1 samples for feature 'user' of rank 1",
    ),
    "strides of more lists": (
        {"lengths": ints(2, 1, 0, 2), "stride_per_key_per_rank": [[1], [4]]},
        r"4 lists of ids .*_per_rank says .*1, 'user': 4\} samples, .* up to 5 lists; .* change$",
    ),
    "equal strides of more lists": (
        {"lengths": ints(2, 1, 2), "stride_per_key_per_rank": [[1, 1], [2, 0]]},
        r"3 lists of ids .*_per_rank says .*2, 'user': 2\} samples, .* up to 4 lists; .* change$",
    ),
    "strides of ranks that differ in number": (
        {"lengths": ints(2, 3), "stride_per_key_per_rank": [[1], [1, 0]]},
        r"stride_per_key_per_rank \[\[1\], \[1, 0\]\] must hold one list for each key",
    ),
    "strides that are not integers": (
        {"lengths": ints(2, 3), "stride_per_key_per_rank": torch.tensor([[1.0], [1.0]])},
        "stride_per_key_per_rank is torch.float32, and numbers of samples are integers",
    ),
    "samples of more lists": (
        {"lengths": ints(2, 1, 2), "stride_per_key": [2, 2]},
        r"stride_per_key says \{'item': 2, 'user': 2\} samples, which add up to 4 lists",
    ),
    "samples of fewer keys": (
        {"lengths": ints(2, 3), "stride_per_key": [2]},
        r"stride_per_key \[2\] has 1 numbers and there are 2 keys",
    ),
    "negative samples": (
        {"lengths": ints(2, 3), "stride_per_key": [3, -1]},
        r"stride_per_key says \[3, -1\] samples .*; a number of samples is 0 or more",
    ),
    "samples beside other strides": (
        {
            "lengths": ints(2, 1, 2),
            "stride_per_key": [2, 1],
            "stride_per_key_per_rank": [[1], [2]],
        },
        r"stride_per_key says \[2, 1\] samples, and stride_per_key_per_rank adds up to \[1, 2\]",
    ),
    "samples beside another stride": (
        {"lengths": ints(2, 3), "stride_per_key": [1, 1], "stride": 7},
        r"stride says 7 samples, and stride_per_key \[1, 1\]",
    ),
    "no keys": ({"keys": [], "lengths": ints(2, 3)}, "a batch without keys has no lists"),
    "set": (
        {"keys": {"item", "user"}, "lengths": ints(2, 3)},
        "keys are a set, which has no order; .* give a list",
    ),
    "number": (
        {"keys": ["item", 7], "lengths": ints(2, 3)},
        "keys must be strings, the names of features; got 7, int",
    ),
    "bytes": (
        {"keys": b"item", "lengths": ints(2, 3)},
        r"got the string b'item'; write \[b'item'\]",
    ),
    "device of weights": (
        {"lengths": ints(2, 3), "weights": torch.ones(5, device="meta")},
        "weights are on meta and values on cpu",
    ),
    "one weight": (
        {"lengths": ints(2, 3), "weights": torch.tensor(1.0)},
        "one number in place of weights for 5 values",
    ),
    "inverse floats": (
        {
            "lengths": ints(2, 3),
            "stride_per_key_per_rank": [[1], [1]],
            "inverse_indices": (["item"], torch.zeros(1, 1)),
        },
        "inverse_indices are torch.float32, .* convert them: inverse_indices.long",
    ),
    "negative, variable batch": (
        {"lengths": ints(2, 4, 0, -1), "stride_per_key_per_rank": [[1], [3]]},
        r"lengths\[3\] = -1 \(feature 'user', sample 2\)",
    ),
    "inverse shape": (
        {
            "lengths": ints(2, 3),
            "stride_per_key_per_rank": [[1], [1]],
            "inverse_indices": (["item"], ints(0, 0)),
        },
        r"inverse_indices have shape \[2\] for the keys \['item'\]",
    ),
    "inverse keys": (
        {
            "lengths": ints(2, 3),
            "stride_per_key_per_rank": [[1], [1]],
            "inverse_indices": (["shop"], ints(0).view(1, 1)),
        },
        r"inverse_indices name \['shop'\], and the keys are \['item', 'user'\]",
    ),
    "inverse beyond": (
        {
            "lengths": ints(2, 1, 2),
            "stride_per_key_per_rank": [[2], [1]],
            "inverse_indices": (["user", "item"], ints(0, 0, 1, 1, 0, 2).view(2, 3)),
        },
        r"feature 'user', sample 2, hold 1, and the feature has 1 lists \(0 to 0\)",
    ),
    "length_per_key": (
        {"lengths": ints(2, 1, 0, 2), "length_per_key": [2, 3]},
        r"length_per_key is \[2, 3\], and the other arguments say \[3, 2\]",
    ),
    "offset_per_key": (
        {"lengths": ints(2, 1, 0, 2), "offset_per_key": [0, 2, 5]},
        r"offset_per_key is \[0, 2, 5\], and the other arguments say \[0, 3, 5\]",
    ),
}


@pytest.mark.parametrize("few", [0, layout.FEW_LISTS], ids=["by tensor operations", "in Python"])
@pytest.mark.parametrize(("parts", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_a_bad_batch_is_refused_with_the_numbers(
    parts: dict[str, Any], message: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (layout, validate):
        monkeypatch.setattr(module, "FEW_LISTS", few)
    with pytest.raises(ValueError, match=message):
        kjt(**parts).sync()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "neither lengths nor offsets"),
        ({"lengths": ints(2, 2)}, "add up to 4, and there are 5 values"),
        ({"lengths": ints(6, -1)}, r"lengths\[1\] = -1 \(sample 1\)"),
        ({"offsets": ints(0, 6, 5)}, r"offsets\[1\] = 6 and offsets\[2\] = 5 \(sample 1\)"),
        ({"lengths": ints(5), "weights": torch.ones(6)}, "6 weights for 5 values"),
    ],
)
def test_a_bad_jagged_tensor_is_refused_with_the_numbers(
    parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        JaggedTensor(ints(7, 8, 9, 4, 5), **parts)


WRAPPED = ints(*[2**62] * 4)  # together 2 ** 64, which an int64 takes for 0


@pytest.mark.parametrize("lists", [4, 400], ids=["few", "many"])
def test_lengths_whose_sum_wraps_are_refused_with_their_sum(lists: int) -> None:
    lengths, message = (
        WRAPPED.repeat(lists // 4),
        f"lengths add up to {lists * 2**62}, and there are 0 values",
    )
    with pytest.raises(ValueError, match=message):
        KeyedJaggedTensor(["item", "user"], ints(), lengths=lengths).sync()
    with pytest.raises(ValueError, match=message):
        JaggedTensor(ints(), lengths=lengths)
    ends = torch.cat([ints(0), lengths.cumsum(0)])
    for parts in ({"offsets": ends}, {"offsets": ends, "lengths": lengths}):
        with pytest.raises(
            ValueError,
            match=r"not.*offsets\[1\] = 4611686018427387904.*offsets\[2\]",
        ):
            KeyedJaggedTensor(["item", "user"], ints(), **parts).sync()
        with pytest.raises(ValueError, match="offsets must not fall"):
            JaggedTensor(ints(), **parts)


def test_more_ids_than_int32_counts_are_refused_with_int32_lengths() -> None:
    ids = torch.zeros(1, dtype=torch.int32).expand(2**31)
    lengths = torch.tensor([2**30, 2**30], dtype=torch.int32)
    message = (
        "2147483648 values, and lengths or offsets in int32, which count up to 2147483647; "
        "convert them: lengths.lon"
    )
    with pytest.raises(ValueError, match=f"KeyedJaggedTensor: {message}"):
        KeyedJaggedTensor(["item"], ids, lengths=lengths)
    with pytest.raises(ValueError, match=f"JaggedTensor: {message}"):
        JaggedTensor(ids, lengths=lengths)
    assert KeyedJaggedTensor(["item"], ids, lengths=lengths.long()).offsets().tolist() == [
        0,
        2**30,
        2**31,
    ]
    assert JaggedTensor(ids, lengths=lengths.long()).offsets().tolist() == [0, 2**30, 2**31]
    few = KeyedJaggedTensor(
        ["item"], ids[:-1], lengths=lengths - torch.tensor([0, 1], dtype=torch.int32)
    )
    assert few.offsets().tolist() == [0, 2**30, 2**31 - 1]


def test_batches_are_not_joined_to_more_ids_than_int32_counts() -> None:
    ids, lengths = (
        torch.empty(2**30, device="meta"),
        torch.empty(1, dtype=torch.int32, device="meta"),
    )
    one, two = (KeyedJaggedTensor([key], ids, lengths=lengths) for key in "ab")
    with pytest.raises(ValueError, match=r"2147483648 values.*int32"):
        KeyedJaggedTensor.concat([one, two])
    parts = {key: JaggedTensor(ids, lengths=lengths) for key in "ab"}
    with pytest.raises(ValueError, match=r"from_jt_dict: 2147483648 values.*int32"):
        KeyedJaggedTensor.from_jt_dict(parts)


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_lengths_and_offsets_may_differ_in_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    batch = kjt(lengths=ints(2, 1, 0, 2).to(dtypes[0]), offsets=ints(0, 2, 3, 3, 5).to(dtypes[1]))
    assert batch.length_per_key() == [3, 2]


def test_a_missing_key_is_named_with_the_keys_there() -> None:
    with pytest.raises(KeyError, match=r"no key 'shop'.*\['item', 'user'\]"):
        kjt(lengths=ints(2, 1, 0, 2))["shop"]


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda batch: batch.split([1, 2]), r"\[1, 2\] hold 3 keys, and the batch has 2"),
        (lambda batch: KeyedJaggedTensor.concat([batch, batch]), "keys occur twice"),
        (lambda batch: KeyedJaggedTensor.concat([]), "no batches given"),
        (lambda batch: batch.weights(), "has no weights"),
    ],
)
def test_a_bad_operation_is_refused(
    operation: Callable[[KeyedJaggedTensor], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        operation(kjt(lengths=ints(2, 1, 0, 2)))


def test_batches_of_different_sizes_are_not_joined() -> None:
    parts = {
        "item": JaggedTensor(ints(1), lengths=ints(1)),
        "user": JaggedTensor(ints(1), lengths=ints(1, 0)),
    }
    batches = [KeyedJaggedTensor.from_jt_dict({key: part}) for key, part in parts.items()]
    with pytest.raises(ValueError, match="samples differ"):
        KeyedJaggedTensor.concat(batches)


def test_batches_of_variable_and_of_equal_samples_are_not_joined() -> None:
    equal = KeyedJaggedTensor(["a"], ints(1, 2), lengths=ints(1, 1))
    variable = KeyedJaggedTensor(
        ["b"], ints(1, 2), lengths=ints(1, 1), stride_per_key_per_rank=[[2]]
    )
    with pytest.raises(ValueError, match="variable batch differ"):
        KeyedJaggedTensor.concat([equal, variable])
    two_ranks = KeyedJaggedTensor(
        ["c"], ints(1, 2), lengths=ints(1, 1), stride_per_key_per_rank=[[1, 1]]
    )
    with pytest.raises(ValueError, match="ranks differ"):
        KeyedJaggedTensor.concat([variable, two_ranks])


def test_weights_on_some_parts_only_are_refused() -> None:
    parts = {
        "item": JaggedTensor(ints(1), torch.ones(1), lengths=ints(1)),
        "user": JaggedTensor(ints(1), lengths=ints(1)),
    }
    with pytest.raises(ValueError, match=r"\['item', 'user'\].*\['item'\]"):
        KeyedJaggedTensor.from_jt_dict(parts)


BATCH = {"keys": ["item", "user"], "lengths": ints(2, 1, 0, 2)}


def test_validation_can_be_switched_off_and_comes_back() -> None:
    assert validation_enabled()
    with validation(False):
        batch = kjt(lengths=ints(9, 9, 9, 9))
        check_ids(
            kjt(values=ints(1, 2, 3, 4, 500), lengths=ints(2, 1, 0, 2)), [("user", "users", 6)]
        )
        assert not validation_enabled()
    assert validation_enabled()
    assert batch.lengths().tolist() == [9, 9, 9, 9]


def test_a_batch_that_was_not_checked_when_built_is_checked_at_its_first_sync_point() -> None:
    # As a batch on a GPU, where looking at the numbers at once would stop the device.
    late = KeyedJaggedTensor._from_parts(["item", "user"], ints(7, 8), None, ints(1, 2), None, 1)
    late._layout._checked = False
    assert late.lengths().tolist() == [1, 2]
    for ask in (late.length_per_key, late.sync, late.to_dict, late.to(torch.device("cpu")).to_dict):
        with pytest.raises(ValueError, match=r"up to 3.*2 values"):
            ask()


@pytest.mark.parametrize(
    ("value", "on"), [("0", False), ("off", False), ("False", False), ("1", True), ("", True)]
)
def test_the_environment_sets_the_first_value(
    monkeypatch: pytest.MonkeyPatch, value: str, on: bool
) -> None:
    monkeypatch.setenv("TUTOREC_VALIDATE", value)
    assert runpy.run_path(_validation.__file__)["_enabled"] is on


def test_nothing_is_checked_on_the_meta_device() -> None:
    batch = kjt(values=ints(7, 8, 9, 4, 5).to("meta"), lengths=ints(2, 1, 0, 2).to("meta"))
    check_ids(batch, [("item", "items", 9)])
    assert batch.stride() == 2
