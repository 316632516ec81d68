"""The Python files and notebooks of a project, read so that nothing but the edits changes."""

from __future__ import annotations

import io
import json
import os
import shutil
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutorec._whole_file import whole_file

__all__ = ["SourceText", "read_source", "source_paths"]

_KINDS = (".py", ".ipynb")
_NOT_THE_PROJECT = {"__pycache__", "node_modules", "site-packages"}


def source_paths(path: Path) -> Iterator[Path]:
    """The files below a folder, in order, without hidden or linked folders and environments."""
    if path.is_file():
        yield path
        return
    for folder, folders, files in os.walk(path):
        parent = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NOT_THE_PROJECT
            and not (parent / name / "pyvenv.cfg").exists()
        )
        yield from (parent / name for name in sorted(files) if name.endswith(_KINDS))


@dataclass(frozen=True)
class SourceText:
    """The code of one file.

    Args:
        path: Of the file.
        pieces: The text of a Python file, or of each cell with code, by its number from 1; 0 for a
            Python file.
    """

    path: Path
    pieces: dict[int, str]
    encoding: str
    notebook: dict[str, Any] | None

    def write(self, pieces: dict[int, str]) -> None:
        """Replace the code, whole or not at all; permissions stay."""
        text = (
            pieces.get(0, "") if self.notebook is None else self._with_cells(self.notebook, pieces)
        )
        with whole_file(self.path) as draft:
            draft.write_bytes(text.encode(self.encoding))
            shutil.copymode(self.path, draft)

    def _with_cells(self, notebook: dict[str, Any], pieces: dict[int, str]) -> str:
        before = self.path.read_text(encoding=self.encoding)
        layouts: list[dict[str, Any]] = [
            {"indent": indent, "ensure_ascii": ascii}
            for indent in (1, 2, 4, None)
            for ascii in (False, True)
        ]
        same = (form for form in layouts if json.dumps(notebook, **form) == before.rstrip("\n"))
        form = next(same, layouts[0])
        for number, text in pieces.items():
            cell = notebook["cells"][number - 1]
            as_list = isinstance(cell["source"], list)
            cell["source"] = list(io.StringIO(text, newline="")) if as_list else text
        return json.dumps(notebook, **form) + before[len(before.rstrip("\n")) :]


def read_source(path: Path, package: str) -> SourceText | None:
    """The code of a file that names the package anywhere; None for one that does not.

    Args:
        path: A Python file or a notebook.
        package: The package's name.

    Raises:
        ValueError: The file is not text in the encoding that it names, or no notebook; its text
            says what would help.
    """
    raw = path.read_bytes()
    if package.encode() not in raw:
        return None
    try:
        encoding = (
            tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
            if path.suffix != ".ipynb"
            else "utf-8"
        )
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(
            f"not UTF-8; save it so, or name its encoding in the first line ({error})"
        ) from None
    if path.suffix != ".ipynb":
        return SourceText(path, {0: text}, encoding, None)
    try:
        notebook = json.loads(text)
        about = notebook.get("metadata", {})
        language = about.get("kernelspec", {}).get("language") or about.get(
            "language_info", {}
        ).get("name", "python")
        cells = dict(_code(notebook["cells"])) if language == "python" else {}
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"not a notebook of format 4; open it in Jupyter and save it ({error!r})"
        ) from None
    return SourceText(path, cells, encoding, notebook)


def _code(cells: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") == "code":
            yield number, "".join(cell["source"])
