"""Folded cells say what is in them: "Show the solution", not "Show code cell content".

A chapter's cells are folded by tags. Here, while the book is read, each folded cell gets words of
its own, and the first cell, which installs tutorec where it is missing, is folded together with
what it prints.
"""

from __future__ import annotations

import json
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

TITLE = "# @title Solution"
FOLDED = {"hide-cell", "hide-input", "hide-output"}


def content(code: str) -> str:
    """What a folded cell holds.

    Example:
        >>> content("import torch"), content("draw.show(chart)"), content("x = 1")
        ('the imports', 'the code of the figure', 'the code')
    """
    if code.startswith(TITLE):
        return "the solution"
    if "tutorec.doctor()" in code:
        return "the setup: versions and kernels"
    if code.startswith(("import ", "from ")):
        return "the imports"
    return "the code of the figure" if "draw.show(" in code else "the code"


def named(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with words for every folded cell, and the setup folded whole."""
    for cell in notebook["cells"]:
        code = "".join(cell["source"])
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] != "code" or not FOLDED & set(tags):
            continue
        if "tutorec.doctor()" in code and "hide-input" in tags:
            cell["metadata"]["tags"] = [*(tag for tag in tags if tag != "hide-input"), "hide-cell"]
        words = content(code)
        prompts = {"code_prompt_show": f"Show {words}", "code_prompt_hide": f"Hide {words}"}
        cell["metadata"]["mystnb"] = {**prompts, **cell["metadata"].get("mystnb", {})}
    return notebook


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Before a notebook is parsed."""
    if name.startswith("notebooks/"):
        source[0] = json.dumps(named(json.loads(source[0])))


def untitle(app: Sphinx, document: nodes.document) -> None:
    """Drop the line by which Colab folds a solution: on the page the toggle says it."""
    for block in document.findall(nodes.literal_block):
        if block.astext().startswith(TITLE):
            text = block.astext().partition("\n")[2]
            block.rawsource = text
            block.children = [nodes.Text(text)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook into the reading of notebooks and of their pages."""
    app.connect("source-read", read)
    app.connect("doctree-read", untitle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
