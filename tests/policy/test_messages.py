"""An exception and an assert have a message, and an argument is judged by an exception."""

from __future__ import annotations

import ast

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


def message_violations(file: SourceFile) -> list[str]:
    found = []
    for node in file.nodes:
        where = f"{file.where}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Raise) and node.exc is not None and lacks_message(node.exc):
            found.append(f"{where}: {ast.unparse(node.exc)}: no message")
        elif isinstance(node, ast.Assert) and node.msg is None:
            found.append(f"{where}: an assert without a message")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found += argument_asserts(file, node)
    return found


def lacks_message(raised: ast.expr) -> bool:
    """Whether what is raised is an exception class, or an exception without arguments."""
    call = raised if isinstance(raised, ast.Call) else None
    named = call.func if call else raised
    if not isinstance(named, ast.Name) or named.id in PROTOCOL | {"NotImplementedError"}:
        return False
    if not named.id[0].isupper() or not named.id.endswith(("Error", "Exception")):
        return False  # a helper that builds the error, or one that was caught
    return call is None or not (call.args or call.keywords)


def argument_asserts(file: SourceFile, function: ast.FunctionDef) -> list[str]:
    """Asserts of a function that judge its arguments."""
    asserts = [node for node in ast.walk(function) if isinstance(node, ast.Assert)]
    if not asserts:
        return []

    parameters = function.args
    arguments = {
        argument.arg
        for argument in (*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs)
    }
    rebound = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    found = []
    for node in asserts:
        if ast.unparse(node.test).endswith("is not None"):
            # tells the type checker what the callers inside the library have made sure of
            continue
        read = {child.id for child in ast.walk(node.test) if isinstance(child, ast.Name)}
        judged = read & (arguments - rebound - {"self", "cls"})
        if judged:
            where = f"{file.where}:{node.lineno}: {function.name}"
            found.append(f"{where} asserts on its argument {min(judged)!r}; raise ValueError")
    return found


def test_exceptions_and_asserts_have_messages():
    assert_none([v for file in Tree.of_repository().files for v in message_violations(file)])


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("raise ValueError", "no message"),
        ("raise KeyError()", "no message"),
        ("assert x > 0", "without a message"),
        ('def rows(table):\n    assert table > 0, "a row"', "its argument 'table'"),
    ],
)
def test_message_policy_rejects(text, fact):
    [violation] = message_violations(SourceFile("tutorec.x", text))
    assert fact in violation


@pytest.mark.parametrize(
    "text",
    [
        'raise ValueError("bad lengths")',
        "raise self._error(x)",
        "raise StopIteration",
        "try:\n    f()\nexcept KeyError as error:\n    raise error",
        'def _rows(table):\n    assert table > 0, "a row"',
    ],
)
def test_message_policy_accepts(text):
    assert_none(message_violations(SourceFile("tutorec.x", text)))
