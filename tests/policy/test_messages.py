"""Error messages: what is wrong with which value, and what would work; asserts are for ourselves
and say something too.

What can be checked without running: an exception that a caller may meet carries a formatted value,
or, where there is no value to show, a constant text of two clauses (what is wrong; what would work)
or with a word that asks for something. An assert has a message and does not judge an argument of a
public function.
"""

from __future__ import annotations

import ast
import re

import pytest
from policy.tree import SourceFile, Tree, assert_none

# They carry no text for a reader: the protocol that raises them gives them their meaning.
PROTOCOL = {
    "StopIteration",
    "StopAsyncIteration",
    "SystemExit",
    "KeyboardInterrupt",
    "GeneratorExit",
    "EOFError",
}
# between two processes of ours, caught where it is read
PROTOCOL |= {"ConnectionError", "BrokenPipeError"}
REMEDY = re.compile(
    r"\b(use|give|call|pass|set|install|see|write|try|make|choose|remove|add|wait|read|start|build|create|needs?|must|"
    r"expected|instead|run|return|keep|convert|override|implement|implements)\b",
    re.IGNORECASE,
)
SECOND_CLAUSE = re.compile(r"[;:] +\S+ +\S+ +\S+")
SHORTEST = 12


def message_violations(file: SourceFile) -> list[str]:
    found = []
    for node in ast.walk(file.ast):
        where = f"{file.where}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Raise) and node.exc is not None:
            problem = raise_problem(node.exc)
            if problem:
                found.append(f"{where}: {ast.unparse(node.exc)[:80]}: {problem}")
        if isinstance(node, ast.Assert) and (node.msg is None or is_empty(node.msg)):
            found.append(f"{where}: an assert without a message")
    for name, node in file.functions():
        if not any(part.startswith("_") or part == "<locals>" for part in name.split(".")):
            found += argument_asserts(file, name, node)
    return found


def raise_problem(exc: ast.expr) -> str | None:
    if ast.unparse(exc) == "NotImplementedError":
        return None  # an abstract method: the class's docstring says who fills it
    if isinstance(exc, ast.Name):
        named_error = exc.id.endswith(("Error", "Exception")) and exc.id[0].isupper()
        return "no message" if named_error else None
    if (
        not isinstance(exc, ast.Call)
        or not isinstance(exc.func, ast.Name)
        or exc.func.id in PROTOCOL
    ):
        return None
    if exc.func.id.startswith("_") or not exc.func.id.endswith(("Error", "Exception", "Exit")):
        return None  # a helper that builds the error, or one that never leaves its module
    if not exc.args and not exc.keywords:
        return "no message"
    texts = [*exc.args, *(keyword.value for keyword in exc.keywords)]
    if any(has_value(text) for text in texts):
        return None
    constant = " ".join(
        text.value
        for text in texts
        if isinstance(text, ast.Constant) and isinstance(text.value, str)
    )
    if len(constant) < SHORTEST or not (REMEDY.search(constant) or SECOND_CLAUSE.search(constant)):
        return "neither a formatted value nor a remedy in the message"
    return None


def has_value(text: ast.expr) -> bool:
    """Whether the text shows anything that is only known at run time."""
    return any(
        isinstance(node, ast.FormattedValue | ast.Name | ast.Attribute | ast.Call)
        for node in ast.walk(text)
    )


def is_empty(text: ast.expr) -> bool:
    return isinstance(text, ast.Constant) and len(str(text.value)) < SHORTEST


def argument_asserts(
    file: SourceFile, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef
) -> list[str]:
    arguments = {
        a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    } - {"self", "cls"}
    rebound = {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    found = []
    for child in ast.walk(node):
        if isinstance(child, ast.Assert):
            if ast.unparse(child.test).endswith("is not None"):
                # tells the type checker what the callers inside the library have made sure of
                continue
            judged = {n.id for n in ast.walk(child.test) if isinstance(n, ast.Name)} & (
                arguments - rebound
            )
            if judged:
                where = f"{file.where}:{child.lineno}: {name}"
                found.append(f"{where} asserts on its argument {min(judged)!r}; raise ValueError")
    return found


def test_messages_say_what_and_how():
    assert_none([v for file in Tree.of_repository().files for v in message_violations(file)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('raise ValueError("bad lengths")', "neither"),
        ("raise ValueError", "no message"),
        ("raise KeyError()", "no message"),
        ("assert x > 0", "without a message"),
        ('assert x > 0, "no"', "without a message"),
        (
            'def rows(table):\n    assert table > 0, "a table has at least one row"',
            "asserts on its argument 'table'",
        ),
    ],
)
def test_message_policy_rejects(text, words):
    violations = message_violations(SourceFile("tutorec.x", text))
    assert len(violations) == 1, violations
    assert words in violations[0]


@pytest.mark.parametrize(
    "text",
    [
        'raise ValueError(f"table {name!r} has {rows} rows")',
        (
            'raise ValueError("a weighted collection needs weights: give weights= to the '
            'KeyedJaggedTensor")'
        ),
        "raise self._error(x)",
        "raise StopIteration",
        "try:\n    f()\nexcept KeyError as error:\n    raise error",
        'def _rows(table):\n    assert table > 0, "a table has at least one row"',
    ],
)
def test_message_policy_accepts(text):
    assert_none(message_violations(SourceFile("tutorec.x", text)))
