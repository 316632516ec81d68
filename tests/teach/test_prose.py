"""Tables format what they are given."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tutorec._text import TextTable
from tutorec.teach import table


def test_a_table_is_html():
    shown = table({"a < b": ["1"]}, ["x", "y"])._repr_html_()
    assert ">a &lt; b</td><td" in shown
    assert ">1</td>" in shown


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": ["1", "2"], "b": ["1"]}, r"each row needs 2 cells, got \{'b': 1\}"),
        ({"a": 3}, r"each row needs 2 cells, got \{'a': 1\}"),
        ([(1, 2, 3), (1, 2)], r"each row needs 3 cells, got \{'1': 2\}"),
    ],
)
def test_row_with_another_number_of_cells_is_refused(rows, said):
    with pytest.raises(ValueError, match=said):
        table(rows, ["", "x", "y"])


def test_words_of_a_table_are_on_the_left_and_numbers_on_the_right():
    shown = table(
        {"whole": ["[2, 64]", "12 KiB", "drawn again"], "cut": ["[2]", "not run", "3 of 4"]},
        ["table", "shape", "bytes", "rows"],
    )
    assert shown.right == [2]
    assert "text-align:right;white-space:nowrap'>12 KiB</td>" in shown._repr_html_()
    assert repr(table({}, ["table", "bytes"])) == "table  bytes\n-----  -----"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1_234_567, "1,234,567"),
        (-3, "-3"),
        (1.23456, "1.235"),
        (12345.6, "12,346"),
        (0.5, "0.5"),
        (2.0, "2"),
        (0.0, "0"),
        (1e-7, "1.000e-07"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (None, ""),
        (True, "yes"),
        (False, "no"),
        ("1.23456", "1.23456"),
        ((1, "rows", None), "1, rows, "),
        ([1000, 0.25], "1,000, 0.25"),
        ({"item": 0.2, "user": 1.0}, "item 0.2, user 1"),
        (torch.tensor(3), "3"),
        (torch.tensor([1, 2]), "1, 2"),
        (np.float32(0.5), "0.5"),
        (np.int64(1000), "1,000"),
        (torch.float32, "torch.float32"),
    ],
)
def test_cell_is_formatted_by_its_kind(value, text):
    assert table({"": [value]}, ["", "x"]).rows[0][1] == text


def test_rows_can_be_named_by_anything_or_be_a_list():
    pairs = table({("whole", 0): 1, ("rows", "rows"): 2.5}, ["way", "ms"])
    assert [list(row) for row in pairs.rows] == [["whole, 0", "1"], ["rows, rows", "2.5"]]
    numbered = table({1: "a", 2: "b"}, ["rank", "table"])
    assert list(numbered.right) == []
    rows = table([(1, "a"), (20, "b")], ["rank", "table"])
    assert list(rows.right) == [0]
    assert [row[0] for row in rows.rows] == ["1", "20"]


def test_row_can_be_a_tensor_or_an_array():
    rows = table({"a": torch.tensor([1, 2]), "b": np.array([0.5, 0.25])}, ["", "x", "y"])
    assert [list(row) for row in rows.rows] == [["a", "1", "2"], ["b", "0.5", "0.25"]]


def test_table_is_the_one_of_reports_and_breaks_long_names():
    shown = table({"embedding_bag_collection.item": 1}, ["parameter", "bytes"])
    assert isinstance(shown, TextTable)
    assert "embedding<wbr>_bag<wbr>_collection<wbr>.item" in shown._repr_html_()
