"""Columns in memory to a batch, hashed strings, and maps of small vocabularies."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.datasets.columns import IdMap
from tutorec.datasets.utils import Batch
from tutorec.sparse.hashing import hash_strings, mixing_hash

LOG: dict[str, list[Any]] = {
    "user": [7, 8, 9],
    "viewed": [["hat", "shoe"], [], ["coat"]],
    "item": [[1, 2], [3], []],
    "city": ["Oslo", "Rome", "Oslo"],
    "hour": [1.5, 2.0, 3.0],
    "click": [1, 0, 1],
}


class Series:
    """A column as pandas and polars have it."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.hasnans = any(type(value).__name__ in {"NAType", "NoneType"} for value in values)

    def to_list(self) -> list[Any]:
        return self.values

    def to_numpy(self) -> Any:
        assert not self.hasnans, "whole numbers would be floats"
        array = np.empty(len(self.values), dtype=object)
        array[:] = self.values
        numbers = all(isinstance(value, int | float) for value in self.values)
        return np.asarray(self.values) if numbers else array


def arrow() -> Any:
    return pytest.importorskip("pyarrow").table(LOG)


FORMS = {
    "dict": lambda: LOG,
    "frame": lambda: {name: Series(values) for name, values in LOG.items()},
    "arrow": arrow,
    "sliced arrow": lambda: arrow().slice(0, 3),
    "chunked arrow": lambda: __import__("pyarrow").concat_tables(
        [arrow().slice(0, 1), arrow().slice(1, 2)]
    ),
    "arrays": lambda: LOG | {name: np.array(LOG[name]) for name in ("user", "hour", "city")},
    "tensors": lambda: LOG | {name: torch.tensor(LOG[name]) for name in ("user", "hour", "click")},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_batch(form):
    features = ["user", "viewed", "item", "city"]
    batch = Batch.from_columns(
        FORMS[form](), features, ["hour"], "click", hash_to={"viewed": 50, "city": 9}
    )
    viewed = mixing_hash(hash_strings(["hat", "shoe", "coat"]), 50)
    city = mixing_hash(hash_strings(LOG["city"]), 9)
    ids = batch.sparse_features
    assert ids.keys() == features
    assert ids.values().tolist() == [7, 8, 9, *viewed.tolist(), 1, 2, 3, *city.tolist()]
    assert ids.lengths().view(4, 3).tolist() == [[1, 1, 1], [2, 0, 1], [2, 1, 0], [1, 1, 1]]
    assert batch.dense_features.tolist() == [[1.5], [2.0], [3.0]]
    assert batch.dense_features.dtype == torch.float32
    assert batch.labels.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("form", ["dict", "arrow"])
def test_a_missing_value_is_an_empty_bag(form):
    columns: Any = {"user": [7, None, 9], "viewed": [["hat"], None, []]}
    if form == "arrow":
        columns = pytest.importorskip("pyarrow").table(columns)
    ids = Batch.from_columns(columns, ["user", "viewed"], hash_to={"viewed": 50}).sparse_features
    assert ids.lengths().view(2, 3).tolist() == [[1, 0, 1], [1, 0, 0]]
    assert ids.values()[:2].tolist() == [7, 9]


def test_a_matrix_is_bags_of_equal_lengths():
    ids = Batch.from_columns({"pair": np.array([[1, 2], [3, 4]])}, ["pair"]).sparse_features
    assert (ids.values().tolist(), ids.lengths().tolist()) == ([1, 2, 3, 4], [2, 2])


def test_a_batch_does_not_share_memory_with_its_columns():
    users = np.array([1, 2])
    batch = Batch.from_columns({"user": users}, ["user"])
    users[0] = 9
    assert batch.sparse_features.values().tolist() == [1, 2]


def test_a_whole_number_that_float32_rounds_is_named():
    with pytest.warns(UserWarning, match=r"'when': row 1 holds 16777217, .* rounds to 16777216"):
        Batch.from_columns({"user": [1, 2], "when": [1, 2**24 + 1]}, ["user"], ["when"])


def test_pandas_missing_whole_number_is_an_empty_bag():
    class NAType:
        pass

    ids = Batch.from_columns({"user": Series([2**60, NAType()])}, ["user"]).sparse_features
    assert (ids.values().tolist(), ids.lengths().tolist()) == ([2**60], [1, 0])


def test_ids_beyond_an_int64_can_be_hashed():
    ids = np.array([2**63 + 1, 5], dtype=np.uint64)
    with pytest.raises(ValueError, match=r"9223372036854775809.*hash"):
        Batch.from_columns({"user": ids}, ["user"])
    hashed = Batch.from_columns({"user": ids}, ["user"], hash_to={"user": 10}).sparse_features
    assert hashed.values().tolist() == mixing_hash(torch.tensor([1 - 2**63, 5]), 10).tolist()


@pytest.mark.parametrize(
    ("columns", "words", "more"),
    [
        ({"a": [1]}, r"no column 'b'; there are \['a'\]", {"sparse": ["b"]}),
        ({"a": ["x"]}, "'a' holds strings, such as 'x'.*rows of the table", {}),
        ({"a": [1], "b": [1, 2]}, r"\{'a': 1, 'b': 2\}", {"sparse": ["a", "b"]}),
        ({"a": [[[1]], [[2]]]}, r"'a' holds \[1\]", {}),
        ({"a": [1.5, 2.0]}, r"'a' holds 1\.5", {}),
        ({"a": [2.0**53 + 2, 1.0]}, r"'a' holds 9007199254740994.*lost digits", {}),
        ({"a": [float("inf")]}, "'a' holds inf", {}),
        ({"a": np.array(["2026-01-01"], dtype="M8[s]")}, r"'a' holds datetime64\[s\]", {}),
        (
            {"a": [1], "b": np.array(["2026-01-01"], dtype="M8[s]")},
            "'b' holds datetime64",
            {"dense": ["b"]},
        ),
        ({"a": [1], "b": [1e39]}, r"'b': row 0 holds 1e\+39.*3\.4e38", {"dense": ["b"]}),
        ({"a": [1, "x"]}, "'a' holds 1, and ids are strings or numbers", {"hash_to": {"a": 3}}),
        ({"a": [1]}, r"hash_to names \['b'\]", {"hash_to": {"b": 3}}),
        ({"a": [1]}, "sparse='a'", {"sparse": "a"}),
        ({"a": [1], "b": ["x"]}, "'b' holds object, not numbers", {"dense": ["b"]}),
        (
            {"a": [1, 2], "b": [1.0, None]},
            "'b': 1 of 2 numbers are missing.* row 1",
            {"label": "b"},
        ),
        ({"a": [1], "b": np.ones((1, 2))}, r"'b' has shape \[1, 2\]", {"dense": ["b"]}),
    ],
)
def test_what_makes_no_batch_is_named(columns, words, more):
    with pytest.raises(ValueError, match=words):
        Batch.from_columns(columns, **({"sparse": ["a"]} | more))


def fnv(text: str) -> int:
    """FNV-1a, byte by byte."""
    bits = 0xCBF29CE484222325
    for byte in text.encode("utf-8", "surrogatepass"):
        bits = (bits ^ byte) * 0x100000001B3 % 2**64
    return bits


def test_strings_have_the_published_hashes():
    known = {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "foobar": 0x85944171F73967E8}
    found = hash_strings([*known]).tolist()
    assert [bits % 2**64 for bits in found] == [*known.values()]


@given(st.lists(st.text(max_size=12), max_size=20))
def test_strings_are_hashed_together_as_one_by_one(texts):
    assert [bits % 2**64 for bits in hash_strings(texts).tolist()] == [fnv(t) for t in texts]
    assert torch.equal(hash_strings(np.array(texts, dtype=object)), hash_strings(texts))


@pytest.mark.slow
def test_a_string_has_the_same_hash_in_another_process():
    code = (
        "from tutorec.sparse.hashing import hash_strings; print(hash_strings(['Zo\u00eb']).item())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == hash_strings(["Zo\u00eb"]).item()


def test_what_is_no_string_is_named():
    with pytest.raises(ValueError, match="number 1 is 3"):
        hash_strings(["a", 3])  # type: ignore[list-item]


@pytest.mark.parametrize("values", [["red", "green", "blue"], [10, -3, 2**40], []])
def test_a_map_numbers_its_values_from_1_in_their_order(values):
    colours = IdMap(values)
    assert colours(values).tolist() == [*range(1, len(values) + 1)]
    assert colours(["other"] if values[:1] == ["red"] else [77]).tolist() == [0]
    assert colours.rows == len(values) + 1


def test_a_map_numbers_unsigned_ids_beyond_an_int64():
    ids = IdMap(np.array([2**63, 7, 2**64 - 1], dtype=np.uint64))
    assert ids(np.array([2**64 - 1, 2**63, 7, 9], dtype=np.uint64)).tolist() == [3, 1, 2, 0]


def test_a_map_is_saved_with_its_model():
    model = torch.nn.Sequential(IdMap(["red", "green"]))
    loaded = torch.nn.Sequential(IdMap(2))
    loaded.load_state_dict(model.state_dict())
    assert loaded(["green", "mauve", "red"]).tolist() == [2, 0, 1]


def test_a_value_that_occurs_twice_is_named():
    with pytest.raises(ValueError, match="'red' occurs twice"):
        IdMap(["red", "blue", "red"])
