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
def test_features_may_differ_in_their_number_of_samples(ids: dict, weighted: bool, data: st.DataObject) -> None:
    weights = {k: [[data.draw(halves) for _ in bag] for bag in bags] for k, bags in ids.items()} if weighted else None
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
    assert batch.offset_per_key_or_none() == [0, 1, 4]


BAD = {
    "flat": ({"a": [7, 8]}, None, TypeError, r"feature 'a', sample 0, is 7 and should be a list of ids.*\[7\]"),
    "string": ({"a": "78"}, None, TypeError, "feature 'a' holds str, and should hold a list of lists"),
    "string bag": ({"a": [[1], "78"]}, None, TypeError, "feature 'a', sample 1, is '78'"),
    "float": ({"a": [[1], [2, 3.5]]}, None, ValueError, r"feature 'a', sample 1, holds id 3.5; ids are whole"),
    "text": ({"a": [[1], ["x"]]}, None, ValueError, "feature 'a', sample 1, holds id 'x', which torch.int64"),
    "nothing": ({"a": [[1], [None]]}, None, ValueError, "feature 'a', sample 1, holds id None; ids are whole numbers"),
    "list": ([[1, 2]], None, TypeError, "ids are list, and should be a dictionary of features"),
    "list of weights": ({"a": [[1]]}, [[0.5]], TypeError, "weights are list, and should be a dictionary of features"),
    "text weight": ({"a": [[1, 2]]}, {"a": [[0.5, "x"]]}, ValueError, "'a', sample 0, holds weight 'x'; give a number"),
    "too large": ({"b": [[2**63]]}, None, ValueError, "feature 'b', sample 0, holds id 9223372036854775808"),
    "weights' features": ({"a": [[1]]}, {"b": [[1.0]]}, ValueError, r"features \['a'\], and weights have \['b'\]"),
    "weights' samples": ({"a": [[1]]}, {"a": [[1.0], []]}, ValueError, "'a' has ids for 1 samples and weights for 2"),
    "weights' ids": ({"a": [[1], [2]]}, {"a": [[1.0], []]}, ValueError, "'a', sample 1, has 1 ids and 0 weights"),
}


@pytest.mark.parametrize(("ids", "weights", "kind", "message"), BAD.values(), ids=BAD.keys())
def test_lists_of_another_form_are_refused_with_the_place(
    ids: Any, weights: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        kjt_from_lists(ids, weights)


def test_ids_that_int32_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 0, holds id 4294967296, which torch.int32 does not hold"):
        kjt_from_lists({"a": [[1, 2**32]]}, dtype=torch.int32)
