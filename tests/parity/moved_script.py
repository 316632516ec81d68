"""The project of chapter 20 in both libraries: what its scripts print on two ranks.

The files stand in the chapter, in the cells that begin with `%%writefile`. The first script is a
whole run, which saves its weights; the second starts again with them.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from tutorec.teach import side_by_side

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks/20_side_by_side.ipynb"
MAGIC = "%%writefile {project}/"
SCRIPTS = ("train.py", "restart.py")


def project() -> dict[str, str]:
    """File to its text, in TorchRec's names."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    files = {}
    for text in texts:
        first, _, rest = text.partition("\n")
        if first.startswith(MAGIC):
            files[first.removeprefix(MAGIC)] = f"{rest}\n"
    return files


def digest(files: dict[str, str]) -> str:
    """A hash of the names and texts of all files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def write(folder: Path, root: str) -> None:
    """Write the files into the folder, with the names of the library."""
    for name, text in project().items():
        (folder / name).write_text(text.replace("torchrec", root), encoding="utf-8")


def printed(root: str) -> dict[str, list[str]]:
    """Script to the lines that it prints, one script after the other in one folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, root)
        return {script: side_by_side.launch(folder / script) for script in SCRIPTS}
