"""Write book/sources.md from tests/book/sources.yml: which cell shows which printed result of the documents.

`python book/_ext/sources_page.py` writes the page when it is not current; `page()` is what a test compares it with.
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
    "exact": "the same text, character by character",
    "form": "the same lines; numbers and addresses are those of the run",
    "value": "the same numbers within the stated tolerance",
    "differs": "not the same, for the reason given",
    "prose": "told in the chapter's text; nothing is printed",
}
HEAD = """<!-- Written by book/_ext/sources_page.py from tests/book/sources.yml; edit that file. -->
# Documents and their outputs

This book follows five public documents. Every cell of theirs that prints something, and every step that they tell, is a
row below: where this book shows it and how closely it agrees. A row whose chapter exists is compared with the
document's own text when the chapter runs, and the build fails when they disagree; a row without a chapter waits for it.

| word | what agrees | rows |
|---|---|---|
"""


def rows() -> list[dict[str, Any]]:
    """The rows of sources.yml, in its order."""
    return yaml.safe_load(YML.read_text(encoding="utf-8"))


def notebooks() -> dict[int | str, Path]:
    """Number of a chapter, or name of a page such as "page_two_tower", to its notebook; those that exist."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return {int(p.stem[:2]) if p.stem[:2].isdigit() else p.stem: p for p in paths}


def plain(text: str) -> str:
    """Text that stands in a table's cell: one line, bars escaped, angle brackets and roles inert."""
    text = " ".join(text.split()).replace("|", r"\|")
    pieces = text.split("`")  # code stands in every second one, where a backslash or an entity would be shown
    pieces[::2] = [re.sub(r"([*_])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces[::2]]
    return "`".join(pieces)


def agreement(row: dict[str, Any]) -> str:
    """The kind of agreement, with tolerance or reason."""
    if row["kind"] == "differs":
        return f"**differs**: {plain(row['reason'])}"
    if row["kind"] == "value":
        return f"value, within {row['tolerance']}"
    return str(row["kind"])


def page() -> str:
    """The whole page as MyST."""
    every, chapters = rows(), notebooks()
    count = Counter(row["kind"] for row in every)
    lines = [HEAD + "\n".join(f"| {kind} | {says} | {count[kind]} |" for kind, says in KINDS.items())]
    done = sum(row["chapter"] in chapters for row in every)
    lines.append(f"\nOf {len(every)} rows {done} belong to chapters of this edition.")
    for document in dict.fromkeys(row["document"] for row in every):
        lines += [
            f"\n## {document[0].upper()}{document[1:]}\n",
            "| | what the document shows | chapter | agreement |",
            "|---|---|---|---|",
        ]
        for row in (row for row in every if row["document"] == document):
            chapter = row["chapter"]
            is_number = isinstance(chapter, int)
            label = f"{chapter:02d}" if is_number else str(chapter).removeprefix("page_").replace("_", " ")
            where = f"{label}, coming" if chapter is not None else "none"
            if chapter in chapters:
                where = f"[{label}](../notebooks/{chapters[chapter].name})"
            lines.append(f"| {row['id']} | {plain(row['what'])} | {where} | {agreement(row)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    if YML.exists() and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()):
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
