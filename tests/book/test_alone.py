"""What a notebook that is opened alone needs: its first cell, cells that editors fold, links."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

sys.path.insert(0, str(Path(__file__).parents[2] / "book/_ext"))
sys.path.insert(0, str(Path(__file__).parents[2] / ".ci"))
from alone import absolute, content, first_cell, folds, relative, stored, titled, untitled
from strip_notebooks import configuration, main, strip

ROOT = Path(__file__).parents[2]
ARCHIVE = "https://example.org/shop/archive/main.zip"


def config(published: bool = False, book: str = "") -> dict[str, Any]:
    """A _config.yml."""
    return {
        "repository": {"url": "https://example.org/shop", "branch": "main"},
        "sphinx": {"config": {"published": published, "html_baseurl": book}},
    }


# ---- the first cell

Run = Callable[..., str | None]


@pytest.fixture
def run_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the part of the first cell that installs, and returns what it asked pip for."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(**installed: str) -> str | None:
        asked: list[str] = []
        names: dict[str, Any] = {}

        class Shell:
            def run_line_magic(self, name: str, line: str) -> None:
                assert name == "pip"
                asked.append(line.format(**names))

        def distributions(name: str) -> list[SimpleNamespace]:
            return [SimpleNamespace(version=installed[name])] if name in installed else []

        monkeypatch.setattr(metadata, "distributions", distributions)
        code = TransformerManager().transform_cell(first_cell(config()))
        names["get_ipython"] = Shell
        exec(code.partition("\nimport tutorec")[0], names)
        if not asked:
            return None
        assert asked[0].startswith("install -q ")
        return asked[0].removeprefix("install -q ").rstrip()

    return run


def test_first_cell_installs_from_the_address_where_the_notebook_lies_alone(run_setup: Run):
    assert run_setup() == f'"{ARCHIVE}"'


def test_first_cell_installs_from_the_clone_around_the_notebook(run_setup: Run, tmp_path: Path):
    (tmp_path / "src/tutorec").mkdir(parents=True)
    assert run_setup() == '".."'


def test_first_cell_installs_the_newest_wheel_beside_the_notebook(run_setup: Run, tmp_path: Path):
    (tmp_path / "src/tutorec").mkdir(parents=True)
    for version in ("0.1.0", "0.2.0"):
        Path(f"tutorec-{version}-py3-none-any.whl").touch()
    assert run_setup() == '"tutorec-0.2.0-py3-none-any.whl"'


def test_first_cell_requires_the_torch_that_is_there(
    run_setup: Run, capsys: pytest.CaptureFixture[str]
):
    assert run_setup(torch="2.11.0+cu128") == f'"{ARCHIVE}"  torch==2.11.0+cu128'
    (line,) = capsys.readouterr().out.splitlines()
    assert f"from {ARCHIVE}, with torch==2.11.0+cu128." in line


def test_first_cell_says_what_to_do_where_pip_fails(
    run_setup: Run, capsys: pytest.CaptureFixture[str]
):
    run_setup()
    (line,) = capsys.readouterr().out.splitlines()
    assert "a new torch" in line and "tutorec-*.whl" in line
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needed,) = (text for text in project["dependencies"] if text.startswith("torch>="))
    assert f"needs {needed}. " in line


def test_first_cell_installs_nothing_where_tutorec_is(
    run_setup: Run, capsys: pytest.CaptureFixture[str]
):
    assert run_setup(tutorec="0.1.0", torch="2.13.0") is None
    assert capsys.readouterr().out == ""


def test_first_cell_ends_with_the_report_of_the_doctor():
    assert first_cell(config()).endswith("\nimport tutorec\n\ntutorec.doctor()")


def test_no_cell_lets_pip_replace_the_torch_that_is_there():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        lines = "\n".join(c["source"] for c in nbformat.read(path, as_version=4).cells).splitlines()
        for line in lines:
            if "%pip install" in line:
                assert "{kept}" in line or "torch=={torch.__version__}" in line, (path.name, line)


# ---- folded cells


@pytest.mark.parametrize(
    ("code", "tags", "words"),
    [
        ('# @title Solution {display-mode: "form"}\nanswer = 3', {"hide-cell"}, "the solution"),
        ("import tutorec\n\ntutorec.doctor()", {"hide-cell"}, "the setup: versions and kernels"),
        ("from torch import nn", {"hide-input"}, "the imports"),
        ("# @title Imports\nfrom torch import nn", {"hide-input"}, "the imports"),
        ("chart = 1\ndraw.show(chart)", {"hide-input"}, "the code of the figure"),
        ("teach.table(rows)", {"hide-input"}, "the code of the table"),
        ('check.reveal("01.1", 3)', {"hide-input"}, "the comparison with the prediction"),
        ("x = 1", {"hide-input"}, "the code"),
        ("assert x == 1", {"remove-cell"}, "the checks of the numbers in the text"),
        ("world.close()", {"remove-cell"}, "the end of this run's processes"),
    ],
)
def test_a_folded_cell_is_named_after_its_content(code: str, tags: set[str], words: str):
    assert content(code, tags) == words


@pytest.mark.parametrize("tag", ["hide-input", "hide-cell", "remove-input", "remove-cell"])
def test_a_cell_that_the_book_folds_gets_title_and_metadata(tag: str):
    assert titled("x = 1", {"tags": [tag]}) in (
        "# @title Code\nx = 1",
        "# @title Checks of the numbers in the text\nx = 1",
    )
    assert folds({tag}) == {"cellView": "form", "jupyter": {"source_hidden": True}}


@pytest.mark.parametrize("tags", [set(), {"source:a-1"}, {"hide-output"}])
def test_a_cell_that_the_book_shows_gets_neither(tags: set[str]):
    assert titled("x = 1", {"tags": list(tags)}) == "x = 1"
    assert folds(tags) == {}


HIDDEN = {"tags": ["hide-input"]}


def test_a_title_made_here_follows_the_code_and_goes_with_the_tag():
    made = titled("x = 1", HIDDEN)
    assert titled(made, HIDDEN) == made
    assert titled(made + "\ndraw.show(x)", HIDDEN).startswith("# @title Code of the figure\n")
    assert titled(made, {}) == "x = 1"


def test_a_title_has_the_words_of_the_books_toggle():
    toggle = {"code_prompt_show": "Show the conversions", "code_prompt_hide": "Hide"}
    made = titled("x = 1", HIDDEN | {"mystnb": toggle})
    assert made == "# @title Conversions\nx = 1"
    assert titled(made, HIDDEN | {"mystnb": toggle}) == made
    assert titled(made, {"mystnb": toggle}) == "x = 1"
    assert titled("x = 1", HIDDEN | {"mystnb": {"code_prompt_show": "Look"}}).startswith(
        "# @title Code\n"
    )


@pytest.mark.parametrize(
    "code",
    [
        "# @title Time five caches\nx = 1",
        '# @title Solution {display-mode: "form"}\nx = 1',
        "%%time\nx = 1",
    ],
)
def test_an_authors_title_stays_and_a_cell_magic_stays_first(code: str):
    assert titled(code, {"tags": ["hide-cell"]}) == code
    assert titled(code, {}) == code


def test_a_title_is_one_line():
    assert untitled("# @title Imports\nimport os\nimport re") == "import os\nimport re"
    assert untitled("import os") == "import os"


# ---- links

LINKS = [
    (
        "[09](09_planner.ipynb)",
        "[09](https://example.org/shop/blob/main/notebooks/09_planner.ipynb)",
    ),
    (
        "[09](09_planner.ipynb#what-it-costs)",
        "[09](https://example.org/shop/blob/main/notebooks/09_planner.ipynb#what-it-costs)",
    ),
    (
        "a [bag](../book/glossary.md#bag)",
        "a [bag](https://example.org/shop/blob/main/book/glossary.md#bag)",
    ),
    (
        "[api](../book/api/models.md)",
        "[api](https://example.org/shop/blob/main/book/api/models.md)",
    ),
    (
        "![two ranks](../book/_static/two_ranks.png)",
        "![two ranks](https://example.org/shop/raw/main/book/_static/two_ranks.png)",
    ),
]
OTHERS = "[x](https://pytorch.org/a.ipynb) [y](#below) `09_planner.ipynb` ../book/glossary.md"


@pytest.mark.parametrize(("here", "whole"), LINKS)
def test_a_link_has_a_whole_address_once_there_is_one(here: str, whole: str):
    assert absolute(here, config()) == whole
    assert relative(whole, config()) == here


def test_a_link_to_a_page_leads_into_the_book_once_the_book_has_an_address():
    web = config(published=True, book="https://example.org/book")
    whole = absolute("[bag](../book/glossary.md#bag) [09](09_planner.ipynb)", web)
    assert whole == (
        "[bag](https://example.org/book/book/glossary.html#bag) "
        "[09](https://example.org/shop/blob/main/notebooks/09_planner.ipynb)"
    )
    assert relative(whole, web) == "[bag](../book/glossary.md#bag) [09](09_planner.ipynb)"


def test_other_links_stay():
    assert absolute(OTHERS, config()) == OTHERS
    assert relative(OTHERS, config()) == OTHERS


@pytest.mark.parametrize("book", ["", "https://example.org/book/"])
@pytest.mark.parametrize("name", [path.name for path in sorted(ROOT.glob("notebooks/*.ipynb"))])
def test_links_of_every_notebook_return_to_what_they_were(name: str, book: str):
    cells = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = relative(text, configuration())
    whole = absolute(text, config(True, book))
    assert relative(whole, config(True, book)) == text
    links = re.findall(r"\]\(([^)\s]+)\)", whole)
    assert all(link.startswith(("https://", "http://", "#")) for link in links)


def test_what_is_stored_follows_published():
    here, whole = LINKS[0]
    for text in (here, whole):
        assert stored(text, config(published=False)) == here
        assert stored(text, config(published=True)) == whole


# ---- the tool


def notebook() -> nbformat.NotebookNode:
    """A notebook as an editor leaves it: outputs, counts, metadata, an old first cell."""
    made = nbformat.v4.new_notebook()
    made.metadata = {"kernelspec": {"name": "env", "display_name": "env"}, "colab": {}}
    cells = [
        nbformat.v4.new_markdown_cell("[09](09_planner.ipynb)", metadata={"editable": True}),
        nbformat.v4.new_code_cell("old()\ntutorec.doctor()", metadata={"tags": ["hide-cell"]}),
        nbformat.v4.new_code_cell("import os", metadata={"tags": ["hide-input"], "scrolled": True}),
        nbformat.v4.new_code_cell("x = 1", metadata={"jupyter": {"source_hidden": True}}),
        nbformat.v4.new_code_cell("x = 1", metadata={"cellView": "form", "mystnb": {"a": 1}}),
    ]
    cells[2].outputs = [nbformat.v4.new_output("stream", text="a")]
    cells[2].execution_count = 3
    made.cells = cells
    return made


def test_strip_writes_a_notebook_as_it_is_stored():
    text = strip(nbformat.writes(notebook()), config(published=True))
    result = nbformat.reads(text, as_version=4)
    assert result.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    assert [cell.source for cell in result.cells] == [
        LINKS[0][1],
        first_cell(config()),
        "# @title Imports\nimport os",
        "x = 1",
        "x = 1",
    ]
    folded = {"cellView": "form", "jupyter": {"source_hidden": True}}
    assert [cell.metadata for cell in result.cells] == [
        {},
        {"tags": ["hide-cell"], **folded},
        {"tags": ["hide-input"], **folded},
        {},
        {"mystnb": {"a": 1}},
    ]
    code = result.cells[1:]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_strip_changes_nothing_the_second_time():
    once = strip(nbformat.writes(notebook()), config())
    assert strip(once, config()) == once


def test_strip_leaves_a_first_cell_that_is_not_the_setup():
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import torch")])
    assert nbformat.reads(strip(nbformat.writes(made), config()), 4).cells[0].source == (
        "import torch"
    )


def test_strip_says_which_files_it_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "a.ipynb"
    path.write_text(nbformat.writes(notebook()), encoding="utf-8")
    assert main([str(path)]) == 1
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == f"stripped {path}\n"
