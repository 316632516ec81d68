"""Clear outputs, execution counts and editors' metadata from notebooks, in place.

Example: python .ci/strip_notebooks.py notebooks/*.ipynb
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT = {"tags", "mystnb"}  # metadata that the book reads


def strip(text: str) -> str:
    """The notebook's text as it is stored."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = nbformat.NotebookNode(kernelspec=KERNEL)
    for cell in notebook.cells:
        cell.metadata = nbformat.NotebookNode({k: v for k, v in cell.metadata.items() if k in KEPT})
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
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
