"""Checks of what a notebook says, kept beside it: tests/book/claims/05.py checks chapter 05.

A file of claims is Python that runs on the names of its notebook. A line `# after: CELL` says
behind which cell the lines below it run. They are put in while the notebook is tested
(`notebooks/conftest.py`) and while the book is built, in cells that the page leaves out; the
notebook itself does not hold them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CLAIMS = Path(__file__).resolve().parents[2] / "tests/book/claims"
AFTER = re.compile(r"^# after: ([\w-]+)\n", re.MULTILINE)
MARK = "claim-"  # begins the id of every cell that is put in


def claims_of(name: str, folder: Path = CLAIMS) -> dict[str, str]:
    """Cell of a notebook -> the code that runs behind it; empty where there is no file.

    Args:
        name: The notebook's name without its ending, such as ``05_first_training``. Its file is
            called like the beginning of the name, ``05.py``.
        folder: Where the files are.
    """
    for path in sorted(folder.glob("*.py")):
        if name.startswith(f"{path.stem}_") or name == path.stem:
            parts = AFTER.split(path.read_text(encoding="utf-8"))
            return {cell: code.strip() for cell, code in zip(parts[1::2], parts[2::2], strict=True)}
    return {}


def with_claims(notebook: dict[str, Any], name: str, folder: Path = CLAIMS) -> dict[str, Any]:
    """The notebook with a cell behind each cell that has claims.

    Raises:
        ValueError: A claim names a cell that the notebook lacks.
    """
    claims = claims_of(name, folder)
    cells: list[dict[str, Any]] = []
    for cell in notebook["cells"]:
        cells.append(cell)
        code = claims.pop(cell["id"], None)
        if code is not None:
            cells.append(
                {
                    "cell_type": "code",
                    "execution_count": None,
                    "id": f"{MARK}{cell['id']}",
                    "metadata": {"tags": ["remove-cell"]},
                    "outputs": [],
                    "source": code,
                }
            )
    if claims:
        raise ValueError(f"tests/book/claims: {name} has no cells {', '.join(claims)}")
    return {**notebook, "cells": cells}


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Before a notebook is parsed."""
    if name.startswith("notebooks/"):
        notebook = with_claims(json.loads(source[0]), Path(name).name)
        source[0] = json.dumps(notebook)


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook into the reading of notebooks."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
