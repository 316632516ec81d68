"""One call on several ranks, started for it or by torchrun."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorec.spmd.pickling import call_arguments, dump, load
from tutorec.spmd.pool import Ranks
from tutorec.spmd.rank import under_torchrun
from tutorec.spmd.worker import init


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

    Under ``torchrun`` this process already is one of several ranks: then ``fn`` is called here, in
    the group that torchrun describes (its number of ranks counts, not ``world_size``), and every
    process gets the values of all.

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
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str,
    timeout: float,
) -> list[Any]:
    """Call ``fn`` in this process of several and exchange the values."""
    import torch.distributed as dist

    init(backend, timeout)
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    args, kwargs = call_arguments(fn, args, kwargs, rank, world_size)
    payloads: list[Any] = [None] * world_size
    dist.all_gather_object(payloads, dump(fn(*args, **kwargs)))
    return [load(payload) for payload in payloads]
