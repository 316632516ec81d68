"""Rows of sources.yml against what cells show: every difference is found, and only what is on the
page is read.
"""

from __future__ import annotations

import sys
from typing import Any

import nbformat
import pytest
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from nbformat import NotebookNode, v4
from policy.tree import ROOT

sys.path.insert(0, str(ROOT / "book/_ext"))
import agreement
from prompts import named

TREE = "Sharded(\n  (0): SplitTableBatchedEmbeddingBagsCodegen()\n)"


def cell(
    printed: str, *tags: str, result: str | None = None, kind: str = "code", source: str = ""
) -> dict[str, Any]:
    """An executed cell that prints a text and ends in a value."""
    outputs: list[dict[str, Any]] = [{"output_type": "stream", "name": "stdout", "text": printed}]
    if result is not None:
        outputs.append({"output_type": "execute_result", "data": {"text/plain": result}})
    return {
        "id": "c",
        "cell_type": kind,
        "source": source,
        "metadata": {"tags": list(tags)},
        "outputs": outputs,
    }


def row(kind: str, expected: str, **more: Any) -> dict[str, Any]:
    return {
        "id": "a-1",
        "kind": kind,
        "expected": expected,
        "notebook": "99_fixture",
        "cell": "c",
        "tolerance": 1e-3,
    } | more


@pytest.mark.parametrize(
    ("kind", "expected", "shown"),
    [
        ("exact", "a \nb", "first\na\nb  \nlast"),
        ("exact", "<class 'torchrec.optim.keyed.X'>", "<class 'tutorec.optim.keyed.X'>"),
        ("form", "KeyedTensor at 0x73ded379b390>", "KeyedTensor at 0x1>"),
        ("form", "KeyedTensor at 0x73ded379b390>", "KeyedTensor object at 0x1>"),
        ("form", "<module 'a' from '.../torch/b.py'>", "<module 'a' from '/usr/lib/torch/b.py'>"),
        ("form", "to_dict: {}", "to_dict:  {}"),
        ("value", "| rank:0/cuda:0\n| -----", "| rank:0/cpu   \n| ---"),
        ("form", "P90: 26.737 s | 34.801 GB", "P90: 0.1 s | 2 GB"),
        (
            "form",
            TREE,
            TREE.replace("SplitTableBatchedEmbeddingBagsCodegen", "TorchTableBatchedEmbeddingBags"),
        ),
        ("value", "x: tensor([1., 1.])", "other\nx:  tensor([1.0001, 0.9999])"),
        ("value", "x: 3", "x: 1\nx: 3"),
        ("differs", "x", "y"),
        ("prose", "", "y"),
    ],
)
def test_rows_that_agree(kind, expected, shown):
    assert agreement.disagreement(row(kind, expected), cell(shown)) == ""


@pytest.mark.parametrize(
    ("kind", "expected", "shown", "words"),
    [
        ("exact", "lr: 0.02", "lr: 0.01", "'lr: 0.02' is missing"),
        ("exact", "rank:0/cuda:0", "rank:0/cpu", "is missing"),
        ("value", "rank:0/cuda:0", "rank:1/cpu", "number 0 is 1"),
        ("exact", "x:  1", "x: 1", "is missing"),
        ("exact", "a\nb", "b\na", "not in this order"),
        ("exact", TREE, TREE.replace("Split", "Dense"), "is missing"),
        ("form", "GPU: 1", "CPU: 1", "'GPU: #' is missing"),
        ("value", "1 2", "1", "'# #' is missing"),
        ("value", "falls by 10.222113", "falls by 10.3", "number 0 is 10.3"),
    ],
)
def test_rows_that_differ_say_where(kind, expected, shown, words):
    assert words in agreement.disagreement(row(kind, expected), cell(shown))


def test_pieces_are_looked_for_in_their_order():
    different = row("differs", "x", here="one 1\ntwo at 0x7f")
    assert agreement.disagreement(different, cell("one\n  1, and two at 0x55")) == ""
    assert "'one 1' is missing" in agreement.disagreement(different, cell("one 2, two at 0x55"))
    assert "before its turn" in agreement.disagreement(different, cell("two at 0x55, one 1"))


def test_prose_is_looked_for_in_the_words_of_its_cell():
    told = row("prose", "", here="data parallel")
    assert (
        agreement.disagreement(told, cell("", kind="markdown", source="It is data\nparallel."))
        == ""
    )
    assert "is missing" in agreement.disagreement(
        told, cell("", kind="markdown", source="It is model parallel.")
    )


def test_a_cell_without_output_is_held_to_its_code():
    silent = row("differs", "x", here="planner.plan(")
    shown = cell("", source="plan = planner.plan(ebc)")
    assert agreement.disagreement(silent, shown) == ""
    assert "is missing" in agreement.disagreement(silent, cell("4", source="planner.plan("))


def test_what_the_page_leaves_out_is_not_compared():
    exact = row("exact", "3")
    assert agreement.disagreement(exact, cell("", result="3")) == ""
    assert agreement.disagreement(exact, cell("3\n", "hide-cell")) == ""
    assert agreement.disagreement(exact, cell("3\n", "remove-cell")) == "the line '3' is missing"
    warned = cell("") | {"outputs": [{"output_type": "stream", "name": "stderr", "text": "3"}]}
    assert agreement.disagreement(exact, warned) == ""


def test_a_notebook_is_held_to_its_own_rows(monkeypatch):
    monkeypatch.setattr(
        agreement, "rows", lambda: [row("exact", "3"), row("exact", "4", notebook="page_x")]
    )
    assert agreement.violations("99_fixture", {"cells": [cell("3")]}) == []
    (violation,) = agreement.violations("page_x", {"cells": [cell("3")]})
    assert violation == "a-1 (exact), cell c of page_x: the line '4' is missing"


@pytest.mark.parametrize(
    ("code", "printed", "words"),
    [
        ("print(3)", "4", "the line '3' is missing"),
        ("print(3)", "3", ""),
        ("other code", "3", "was not executed"),
    ],
)
def test_a_build_is_held_to_what_its_pages_show(
    code, printed, words, tmp_path, monkeypatch, capsys
):
    """Also when only the text of a notebook changed since it was executed."""

    def notebook(code: str, printed: str, *text: str) -> NotebookNode:
        tags = {"tags": ["hide-input"]}
        output = [v4.new_output("stream", text=printed)] if printed else []
        cell = v4.new_code_cell(code, outputs=output, metadata=tags, id="c")
        return v4.new_notebook(cells=[*map(v4.new_markdown_cell, text), cell])

    executed = named(notebook("print(3)", printed, "Old text."))
    get_cache(str(tmp_path)).cache_notebook_bundle(
        CacheBundleIn(executed, "99_fixture.ipynb"), check_validity=False
    )
    now = tmp_path / "99_fixture.ipynb"
    now.write_text(nbformat.writes(notebook(code, "", "New text.", "And more.")), encoding="utf-8")
    monkeypatch.setattr(agreement, "rows", lambda: [row("exact", "3")])
    monkeypatch.setattr(agreement, "notebooks", lambda: [now])
    monkeypatch.setattr(agreement, "CACHE", tmp_path)
    assert agreement.main() == bool(words)
    assert words in capsys.readouterr().err
