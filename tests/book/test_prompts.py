"""Folded cells of the book say what is in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "book" / "_ext"))
from prompts import content, named


def cell(code: str, *tags: str, **metadata: Any) -> dict[str, Any]:
    return {"cell_type": "code", "source": [code], "metadata": {"tags": list(tags), **metadata}}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("# @title Solution\nanswer = 3", "the solution"),
        ("import tutorec\n\ntutorec.doctor()", "the setup: versions and kernels"),
        ("from torch import nn", "the imports"),
        ("chart = 1\ndraw.show(chart)", "the code of the figure"),
        ("x = 1", "the code"),
    ],
)
def test_a_folded_cell_is_named_after_its_content(code, words):
    assert content(code) == words


def test_only_folded_cells_get_words_and_the_setup_is_folded_whole():
    setup, plain, own = (
        cell("tutorec.doctor()", "hide-input"),
        cell("x = 1"),
        cell("x = 1", "hide-cell", mystnb={"code_prompt_show": "Look"}),
    )
    prose = {"cell_type": "markdown", "source": ["import torch"], "metadata": {}}
    notebook = named({"cells": [setup, plain, own, prose]})
    assert [one["metadata"].get("tags") for one in notebook["cells"]] == [
        ["hide-cell"],
        [],
        ["hide-cell"],
        None,
    ]
    assert setup["metadata"]["mystnb"]["code_prompt_show"] == "Show the setup: versions and kernels"
    assert own["metadata"]["mystnb"] == {
        "code_prompt_show": "Look",
        "code_prompt_hide": "Hide the code",
    }
    assert "mystnb" not in plain["metadata"] and "mystnb" not in prose["metadata"]
