"""Click logs in Criteo's format as batches, streamed from text or read from arrays of numpy.

``CriteoDataset`` and the pipes stream text in constant memory. ``BinaryCriteoUtils`` writes text as
arrays, splits them by rank, gives contiguous ids and shuffles, and
``InMemoryBinaryCriteoIterDataPipe``, the loader of the DLRM reference, makes batches of them: the
names and results of ``torchrec.datasets.criteo``. The formats are in
:mod:`tutorec.datasets.criteo_files`. The shop writes itself in this format too
(``shop().write_criteo(path)``), so everything here can be tried without fetching anything.
"""

from __future__ import annotations

import shutil
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, IterDataPipe

from tutorec._check import require_int, require_one_of, warn_caller
from tutorec.datasets.criteo_files import (
    CAT_FEATURE_COUNT,
    COLUMN_TYPE_CASTERS,
    DAYS,
    DEFAULT_CAT_NAMES,
    DEFAULT_COLUMN_NAMES,
    DEFAULT_INT_NAMES,
    DEFAULT_LABEL_NAME,
    FREQUENCY_THRESHOLD,
    INT_FEATURE_COUNT,
    ROWS_READ,
    TOTAL_TRAINING_SAMPLES,
    CriteoColumns,
    Rows,
    RowsInFile,
    array_shape,
    check_days,
    count_lines,
    gather_rows,
    has_labels,
    line_blocks,
    load_array,
    named_fields,
    new_array,
    parse_lines,
    part_of_rows,
    read_array_rows,
    require_ids,
    rows_of_day,
    rows_of_slices,
    written,
)
from tutorec.datasets.progress import byte_bar, progress_bar
from tutorec.datasets.utils import (
    PATH_MANAGER_KEY,
    Batch,
    LoadFiles,
    ReadLinesFromCSV,
    opener,
    own_worker,
    rank_slices,
    split_evenly,
)
from tutorec.sparse.hashing import mixing_hash
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "CAT_FEATURE_COUNT",
    "COLUMN_TYPE_CASTERS",
    "DAYS",
    "DEFAULT_CAT_NAMES",
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_INT_NAMES",
    "DEFAULT_LABEL_NAME",
    "FREQUENCY_THRESHOLD",
    "INT_FEATURE_COUNT",
    "TOTAL_TRAINING_SAMPLES",
    "BinaryCriteoUtils",
    "CriteoColumns",
    "CriteoDataset",
    "CriteoIterDataPipe",
    "InMemoryBinaryCriteoIterDataPipe",
    "criteo_kaggle",
    "criteo_terabyte",
    "read_criteo",
]

_STAGES = ("train", "val", "test")
_PARTS = ("dense", "sparse", "labels")
_ROWS = 1 << 20  # of one step where a file is rewritten
_INT32 = np.iinfo(np.int32)

Paths = str | Path | Sequence[str | Path]


def read_criteo(paths: Paths, rows: int | None = None) -> CriteoColumns:
    """The columns of Criteo files as they are (no hash, no logarithm), if they fit in memory.

    Args:
        paths: one file or several, read one after the other; ``.gz`` is unpacked on the way.
        rows: read only so many rows from the start.

    Returns:
        The rows, at most ``rows`` of them.

    Raises:
        ValueError: no rows at all, a number of rows that is none, or a damaged line (names file and
            line).
        FileNotFoundError: a file is not there.
    """
    paths = _as_paths(paths)
    blocks: list[CriteoColumns] = []
    rows_left = sys.maxsize if rows is None else require_int("read_criteo: rows", rows, 0)
    for block in chain.from_iterable(map(line_blocks, paths)):
        blocks.append(parse_lines(block, slice(0, rows_left)))
        rows_left -= len(blocks[-1])
        if rows_left <= 0:
            break

    if not blocks:
        raise ValueError(f"no rows in {', '.join(map(str, paths))}: the file is empty")
    return CriteoColumns.concat(blocks)


class CriteoDataset:
    """Batches of Criteo files; a list of days is read as one long file.

    Dense features are ``log(1 + x)`` of the 13 integers, with the sign kept for negative ones and 0
    for missing ones. An id is hashed to a row of its table
    (:func:`tutorec.sparse.hashing.mixing_hash`); a missing one is an empty bag. The hash does not
    depend on the column, so columns that share a vocabulary can share a table.

    Args:
        paths: one file or several.
        rows_per_table: rows of the table that a feature's ids are hashed to: one number, or one for
            each feature.
        features: which columns make up each feature, as ``{"clicked": ["cat_2", "cat_3"]}``; a
            feature of several columns is a bag of the ids that are there. By default each of the 26
            columns is a feature.
        progress: show a progress bar; by default only on a terminal outside CI.

    Raises:
        ValueError: an unknown column, no feature, or a table size that is missing or no whole
            number from 1.
        FileNotFoundError: a file is not there.

    Example:
        >>> import tempfile, pathlib
        >>> from tutorec.datasets.criteo import CriteoDataset
        >>> from tutorec.datasets.random import shop
        >>> path = shop(rows=100).write_criteo(pathlib.Path(tempfile.mkdtemp()) / "day_0.gz")
        >>> data = CriteoDataset(
        ...     path, rows_per_table=1000, features={"user": ["cat_0"], "item": ["cat_1"]}
        ... )
        >>> len(data), [tuple(batch.dense_features.shape) for batch in data.batches(64)]
        (100, [(64, 13), (36, 13)])
    """

    def __init__(
        self,
        paths: Paths,
        rows_per_table: int | Mapping[str, int],
        features: Mapping[str, Sequence[str]] | None = None,
        progress: bool | None = None,
    ) -> None:
        self.paths = _as_paths(paths)
        for path in self.paths:
            if not path.is_file():
                raise FileNotFoundError(f"no Criteo file at {path}")
        features = {name: [name] for name in DEFAULT_CAT_NAMES} if features is None else features
        if not features:
            raise ValueError(
                f"{features=} must map names to columns, as in {{'clicked': ['cat_2', 'cat_3']}}"
            )

        self.features: dict[str, list[str]] = {}
        self.rows_per_table: dict[str, int] = {}
        self._columns: dict[str, list[int]] = {}
        for name, columns in features.items():
            if not columns or not set(columns) <= set(DEFAULT_CAT_NAMES):
                raise ValueError(
                    f"feature '{name}' is made of columns {columns!r}: give a list of 'cat_0' to "
                    "'cat_25'"
                )

            rows = rows_per_table
            if isinstance(rows_per_table, Mapping):
                rows = rows_per_table.get(name)
            self.rows_per_table[name] = require_int(
                f"rows_per_table: feature '{name}': rows", rows, 1, 2**63 - 1
            )
            self.features[name] = list(columns)
            self._columns[name] = [DEFAULT_CAT_NAMES.index(column) for column in columns]

        self.progress = progress

    @cached_property
    def _count(self) -> int:
        return sum(count_lines(path) for path in self.paths)

    def __len__(self) -> int:
        """Rows of all files; the first call counts the lines."""
        return self._count

    def __repr__(self) -> str:
        return f"CriteoDataset({len(self.paths)} file(s), {len(self.features)} features)"

    def batches(
        self,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """This rank's batches of B rows each, in order; every rank gets the same number of them.

        Every rank goes through the files and checks the form of every line, but parses only rows of
        its own; how rows are split over ranks: :func:`tutorec.datasets.utils.step_slices`.

        Args:
            batch_size: B, rows per batch on this rank.
            rank: this rank.
            world_size: W.
            epochs: how often the files are gone through.
            drop_last: leave out the rows after the last full step; else they are split evenly.

        Yields:
            Batches with dense [B, 13], ids of every feature, and labels [B].

        Raises:
            ValueError: a damaged line (names file and line), or a number that cannot be.
        """
        require_int("epochs", epochs, 0)
        slices = rank_slices(len(self), batch_size, rank, world_size, drop_last)
        for epoch in range(epochs):
            with byte_bar(f"epoch {epoch}", *self.paths, shown=self.progress) as bar:
                yield from map(self.to_batch, rows_of_slices(self.paths, slices, bar))

    def to_batch(self, rows: CriteoColumns) -> Batch:
        """Rows of the file as a batch: logarithms, hashed ids, labels."""
        ints = rows.ints.astype(np.float32)
        dense = np.copysign(np.log1p(np.abs(ints)), ints)
        # All columns are hashed at a time: one pass for each table size, not for each feature.
        ids = torch.from_numpy(rows.cats)
        hashed = {
            size: mixing_hash(ids, size).numpy() for size in set(self.rows_per_table.values())
        }

        values = []
        lengths = []
        for name, columns in self._columns.items():
            known = rows.cats_known[:, columns]
            values.append(hashed[self.rows_per_table[name]][:, columns][known])
            lengths.append(known.sum(axis=1, dtype=np.int32))

        kjt = KeyedJaggedTensor(
            keys=list(self._columns),
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        )
        return Batch(torch.from_numpy(dense), kjt, torch.from_numpy(rows.label.astype(np.float32)))


class CriteoIterDataPipe(IterDataPipe):
    """The lines of Criteo files as dictionaries of columns; TorchRec's ``CriteoIterDataPipe``.

    A worker of a DataLoader reads every ``num_workers``-th file. For batches use
    :class:`CriteoDataset` or :class:`InMemoryBinaryCriteoIterDataPipe`.

    Args:
        paths: the files.
        row_mapper: makes a sample of the fields of a line; None keeps the list of fields.
        open_kw: passed on to :class:`~tutorec.datasets.utils.LoadFiles`.

    Raises:
        ValueError: a line that has neither 40 fields nor, without a label, 39.

    Example:
        >>> import tempfile, pathlib
        >>> from tutorec.datasets.criteo import CriteoIterDataPipe
        >>> from tutorec.datasets.random import shop
        >>> path = shop(rows=100).write_criteo(pathlib.Path(tempfile.mkdtemp()) / "day_0")
        >>> row = next(iter(CriteoIterDataPipe([str(path)])))
        >>> row["label"], row["int_0"], row["cat_0"]
        (1, 17, '00000037')
    """

    def __init__(
        self,
        paths: Iterable[str],
        *,
        row_mapper: Callable[[list[str]], Any] | None = named_fields,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        self.paths = paths
        self.row_mapper = row_mapper
        self.open_kw = open_kw

    def __iter__(self) -> Iterator[Any]:
        worker, workers = own_worker()
        paths = islice(self.paths, worker, None, workers)
        lines = ReadLinesFromCSV(LoadFiles(paths, mode="r", **self.open_kw), delimiter="\t")
        return iter(lines) if self.row_mapper is None else map(self.row_mapper, lines)


criteo_terabyte = CriteoIterDataPipe  # the lines of the 1 TB click logs


def criteo_kaggle(
    path: str,
    *,
    row_mapper: Callable[[list[str]], Any] | None = named_fields,
    **open_kw: Any,
) -> IterDataPipe:
    """A :class:`CriteoIterDataPipe` over a file of the Kaggle challenge, train or test."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)


def _as_paths(paths: Paths) -> list[Path]:
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not files:
        raise ValueError("no Criteo file given: paths is empty")
    return files


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
                files.enter_context(new_array(file, (rows, columns), dtype, path_manager_key))
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
        return array_shape(path, opener(path_manager_key))

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
        return read_array_rows(
            fname, start_row, num_rows, opener(path_manager_key), is_mapped=mmap_mode
        )

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
            with written(path, path_manager_key) as draft:
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
            array: [
                rows_of_day(folder, day, array, (rows[day], widths[array]))
                for day in range(days - 1)
            ]
            for array, folder in sources.items()
        }

        if output_dir_full_set is not None:
            target = Path(output_dir_full_set) / "full.npy"
            shape = (sum(rows), sum(widths.values()))
            rounded: list[int] = []
            with new_array(target, shape, np.float32, path_manager_key) as full:
                for end, *day in zip(np.cumsum(rows), *inputs.values(), strict=True):
                    for start in range(0, len(day[0]), ROWS_READ):
                        blocks = [array[start : start + ROWS_READ] for array in day]
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
                with new_array(target, shape, dtype, path_manager_key) as output:
                    gather_rows(inputs[array], sources_by_day[day][positions], positions, output)

        for array in _PARTS:
            last = f"day_{days - 1}_{array}.npy"
            with written(Path(output_dir_shuffled) / last, path_manager_key) as draft:
                shutil.copyfile(Path(sources[array]) / last, draft)


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """Batches of files that ``BinaryCriteoUtils`` wrote, the same number on every rank.

    The rows of all files are one sequence, which :func:`tutorec.datasets.utils.step_slices`
    divides: a step takes W * B consecutive rows, rank after rank. Without ``mmap_mode`` every rank
    holds all files in memory.

    Args:
        stage: "train" takes all rows; "val" takes the first half of the first file and "test" the
            second, and both all other files.
        dense_paths: files of dense features [R, 13], float32.
        sparse_paths: files of ids [R, 26].
        labels_paths: files of labels [R, 1].
        batch_size: B, rows per batch on this rank.
        rank: this rank.
        world_size: W.
        drop_last: leave out the rows after the last full step; else they are split evenly.
        shuffle_batches: shuffle the rows inside each batch, in a new order in every pass.
        shuffle_training_set: in the stage "train", shuffle all rows once; a rank holds only its own
            in memory.
        shuffle_training_set_random_seed: the seed of both shuffles, of a generator of this object's
            own.
        mmap_mode: leave the files on the disk, and read rows when a batch needs them.
        hashes: for each of the 26 columns the rows of its table; ids are taken modulo that number.
        path_manager_key: see :func:`tutorec.datasets.utils.opener`.

    Yields:
        Batches with dense [B, 13], bags of one id for each of ``DEFAULT_CAT_NAMES``, and labels
        [B].

    Raises:
        ValueError: no such stage or rank, files that do not fit one another, or too few rows for
            every rank to get one.

    Example:
        >>> from tutorec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe
        >>> from tutorec.datasets.test_utils.criteo_test_utils import CriteoTest
        >>> with CriteoTest._create_dataset_npys(num_rows=10) as (dense, sparse, labels):
        ...     data = InMemoryBinaryCriteoIterDataPipe(
        ...         "train", [dense], [sparse], [labels], 3, rank=0, world_size=2
        ...     )
        >>> [len(batch.labels) for batch in data]
        [3, 2]
    """

    def __init__(
        self,
        stage: str,
        dense_paths: list[str],
        sparse_paths: list[str],
        labels_paths: list[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: list[int] | None = None,
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        super().__init__()
        require_one_of("stage", stage, list(_STAGES))

        self.stage = stage
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.drop_last = drop_last
        self.shuffle_batches = shuffle_batches
        self.mmap_mode = mmap_mode
        self.hashes = None if hashes is None else np.array(hashes).reshape(1, CAT_FEATURE_COUNT)

        self._generator = np.random.RandomState(shuffle_training_set_random_seed)
        is_shuffled = shuffle_training_set and stage == "train"
        is_mapped = mmap_mode or is_shuffled
        load = RowsInFile if is_mapped else partial(load_array, opened=opener(path_manager_key))
        paths = (dense_paths, sparse_paths, labels_paths)
        arrays: list[Rows] = [[load(file) for file in files] for files in paths]
        check_days(paths, arrays)

        # The first half of the first file validates, the second half tests.
        if stage != "train":
            rows = len(arrays[0][0])
            half = (rows + 1) // 2
            start, stop = (0, half) if stage == "val" else (half, rows)
            for files in arrays:
                files[0] = part_of_rows(files[0], start, stop)

        rows = sum(map(len, arrays[0]))
        self._slices = rank_slices(rows, batch_size, rank, world_size, drop_last=bool(drop_last))
        if is_shuffled:
            # Each rank gets the rows that the permutation puts into its range.
            first, stop = split_evenly(0, rows, world_size)[rank]
            target_rows = self._generator.permutation(rows)  # where each row goes
            selected = np.flatnonzero((first <= target_rows) & (target_rows < stop))
            targets = target_rows[selected] - first
            for files in arrays:
                dtype = np.result_type(*(file.dtype for file in files))
                own_rows = np.empty((len(selected), *files[0].shape[1:]), dtype)
                files[:] = [gather_rows(files, selected, targets, own_rows)]

            sizes = (stop - start for start, stop in self._slices)
            self._slices = list(pairwise(accumulate(sizes, initial=0)))

        self.dense_arrs, self.sparse_arrs, self.labels_arrs = arrays
        self._hash_each_batch = mmap_mode and not is_shuffled
        if self.hashes is not None and not self._hash_each_batch:
            for sparse in self.sparse_arrs:
                ids = sparse[:]
                _hash(ids, self.hashes, out=ids)

        self._starts = list(accumulate((len(file) for file in self.dense_arrs), initial=0))
        self._lengths = torch.ones(0, dtype=torch.int32)
        self._offsets = torch.arange(1, dtype=torch.int32)

    def __iter__(self) -> Iterator[Batch]:
        worker, workers = own_worker()
        # A DataLoader takes a batch of each worker in turn: the order is that of one process.
        return (self.to_batch(*rows) for rows in self._slices[worker::workers])

    def __len__(self) -> int:
        return len(self._slices)

    def to_batch(self, start: int, stop: int) -> Batch:
        """Rows start..stop-1 of all files as one batch, of this rank's rows if shuffled."""
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, stop - 1)
        groups = [
            [
                files[i][max(start - self._starts[i], 0) : stop - self._starts[i]]
                for i in range(first, last)
            ]
            for files in (self.dense_arrs, self.sparse_arrs, self.labels_arrs)
        ]
        arrays = (group[0] if len(group) == 1 else np.concatenate(group) for group in groups)

        return self._np_arrays_to_batch(*arrays)

    def _np_arrays_to_batch(
        self, dense: NDArray[Any], sparse: NDArray[Any], labels: NDArray[Any]
    ) -> Batch:
        if self.hashes is not None and self._hash_each_batch:
            sparse = _hash(sparse, self.hashes, out=np.empty_like(sparse))
        if self.shuffle_batches:
            order = self._generator.permutation(len(dense))
            dense = dense[order]
            sparse = sparse[order]
            labels = labels[order]

        size = len(dense)
        ids = size * CAT_FEATURE_COUNT
        if ids > len(self._lengths):  # shared: a batch takes a slice of them
            self._lengths = torch.ones(ids, dtype=torch.int32)
            self._offsets = torch.arange(ids + 1, dtype=torch.int32)

        kjt = KeyedJaggedTensor._from_parts(
            DEFAULT_CAT_NAMES,
            torch.from_numpy(sparse.T.flatten()),
            weights=None,
            lengths=self._lengths[:ids],
            offsets=self._offsets[: ids + 1],
            stride=size,
            length_per_key=[size] * CAT_FEATURE_COUNT,
        )

        # Copies, so that a batch that is changed in place leaves the data as it is.
        return Batch(torch.from_numpy(dense.copy()), kjt, torch.from_numpy(labels.flatten()))


def _hash(ids: NDArray[Any], hashes: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    if hashes.max() <= np.iinfo(ids.dtype).max:
        hashes = hashes.astype(ids.dtype)  # a division of 32 bits takes half the time
    elif ids.min(initial=0) < 0:
        raise ValueError(
            f"an id is {ids.min()}, and {ids.dtype} cannot hold the remainder of a negative id by "
            f"{hashes.max()}: save the ids as int64"
        )
    return np.remainder(ids, hashes, out=out, casting="same_kind")


def _first_rounded(ids: NDArray[Any]) -> list[int]:
    """The first id that float32 does not hold, if there is one."""
    return ids[ids.astype(np.float32).astype(np.float64) != ids][:1].tolist()


def _contiguous(ids: NDArray[Any], threshold: int) -> NDArray[np.int64]:
    """Ids [N] as 2, 3, ... in the order of their first occurrence; the rare ones as 1."""
    _, first, index, counts = np.unique(
        ids, return_index=True, return_inverse=True, return_counts=True
    )
    numbers = np.ones(len(first), np.int64)
    frequent = np.flatnonzero(counts >= threshold)
    numbers[frequent[np.argsort(first[frequent])]] = np.arange(2, 2 + len(frequent))
    return numbers[index]
