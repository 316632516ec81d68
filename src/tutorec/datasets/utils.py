"""Batch, how the rows of a data set are divided between ranks, and TorchRec's pipes of samples.

A pipe is a ``torch.utils.data.IterDataPipe``, so that torch's own ones (``map``, ``batch``,
``collate``) take it.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial, partialmethod
from itertools import islice, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterDataPipe, get_worker_info

from tutorec._check import require_int, require_one_of
from tutorec.datasets.columns import Columns, dense_ids_labels
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# The name under which programs of TorchRec register their file systems with iopath.
PATH_MANAGER_KEY = "torchrec"

T = TypeVar("T")


@dataclass
class Batch:
    """One batch of B samples: dense columns, ids, labels (``torchrec.datasets.utils.Batch``).

    Attributes:
        dense_features: [B, D] float.
        sparse_features: the ids, a KeyedJaggedTensor of stride B.
        labels: [B].

    Example:
        >>> import torch
        >>> from tutorec.datasets.utils import Batch
        >>> from tutorec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> kjt = KeyedJaggedTensor(
        ...     keys=["item"], values=torch.tensor([7, 1, 7]), lengths=torch.tensor([2, 1])
        ... )
        >>> batch = Batch(torch.zeros(2, 1), kjt, torch.tensor([1.0, 0.0]))
        >>> batch.to(torch.device("cpu")).labels
        tensor([1., 0.])
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    @classmethod
    def from_columns(
        cls,
        columns: Columns,
        sparse: Sequence[str],
        dense: Sequence[str] = (),
        label: str | None = None,
        hash_to: Mapping[str, int] | None = None,
    ) -> Batch:
        """A batch of all rows of a table in memory: pandas, polars, Arrow, Hugging Face, a dict.

        Args:
            columns: ``columns[name]`` is a column of B rows: of pandas, polars, Arrow or NumPy, a
                tensor, or a list.
            sparse: columns that are features: whole numbers or strings for bags of one id, lists of
                them for bags of several. A missing value is an empty bag.
            dense: columns of numbers that are dense features, in this order.
            label: the column of labels; without it they are 0.
            hash_to: features whose ids are hashed, and to how many rows. Strings have to be.

        Returns:
            Dense [B, D] float32, the ids int64, labels [B] float32.

        Raises:
            ValueError: a column is missing, has another number of rows than the others, strings
                that are not hashed, or something that is neither a number nor a string; a dense
                number or a label is missing.

        Example:
            >>> from tutorec.datasets.utils import Batch
            >>> log = {
            ...     "user": [7, 8],
            ...     "viewed": [["red shoe", "hat"], []],
            ...     "hour": [13, 20],
            ...     "click": [1, 0],
            ... }
            >>> batch = Batch.from_columns(
            ...     log, ["user", "viewed"], ["hour"], "click", hash_to={"viewed": 100}
            ... )
            >>> batch.sparse_features.lengths().view(2, 2), batch.labels
            (tensor([[1, 1],
                    [2, 0]], dtype=torch.int32), tensor([1., 0.]))
        """
        return cls(*dense_ids_labels(columns, sparse, dense, label, hash_to))

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return Batch(*(tensor.to(device, non_blocking=non_blocking) for tensor in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses this batch's memory (CUDA)."""
        for tensor in self._parts():
            tensor.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a GPU need not wait."""
        return Batch(*(tensor.pin_memory() for tensor in self._parts()))

    def _parts(self) -> tuple[Any, ...]:
        return self.dense_features, self.sparse_features, self.labels


def step_slices(
    rows: int, batch_size: int, world_size: int = 1, drop_last: bool = False
) -> list[list[tuple[int, int]]]:
    """The row range (start, stop) of each rank in each step, for ``rows`` rows.

    A full step takes W * B consecutive rows, B for each rank in rank order. The rows after the last
    full step are split evenly; when they are fewer than the ranks they join the last full step
    instead, because a rank whose batch is empty has no mean loss. Every rank takes part in every
    step.

    Args:
        rows: rows in all.
        batch_size: B, rows per rank in a full step.
        world_size: W.
        drop_last: leave out the rows after the last full step.

    Returns:
        ``steps[s][r] == (start, stop)``.

    Raises:
        ValueError: a size is not a whole number, a batch size or world size is below 1, or there
            are fewer rows than ranks.

    Example:
        >>> from tutorec.datasets.utils import step_slices
        >>> step_slices(rows=10, batch_size=3, world_size=2)
        [[(0, 3), (3, 6)], [(6, 8), (8, 10)]]
    """
    steps = _steps(rows, batch_size, world_size, drop_last)
    return [split_evenly(start, stop, world_size) for start, stop in steps]


def rank_slices(
    rows: int, batch_size: int, rank: int = 0, world_size: int = 1, drop_last: bool = False
) -> list[tuple[int, int]]:
    """The row ranges (start, stop) that one rank takes, step by step; see :func:`step_slices`.

    Args:
        rows: rows in all.
        batch_size: B, rows per rank in a full step.
        rank: the rank.
        world_size: W.
        drop_last: leave out the rows after the last full step.

    Returns:
        One range per step.

    Raises:
        ValueError: no such rank, a size below 1, or too few rows for every rank to get one.

    Example:
        >>> from tutorec.datasets.utils import rank_slices
        >>> rank_slices(rows=10, batch_size=3, rank=1, world_size=2)
        [(3, 6), (8, 10)]
    """
    steps = _steps(rows, batch_size, world_size, drop_last)
    require_int(f"world_size={world_size}: rank", rank, 0, world_size - 1)
    ranges = [(start + rank * batch_size, start + (rank + 1) * batch_size) for start, _ in steps]
    ranges[-1] = split_evenly(*steps[-1], world_size)[rank]
    return ranges


class RowBatches(Iterator[Batch]):
    """One rank's batches over numbered rows, with a position from which any world can resume.

    Rows are split over ranks as :func:`step_slices` says. Where a run goes on inside an epoch,
    its remaining rows are split in the same way: with the same W * B the steps are
    those of a run that never stopped. Fewer rows than ranks make no step then, and are left out.

    Args:
        read: makes a batch of the rows start..stop-1.
        rows: rows of an epoch.
        batch_size: B, rows per batch on this rank.
        rank: this rank.
        world_size: W.
        epochs: how often the rows are gone through, those before ``start`` counted.
        drop_last: leave out the rows after the last full step of an epoch.
        start: the :attr:`position` of a run to go on from.

    Attributes:
        position: rows that all ranks together have taken so far, over all epochs; equal on all
            ranks. It counts what ``next`` has given out, which a pipeline that looks ahead takes
            before it trains with it.

    Raises:
        ValueError: no such rank or position, a size below 1, or too few rows for every rank to get
            one.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> batches = shop(rows=100, test_rows=50).batches(16, rank=0, world_size=2)
        >>> first, second = next(batches), next(batches)
        >>> batches.position
        64
    """

    def __init__(
        self,
        read: Callable[[int, int], Batch],
        rows: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int = 1,
        drop_last: bool = False,
        start: int = 0,
    ) -> None:
        # Refuse what cannot be divided between the ranks.
        rank_slices(rows, batch_size, rank, world_size, drop_last)

        self._read = read
        self._rows = int(rows)
        self._epochs = require_int("epochs", epochs, 0)
        self._batch_size = int(batch_size)
        self._rank = int(rank)
        self._world_size = int(world_size)
        self._drop_last = drop_last

        # Python's own: a checkpoint writes it as JSON, which knows no numbers of numpy.
        self.position: int = require_int(
            f"position in {epochs} epoch(s) of {rows} rows: start", start, 0, epochs * rows
        )
        self._positions = [self.position]
        self._steps = self._left()

    def __next__(self) -> Batch:
        self.position, *rows = next(self._steps)
        self._positions.append(self.position)
        return self._read(*rows)

    def position_after(self, steps: int) -> int:
        """The position after a number of batches; with prefetching, `position` is ahead of it."""
        return self._positions[steps]

    def map(self, change: Callable[[Batch], Batch]) -> RowBatches:
        """The remaining batches, each passed through a function, for example moved to a device."""
        read = self._read
        changed = copy(self)
        changed._read = lambda first, stop: change(read(first, stop))
        changed._positions = [self.position]
        changed._steps = changed._left()
        return changed

    def __length_hint__(self) -> int:
        """The steps that are left; an epoch that another world began may have one less."""
        epoch, rows_done = divmod(self.position, self._rows)
        step = self._batch_size * self._world_size
        steps_per_epoch = len(
            step_slices(self._rows, self._batch_size, self._world_size, self._drop_last)
        )
        return max((self._epochs - epoch) * steps_per_epoch - rows_done // step, 0)

    def _left(self) -> Iterator[tuple[int, int, int]]:
        """For each step that is left, the position after it and the rows of this rank in it."""
        while self.position < self._epochs * self._rows:
            base = self.position
            rows_done = self.position % self._rows
            rows_left = self._rows - rows_done
            rows_of_step = self._batch_size * self._world_size
            if rows_done and rows_left < (rows_of_step if self._drop_last else self._world_size):
                self.position += rows_left  # not one step more: on to the next epoch
                continue

            steps = step_slices(rows_left, self._batch_size, self._world_size, self._drop_last)
            # The rows that the last step leaves out count as passed, too.
            ends = [*(rank_ranges[-1][1] for rank_ranges in steps[:-1]), rows_left]
            for end, rank_ranges in zip(ends, steps, strict=True):
                start, stop = rank_ranges[self._rank]
                yield base + end, rows_done + start, rows_done + stop


def split_evenly(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """The range start..stop-1 as consecutive ranges of almost equal size, larger ones first.

    Example:
        >>> from tutorec.datasets.utils import split_evenly
        >>> split_evenly(0, 7, 3)
        [(0, 3), (3, 5), (5, 7)]
    """
    size, larger = divmod(stop - start, count)
    ends = [start + index * size + min(index, larger) for index in range(count + 1)]
    return list(pairwise(ends))


def _steps(rows: int, batch_size: int, world_size: int, drop_last: bool) -> list[tuple[int, int]]:
    """The range of rows that all ranks together take in each step."""
    require_int("rows", rows, 0)
    require_int("batch_size", batch_size, 1)
    require_int("world_size", world_size, 1)
    ends = [*range(0, rows + 1, batch_size * world_size)]

    rest = rows - ends[-1]
    if rest and not drop_last:
        ends[len(ends) if rest >= world_size else -1 :] = [rows]
    if len(ends) == 1:
        raise ValueError(
            f"{rows} rows are not enough for one step of {world_size} rank(s) with "
            f"batch_size={batch_size}{' and drop_last' if drop_last else ''}"
        )
    return list(pairwise(ends))


def own_worker() -> tuple[int, int]:
    """The number of this worker of a DataLoader and how many there are; (0, 1) outside one."""
    worker = get_worker_info()
    return (0, 1) if worker is None else (worker.id, worker.num_workers)


def opener(path_manager_key: Any) -> Callable[..., Any]:
    """The function that opens a path: Python's ``open``, or that of a path manager.

    Args:
        path_manager_key: a path manager, which is any object with ``open(path, mode)``; or the name
            of one of iopath's, looked up where the program has imported iopath. Without iopath
            there are local files only.

    Returns:
        A function like ``open``.

    Example:
        >>> from tutorec.datasets.utils import PATH_MANAGER_KEY, opener
        >>> opener(PATH_MANAGER_KEY) is open
        True
    """
    if not isinstance(path_manager_key, str):
        return path_manager_key.open
    iopath = sys.modules.get("iopath.common.file_io")
    return open if iopath is None else iopath.PathManagerFactory().get(path_manager_key).open


class LoadFiles(IterDataPipe):
    r"""Pairs of a path and the open file; TorchRec's ``LoadFiles``.

    Args:
        datapipe: paths.
        mode: "r" or "t" for text, "b" for bytes.
        length: what ``len`` answers.
        path_manager_key: see :func:`opener`.
        open_kw: passed on to ``open``.

    Raises:
        ValueError: another mode.

    Example:
        >>> import tempfile, pathlib
        >>> from tutorec.datasets.utils import LoadFiles, ReadLinesFromCSV
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "ratings.csv"
        >>> _ = path.write_text("user,item\n7,1\n")
        >>> list(ReadLinesFromCSV(LoadFiles([str(path)], mode="r"), skip_first_line=True))
        [['7', '1']]
    """

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = PATH_MANAGER_KEY,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        require_one_of("LoadFiles: mode", mode, ("b", "t", "rb", "rt", "r"))
        self.datapipe = datapipe
        self.mode = mode
        self.length = length
        self.open_kw = open_kw
        self._open = opener(path_manager_key)

    def __iter__(self) -> Iterator[Any]:
        mode = "r" + self.mode.removeprefix("r")
        for path in self.datapipe:
            yield path, self._open(path, mode, **self.open_kw)

    def __len__(self) -> int:
        if self.length == -1:
            raise TypeError("LoadFiles does not know how many paths come: give it length=")
        return self.length


class ReadLinesFromCSV(IterDataPipe):
    """The lines of open files as lists of fields; TorchRec's ``ReadLinesFromCSV``.

    A file is closed at its end.

    Args:
        datapipe: pairs of a path and a file that is open for text, as :class:`LoadFiles` gives
            them.
        skip_first_line: leave out the first line of every file.
        kw: passed on to ``csv.reader``: ``delimiter``, for example.
    """

    def __init__(self, datapipe: Iterable[Any], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.skip_first_line = skip_first_line
        self.kw = kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            with file:
                yield from islice(csv.reader(file, **self.kw), int(self.skip_first_line), None)


class Limit(IterDataPipe):
    """The first samples of a pipe, at most ``limit``: ``pipe.limit(3)``; TorchRec's ``Limit``."""

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.limit = limit

    def __iter__(self) -> Iterator[Any]:
        return islice(self.datapipe, self.limit)


# Beside torch's functional forms, pipe.map and others, whose registry takes a name only once in a
# process.
IterDataPipe.limit = partialmethod(Limit)  # pyright: ignore[reportAttributeAccessIssue]


def safe_cast(val: T, dest_type: Callable[[T], T], default: T) -> T:
    """``dest_type(val)``, or ``default`` where that is a ValueError.

    Example:
        >>> from tutorec.datasets.utils import safe_cast
        >>> safe_cast("7", int, 0), safe_cast("", int, 0)
        (7, 0)
    """
    try:
        return dest_type(val)
    except ValueError:
        return default


def rand_split_train_val(
    datapipe: Iterable[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe, IterDataPipe]:
    """A random split into training and validation part, equal to TorchRec's for the same seed.

    Args:
        datapipe: the samples; both parts read all of them.
        train_perc: the probability that a sample is in the training part, between 0 and 1.
        random_seed: decides, with ``train_perc``, which part a sample is in; the same in every
            pass.

    Returns:
        The two parts.

    Raises:
        ValueError: ``train_perc`` is not between 0 and 1.

    Example:
        >>> from tutorec.datasets.utils import rand_split_train_val
        >>> train, val = rand_split_train_val(range(10), 0.75)
        >>> sorted([*train, *val]) == list(range(10)), list(val)
        (True, [0, 1, 6])
    """
    return _two_parts(datapipe, train_perc, partial(_drawn, train_perc, random_seed))


def _drawn(train_perc: float, seed: int) -> Callable[[int], bool]:
    generator = random.Random(seed)
    return lambda _: generator.random() < train_perc


def _two_parts(
    datapipe: Iterable[Any], train_perc: float, rule: Callable[[], Callable[[int], bool]]
) -> tuple[IterDataPipe, IterDataPipe]:
    if not 0.0 < train_perc < 1.0:
        raise ValueError(f"train_perc={train_perc} must be in range (0.0, 1.0)")
    return _Part(datapipe, rule, True), _Part(datapipe, rule, False)


class _Part(IterDataPipe):
    """The samples for which a rule returns ``selected``; the rule restarts in every pass."""

    def __init__(
        self, datapipe: Iterable[Any], rule: Callable[[], Callable[[int], bool]], selected: bool
    ) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.rule = rule
        self.selected = selected

    def __iter__(self) -> Iterator[Any]:
        in_training = self.rule()
        for idx, sample in enumerate(self.datapipe):
            if in_training(idx) == self.selected:
                yield sample
