"""The collectives of ``torch.distributed``, issued in order and counted.

It keeps two rules. *Order*: ranks match collectives by the order in which they are issued. Two
threads of one rank that issue on the same group can receive each other's results without an error,
so a second thread is refused. *Counting*: observers (`traffic.count_traffic`, tests, the book's
traces) see every issue before it happens.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable, NoWait, map_awaitable
from tutorec.distributed.core.env import get_local_rank as get_local_rank
from tutorec.distributed.core.env import get_local_size as get_local_size
from tutorec.distributed.core.qcomm import CommCodec
from tutorec.spmd.rank import backend_for, give_threads_time, note


@dataclass(frozen=True)
class Issue:
    """One collective that this rank is about to issue.

    Args:
        stage: Its purpose, e.g. ``"input ids"``.
        source: This rank.
        sent: (destination, bytes) for every other rank that receives something.
    """

    stage: str
    source: int
    sent: tuple[tuple[int, int], ...]


# Called in order before every issue. Per process: a rank has one sequence of collectives.
observers: list[Callable[[Issue], None]] = []

_issuing_thread: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class _InFlight(Awaitable[torch.Tensor]):
    """Awaitable of a received tensor, which keeps the sent tensor alive."""

    def __init__(self, work: Any, sent: torch.Tensor, received: torch.Tensor) -> None:
        self._flight: tuple[Any, torch.Tensor, torch.Tensor] | None = (work, sent, received)

    def _wait_impl(self) -> torch.Tensor:
        assert self._flight is not None, "a value in flight is collected once; wait() remembers it"
        work, _, received = self._flight
        work.wait()
        self._flight = None
        return _used_here(received)


def _used_here(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, whose memory is kept until the current stream has read it.

    An exchange may be awaited on another stream than the one that issued it.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def all_to_all(
    send: torch.Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
    stage: str,
    codec: CommCodec | None = None,
) -> Awaitable[torch.Tensor]:
    """Issue an all-to-all of a flat tensor: slice ``r`` of ``send`` goes to rank ``r``.

    Args:
        send: ``[sum(send_counts)]``, contiguous; must not be written to until the result has been
            awaited.
        send_counts: Elements for each rank, W numbers.
        receive_counts: Elements from each rank, W numbers.
        group: The ranks.
        stage: The name under which the bytes are counted.
        codec: Data type in which they are sent; None keeps it.

    Returns:
        An awaitable of ``[sum(receive_counts)]``, slice ``r`` from rank ``r``. In a world of 1
        nothing is sent and the result is ``send`` itself.
    """
    if len(send_counts) == 1:
        return NoWait(send)
    if codec is not None:
        arriving = all_to_all(codec.encode(send), send_counts, receive_counts, group, stage)
        return map_awaitable(lambda arrived: codec.decode(arrived, send.dtype), arriving)

    announce(group, stage, [count * send.element_size() for count in send_counts])
    received = send.new_empty(sum(receive_counts))
    work = dist.all_to_all_single(
        received, send, list(receive_counts), list(send_counts), group, async_op=True
    )
    return _InFlight(work, send, received)


def all_to_all_slices(
    send: torch.Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
    stage: str,
    codec: CommCodec | None = None,
) -> Awaitable[list[torch.Tensor]]:
    """`all_to_all` that returns separate slices, without a copy of this rank's own slice.

    Use it for slices that are concatenated or added anyway.

    Args:
        send: As for `all_to_all`; must not be written to while a slice of the result is in use.
        send_counts: As for `all_to_all`.
        receive_counts: As for `all_to_all`.
        group: The ranks.
        stage: The name under which the bytes are counted.
        codec: Data type in which they are sent; None keeps it.

    Returns:
        An awaitable of W slices, slice ``r`` from rank ``r``. This rank's own slice is a view of
        ``send`` on the first and the last rank, where the other slices are contiguous.
    """
    if len(send_counts) == 1:
        return NoWait([send])
    if codec is not None:
        arriving = all_to_all_slices(codec.encode(send), send_counts, receive_counts, group, stage)
        return map_awaitable(
            lambda slices: [codec.decode(encoded, send.dtype) for encoded in slices], arriving
        )

    to_send = list(send_counts)
    to_receive = list(receive_counts)
    rank = group.rank()
    # The slices of the other ranks are contiguous on the first and the last rank only.
    if 0 < rank < len(to_send) - 1:
        arriving = all_to_all(send, to_send, to_receive, group, stage)
        return map_awaitable(lambda arrived: list(arrived.split(to_receive)), arriving)

    if rank == 0:
        own = send[: to_send[0]]
        others = send[to_send[0] :]
    else:
        own = send[sum(to_send[:-1]) :]
        others = send[: sum(to_send[:-1])]

    to_send[rank] = to_receive[rank] = 0
    arriving = all_to_all(others, to_send, to_receive, group, stage)
    return _SlicesAwaitable(arriving, to_receive, rank, own)


class _SlicesAwaitable(Awaitable[list[torch.Tensor]]):
    """Slices of the other ranks in flight; ``wait()`` adds this rank's own, which was not sent."""

    def __init__(
        self, arriving: Awaitable[torch.Tensor], counts: list[int], rank: int, own: torch.Tensor
    ) -> None:
        self._arriving = arriving
        self._counts = counts
        self._rank = rank
        self._own = own

    def _wait_impl(self) -> list[torch.Tensor]:
        slices = list(self._arriving.wait().split(self._counts))
        slices[self._rank] = _used_here(self._own)
        del self._arriving, self._own
        return slices


def reduce_scatter(
    send: torch.Tensor,
    counts: Sequence[int],
    group: dist.ProcessGroup,
    stage: str,
    codec: CommCodec | None = None,
) -> Awaitable[torch.Tensor]:
    """Issue a reduce-scatter of a flat tensor: slice ``r``, summed over ranks, goes to rank ``r``.

    Each rank sends its slices to the other ranks and adds the slices it receives in rank order. The
    result has the same bits in every run and on every backend. Rank r sends ``sum(counts) -
    counts[r]`` elements, as any reduce-scatter does. Types narrower than 32 bits are added in
    float32, so that only the sent values are rounded, never a sum.

    Args:
        send: ``[sum(counts)]``, contiguous; must not be written to until the result has been
            awaited.
        counts: Elements of each rank's slice, the same W numbers on every rank.
        group: The ranks.
        stage: The name under which the bytes are counted.
        codec: Data type in which they are sent; None keeps it.

    Returns:
        An awaitable of ``[counts[rank]]``. In a world of 1 it is ``send`` itself.
    """
    if len(counts) == 1:
        return NoWait(send)

    def total(slices: list[torch.Tensor]) -> torch.Tensor:
        first, *others = slices
        if first.is_floating_point() and first.element_size() < 4:
            first = first.float()

        summed = first + others[0]
        for other in others[1:]:
            summed += other
        return summed.to(send.dtype) if codec is None else codec.decode(summed, send.dtype)

    sent = send if codec is None else codec.encode(send)
    own_count = counts[group.rank()]
    return map_awaitable(
        total, all_to_all_slices(sent, counts, [own_count] * len(counts), group, stage)
    )


def all_gather(
    mine: torch.Tensor,
    counts: Sequence[int],
    group: dist.ProcessGroup,
    stage: str,
    codec: CommCodec | None = None,
) -> Awaitable[torch.Tensor]:
    """Issue an all-gather of flat tensors; ranks may have different numbers of elements.

    Sends ``(W - 1) * counts[rank]`` elements.

    Args:
        mine: ``[counts[rank]]``, contiguous; must not be written to until the result has been
            awaited.
        counts: Elements of each rank, the same W numbers on every rank.
        group: The ranks.
        stage: The name under which the bytes are counted.
        codec: Data type in which they are sent; None keeps it.

    Returns:
        An awaitable of ``[sum(counts)]``, rank 0's elements first. In a world of 1 it is ``mine``
        itself.
    """
    world_size = len(counts)
    if world_size == 1:
        return NoWait(mine)
    # An all-to-all of copies supports different sizes and costs no more than torch's all-gather.
    return all_to_all(
        mine.repeat(world_size), [mine.numel()] * world_size, counts, group, stage, codec
    )


def number_of_next_exchange(group: dist.ProcessGroup) -> int:
    """Number the exchanges of a group 1, 2, 3, ..., the same on ranks that build them alike."""
    _exchanges[group] = number = _exchanges.get(group, 0) + 1
    return number


def default_group() -> dist.ProcessGroup | None:
    """The group of all ranks, or None before a process group has been started."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def announce(group: dist.ProcessGroup, stage: str, bytes_to: Sequence[int]) -> None:
    """Tell the observers of a collective that this rank is about to issue.

    Args:
        group: The ranks.
        stage: The name under which the bytes are counted.
        bytes_to: Bytes for each rank, W numbers; this rank's own are not counted.
    """
    check_thread(group)
    note(stage)
    if observers:
        ranks = dist.get_process_group_ranks(group)
        me = group.rank()
        sent = tuple((ranks[peer], count) for peer, count in enumerate(bytes_to) if peer != me)
        issue = Issue(stage, ranks[me], sent)
        for observer in tuple(observers):
            observer(issue)


def check_thread(group: dist.ProcessGroup) -> None:
    """Raise if a second thread of this rank issues collectives on a group.

    Raises:
        RuntimeError: Another thread, which is still alive, has issued before.
    """
    thread = threading.get_ident()
    owner = _issuing_thread.get(group)
    if owner == thread:
        return
    if owner is None:
        _issuing_thread[group] = thread
        give_threads_time(group)
        return

    # Autograd's device threads are not Python threads (dummies at most, where one has logged).
    # While one of them issues, the thread that called backward() waits, so the order is still that
    # of one thread.
    threads = (
        other for other in threading.enumerate() if not isinstance(other, threading._DummyThread)
    )
    alive = {other.ident: other.name for other in threads}

    if thread not in alive:
        return
    if owner not in alive:
        _issuing_thread[group] = thread
        return
    raise RuntimeError(
        f"thread {alive[thread]!r} issues a collective on a process group whose collectives come "
        f"from thread {alive[owner]!r}: ranks match collectives by order, so two threads would "
        "swap each other's results; give this thread a group of its own: "
        "torch.distributed.new_group()"
    )


# --- messages that are rare and small, and block


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup, stage: str) -> None:
    """Overwrite a tensor on every rank with that of one rank. Blocks.

    The source sends the tensor to each other rank.

    Args:
        tensor: Same shape and dtype on every rank; written in place.
        source: The rank of ``group`` whose values are used.
        group: The ranks.
        stage: The name under which the bytes are counted.
    """
    world_size = group.size()
    if world_size == 1:
        return
    size = tensor.numel() * tensor.element_size() if group.rank() == source else 0
    announce(group, stage, [size] * world_size)
    dist.broadcast(tensor, dist.get_global_rank(group, source), group)


def message_device(group: dist.ProcessGroup) -> torch.device:
    """Device on which a message must be: the CPU, or the GPU if the group supports no other."""
    if backend_for(group, "cpu") is not None:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup, stage: str) -> Any:
    """Return a picklable object of one rank on every rank. Blocks; for rare, small messages.

    Args:
        value: The object; ignored on ranks other than ``source``.
        source: A rank of ``group``.
        group: The ranks.
        stage: The name under which the bytes are counted.

    Returns:
        The source's object: the same object on the source, a copy elsewhere.
    """
    if group.size() == 1:
        return value

    is_source = group.rank() == source
    device = message_device(group)
    pickled = (
        torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        if is_source
        else torch.empty(0)
    )
    size = torch.tensor([pickled.numel()], device=device)
    broadcast(size, source, group, stage)
    content = (
        pickled.to(device)
        if is_source
        else torch.empty(int(size), dtype=torch.uint8, device=device)
    )
    broadcast(content, source, group, stage)
    return value if is_source else pickle.loads(content.cpu().numpy().tobytes())


def all_gather_ints(values: Sequence[int], group: dist.ProcessGroup, stage: str) -> list[list[int]]:
    """The 64-bit integers of every rank, in rank order; every rank passes the same number of them.

    Blocks. Sends ``8 * len(values)`` bytes to each other rank.
    """
    world_size = group.size()
    if world_size == 1:
        return [list(values)]

    announce(group, stage, [8 * len(values)] * world_size)
    device = message_device(group)
    own = torch.tensor(values, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own, group)
    return torch.stack(gathered).tolist()


def all_gather_objects(value: Any, group: dist.ProcessGroup, stage: str) -> list[Any]:
    """A picklable object of every rank, in rank order. Blocks; for rare, small messages."""
    world_size = group.size()
    if world_size == 1:
        return [value]

    announce(group, stage, [0] * world_size)
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group)
    return gathered
