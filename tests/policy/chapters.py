"""Notebooks as the policies and the book's tests read them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from policy.tree import ROOT

NOTEBOOKS = ROOT / "notebooks"


@dataclass(frozen=True)
class Cell:
    """One cell: its place in the notebook, its kind, its text, its tags."""

    index: int
    kind: str
    text: str
    tags: frozenset[str]
    raw: dict[str, Any]

    @property
    def is_code(self) -> bool:
        return self.kind == "code"

    @property
    def is_shown(self) -> bool:
        """Whether a reader of the built page sees it without opening anything."""
        return not self.tags & {"remove-cell", "hide-cell"}

    @property
    def headings(self) -> list[str]:
        return (
            re.findall(r"^#{1,6} +(.*)$", self.text, re.MULTILINE)
            if self.kind == "markdown"
            else []
        )


@dataclass(frozen=True)
class Chapter:
    """One notebook file."""

    name: str
    raw: dict[str, Any]

    @cached_property
    def cells(self) -> list[Cell]:
        return [
            Cell(
                i, c["cell_type"], "".join(c["source"]), frozenset(c["metadata"].get("tags", ())), c
            )
            for i, c in enumerate(self.raw["cells"])
        ]

    @property
    def code(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.is_code]

    @property
    def prose(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == "markdown"]

    @property
    def number(self) -> str:
        return self.name.partition("_")[0]


def chapters() -> list[Chapter]:
    """Every chapter of the repository, in order."""
    return [
        Chapter(p.stem, json.loads(p.read_text(encoding="utf-8")))
        for p in sorted(NOTEBOOKS.glob("*.ipynb"))
    ]


def chapter_of(*cells: tuple[str, str, list[str]], name: str = "99_fixture", **raw: Any) -> Chapter:
    """A small chapter for a negative fixture, from (kind, text, tags)."""
    made = []
    for index, (kind, text, tags) in enumerate(cells):
        cell: dict[str, Any] = {
            "id": f"c{index}",
            "cell_type": kind,
            "source": text,
            "metadata": {"tags": tags} if tags else {},
        }
        made.append(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return Chapter(
        name, {"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5} | raw
    )
