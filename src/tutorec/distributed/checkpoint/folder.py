"""A checkpoint's folder, on a disk or at an fsspec URL such as ``s3://bucket/run``.

Both can replace a small file atomically: a disk by renaming, an object store by putting the
object. The checkpoint format relies on that alone and is therefore the same on both. On a disk,
files and directory entries are also flushed (fsync), and a folder can be locked.
"""

from __future__ import annotations

import os
import time
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
except ImportError:  # Windows
    fcntl = None


@dataclass(frozen=True)
class Folder:
    """A folder that may not exist yet.

    Args:
        fs: Its fsspec file system.
        path: Absolute path in that file system, links resolved.

    Example:
        >>> folder = Folder.from_path("memory://runs/7")
        >>> folder.replace("notes.txt", b"first")
        >>> folder.sizes(), folder.read("notes.txt")
        ({'notes.txt': 5}, b'first')
    """

    fs: Any
    path: str

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Folder:
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
                    return cls(fs, text.rstrip("/") or text)
            return cls(LocalFileSystem(), Path(os.path.realpath(text)).as_posix())
        except (ValueError, ImportError) as error:
            raise CheckpointError(
                f"{os.fspath(path)!r} cannot be a path ({error}): give the path of a folder"
            ) from None

    def __str__(self) -> str:
        """The path or URL as a user writes it."""
        return self.path if self.is_local else self.fs.unstrip_protocol(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is on a local or mounted disk."""
        return isinstance(self.fs, LocalFileSystem)

    def below(self, name: str) -> Folder:
        """A subfolder."""
        return Folder(self.fs, self.file(name))

    def file(self, name: str) -> str:
        """The path of a file in it."""
        return f"{self.path.rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int | None]:
        """Name -> size of a regular file, None for other entries; empty if there is no folder."""
        sizes: dict[str, int | None] = {}
        for name, entry in self._entries().items():
            is_regular = entry["type"] == "file" and not entry.get("islink")
            sizes[name] = entry["size"] if is_regular else None
        return sizes

    def folders(self) -> list[str]:
        """The names of its subfolders, and of links to folders.

        Raises:
            CheckpointError: It cannot be listed.
        """
        try:
            entries = self._entries()
        except Exception as error:  # object stores raise their own errors
            raise CheckpointError(
                f"{self} cannot be listed ({error}): give another folder"
            ) from None

        names: list[str] = []
        for name, entry in entries.items():
            is_link_to_folder = entry.get("islink") and os.path.isdir(entry["name"])
            if entry["type"] == "directory" or is_link_to_folder:
                names.append(name)
        return names

    def open(self, name: str) -> IO[bytes]:
        """Open a regular file for reading.

        Raises:
            CheckpointError: It is a link, a FIFO, a device or a folder.
            OSError: It does not exist or is not readable.
        """
        path = self.file(name)
        if not self.is_local:
            return cast(IO[bytes], self.fs.open(path, "rb"))

        if os.path.islink(path):
            raise CheckpointError(f"{path} is a link; a checkpoint has regular files only")
        if os.path.exists(path) and not os.path.isfile(path):
            raise CheckpointError(f"{path} is not a regular file, and a checkpoint has no others")
        return Path(path).open("rb")

    def read(self, name: str) -> bytes:
        """The content of a small regular file.

        Raises:
            CheckpointError: See `open`.
            OSError: See `open`.
        """
        with self.open(name) as file:
            return file.read()

    def create(self, name: str) -> IO[bytes]:
        """Create a file for writing."""
        path = self.file(name)
        if self.is_local:
            return Path(path).open("xb")
        return cast(IO[bytes], self.fs.open(path, "wb"))

    def replace(self, name: str, content: bytes) -> None:
        """Replace a small file atomically: a reader sees the old or the new content."""
        if not self.is_local:
            self.fs.pipe_file(self.file(name), content)
            return

        draft = f"{name}.{new_id()}"
        try:
            with self.create(draft) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())

            # Directory entries of the files written before must reach the disk first.
            self._sync()
            os.replace(self.file(draft), self.file(name))
        except BaseException:
            with suppress(OSError):
                self.remove([draft])
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

    def age(self, name: str) -> float:
        """Seconds since a file was written; 0 if the storage does not know, or the file is gone."""
        with suppress(NotImplementedError, FileNotFoundError):
            return time.time() - self.fs.modified(self.file(name)).timestamp()
        return 0.0

    @contextmanager
    def locked(self) -> Generator[bool, None, None]:
        """Lock the folder, at most until this process ends.

        Yields:
            Whether it is locked: object stores, Windows and some network disks have no locks.

        Raises:
            BlockingIOError: It is locked already.
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
            raise
        except OSError:
            is_locked = False

        try:
            yield is_locked
        finally:
            with suppress(OSError):
                # A process that was forked meanwhile has the descriptor, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def remove_if_empty(self) -> None:
        """Remove the folder if it is empty."""
        with suppress(OSError, NotImplementedError):
            if not self.sizes():
                self.fs.rmdir(self.path)

    def _entries(self) -> dict[str, dict[str, Any]]:
        """Name -> fsspec's description of each entry; empty if there is no folder."""
        self.fs.invalidate_cache()
        try:
            listing = self.fs.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}

        entries: dict[str, dict[str, Any]] = {}
        for entry in listing:
            path = entry["name"].rstrip("/")
            if path == self.path.rstrip("/") and entry["type"] != "directory":
                raise NotADirectoryError(f"{self} is not a folder")
            entries[path.rpartition("/")[2]] = entry
        return entries

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


def path_below(folder: str | os.PathLike[str], name: str) -> Path | str:
    """The path of a checkpoint in a folder; a URL if the folder was given as a URL."""
    text = os.fspath(folder)
    if "://" in text:
        return f"{text.rstrip('/')}/{name}"
    return Path(os.path.abspath(text)) / name
