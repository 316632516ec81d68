"""Notebooks: stored clean, equal first cell, plain Markdown, and the form every chapter has."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import yaml
from policy.chapters import Cell, Chapter, chapter_of, chapters
from policy.tree import ROOT, Tree, assert_none, statements_in

sys.path.insert(0, str(ROOT / "book/_ext"))
from alone import FOLDING, TITLE, first_cell, folds, stored

CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
VISIBLE_CELLS = 40

SHOWN = re.compile(r"(draw\.show|gantt|(teach\.)?(say|table))\(")
NAMED_CPU = re.compile(
    r"torch\.device\(\s*\"cpu|\bdevice(_type)?=\"cpu|backend=\"gloo|compute_device=\"cpu"
)
# Cells of which the CPU is the subject, or that are the document's own.
ABOUT_THE_CPU = {
    ("00_setup", "backends"): "what runs on the CPU, by each backend",
    ("09b_planner_at_work", "clock-cell"): "the processor is what is measured",
    ("17_caches", "build"): "tables in a file run on the CPU only",
    ("17b_cache_or_file", "build"): "tables in a file run on the CPU only",
    ("document_1_readers_notebook", "in-9"): "the document's collection, before it is sharded",
    ("document_2_introduction", "collection"): "the document's collection, before it is sharded",
    ("document_2_introduction", "shard-quantized"): "the document's inference, on the CPU",
    ("document_3_sharding", "rank-function"): "the document's choice between a GPU and the CPU",
}
# The cells of the reader's notebook, in the order in which they are there.
READERS_CELLS = [*range(1, 21), 23, 21, 28, 29, 30, *range(34, 41), 42, 43]
LONGEST_DOCUMENT = 260  # lines of code
SMALLEST_SHARE = 0.9  # of them, shown

# TorchRec in 300 lines: its cells are those of src/tutorec/nano.py (tests/test_nano.py)
NANO = "nano"

# What only MyST reads: directives, fences of colons, roles, labels, comments.
MYST = re.compile(r"^ *(`{3,}|~{3,}|:{3,})\{|\{[a-z:.-]+\}`|^\([\w-]+\)=|^%", re.MULTILINE)
SMALLEST_HELPER = 3  # statements; below that two functions may well look alike
FOUND_CODE = re.compile(r"check\.(exercise|predict|reveal)\(\s*[\"'](\d\d[a-z]?\.\d+)[\"']")

STRAW_GUESS = re.compile(r"check\.predict\(\s*\"([^\"]+)\",\s*([^,)]+)")


def stored_violations(chapter: Chapter) -> list[str]:
    """Outputs, counts, kernel, ids: what a notebook must not carry from one machine to another."""
    found = [
        f"{chapter.name}: cell {c.index} holds outputs; strip them: pre-commit run --all-files"
        for c in chapter.code
        if c.raw.get("outputs") or c.raw.get("execution_count") is not None
    ]
    kernel = chapter.raw["metadata"].get("kernelspec", {}).get("name")
    if kernel != "python3":
        found.append(f"{chapter.name}: kernelspec {kernel!r}, expected 'python3'")
    ids = [c.raw.get("id") for c in chapter.cells]
    if None in ids or len(set(ids)) != len(ids):
        found.append(f"{chapter.name}: cells need stable, distinct ids (nbformat 4.5)")
    if not sets_up(chapter):
        found.append(
            f"{chapter.name}: the first code cell is not that of book/_ext/alone.py with the "
            "address of _config.yml; `make format` writes it where the cell calls tutorec.doctor()"
        )
    return found


def sets_up(chapter: Chapter) -> bool:
    """Whether the notebook installs tutorec before it needs it."""
    if chapter.name == NANO:  # needs torch alone, but for its end
        installs, _, _ = first_cell(CONFIG).partition("import tutorec\n")
        return any(cell.text.startswith(installs) for cell in chapter.code)
    return bool(chapter.code) and chapter.code[0].text == first_cell(CONFIG)


def alone_violations(chapter: Chapter) -> list[str]:
    """Opened alone: editors fold what the book folds, and links lead somewhere."""
    found = []
    for cell in chapter.code:
        metadata = cell.raw.get("metadata", {})
        have = {key: metadata[key] for key in ("cellView", "jupyter") if key in metadata}
        titled = cell.text.startswith((TITLE, "%%")) or not FOLDING & cell.tags
        if have != folds(cell.tags) or not titled:
            found.append(
                f"{chapter.name}: JupyterLab and Colab do not fold cell {cell.raw.get('id')!r} as "
                "the book does; `make format` writes its metadata and its title"
            )
    return found + [
        f"{chapter.name}: cell {cell.raw.get('id')!r} has links that `make format` writes "
        "otherwise, by `published` in _config.yml"
        for cell in chapter.prose
        if stored(cell.text, CONFIG) != cell.text
    ]


def markdown_violations(chapter: Chapter) -> list[str]:
    """MyST in a notebook renders in the book and nowhere else."""
    found = []
    for cell in chapter.prose:
        text = re.sub(r"`[^`\n]*`(?!`)", "", cell.text) if "{" not in cell.text else cell.text
        match = MYST.search(text)
        if match:
            found.append(
                f"{chapter.name}: cell {cell.index} holds MyST, which Jupyter and Colab do not "
                f"render: {match[0]!r}"
            )
    return found


def form_violations(chapter: Chapter) -> list[str]:
    """Title, what for, time, what first; a question with a number; a prediction; exercises; an
    answer.
    """
    found = []
    title = chapter.cells[0] if chapter.cells else None
    if title is None or title.kind != "markdown" or not title.text.startswith("# "):
        found.append("the first cell is the title, in Markdown")
    opening = "\n".join(cell.text for cell in chapter.prose[:4])
    for words, what in (
        (r"able to", "what you will be able to do"),
        (r"minutes?\b", "the time"),
        (r"(first|before)", "what to know first"),
    ):
        if not re.search(words, opening, re.IGNORECASE):
            found.append(f"its opening does not say {what}")
    if not re.search(r"question", opening, re.IGNORECASE) or not re.search(r"\d", opening):
        found.append("no opening question with a number")
    shown = [cell for cell in chapter.cells if cell.is_shown]
    if len(shown) > VISIBLE_CELLS:
        found.append(f"{len(shown)} visible cells, at most {VISIBLE_CELLS}")
    calls = [
        (cell.index, *match) for cell in chapter.code for match in FOUND_CODE.findall(cell.text)
    ]
    found += prediction_problems(calls) + exercise_problems(chapter)
    headings = [heading for cell in chapter.prose for heading in cell.headings]
    if not any(re.search(r"answer", heading, re.IGNORECASE) for heading in headings):
        found.append("no ending that answers the question (a heading with the word answer)")
    return [f"{chapter.name}: {problem}" for problem in found]


def prediction_problems(calls: list[tuple[int, str, str]]) -> list[str]:
    guessed = {key: index for index, call, key in reversed(calls) if call == "predict"}
    measured = {key: index for index, call, key in calls if call == "reveal"}
    found = (
        [] if guessed else ["no prediction (check.predict in a cell, check.reveal in a later one)"]
    )
    return found + [
        f"prediction {k} is not revealed in a later cell"
        for k in guessed
        if measured.get(k, -1) <= guessed[k]
    ]


def guess_violations(chapter: Chapter) -> list[str]:
    """A guess is the reader's: a cell with one of ours asks nothing."""
    return [
        f"{chapter.name}: prediction {key} has a guess of ours; write ... in its place"
        for cell in chapter.code
        for key, guess in STRAW_GUESS.findall(cell.text)
        if guess != "..."
    ]


def exercise_problems(chapter: Chapter) -> list[str]:
    stubs: dict[str, Cell] = {}
    solutions: dict[str, Cell] = {}
    for cell in chapter.code:
        for call, key in FOUND_CODE.findall(cell.text):
            if call == "exercise" and "remove-cell" not in cell.tags:
                (solutions if "hide-cell" in cell.tags else stubs).setdefault(key, cell)
    found = [] if len(stubs) >= 2 else [f"{len(stubs)} exercises, at least 2"]
    headings = [heading for cell in chapter.prose for heading in cell.headings]
    for key, stub in stubs.items():
        if not any(heading.startswith(f"Exercise {key}: ") for heading in headings):
            found.append(f"exercise {key} has no heading that begins with Exercise {key}:")
        solution = solutions.get(key)
        if solution is None or solution.index <= stub.index:
            found.append(f"exercise {key} has no solution cell (tag hide-cell) after its stub")
        elif not solution.text.startswith('# @title Solution {display-mode: "form"}'):
            found.append(
                f"the solution of {key} does not start with # @title Solution {{display-mode: "
                f'"form"}}'
            )
    return found


def figure_violations(chapter: Chapter) -> list[str]:
    """A cell shows the value of its last expression only: a figure, table or sentence before that
    is never seen.
    """
    found = []
    for cell in chapter.code:
        try:
            body = ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", cell.text, flags=re.MULTILINE)).body
        except SyntaxError:
            continue
        lost = [
            node
            for node in body[:-1]
            if isinstance(node, ast.Expr) and SHOWN.match(ast.unparse(node))
        ]
        found += [
            f"{chapter.name}: cell {cell.raw.get('id')!r} shows something that is not its last line"
            for _ in lost
        ]
    return found


def device_violations(chapter: Chapter) -> list[str]:
    """Tables and batches live on the rank's own device: a cell that names the CPU runs
    on no GPU.
    """
    return [
        (
            f"{chapter.name}: cell {cell.raw.get('id')!r} names the CPU: leave the device out, or "
            "use tutorec.spmd.device()"
        )
        for cell in chapter.code
        if NAMED_CPU.search(cell.text) and (chapter.name, cell.raw.get("id")) not in ABOUT_THE_CPU
    ]


def alt_violations(chapter: Chapter) -> list[str]:
    """The page takes a figure's words from the metadata of its cell; without them it gives the name
    of a file.
    """
    return [
        f"{chapter.name}: cell {cell.raw.get('id')!r} shows a figure and has no metadata "
        "mystnb.image.alt, the words that the page gives to those who do not see it"
        for cell in chapter.code
        if re.search(r"^draw\.show\(", cell.text, re.MULTILINE)
        and not cell.raw.get("metadata", {}).get("mystnb", {}).get("image", {}).get("alt")
    ]


class Definition(NamedTuple):
    """A function or class: its name, and its statements after the docstring."""

    name: str
    statements: list[ast.stmt]

    @property
    def shape(self) -> tuple[str, ...]:
        """The kinds of its statements, which equal definitions share."""
        return tuple(type(statement).__name__ for statement in self.statements)

    def dump(self) -> str:
        """What it does, without its name and its lines."""
        return "\n".join(map(ast.dump, self.statements))


def definitions(syntax: ast.AST) -> Iterator[Definition]:
    """Functions and classes of a few statements or more."""
    for node in statements_in(syntax):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            has_docstring = ast.get_docstring(node) is not None
            size = sum(isinstance(child, ast.stmt) for child in statements_in(node))
            if size - has_docstring >= SMALLEST_HELPER:
                yield Definition(node.name, node.body[has_docstring:])


def duplicate_violations(all_chapters: list[Chapter], tree: Tree) -> list[str]:
    """A helper that two notebooks define, or that a notebook copies from the library."""
    places: dict[str, set[str]] = defaultdict(set)
    names: dict[str, str] = {}
    shapes = set()
    for chapter in all_chapters:
        for cell in chapter.code:
            for definition in definitions(syntax_of(cell.text)):
                places[definition.dump()].add(chapter.name)
                names[definition.dump()] = definition.name
                shapes.add(definition.shape)

    for file in tree.files:
        for definition in definitions(file.ast):
            if definition.shape in shapes and definition.dump() in names:
                places[definition.dump()].add(file.where)
    return [
        f"{names[dump]} is defined in {', '.join(sorted(where))}; keep it in the library"
        for dump, where in places.items()
        if len(where) > 1
    ]


def syntax_of(code: str) -> ast.Module:
    """A cell's syntax tree, with `pass` for commands of Jupyter."""
    return ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", code, flags=re.MULTILINE))


def is_document(chapter: Chapter) -> bool:
    """Whether the notebook is one of the five documents, cell by cell."""
    return chapter.name.startswith("document_")


def document_violations(chapter: Chapter) -> list[str]:
    """A document is followed with a finger: its code is in sight, and nothing else is."""
    found = []
    lines = {cell.index: sum(map(bool, cell.text.split("\n"))) for cell in chapter.code}
    shown = sum(lines[cell.index] for cell in chapter.code if not FOLDING & cell.tags)
    total = sum(lines.values())
    if total > LONGEST_DOCUMENT:
        found.append(f"{chapter.name}: {total} lines of code, at most {LONGEST_DOCUMENT}")
    if shown < SMALLEST_SHARE * total:
        found.append(
            f"{chapter.name}: {shown} of {total} lines of code are shown, at least "
            f"{SMALLEST_SHARE:.0%}"
        )
    found += [
        f"{chapter.name}: cell {cell.raw.get('id')!r} imports helpers of tutorec.teach"
        for cell in chapter.code
        if re.search(r"tutorec\.teach|tutorec import .*\bteach\b", cell.text)
    ]
    return found


def test_documents_are_in_sight():
    documents = [chapter for chapter in chapters() if is_document(chapter)]
    assert len(documents) == 5
    assert_none([v for chapter in documents for v in document_violations(chapter)])


def test_the_readers_notebook_has_the_cells_of_the_document_in_its_order():
    [chapter] = [c for c in chapters() if c.name == "document_1_readers_notebook"]
    ids = [cell.raw["id"] for cell in chapter.code if FOLDING.isdisjoint(cell.tags)]
    assert ids == [f"in-{number}" for number in READERS_CELLS]


def test_document_policy_rejects_hidden_code_helpers_and_length():
    hidden = chapter_of(("code", "x = 1", ["hide-input"]), ("code", "y = 1", []))
    helped = chapter_of(("code", "from tutorec.teach import draw", []))
    long = chapter_of(("code", "x = 1\n" * (LONGEST_DOCUMENT + 1), []))
    for chapter, words in ((hidden, "1 of 2"), (helped, "teach"), (long, "261 lines")):
        (violation,) = document_violations(chapter)
        assert words in violation


def test_notebooks_are_stored_clean_with_equal_first_cell():
    assert_none([v for chapter in chapters() for v in stored_violations(chapter)])


def test_notebooks_can_be_opened_alone():
    assert_none([v for chapter in chapters() for v in alone_violations(chapter)])


def test_alone_policy_rejects_a_cell_that_editors_do_not_fold_and_a_link_of_another_form():
    link = f"[09]({CONFIG['repository']['url']}/blob/main/notebooks/09_planner.ipynb)"
    if CONFIG["sphinx"]["config"]["published"]:
        link = "[09](09_planner.ipynb)"
    chapter = chapter_of(
        ("code", "# @title Code\nx = 1", ["hide-cell"]),
        ("code", "x = 1", ["hide-cell"]),
        ("code", "x = 1", []),
        ("markdown", link, []),
    )
    assert len(alone_violations(chapter)) == 3
    for cell in chapter.raw["cells"][:3]:
        cell["metadata"] |= {"cellView": "form", "jupyter": {"source_hidden": True}}
    assert len(alone_violations(chapter)) == 3


def test_notebooks_use_plain_markdown():
    assert_none([v for chapter in chapters() for v in markdown_violations(chapter)])


def test_chapters_have_their_form():
    assert_none(
        [v for chapter in chapters() if chapter.name[0].isdigit() for v in form_violations(chapter)]
    )


def test_predictions_leave_the_guess_to_the_reader():
    assert_none([v for chapter in chapters() for v in guess_violations(chapter)])


def test_guess_policy_rejects_a_guess_of_ours():
    ours = ("code", 'check.predict("99.1", 1_000, unit="bytes")', [])
    readers = ("code", 'check.predict("99.1", ..., unit="bytes")', [])
    assert len(guess_violations(chapter_of(ours, readers))) == 1


def test_figures_are_the_last_line_of_their_cells():
    assert_none([v for chapter in chapters() for v in figure_violations(chapter)])


def test_figure_policy_rejects_a_figure_before_the_last_line():
    chapter = chapter_of(
        ("code", 'draw.show(chart, alt="a")\nprint(1)', []),
        ("code", 'gantt(runs)\nsay("a")', []),
        ("code", 'draw.show(chart, alt="a")', []),
    )
    assert len(figure_violations(chapter)) == 2


def test_figures_have_words_on_the_page():
    assert_none([v for chapter in chapters() for v in alt_violations(chapter)])


def test_figure_policy_rejects_a_figure_without_words():
    chapter = chapter_of(("code", 'draw.show(chart, alt="a")', []), ("code", "chart", []))
    assert len(alt_violations(chapter)) == 1
    for cell in chapter.raw["cells"]:
        cell["metadata"]["mystnb"] = {"image": {"alt": "three bars"}}
    assert not alt_violations(chapter)


def test_cells_leave_the_device_to_the_rank():
    assert_none([v for chapter in chapters() for v in device_violations(chapter)])


@pytest.mark.parametrize(
    "code",
    [
        'x.to(torch.device("cpu"))',
        'plan(device_type="cpu")',
        'Ebc(device="cpu")',
        'Ranks(4, backend="gloo")',
    ],
)
def test_device_policy_rejects_a_cell_that_names_the_cpu(code):
    assert device_violations(chapter_of(("code", code, [])))
    assert not device_violations(chapter_of(("code", "x.to(device())", [])))


def test_no_helper_is_defined_twice():
    # the documents define what they define, and a module has the code of one notebook
    books = [chapter for chapter in chapters() if not is_document(chapter)]
    books = [chapter for chapter in books if chapter.name != NANO]
    assert_none(duplicate_violations(books, Tree.of_repository()))


def test_names_carry_number_and_title():
    # A page is a result that a run makes; it teaches nothing and has no chapter's form. A letter
    # marks a second half.
    form = rf"(\d\d[a-z]?|page|document_\d)_[a-z0-9_]+|{NANO}"
    assert_none([c.name for c in chapters() if not re.fullmatch(form, c.name)])


def test_every_notebook_and_page_is_in_the_contents():
    toc = (ROOT / "book/_toc.yml").read_text(encoding="utf-8")
    pages = [
        p.relative_to(ROOT).with_suffix("")
        for p in (ROOT / "book").rglob("*.md")
        # the build writes a page for each module, which no menu lists
        if "_" not in p.parent.name[:1] and p.parent.name != "reference"
    ]
    files = [str(page) for page in pages] + [f"notebooks/{chapter.name}" for chapter in chapters()]
    assert_none(
        [
            file
            for file in files
            if not re.search(rf"(file|root): {re.escape(file)}$", toc, re.MULTILINE)
        ]
    )


STUB = ("code", 'answer = ...\ncheck.exercise("99.1", answer)', [])
OPENING = """# Title

You will be able to cut a table. 20 minutes. Know chapter 01 first.

## The question

Where do 24 GB go?"""


def test_stored_policy_rejects_outputs_kernel_and_first_cell():
    chapter = chapter_of(("code", "import tutorec", []))
    chapter.raw["cells"][0]["execution_count"] = 3
    chapter.raw["metadata"]["kernelspec"]["name"] = "env"
    assert len(stored_violations(chapter)) == 3


@pytest.mark.parametrize(
    "text",
    ["```{note}\nx\n```", ":::{tip}\nx\n:::", "see {term}`bag`", "(label)=\n# T", "% comment"],
)
def test_markdown_policy_rejects(text):
    assert len(markdown_violations(chapter_of(("markdown", text, [])))) == 1


def test_markdown_policy_accepts_what_jupyter_renders():
    text = (
        "$$\\frac{a}{b}$$ a `dict` such as {'a': 1}\n\n```python\nx = "
        "{1}\n```\n<details>x</details>"
    )
    assert_none(markdown_violations(chapter_of(("markdown", text, []))))


def test_form_policy_rejects_an_empty_chapter():
    violations = "\n".join(form_violations(chapter_of(("markdown", "Hello", []))))
    for words in (
        "title",
        "able to",
        "the time",
        "know first",
        "question",
        "prediction",
        "0 exercises",
        "answers",
    ):
        assert words in violations


def test_form_policy_rejects_a_stub_without_solution_and_an_early_reveal():
    reveal = ("code", 'check.reveal("99.1", 3, kind="counted")\ncheck.predict("99.1", 2)', [])
    violations = "\n".join(form_violations(chapter_of(("markdown", OPENING, []), reveal, STUB)))
    assert "prediction 99.1 is not revealed" in violations
    assert "exercise 99.1 has no solution" in violations
    assert "exercise 99.1 has no heading" in violations


def test_form_policy_rejects_too_many_cells():
    cells = [("markdown", OPENING, [])] + [("code", "1", [])] * VISIBLE_CELLS
    assert any("41 visible cells" in v for v in form_violations(chapter_of(*cells)))


def test_duplicate_policy_rejects_a_copied_helper():
    text = "def helper(x):\n    y = x + 1\n    z = y * 2\n    return z"
    pair = [
        chapter_of(("code", text, []), name="98_a"),
        chapter_of(("code", text, []), name="99_b"),
    ]
    assert len(duplicate_violations(pair, Tree([]))) == 1
    assert len(duplicate_violations(pair[:1], Tree.of({"models.x": text}))) == 1
