"""A checkpoint's folder, on a disk or at an fsspec URL such as ``s3://bucket/run``.

Both can replace a small file atomically: a disk by renaming, an object store by putting the
object. The checkpoint format relies on that alone and is therefore the same on both. On a disk,
files and directory entries are also flushed (fsync), and a lock keeps two processes from saving
into one folder at the same time. Without a lock, what one process has not listed yet may be what
another is writing: see `manifest.remove_leftovers`.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tutorec.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows has no locks of folders
    fcntl = None

# Do not open links or FIFOs. Windows has neither flag.
_REGULAR_ONLY = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)


@dataclass(frozen=True)
class Folder:
    """A folder that may not exist yet.

    Args:
        fs: Its fsspec file system.
        path: Absolute path in that file system, links resolved.

    Example:
        >>> folder = folder_of("memory://runs/7")
        >>> folder.replace("notes.txt", b"first")
        >>> folder.sizes(), folder.read("notes.txt")
        ({'notes.txt': 5}, b'first')
    """

    fs: Any
    path: str

    def __str__(self) -> str:
        """The path or URL as a user writes it."""
        return self.path if self.is_local else self.fs.unstrip_protocol(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is on a local or mounted disk."""
        return isinstance(self.fs, LocalFileSystem)

    @property
    def parent(self) -> Folder:
        """The parent folder."""
        return Folder(self.fs, self.fs._parent(self.path))

    def below(self, name: str) -> Folder:
        """A subfolder."""
        return Folder(self.fs, self.file(name))

    def file(self, name: str) -> str:
        """The path of a file in it."""
        return f"{self.path.rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int | None]:
        """Name -> size of a regular file, None for other entries; empty if there is no folder."""
        return {
            name: each["size"] if each["type"] == "file" and not each.get("islink") else None
            for name, each in self._entries().items()
        }

    def folders(self) -> list[str]:
        """The names of its subfolders, and of links to folders."""
        return [
            name
            for name, each in self._entries().items()
            if each["type"] == "directory" or (each.get("islink") and os.path.isdir(each["name"]))
        ]

    def _entries(self) -> dict[str, dict[str, Any]]:
        self.fs.invalidate_cache()
        try:
            listing = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        if any(
            each["name"].rstrip("/") == self.path.rstrip("/") and each["type"] != "directory"
            for each in listing
        ):
            raise NotADirectoryError(f"{self} is not a folder")
        return {each["name"].rstrip("/").rpartition("/")[2]: each for each in listing}

    def open(self, name: str) -> IO[bytes]:
        """Open a regular file for reading.

        Raises:
            CheckpointError: It is a link, a FIFO, a device or a folder.
            OSError: It does not exist or is not readable.
        """
        if not self.is_local:
            return cast(IO[bytes], self.fs.open(self.file(name), "rb"))
        try:
            descriptor = os.open(self.file(name), os.O_RDONLY | _REGULAR_ONLY)
        except OSError:
            if os.path.islink(self.file(name)):
                raise CheckpointError(
                    f"{self.file(name)} is a link; a checkpoint has regular files only"
                ) from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(
                f"{self.file(name)} is not a regular file, and a checkpoint has no others"
            )
        return os.fdopen(descriptor, "rb")

    def read(self, name: str) -> bytes:
        """The content of a small regular file.

        Raises:
            CheckpointError: See `open`.
            OSError: See `open`.
        """
        if not self.is_local:
            return self.fs.cat_file(self.file(name))
        with self.open(name) as file:
            return file.read()

    def create(self, name: str) -> IO[bytes]:
        """Create a file for writing."""
        return cast(
            IO[bytes],
            Path(self.file(name)).open("xb")
            if self.is_local
            else self.fs.open(self.file(name), "wb"),
        )

    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file atomically: a reader sees the old or the new content."""
        if not self.is_local:
            self.fs.pipe_file(self.file(name), content)
            return
        draft = f"{self.file(name)}.{new_id()}"
        try:
            with Path(draft).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # Directory entries of the files written before must reach the disk first.
            self._sync()
            os.replace(draft, self.file(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        self._sync()

    def make(self) -> None:
        """Create it and its missing parents."""
        self.fs.makedirs(self.path, exist_ok=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        for name in names:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self.file(name))

    def remove_if_empty(self) -> None:
        """Remove the folder if it is empty."""
        with suppress(OSError, NotImplementedError):
            if not self.sizes():
                self.fs.rmdir(self.path)

    def modified(self, name: str) -> float:
        """Modification time of a file in seconds; 0 if the file system does not report it."""
        with suppress(NotImplementedError):
            return self.fs.modified(self.file(name)).timestamp()
        return 0.0

    @contextmanager
    def locked(self) -> Generator[bool, None, None]:
        """Lock the folder against other processes of this machine, at most until this one ends.

        Yields:
            Whether it is locked: object stores, Windows and some network disks have no locks.

        Raises:
            CheckpointError: Another process holds the lock.
        """
        if fcntl is None or not self.is_local:
            yield False
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        is_locked = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"another save into {self} is under way: two runs that save to one path overwrite "
                "each other; give each its own"
            ) from None
        except OSError:  # A network file system may not support locks.
            is_locked = False
        try:
            yield is_locked
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _sync(self) -> None:
        """Flush the directory to the disk, where the system supports that."""
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def new_id() -> str:
    """A unique id of eight hexadecimal digits for a save."""
    return uuid.uuid4().hex[:8]


def folder_of(path: str | os.PathLike[str]) -> Folder:
    """The folder at an fsspec URL, or at a path, links resolved.

    Raises:
        CheckpointError: The path is invalid, or the package for such URLs is not installed.
        TypeError: It is not a path.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"the path of a checkpoint is text or a pathlib.Path, got {path!r}")
    text = os.fspath(path)
    try:
        if "://" in text:
            fs, inside = url_to_fs(text)
            text = inside
            if not isinstance(fs, LocalFileSystem):
                return Folder(fs, text.rstrip("/") or text)
        return Folder(LocalFileSystem(), Path(os.path.realpath(text)).as_posix())
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{os.fspath(path)!r} cannot be a path ({error}): give the path of a folder"
        ) from None


def checked_folder(path: str | os.PathLike[str]) -> tuple[Folder, Exception | None]:
    """`folder_of` that returns its error: if one rank raised alone, the others would wait."""
    try:
        return folder_of(path), None
    except (CheckpointError, TypeError) as error:
        return Folder(LocalFileSystem(), repr(path)), error


def path_below(folder: str | os.PathLike[str], name: str) -> Path | str:
    """The path of a checkpoint in a folder; a URL if the folder was given as a URL."""
    text = os.fspath(folder)
    return f"{text.rstrip('/')}/{name}" if "://" in text else Path(os.path.abspath(text)) / name


__all__ = ["Folder", "checked_folder", "folder_of", "new_id", "path_below"]
