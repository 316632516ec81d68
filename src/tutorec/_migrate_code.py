"""Uses of a package in Python code: names, calls, and the positions of the package's own name."""

from __future__ import annotations

import ast
import io
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["Call", "CodeBlock", "Use", "parsed", "without_magics", "word_positions"]

# A string that is the package's bare name is a use of it as an argument of these functions.
_TAKES_A_NAME = {
    "__import__",
    "find_spec",
    "getLogger",
    "import_module",
    "importorskip",
    "patch",
    "version",
}
# Python compiles expressions that are nested three times as deep as its usual limit, and each level
# takes two calls here.
_DEPTH = 10_000
_PYTHON_CELLS = {"capture", "prun", "time", "timeit"}
_MAGIC = re.compile(r"^(\s*)(?:[\w., ]+=\s*)?[%!?].*|^(\s*)[\w.]+\?{1,2}\s*$")


@dataclass(frozen=True)
class Use:
    """A used name: imported, reached by dots, or in a string that looks like an import path."""

    line: int
    path: str  # with dots, from the package's name on
    base: str = ""  # the object that an import binds, for a name that is reached by dots
    in_text: bool = False


@dataclass(frozen=True)
class Call:
    """A call of an object that an import binds."""

    line: int
    path: str
    positional: int
    keywords: tuple[str, ...]


@dataclass
class CodeBlock(ast.NodeVisitor):
    """One file, or one cell of a notebook; the cells of a notebook share bound names.

    Args:
        text: Python.
        package: The name to look for.
        bound: Name that an import binds -> path of the object; names of this block are added.

    Raises:
        SyntaxError: The text does not parse.
    """

    text: str
    package: str
    bound: dict[str, str]
    uses: list[Use] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    # Line and byte where the package's name begins; the use, if it is in a string, which may not be
    # an import path.
    occurrences: list[tuple[int, int, Use | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = [line.encode() for line in _lines(self.text)]
        self._word = re.compile(rb"(?<![\w.])%b(?!\w)" % self.package.encode())
        self._bases: list[str | None] = []

        tree = parsed(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._bind_modules(node)
            elif (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and self._is_inside(node.module or "")
            ):
                self._bind_names(node, node.module or "")

        with _deep_calls():
            self.visit(tree)

    def _bind_modules(self, node: ast.Import) -> None:
        for alias in node.names:
            if self._is_inside(alias.name):
                self._note(alias)
                self.uses.append(Use(alias.lineno, alias.name))
                self.bound[alias.asname or self.package] = (
                    alias.name if alias.asname else self.package
                )

    def _bind_names(self, node: ast.ImportFrom, module: str) -> None:
        self._note(node)
        for alias in node.names:
            path = module if alias.name == "*" else f"{module}.{alias.name}"
            self.uses.append(Use(alias.lineno, path))
            self.bound[alias.asname or alias.name] = path

    def _is_inside(self, path: str) -> bool:
        return path.split(".")[0] == self.package

    def _note(self, node: ast.expr | ast.stmt | ast.alias, use: Use | None = None) -> None:
        """Add the first occurrence of the package's name as a word of its own in a node."""
        start = node.col_offset
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            match = self._word.search(self._lines[line - 1], start)
            if match:
                self.occurrences.append((line, match.start(), use))
                return

            start = 0

    def _note_text(self, node: ast.expr, text: str) -> None:
        use = Use(node.lineno, text, in_text=True)
        self.uses.append(use)
        self._note(node, use)

    def _path(self, node: ast.expr) -> tuple[str, str] | None:
        """The object of a dotted chain, and that of its first name; None if no import binds it."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value

        base = self.bound.get(node.id) if isinstance(node, ast.Name) else None
        return (".".join([base, *names]), base) if base else None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A chain of dots is one use."""
        path = self._path(node)
        if path is None:
            self.visit(node.value)
            return

        self.uses.append(Use(node.lineno, *path))
        first: ast.expr = node
        while isinstance(first, ast.Attribute):
            first = first.value
        self.visit(first)

    def visit_Name(self, node: ast.Name) -> None:
        """The package's own name, where ``import package`` has bound it."""
        if node.id == self.package == self.bound.get(node.id):
            self._note(node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        """``global package``."""
        if self.package in node.names and self.package == self.bound.get(self.package):
            self._note(node)

    visit_Nonlocal = visit_Global

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """``super().__init__(...)`` calls the base class, if one comes from the package."""
        base = self._path(_unsubscripted(node.bases[0])) if len(node.bases) == 1 else None
        self._bases.append(base and base[0])
        self.generic_visit(node)
        self._bases.pop()

    def visit_Call(self, node: ast.Call) -> None:
        """A call of something of the package, or of a function that takes the name of a module."""
        function = _unsubscripted(node.func)
        resolved = self._path(function)
        path = resolved and resolved[0]
        if self._bases and _is_super_init(function):
            path = self._bases[-1]

        if path:
            fixed = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            self.calls.append(Call(node.lineno, path, len(fixed), keywords))

        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        match node.args:
            case [ast.Constant(value=str(text)), *_] if (
                text == self.package and name in _TAKES_A_NAME
            ):
                self._note_text(node.args[0], text)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A string that is names with dots between them and nothing else."""
        if isinstance(node.value, str) and re.fullmatch(
            rf"{self.package}(\.[A-Za-z_]\w*)+", node.value
        ):
            self._note_text(node, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """The expressions of an f-string, whose nodes have reliable positions from Python 3.12."""
        before = len(self.occurrences)
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value)

        if len(self.occurrences) == before:
            return

        del self.occurrences[before:]
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            for braces in re.finditer(rb"(?<!\{)\{[^{}]*\}", self._lines[line - 1]):
                matches = self._word.finditer(self._lines[line - 1], *braces.span())
                self.occurrences.extend((line, match.start(), None) for match in matches)


def parsed(text: str) -> ast.Module:
    """The syntax tree, without Python's warnings about the code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


@contextmanager
def _deep_calls() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _is_super_init(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(ast.Call(ast.Name("super"), [], []), "__init__"):
            return True
    return False


def _unsubscripted(node: ast.expr) -> ast.expr:
    """``Pipeline`` of ``Pipeline[In, Out]``."""
    return node.value if isinstance(node, ast.Subscript) else node


def _lines(text: str) -> Iterator[str]:
    """Lines with their ends, as Python counts them: a form feed ends none."""
    return io.StringIO(text, newline="")


def word_positions(text: str, block: CodeBlock, excluded: Iterable[Use]) -> list[int]:
    r"""The positions in a text where the package's name begins.

    Args:
        text: As it is stored.
        block: The block that was read from it.
        excluded: Strings that are not import paths.

    Example:
        >>> text = "import a.b as ab  # a is good\nprint(ab.a, 'a.b', 'a.txt')"
        >>> block = CodeBlock(text, "a", {})
        >>> word_positions(text, block, [use for use in block.uses if use.path == "a.txt"])
        [7, 43]
    """
    lines = [*_lines(text)]
    starts = [0, *accumulate(map(len, lines))]
    other_text = set(excluded)
    positions: set[int] = set()

    for line, start, use in block.occurrences:
        if use not in other_text:
            before = lines[line - 1].encode()[:start].decode()
            positions.add(starts[line - 1] + len(before))

    return sorted(positions)


def without_magics(cell: str) -> str:
    r"""A cell as Python: IPython's own lines are ``pass``, and a cell of another language is empty.

    Example:
        >>> without_magics("!pip list\nif x:\n    %time f()")
        'pass\nif x:\n    pass'
        >>> without_magics("%%bash\nls")
        ''
    """
    magic = re.match(r"%%[ \t]*(\S*)", cell)
    if magic and magic[1] not in _PYTHON_CELLS:
        return ""

    return "".join(
        _MAGIC.sub(lambda match: (match[1] or match[2] or "") + "pass", line)
        for line in _lines(cell)
    )
