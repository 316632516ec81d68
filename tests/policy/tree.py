"""What every policy reads: the Python files of a source tree, parsed, and the imports they make.

A policy is a function from a tree to a list of violations; its test asserts that the list is empty
for the repository and not empty for a small bad tree, so that a rule which stopped working is
noticed.
"""

from __future__ import annotations

import ast
import io
import tokenize
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = "tutorec"


@dataclass(frozen=True)
class Import:
    """One imported module, as `from base import name` or `import base` (name is None)."""

    base: str
    name: str | None
    line: int


@dataclass(frozen=True)
class SourceFile:
    """One Python file: its dotted module name, its text, its syntax tree."""

    module: str
    text: str
    is_package: bool = False
    label: str = ""

    @cached_property
    def ast(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(self.ast))

    @property
    def where(self) -> str:
        return self.label or self.module

    def imports(self) -> list[Import]:
        """Every import statement, those inside functions and under TYPE_CHECKING too."""
        return self._imports

    @cached_property
    def _imports(self) -> list[Import]:
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(alias.name, None, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found += [Import(node.module, alias.name, node.lineno) for alias in node.names]
        return found

    def functions(self) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Qualified name and node of every function and method."""
        yield from self._functions

    @cached_property
    def _functions(self) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        return list(_functions(self.ast, ""))

    def tokens(self, node: ast.AST | None = None) -> int:
        """Python's own tokens without comments, docstrings, ends of lines and indentation."""
        first = getattr(node, "lineno", 1)
        last = getattr(node, "end_lineno", None) or self.text.count("\n") + 1
        lines = self._token_lines
        return bisect_right(lines, last) - bisect_left(lines, first)

    @cached_property
    def _token_lines(self) -> list[int]:
        return [token.start[0] for token in self._code_tokens]

    @cached_property
    def _code_tokens(self) -> list[tokenize.TokenInfo]:
        skipped = {
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
            tokenize.ENDMARKER,
        }
        docstrings: set[int] = set()
        for node in self.nodes:
            holder = isinstance(
                node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            )
            if holder and ast.get_docstring(node, clean=False) is not None:
                docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [
            token
            for token in tokens
            if token.type not in skipped and token.start[0] not in docstrings
        ]


def child_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Children that are statements or hold some; expressions are not looked into."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node."""
    for child in child_statements(node):
        yield child
        yield from statements_in(child)


def _functions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in child_statements(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + child.name, child
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)


class Tree:
    """The modules of a source tree by dotted name."""

    def __init__(self, files: list[SourceFile]) -> None:
        self.files = files
        self.modules = {file.module: file for file in files}

    @classmethod
    @cache
    def of_repository(cls) -> Tree:
        """The package, read and parsed once for all policies."""
        files = []
        for path in sorted((SRC / PACKAGE).rglob("*.py")):
            parts = path.relative_to(SRC).with_suffix("").parts
            package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if package else parts)
            files.append(
                SourceFile(
                    module, path.read_text(encoding="utf-8"), package, str(path.relative_to(ROOT))
                )
            )
        return cls(files)

    @classmethod
    def of(cls, modules: dict[str, str]) -> Tree:
        """A small tree for a negative fixture: names below the package, those that end in `/` are
        packages.
        """
        return cls(
            [
                SourceFile(f"{PACKAGE}.{name.rstrip('/')}", text, name.endswith("/"))
                for name, text in modules.items()
            ]
        )

    def target(self, found: Import) -> str | None:
        """The module of this package that an import reaches, or None for another package's."""
        if found.base != PACKAGE and not found.base.startswith(PACKAGE + "."):
            return None
        if found.name is not None and f"{found.base}.{found.name}" in self.modules:
            return f"{found.base}.{found.name}"
        return found.base


def assert_none(violations: list[str]) -> None:
    """Fail with every violation on a line of its own."""
    assert not violations, f"{len(violations)} violations:\n  " + "\n  ".join(violations)
