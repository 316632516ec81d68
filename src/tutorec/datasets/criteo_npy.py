"""Criteo's files as numpy arrays: converted, split by rank, given contiguous ids, shuffled.

Names and results are those of ``torchrec.datasets.criteo.BinaryCriteoUtils``. A file gets its name
when it is whole. Every step shows a progress bar on a terminal outside of CI.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from tokenize import TokenError
from typing import IO, Any, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tutorec._check import require_one_of, warn_caller
from tutorec._whole_file import whole_file
from tutorec.datasets.criteo_text import (
    CAT_FEATURE_COUNT,
    DAYS,
    FREQUENCY_THRESHOLD,
    INT_FEATURE_COUNT,
    count_lines,
    has_labels,
    line_blocks,
    parse_lines,
)
from tutorec.datasets.progress import byte_bar, progress_bar
from tutorec.datasets.utils import PATH_MANAGER_KEY, opener, split_evenly

_PARTS = ("dense", "sparse", "labels")
_ROWS = 1 << 20  # of one step where a file is rewritten
_ROWS_READ = 1 << 16  # of one step where single rows are read
_INT32 = np.iinfo(np.int32)
# What numpy raises for a file that is not one of its own, whose header is Python
_DAMAGED = (ValueError, EOFError, SyntaxError, TokenError, RecursionError)


class BinaryCriteoUtils:
    """Prepare the files of :class:`~tutorec.datasets.criteo.InMemoryBinaryCriteoIterDataPipe`."""

    @staticmethod
    def tsv_to_npys(
        in_file: str,
        out_dense_file: str,
        out_sparse_file: str,
        out_labels_file: str,
        dataset_name: str = "criteo_1tb",
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        """Write R rows of text as dense [R, 13] float32, sparse [R, 26] int64, labels [R, 1] int32.

        A missing number is 0. Dense values are ``log(x - min + 2)``, min being the least one of the
        file. A file of "criteo_kaggle" without labels gets labels of -1.
        """
        require_one_of("dataset_name", dataset_name, ("criteo_1tb", "criteo_kaggle"))
        path = Path(in_file)
        labelled = dataset_name == "criteo_1tb" or has_labels(path)
        rows = count_lines(path)
        row = 0
        smallest = _INT32.max
        if rows == 0:
            raise ValueError(f"no rows in {path}: the file is empty")

        with ExitStack() as files:
            dense, sparse, labels = (
                files.enter_context(_new_array(file, (rows, columns), dtype, path_manager_key))
                for file, columns, dtype in (
                    (out_dense_file, INT_FEATURE_COUNT, np.float32),
                    (out_sparse_file, CAT_FEATURE_COUNT, np.int64),
                    (out_labels_file, 1, np.int32),
                )
            )
            integers = dense.view(np.int32)  # in dense's memory until the smallest is known
            bar = files.enter_context(byte_bar(path.name, path))

            for block in line_blocks(path, labelled, bar):
                columns = parse_lines(block)
                for value in (block_smallest := int(columns.ints.min()), columns.ints.max()):
                    if not _INT32.min <= value <= _INT32.max:
                        lines = f"lines {block.first_line} to {block.first_line + len(block) - 1}"
                        raise ValueError(
                            f"{path}: an integer of {lines} is {value}, and 32 bits must hold it"
                        )

                smallest = min(smallest, block_smallest)
                block_rows = slice(row, row := row + len(block))
                integers[block_rows] = columns.ints
                sparse[block_rows] = columns.cats
                labels[block_rows, 0] = columns.label

            # The logarithm needs the smallest integer of the file.
            for start in range(0, rows, _ROWS):
                block_rows = slice(start, start + _ROWS)
                np.log(
                    integers[block_rows].astype(np.int64) - (smallest - 2),
                    dtype=np.float32,
                    out=dense[block_rows],
                )

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """The shape of a file's array; only the header is read."""
        with opener(path_manager_key)(path, "rb") as file:
            return _read_header(file, path)[0]

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: list[int],
        rank: int,
        world_size: int,
        start_row: int = 0,
        last_row: int | None = None,
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """First and last row of each file for a rank, and how many ranks take one row more.

        The files are one long list of rows, of which ``start_row`` to ``last_row`` are dealt out:
        consecutive ones to each rank.
        """
        stop = sum(lengths) if last_row is None else last_row + 1
        first, end = split_evenly(start_row, stop, world_size)[rank]

        ranges = {}
        file_start = 0
        for file, length in enumerate(lengths):
            low = max(first, file_start)
            high = min(end, file_start + length)
            if low < high:
                ranges[file] = (low - file_start, high - 1 - file_start)
            file_start += length

        return ranges, (stop - start_row) % world_size

    @staticmethod
    def load_npy_range(
        fname: str,
        start_row: int,
        num_rows: int,
        path_manager_key: str = PATH_MANAGER_KEY,
        mmap_mode: bool = False,
    ) -> NDArray[Any]:
        """Read ``num_rows`` rows of a file's array [R, C] from ``start_row`` on, and no others.

        With ``mmap_mode`` they are mapped: the process ends if the file becomes shorter later.
        """
        with opener(path_manager_key)(fname, "rb") as file:
            shape, dtype = _row_header(file, fname)
            if len(shape) != 2:
                raise ValueError(_another_form(fname, shape))
            if not (0 <= start_row < shape[0] and 0 <= num_rows <= shape[0] - start_row):
                last = start_row + num_rows - 1
                raise ValueError(
                    f"{fname}: rows {start_row} to {last} asked for: use rows 0 to {shape[0] - 1}"
                )
            if mmap_mode:
                return load_array(fname, mmap_mode="r")[start_row : start_row + num_rows]

            rows = np.empty((num_rows, shape[1]), dtype)
            _read_rows(file, fname, start_row, rows)
            return rows

    @staticmethod
    def sparse_to_contiguous(
        in_files: list[str],
        output_dir: str,
        frequency_threshold: int = FREQUENCY_THRESHOLD,
        columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:
        """Write files whose ids are 2, 3, ... per column, in order of first occurrence.

        Ids that occur less than ``frequency_threshold`` times, over all files, become 1. All files
        are in memory. Ids of 8 or 16 bits become int32.
        """
        arrays = [load_array(file) for file in in_files]
        for file, array in zip(in_files, arrays, strict=True):
            require_ids(file, array.dtype)
        # Contiguous ids may need a wider type than the ids of the file.
        arrays = [
            array.astype(np.promote_types(array.dtype, np.int32), copy=False) for array in arrays
        ]
        ends = np.cumsum([len(array) for array in arrays])[:-1]

        for column in progress_bar("contiguous ids", iterable=range(columns), unit="column"):
            ids = _contiguous(
                np.concatenate([array[:, column] for array in arrays]), frequency_threshold
            )
            for array, ids_of_file in zip(arrays, np.split(ids, ends), strict=True):
                array[:, column] = ids_of_file

        for file, array in zip(in_files, arrays, strict=True):
            path = Path(output_dir) / (Path(file).name.split(".")[0] + output_file_suffix)
            with _written(path, path_manager_key) as draft:
                np.save(draft, array)

    @staticmethod
    def shuffle(
        input_dir_labels_and_dense: str,
        input_dir_sparse: str,
        output_dir_shuffled: str,
        rows_per_day: Mapping[int, int],
        output_dir_full_set: str | None = None,
        days: int = DAYS,
        int_columns: int = INT_FEATURE_COUNT,
        sparse_columns: int = CAT_FEATURE_COUNT,
        path_manager_key: str = PATH_MANAGER_KEY,
        random_seed: int = 0,
    ) -> None:
        """Shuffle the rows of all days but the last, which is copied.

        Writes day_0_dense.npy, day_0_sparse.npy, day_0_labels.npy and so on.

        The files keep their numbers of rows, ``rows_per_day``. A seed gives the order that
        TorchRec's function gives. With ``output_dir_full_set`` the rows before the shuffle are
        written, too: full.npy, float32, which rounds ids above 2**24; a warning says so.
        """
        sources = {
            array: input_dir_sparse if array == "sparse" else input_dir_labels_and_dense
            for array in _PARTS
        }
        widths = {"dense": int_columns, "sparse": sparse_columns, "labels": 1}
        rows = [rows_per_day[day] for day in range(days - 1)]
        inputs = {
            array: [_day(folder, day, array, (rows[day], widths[array])) for day in range(days - 1)]
            for array, folder in sources.items()
        }

        if output_dir_full_set is not None:
            target = Path(output_dir_full_set) / "full.npy"
            shape = (sum(rows), sum(widths.values()))
            rounded: list[int] = []
            with _new_array(target, shape, np.float32, path_manager_key) as full:
                for end, *day in zip(np.cumsum(rows), *inputs.values(), strict=True):
                    for start in range(0, len(day[0]), _ROWS_READ):
                        blocks = [array[start : start + _ROWS_READ] for array in day]
                        rounded = rounded or _first_rounded(blocks[1])
                        first = end - len(day[0]) + start
                        full[first : first + len(blocks[0])] = np.concatenate(blocks, axis=1)

            if rounded:
                warn_caller(
                    f"{target}: float32 rounds ids, {rounded[0]} for example: use the files of "
                    f"{output_dir_shuffled}, whose ids are whole"
                )

        order = np.random.RandomState(random_seed).permutation(sum(rows))
        sources_by_day = np.split(order, np.cumsum(rows)[:-1])
        for day in progress_bar("shuffled days", iterable=range(days - 1), unit="day"):
            positions = np.argsort(sources_by_day[day])
            for array in _PARTS:
                dtype = np.float32 if array == "dense" else np.int32
                target = Path(output_dir_shuffled) / f"day_{day}_{array}.npy"
                shape = rows[day], widths[array]
                with _new_array(target, shape, dtype, path_manager_key) as output:
                    gather_rows(inputs[array], sources_by_day[day][positions], positions, output)

        for array in _PARTS:
            last = f"day_{days - 1}_{array}.npy"
            with _written(Path(output_dir_shuffled) / last, path_manager_key) as draft:
                shutil.copyfile(Path(sources[array]) / last, draft)


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
        for start in range(0, len(self), _ROWS_READ):
            stop = min(start + _ROWS_READ, len(self))
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


def _first_rounded(ids: NDArray[Any]) -> list[int]:
    """The first id that float32 does not hold, if there is one."""
    return ids[ids.astype(np.float32).astype(np.float64) != ids][:1].tolist()


@contextmanager
def _written(path: str | Path, path_manager_key: Any) -> Iterator[Path]:
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
def _new_array(
    path: str | Path, shape: tuple[int, int], dtype: Any, path_manager_key: Any
) -> Iterator[np.memmap]:
    with _written(path, path_manager_key) as draft:
        array = npy.open_memmap(draft, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):
            # Writing to a mapped file on a full disk would end the process.
            with open(draft, "rb+") as file:
                _reserve(file, path)
        yield array
        array.flush()


def _contiguous(ids: NDArray[Any], threshold: int) -> NDArray[np.int64]:
    """Ids [N] as 2, 3, ... in the order of their first occurrence; the rare ones as 1."""
    _, first, index, counts = np.unique(
        ids, return_index=True, return_inverse=True, return_counts=True
    )
    numbers = np.ones(len(first), np.int64)
    frequent = np.flatnonzero(counts >= threshold)
    numbers[frequent[np.argsort(first[frequent])]] = np.arange(2, 2 + len(frequent))
    return numbers[index]


def _reserve(file: IO[bytes], path: str | Path) -> None:
    size = os.fstat(file.fileno()).st_size
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        reason = f"{error.strerror}: the array needs {size:,} bytes on the disk: free some"
        raise OSError(error.errno, reason, str(path)) from None


def _day(folder: str, day: int, part: str, shape: tuple[int, int]) -> RowsInFile:
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
