"""sources.yml: every row is well formed and has its cell."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from policy.chapters import Chapter, chapter_of, chapters
from policy.tree import ROOT, assert_none

sys.path.insert(0, str(ROOT / "book/_ext"))
import sources_page

FIELDS = {"id", "document", "notebook", "what", "expected", "kind", "cell"}
OPTIONAL = {"reason", "here", "tolerance"}


def row_violations(rows: list[dict[str, Any]]) -> list[str]:
    found = []
    ids = [row.get("id") for row in rows]
    found += [f"{i}: the id is used twice" for i in sorted({i for i in ids if ids.count(i) > 1})]
    for row in rows:
        fields = set(row)
        if FIELDS - fields or fields - FIELDS - OPTIONAL:
            unknown = sorted(fields - FIELDS - OPTIONAL)
            found.append(
                f"{row.get('id')}: fields missing {sorted(FIELDS - fields)}, unknown {unknown}"
            )
            continue
        if row["kind"] not in sources_page.KINDS:
            found.append(
                f"{row['id']}: kind {row['kind']!r}, expected one of {sorted(sources_page.KINDS)}"
            )
        if row["kind"] == "differs" and not row.get("reason"):
            found.append(f"{row['id']}: differs without a reason")
        if row["kind"] == "value" and row.get("tolerance") is None:
            found.append(f"{row['id']}: a value without a tolerance")
        compared = row["kind"] in sources_page.COMPARED
        if compared and not row["expected"]:
            found.append(f"{row['id']}: nothing to compare with")
        if compared and row.get("here"):
            found.append(
                f"{row['id']}: its whole text is compared; `here` is for rows that differ, and "
                "for prose"
            )
    return found


def cell_violations(rows: list[dict[str, Any]], books: list[Chapter]) -> list[str]:
    found = []
    by_name = {book.name: book for book in books}
    for row in rows:
        book = by_name.get(row["notebook"])
        if book is None:
            found.append(f"{row['id']}: there is no notebook {row['notebook']}")
            continue
        cell = next((cell for cell in book.cells if cell.raw.get("id") == row["cell"]), None)
        if cell is None:
            found.append(f"{row['id']}: {book.name} has no cell {row['cell']!r}")
        elif cell.tags & sources_page.REMOVED:
            found.append(
                f"{row['id']}: the page leaves out what cell {row['cell']!r} of {book.name} shows"
            )
        elif row["kind"] in sources_page.COMPARED and not cell.is_code:
            found.append(
                f"{row['id']}: cell {row['cell']!r} of {book.name} has no output to compare with"
            )
    return found


def test_rows_are_well_formed():
    assert_none(row_violations(sources_page.rows()))


def test_rows_have_their_cell():
    assert_none(cell_violations(sources_page.rows(), chapters()))


def test_the_page_is_current():
    assert sources_page.PAGE.read_text(encoding="utf-8") == sources_page.page(), (
        "run: python book/_ext/sources_page.py"
    )


ROW = {
    "id": "a-1",
    "document": "d",
    "notebook": "99_fixture",
    "what": "w",
    "expected": "3",
    "kind": "exact",
    "cell": "c0",
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "same"}, "kind 'same'"),
        ({"kind": "differs"}, "without a reason"),
        ({"kind": "value"}, "without a tolerance"),
        ({"expected": None}, "nothing to compare"),
        ({"here": "x"}, "its whole text is compared"),
        ({"colour": "red"}, "unknown ['colour']"),
    ],
)
def test_row_rules_reject(change, words):
    violations = row_violations([ROW | change])
    assert len(violations) == 1
    assert words in violations[0]


def test_row_rules_reject_an_id_used_twice():
    assert row_violations([ROW, ROW]) == ["a-1: the id is used twice"]


@pytest.mark.parametrize(
    ("row", "cells", "words"),
    [
        ({"notebook": "98_other"}, [("code", "3", [])], "no notebook 98_other"),
        ({"cell": "c7"}, [("code", "3", [])], "no cell 'c7'"),
        ({}, [("code", "3", ["remove-cell"])], "leaves out"),
        ({}, [("code", "3", ["remove-output"])], "leaves out"),
        ({}, [("markdown", "3", [])], "no output"),
    ],
)
def test_cell_rules_reject_a_row_that_is_not_shown(row, cells, words):
    (violation,) = cell_violations([ROW | row], [chapter_of(*cells)])
    assert words in violation


def test_cell_rules_accept_a_row_with_its_cell():
    assert cell_violations([ROW], [chapter_of(("code", "3", []))]) == []
