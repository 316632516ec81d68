"""The Python files and notebooks of a project, read so that nothing but the edits changes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import stat
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutorec._whole_file import whole_file

__all__ = ["SourceText", "read_source", "source_paths"]

# The largest files that are read, in bytes: a syntax tree needs about a hundred times as many.
_LARGEST = {".py": 1 << 24, ".ipynb": 1 << 28}
Span = tuple[int, int]  # start and end in a text
_NOT_THE_PROJECT = {"__pycache__", "node_modules", "site-packages"}
_JSON_TOKEN = re.compile(r'"(?:[^"\\]+|\\.)*"|[\[\]{},]', re.DOTALL)
_JSON_CHARACTER = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]",
    re.DOTALL,
)


def source_paths(path: Path, failed: Callable[[Path, OSError], None]) -> Iterator[Path]:
    """The files below a folder, in order, without hidden or linked folders and environments.

    Args:
        path: A file or a folder.
        failed: Called for a folder that cannot be read.
    """
    if not path.is_dir():
        yield path
        return

    folders = [path]
    while folders:
        folder = folders.pop()
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            failed(folder, error)
            continue

        subfolders = [name for name in names if os.path.isdir(folder / name)]
        for name in names:
            if name.endswith(tuple(_LARGEST)) and name not in subfolders:
                yield folder / name

        for name in reversed(subfolders):
            if _is_of_project(folder / name):
                folders.append(folder / name)


def _is_of_project(folder: Path) -> bool:
    return not (
        folder.name.startswith(".")
        or folder.name in _NOT_THE_PROJECT
        or os.path.islink(folder)
        or os.path.exists(folder / "pyvenv.cfg")
    )


@dataclass(frozen=True)
class SourceText:
    """The code of one file.

    Args:
        path: Of the file.
        blocks: The text of a Python file, or of each cell with code, by its number from 1; 0 for a
            Python file.
        text: Of the whole file.
        encoding: Of the file.
        cells: Number of a cell -> spans of its source's strings in the notebook's text; None for a
            Python file.
    """

    path: Path
    blocks: dict[int, str]
    text: str
    encoding: str
    cells: dict[int, list[Span]] | None

    def write(self, positions: Mapping[int, Sequence[int]], name: str, replacement: str) -> None:
        """Replace a name in the whole file or not at all; permissions stay.

        Args:
            positions: Number of a block -> the positions where the name begins.
            name: The name to replace.
            replacement: The new name; letters, digits and ``_``.
        """
        edits: list[tuple[int, int, str]] = []
        for number, starts in positions.items():
            if self.cells is None:
                edits += [(start, start + len(name), replacement) for start in starts]
                continue

            # The name may be written with escapes, or over two strings of a list.
            characters = self._characters(self.cells[number]) if starts else []
            for start in starts:
                first, *rest = characters[start : start + len(name)]
                edits.append((*first, replacement))
                edits += [(*span, "") for span in rest]

        chunks: list[str] = []
        end = 0
        for start, stop, replacement in sorted(edits):
            chunks += [self.text[end:start], replacement]
            end = stop
        chunks.append(self.text[end:])

        with whole_file(self.path) as draft:
            draft.write_bytes("".join(chunks).encode(self.encoding))
            shutil.copymode(self.path, draft)

    def _characters(self, strings: list[Span]) -> list[Span]:
        """The span in the notebook's text of each character of a cell's source."""
        return [
            match.span()
            for string in strings
            for match in _JSON_CHARACTER.finditer(self.text, *string)
        ]


def _sources(text: str) -> dict[int, list[Span]]:
    """Number of a cell -> spans of its source's strings in a notebook's text, without quotes."""
    sources: dict[int, list[Span]] = {}
    path: list[Any] = []  # to this token: names, numbers in lists, None before a name

    for token in _JSON_TOKEN.finditer(text):
        match token[0][0]:
            case "{":
                path.append(None)
            case "[":
                path.append(0)
            case "]" | "}":
                path.pop()
            case ",":
                path[-1] = path[-1] + 1 if isinstance(path[-1], int) else None
            case '"' if path and path[-1] is None:
                path[-1] = json.loads(token[0])
            case '"' if path[:1] == ["cells"] and path[2:3] == ["source"] and len(path) < 5:
                sources.setdefault(path[1] + 1, []).append((token.start() + 1, token.end() - 1))

    return sources


def read_source(path: Path, package: str) -> SourceText | None:
    """The code of a file that names the package anywhere; None for one that does not.

    Args:
        path: A Python file or a notebook.
        package: The package's name.

    Raises:
        OSError: The file cannot be read.
        ValueError: The path is not a regular file, the file is too large, it cannot be decoded, or
            it is not a notebook; the message says what would help.
    """
    if not path.is_file():
        mode = path.lstat().st_mode  # says so if it has gone
        raise ValueError(f"not an ordinary file, or a link to none ({stat.filemode(mode)})")

    size = path.stat().st_size
    limit = _LARGEST[path.suffix]
    if size > limit:
        raise ValueError(f"{size:,} bytes, and {limit:,} are read at most; divide it")

    raw = path.read_bytes()
    if package.encode() not in raw:
        return None

    try:
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
        text = raw.decode(encoding)
        if text.encode(encoding) != raw:
            raise LookupError(f"{encoding} writes other bytes than it reads")
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise ValueError(
            f"not UTF-8; save it so, or name its encoding in the first line ({error})"
        ) from None

    if path.suffix != ".ipynb":
        return SourceText(path, {0: text}, text, encoding, None)

    try:
        notebook = json.loads(text)
        metadata = notebook.get("metadata", {})
        language = metadata.get("kernelspec", {}).get("language")
        language = language or metadata.get("language_info", {}).get("name", "python")
        blocks = dict(_code(notebook["cells"])) if language == "python" else {}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"not a notebook of format 4; open it in Jupyter and save it ({error!r})"
        ) from None

    sources = _sources(text)
    for number, block in blocks.items():
        spans = sources.get(number, [])
        if "".join(json.loads(f'"{text[start:stop]}"') for start, stop in spans) != block:
            raise ValueError(f"cell {number} has two sources; open it in Jupyter and save it")

    return SourceText(path, blocks, text, encoding, sources)


def _code(cells: Sequence[dict[str, Any]]) -> Iterator[tuple[int, str]]:
    for number, cell in enumerate(cells, 1):
        if cell.get("cell_type") == "code":
            yield number, "".join(cell["source"])
