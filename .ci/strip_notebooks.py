"""Clear outputs, execution counts and editors' metadata from notebooks, in place.

The line that installs tutorec in a notebook's first cell follows ``published`` in _config.yml: from
the repository once its address exists, from the clone until then.

Example: python .ci/strip_notebooks.py notebooks/*.ipynb
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import yaml

CONFIG = Path(__file__).resolve().parents[1] / "_config.yml"
INSTALL = re.compile(r"^(?: +# .*\n)? +%pip install -q .*$", re.MULTILINE)

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT = {"tags", "mystnb"}  # metadata that the book reads


def install(config: dict) -> str:
    """The line that installs tutorec, as the first cell of every notebook has it."""
    if config["sphinx"]["config"]["published"]:
        return f'    %pip install -q "tutorec @ git+{config["repository"]["url"]}"'
    return (
        "    # the clone that this notebook is in; for a wheel, its path in place of the dots\n"
        "    %pip install -q .."
    )


def strip(text: str) -> str:
    """The notebook's text as it is stored."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = nbformat.NotebookNode(kernelspec=KERNEL)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode({k: v for k, v in cell.metadata.items() if k in KEPT})
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    first = next((cell for cell in notebook.cells if cell.cell_type == "code"), None)
    if first is not None:
        line = install(yaml.safe_load(CONFIG.read_text(encoding="utf-8")))
        first.source = INSTALL.sub(lambda _: line, first.source)
    return nbformat.writes(notebook, version=4) + "\n"


def main(paths: list[str]) -> int:
    """Strip each file; 1 when any changed, as a commit hook wants it."""
    changed = 0
    for path in map(Path, paths):
        before = path.read_text(encoding="utf-8")
        after = strip(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"stripped {path}")
            changed = 1
    return changed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
