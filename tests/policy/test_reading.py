"""What is worth reading in a notebook is in a cell that everybody sees; the rest is not in it."""

from __future__ import annotations

import ast
import re
import sys

import pytest
from policy.chapters import Cell, Chapter, chapter_of, chapters
from policy.tree import ROOT, assert_none

sys.path.insert(0, str(ROOT / "book/_ext"))
from alone import FOLDING

LONGEST_CHAPTER = 250  # lines of code that are not blank, solutions apart
SMALLEST_SHOWN = 0.7  # of them, in cells that nothing folds
LONGEST_CELL = 30
LONGEST_IMPORTS = 15
WORDS_IN_CODE = 40  # of English, in string literals of eight words or more
# A promise of minutes: reading 200 words or 15 lines, a figure, an exercise.
WORDS_A_MINUTE = 200
LINES_A_MINUTE = 15
MINUTES_AN_EXERCISE = 4


def solution(cell: Cell) -> bool:
    """Whether the cell is the folded solution of an exercise."""
    return cell.text.startswith("# @title Solution")


def lines_of(cells: list[Cell]) -> int:
    """Lines of code that are not blank."""
    return sum(bool(line.strip()) for cell in cells for line in cell.text.split("\n"))


def words_in_code(text: str) -> int:
    """Words in string literals of eight words or more, docstrings apart."""
    try:
        tree = ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", text, flags=re.MULTILINE))
    except SyntaxError:
        return 0
    docs = {
        node.body[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None
        if isinstance(node.body[0], ast.Expr)
    }
    inside = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside |= set(node.values)
            found.append([v for v in node.values if isinstance(v, ast.Constant)])
    found += [
        [node]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node not in inside | docs
    ]
    counts = [sum(len(str(part.value).split()) for part in parts) for parts in found]
    return sum(count for count in counts if count >= 8)


def private_names(text: str) -> list[str]:
    """Names of the library, or of anything, that begin with one underscore."""
    tree = ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", text, flags=re.MULTILINE))
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.append(node.id)
        elif isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names += (node.module or "").split(".") + [alias.name for alias in node.names]
    return [name for name in names if re.match("_[a-zA-Z]", name)]


def reading_violations(chapter: Chapter) -> list[str]:
    """What is worth reading is in sight, and what is not is not in the notebook."""
    code = [cell for cell in chapter.code if not solution(cell)]
    shown = [cell for cell in code if not FOLDING & cell.tags]
    total = lines_of(code)
    found = []
    if total > LONGEST_CHAPTER:
        found.append(f"{total} lines of code, at most {LONGEST_CHAPTER}")
    if lines_of(shown) < SMALLEST_SHOWN * total:
        found.append(f"{lines_of(shown)} of {total} lines shown, at least {SMALLEST_SHOWN:.0%}")
    for cell in code:
        name = repr(cell.raw.get("id"))
        if lines_of([cell]) > LONGEST_CELL:
            found.append(f"cell {name} has {lines_of([cell])} lines, at most {LONGEST_CELL}")
        if "remove-cell" in cell.tags:
            found.append(f"cell {name} is removed from the page; claims are in tests/book/claims")
        found += [f"cell {name} has a private name: {one}" for one in private_names(cell.text)]
        if re.search(r"\bsay\(|\bbench\b", cell.text):
            found.append(f"cell {name} assembles a sentence or imports a benchmark")
    imports = [
        line
        for cell in code[1:]
        for node in ast.iter_child_nodes(
            ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", cell.text, flags=re.MULTILINE))
        )
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    ]
    if len(imports) > LONGEST_IMPORTS:
        found.append(f"{len(imports)} lines of imports, at most {LONGEST_IMPORTS}")
    words = sum(words_in_code(cell.text) for cell in code[1:])
    if words > WORDS_IN_CODE:
        found.append(f"{words} words of English in code, at most {WORDS_IN_CODE}")
    if not any(re.search(r"^> \*\*Rule\.\*\*.*\d", c.text, re.MULTILINE) for c in chapter.prose):
        found.append("no boxed rule with a number (> **Rule.** ...)")
    return [f"{chapter.name}: {problem}" for problem in found]


def promised_minutes(chapter: Chapter) -> tuple[int, int]:
    """The minutes that a chapter promises, and those that reading and its exercises take."""
    opening = "\n".join(cell.text for cell in chapter.prose[:2])
    match = re.search(r"(\d+) minutes", opening)
    words = sum(len(cell.text.split()) for cell in chapter.prose)
    shown = [cell for cell in chapter.code if not FOLDING & cell.tags]
    figures = sum("draw.show(" in cell.text for cell in shown)
    exercises = len(
        re.findall(r"^## Exercise", "\n".join(c.text for c in chapter.prose), re.MULTILINE)
    )
    estimate = words / WORDS_A_MINUTE + lines_of(shown) / LINES_A_MINUTE
    return int(match[1]) if match else 0, round(
        estimate + figures + MINUTES_AN_EXERCISE * exercises
    )


def time_violations(chapter: Chapter) -> list[str]:
    """A promise of minutes is measured."""
    promised, taken = promised_minutes(chapter)
    if abs(promised - taken) <= 5:
        return []
    return [f"{chapter.name}: promises {promised} minutes; it takes about {taken}"]


def taught(chapter: Chapter) -> bool:
    """Whether this is a chapter or a page, and not a document or nano."""
    return chapter.name[0].isdigit() or chapter.name.startswith("page_")


def test_chapters_are_in_sight():
    assert_none([v for c in chapters() if taught(c) for v in reading_violations(c)])


def test_chapters_promise_the_time_that_they_take():
    assert_none([v for c in chapters() if c.name[0].isdigit() for v in time_violations(c)])


def test_the_book_has_few_words_in_code():
    """A reader of code reads code: the sentences are in Markdown, and not too many of them."""
    in_code = sum(words_in_code(cell.text) for c in chapters() for cell in c.code)
    in_markdown = sum(len(cell.text.split()) for c in chapters() for cell in c.prose)
    assert in_code <= 1000, f"{in_code} words of English in the notebooks' code"
    assert in_markdown <= 62_000, f"{in_markdown} words of Markdown"


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([("code", "x = 1\n" * 30, [])] * 9, "270 lines"),
        ([("code", "x = 1", []), ("code", "y = 2", ["hide-input"])], "1 of 2"),
        ([("code", "x = 1\n" * 31, [])], "31 lines, at most 30"),
        ([("code", "x = 1\n" * 9, []), ("code", "y = 1", ["remove-cell"])], "removed"),
        ([("code", "from tutorec._kernels import backend", [])], "_kernels"),
        ([("code", "x = 1", []), ("code", 'say("yes")', [])], "sentence"),
        ([("code", "1", []), ("code", "import torch\n" * 16, [])], "16 lines of imports"),
        ([("code", "1", []), ("code", f'x = "{"word " * 41}"', [])], "41 words"),
    ],
)
def test_reading_policy_rejects(cells, words):
    rule = ("markdown", "> **Rule.** 3 exchanges.", [])
    (violation,) = reading_violations(chapter_of(rule, *cells))
    assert words in violation


def test_reading_policy_wants_a_rule_with_a_number():
    (violation,) = reading_violations(chapter_of(("markdown", "> **Rule.** Many.", [])))
    assert "rule" in violation


def test_time_policy_counts_words_lines_figures_and_exercises():
    opening = ("markdown", "# T\n\n20 minutes", [])
    words = ("markdown", "word " * 2000, [])
    lines = ("code", "x = 1\n" * 30, [])
    figure = ("code", 'draw.show(chart, alt="a")', [])
    exercise = ("markdown", "## Exercise 99.1: a", [])
    chapter = chapter_of(opening, words, lines, figure, exercise)
    assert promised_minutes(chapter) == (20, 17)
    assert not time_violations(chapter)
    assert len(time_violations(chapter_of(opening, words, words))) == 0
    assert len(time_violations(chapter_of(opening, words, words, words))) == 1
