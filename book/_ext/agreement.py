"""Compare the outputs of notebooks with the documents', as tests/book/sources.yml lists.

The build of the book and the run of the notebooks (`notebooks/conftest.py`) call `violations`. A
row is compared with the output that the page shows of its cell, folded or not, and never with a
text made for the comparison.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import nbformat
from sources_page import COMPARED, REMOVED, ROOT, notebooks, rows

CACHE = ROOT / "_build/.jupyter_cache"
ADDRESS = re.compile(r"(?: object)? at 0x[0-9a-f]+")
BLANKS = re.compile(r"(?<=\S) +")
RULE = re.compile(r"-{3,}")
# A rank's device in a printed plan, and the folder of an installation, are those of the run.
PLACEMENT = re.compile(r"(?<=rank:)(\d+)/(?:cpu|cuda:\d+)")
FOLDER = re.compile(r"'[^']*(?=/torch/)")
NUMBER = re.compile(r"0x[0-9a-f]+|-?\d+\.?\d*(?:e-?\d+)?")
LOOKUP_KERNEL = re.compile(
    r"\b(?:Split|Dense)TableBatchedEmbeddingBagsCodegen\b|\bTorchTableBatchedEmbeddingBags\b"
)


def output(cell: dict[str, Any]) -> str:
    """The text that a cell's output shows on the page; empty if the page hides the output."""
    if REMOVED & set(cell["metadata"].get("tags", ())):
        return ""
    text = ""
    for piece in cell.get("outputs", ()):
        if piece["output_type"] == "stream":
            text += "".join(piece["text"])
        elif piece["output_type"] == "execute_result":
            text += "\n" + "".join(piece["data"].get("text/plain", "")) + "\n"
    return text


def disagreement(row: dict[str, Any], cell: dict[str, Any]) -> str:
    """Why a row and its executed cell do not agree, or an empty text when they do."""
    shown = output(cell)
    expected = (row["expected"] or "").replace("torchrec", "tutorec")
    if row["kind"] in COMPARED:
        problem = missing_lines(row["kind"], expected, shown, row.get("tolerance") or 0.0)
        if problem:
            return problem
    if row["kind"] == "prose" or not shown:
        shown = "".join(cell["source"]) + "\n" + shown
    return missing_piece(row.get("here") or "", shown)


def missing_lines(kind: str, expected: str, shown: str, tolerance: float = 0.0) -> str:
    """Why the expected lines are not in the text in this order; empty if they are.

    Args:
        kind: "exact": the lines as they are, but for blanks at their ends; "form": every number,
            address and folder is free; "value": the numbers may differ by `tolerance`. For "form"
            and "value" a run of blanks counts as one, and the device of a rank is free.
        expected: The document's text.
        shown: The text of the cell.
        tolerance: For "value".
    """
    if kind != "exact":
        expected = own_device(BLANKS.sub(" ", expected))
        shown = own_device(BLANKS.sub(" ", shown))
    wanted = [line.rstrip() for line in expected.splitlines()]
    lines = [line.rstrip() for line in shown.splitlines()]
    wanted_mask, mask = (
        text if kind == "exact" else [formless(line) for line in text] for text in (wanted, lines)
    )
    starts = range(len(mask) - len(wanted_mask) + 1)
    places = [start for start in starts if mask[start : start + len(wanted_mask)] == wanted_mask]
    if not places:
        absent = next((line for line in wanted_mask if line not in mask), None)
        return (
            "the lines are not in this order"
            if absent is None
            else f"the line {absent!r} is missing"
        )
    if kind == "value":
        problems = [
            different_number(wanted, lines[place : place + len(wanted)], tolerance)
            for place in places
        ]
        return "" if "" in problems else problems[0]
    return ""


def missing_piece(pieces: str, shown: str) -> str:
    """The pieces, one a line, that do not follow one another in the text."""
    text, place = loose(shown), 0
    for piece in pieces.splitlines():
        if text.find(loose(piece), place) < 0:
            return f"{piece!r} is missing" + (
                ", or stands before its turn" if loose(piece) in text else ""
            )
        place = text.find(loose(piece), place) + len(loose(piece))
    return ""


def own_device(text: str) -> str:
    """The text with one name for the device of a rank, and rules of a table of one length."""
    return RULE.sub("---", PLACEMENT.sub(r"\1/device", text))


def loose(text: str) -> str:
    """The text on one line, without addresses, with one name for every lookup kernel and device."""
    text = own_device(ADDRESS.sub(" at 0x", text))
    return " ".join(LOOKUP_KERNEL.sub("LookupKernel", text).split())


def formless(text: str) -> str:
    """The text without its numbers, addresses and folders, and with one name for every lookup
    kernel.
    """
    text = FOLDER.sub("'...", ADDRESS.sub(" at #", text))
    return LOOKUP_KERNEL.sub("LookupKernel", NUMBER.sub("#", text))


def different_number(wanted: list[str], lines: list[str], tolerance: float) -> str:
    """The first number that is off by more than the tolerance; the lines have equal forms."""
    pairs = zip(NUMBER.findall("\n".join(wanted)), NUMBER.findall("\n".join(lines)), strict=True)
    for place, (want, have) in enumerate(pairs):
        if abs(float(want) - float(have)) > tolerance:
            return f"number {place} is {have}, and {want} in the document (tolerance {tolerance})"
    return ""


def violations(name: str, executed: dict[str, Any]) -> list[str]:
    """Where the outputs of an executed notebook differ from sources.yml."""
    cells = {cell["id"]: cell for cell in executed["cells"]}
    problems = []
    for row in rows():
        problem = disagreement(row, cells[row["cell"]]) if row["notebook"] == name else ""
        if problem:
            problems.append(f"{row['id']} ({row['kind']}), cell {row['cell']} of {name}: {problem}")
    return problems


def main() -> int:
    """Compare the notebooks of the last build; 1 if one differs or was not executed.

    The outputs come from jupyter-cache, like those of the pages. The notebooks that myst-nb writes
    to `_build/jupyter_execute` have none when only the text of a notebook changed.
    """
    # What a run of the notebooks does without: `notebooks/conftest.py` imports this file, too.
    from claims import with_claims
    from jupyter_cache import get_cache
    from prompts import named

    cache = get_cache(str(CACHE))
    problems = []
    for path in notebooks():
        stored = json.loads(path.read_text(encoding="utf-8"))
        read = nbformat.reads(json.dumps(named(with_claims(stored, path.stem))), 4)
        try:
            _, executed = cache.merge_match_into_notebook(read, cell_meta=())
        except KeyError:
            problems.append(f"{path.name} was not executed: {CACHE} lacks it; run `make book`")
        else:
            problems += violations(path.stem, executed)
    print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
