"""A folder on a disk, or behind an fsspec URL such as ``s3://bucket/run``: what a checkpoint needs of either.

Both replace a small file in one step: a disk by renaming, an object store by putting the object. A checkpoint is built
on that alone, so that it is the same on both. What only a disk has is used there: files and names are brought to the
disk (fsync), and a lock keeps two processes from saving into one folder at the same time.
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

# Neither links nor FIFOs are opened; Windows knows neither flag.
_REGULAR_ONLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class Folder:
    """A folder that may not exist yet.

    Args:
        fs: Its file system, of fsspec.
        path: As the file system takes it, absolute, links followed.

    Example:
        >>> folder = folder_of("memory://runs/7")
        >>> folder.replace("notes.txt", b"first")
        >>> folder.sizes(), folder.read("notes.txt")
        ({'notes.txt': 5}, b'first')
    """

    fs: Any
    path: str

    def __str__(self) -> str:
        """As a user writes it."""
        return self.path if self.is_local else self.fs.unstrip_protocol(self.path)

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine, or mounted as one."""
        return isinstance(self.fs, LocalFileSystem)

    @property
    def parent(self) -> Folder:
        """The folder that it is in."""
        return Folder(self.fs, self.fs._parent(self.path))

    def below(self, name: str) -> Folder:
        """A folder in this one."""
        return Folder(self.fs, self.file(name))

    def file(self, name: str) -> str:
        """The path of a file in it."""
        return f"{self.path.rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int | None]:
        """Name -> bytes of a regular file, None of anything else; nothing where there is no folder."""
        return {
            name: each["size"] if each["type"] == "file" and not each.get("islink") else None
            for name, each in self._entries().items()
        }

    def folders(self) -> list[str]:
        """The names of folders in it, and of links to folders."""
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
        if any(each["name"].rstrip("/") == self.path.rstrip("/") and each["type"] != "directory" for each in listing):
            raise NotADirectoryError(f"{self} is not a folder")
        return {each["name"].rstrip("/").rpartition("/")[2]: each for each in listing}

    def open(self, name: str) -> IO[bytes]:
        """A regular file, to be read.

        Raises:
            CheckpointError: It is a link, a FIFO, a device or a folder.
            OSError: It is not there, or may not be read.
        """
        if not self.is_local:
            return cast(IO[bytes], self.fs.open(self.file(name), "rb"))
        try:
            descriptor = os.open(self.file(name), os.O_RDONLY | _REGULAR_ONLY)
        except OSError:
            if os.path.islink(self.file(name)):
                raise CheckpointError(f"{self.file(name)} is a link; a checkpoint has regular files only") from None
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{self.file(name)} is not a regular file, and a checkpoint has no others")
        return os.fdopen(descriptor, "rb")

    def read(self, name: str) -> bytes:
        """A small regular file.

        Raises:
            CheckpointError: As of `open`.
            OSError: As of `open`.
        """
        if not self.is_local:
            return self.fs.cat_file(self.file(name))
        with self.open(name) as file:
            return file.read()

    def create(self, name: str) -> IO[bytes]:
        """A new file, to be written."""
        return cast(
            IO[bytes], Path(self.file(name)).open("xb") if self.is_local else self.fs.open(self.file(name), "wb")
        )

    def replace(self, name: str, content: bytes) -> None:
        """Give a small file this content in one step: whoever reads finds the old one or the new one, whole."""
        if not self.is_local:
            self.fs.pipe_file(self.file(name), content)
            return
        draft = f"{self.file(name)}.{new_id()}"
        try:
            with Path(draft).open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            # The names of other files that were written before go to the disk first.
            self._sync()
            os.replace(draft, self.file(name))
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        self._sync()

    def make(self) -> None:
        """Make it, and those that it is in, where they are missing."""
        self.fs.makedirs(self.path, exist_ok=True)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is gone is no trouble."""
        for name in names:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self.file(name))

    def remove_if_empty(self) -> None:
        """Remove the folder where nothing is in it."""
        with suppress(OSError, NotImplementedError):
            if not self.sizes():
                self.fs.rmdir(self.path)

    def modified(self, name: str) -> float:
        """When a file was written, in seconds; 0 where the file system cannot say."""
        with suppress(NotImplementedError):
            return self.fs.modified(self.file(name)).timestamp()
        return 0.0

    @contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Keep other processes of this machine from saving into this folder; ends with the process at the latest.

        Raises:
            CheckpointError: Another one is saving.
        """
        if fcntl is None or not self.is_local:
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"another save into {self} is under way: two runs that save to one path overwrite each other; give "
                "each its own"
            ) from None
        except OSError:
            pass  # A network file system may have no locks.
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _sync(self) -> None:
        """Bring the names in it to the disk; systems that cannot are left to their own order."""
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def new_id() -> str:
    """Eight hexadecimal digits that no other save has."""
    return uuid.uuid4().hex[:8]


def folder_of(path: str | os.PathLike[str]) -> Folder:
    """The folder that is meant: a URL of fsspec, or a path, links followed.

    Raises:
        CheckpointError: No system has such a path, or what reads such URLs is not installed.
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
        raise CheckpointError(f"{os.fspath(path)!r} cannot be a path ({error}): name a folder") from None


def checked_folder(path: str | os.PathLike[str]) -> tuple[Folder, Exception | None]:
    """`folder_of`, with what is wrong as a value: a rank that raised at once would let the others wait."""
    try:
        return folder_of(path), None
    except (CheckpointError, TypeError) as error:
        return Folder(LocalFileSystem(), repr(path)), error


def path_below(folder: str | os.PathLike[str], name: str) -> Path | str:
    """The path of a checkpoint in a folder, as the caller has named the folder: a URL stays one."""
    text = os.fspath(folder)
    return f"{text.rstrip('/')}/{name}" if "://" in text else Path(os.path.abspath(text)) / name


__all__ = ["Folder", "checked_folder", "folder_of", "new_id", "path_below"]
