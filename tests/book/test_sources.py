"""sources.yml: every row is well formed, and every row whose chapter exists has its cell."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from policy.chapters import Chapter, chapter_of, chapters
from policy.tree import ROOT, assert_none

sys.path.insert(0, str(ROOT / "book/_ext"))
import sources_page

FIELDS = {"id", "document", "what", "expected", "kind", "chapter", "cell"}
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
    by_key = {sources_page.chapter_key(chapter.name): chapter for chapter in books}
    for row in rows:
        chapter = by_key.get(row["chapter"])
        tag = f"source:{row['id']}"
        if chapter is None:
            if row["cell"] is not None:
                found.append(
                    f"{row['id']}: names cell {row['cell']!r}, and there is no chapter "
                    f"{row['chapter']}"
                )
            continue
        cell = next((cell for cell in chapter.cells if cell.raw.get("id") == row["cell"]), None)
        if (
            [tag in each.tags for each in chapter.cells].count(True) != 1
            or cell is None
            or tag not in cell.tags
        ):
            found.append(
                f"{row['id']}: of {chapter.name} the cell {row['cell']!r}, and it alone, needs "
                f"the tag {tag}"
            )
        elif cell.tags & sources_page.REMOVED:
            found.append(
                f"{row['id']}: the page leaves out what cell {row['cell']!r} of {chapter.name} "
                "shows"
            )
        elif row["kind"] in sources_page.COMPARED and not cell.is_code:
            found.append(
                f"{row['id']}: cell {row['cell']!r} of {chapter.name} has no output to compare with"
            )
    known = {f"source:{row['id']}" for row in rows}
    for chapter in books:
        tags = {tag for cell in chapter.cells for tag in cell.tags if tag.startswith("source:")}
        found += [
            f"{chapter.name}: the tag {tag} names no row of sources.yml"
            for tag in sorted(tags - known)
        ]
    return found


def test_rows_are_well_formed():
    assert_none(row_violations(sources_page.rows()))


def test_rows_of_existing_chapters_have_their_cell():
    assert_none(cell_violations(sources_page.rows(), chapters()))


def test_the_page_is_current():
    assert sources_page.PAGE.read_text(encoding="utf-8") == sources_page.page(), (
        "run: python book/_ext/sources_page.py"
    )


ROW = {
    "id": "a-1",
    "document": "d",
    "what": "w",
    "expected": "3",
    "kind": "exact",
    "chapter": 99,
    "cell": None,
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


def test_cell_rules_reject_a_row_without_cell_and_a_tag_without_row():
    violations = cell_violations([ROW], [chapter_of(("code", "3", ["source:b-2"]))])
    assert [("it alone, needs the tag" in v, "names no row" in v) for v in violations] == [
        (True, False),
        (False, True),
    ]
    assert (
        cell_violations([ROW | {"cell": "c0"}], [chapter_of(("code", "3", ["source:a-1"]))]) == []
    )


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([("code", "3", ["source:a-1"]), ("code", "3", ["source:a-1"])], "it alone"),
        ([("code", "3", ["source:a-1", "remove-cell"])], "leaves out"),
        ([("code", "3", ["source:a-1", "remove-output"])], "leaves out"),
        ([("markdown", "3", ["source:a-1"])], "no output"),
    ],
)
def test_cell_rules_reject_a_cell_that_shows_nothing(cells, words):
    (violation,) = cell_violations([ROW | {"cell": "c0"}], [chapter_of(*cells)])
    assert words in violation


def test_rows_of_a_page_name_it():
    row = ROW | {"chapter": "page_fixture", "cell": "c0"}
    assert (
        cell_violations([row], [chapter_of(("code", "3", ["source:a-1"]), name="page_fixture")])
        == []
    )
    assert sources_page.place(row, {}) == "fixture, coming"
