"""How rows move between ranks, as flat tensors: to one rank each, into a sum, into sums per host.

Each of these is an `Exchange`: a move and the move of the gradient back. They know counts of elements and no shapes;
`pooled.py` and `sequence.py` know whose elements those are, and divide the gradient by W where they lay it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import Exchange, gradient_divisor
from tutorec.distributed.qcomm import CommCodec, QuantizedCommCodecs

ROWS_STAGE = "output rows"
GRADIENTS_STAGE = "output gradients"

_AS_THEY_ARE = QuantizedCommCodecs()


class Then(Awaitable[Any]):
    """What ``finish`` makes of a tensor, or of slices, once they have arrived.

    Example:
        >>> from tutorec.awaitable import NoWait
        >>> Then(NoWait(torch.tensor([1, 2])), torch.sum).wait()
        tensor(3)
    """

    def __init__(self, arriving: Awaitable[Any], finish: Callable[[Any], Any]) -> None:
        self._steps: tuple[Awaitable[Any], Callable[[Any], Any]] | None = (arriving, finish)

    def _wait_impl(self) -> torch.Tensor:
        assert self._steps is not None, "a value is computed once; wait() remembers it"
        arriving, finish = self._steps
        self._steps = None
        return finish(arriving.wait())


class RowsToRanks(Exchange):
    """Slice r of what I have goes to rank r.

    Args:
        group: The ranks.
        counts_out: Elements for each rank: W numbers.
        counts_in: Elements from each rank: W numbers.
        codecs: In what type they travel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        counts_out: Sequence[int],
        counts_in: Sequence[int],
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        self._group, self._out, self._in = group, counts_out, counts_in
        self._codecs = codecs or _AS_THEY_ARE

    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[sum(counts_out)]`` -> promise of ``[sum(counts_in)]``."""
        flat = _flat(sent, self._out)
        return _all_to_all(flat, self._out, self._in, self._group, ROWS_STAGE, self._codecs.forward)

    def issue_slices(self, sent: torch.Tensor) -> Awaitable[Sequence[torch.Tensor]]:
        """``[sum(counts_out)]`` -> promise of what each rank has sent."""
        if self._codecs.forward is None:
            flat = _flat(sent, self._out)
            return comm.all_to_all_slices(flat, self._out, self._in, self._group, ROWS_STAGE)
        return Then(self.issue(sent), lambda arrived: arrived.split(self._in))

    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[sum(counts_in)]`` -> promise of ``[sum(counts_out)]``."""
        flat = _flat(gradient, self._in)
        return _all_to_all(flat, self._in, self._out, self._group, GRADIENTS_STAGE, self._codecs.backward)


class RowsIntoSum(Exchange):
    """Slice r of what every rank has is summed on rank r.

    Args:
        group: The ranks.
        counts: Elements of each rank's slice: W numbers.
        codecs: In what type they travel.
    """

    def __init__(self, group: dist.ProcessGroup, counts: Sequence[int], codecs: QuantizedCommCodecs | None) -> None:
        self._group, self._counts = group, counts
        self._codecs = codecs or _AS_THEY_ARE

    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[sum(counts)]`` -> promise of ``[counts[me]]``, summed in rank order."""
        flat = _flat(sent, self._counts)
        return _reduce_scatter(flat, self._counts, self._group, ROWS_STAGE, self._codecs.forward)

    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[counts[me]]`` -> promise of ``[sum(counts)]``: every rank gets every slice's gradient."""
        flat = gradient.reshape(-1).contiguous()
        return _all_gather(flat, self._counts, self._group, GRADIENTS_STAGE, self._codecs.backward)


class RowsIntoHostSums(Exchange):
    """Slice r of what the ranks of a host have is summed in the host, and the sums of all hosts go to rank r.

        rank (h, l), L ranks on each of H hosts     slices for every rank
          | reduce-scatter inside the host          I sum the slices for ranks (0, l) ... (H-1, l)
          | all-to-all across hosts                 slice (h', l) goes to its rank
        H slices for me, one from each host

    So that each sum crosses between hosts once, and not once for each rank that holds a part of it.

    Args:
        hosts: The groups of this rank's host, and of its number on every host.
        counts_out: Elements of each rank's slice: W numbers, the same on the ranks of a host.
        counts_in: Elements that arrive from each host: H numbers.
        codecs: In what type they travel; both steps round.
    """

    def __init__(
        self,
        hosts: comm.HostGroups,
        counts_out: Sequence[int],
        counts_in: Sequence[int],
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        local_size, host_count = hosts.intra.size(), len(counts_in)
        assert len(counts_out) == local_size * host_count, f"{len(counts_out)} ranks, {host_count} x {local_size}"
        self._hosts, self._in = hosts, counts_in
        self._codecs = codecs or _AS_THEY_ARE
        # Slices stand host by host; the sum inside the host wants those of one local number together.
        self._by_rank = list(counts_out)
        self._by_place = [self._by_rank[place::local_size] for place in range(local_size)]
        self._sums = [sum(counts) for counts in self._by_place]
        self._across = self._by_place[hosts.intra.rank()]

    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[sum(counts_out)]`` -> promise of ``[sum(counts_in)]``; the second step is issued by waiting."""
        slices, local_size = _flat(sent, self._by_rank).split(self._by_rank), len(self._by_place)
        flat = torch.cat([each for place in range(local_size) for each in slices[place::local_size]])
        codec = self._codecs.forward
        summed = _reduce_scatter(flat, self._sums, self._hosts.intra, ROWS_STAGE, codec)
        return _Chained(
            summed, lambda own: _all_to_all(own, self._across, self._in, self._hosts.cross, ROWS_STAGE, codec)
        )

    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        """``[sum(counts_in)]`` -> promise of ``[sum(counts_out)]``; the second step is issued by waiting."""
        flat, codec = _flat(gradient, self._in), self._codecs.backward
        own = _all_to_all(flat, self._in, self._across, self._hosts.cross, GRADIENTS_STAGE, codec)
        spread = _Chained(own, lambda mine: _all_gather(mine, self._sums, self._hosts.intra, GRADIENTS_STAGE, codec))
        return Then(spread, self._host_by_host)

    def _host_by_host(self, flat: torch.Tensor) -> torch.Tensor:
        host_count = len(self._in)
        slices = flat.split([count for counts in self._by_place for count in counts])
        return torch.cat([each for host in range(host_count) for each in slices[host::host_count]])


class FlatMove(Exchange):
    """A move of flat rows whose gradient is divided on the way back, by W unless the ranks' sum was asked for.

    Args:
        move: One of those above.
        world_size: W.
    """

    def __init__(self, move: Exchange, world_size: int) -> None:
        self._move, self._world_size = move, world_size

    def issue(self, sent: torch.Tensor) -> Awaitable[torch.Tensor]:
        """As the move."""
        return self._move.issue(sent)

    def issue_back(self, gradient: torch.Tensor) -> Awaitable[torch.Tensor]:
        """As the move, of the gradient divided."""
        return self._move.issue_back(gradient / gradient_divisor(self._world_size))


class _Chained(Awaitable[torch.Tensor]):
    """A move that starts when the one before it has arrived."""

    def __init__(self, first: Awaitable[torch.Tensor], then: Callable[[torch.Tensor], Awaitable[torch.Tensor]]) -> None:
        self._steps = (first, then)

    def _wait_impl(self) -> torch.Tensor:
        first, then = self._steps
        return then(first.wait()).wait()


def _flat(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """``values`` as one contiguous row of numbers, outside of the graph."""
    assert values.numel() == sum(counts), f"{tuple(values.shape)} are {values.numel()} elements, planned {list(counts)}"
    # A slice [N, 1] of a wider tensor reshapes to a row with gaps.
    return values.detach().reshape(-1).contiguous()


def _all_to_all(
    flat: torch.Tensor,
    counts_out: Sequence[int],
    counts_in: Sequence[int],
    group: dist.ProcessGroup,
    stage: str,
    codec: CommCodec | None,
) -> Awaitable[torch.Tensor]:
    if codec is None or len(counts_out) == 1:
        return comm.all_to_all(flat, counts_out, counts_in, group, stage)
    return _decoded(comm.all_to_all(codec.encode(flat), counts_out, counts_in, group, stage), codec, flat.dtype)


def _reduce_scatter(
    flat: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup, stage: str, codec: CommCodec | None
) -> Awaitable[torch.Tensor]:
    if codec is None or len(counts) == 1:
        summed = comm.reduce_scatter(flat, counts, group, stage)
        # Narrow rows are summed in float32 and are again what they were.
        return summed if flat.element_size() >= 4 else Then(summed, lambda total: total.to(flat.dtype))
    return _decoded(comm.reduce_scatter(codec.encode(flat), counts, group, stage), codec, flat.dtype)


def _all_gather(
    flat: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup, stage: str, codec: CommCodec | None
) -> Awaitable[torch.Tensor]:
    if codec is None or len(counts) == 1:
        return comm.all_gather(flat, counts, group, stage)
    return _decoded(comm.all_gather(codec.encode(flat), counts, group, stage), codec, flat.dtype)


def _decoded(arriving: Awaitable[torch.Tensor], codec: CommCodec, dtype: torch.dtype) -> Awaitable[torch.Tensor]:
    return Then(arriving, lambda arrived: codec.decode(arrived, dtype))


__all__ = ["GRADIENTS_STAGE", "ROWS_STAGE", "FlatMove", "RowsIntoHostSums", "RowsIntoSum", "RowsToRanks", "Then"]
