"""Tables that are stored in a file instead of memory, and requests for its pages.

A table is mapped: the system reads a page of the file when a row of it is looked up, and keeps
those pages in memory that it has room for. A lookup that finds a page missing waits for it before
it looks at the next row, so that a batch with a thousand missing pages waits a thousand times. A
disk reads a thousand pages that are requested together in a fraction of that time. So before the
lookup, the system is asked for all pages that the batch needs, of the weights and of the
optimizer's states, which backward updates.

A request costs time for each row, also where its page is in memory. That is why a batch is only
requested if the lookup before it read from the disk: a table that fits in memory stops requesting
once its pages are there.

A process that is forked gets rows of its own: what it writes is in its memory, copied page by page
from the file, and never in its parent's tables. Of a page that it has not written it reads what is
in the file, where its parent may go on to train.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

try:
    import resource
except ImportError:  # Windows
    resource = None

from tutorec._kernels.memory import madvise
from tutorec._kernels.specs import GroupSpec
from tutorec._kernels.tbe import TableBatch

__all__ = [
    "PageRequests",
    "ask_for_pages",
    "blocks_read",
    "drop_pages",
    "keep_in_memory",
    "request_pages",
    "rows_by_table",
    "zeros_in_file",
]

# Flags of Linux; the module mmap does not have them all.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROCESS_MADVISE = 440  # the number of the call, on every processor
_MOST_RANGES = 1024  # IOV_MAX of Linux
# Linux counts what each thread has read; elsewhere it is what the process has read.
_WHO_READS = getattr(resource, "RUSAGE_THREAD", 0)
_MAPS = Path("/proc/self/maps")
_DESCRIPTORS = Path("/proc/self/fd")


def zeros_in_file(
    elements: int,
    dtype: torch.dtype = torch.float32,
    folder: str | None = None,
    what: str = "tables",
) -> Tensor:
    """Zeros ``[elements]`` in a file, which the system reads and writes page by page.

    The file has no name, so that nobody truncates it, and its space is free when the process ends,
    however it ends. Its space is reserved here: writing to the tensor cannot run out of disk.

    Args:
        elements: How many numbers.
        dtype: Their data type.
        folder: A folder on the disk to use; the system's folder for temporary files by default.
        what: Whose numbers, for messages.

    Raises:
        OSError: There is no such folder, or not enough room on its disk.

    Example:
        >>> zeros_in_file(3).tolist()
        [0.0, 0.0, 0.0]
    """
    if elements == 0:
        return torch.zeros(0, dtype=dtype)

    folder = folder or tempfile.gettempdir()
    size = dtype.itemsize * elements
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            mapped = _MappedFile(file.fileno(), size)
            mapped.descriptor = os.dup(file.fileno())
            weakref.finalize(mapped, os.close, mapped.descriptor)
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}: {what} need {size:,} bytes in {_room(folder)}", folder
        ) from None

    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)  # read the page of a row, not the 30 behind it
    zeros = torch.frombuffer(mapped, dtype=dtype)
    mapped.start = zeros.data_ptr()
    mapped.what = what
    mapped.in_file = [(mapped.start, mapped.start + size)]
    _mapped.add(mapped)
    return zeros


def keep_in_memory(part: Tensor) -> bool:
    """Replace the file's whole pages behind part of a tensor by zeroed memory.

    What is behind them in the file stays unused. Where the system is not Linux, nothing happens:
    the system keeps pages in memory that are used often.

    Args:
        part: Whole rows ``[N, D]``, or numbers ``[N]``.

    Returns:
        Whether it was done.
    """
    page = mmap.PAGESIZE
    start = -(-part.data_ptr() // page) * page
    length = (part.data_ptr() + 4 * len(part) * part.stride(0)) // page * page - start
    map_memory = _map_memory()
    if map_memory is None or length <= 0:
        return False

    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    replaced = map_memory(start, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == start
    if replaced:
        for mapped in _mapped:
            mapped.leave_out(start, start + length)
    return replaced


class _MappedFile(mmap.mmap):
    """A file that is mapped into memory, which a fork would share with its parent.

    Attributes:
        descriptor: Of the file.
        start: The address where it begins.
        in_file: The ranges of addresses that are in the file, and not in memory.
        what: Whose numbers, for messages.
    """

    descriptor: int
    start: int
    in_file: list[tuple[int, int]]
    what: str

    def leave_out(self, start: int, stop: int) -> None:
        """Note that a range of addresses is not in the file any more."""
        intervals = [
            interval
            for first, last in self.in_file
            for interval in ((first, min(last, start)), (max(first, stop), last))
        ]
        self.in_file = [(first, last) for first, last in intervals if first < last]

    def own(self) -> None:
        """Have this process write into its own memory, or else be ended where it writes."""
        if not all([self._map(first, last) for first, last in self.in_file]):
            print(
                f"tutorec: {self.what} are in a file, and this forked process has no memory for "
                "rows of its own: it can read them, and is ended where it trains or loads them; "
                "train in the process that made them, or begin this one with "
                "multiprocessing.get_context('spawn')",
                file=sys.stderr,
                flush=True,
            )
        elif hasattr(mmap, "MADV_RANDOM"):
            self.madvise(mmap.MADV_RANDOM)

    def _map(self, first: int, last: int) -> bool:
        map_memory = _map_memory()
        private = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        source = (self.descriptor, first - self.start)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if map_memory(first, last - first, access, private, *source) == first:
            return True

        shared = mmap.MAP_SHARED | _MAP_FIXED
        map_memory(first, last - first, mmap.PROT_READ, shared, *source)
        return False


def _own_all() -> None:
    """In a fork: have every table in a file be this process's own."""
    if _map_memory() is not None:
        for mapped in _mapped:
            mapped.own()
    _mapped.clear()  # what a fork of this process copies is memory


_mapped: weakref.WeakSet[_MappedFile] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_own_all)


def ask_for_pages(part: Tensor, rows: Tensor) -> None:
    """Have the system begin to read rows from the disk, many at once; nothing waits for them.

    A row that is read without this is waited for before the next one is asked for. On Windows
    nothing happens.

    Args:
        part: A table ``[R, D]`` in a file, or numbers ``[R]``.
        rows: Which of them ``[N]``; best rising, since neighbours that share a page are asked for
            once.
    """
    advise = madvise()
    page = mmap.PAGESIZE
    if advise is None or not rows.numel():
        return

    size = 4 * (part.shape[1] if part.dim() > 1 else 1)
    starts = part.data_ptr() + rows[:, None] * (4 * part.stride(0))
    bytes_of_pages = torch.minimum(
        starts + torch.arange(0, size + page - 1, page), starts + (size - 1)
    )
    numbers = bytes_of_pages.view(-1).div(page, rounding_mode="floor").unique_consecutive()
    ranges = torch.stack([numbers * page, torch.full_like(numbers, page)], dim=1)

    if not _advise_all(ranges):
        for address, length in ranges.tolist():
            advise(address, length, mmap.MADV_WILLNEED)


def blocks_read() -> int:
    """Blocks of 512 bytes that this thread has read from the disk; 0 where nobody counts them.

    Example:
        >>> before = blocks_read()
        >>> blocks_read() - before  # nothing was read in between
        0
    """
    return 0 if resource is None else resource.getrusage(_WHO_READS).ru_inblock


class PageRequests:
    """Requests the pages of each batch of a `TableBatch` before its lookup.

    Nothing else changes: no number, no row. The system reads the pages while this thread goes on.
    The first lookup that finds pages missing reads one after another, and the batches after it are
    requested until a lookup finds all of its pages in memory.
    """

    def __init__(self) -> None:
        self._waits_for_disk = False
        self._blocks_before: dict[int, int] = {}  # of each thread that looks up

    def watch(self, tables: TableBatch) -> None:
        """Do so for all lookups of these tables, which are in a file."""
        tables.register_forward_pre_hook(self._before_lookup)
        tables.register_forward_hook(self._after_lookup)

    def _before_lookup(self, tables: TableBatch, inputs: tuple[Any, ...]) -> None:
        # Counted for each lookup: between two of them the thread may read other files.
        self._blocks_before[get_ident()] = blocks_read()
        if self._waits_for_disk:
            request_pages(tables, inputs[0], inputs[1])

    def _after_lookup(self, tables: TableBatch, inputs: tuple[Any, ...], pooled: Tensor) -> None:
        before = self._blocks_before.pop(get_ident())
        self._waits_for_disk = blocks_read() != before  # what was requested counts as read, too


def request_pages(tables: TableBatch, values: Tensor, offsets: Tensor) -> None:
    """Have the system begin to read what a batch needs of tables in a file; nothing waits for it.

    Args:
        tables: The operator.
        values: Ids ``[N]``, those of the first feature first.
        offsets: Where each bag begins ``[F*B+1]``.
    """
    features = len(tables.spec.feature_tables)
    if values.is_floating_point() or (offsets.numel() - 1) % features:
        return  # the lookup says what is wrong with them

    weights = tables.table_weights()
    states = tables.table_states()
    for table, rows in rows_by_table(tables.spec, values, offsets):
        for tensor in (weights[table], *states[table]):
            ask_for_pages(tensor, rows)


def rows_by_table(spec: GroupSpec, values: Tensor, offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The distinct rows of a batch, rising, of each table: (its number in the group, rows).

    Args:
        spec: Tables and features of the group.
        values: Ids ``[N]``, those of the first feature first.
        offsets: Where each bag begins ``[F*B+1]``.

    Example:
        >>> from tutorec._kernels.specs import GroupSpec, TableSpec
        >>> tables = (TableSpec("item", 10, 4), TableSpec("user", 10, 4))
        >>> spec = GroupSpec(tables, feature_tables=(0, 1, 0))  # two features share a table
        >>> ids, offsets = torch.tensor([7, 2, 9, 2, 5]), torch.tensor([0, 2, 3, 5])
        >>> [(table, rows.tolist()) for table, rows in rows_by_table(spec, ids, offsets)]
        [(0, [2, 5, 7]), (1, [9])]
    """
    features = len(spec.feature_tables)
    samples = (offsets.numel() - 1) // features
    begins = offsets[::samples].tolist() if samples else [0] * (features + 1)

    ids_of_table: dict[int, list[Tensor]] = {}
    for table, (begin, end) in zip(spec.feature_tables, pairwise(begins), strict=True):
        ids_of_table.setdefault(table, []).append(values[begin:end])
    for table, ids in ids_of_table.items():
        yield table, torch.cat(ids).unique()


def drop_pages(folder: str) -> bool:
    """Write this process's open files of a folder to disk, and drop their pages from memory.

    The next access reads from the disk. Where the folder itself is in memory, nothing is forgotten.

    Args:
        folder: Of tables in files.

    Returns:
        Whether the system was asked, which is possible on Linux only.

    Example:
        >>> drop_pages("/a folder without open files") in (True, False)
        True
    """
    advise = madvise()
    if advise is None or not _MAPS.exists():
        return False

    folder = os.path.join(folder, "")  # "/a/b" is not the beginning of "/a/bc/file"
    for start, length in _mapped_files(folder):
        advise(start, length, mmap.MADV_DONTNEED)
    for link in _DESCRIPTORS.iterdir():
        if os.path.islink(link) and os.readlink(link).startswith(folder):
            os.fdatasync(int(link.name))
            os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _mapped_files(folder: str) -> Iterator[tuple[int, int]]:
    """Start and size of each shared mapping of a folder's files.

    What a process has changed in a private mapping, as in the data of a library that it has loaded,
    is nowhere else: dropped, it is lost.
    """
    for line in _MAPS.read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1].endswith("s") and fields[5].startswith(folder):
            start, stop = (int(number, 16) for number in fields[0].split("-"))
            yield start, stop - start


def _advise_all(ranges: Tensor) -> bool:
    """Request ranges ``[N, 2]`` (address, bytes) in one call, or False (Linux 5.10; no GIL)."""
    if sys.platform != "linux":
        return False
    try:
        process = os.pidfd_open(os.getpid())
    except OSError:  # an older system, or a sandbox
        return False

    try:
        return all(
            ctypes.CDLL(None).syscall(
                ctypes.c_long(_PROCESS_MADVISE),
                ctypes.c_long(process),
                ctypes.c_void_p(chunk.data_ptr()),
                ctypes.c_long(len(chunk)),
                ctypes.c_long(mmap.MADV_WILLNEED),
                ctypes.c_long(0),
            )
            >= 0
            for chunk in ranges.split(_MOST_RANGES)
        )
    finally:
        os.close(process)


@cache
def _map_memory() -> Any:
    """The system's call, or None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        call = ctypes.CDLL(None).mmap
    except (OSError, AttributeError):
        return None

    number = ctypes.c_int
    address = ctypes.c_void_p
    call.argtypes = [address, ctypes.c_size_t, number, number, number, ctypes.c_long]
    call.restype = address
    return call


def _room(folder: str) -> str:
    if not os.path.isdir(folder):
        return "a folder that does not exist: make it, or name another"
    return (
        f"a folder whose disk has {shutil.disk_usage(folder).free:,} free: free some, or name a "
        "folder of another disk"
    )
