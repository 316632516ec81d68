from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DrawnBatch, halves, jagged_batches

from tutorec.sparse.equality import kjt_is_equal
from tutorec.sparse.lists import kjt_from_lists, kjt_to_lists, kjt_weights_to_lists

BAGS = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4)


@given(jagged_batches())
def test_lists_become_the_batch_and_come_back(drawn: DrawnBatch) -> None:
    batch = kjt_from_lists(drawn.ids, drawn.weights, dtype=drawn.ids_dtype)
    assert kjt_is_equal(batch, drawn.kjt())
    assert batch.values().dtype == drawn.ids_dtype
    assert kjt_to_lists(drawn.kjt()) == drawn.ids
    assert kjt_weights_to_lists(drawn.kjt()) == drawn.weights


@given(st.dictionaries(st.sampled_from("abc"), BAGS, min_size=1), st.booleans(), st.data())
def test_features_may_differ_in_their_number_of_samples(
    ids: dict, weighted: bool, data: st.DataObject
) -> None:
    weights = (
        {k: [[data.draw(halves) for _ in bag] for bag in bags] for k, bags in ids.items()}
        if weighted
        else None
    )
    batch = kjt_from_lists(ids, weights)
    assert batch.stride_per_key() == [len(bags) for bags in ids.values()]
    assert kjt_to_lists(batch) == ids
    assert kjt_weights_to_lists(batch) == weights
    for key, jagged in batch.to_dict().items():
        assert [row.tolist() for row in jagged.to_dense()] == ids[key]


def test_no_feature_makes_a_batch_without_keys() -> None:
    assert kjt_from_lists({}).keys() == []
    assert kjt_to_lists(kjt_from_lists({})) == {}


def test_ids_are_counted_without_a_sync_point() -> None:
    batch = kjt_from_lists({"a": [[1], []], "b": [[2, 3], [4]]})
    assert batch.length_per_key_or_none() == [1, 3]


BAD = {
    "flat": ({"a": [7, 8]}, None, "feature 'a', sample 0, is 7 and should be a list of ids"),
    "string": (
        {"a": [[1], "78"]},
        None,
        "feature 'a', sample 1, is '78' and should be a list of ids",
    ),
    "float": (
        {"a": [[1], [2, 3.5]]},
        None,
        r"feature 'a', sample 1, is \[2, 3.5\] .*: ids are whole numbers",
    ),
    "text": (
        {"a": [[1], ["x"]]},
        None,
        r"feature 'a', sample 1, is \['x'\] and .* that torch.int64 holds",
    ),
    "bool": (
        {"a": [[1], [2, True]]},
        None,
        r"feature 'a', sample 1, is \[2, True\] .*: ids are whole numbers",
    ),
    "list of lists": ({"a": [[1], [[2]]]}, None, r"feature 'a', sample 1, is \[\[2\]\] and should"),
    "lists of lists": ({"a": [[[1]], [[2]]]}, None, r"feature 'a', sample 0, is \[\[1\]\]"),
    "nothing": ({"a": [[1], [None]]}, None, r"feature 'a', sample 1, is \[None\] and should be"),
    "text weight": (
        {"a": [[1, 2]]},
        {"a": [[0.5, "x"]]},
        r"'a', sample 0, is \[0.5, 'x'\] .* a list of weights",
    ),
    "too large": ({"b": [[2**63]]}, None, r"feature 'b', sample 0, is \[9223372036854775808\]"),
    "weights' features": (
        {"a": [[1]]},
        {"b": [[1.0]]},
        r"'a', sample 0, has the ids \[1\] and the weights None",
    ),
    "weights' samples": (
        {"a": [[1]]},
        {"a": [[1.0], []]},
        r"'a', sample 1, has the ids None and the weights \[\]",
    ),
    "weights' ids": (
        {"a": [[1], [2]]},
        {"a": [[1.0], []]},
        r"'a', sample 1, has the ids \[2\] and the weights \[\]",
    ),
}


@pytest.mark.parametrize(("ids", "weights", "message"), BAD.values(), ids=BAD.keys())
def test_lists_of_another_form_are_refused_with_the_place(
    ids: Any, weights: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kjt_from_lists(ids, weights)


def test_ids_that_int32_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 0.*\[1, 4294967296\].*torch.int32"):
        kjt_from_lists({"a": [[1, 2**32]]}, dtype=torch.int32)
