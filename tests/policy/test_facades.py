"""Facades and package fronts hold imports and `__all__`, and the two agree."""

from __future__ import annotations

import ast

import pytest
from policy.test_layers import FACADES, below
from policy.tree import SourceFile, Tree, assert_none

# A front that imports its names when they are first asked for defines these and nothing else.
LAZY = "lazy_package(__name__"
LAZY_TABLE = "_DEFINED_IN"


def is_facade(file: SourceFile) -> bool:
    return file.is_package or below(file.module) in FACADES


def facade_violations(file: SourceFile) -> list[str]:
    found = []
    imported: set[str] = set()
    exported: list[str] | None = None
    lazy = False
    for node in flattened(file.ast.body):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                pass
            case ast.ImportFrom(module="tutorec._lazy"):
                pass
            case ast.Import() | ast.ImportFrom():
                names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
                imported |= set(names) if getattr(node, "module", "") != "__future__" else set()
                if "*" in names:
                    found.append(f"{file.where}:{node.lineno}: star import")
            case (
                ast.Assign(targets=[ast.Name(id="__all__")])
                | ast.AnnAssign(target=ast.Name(id="__all__"))
            ):
                exported = exported_names(node.value)
            case (
                ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name))
            ) if name in {
                LAZY_TABLE,
                "__version__",
            }:
                lazy = lazy or name == LAZY_TABLE
            case ast.Assign(targets=[ast.Tuple()], value=value) if ast.unparse(value).startswith(
                LAZY
            ):
                pass
            case _:
                found.append(
                    f"{file.where}:{node.lineno}: {type(node).__name__}; a facade holds "
                    "imports and __all__ only"
                )
    if imported and exported is None and not lazy:
        found.append(f"{file.where}: no __all__")
    for name in sorted(set(exported or ()) - imported if not lazy else ()):
        found.append(f"{file.where}: __all__ names {name!r}, which is not imported")
    for name in sorted(imported - set(exported)) if exported and not lazy else ():
        found.append(f"{file.where}: {name!r} is imported and not in __all__")
    return found


def flattened(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements, with those under `if TYPE_CHECKING:` in its place."""
    flat: list[ast.stmt] = []
    for node in body:
        checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        flat += node.body if checking else [node]
    return flat


def exported_names(value: ast.expr | None) -> list[str]:
    return (
        [
            e.value
            for e in ast.walk(value)
            if isinstance(e, ast.Constant) and isinstance(e.value, str)
        ]
        if value
        else []
    )


def test_facades_hold_imports_and_all_only():
    assert_none(
        [
            v
            for file in Tree.of_repository().files
            if is_facade(file)
            for v in facade_violations(file)
        ]
    )


def test_every_folder_of_the_library_is_a_package():
    tree = Tree.of_repository()
    folders = {file.module.rpartition(".")[0] for file in tree.files if file.module != "tutorec"}
    packages = {file.module for file in tree.files if file.is_package}
    assert_none(sorted(folders - packages))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from tutorec.sparse.keyed import KeyedTensor\n", "no __all__"),
        ("from tutorec.sparse.keyed import *\n__all__ = []\n", "star import"),
        ("__all__ = ['KeyedTensor']\n", "not imported"),
        ("from tutorec.sparse.keyed import A, B\n__all__ = ['A']\n", "not in __all__"),
        ("__all__ = []\n\n\ndef helper():\n    pass\n", "FunctionDef"),
        ("CACHE = {}\n", "Assign"),
    ],
)
def test_facade_policy_rejects(text, words):
    violations = facade_violations(SourceFile("tutorec.sparse.jagged_tensor", text))
    assert any(words in v for v in violations), violations
