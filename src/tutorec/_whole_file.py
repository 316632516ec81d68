"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A draft that replaces the file when the block ends, so readers see the old or the new file.

    The draft has the file's own name, in a folder of its own next to it, so that what is written
    does not depend on where; an error or the end of the process leaves the old file as it was. A
    process that is killed leaves that folder, ``.tutorec-draft-*``, behind.

    Args:
        path: Of the file, in a folder that exists.

    Raises:
        OSError: The folder is missing, full or not writable.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> with whole_file(path) as draft:
        ...     written = draft.write_text("whole")
        >>> path.read_text()
        'whole'
    """
    target = Path(path)

    # Several processes may write the same file at the same time: each has a folder of its own.
    with TemporaryDirectory(dir=target.parent, prefix=".tutorec-draft-") as folder:
        draft = Path(folder) / target.name
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(target)
