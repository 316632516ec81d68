"""Digest of a served model's file: a SHA-256 in the comment at the end of its zip archive.

Scripted models and exported programs are zip archives whose checksums torch does not verify; with a
flipped bit, a model would return wrong results. A zip archive ends with a comment of any length,
which all readers skip::

    entries | central directory | end record, with comment length | "tutorec sha256 <digits>"
    <------------------------- digested ------------------------->

``torch.jit.load`` and ``torch.export.load`` can therefore read such a file, too.
``cpp/file_digest.h`` is the same check in C++. The digest detects damage. It is not a signature:
whoever changes a file can write a new digest.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tutorec._whole_file import whole_file

__all__ = ["check_digest", "digested_file"]

_LABEL = b"tutorec sha256 "
_COMMENT = len(_LABEL) + 2 * hashlib.sha256().digest_size
# The end record of a zip archive has 22 bytes; its last two are the length of the comment.
_END = 22
_SIGNATURE = b"PK\5\6"


@contextmanager
def digested_file(path: str | Path) -> Iterator[Path]:
    """Context manager of a temporary zip archive that replaces ``path`` atomically, with digest.

    Args:
        path: Path of the file, in an existing folder.

    Raises:
        FileNotFoundError: There is no such folder.
        OSError: The disk is full or the folder not writable.
    """
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"there is no folder {str(folder)!r} to write {Path(path).name!r} to"
        )

    with whole_file(path) as draft:
        yield draft
        with draft.open("rb+") as file:
            file.seek(-2, os.SEEK_END)
            file.write(_COMMENT.to_bytes(2, "little"))
            size = file.tell()
            file.write(_comment(file, size))


def check_digest(path: str | Path) -> None:
    """Check the digest of a file. A zip archive as torch writes it has no digest.

    Args:
        path: A file that `digested_file` or torch has written.

    Raises:
        ValueError: The file is damaged, truncated, or of another kind.
    """
    with Path(path).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - _END, 0))
        end = file.read()
        if end.startswith(_SIGNATURE) and end.endswith(b"\0\0"):
            return

        file.seek(max(size - _COMMENT, 0))
        if size < _END + _COMMENT or file.read() != _comment(file, size - _COMMENT):
            problem = "is damaged, cut or not a model: it does not end in the SHA-256 of the rest"
            raise ValueError(f"{str(path)!r} {problem}; save_scripted and save_exported write it")


def _comment(file: IO[bytes], size: int) -> bytes:
    """The comment for the first ``size`` bytes of a file; reads the file up to there."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0 and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return _LABEL + digest.hexdigest().encode()
