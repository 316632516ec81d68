"""Write book/sources.md from tests/book/sources.yml: which cell shows which output.

`python book/_ext/sources_page.py` writes the page when it is not current; `page()` is what a test
compares it with.
"""

from __future__ import annotations

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
    "form": "the same lines; numbers, addresses and folders are those of the run",
    "value": "the same lines; numbers are within the stated tolerance",
    "differs": "not the same, for the reason given",
    "prose": "told in the notebook; the document prints nothing",
}
COMPARED = {"exact", "form", "value"}
# Tags with which the page leaves out what a cell prints.
REMOVED = {"remove-cell", "remove-output", "remove-stdout"}
HEAD = """<!-- Written by book/_ext/sources_page.py from tests/book/sources.yml; edit that file. -->
# Documents and their outputs

Five documents have a notebook each, which has the document's cells in its order. Every output that they print is a row
below, and so are the steps that they only tell.

A row of the first three kinds is compared with the output of its cell, whenever the notebook is tested and whenever the
book is built. Both fail where the document's lines do not stand in that output, one after the other. Before the
comparison the name `torchrec` becomes `tutorec` in the document's text, and blanks at the ends of lines are dropped. For
*form* and *value* a run of blanks counts as one, and the device of a rank is the rank's own. What else the cell prints is
not compared. A few rows of these kinds say that the document does not print the text: then it is what the document's
code or question leads to.

A row that *differs* is not compared with the document. Where it says *checked*, pieces of the text that the notebook
shows instead were listed by hand, and test and build look for them in the same cell. A row of prose has nothing to be
compared with. Where it says *checked*, words that the notebook uses for the matter are looked for in its cell.

| kind | what agrees | rows |
|---|---|---|
"""  # noqa: E501


def rows() -> list[dict[str, Any]]:
    """The rows of sources.yml in its order, each with its document and notebook."""
    documents = yaml.safe_load(YML.read_text(encoding="utf-8"))
    return [
        {"document": document["document"], "notebook": document["notebook"], **row}
        for document in documents
        for row in document["rows"]
    ]


def notebooks() -> list[Path]:
    """Every notebook."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


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


def page() -> str:
    """The whole page as MyST."""
    every = rows()
    count = Counter(row["kind"] for row in every)
    lines = [
        HEAD + "\n".join(f"| {kind} | {says} | {count[kind]} |" for kind, says in KINDS.items())
    ]
    for document, notebook in dict.fromkeys((row["document"], row["notebook"]) for row in every):
        lines += [
            f"\n## {document[0].upper()}{document[1:]}\n",
            f"Notebook: [{notebook}](../notebooks/{notebook}.ipynb)\n",
            "| | what the document shows | agreement |",
            "|---|---|---|",
        ]
        for row in (row for row in every if row["document"] == document):
            lines.append(f"| {row['id']} | {plain(row['what'])} | {agreement(row)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    if YML.exists() and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()):
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
