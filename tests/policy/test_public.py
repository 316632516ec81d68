"""The page of public names (`book/api/public.md`) and the code agree.

What a package or a path of TorchRec's exports is on the page, and so is what notebooks
and the README import. What is on the page is in the code. Files are parsed, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable

import pytest
from policy.chapters import chapters
from policy.test_facades import exported_names, flattened, is_facade
from policy.tree import PACKAGE, ROOT, SourceFile, Tree, assert_none

sys.path.insert(0, str(ROOT / "book/_ext"))
from public_page import PAGE, public_names

README = ROOT / "README.md"
MANIFEST = ROOT / "tests/parity/torchrec_paths.txt"
# They serve the notebooks, and the page says that they are not public.
OF_NOTEBOOKS = ("tutorec.teach", "tutorec.nano")
NANO = "nano"  # its classes and variables have names of modules
# Chapter 20 shows the error for a name that only TorchRec has.
NOT_PROMISED = {"tutorec.modules.itep_modules"}


def bound_names(file: SourceFile) -> set[str]:
    """Names that importing from a module can reach: defined, assigned, imported or lazy."""
    names = set()
    for node in flattened(file.ast.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                child.id
                for target in targets
                for child in ast.walk(target)
                if isinstance(child, ast.Name)
            }
            if "_DEFINED_IN" in names and isinstance(node.value, ast.Dict):
                names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return names


def exports(file: SourceFile) -> set[str]:
    """What `__all__` of a module lists."""
    for node in file.ast.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node):
            return set(exported_names(node.value))
    return set()


def page_violations(tree: Tree, page: set[str], promised: Iterable[str]) -> list[str]:
    """Differences between the page and the code.

    Args:
        tree: The package.
        page: Names on the page.
        promised: Names that must be on it: TorchRec's, and what notebooks import.
    """
    found = []
    for name in sorted(page):
        module, _, attribute = name.rpartition(".")
        if module not in tree.modules or attribute not in bound_names(tree.modules[module]):
            found.append(f"{name} is on the page and not in the code")

    for file in tree.files:
        if not is_facade(file) or file.module.startswith(OF_NOTEBOOKS):
            continue
        names = {f"{file.module}.{name}" for name in exports(file)}
        missing = sorted(names - page - set(tree.modules))
        found += [f"{name} is exported and not on the page" for name in missing]
        if names:
            on_page = {name for name in page if name.rpartition(".")[0] == file.module}
            found += [f"{name} is on the page and not exported" for name in sorted(on_page - names)]

    found += [f"{name} is promised and not on the page" for name in sorted(set(promised) - page)]
    return found


def names_of_torchrec() -> set[str]:
    """The manifest's names that are here."""
    lines = MANIFEST.read_text(encoding="utf-8").splitlines()
    return {
        line.split()[-1].replace("torchrec", PACKAGE, 1) for line in lines if line.startswith("now")
    }


def imported_names(code: str, tree: Tree) -> set[str]:
    """Names of the package that a notebook imports, also as `module.name`; no modules."""
    modules: dict[str, str] = {PACKAGE: PACKAGE}
    names = set()
    syntax = ast.parse(re.sub(r"^( *)[%!].*$", r"\1pass", code, flags=re.MULTILINE))
    for node in ast.walk(syntax):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full)
                modules[alias.asname or alias.name] = full

    for node in ast.walk(syntax):
        if isinstance(node, ast.Attribute):
            base, _, attribute = ast.unparse(node).rpartition(".")
            first, _, rest = base.partition(".")
            module = f"{modules.get(first, first)}.{rest}".rstrip(".")
            if module in tree.modules:
                names.add(f"{module}.{attribute}")
    return {name for name in names - set(tree.modules) if not name.startswith(OF_NOTEBOOKS)}


def test_the_page_and_the_code_agree():
    tree = Tree.of_repository()
    promised = names_of_torchrec()
    for chapter in chapters():
        if chapter.name != NANO:
            code = "\n".join(cell.text for cell in chapter.code)
            promised |= imported_names(code, tree) - NOT_PROMISED
    for code in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL):
        promised |= imported_names(code, tree)

    page = public_names((ROOT / PAGE).read_text(encoding="utf-8"))
    assert len(page) > 600
    assert_none(page_violations(tree, page, promised))


def test_imports_of_a_notebook_are_found_by_name_and_by_module():
    tree = Tree([SourceFile(name, "") for name in ("tutorec", "tutorec.a", "tutorec.a.b")])
    code = "from tutorec.a import b as c\nfrom tutorec.a.b import D\nc.E\ntutorec.f()\nother.g"
    names = {"tutorec.a.b.D", "tutorec.a.b.E", "tutorec.f"}
    assert imported_names(f"%pip\n{code}\nfrom tutorec.teach import h", tree) == names


@pytest.mark.parametrize(
    ("row", "violation"),
    [
        ("`A`", []),
        ("`A`, `Gone`", ["tutorec.a.Gone is on the page and not in the code"]),
        ("`_B`", ["tutorec.a.A is promised and not on the page"]),
    ],
)
def test_public_policy_rejects_names_that_are_gone_or_missing(row, violation):
    tree = Tree.of({"a": "class A:\n    pass\n\n\n_B = 1\n"})
    page = public_names(f"| Module | What is there | Names |\n|---|---|---|\n| `a` | x | {row} |\n")
    assert page_violations(tree, page, ["tutorec.a.A"]) == violation


@pytest.mark.parametrize(
    ("names", "violation"),
    [
        ({"C"}, []),
        (set(), ["tutorec.a.C is exported and not on the page"]),
        ({"C", "_D"}, ["tutorec.a._D is on the page and not exported"]),
    ],
)
def test_public_policy_rejects_exports_that_differ(names, violation):
    text = 'from tutorec.b import C, _D\n\n__all__ = ["C"]\n'
    tree = Tree.of({"a/": text, "b": ""})
    assert page_violations(tree, {f"tutorec.a.{name}" for name in names}, []) == violation
