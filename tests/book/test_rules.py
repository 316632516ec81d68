"""The page of rules has those of every notebook."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from policy.chapters import NOTEBOOKS
from policy.tree import ROOT

sys.path.insert(0, str(ROOT / "book/_ext"))
from rules_page import page, rules_of


def write(path: Path, *markdown: str) -> None:
    cells = [{"cell_type": "markdown", "source": text} for text in markdown]
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")


def test_rules_are_taken_in_the_order_of_the_notebook(tmp_path):
    one = tmp_path / "01_one.ipynb"
    write(
        one,
        "# 01 One\n\ntext",
        "> **Rule.** Send 3.\n\n## Next",
        "> **Rule.** Read [2](02_b.ipynb).",
    )
    assert rules_of(one) == ("01 One", ["Send 3.", "Read [2](../notebooks/02_b.ipynb)."])


def test_the_page_leaves_out_a_notebook_without_rules(tmp_path):
    write(tmp_path / "01_one.ipynb", "# 01 One\n\n> **Rule.** Send 3.")
    write(tmp_path / "02_two.ipynb", "# 02 Two")
    text = page(tmp_path)
    assert "**[01 One](../notebooks/01_one.ipynb)**\n\n- Send 3.\n" in text
    assert "02 Two" not in text


def test_the_page_has_the_rules_of_chapter_06():
    [rule, *_] = rules_of(NOTEBOOKS / "06_anatomy.ipynb")[1]
    assert rule in page()
