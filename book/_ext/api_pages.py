"""One API page for each module, with a summary table, and the directive that lists modules on a package's page.

A package's page names its modules, one a line, with the members to show if not all::

    ```{api-modules}
    tutorec.sparse.jagged
    tutorec.distributed.simulate.loads: Load
    ```

`generate` writes a page for each into api/reference/, which git ignores; they are in no menu.
"""  # noqa: E501

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from public_page import PAGE, public_names
from sphinx.application import Sphinx
from sphinx.config import Config
from tables import GeneratedTable

FOLDER = "book/api/reference"
_BLOCK = re.compile(r"^```\{api-modules\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def listed(text: str) -> dict[str, list[str]]:
    """Module -> members to show, where empty is all, of the blocks of a page."""
    lines = [line.partition(":") for block in _BLOCK.findall(text) for line in block.splitlines()]
    return {
        module.strip(): names.replace(",", " ").split()
        for module, _, names in lines
        if module.strip()
    }


def first_sentence(thing: Any) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`*])", paragraph, maxsplit=1)[0].rstrip(":")


def members(module: ModuleType, names: list[str]) -> dict[str, Any]:
    """What its page documents: the names given, or the documented classes and functions that are defined there."""  # noqa: E501
    if names:
        return {name: getattr(module, name) for name in names}
    own = {
        name: thing
        for name, thing in vars(module).items()
        if getattr(thing, "__module__", "") == module.__name__
    }
    documented = {
        name: thing
        for name, thing in own.items()
        if not name.startswith("_") and inspect.getdoc(thing)
    }
    return {
        n: thing
        for n, thing in documented.items()
        if inspect.isroutine(thing) or inspect.isclass(thing)
    }


def public_sentence(name: str, shown: dict[str, Any], public: set[str]) -> str:
    """Which members of a module are public, and under which path if not under the module's."""
    paths = []
    for member, thing in shown.items():
        same = sorted(
            path for path in public if path.endswith(f".{member}") and _at(path, member) is thing
        )
        own = f"{name}.{member}"
        if own in same:
            paths.append(f"`{member}`")
        elif same:
            paths.append(f"`{member}` as `{same[0]}`")

    page = "[public](../public.md)"
    if not paths:
        return f"No name of this module is {page}."
    if len(paths) == len(shown) and not any(" as " in path for path in paths):
        return f"All names below are {page}."
    rest = "" if len(paths) == len(shown) else " The other names are internal."
    return f"What is {page} here: {', '.join(paths)}.{rest}"


def _at(path: str, member: str) -> object:
    """The thing that a dotted path leads to."""
    module = path.removesuffix(f".{member}")
    return getattr(importlib.import_module(module), member, None)


def page(name: str, names: list[str], package: str, public: set[str]) -> str:
    """The page of a module: a table of its members, then each with its docstring."""
    shown = members(importlib.import_module(name), names)
    rows = [
        (f"{{py:obj}}`~{name}.{member}`", first_sentence(thing)) for member, thing in shown.items()
    ]
    table = (
        ["| Name | |", "|---|---|", *(f"| {link} | {_cell(text)} |" for link, text in rows), ""]
        if rows
        else []
    )
    table = [line.replace("| Name | |", "| Name | What it is |") for line in table]
    lines = [
        "---",
        "orphan: true",
        "---",
        f"# {name}",
        "",
        f"A module of [](../{package}.md). {public_sentence(name, shown, public)}",
        "",
        *table,
    ]
    lines += [
        "```{eval-rst}",
        f".. automodule:: {name}",
        f"   :members: {', '.join(names)}".rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def generate(app: Sphinx, config: Config) -> None:
    """Write the pages of the modules that the built pages list, and let Sphinx read them."""
    source = Path(app.srcdir)
    wanted: dict[str, str] = {}
    public = public_names((source / PAGE).read_text(encoding="utf-8"))
    for path in sorted((source / "book/api").glob("*.md")):
        if f"book/api/{path.stem}" in config.external_site_map:
            for name, names in listed(path.read_text(encoding="utf-8")).items():
                wanted[f"{name}.md"] = page(name, names, path.stem, public)
    folder = source / FOLDER
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    config.exclude_patterns = [
        each for each in config.exclude_patterns if not each.startswith(FOLDER)
    ]


class ApiModules(GeneratedTable):
    """The modules with a sentence and their names, each with a link."""

    header = ("Module", "What it is", "Names")
    has_content = True

    def rows(self) -> list[tuple[str, ...]]:
        rows = []
        for name, names in listed("```{api-modules}\n" + "\n".join(self.content) + "\n```").items():
            module = importlib.import_module(name)
            links = ", ".join(f"{{py:obj}}`~{name}.{member}`" for member in members(module, names))
            rows.append(
                (
                    f"[`{name.removeprefix('tutorec.')}`](reference/{name}.md)",
                    _cell(first_sentence(module)),
                    links,
                )
            )
        return rows


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api-modules", ApiModules)
    # after the table of contents, which excludes what it lacks
    app.connect("config-inited", generate, priority=950)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _cell(text: str) -> str:
    """A sentence of a docstring in a cell of a Markdown table."""
    return (
        re.sub(r":[a-z:]+:`~?([^`]+)`", r"`\1`", text)
        .replace("``", "`")
        .replace("|", "\\|")
        .replace("*", "\\*")
    )
