"""Tables of measured numbers, as a page shows them."""

from __future__ import annotations

import pytest

from tutorec.teach import table


def test_words_stand_left_and_numbers_right():
    shown = table(
        {"whole": ["[2, 64]", "12 KiB", "drawn again"], "cut": ["[2]", "not run", "3 of 4"]},
        ["table", "shape", "bytes", "rows"],
    )
    assert repr(shown).splitlines()[1] == "|:--|:--|--:|:--|"
    cells = shown._repr_html_().split("<td")
    assert [side for side in ("left", "right") if f"text-align: {side}" in cells[3]] == ["right"]
    assert "nowrap" in cells[3] and "12 KiB" in cells[3]


def test_a_table_without_rows_has_its_titles():
    assert repr(table({}, ["table", "bytes"])) == "| table | bytes |\n|:--|--:|"


def test_a_row_with_a_cell_too_few_is_refused():
    with pytest.raises(ValueError, match=r"each row needs 1 cells, got \{'cut': 0\}"):
        table({"cut": []}, ["table", "bytes"])
