"""Folded cells say what is in them: "Show the solution", not "Show code cell content".

A chapter's cells are folded by tags. Here, while the book is read, each folded cell gets words of
its own, and the first cell, which installs tutorec where it is missing, is folded together with
what it prints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from alone import TITLE, content, relative, untitled
from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
FOLDED = {"hide-cell", "hide-input", "hide-output"}


def named(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with words for every folded cell, and the setup folded whole."""
    for cell in notebook["cells"]:
        code = "".join(cell["source"])
        tags = cell["metadata"].get("tags", [])
        if cell["cell_type"] != "code" or not FOLDED & set(tags):
            continue
        if "tutorec.doctor()" in code and "hide-input" in tags:
            cell["metadata"]["tags"] = [*(tag for tag in tags if tag != "hide-input"), "hide-cell"]
        words = content(code, tags)
        prompts = {"code_prompt_show": f"Show {words}", "code_prompt_hide": f"Hide {words}"}
        cell["metadata"]["mystnb"] = {**prompts, **cell["metadata"].get("mystnb", {})}
    return notebook


def linked(notebook: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook with relative links between the pages of the book."""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = relative("".join(cell["source"]), config)
    return notebook


@cache
def configuration() -> dict[str, Any]:
    """What _config.yml says."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Before a notebook is parsed."""
    if name.startswith("notebooks/"):
        source[0] = json.dumps(linked(named(json.loads(source[0])), configuration()))


def untitle(app: Sphinx, document: nodes.document) -> None:
    """Drop the title lines by which editors fold cells: on the page the toggle says it."""
    for block in document.findall(nodes.literal_block):
        if block.astext().startswith(TITLE):
            block.rawsource = untitled(block.astext())
            block.children = [nodes.Text(block.rawsource)]


def setup(app: Sphinx) -> dict[str, bool]:
    """Hook into the reading of notebooks and of their pages."""
    app.connect("source-read", read)
    app.connect("doctree-read", untitle)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
