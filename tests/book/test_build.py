"""The book's own scripts: what makes the build execute again, and the pages that it generates."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import nbformat
import pytest
from docutils import nodes
from docutils.utils import new_document
from jupyter_cache import get_cache
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from policy.tree import ROOT

sys.path.insert(0, str(ROOT / "book/_ext"))
import build_book
import outputs
import prompts
import sources_page


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository that the build script takes for its own."""
    files = {
        "src/tutorec/a.py": "x = 1",
        "requirements.txt": "torch",
        "notebooks/00_a.ipynb": "{}",
        "_config.yml": "a: 1",
    }
    for name, text in (files | {"book/intro.md": "# One"}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(build_book, "ROOT", tmp_path)
    monkeypatch.delenv("TUTOREC_BACKEND", raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["src/tutorec/a.py", "requirements.txt"])
def test_notebooks_are_executed_again_when_what_they_run_on_changes(tree, name):
    before = build_book.execution_key(), build_book.book_key()
    (tree / name).write_text("changed", encoding="utf-8")
    assert build_book.execution_key() != before[0]
    assert build_book.book_key() != before[1]


def test_notebooks_are_executed_again_on_the_other_backend(tree, monkeypatch):
    before = build_book.execution_key()
    monkeypatch.setenv("TUTOREC_BACKEND", "torch")
    assert build_book.execution_key() != before


def test_the_book_takes_a_notebook_that_was_executed_by_nbmake(tree, monkeypatch):
    monkeypatch.setattr(build_book, "BUILD", tree / "_build")
    solution = new_code_cell("# @title Solution\n2", metadata={"tags": ["hide-cell"]})
    cells = [new_markdown_cell("One and one"), new_code_cell("1 + 1"), solution]
    executed = new_notebook(cells=copy.deepcopy(cells))
    executed.cells[1].metadata["execution"] = {"shell.execute_reply": "2026-01-01T00:00:00Z"}
    executed.cells[1].outputs = [new_output("stream", text="2")]
    build_book.keep_executed(executed, tree / "notebooks/00_a.ipynb", seconds=3.0)

    source = [nbformat.writes(new_notebook(cells=cells))]
    prompts.read(None, "notebooks/00_a", source)  # what the build does with a page
    as_read = nbformat.reads(source[0], as_version=4)
    cache = get_cache(tree / "_build/.jupyter_cache")
    record = cache.match_cache_notebook(as_read)
    assert record.data == {"execution_seconds": 3.0}
    _, merged = cache.merge_match_into_notebook(as_read)
    assert merged.cells[1].outputs[0].text == "2"

    (tree / "src/tutorec/a.py").write_text("changed", encoding="utf-8")
    build_book.drop_stale_executions()
    assert not (tree / "_build/.jupyter_cache").exists()


def test_a_notebook_that_failed_is_executed_by_the_next_build(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build_book, "ROOT", tmp_path)
    monkeypatch.setattr(build_book, "BUILD", tmp_path / "_build")
    log = tmp_path / "_build/html/reports/notebooks/00_a.err.log"
    pages = [tmp_path / f"_build/.doctrees/notebooks/{name}.doctree" for name in ("00_a", "01_b")]
    for path in (log, *pages):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("ZeroDivisionError")
    build_book.report_failures()
    build_book.forget_failures()
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert [page.exists() for page in pages] == [False, True]


@pytest.mark.parametrize("name", ["notebooks/00_a.ipynb", "book/intro.md", "_config.yml"])
def test_pages_alone_are_built_again_when_a_page_changes(tree, name):
    before = build_book.execution_key(), build_book.book_key()
    (tree / name).write_text("changed", encoding="utf-8")
    assert build_book.execution_key() == before[0]
    assert build_book.book_key() != before[1]


def test_what_a_build_leaves_behind_changes_nothing(tree):
    before = build_book.book_key()
    for name in (
        "src/tutorec/__pycache__/a.py",
        "book/.ipynb_checkpoints/intro.md",
        "book/_build/x.md",
    ):
        (tree / name).parent.mkdir(parents=True)
        (tree / name).write_text("x", encoding="utf-8")
    assert build_book.book_key() == before


def test_text_of_a_row_cannot_break_its_table():
    assert (
        sources_page.plain("a | b <c>\nembedding_bags *")
        == r"a \| b &lt;c>" + r" embedding\_bags \*"
    )
    assert (
        sources_page.plain("`a_b <c>` stays, a_b <c> does not")
        == r"`a_b <c>` stays, a\_b &lt;c> does not"
    )


def stream(text: str, name: str = "stdout") -> dict[str, str]:
    return {"output_type": "stream", "name": name, "text": text}


def test_a_line_that_the_kernel_sent_in_two_pieces_stays_one_line():
    pieces = [stream("ids:  "), stream("warned\n", "stderr"), stream("[1, 2]\n\n"), stream("end\n")]
    whole = outputs.joined([NotebookNode(piece) for piece in pieces])
    assert [(output["name"], output["text"]) for output in whole] == [
        ("stdout", "ids:  [1, 2]\n\nend\n"),
        ("stderr", "warned\n"),
    ]
    assert pieces[0]["text"] == "ids:  ", "what the cache holds is not changed"


def test_a_page_shows_no_folder_of_the_machine_that_built_it():
    shown = "/srv/a-b/lib/python3.11/site-packages/torch/x.py:3: at /usr/lib/python3.11/ast.py:5"
    (output,) = outputs.joined([NotebookNode(stream(shown, "stderr"))])
    assert output["text"] == ".../torch/x.py:3: at .../ast.py:5"


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("cut         bytes\nrow-wise        8\ntable-wise     16\n", True),
        ("a sentence of any length\n  and its second line\n", False),
        ("ids:  [1, 2]\nbag:  [3]\ntensor([ 0,  3])\ntensor([ 1,  4])\n", False),
    ],
)
def test_sentences_fold_and_tables_do_not(text, table):
    assert outputs.is_table(text) is table


def test_a_printed_table_that_is_wider_than_the_page_gets_smaller_letters():
    lines = {"long": f"cut{' ' * 90}bytes\nrow-wise{' ' * 89}8\n", "folds": "words " * 30}
    document = new_document("page")
    document += [nodes.literal_block(text, text, classes=["output"]) for text in lines.values()]
    outputs.fold(None, document)
    assert [block["classes"] for block in document] == [["output", name] for name in lines]
