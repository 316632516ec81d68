"""Docstrings: public classes and functions have one, free functions name their arguments and what
they raise.

ruff's D rules check presence and form of what they see; these checks add what ruff has no rule for.
"""

from __future__ import annotations

import ast
import doctest

import pytest
from policy.tree import SourceFile, Tree, assert_none

# A function of so few parameters may say what they are in its first sentences.
SPEAKS_FOR_ITSELF = 3
# Columns that an API page shows of a code block before it scrolls.
PAGE_WIDTH = 88


def public(name: str) -> bool:
    return not any(part.startswith("_") or part == "<locals>" for part in name.split("."))


def raised_names(node: ast.AST) -> set[str]:
    """Names of the exceptions that a function's own statements raise (nested functions are not
    looked into).
    """
    names = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if (
            isinstance(child, ast.Raise)
            and isinstance(child.exc, ast.Call)
            and isinstance(child.exc.func, ast.Name)
        ):
            # not a helper that builds one
            names |= {child.exc.func.id} if child.exc.func.id[0].isupper() else set()
        names |= raised_names(child)
    return names


def doc_violations(file: SourceFile) -> list[str]:
    found = []
    if file.text.strip() and not ast.get_docstring(file.ast):
        found.append(f"{file.where}: no module docstring")
    for node in file.ast.body:
        if isinstance(node, ast.ClassDef) and public(node.name) and not ast.get_docstring(node):
            found.append(f"{file.where}:{node.lineno}: class {node.name} has no docstring")
    for name, node in file.functions():
        if public(name):
            brief = "." in name or not public(file.module)
            found += function_violations(f"{file.where}:{node.lineno}: {name}", node, brief)
    return found


def example_violations(file: SourceFile) -> list[str]:
    """Lines of examples that an API page would cut off."""
    found = []
    for node in ast.walk(file.ast):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for example in doctest.DocTestParser().get_examples(ast.get_docstring(node) or ""):
                code = [f">>> {line}" for line in example.source.splitlines()]
                found += [
                    f"{file.where}: an example is {len(line)} wide, at most {PAGE_WIDTH}: {line}"
                    for line in (*code, *example.want.splitlines())
                    if len(line) > PAGE_WIDTH
                ]
    return found


def function_violations(
    where: str, node: ast.FunctionDef | ast.AsyncFunctionDef, brief: bool
) -> list[str]:
    overloaded = any(ast.unparse(d).endswith(("overload", ".setter")) for d in node.decorator_list)
    if overloaded:
        return []
    doc = ast.get_docstring(node)
    if doc is None:
        return [f"{where} has no docstring"]
    if brief:  # a method, or a function of a private module: one line with shapes is enough
        return []
    found = []
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    if len(names) > SPEAKS_FOR_ITSELF and "Args:" not in doc:
        found.append(f"{where} has {len(names)} parameters and no Args section")
    missing = sorted(name for name in raised_names(node) if name not in doc)
    if missing:
        found.append(f"{where} raises {', '.join(missing)}; name it under Raises")
    return found


def test_public_names_are_documented():
    assert_none([v for file in Tree.of_repository().files for v in doc_violations(file)])


def test_examples_fit_their_page():
    assert_none([v for file in Tree.of_repository().files for v in example_violations(file)])


def test_example_policy_rejects_wide_code_and_wide_output():
    wide = f"{'1' * 85}"
    text = f'"""M.\n\n    >>> {wide}\n    {wide}0000\n    >>> 1\n    1\n"""\n'
    assert len(example_violations(SourceFile("tutorec.x", text))) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "no module docstring"),
        ('"""M."""\n\n\nclass Table:\n    pass\n', "class Table has no docstring"),
        (
            '"""M."""\n\n\nclass Table:\n    """T."""\n\n    def rows(self):\n        return 1\n',
            "Table.rows has no docstring",
        ),
        ('"""M."""\n\n\ndef cut(a, b, c, d):\n    """Cut it."""\n', "no Args section"),
        (
            (
                '"""M."""\n\n\ndef cut(a):\n    """Cut."""\n    if a:\n        raise '
                'ValueError(f"{a}")\n'
            ),
            "raises ValueError",
        ),
    ],
)
def test_docs_policy_rejects(text, words):
    violations = doc_violations(SourceFile("tutorec.x", text))
    assert len(violations) == 1, violations
    assert words in violations[0]
