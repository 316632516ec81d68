"""Criteo's two formats of files: text, and arrays of numpy.

A line of text is one impression of an advertisement: label TAB 13 integers TAB 26 hexadecimal ids;
any of the 39 may be empty. The files of the Kaggle challenge and of the 1 TB click logs (24 files,
day_0 to day_23) share this form. Reading is vectorised over lines: find every tab and newline of a
block at once, then take the k-th character of all fields of a kind together, for k = 0, 1, ...

Arrays are those of ``torchrec.datasets.criteo``: of each day dense [R, 13], sparse [R, 26] and
labels [R, 1]. A file gets its name when it is whole.
"""

from __future__ import annotations

import gzip
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from tokenize import TokenError
from typing import IO, Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tutorec._whole_file import whole_file
from tutorec.datasets.utils import opener, safe_cast

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES: list[str] = [f"int_{i}" for i in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES: list[str] = [f"cat_{i}" for i in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES: list[str] = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
FREQUENCY_THRESHOLD = 3
TOTAL_TRAINING_SAMPLES = 4_195_197_692  # rows of day_0 to day_22; day_23 is for validation and test
FIELDS = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT

_BLOCK_BYTES = 1 << 21
_LONGEST_LINE = 1 << 20
_TAB = 9
_NEWLINE = 10
_RETURN = 13
_MINUS = 45

_VALUES = np.full(256, 255, dtype=np.uint8)  # of characters as digits
_VALUES[list(b"0123456789abcdef")] = _VALUES[list(b"0123456789ABCDEF")] = np.arange(16)
ROWS_READ = 1 << 16  # of one step where single rows are read
COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [
    *[partial(safe_cast, dest_type=int, default=0)] * (1 + INT_FEATURE_COUNT),
    *[partial(safe_cast, dest_type=str, default="")] * CAT_FEATURE_COUNT,
]
_INT32 = np.iinfo(np.int32)
# What numpy raises for a file that is not one of its own, whose header is Python
_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, RecursionError)


@dataclass(frozen=True)
class ArrayColumns:
    """Rows as columns: the base of dataclasses of arrays."""

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of several blocks, in order."""
        if len(parts) == 1:
            return parts[0]
        columns = zip(*(vars(block).values() for block in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def slice(self, start: int, stop: int) -> Self:
        """Rows start..stop-1."""
        return type(self)(*(column[start:stop] for column in vars(self).values()))


@dataclass(frozen=True)
class CriteoColumns(ArrayColumns):
    """B rows of a Criteo file.

    Attributes:
        label: [B], 0 or 1; -1 in a file without labels.
        ints: [B, 13]; where ``ints_known`` is False the file had nothing, and the value is 0.
        ints_known: [B, 13].
        cats: [B, 26], the 32-bit ids; where ``cats_known`` is False the file had nothing, and the
            value is 0.
        cats_known: [B, 26].
    """

    label: NDArray[np.int64]
    ints: NDArray[np.int64]
    ints_known: NDArray[np.bool_]
    cats: NDArray[np.int64]
    cats_known: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of a file: the bytes, where each line ends, and what messages need.

    Attributes:
        path: the file.
        first_line: number of the block's first line, from 1.
        data: [bytes].
        separators: [lines, 40], or [lines, 39] without labels: where the fields of each line end
            (at a tab, and the last one at the newline).
    """

    path: Path
    first_line: int
    data: NDArray[np.uint8]
    separators: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.separators)


def line_blocks(path: Path, labelled: bool = True, bar: Any = None) -> Iterator[LineBlock]:
    """The lines of a file, some thousands at a time; every line is known to have 40 fields.

    Args:
        path: the file; ``.gz`` is unpacked on the way.
        labelled: whether lines start with a label; 39 fields are expected without it.
        bar: a progress bar over the bytes of the file, as stored.

    Yields:
        Blocks in order.

    Raises:
        ValueError: a line has another number of fields, or the file is not a readable gzip file.
    """
    first_line = 1
    fields = FIELDS - (not labelled)
    for data in _whole_lines(path, bar):
        separators = np.flatnonzero((data == _TAB) | (data == _NEWLINE))
        newlines = np.flatnonzero(data[separators] == _NEWLINE)
        counts = np.diff(newlines, prepend=-1)
        if (counts != fields).any():
            line = int((counts != fields).argmax())
            raise ValueError(
                f"{path}, line {first_line + line}: {counts[line]} fields found, {fields} expected "
                f"({'label, ' * labelled}{INT_FEATURE_COUNT} integers, {CAT_FEATURE_COUNT} "
                "hexadecimal ids, separated by tabs)"
            )
        yield LineBlock(path, first_line, data, separators.reshape(-1, fields))
        first_line += len(newlines)


def has_labels(path: Path) -> bool:
    """Whether the first line has 40 fields; those of the Kaggle challenge's test file have 39."""
    for data in _whole_lines(path):
        return np.count_nonzero(data[: (data == _NEWLINE).argmax()] == _TAB) != FIELDS - 2
    return True


def count_lines(path: Path) -> int:
    """How many lines a file has; one pass over its bytes."""
    return sum(data.tobytes().count(b"\n") for data in _whole_lines(path))


def parse_lines(block: LineBlock, lines: NDArray[np.int64] | slice = slice(None)) -> CriteoColumns:
    """Parse some lines of a block.

    Args:
        block: whole lines.
        lines: which of them, by position in the block.

    Returns:
        The rows, in the order of ``lines``.

    Raises:
        ValueError: a field is not what its column holds; names file, line and column.
    """
    ends = block.separators[lines]
    starts = np.empty_like(ends)
    starts[:, 1:] = ends[:, :-1] + 1
    # A line starts after the newline before it, the first one at 0.
    starts[:, 0] = np.concatenate([[-1], block.separators[:-1, -1]])[lines] + 1
    ends = ends.copy()
    ends[:, -1] -= block.data[np.maximum(ends[:, -1] - 1, 0)] == _RETURN

    split = ends.shape[1] - CAT_FEATURE_COUNT
    ints, ints_known, wrong_ints = _numbers(block.data, starts[:, :split], ends[:, :split], 10, 18)
    cats, cats_known, wrong_cats = _numbers(block.data, starts[:, split:], ends[:, split:], 16, 8)
    label = np.full(len(ends), -1)
    if split > INT_FEATURE_COUNT:
        label = ints[:, 0]
        ints = ints[:, 1:]
        wrong_ints[:, 0] |= ~ints_known[:, 0] | (label < 0) | (label > 1)
        ints_known = ints_known[:, 1:]

    if wrong_ints.any() or wrong_cats.any():
        row, column = np.argwhere(np.concatenate([wrong_ints, wrong_cats], axis=1))[0]
        name = DEFAULT_COLUMN_NAMES[column - ends.shape[1]]
        expected = {"l": "0 or 1", "i": "an integer", "c": "at most 8 hexadecimal digits"}[name[0]]
        line = block.first_line + np.arange(len(block))[lines][row]
        field = bytes(block.data[starts[row, column] : ends[row, column]][:40])
        text = field.decode("ascii", "backslashreplace")
        raise ValueError(
            f"{block.path}, line {line}: column '{name}' is '{text}', expected {expected}"
        )

    return CriteoColumns(label, ints, ints_known, cats, cats_known)


def named_fields(example: list[str]) -> dict[str, int | str]:
    """The fields of a line by name; what is missing is 0 or an empty id.

    Raises:
        ValueError: there are neither 40 fields nor, without a label, 39.
    """
    columns = len(DEFAULT_COLUMN_NAMES)
    if len(example) not in (columns - 1, columns):
        raise ValueError(
            "a line of Criteo's format must have 40 fields, or 39 without a label, not "
            f"{len(example)}"
        )

    # From the end, because a line of a test file has no label.
    columns = zip(
        reversed(DEFAULT_COLUMN_NAMES),
        reversed(COLUMN_TYPE_CASTERS),
        reversed(example),
        strict=False,
    )
    return {name: cast(field) for name, cast, field in columns}


def rows_of_slices(
    paths: list[Path], slices: list[tuple[int, int]], bar: Any
) -> Iterator[CriteoColumns]:
    """The rows of each slice, from one pass over the files that parses no other rows.

    Raises:
        ValueError: the files have fewer rows.
    """
    bounds = np.array(slices, dtype=np.int64)
    sizes = [stop - start for start, stop in slices]
    pending: list[CriteoColumns] = []
    rows_pending = 0
    step = 0
    row = 0

    for block in chain.from_iterable(line_blocks(path, bar=bar) for path in paths):
        rows = np.arange(row, row + len(block))
        slice_of_row = np.searchsorted(bounds[:, 0], rows, side="right") - 1
        lines = rows[(slice_of_row >= 0) & (rows < bounds[slice_of_row, 1])] - row
        row += len(block)
        if len(lines) == 0:
            continue

        pending.append(parse_lines(block, lines))
        rows_pending += len(lines)
        while step < len(sizes) and rows_pending >= (size := sizes[step]):
            columns = CriteoColumns.concat(pending)
            yield columns.slice(0, size)
            pending = [columns.slice(size, rows_pending)]
            rows_pending -= size
            step += 1

    if step < len(sizes):
        start, stop = slices[step]
        raise ValueError(
            f"{', '.join(map(str, paths))}: the files were replaced and have {row} rows now; "
            f"step {step} needs rows {start} to {stop - 1}: make the dataset again"
        )


def write_rows(path: Path, blocks: Iterable[CriteoColumns]) -> Path:
    """Write blocks of rows as one Criteo TSV; ``.gz`` in the name compresses.

    Args:
        path: the file; it is overwritten.
        blocks: the rows.

    Returns:
        ``path``.
    """
    with open(path, "wb") as raw:
        file: Any = raw
        if path.suffix == ".gz":
            # With mtime=0 and no name, equal rows make equal bytes.
            file = gzip.GzipFile("", mode="wb", compresslevel=1, fileobj=raw, mtime=0)
        with file:
            file.writelines(map(format_rows, blocks))
    return path


def format_rows(rows: CriteoColumns) -> bytes:
    """The text of some rows, one line each; an id that is not of 32 bits is a ValueError."""
    ints_known = rows.ints_known.T
    cats_known = rows.cats_known.T
    known = rows.cats.T[cats_known]
    if ((known < 0) | (known >= 1 << 32)).any():
        raise ValueError(
            f"ids {known.min()} to {known.max()}: Criteo's format holds 0 to {2**32 - 1}, so hash "
            "them to 32 bits"
        )

    ids = known.astype(">u4").tobytes().hex().encode()
    columns = [rows.label.astype("S").tolist()]
    for known, texts in (
        (ints_known, rows.ints.T[ints_known].astype("S")),
        (cats_known, np.frombuffer(ids, "S8")),
    ):
        fields = np.zeros(known.shape, texts.dtype)
        fields[known] = texts
        columns += fields.tolist()

    return b"".join(b"\t".join(line) + b"\n" for line in zip(*columns, strict=True))


def _numbers(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    base: int,
    digits: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Fields [B, C] as numbers in a base, where there was anything at all, and which are wrong."""
    known = ends > starts
    position = starts.ravel().copy()
    is_negative = np.zeros(position.shape, dtype=bool)
    if base == 10:
        is_negative = (data[position] == _MINUS) & known.ravel()
        position += is_negative

    length = ends.ravel() - position
    wrong = (length > digits) | (is_negative & (length == 0))
    values = np.zeros(position.shape, dtype=np.int64)
    for k in range(min(int(length.max(initial=0)), digits)):
        inside = length > k
        digit = _VALUES[data[np.minimum(position + k, len(data) - 1)]]
        wrong |= inside & (digit >= base)
        np.copyto(values, values * base + digit, where=inside)

    np.negative(values, out=values, where=is_negative)
    return values.reshape(starts.shape), known, wrong.reshape(starts.shape)


def _whole_lines(path: Path, bar: Any = None) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a file in chunks that end with a newline."""
    tail = b""
    bytes_read = 0
    with open(path, "rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            while chunk := file.read(_BLOCK_BYTES):
                lines, newline, tail = (tail + chunk).rpartition(b"\n")
                if newline:
                    yield np.frombuffer(lines + newline, dtype=np.uint8)
                if bar is not None:
                    bar.update(raw.tell() - bytes_read)
                    bytes_read = raw.tell()
                if len(tail) > _LONGEST_LINE:
                    raise ValueError(
                        f"{path}: no newline within {len(tail):,} bytes: this is not a Criteo text "
                        "file"
                    )
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: damaged gzip file ({error}): fetch or write it again"
            ) from error

        if tail:
            yield np.frombuffer(tail + b"\n", dtype=np.uint8)


class RowsInFile:
    """Rows of an array [R, ...] in a file, read when they are indexed; ``rows[3:5]`` reads two.

    The file is not mapped: where a mapped file becomes shorter, reading it ends the process.

    Args:
        path: the file.

    Raises:
        ValueError: the file is cut short, is not an array of numbers row by row, or, when rows are
            asked for, was replaced.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            self.shape, self.dtype = _row_header(file, path)
            _require_whole(file, path, self.shape, self.dtype.itemsize)
            self._data = file.tell()
            status = os.fstat(file.fileno())

        self._file = (status.st_dev, status.st_ino)
        self._first = 0

    def part(self, start: int, stop: int) -> Self:
        """Rows start..stop-1, which are not read yet."""
        rows = copy(self)
        rows._first = self._first + start
        rows.shape = (stop - start, *self.shape[1:])
        return rows

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """The rows of a slice, or those of rising numbers [N]."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            return self._read(start, stop)
        result = np.empty((len(rows), *self.shape[1:]), self.dtype)
        for start in range(0, len(self), ROWS_READ):
            stop = min(start + ROWS_READ, len(self))
            low, high = np.searchsorted(rows, [start, stop])
            if low < high:
                result[low:high] = self._read(start, stop)[rows[low:high] - start]
        return result

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        rows = np.empty((max(stop - start, 0), *self.shape[1:]), self.dtype)
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._file:
                raise ValueError(f"{self.path}: the file was replaced: make the data set again")
            file.seek(self._data)
            _read_rows(file, self.path, self._first + start, rows)
        return rows


Rows = list[NDArray[Any] | RowsInFile]  # of all files: dense, sparse or labels


def part_of_rows(
    rows: NDArray[Any] | RowsInFile, start: int, stop: int
) -> NDArray[Any] | RowsInFile:
    """Rows start..stop-1; those of a file are not read yet."""
    return rows.part(start, stop) if isinstance(rows, RowsInFile) else rows[start:stop]


def array_shape(path: str, opened: Any = open) -> tuple[int, ...]:
    """The shape of a file's array; only the header is read."""
    with opened(path, "rb") as file:
        return _read_header(file, path)[0]


def read_array_rows(
    path: str, start: int, number: int, opened: Any = open, is_mapped: bool = False
) -> NDArray[Any]:
    """Some rows of a file's array [R, C], read or mapped.

    Raises:
        ValueError: the file has no such rows, or no such array; names the file.
    """
    with opened(path, "rb") as file:
        shape, dtype = _row_header(file, path)
        if len(shape) != 2:
            raise ValueError(_another_form(path, shape))
        if not (0 <= start < shape[0] and 0 <= number <= shape[0] - start):
            raise ValueError(
                f"{path}: rows {start} to {start + number - 1} asked for: use rows 0 to "
                f"{shape[0] - 1}"
            )
        if is_mapped:
            return load_array(path, mmap_mode="r")[start : start + number]

        rows = np.empty((number, shape[1]), dtype)
        _read_rows(file, path, start, rows)
        return rows


def load_array(path: str | Path, mmap_mode: Any = None, opened: Any = open) -> NDArray[Any]:
    """The array of a file.

    Raises:
        ValueError: the file is cut short, or holds no array of numbers; names the file.
    """
    if opened is open:
        with open(path, "rb") as file:
            shape, _, dtype = _read_header(file, path)
            if not dtype.hasobject:
                _require_whole(file, path, shape, dtype.itemsize)

    try:
        if opened is open:
            return np.load(path, mmap_mode=mmap_mode)
        with opened(path, "rb") as file:
            return np.load(file)
    except _DAMAGED as error:
        raise ValueError(_cut_short(path, error)) from error


def require_ids(path: str | Path, dtype: np.dtype[Any]) -> None:
    """Check that a file of ids or labels holds integers that fit into int64.

    Raises:
        ValueError: it does not; names the file.
    """
    if dtype.kind not in "iu" or dtype == np.uint64:
        raise ValueError(f"{path}: the array is {dtype}, and must hold integers up to int64")


def gather_rows(
    files: Sequence[NDArray[Any] | RowsInFile],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
    output: NDArray[Any],
) -> NDArray[Any]:
    """Copy rows of several arrays to other positions; each file is read from front to back.

    Args:
        files: arrays [R, C].
        rows: [N], rising; counted over all files.
        places: [N], where each row goes.
        output: [N, C].

    Returns:
        ``output``.

    Raises:
        ValueError: an integer that the output's type does not hold.
    """
    start = 0
    for array in files:
        low, high = np.searchsorted(rows, [start, start + len(array)])
        block = array[rows[low:high] - start]
        narrower = output.dtype == np.int32 != block.dtype
        if narrower and len(block) and not _INT32.min <= block.min() <= block.max() <= _INT32.max:
            raise ValueError(
                f"an id is {block.max()}, and 32 bits must hold it: run sparse_to_contiguous first"
            )
        output[places[low:high]] = block
        start += len(array)
    return output


def check_days(paths: Sequence[Sequence[str]], arrays: Sequence[Rows]) -> None:
    """Check that the arrays of days fit one another.

    Args:
        paths: the files of dense features, of ids and of labels, for messages.
        arrays: the rows of each file, in the same order.

    Raises:
        ValueError: numbers of files or rows differ, or an array has another shape or other ids.
    """
    if not arrays[0] or len({len(days) for days in arrays}) > 1:
        raise ValueError(
            f"{[len(days) for days in paths]} files of dense, sparse, labels: give as many of each"
        )

    for names, files in zip(zip(*paths, strict=True), zip(*arrays, strict=True), strict=True):
        if len({len(file) for file in files}) > 1:
            raise ValueError(
                f"{', '.join(names)} have {[len(file) for file in files]} rows: they must be "
                "of one day"
            )
        dense, sparse, labels = files
        require_ids(names[1], sparse.dtype)
        expected = {
            names[0]: (dense.shape, "[R, 13]", len(dense.shape) == 2),
            names[1]: (sparse.shape, "[R, 26]", sparse.shape[1:] == (CAT_FEATURE_COUNT,)),
            names[2]: (labels.shape, "[R, 1]", labels.shape[1:] in ((), (1,))),
        }
        for name, (shape, expected_form, fits) in expected.items():
            if not fits:
                raise ValueError(f"{name}: the array is {list(shape)}, and must be {expected_form}")


def rows_of_day(folder: str, day: int, part: str, shape: tuple[int, int]) -> RowsInFile:
    """The rows [R, C] of a day's array: "dense", "sparse" or "labels".

    Raises:
        ValueError: the array has another shape, or ids that are no integers.
    """
    path = Path(folder) / f"day_{day}_{part}.npy"
    array = RowsInFile(path)
    if part != "dense":
        require_ids(path, array.dtype)
    if array.shape != shape:
        raise ValueError(
            f"{path}: the array is {list(array.shape)}, and {list(shape)} was expected: see "
            "rows_per_day"
        )
    return array


@contextmanager
def written(path: str | Path, path_manager_key: Any) -> Iterator[Path]:
    """A draft that is moved to its path, or copied through a path manager, when the block ends."""
    opened = opener(path_manager_key)
    if opened is open:
        with whole_file(path) as draft:
            yield draft
        return

    with TemporaryDirectory() as folder:
        draft = Path(folder) / Path(path).name
        yield draft
        with draft.open("rb") as source, opened(str(path), "wb") as target:
            shutil.copyfileobj(source, target)


@contextmanager
def new_array(
    path: str | Path, shape: tuple[int, int], dtype: Any, path_manager_key: Any
) -> Iterator[np.memmap]:
    """An array [R, C] of a file to be filled, which gets its name when the block ends."""
    with written(path, path_manager_key) as draft:
        array = npy.open_memmap(draft, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):
            # Writing to a mapped file on a full disk would end the process.
            with open(draft, "rb+") as file:
                _reserve(file, path)
        yield array
        array.flush()


def _read_header(file: IO[bytes], path: str | Path) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns come first, and dtype; the file is then positioned at its data."""
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, by_columns, dtype = read(file)
    except (*_DAMAGED, MemoryError) as error:
        raise ValueError(_cut_short(path, error)) from error

    if min(shape, default=0) < 0:
        raise ValueError(_cut_short(path, f"an array {list(shape)}"))
    return shape, by_columns, dtype


def _row_header(file: IO[bytes], path: str | Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of an array of numbers that is stored row by row."""
    shape, by_columns, dtype = _read_header(file, path)
    if dtype.hasobject:
        raise ValueError(
            f"{path}: Python objects instead of numbers, which could run any code; save the array "
            "with a dtype of numbers"
        )
    if by_columns or not shape:
        raise ValueError(_another_form(path, shape))
    return shape, dtype


def _require_whole(
    file: IO[bytes], path: str | Path, shape: tuple[int, ...], itemsize: int
) -> None:
    """Check that a file, positioned at its data, is long enough."""
    needed = math.prod(shape) * itemsize
    available = os.fstat(file.fileno()).st_size - file.tell()
    if available < needed:
        raise ValueError(_cut_short(path, f"{available} of {needed} bytes for {list(shape)}"))


def _read_rows(file: Any, path: str | Path, start: int, rows: NDArray[Any]) -> None:
    """Fill an array with rows of a file, from row ``start`` on; the file is at its data."""
    file.seek(file.tell() + start * rows[:1].nbytes)
    if file.readinto(rows.reshape(-1).view(np.uint8).data) != rows.nbytes:
        raise ValueError(
            f"{path}: the file ends before row {start + len(rows) - 1}: write it again"
        )


def _another_form(path: str | Path, shape: tuple[int, ...]) -> str:
    return (
        f"{path}: an array {list(shape)} must have two dimensions and lie row by row: save "
        "numpy.ascontiguousarray of it"
    )


def _cut_short(path: str | Path, why: Any) -> str:
    return f"{path}: cut short, or not an array of numpy ({why}): write it again"


def _reserve(file: IO[bytes], path: str | Path) -> None:
    size = os.fstat(file.fileno()).st_size
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        reason = f"{error.strerror}: the array needs {size:,} bytes on the disk: free some"
        raise OSError(error.errno, reason, str(path)) from None
