"""Folded cells of the book say what is in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "book" / "_ext"))
from docutils import nodes
from prompts import linked, named, untitle


def cell(code: str, *tags: str, **metadata: Any) -> dict[str, Any]:
    return {"cell_type": "code", "source": [code], "metadata": {"tags": list(tags), **metadata}}


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


def test_words_of_a_cell_come_from_the_code_behind_its_title():
    (imports,) = named({"cells": [cell("# @title Imports\nimport os", "hide-input")]})["cells"]
    assert imports["metadata"]["mystnb"]["code_prompt_show"] == "Show the imports"


def test_a_page_has_no_title_lines():
    texts = ["# @title Imports\nimport os\nimport re", "x = 1  # @title", "y = 2"]
    page = nodes.section("", *(nodes.literal_block(text, text) for text in texts))
    untitle(None, page)
    blocks = list(page.findall(nodes.literal_block))
    shown = ["import os\nimport re", "x = 1  # @title", "y = 2"]
    assert [block.astext() for block in blocks] == shown
    assert [block.rawsource for block in blocks] == shown


def test_pages_of_the_book_link_to_each_other_without_the_network():
    config = {"repository": {"url": "https://example.org/shop", "branch": "main"}}
    address = "https://example.org/shop/blob/main"
    text = (
        f"[a](<b>) [09]({address}/notebooks/09_planner.ipynb) [bag]({address}/book/glossary.md#bag)"
    )
    prose = {"cell_type": "markdown", "source": [text[:20], text[20:]], "metadata": {}}
    code = cell(f'print("[09]({address}/notebooks/09_planner.ipynb)")')
    before = list(code["source"])
    linked({"cells": [prose, code]}, config)
    assert prose["source"] == "[a](<b>) [09](09_planner.ipynb) [bag](../book/glossary.md#bag)"
    assert code["source"] == before
