"""What a notebook needs where it is opened alone, in JupyterLab, Colab or VS Code.

There the tags of the book fold nothing, no clone lies around the notebook, and a relative link
leads nowhere. So a notebook is stored with a first cell that installs tutorec, with the metadata
and the title line by which editors fold a cell, and with whole addresses in its links once the
project has an address. `.ci/strip_notebooks.py` writes all three. The build of the book
(`prompts.py`) drops the titles and turns the links back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

SETUP = """# @title Setup: install tutorec where it is missing, say what runs here
from glob import glob
from importlib.metadata import distributions

if not any(distributions(name="tutorec")):
    # A wheel beside this notebook, else the clone around it, else the address.
    wheels, clone = sorted(glob("tutorec-*.whl")), glob("../src/tutorec")
    address = "{archive}"
    source = wheels[-1] if wheels else ".." if clone else address
    # With its own version as a requirement, the torch that is here stays.
    kept = "".join(f" torch=={{d.version}}" for d in distributions(name="torch"))
    says = f"Installing tutorec from {{source}}, with{{kept or ' a new torch'}}."
    print(says, "It needs torch>=2.8. If pip fails, put tutorec-*.whl here.")
    %pip install -q "{{source}}" {{kept}}
import tutorec

tutorec.doctor()"""

# Tags by which the book folds a cell's code or leaves the cell out.
FOLDING = frozenset({"hide-input", "hide-cell", "remove-input", "remove-cell"})
TITLE = "# @title "
SOLUTION = TITLE + "Solution"


def first_cell(config: Mapping[str, Any]) -> str:
    """The code of the first cell, with the address of _config.yml.

    Example:
        >>> "https://x.org/t/archive/main.zip" in first_cell(
        ...     {"repository": {"url": "https://x.org/t", "branch": "main"}}
        ... )
        True
    """
    repository = config["repository"]
    return SETUP.format(archive=f"{repository['url']}/archive/{repository['branch']}.zip")


# What a folded cell holds, by the first pattern that its code has. Titles that are made from these
# words are told from an author's own titles by them.
_CHECKS = "the checks of the numbers in the text"
_CLEAN_UP = "the end of this run's processes"
_SETUP = "the setup: versions and kernels"
_CODE = "the code"
_CONTENTS = (
    (re.compile(r"tutorec\.doctor\(\)"), _SETUP),
    (re.compile(r"\A(?:import|from) "), "the imports"),
    (re.compile(r"\bdraw\.show\("), "the code of the figure"),
    (re.compile(r"\bcheck\.reveal\("), "the comparison with the prediction"),
    (re.compile(r"\btable\("), "the code of the table"),
)
_MADE = {_CHECKS, _CLEAN_UP, _CODE, *(words for _, words in _CONTENTS)}


def content(code: str, tags: Collection[str] = ()) -> str:
    """What a folded cell holds.

    Example:
        >>> content("import torch"), content("draw.show(chart)"), content("x = 1")
        ('the imports', 'the code of the figure', 'the code')
        >>> content("assert x == 1", {"remove-cell"})
        'the checks of the numbers in the text'
    """
    if code.startswith(SOLUTION):
        return "the solution"
    code = untitled(code)
    if "remove-cell" in tags:
        return _CLEAN_UP if re.fullmatch(r"(?:\w+\.close\(\)\s*)+", code) else _CHECKS
    return next((words for pattern, words in _CONTENTS if pattern.search(code)), _CODE)


def untitled(code: str) -> str:
    """The code without its title line.

    Example:
        >>> untitled("# @title Imports\\nimport torch")
        'import torch'
    """
    return code.partition("\n")[2] if code.startswith(TITLE) else code


def _title(words: str) -> str:
    """The title line of these words."""
    words = words.removeprefix("the ")
    return f"{TITLE}{words[0].upper()}{words[1:]}"


_MADE_TITLES = {_title(words) for words in _MADE}


def titled(code: str, metadata: Mapping[str, Any]) -> str:
    """The code with a title line if the book folds the cell, and without a line made here if not.

    The words are those of the book's toggle, if the cell has its own. An author's title stays. A
    cell magic (``%%``) has to be the first line and gets no title.

    Example:
        >>> print(titled("import torch", {"tags": ["hide-input"]}))
        # @title Imports
        import torch
        >>> titled("# @title Imports\\nimport torch", {})
        'import torch'
    """
    tags = metadata.get("tags", ())
    toggle = metadata.get("mystnb", {}).get("code_prompt_show", "")
    own = _title(toggle.removeprefix("Show ")) if toggle.startswith("Show ") else ""
    if code.partition("\n")[0] in {*_MADE_TITLES, own}:
        code = untitled(code)
    if not FOLDING & set(tags) or code.startswith((TITLE, "%%")):
        return code
    return f"{own or _title(content(code, tags))}\n{code}"


def folds(tags: Collection[str]) -> dict[str, Any]:
    """The metadata by which JupyterLab (`jupyter`) and Colab (`cellView`) fold a cell.

    Example:
        >>> folds({"hide-cell"})
        {'cellView': 'form', 'jupyter': {'source_hidden': True}}
        >>> folds({"source:a-1"})
        {}
    """
    if not FOLDING & set(tags):
        return {}
    return {"cellView": "form", "jupyter": {"source_hidden": True}}


# A link of Markdown to a notebook beside this one, or to a file of book/.
_NOTEBOOK = re.compile(r"(?<=\]\()(?!\w+:)([\w.-]+\.ipynb)(?=[)#])")
_PAGE = re.compile(r"(?<=\]\()\.\./book/([\w./-]+)\.md(?=[)#])")
_FILE = re.compile(r"(?<=\]\()\.\./book/([\w./-]+\.(?!md\b)\w+)(?=\))")


def absolute(markdown: str, config: Mapping[str, Any]) -> str:
    """The Markdown of a notebook with whole addresses: of the repository, and of the book's pages
    if the book has an address (``html_baseurl``).

    Example:
        >>> config = {"repository": {"url": "https://x.org/t", "branch": "main"}}
        >>> absolute("[next](09_planner.ipynb#cost)", config)
        '[next](https://x.org/t/blob/main/notebooks/09_planner.ipynb#cost)'
        >>> relative(absolute("[bag](../book/glossary.md#bag)", config), config)
        '[bag](../book/glossary.md#bag)'
    """
    blob, raw, pages = _addresses(config)
    markdown = _NOTEBOOK.sub(lambda link: f"{blob}notebooks/{link[1]}", markdown)
    markdown = _FILE.sub(lambda link: f"{raw}book/{link[1]}", markdown)
    page = f"{pages}book/{{}}.html" if pages else f"{blob}book/{{}}.md"
    return _PAGE.sub(lambda link: page.format(link[1]), markdown)


def relative(markdown: str, config: Mapping[str, Any]) -> str:
    """The Markdown of a notebook with relative links: undoes :func:`absolute`."""
    blob, raw, pages = _addresses(config)
    markdown = markdown.replace(f"]({blob}notebooks/", "](")
    markdown = markdown.replace(f"]({blob}book/", "](../book/")
    markdown = markdown.replace(f"]({raw}book/", "](../book/")
    if not pages:
        return markdown
    return re.sub(
        rf"\]\({re.escape(pages)}book/([\w./-]+)\.html(?=[)#])", r"](../book/\1.md", markdown
    )


def _addresses(config: Mapping[str, Any]) -> tuple[str, str, str]:
    """Where files of the repository are shown, where they are raw, where the book's pages are."""
    url, branch = config["repository"]["url"], config["repository"]["branch"]
    pages = config.get("sphinx", {}).get("config", {}).get("html_baseurl", "")
    return f"{url}/blob/{branch}/", f"{url}/raw/{branch}/", f"{pages.rstrip('/')}/" if pages else ""


def stored(markdown: str, config: Mapping[str, Any]) -> str:
    """The Markdown of a notebook as it is stored: whole addresses once the project has one."""
    markdown = relative(markdown, config)
    return absolute(markdown, config) if config["sphinx"]["config"]["published"] else markdown
