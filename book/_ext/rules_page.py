"""Fill the page "Rules on one page" with the boxed rules of all notebooks, chapter by chapter.

A boxed rule is a line of a notebook's Markdown that begins with ``> **Rule.**``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PAGE = "book/rules"
RULE = re.compile(r"^> \*\*Rule\.\*\* *(.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!http)([\w-]+\.ipynb)")  # notebooks lie in another folder than the page


def rules_of(notebook: Path) -> tuple[str, list[str]]:
    """Title and rules of a notebook, in its order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    title = re.search(r"^# (.+)$", prose, re.MULTILINE)
    rules = [LINK.sub(r"](../notebooks/\1", rule) for rule in RULE.findall(prose)]
    return title[1] if title else notebook.stem, rules


def page(folder: Path = NOTEBOOKS) -> str:
    """The rules as Markdown: a line for each, under the title of its chapter."""
    parts = []
    for notebook in sorted(folder.glob("*.ipynb")):
        title, rules = rules_of(notebook)
        if rules:
            parts.append(f"**[{title}](../notebooks/{notebook.name})**\n")
            parts += [f"- {rule}" for rule in rules]
            parts.append("")
    return "\n".join(parts)


def fill(app: Sphinx, name: str, source: list[str]) -> None:
    """Write the rules below what the page says."""
    if name == PAGE:
        source[0] += "\n" + page()


def outdated(app: Sphinx, env: BuildEnvironment, *changed: set[str]) -> list[str]:
    """The page is read again in every build: its rules are in other files."""
    return [PAGE]


def setup(app: Sphinx) -> dict[str, object]:
    """Register the page."""
    app.connect("source-read", fill)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True}
