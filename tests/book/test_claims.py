"""Claims run behind their cells, and a file of claims belongs to a notebook that has its cells."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from policy.chapters import NOTEBOOKS
from policy.tree import ROOT

sys.path.insert(0, str(ROOT / "book/_ext"))
from claims import AFTER, CLAIMS, MARK, claims_of, with_claims

NOTEBOOK: dict[str, Any] = {
    "cells": [
        {"id": "one", "cell_type": "code", "metadata": {}, "source": "x = 1"},
        {"id": "two", "cell_type": "markdown", "metadata": {}, "source": "x is 1"},
    ],
    "metadata": {},
}


def claim(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")


def test_a_claim_runs_behind_its_cell_and_is_not_on_the_page(tmp_path):
    claim(tmp_path, "07.py", "# after: one\nassert x == 1\n\n# after: two\nassert x < 2\n")
    cells = with_claims(NOTEBOOK, "07_sharding", tmp_path)["cells"]
    assert [cell["id"] for cell in cells] == ["one", f"{MARK}one", "two", f"{MARK}two"]
    assert cells[1]["source"] == "assert x == 1"
    assert cells[1]["metadata"] == {"tags": ["remove-cell"]}
    assert len(NOTEBOOK["cells"]) == 2


def test_a_file_of_claims_belongs_to_one_notebook(tmp_path):
    claim(tmp_path, "09.py", "# after: one\nassert x\n")
    claim(tmp_path, "09b.py", "# after: two\nassert y\n")
    assert claims_of("09_planner", tmp_path) == {"one": "assert x"}
    assert claims_of("09b_planner_at_work", tmp_path) == {"two": "assert y"}
    assert claims_of("10_dmp", tmp_path) == {}


def test_a_claim_about_a_cell_that_is_not_there_is_named(tmp_path):
    claim(tmp_path, "07.py", "# after: three\nassert x\n")
    with pytest.raises(ValueError, match="07_sharding has no cells three"):
        with_claims(NOTEBOOK, "07_sharding", tmp_path)


@pytest.mark.parametrize("path", sorted(CLAIMS.glob("*.py")), ids=lambda path: path.stem)
def test_claims_have_their_notebook_and_its_cells(path):
    text = path.read_text(encoding="utf-8")
    assert AFTER.split(text)[0].strip() == ""
    [notebook] = [
        p
        for p in NOTEBOOKS.glob("*.ipynb")
        if p.stem == path.stem or p.stem.startswith(f"{path.stem}_")
    ]
    stored = json.loads(notebook.read_text(encoding="utf-8"))
    cells = with_claims(stored, notebook.stem)["cells"]
    assert len(cells) - len(stored["cells"]) == len(AFTER.findall(text))
