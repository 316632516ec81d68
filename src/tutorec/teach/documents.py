"""Compare what a chapter shows with what the documents print, as `tests/book/sources.yml` lists it.

Chapters call `agree("notebook-18", text)` in hidden cells. The list belongs to a clone of the project; where it is
absent (an installed wheel, Colab) there is nothing to compare with, and `agree` does nothing.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

__all__ = ["agree", "disagreement"]

_LIST = Path(__file__).parents[3] / "tests/book/sources.yml"
_NUMBER = re.compile(r"0x[0-9a-f]+|-?\d+\.?\d*(?:e-?\d+)?")
_LOOKUP_KERNEL = re.compile(r"\b(?:Split|Dense)TableBatchedEmbeddingBagsCodegen\b|\bTorchTableBatchedEmbeddingBags\b")


@functools.cache
def _rows() -> dict[str, dict[str, Any]] | None:
    """Id to row, or None outside of a clone."""
    try:
        import yaml
    except ModuleNotFoundError:
        return None
    if not _LIST.exists():
        return None
    return {row["id"]: row for row in yaml.safe_load(_LIST.read_text(encoding="utf-8"))}


def agree(source_id: str, shown: str) -> None:
    """Assert that a chapter shows what a document printed, as closely as the list promises.

    Args:
        source_id: Id of a row, such as "notebook-18".
        shown: The text that the chapter's cell shows; it may hold more lines than the document.

    Raises:
        KeyError: The list has no such row.
        AssertionError: The texts do not agree; the message has both.
    """
    rows = _rows()
    if rows is None:
        return
    if source_id not in rows:
        raise KeyError(f"{source_id!r} is not an id of {_LIST.name}")
    row = rows[source_id]
    problem = disagreement(row["kind"], row["expected"] or "", shown, row.get("tolerance") or 0.0)
    if problem:
        raise AssertionError(f"{source_id} ({row['kind']}): {problem}\ndocument:\n{row['expected']}\nhere:\n{shown}")


def disagreement(kind: str, expected: str, shown: str, tolerance: float = 0.0) -> str:
    """Why two texts do not agree, or an empty text when they do.

    Args:
        kind: "exact": the document's lines stand in the shown text; "form": they do, with every number and address
            free; "value": the same numbers within `tolerance`; "differs" and "prose" are not compared.
        expected: The document's text; its root `torchrec` is read as `tutorec`, blanks at ends of lines are dropped.
        shown: The chapter's text.
        tolerance: For "value".

    Example:
        >>> disagreement("form", "at 0x73de", "at 0x11")
        ''
        >>> disagreement("value", "tensor([0.49, 2.0])", "0.4901 and 2", tolerance=0.001)
        ''
        >>> disagreement("exact", "torch.Size([2, 128])", "torch.Size([2, 64])")
        "the line 'torch.Size([2, 128])' is missing"
    """
    if kind in ("differs", "prose"):
        return ""
    expected = expected.replace("torchrec", "tutorec")
    if kind == "value":
        return _different_numbers(_NUMBER.findall(expected), _NUMBER.findall(shown), tolerance)
    if kind == "form":
        expected, shown = _formless(expected), _formless(shown)
    lines = [line.rstrip() for line in shown.splitlines()]
    wanted = [line.rstrip() for line in expected.splitlines()]
    for start in range(len(lines) - len(wanted) + 1):
        if lines[start : start + len(wanted)] == wanted:
            return ""
    missing = next((line for line in wanted if line not in lines), None)
    return f"the line {missing!r} is missing" if missing is not None else "the lines are not in this order"


def _formless(text: str) -> str:
    """The text without its numbers and addresses, and with one name for every lookup kernel."""
    return _LOOKUP_KERNEL.sub("LookupKernel", _NUMBER.sub("#", text))


def _different_numbers(wanted: list[str], found: list[str], tolerance: float) -> str:
    """Where two lists of numbers part."""
    if len(wanted) != len(found):
        return f"{len(found)} numbers here, {len(wanted)} in the document"
    for place, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if abs(float(want) - float(have)) > tolerance:
            return f"number {place} is {have}, and {want} in the document (tolerance {tolerance})"
    return ""
