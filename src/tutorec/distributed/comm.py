"""The one door to ``torch.distributed``: every byte that leaves a rank passes here, is counted, and leaves in order.

Two rules are kept. *Order*: ranks match collectives by the order in which they are issued, so that two threads of one
rank that issue on the same group can swap each other's results without any error; one thread issues, and a second is
refused. *Counting*: observers (`traffic.count_traffic`, tests, the book's traces) see every issue before it happens.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable, NoWait


@dataclass(frozen=True)
class Issue:
    """One collective that is about to be issued by this rank.

    Args:
        stage: What it is for, e.g. ``"input ids"``.
        source: This rank.
        sent: (destination, bytes) for every other rank that is sent something.
    """

    stage: str
    source: int
    sent: tuple[tuple[int, int], ...]


# Called in order before every issue. Per process: a rank has one stream of collectives.
observers: list[Callable[[Issue], None]] = []

_issuing_thread: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class _InFlight(Awaitable[torch.Tensor]):
    """What arrives, with what was sent kept alive until then."""

    def __init__(self, work: Any, sent: torch.Tensor, received: torch.Tensor) -> None:
        self._flight: tuple[Any, torch.Tensor, torch.Tensor] | None = (work, sent, received)

    def _wait_impl(self) -> torch.Tensor:
        assert self._flight is not None, "a value in flight is collected once; wait() remembers it"
        work, _, received = self._flight
        work.wait()
        self._flight = None
        return received


def all_to_all(
    send: torch.Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
    stage: str,
) -> Awaitable[torch.Tensor]:
    """Issue the exchange of slices of a flat tensor: slice ``r`` of ``send`` goes to rank ``r``.

    Args:
        send: ``[sum(send_counts)]``, contiguous; not to be written to until the result has been waited for.
        send_counts: Elements for each rank, W of them.
        receive_counts: Elements from each rank, W of them.
        group: The ranks.
        stage: Under what the bytes are counted.

    Returns:
        A promise of ``[sum(receive_counts)]``, slice ``r`` from rank ``r``. In a world of 1 nothing is sent and the
        result is ``send`` itself.
    """
    if len(send_counts) == 1:
        return NoWait(send)
    _announce(group, stage, [count * send.element_size() for count in send_counts])
    received = send.new_empty(sum(receive_counts))
    work = dist.all_to_all_single(received, send, list(receive_counts), list(send_counts), group, async_op=True)
    return _InFlight(work, send, received)


def all_gather_ints(values: Sequence[int], group: dist.ProcessGroup, stage: str) -> list[list[int]]:
    """The 64-bit integers of every rank, in rank order; every rank gives equally many.

    Blocks. Sends ``8 * len(values)`` bytes to each other rank.
    """
    world_size = group.size()
    if world_size == 1:
        return [list(values)]
    _announce(group, stage, [8 * len(values)] * world_size)
    device = torch.device("cuda") if dist.get_backend(group) == "nccl" else torch.device("cpu")
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine, group)
    return torch.stack(gathered).tolist()


def all_gather_objects(value: Any, group: dist.ProcessGroup, stage: str) -> list[Any]:
    """A picklable object of every rank, in rank order. Blocks; for the rare and small, e.g. the text of an error."""
    world_size = group.size()
    if world_size == 1:
        return [value]
    _announce(group, stage, [0] * world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group)
    return gathered


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None before a process group has been started."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _announce(group: dist.ProcessGroup, stage: str, bytes_to: Sequence[int]) -> None:
    _check_thread(group)
    if observers:
        ranks = dist.get_process_group_ranks(group)
        me = group.rank()
        sent = tuple((ranks[peer], count) for peer, count in enumerate(bytes_to) if peer != me)
        issue = Issue(stage, ranks[me], sent)
        for observer in tuple(observers):
            observer(issue)


def _check_thread(group: dist.ProcessGroup) -> None:
    thread = threading.get_ident()
    owner = _issuing_thread.setdefault(group, thread)
    if owner == thread:
        return
    alive = {other.ident: other.name for other in threading.enumerate()}
    # Autograd's device threads are not Python's: while one issues, the thread that called backward() waits for it,
    # so the order of issues is still one thread's.
    if thread not in alive:
        return
    if owner not in alive:
        _issuing_thread[group] = thread
        return
    raise RuntimeError(
        f"thread {alive[thread]!r} issues a collective on a process group whose collectives come from thread "
        f"{alive[owner]!r}: ranks match collectives by order, so two threads would swap each other's results; "
        "give this thread a group of its own: torch.distributed.new_group()"
    )
