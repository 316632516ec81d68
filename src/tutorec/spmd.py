"""N processes from a notebook cell or a test: one function, one process group, one value from each rank.

SPMD, *single program, multiple data*, is how distributed PyTorch runs: W processes, the *ranks*, execute one function,
each on its own part of the data, and meet in collectives. Usually ``torchrun`` starts them. :class:`Ranks` starts them
from where you are, keeps them between calls, and brings back what they return.

What a rank prints goes to the standard output of the process that started it, and is lost where that is not shown
(under pytest and nbmake, for example): return what you want to see.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tutorec._spmd_device import device as device
from tutorec._spmd_device import loopback, under_torchrun
from tutorec._spmd_end import give_threads_time
from tutorec._spmd_pool import WorkerOptions, WorkerPool
from tutorec._spmd_rank import join_group
from tutorec._spmd_side import Kept, RankWorld, restore_world
from tutorec._spmd_watch import Watch
from tutorec._spmd_wire import call_arguments, dump, load
from tutorec.errors import RankError

if TYPE_CHECKING:
    import torch
    import torch.distributed

__all__ = ["Kept", "Ranks", "device", "init", "run_ranks"]

_CLOSE_SECONDS = 2.0
_LONGEST_SECONDS = 1_000_000  # Twice as many milliseconds is what the system's calls can wait.


class Ranks:
    """A pool of W rank processes with a process group, kept from call to call.

    The processes start at the first :meth:`run`. Functions, classes and constants of notebook cells and scripts travel
    to the ranks and keep their identity: a function is sent once, and an object of a class made in one call is an
    instance of that class in the next. A rank never imports the caller's script, which therefore needs no
    ``if __name__ == "__main__":``.

    On Linux the first pool of a program starts a *fork server*, a fresh process that imports torch once; ranks are
    forks of it and start in a moment. Where that would not be safe, on other systems, and with
    ``TUTOREC_RANKS_START=spawn``, every rank is a fresh interpreter that imports torch itself.

    When a rank raises, dies or stalls, all ranks are ended, the error names the rank and the place, and the next
    :meth:`run` starts new ones; what the old ones kept is gone.

    Args:
        world_size: W, the number of ranks.
        hosts: Number of simulated hosts that the ranks are split into, evenly and in order. It sets ``LOCAL_RANK``,
            ``LOCAL_WORLD_SIZE`` and ``GROUP_RANK`` on each rank; all processes are on this machine all the same.
        backend: ``"auto"``: where there is a GPU for every rank, one process group that carries CPU tensors by gloo
            and CUDA tensors by NCCL, else gloo. ``"nccl"`` demands the first, ``"gloo"`` asks for the second.
        timeout: Seconds that one run may take, at most 1,000,000. Starting the ranks does not count.

    Raises:
        ValueError: No such number of ranks, hosts or seconds.

    Example:
        >>> import torch
        >>> def total(rank, x):
        ...     value = torch.tensor([x + rank])
        ...     torch.distributed.all_reduce(value)
        ...     return value.item()
        >>> with Ranks(2) as world:
        ...     world.run(total, 10)
        [21, 21]
    """

    def __init__(self, world_size: int, hosts: int | None = None, backend: str = "auto", timeout: float = 60) -> None:
        self._options = _checked_options(world_size, hosts, backend, timeout)
        self._lock = threading.Lock()
        self._closed = False
        self._pools: list[WorkerPool] = []
        self._finalizer = weakref.finalize(self, _end_pools, self._pools)

    @property
    def world_size(self) -> int:
        """W, the number of ranks."""
        return self._options.world_size

    @property
    def rank(self) -> int:
        """This process's rank: inside a run only."""
        raise AttributeError("a pool has a rank inside of a run only, in the function given to run()")

    @property
    def device(self) -> torch.device:
        """The device of this process's rank, as :func:`device` gives it: inside a run only."""
        raise AttributeError(
            "ranks have a device each: read it inside of a run, in the function given to run(); "
            "tutorec.spmd.device() is the device of the process that calls it"
        )

    @property
    def hosts(self) -> int:
        """Simulated hosts that share the ranks."""
        return self._options.hosts

    @property
    def backend(self) -> str:
        """The backend in use, once the ranks run; before that the one asked for."""
        return self._pools[-1].backend if self._pools else self._options.backend

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks in rank order, empty while none run."""
        return self._pools[-1].pids if self._pools else []

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._pools else "not started"
        hosts = f", hosts={self.hosts}" if self.hosts > 1 else ""
        return f"Ranks({self.world_size}{hosts}, backend={self.backend!r}) {state}"

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn`` on every rank and return what each returned, in rank order.

        Parameters of ``fn`` named ``rank`` and ``world_size`` are filled in when the call leaves them out. Arguments
        are copied to every rank, except handles made by ``keep``, which become the object that the rank kept. Globals
        that ``fn`` uses are copied when first used and when the caller changes them: what a rank changes in them stays
        changed on that rank. Ranks forget functions when one of their globals changes, and those that were not used
        for longest when there are more than 256 of them or 8 MiB: pass large values as arguments, or ``keep`` them.
        Tensors travel through CPU memory and arrive on the CPU, in both directions: move them to
        :func:`device` where they are used.

        Raises:
            RankError: A rank raised or died.
            RankTimeoutError: The ranks did not finish in time.
            RuntimeError: This process is a fork of the one that started the ranks.
            TypeError: The arguments do not fit ``fn``.
        """
        __tracebackhide__ = True  # Notebooks and pytest then show the caller's line and the rank's own traceback.
        for pool in self._pools[-1:]:
            if pool.owner != os.getpid():
                raise RuntimeError(
                    f"process {pool.owner} started these ranks, and this is process {os.getpid()}, a fork of it: each "
                    f"would get the other's values; make another Ranks({self.world_size}) in this process"
                )
        call_arguments(fn, args, kwargs, rank=0, world_size=self.world_size)
        with self._lock:
            if self._closed:
                raise ValueError(f"{self!r}: run() after close(); make another Ranks({self.world_size})")
            if not self._pools:
                self._pools.append(WorkerPool(self._options, _validation_switch()))
            task = self._pools[-1].prepare(fn, args, kwargs)
            try:
                values = self._pools[-1].run(task)
            except RankError as error:
                _end_pools(self._pools)
                raise error.with_traceback(None) from None
            except BaseException:
                _end_pools(self._pools)
                raise
        return [load(value) for value in values]

    def keep(self, obj: Any) -> Kept:
        """Keep ``obj`` on a rank: inside a run only; returns a handle that later runs turn into the same object.

        Example:
            >>> world = Ranks(2)
            >>> def build():
            ...     return world.keep([0])
            >>> def count(state, step):
            ...     state[0] += step
            ...     return state[0]
            >>> handle = world.run(build)[0]
            >>> world.run(count, handle, 2), world.run(count, handle, 3)
            ([2, 2], [5, 5])
            >>> world.close()
        """
        raise RuntimeError(
            f"keep() was called outside of a run, with a {type(obj).__name__}: call it in the function given to run(), "
            "where it keeps the object on each rank"
        )

    def close(self) -> None:
        """End the ranks; what they kept is gone."""
        with self._lock:
            self._closed = True
            _end_pools(self._pools, _CLOSE_SECONDS)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., RankWorld], tuple[str, int]]:
        """Inside a run the pool is each rank's view of it."""
        return restore_world, (self._pools[-1].token if self._pools else "", self.hosts)


def _checked_options(world_size: int, hosts: int | None, backend: str, timeout: float) -> WorkerOptions:
    """The options of a pool, or a ValueError that says what would do."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of ranks, 1 or more, got {world_size!r}")
    count = 1 if hosts is None else hosts
    if isinstance(count, bool) or not isinstance(count, int) or count < 1 or world_size % count:
        fits = [k for k in range(1, world_size + 1) if world_size % k == 0]
        raise ValueError(f"hosts={hosts!r} cannot share {world_size} ranks evenly; hosts may be one of {fits}")
    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"backend must be 'auto', 'gloo' or 'nccl', got {backend!r}")
    return WorkerOptions(world_size, count, backend, _checked_timeout(timeout))


def _checked_timeout(timeout: float) -> float:
    """Seconds that every call of the system can wait."""
    if not 0 < timeout <= _LONGEST_SECONDS:
        raise ValueError(f"timeout must be a positive number of seconds, at most {_LONGEST_SECONDS:,}, got {timeout!r}")
    return float(timeout)


def _end_pools(pools: list[WorkerPool], grace: float = 0.0) -> None:
    """End running pools and forget them; also what happens when a pool is garbage or the program ends."""
    while pools:
        pools.pop().end(grace)


def _validation_switch() -> bool | None:
    """Whether this process checks ids and lengths."""
    from tutorec._validation import validation_enabled

    return validation_enabled()


def run_ranks(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    hosts: int | None = None,
    backend: str = "auto",
    timeout: float = 60,
    **kwargs: Any,
) -> list[Any]:
    """Call ``fn`` once on ``world_size`` ranks and return their values in rank order.

    Under ``torchrun`` this process already is one of several ranks: then ``fn`` is called here, in the group that
    torchrun describes (its number of ranks counts, not ``world_size``), and every process gets the values of all.

    Args:
        fn: Called on each rank; parameters named ``rank`` and ``world_size`` are filled in.
        world_size: W, the number of ranks to start.
        *args: Positional arguments of ``fn``.
        hosts: Simulated hosts, as in :class:`Ranks`.
        backend: As in :class:`Ranks`.
        timeout: Seconds that the call may take.
        **kwargs: Keyword arguments of ``fn``.

    Example:
        >>> run_ranks(lambda rank: rank * rank, 2)
        [0, 1]
    """
    __tracebackhide__ = True
    if under_torchrun():
        return _run_here(fn, args, kwargs, backend, timeout)
    with Ranks(world_size, hosts=hosts, backend=backend, timeout=timeout) as world:
        return world.run(fn, *args, **kwargs)


def _run_here(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backend: str, timeout: float
) -> list[Any]:
    """Call ``fn`` in this process of several and exchange the values."""
    import torch.distributed as dist

    init(backend, timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    args, kwargs = call_arguments(fn, args, kwargs, rank, world_size)
    payloads: list[Any] = [None] * world_size
    dist.all_gather_object(payloads, dump(fn(*args, **kwargs)))
    return [load(payload) for payload in payloads]


def init(backend: str = "auto", timeout: float = 600) -> torch.distributed.ProcessGroup:
    """The default process group of this process, started when there is none.

    Under torchrun it is the group that torchrun describes; on a rank of :class:`Ranks` it runs already; elsewhere, in a
    notebook say, it is a group of one. Calling it again returns the same group.

    Under torchrun a rank that has waited in a collective of gloo for ``timeout`` seconds asks the others where they
    are: the note of its uncaught error names who stalled and on which line, who only waits, and who has ended.

    Args:
        backend: As in :class:`Ranks`, used when a group is started.
        timeout: Seconds that one collective may take, at most 1,000,000: longer than any rank reads a batch or saves.

    Example:
        >>> init().size()
        1
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if not dist.is_initialized():
        limit = timedelta(seconds=_checked_timeout(timeout))
        if under_torchrun():
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store, _, _ = next(rendezvous("env://", rank, world_size, timeout=limit))
            join_group(backend, rank, world_size, store, timeout, int(os.environ["LOCAL_RANK"]))
            atexit.register(Watch(store, rank, world_size, timeout).end)
        else:
            _join_group_of_one(backend, timeout)
        atexit.register(_leave_group)
    group = dist.group.WORLD
    assert group is not None, "the default group was started above"
    give_threads_time(group)
    return group


def _join_group_of_one(backend: str, timeout: float) -> None:
    """Start a group that nobody else can join: its rendezvous is this process's memory, its interface the loopback."""
    from torch._C._distributed_c10d import HashStore

    added = {name: value for name, value in loopback().items() if name not in os.environ}
    os.environ.update(added)
    try:
        join_group(backend, 0, 1, HashStore(), timeout)
    finally:
        for name in added:
            del os.environ[name]


def _leave_group() -> None:
    """Leave the default group at the end of the program, as torch asks for."""
    dist = sys.modules["torch.distributed"]
    if dist.is_initialized():
        dist.destroy_process_group()
