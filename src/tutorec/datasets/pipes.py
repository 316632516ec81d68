"""TorchRec's pipes over samples: lines of files, limits, splits. Names as in ``torchrec.datasets.utils``.

Each is a ``torch.utils.data.IterDataPipe``, so that torch's own ones (``map``, ``batch``, ``collate``) take it.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import IterDataPipe, get_worker_info

# The name under which programs of TorchRec register their file systems with iopath.
PATH_MANAGER_KEY = "torchrec"

_MODES = ("b", "t", "rb", "rt", "r")
T = TypeVar("T")


def opener(path_manager_key: Any) -> Callable[..., Any]:
    """What opens a path: Python's ``open``, or that of a path manager.

    Args:
        path_manager_key: a path manager, which is any object with ``open(path, mode)``; or the name of one of iopath's,
            looked up where the program has imported iopath. Without iopath there are local files only.

    Returns:
        A function like ``open``.

    Example:
        >>> from tutorec.datasets.pipes import PATH_MANAGER_KEY, opener
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
        path_manager_key: see :func:`~tutorec.datasets.utils.opener`.
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
        if mode not in _MODES:
            raise ValueError(f"LoadFiles: mode={mode!r} is not a mode of reading: use one of {', '.join(_MODES)}")
        self.datapipe, self.mode, self.length, self.open_kw = datapipe, mode, length, open_kw
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
    """The lines of open files as lists of fields; a file is closed at its end; TorchRec's ``ReadLinesFromCSV``.

    Args:
        datapipe: pairs of a path and a file that is open for text, as :class:`LoadFiles` gives them.
        skip_first_line: leave out the first line of every file.
        kw: passed on to ``csv.reader``: ``delimiter``, for example.
    """

    def __init__(self, datapipe: Iterable[Any], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__()
        self.datapipe, self.skip_first_line, self.kw = datapipe, skip_first_line, kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            with file:
                yield from islice(csv.reader(file, **self.kw), int(self.skip_first_line), None)


class Limit(IterDataPipe):
    """The first samples of a pipe, at most ``limit``; TorchRec's ``Limit``."""

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        super().__init__()
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[Any]:
        return islice(self.datapipe, self.limit)


class ParallelReadConcat(IterDataPipe):
    """Several pipes one after the other; each worker of a DataLoader reads some of them.

    Args:
        datapipes: the pipes.
        dp_selector: which of them this worker reads; by default the workers share them evenly.

    Raises:
        ValueError: more workers than pipes.
    """

    def __init__(
        self, *datapipes: Iterable[Any], dp_selector: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    ) -> None:
        super().__init__()
        self.datapipes, self.dp_selector = datapipes, dp_selector or _of_worker

    def __iter__(self) -> Iterator[Any]:
        for pipe in self.dp_selector(self.datapipes):
            yield from pipe


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


def train_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether sample ``idx`` belongs to the training part.

    Args:
        key_fn: a number for the position of a sample.
        train_perc: share of the training part.
        decimal_places: how many of its decimals count.
        idx: the position.
    """
    return key_fn(idx) % 10**decimal_places < round(train_perc * 10**decimal_places)


def val_filter(key_fn: Callable[[int], int], train_perc: float, decimal_places: int, idx: int) -> bool:
    """Whether sample ``idx`` belongs to the validation part: the opposite of :func:`train_filter`.

    Args:
        key_fn: a number for the position of a sample.
        train_perc: share of the training part.
        decimal_places: how many of its decimals count.
        idx: the position.
    """
    return not train_filter(key_fn, train_perc, decimal_places, idx)


def idx_split_train_val(
    datapipe: Iterable[Any], train_perc: float, decimal_places: int = 2, key_fn: Callable[[int], int] = int
) -> tuple[IterDataPipe, IterDataPipe]:
    """A training part and a validation part, by the position of a sample.

    Args:
        datapipe: the samples; both parts read all of them.
        train_perc: share of the training part, between 0 and 1.
        decimal_places: with 2, 100 samples in a row are dealt out in the same way as the next 100.
        key_fn: a number for each position; its last ``decimal_places`` digits decide.

    Returns:
        The two parts.

    Raises:
        ValueError: ``train_perc`` is not between 0 and 1.

    Example:
        >>> from tutorec.datasets.utils import idx_split_train_val
        >>> train, val = idx_split_train_val(range(20), 0.8, decimal_places=1)
        >>> list(train)[-3:], list(val)
        ([15, 16, 17], [8, 9, 18, 19])
    """
    return _two_parts(datapipe, train_perc, partial(_by_position, key_fn, train_perc, decimal_places))


def rand_split_train_val(
    datapipe: Iterable[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe, IterDataPipe]:
    """A training part and a validation part, drawn at random: a seed gives the parts that TorchRec's function gives.

    Args:
        datapipe: the samples; both parts read all of them.
        train_perc: the probability that a sample is in the training part, between 0 and 1.
        random_seed: decides, with ``train_perc``, which part a sample is in; the same in every pass.

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


def _by_position(key_fn: Callable[[int], int], train_perc: float, decimal_places: int) -> Callable[[int], bool]:
    return partial(train_filter, key_fn, train_perc, decimal_places)


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
    """The samples for which a rule says ``kept``; the rule starts anew in every pass."""

    def __init__(self, datapipe: Iterable[Any], rule: Callable[[], Callable[[int], bool]], kept: bool) -> None:
        super().__init__()
        self.datapipe, self.rule, self.kept = datapipe, rule, kept

    def __iter__(self) -> Iterator[Any]:
        in_training = self.rule()
        return (sample for idx, sample in enumerate(self.datapipe) if in_training(idx) == self.kept)


def _of_worker(datapipes: Sequence[Any]) -> Sequence[Any]:
    worker = get_worker_info()
    if worker is None:
        return datapipes
    if worker.num_workers > len(datapipes):
        raise ValueError(
            f"{worker.num_workers} workers for {len(datapipes)} pipe(s): use num_workers={len(datapipes)} or fewer"
        )
    each, more = divmod(len(datapipes), worker.num_workers)
    start = worker.id * each + min(worker.id, more)
    return datapipes[start : start + each + (worker.id < more)]
