"""What ``pipeline`` runs on each rank: the plain loop and pipelines, on the same batches."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from benchmarks.cache import scattered
from benchmarks.library import OURS, Library
from benchmarks.memory import peak_during, resident
from benchmarks.rows import Row, Timed, time_row
from benchmarks.sharded_rank import everywhere, quiet
from benchmarks.train_rank import Shape, TrainCase, dense_and_fused, draw_lists, parallel_model
from tutorec._kernels.caches.row_file import drop_pages
from tutorec._kernels.memory import return_freed_memory
from tutorec.awaitable import Awaitable
from tutorec.datasets.ids import power_law_ids
from tutorec.distributed.core.cache_params import CacheAlgorithm, CacheParams
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.sparse.tensor_dict import kjt_to_td
from tutorec.spmd.rank import device

PLAIN = "plain loop"
PIPELINES = "distributed.train_pipeline.train_pipelines"
_RESERVE = 8  # ready batches beyond those of a measurement: a pipeline takes some ahead
_MEMORY_STEPS = 8
_M_MMAP_THRESHOLD = -3  # of malloc.h

Form = Literal["KJT", "TD"]


class Pipeline(Protocol):
    """What trains a model: a train pipeline, or the plain loop."""

    def progress(self, dataloader_iter: Iterator[Any], /) -> Any:
        """Train one batch, and give the model's second result."""
        ...


class PlainLoop:
    """The loop that a reader would write: nothing runs ahead.

    Args:
        model: Answers a batch with ``(loss, output)``.
        optimizer: Of its parameters.
        target: Where batches go.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, target: torch.device
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = target

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """One step."""
        batch = next(dataloader_iter).to(self._device)
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return output


class Feed:
    """An endless iterator of fresh batches, most of them made before they are requested.

    Args:
        make: Number of a batch -> the batch; nothing has looked at it.
    """

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make
        self._number = 0
        self._ready: deque[Any] = deque()
        self._lock = threading.Lock()  # pipelines may read on a thread of their own

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        with self._lock:
            self._make_ready(1)
            return self._ready.popleft()

    def refill(self, count: int) -> None:
        """Have at least so many batches ready."""
        with self._lock:
            self._make_ready(count)

    def _make_ready(self, count: int) -> None:
        while len(self._ready) < count:
            self._ready.append(self._make(self._number))
            self._number += 1


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Args:
        pipeline: A pipeline's class, or `PLAIN`.
        root: The library.
        delay: Seconds by which ids come later.
        form: Of the ids of a batch: a KeyedJaggedTensor, or a TensorDict.
    """

    pipeline: str
    root: str = OURS
    delay: float = 0.0
    form: Form = "KJT"

    @property
    def name(self) -> str:
        """Its name in a report."""
        late = f", ids {self.delay * 1e3:g} ms later" if self.delay else ""
        form = f" ({self.form})" if self.form != "KJT" else ""
        return f"{self.root} {self.pipeline}{form}{late}"


def measure_contenders(
    name: str,
    contenders: Sequence[Contender],
    shape: Shape,
    rounds: int,
    rank: int,
    folder: str | None = None,
) -> Timed:
    """Train the small DLRM of ``train`` in several ways in turn; collective.

    Args:
        name: Of the row.
        contenders: The ways.
        shape: The model and its batches.
        rounds: Rounds that count.
        rank: This rank.
        folder: Where files of tables are: a tenth of the rows is in memory, and the pages of the
            others are dropped before each measurement. None: all tables are in memory.

    Returns:
        Its samples; without them where losses differ on some rank.
    """
    quiet({contender.root for contender in contenders})
    cache = CacheParams(CacheAlgorithm.LRU, 0.1, folder=folder) if folder is not None else None
    running = {way.name: start(way, shape, rank, cache) for way in contenders}
    steps = shape.tables.calls

    def call_of(pipeline: Pipeline, feed: Feed) -> Callable[[Any], float]:
        return lambda _: read(pipeline.progress(feed))

    def inputs(side: str, _: int) -> range:
        # Batches that a pipeline has taken ahead are in flight before and after.
        pipeline, feed = running[side]
        feed.refill(steps + _RESERVE)
        if folder is not None:
            drop_pages(folder)
            read(pipeline.progress(feed))  # a batch in flight lost what had been read ahead for it
        gc.collect()
        return range(steps)

    calls = {side: call_of(pipeline, feed) for side, (pipeline, feed) in running.items()}
    return time_row(Row(name, calls, inputs, checked=True), rounds, everywhere)


def read(output: Any) -> float:
    """The loss, read: the first number of what ``progress`` gives."""
    return float(output[0])


def start(
    contender: Contender, shape: Shape, rank: int, cache: CacheParams | None = None
) -> tuple[Pipeline, Feed]:
    """A model of its own, what trains it, and its batches.

    Args:
        contender: How it is trained.
        shape: The model and its batches.
        rank: This rank.
        cache: Of tables in files, whose ids follow a power law; None: all rows are in memory.
    """
    library = Library(contender.root)
    model = parallel_model(library, TrainCase("pipeline", cache=cache), shape)
    optimizer = dense_and_fused(library, model, "sgd")
    if contender.delay:
        delay_ids(model, contender.delay)

    name = contender.pipeline
    pipeline_class = PlainLoop if name == PLAIN else library.get(f"{PIPELINES}.{name}")
    # The batches of a semi-synchronous pipeline are trained one update late from the start.
    early = {"start_batch": 0} if name == "TrainPipelineSemiSync" else {}
    pipeline = pipeline_class(model, optimizer, device(), **early)

    def make(number: int) -> Any:
        return draw_batch(library, shape, rank, number, contender.form, cache is not None)

    return pipeline, Feed(make)


def draw_batch(
    library: Library,
    shape: Shape,
    rank: int,
    number: int,
    form: Form = "KJT",
    power_law: bool = False,
) -> Any:
    """A batch in a library's classes: the same in both, others on every rank.

    Args:
        library: Whose classes.
        shape: Sizes.
        rank: This rank.
        number: Of the batch.
        form: Of its ids.
        power_law: Whether some ids come often; otherwise all are alike.
    """
    dense, ids, lengths, labels = draw_lists(shape, rank, 1000 * number)
    if power_law:
        draw = torch.Generator().manual_seed(1_000_000 * rank + number)
        ranks = power_law_ids(ids.numel(), shape.tables.rows, 1.05, draw)
        ids = scattered(shape.tables.rows)[ranks]

    batch = (shape.tables.keys(), ids, lengths)
    features = library.batch(batch)
    if form == "TD":
        features = kjt_to_td(Library(OURS).batch(batch))
    return library.get("datasets.utils.Batch")(dense, features, labels)


class _Late(Awaitable[Any]):
    """A value that is ready a given number of seconds after it was requested."""

    def __init__(self, value: Awaitable[Any], seconds: float) -> None:
        self._value = value
        self._ready = time.monotonic() + seconds

    def _wait_impl(self) -> Any:
        value = self._value.wait()
        time.sleep(max(0.0, self._ready - time.monotonic()))
        return value


class _LateIds(Awaitable[Any]):
    """The sizes of an exchange, after which its ids come late."""

    def __init__(self, sizes: Awaitable[Awaitable[Any]], seconds: float) -> None:
        self._sizes = sizes
        self._seconds = seconds

    def _wait_impl(self) -> Any:
        return _Late(self._sizes.wait(), self._seconds)


def delay_ids(model: nn.Module, seconds: float) -> None:
    """Delay the ids of every sharded module, as a slower network would, without using the CPU.

    The clock starts when a rank sends its ids; who waits later than that waits less.
    """
    for module in model.modules():
        if isinstance(module, ShardedModule):
            send = module.input_dist

            def late(*args: Any, _send: Callable[..., Any] = send, **kwargs: Any) -> Any:
                return _LateIds(_send(*args, **kwargs), seconds)

            vars(module)["input_dist"] = late


def peak_memory(contender: Contender, shape: Shape, rank: int) -> tuple[int, int]:
    """Peak bytes of some steps above this process before, and of one batch with its ids once more.

    Args:
        contender: Who trains.
        shape: The model and its batches.
        rank: This rank, a new process.
    """
    quiet({contender.root})
    return_large_blocks()
    pipeline, feed = start(contender, shape, rank)
    gc.collect()
    return_freed_memory()
    before = resident()

    def steps() -> None:
        for _ in range(_MEMORY_STEPS):
            read(pipeline.progress(feed))

    batch = draw_batch(Library(contender.root), shape, rank, -1)
    return peak_during(steps) - before, bytes_of_batch(vars(batch))


def bytes_of_batch(fields: Mapping[str, Any]) -> int:
    """Bytes of a batch and of its ids once more, as they arrive from other ranks."""
    features = fields["sparse_features"]
    ids = features.values().nbytes + features.lengths().nbytes
    return 2 * ids + sum(field.nbytes for field in fields.values() if isinstance(field, Tensor))


def return_large_blocks() -> None:
    """From now on, blocks of 64 KiB or more go back to the system when they are freed.

    Otherwise the C library keeps some of them, and the highest point differs from run to run.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, 1 << 16)
