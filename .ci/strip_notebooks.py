"""Write notebooks in place as they are stored: cleared, and ready to be opened alone.

Outputs, execution counts and editors' metadata go. The first cell, the metadata and titles of
folded cells and the links are those of `book/_ext/alone.py`, with the address of _config.yml.

Example: python .ci/strip_notebooks.py notebooks/*.ipynb
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "book/_ext"))
from alone import first_cell, folds, stored, titled

ROOT = Path(__file__).resolve().parents[1]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
KEPT = {"tags", "mystnb"}  # metadata that the book reads


def configuration() -> dict[str, Any]:
    """What _config.yml says."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def strip(text: str, config: Mapping[str, Any]) -> str:
    """The notebook's text as it is stored."""
    notebook = nbformat.reads(text, as_version=4)
    notebook.metadata = nbformat.NotebookNode(kernelspec=KERNEL)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if code and "tutorec.doctor()" in code[0].source:
        code[0].source = first_cell(config)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", ())
        kept = {key: value for key, value in cell.metadata.items() if key in KEPT}
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
            cell.source = titled(cell.source, cell.metadata)
            kept |= folds(tags)
        elif cell.cell_type == "markdown":
            cell.source = stored(cell.source, config)
        cell.metadata = nbformat.from_dict(kept)
    return nbformat.writes(notebook, version=4) + "\n"


def main(paths: list[str]) -> int:
    """Strip each file; 1 when any changed, as a commit hook wants it."""
    config = configuration()
    changed = 0
    for path in map(Path, paths):
        before = path.read_text(encoding="utf-8")
        after = strip(before, config)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"stripped {path}")
            changed = 1
    return changed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
