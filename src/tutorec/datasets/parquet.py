"""Parquet files as batches: ids from list columns, split by rank, resumable.

Needs pyarrow: ``pip install 'tutorec[parquet]'``.
"""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from tutorec._check import require_int, warn_caller
from tutorec.datasets.columns import as_float32
from tutorec.datasets.utils import Batch, own_worker, rank_slices, split_evenly
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

Ranges = list[tuple[int, int]]  # rows start..stop-1, in the order of a pass
_LARGEST_ID = 2**63 - 1


class ParquetDataset(IterableDataset[Batch]):
    """Batches of Parquet files: ids from list columns, dense features and labels from numbers.

    A pass takes every row once. The rows of all row groups are one sequence, and each rank takes a
    range of it, so that two ranks share at most one row group. Every rank gets the same number of
    batches: ranges differ by at most one row, and so do the last batches of the ranks. No loop runs
    over samples: a row group is decoded once, and a batch copies the ids of each feature from
    Arrow's memory.

    A worker of a DataLoader (``batch_size=None``) takes every ``num_workers``-th batch of its rank,
    from a range of its own. Workers hold copies of this object: call :meth:`set_epoch` before each
    pass, and give :meth:`state_dict` the number of batches.

    Args:
        paths: one file or several, or patterns such as ``"logs/day_*.parquet"``, whose files are
            read in the order of their names.
        batch_size: B, rows per batch on this rank.
        sparse: columns that are features: lists of integers, or integers for bags of one id; a null
            is an empty bag.
        dense: columns of numbers that are dense features, in this order.
        label: the column of labels; without it they are 0.
        rank: this rank.
        world_size: W.
        seed: shuffle the row groups, in a new order in each pass; by default they keep their order.

    Yields:
        Batches with dense [B, D] float32, ids of every feature (int32 where all columns are, else
        int64), and labels [B] float32.

    Raises:
        ImportError: pyarrow is not installed.
        FileNotFoundError: a file is not there.
        ValueError: a damaged file, a column that is missing, there twice or of another type, a null
            where a number is needed, an id above 2**63 - 1, a number that is too large for float32,
            a rank or size that cannot be, or too few rows for every rank to get one.

    Warns:
        UserWarning: a column holds a whole number, such as a time in seconds, that float32 rounds.

    Example:
        >>> import tempfile, pyarrow, pyarrow.parquet
        >>> from tutorec.datasets.parquet import ParquetDataset
        >>> rows = pyarrow.table(
        ...     {"item": [[7, 1], [], [3]], "price": [1.0, 2.0, 3.0], "click": [1, 0, 1]}
        ... )
        >>> path = tempfile.mkdtemp() + "/day_0.parquet"
        >>> pyarrow.parquet.write_table(rows, path)
        >>> data = ParquetDataset(
        ...     path, batch_size=2, sparse=["item"], dense=["price"], label="click"
        ... )
        >>> [(batch.sparse_features.values().tolist(), batch.labels.tolist()) for batch in data]
        [([7, 1], [1.0, 0.0]), ([3], [1.0])]
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        batch_size: int,
        sparse: Sequence[str],
        dense: Sequence[str] = (),
        label: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(sparse, str) or not sparse:
            raise ValueError(
                f"sparse={sparse!r}: give a list of at least one column, ['{sparse or 'item'}']"
            )

        if seed is not None:
            require_int("seed", seed, 0)

        self.sparse = list(sparse)
        self.dense = list(dense)
        self.label = label
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed

        self._numbers = [*self.dense, *([] if label is None else [label])]
        self._rounded: set[str] = set()  # columns that a warning was given for
        self._groups: list[tuple[Path, int, int]] = []  # file, row group, rows
        files = _files([paths] if isinstance(paths, str | Path) else paths)
        for path in files:
            with _opened(path) as file:
                _check_columns(path, file.schema_arrow, self.sparse, self._numbers)
                self._groups += [
                    (path, i, file.metadata.row_group(i).num_rows)
                    for i in range(file.num_row_groups)
                ]

        self._rows = sum(rows for *_, rows in self._groups)
        rank_slices(
            self._rows, batch_size, rank, world_size
        )  # raises if the rows cannot be split over ranks
        self.set_epoch(0)

    def __len__(self) -> int:
        """Batches of the coming pass on each rank: fewer than usual after a state was loaded."""
        return len(rank_slices(_total(self._left), self.batch_size, self.rank, self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Begin the epoch of this number, which decides the order of the row groups."""
        require_int("epoch", epoch, 0)
        self._epoch = epoch
        self._left = [(0, self._rows)]
        self._given = 0

    def __iter__(self) -> Iterator[Batch]:
        self._given = 0
        worker, workers = own_worker()
        return self._pass(self._batches_of_workers(self.rank, workers)[worker])

    def state_dict(self, batches: int | None = None, num_workers: int = 0) -> dict[str, Any]:
        """The position of the pass, the same on every rank: numbers and lists, which JSON holds.

        Args:
            batches: how many batches of the pass each rank is done with; by default those that this
                object gave out. A pipeline reads ahead of the step that it trains, and a
                DataLoader's workers give batches out instead.
            num_workers: of the DataLoader that gave them out.
        """
        batches_given = self._given if batches is None else batches
        workers = max(num_workers, 1)
        require_int("batches", batches_given, 0)
        rows_left: Ranges = []
        for rank in range(self.world_size):
            plan = self._batches_of_workers(rank, workers)
            # The next worker comes first: with as many workers the batches go on as if nothing
            # had stopped.
            for worker in (
                number % workers for number in range(batches_given, batches_given + workers)
            ):
                rows_left += [
                    rows
                    for batch in plan[worker][len(range(worker, batches_given, workers)) :]
                    for rows in batch
                ]

        ranges = [list(rows) for rows in _joined(rows_left)]
        return {"epoch": self._epoch, "left": ranges, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        With the same W, B and ``num_workers`` its batches follow, else all rows that are left.

        Raises:
            ValueError: the state is of other files or of another seed.
        """
        other = {name: state.get(name) for name in self._identity()}
        if other != self._identity():
            raise ValueError(
                f"the state is of {other}, and this data is {self._identity()}: use its files "
                "and seed"
            )

        self.set_epoch(state["epoch"])
        left = [(start, stop) for start, stop in state["left"]]
        if _total(left) < self.world_size:
            self.set_epoch(self._epoch + 1)  # not a row for every rank
        else:
            self._left = left

    def _identity(self) -> dict[str, Any]:
        return {"rows": self._rows, "row_groups": len(self._groups), "seed": self.seed}

    def _batches_of_workers(self, rank: int, workers: int) -> list[list[Ranges]]:
        """For each worker of a rank, the rows of each of its batches."""
        total = _total(self._left)
        first_row = split_evenly(0, total, self.world_size)[rank][0]
        sizes = [
            stop - start
            for start, stop in rank_slices(total, self.batch_size, rank, self.world_size)
        ]
        batches_by_worker = []
        for worker in range(workers):
            ends = list(accumulate(sizes[worker::workers], initial=first_row))
            batches_by_worker.append(
                [_part(self._left, start, stop) for start, stop in pairwise(ends)]
            )
            first_row = ends[-1]
        return batches_by_worker

    def _pass(self, batches: list[Ranges]) -> Iterator[Batch]:
        order = np.arange(len(self._groups))
        if self.seed is not None:
            order = np.random.default_rng([self.seed, self._epoch]).permutation(order)
        bounds = list(accumulate((self._groups[group][2] for group in order), initial=0))
        decoded = lru_cache(1)(lambda at: self._decoded(*self._groups[order[at]]))

        for ranges in batches:
            blocks: list[_Rows] = []
            for start, stop in ranges:
                while start < stop:
                    at = bisect_right(bounds, start) - 1
                    end = min(stop, bounds[at + 1])
                    blocks.append(decoded(at).slice(start - bounds[at], end - bounds[at]))
                    start = end

            self._given += 1
            yield self._to_batch(blocks)

        self.set_epoch(self._epoch + 1)

    def _decoded(self, path: Path, group: int, count: int) -> _Rows:
        with _opened(path) as file:
            _check_columns(path, file.schema_arrow, self.sparse, self._numbers)
            table = file.read_row_group(group, columns=[*self.sparse, *self._numbers])

        if table.num_rows != count:
            change = f"{table.num_rows} rows and had {count} when the data set was made"
            raise ValueError(f"{path}: row group {group} has {change}: the file was replaced")

        where = f"{path}, row group {group}"
        lists = [
            _lists(table.column(name).combine_chunks(), f"{where}, column '{name}'")
            for name in self.sparse
        ]
        numbers = []
        for name in self._numbers:
            column = _without_nulls(table.column(name), f"{where}, column '{name}'")
            numbers.append(self._as_float32(column, f"{where}, column '{name}'", name))
        return _Rows(lists, numbers)

    def _as_float32(self, numbers: NDArray[Any], where: str, name: str) -> NDArray[np.float32]:
        """A column [B]; what float32 cannot hold is refused, and a rounded integer warned of."""
        rounded, remark = as_float32(numbers, where)
        if remark is not None and name not in self._rounded:
            self._rounded.add(name)
            warn_caller(remark)
        return rounded

    def _to_batch(self, blocks: list[_Rows]) -> Batch:
        lists = [block.lists[feature] for feature in range(len(self.sparse)) for block in blocks]
        values = np.concatenate([values[offsets[0] : offsets[-1]] for offsets, values in lists])
        lengths = np.concatenate([np.diff(offsets) for offsets, _ in lists]).astype(
            np.int32, copy=False
        )
        kjt = KeyedJaggedTensor(
            self.sparse, torch.from_numpy(values), lengths=torch.from_numpy(lengths)
        )
        columns = list(map(np.concatenate, zip(*(block.numbers for block in blocks), strict=True)))
        size = len(lengths) // len(self.sparse)
        dense = columns[: len(self.dense)]
        label = columns[len(self.dense) :]
        return Batch(
            torch.from_numpy(np.stack(dense, axis=1)) if dense else torch.zeros(size, 0),
            kjt,
            torch.from_numpy(label[0]) if label else torch.zeros(size),
        )


@dataclass(frozen=True)
class _Rows:
    """Decoded rows: (offsets, values) of each feature, and the columns of numbers."""

    lists: list[tuple[NDArray[Any], NDArray[Any]]]
    numbers: list[NDArray[Any]]

    def slice(self, start: int, stop: int) -> _Rows:
        lists = [(offsets[start : stop + 1], values) for offsets, values in self.lists]
        return _Rows(lists, [column[start:stop] for column in self.numbers])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "reading Parquet needs pyarrow: pip install 'tutorec[parquet]'"
        ) from error

    if path.is_dir():
        raise ValueError(f"{path} is a folder: give its files, {str(path / '*.parquet')!r}")

    try:
        # Not mapped: where a mapped file becomes shorter, reading it ends the process.
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except MemoryError as error:
        raise MemoryError(
            f"{path}: a row group does not fit into memory ({error}): write smaller ones, or the "
            "file again if it is damaged"
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: damaged, or not a Parquet file ({error}): write it again"
        ) from error


def _files(paths: Sequence[str | Path]) -> list[Path]:
    """The files of paths and patterns, in order.

    Raises:
        FileNotFoundError: No file fits a pattern.
        ValueError: There are no paths.
    """
    files: list[Path] = []
    for path in paths:
        if not glob.has_magic(str(path)) or Path(path).exists():
            files.append(Path(path))
            continue
        matches = sorted(glob.glob(str(path), recursive=True))
        if not matches:
            raise FileNotFoundError(f"no file fits the pattern {str(path)!r}")
        files += map(Path, matches)

    if not files:
        raise ValueError("no Parquet file given: paths is empty")
    return files


def _check_columns(path: Path, schema: Any, sparse: list[str], numbers: list[str]) -> None:
    from pyarrow import types

    for i, name in enumerate([*sparse, *numbers]):
        if name not in schema.names:
            raise ValueError(f"{path}: no column '{name}'; there are {schema.names}")
        if (count := schema.names.count(name)) > 1:
            raise ValueError(
                f"{path}: {count} columns are named '{name}': write the file with a name for each"
            )

        dtype = schema.field(name).type
        if i < len(sparse):
            ids = dtype.value_type if types.is_list(dtype) or types.is_large_list(dtype) else dtype
            fits = types.is_integer(ids)
            expected = "integers or lists of them (hash other ids first)"
        else:
            fits = types.is_integer(dtype) or types.is_floating(dtype) or types.is_boolean(dtype)
            expected = "numbers"

        if not fits:
            raise ValueError(f"{path}: column '{name}' holds {dtype}, and it must hold {expected}")


def _lists(array: Any, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Offsets [B + 1] and values [N] of a column; a null is an empty list."""
    if hasattr(array, "offsets"):
        offsets = array.offsets.to_numpy()
        values = _without_nulls(array.values, where)
    else:
        offsets = np.concatenate([[0], np.cumsum(array.is_valid().to_numpy(zero_copy_only=False))])
        values = _without_nulls(array.drop_null(), where)

    if values.dtype == np.uint64 and len(values) and values.max() > _LARGEST_ID:
        at = int((values > _LARGEST_ID).argmax())
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise ValueError(
            f"{where}: row {row} holds the id {values[at]}, and ids go up to 2**63 - 1: write the "
            "column as int64, of `ids % rows` of the table, or of `ids >> 1` for ids that are "
            "hashes"
        )

    return offsets, values if values.dtype in (np.int32, np.int64) else values.astype(np.int64)


def _without_nulls(array: Any, where: str) -> NDArray[Any]:
    if array.null_count:
        raise ValueError(
            f"{where}: {array.null_count} of {len(array)} values are null: give every one a number"
        )
    return array.to_numpy(zero_copy_only=False)


def _total(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def _part(ranges: Ranges, start: int, stop: int) -> Ranges:
    """The rows start..stop-1 of the ranges, counted from the first one's beginning."""
    selected = []
    for low, high in ranges:
        first = max(low, low + start)
        last = min(high, low + stop)
        selected += [(first, last)] if first < last else []
        start = start - (high - low)
        stop = stop - (high - low)
    return selected


def _joined(ranges: Ranges) -> Ranges:
    joined: Ranges = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined
