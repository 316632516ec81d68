"""Click logs in Criteo's format as batches, streamed from files in constant memory.

The format and its names are in :mod:`tutorec.datasets.criteo_text`, TorchRec's readers of arrays in
:mod:`tutorec.datasets.criteo_npy` and :mod:`tutorec.datasets.criteo_memory`. The shop writes itself
in this format too (``shop().write_criteo(path)``), so everything here can be tried without fetching
anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe

from tutorec._check import require_int
from tutorec.datasets.criteo_memory import InMemoryBinaryCriteoIterDataPipe
from tutorec.datasets.criteo_npy import BinaryCriteoUtils
from tutorec.datasets.criteo_text import (
    CAT_FEATURE_COUNT,
    DAYS,
    DEFAULT_CAT_NAMES,
    DEFAULT_COLUMN_NAMES,
    DEFAULT_INT_NAMES,
    DEFAULT_LABEL_NAME,
    FREQUENCY_THRESHOLD,
    INT_FEATURE_COUNT,
    TOTAL_TRAINING_SAMPLES,
    CriteoColumns,
    count_lines,
    line_blocks,
    parse_lines,
)
from tutorec.datasets.progress import byte_bar
from tutorec.datasets.utils import (
    Batch,
    LoadFiles,
    ReadLinesFromCSV,
    own_worker,
    rank_slices,
    safe_cast,
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

COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [
    *[partial(safe_cast, dest_type=int, default=0)] * (1 + INT_FEATURE_COUNT),
    *[partial(safe_cast, dest_type=str, default="")] * CAT_FEATURE_COUNT,
]

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
                yield from map(self.to_batch, _rows_of_slices(self.paths, slices, bar))

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


def _default_row_mapper(example: list[str]) -> dict[str, int | str]:
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
        row_mapper: Callable[[list[str]], Any] | None = _default_row_mapper,
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
    row_mapper: Callable[[list[str]], Any] | None = _default_row_mapper,
    **open_kw: Any,
) -> IterDataPipe:
    """A :class:`CriteoIterDataPipe` over a file of the Kaggle challenge, train or test."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)


def _as_paths(paths: Paths) -> list[Path]:
    files = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    if not files:
        raise ValueError("no Criteo file given: paths is empty")
    return files


def _rows_of_slices(
    paths: list[Path], slices: list[tuple[int, int]], bar: Any
) -> Iterator[CriteoColumns]:
    """The rows of each slice, from one pass over the files that parses no other rows."""
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
