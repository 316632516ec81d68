"""Criteo's files of numpy as batches, in memory or mapped; the loader of the DLRM reference.

Source: ``torchrec.datasets.criteo.InMemoryBinaryCriteoIterDataPipe``: the same rows for each rank
and step, and the same order for a seed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from tutorec._check import require_one_of
from tutorec.datasets.criteo_npy import RowsInFile, gather_rows, load_array, require_ids
from tutorec.datasets.criteo_text import CAT_FEATURE_COUNT, DEFAULT_CAT_NAMES
from tutorec.datasets.utils import (
    PATH_MANAGER_KEY,
    Batch,
    opener,
    own_worker,
    rank_slices,
    split_evenly,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_STAGES = ("train", "val", "test")
Rows = list[NDArray[Any] | RowsInFile]  # of all files: dense, sparse or labels


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
        paths = (dense_paths, sparse_paths, labels_paths)
        arrays = [[_load(file, is_mapped, path_manager_key) for file in files] for files in paths]
        _check_rows(paths, arrays)

        # The first half of the first file validates, the second half tests.
        if stage != "train":
            half = (len(arrays[0][0]) + 1) // 2
            for files in arrays:
                files[0] = _part(files[0], half, stage == "val")

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


def _load(path: str, mapped: bool, path_manager_key: Any) -> NDArray[Any] | RowsInFile:
    return RowsInFile(path) if mapped else load_array(path, opened=opener(path_manager_key))


def _part(rows: NDArray[Any] | RowsInFile, half: int, first: bool) -> NDArray[Any] | RowsInFile:
    start, stop = (0, half) if first else (half, len(rows))
    return rows.part(start, stop) if isinstance(rows, RowsInFile) else rows[start:stop]


def _check_rows(paths: tuple[list[str], ...], arrays: list[Rows]) -> None:
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


def _hash(ids: NDArray[Any], hashes: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    if hashes.max() <= np.iinfo(ids.dtype).max:
        hashes = hashes.astype(ids.dtype)  # a division of 32 bits takes half the time
    elif ids.min(initial=0) < 0:
        raise ValueError(
            f"an id is {ids.min()}, and {ids.dtype} cannot hold the remainder of a negative id by "
            f"{hashes.max()}: save the ids as int64"
        )
    return np.remainder(ids, hashes, out=out, casting="same_kind")
