"""Write book/sources.md from tests/book/sources.yml: which cell shows which output.

`python book/_ext/sources_page.py` writes the page when it is not current; `page()` is what a test
compares it with.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
YML = ROOT / "tests/book/sources.yml"
PAGE = ROOT / "book/sources.md"

KINDS = {
    "exact": "the same lines, character by character",
    "form": "the same lines; numbers and addresses are those of the run",
    "value": (
        "the same lines; numbers are within the stated tolerance, and a run of blanks counts as one"
    ),
    "differs": "not the same, for the reason given",
    "prose": "told in the chapter; the document prints nothing",
}
COMPARED = {"exact", "form", "value"}
# Tags with which the page leaves out what a cell prints, and folds it.
REMOVED = {"remove-cell", "remove-output", "remove-stdout"}
FOLDED = {"hide-cell", "hide-output"}
HEAD = """<!-- Written by book/_ext/sources_page.py from tests/book/sources.yml; edit that file. -->
# Documents and their outputs

This book follows five public documents. Every output that they print is a row below, and so are the steps that they
only tell. A row names the chapter that shows it; *folded* means that you must open the cell to see it.

A row of the first three kinds is compared with the output that its cell has on the page, whenever the notebook is
tested and whenever the book is built. Both fail where the document's lines do not stand in that output, one after the
other. Before the comparison the name `torchrec` becomes `tutorec` in the document's text, and blanks at the ends of
lines are dropped. What else the cell prints is not compared. A few rows of these kinds say that the document does not
print the text: then it is what the document's code or question leads to.

A row that *differs* is not compared with the document. Where it says *checked*, pieces of the text that the chapter
shows instead were listed by hand, and test and build look for them in the same output. A row of prose has nothing to be
compared with. Where it says *checked*, words that the chapter uses for the matter are looked for in its cell.

| kind | what agrees | rows |
|---|---|---|
"""  # noqa: E501


def rows() -> list[dict[str, Any]]:
    """The rows of sources.yml, in its order."""
    return yaml.safe_load(YML.read_text(encoding="utf-8"))


def chapter_key(name: str) -> int | str:
    """How a row names a notebook: a chapter by its number (9, "09b"), a page by its file's name."""
    number = name.partition("_")[0]
    return int(number) if number.isdigit() else number if number[0].isdigit() else name


def notebooks() -> dict[int | str, Path]:
    """Every notebook by the name that rows give it."""
    return {chapter_key(p.stem): p for p in sorted((ROOT / "notebooks").glob("*.ipynb"))}


@functools.cache
def tags(notebook: Path) -> dict[str, set[str]]:
    """Cell to its tags."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: set(cell["metadata"].get("tags", ())) for cell in cells}


def plain(text: str) -> str:
    """The text of a table cell: one line, with bars, angle brackets and roles escaped."""
    text = " ".join(text.split()).replace("|", r"\|")
    # code stands in every second one, where a backslash or an entity would be shown
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([*_])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def agreement(row: dict[str, Any]) -> str:
    """The kind of agreement, its tolerance and reason, and whether a substitute is checked."""
    kind = f"**{row['kind']}**" if row["kind"] == "differs" else str(row["kind"])
    if row["kind"] == "value":
        kind += f", within {row['tolerance']}"
    if row.get("here"):
        kind += ", checked"
    return f"{kind}: {plain(row['reason'])}" if row.get("reason") else kind


def place(row: dict[str, Any], chapters: dict[int | str, Path]) -> str:
    """The chapter or page that shows a row."""
    key = row["chapter"]
    if key is None:
        return "none"
    label = f"{key:02d}" if isinstance(key, int) else key.removeprefix("page_").replace("_", " ")
    if key not in chapters:
        return f"{label}, coming"
    folded = ", folded" if FOLDED & tags(chapters[key]).get(row["cell"], set()) else ""
    return f"[{label}](../notebooks/{chapters[key].name}){folded}"


def page() -> str:
    """The whole page as MyST."""
    every, chapters = rows(), notebooks()
    count = Counter(row["kind"] for row in every)
    lines = [
        HEAD + "\n".join(f"| {kind} | {says} | {count[kind]} |" for kind, says in KINDS.items())
    ]
    done = sum(row["chapter"] in chapters for row in every)
    lines.append(f"\nOf {len(every)} rows {done} belong to chapters of this edition.")
    for document in dict.fromkeys(row["document"] for row in every):
        lines += [
            f"\n## {document[0].upper()}{document[1:]}\n",
            "| | what the document shows | chapter | agreement |",
            "|---|---|---|---|",
        ]
        for row in (row for row in every if row["document"] == document):
            lines.append(
                f"| {row['id']} | {plain(row['what'])} | {place(row, chapters)} | "
                f"{agreement(row)} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    if YML.exists() and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()):
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
