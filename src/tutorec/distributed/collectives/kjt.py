"""Ids travel to the rank that owns their table, in two rounds (three with weights, one more with variable batch).

Round 1 tells every rank how much it is going to receive: three integers per peer. Round 2 sends lengths and ids in one
packed buffer, since a round costs more than what is in it. Weights are a third, issued together with the second. Where
features have different numbers of samples on any rank, all ranks exchange those between the two.

    what I send to rank r     [lengths of r's slots, F_r * B | their ids, N_r]        one slice of the buffer
    what I receive from s     [lengths of my slots, F * B_s  | their ids, N_s]
    what I make of it         F slots, sum of B_s samples, samples of rank 0 first

A slot is one feature on one rank (`collectives/slots.py`). Ranks may differ in B and in the dtype of their ids: all ids
travel in the widest dtype that any rank uses, or in the one that is agreed upon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutorec._kernels.jagged import lengths_to_offsets
from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed import comm
from tutorec.distributed.collectives.slots import Slots, feature_major
from tutorec.sparse.deferred import report
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import ints_on_device, offsets_at, running_sum

SIZES_STAGE = "input sizes"
STRIDES_STAGE = "input strides"
IDS_STAGE = "input ids"
WEIGHTS_STAGE = "input weights"

# Ids of one peer, its samples, and its format: the bytes of one of its ids, two flags, and the exchange's number.
SIZES_PER_PEER = 3
_ITEMSIZE, _VARIABLE, _WEIGHTED, _NUMBER = 15, 16, 32, 8


class KJTAllToAll(nn.Module):
    """My samples, every feature -> every sample, my features.

    Rank r sends rank s ``24`` bytes of sizes, then ``itemsize * (F_s * B_r + N_rs)`` bytes of lengths and ids, with
    weights ``4 * N_rs`` more, with variable batch ``8 * F_s`` more (and the sum of s's strides in place of F_s * B_r).

    Args:
        pg: The ranks; None in a world of 1.
        splits: F_r, how many slots each rank has: W numbers.
        stagger: Whose samples come first where they arrive: with W ranks of which every ``W / stagger`` share a host,
            the first rank of each host, then the second of each, ...; 1 is the order of ranks.
        order: For each slot, rank after rank, the position of its key in the batch that is passed in; a key may stand
            there several times or not at all. None: the keys as they stand. No permuted copy of the batch is made.
        ids_dtype: What ids travel and arrive in; they must fit, which is not looked at. None: the widest of the ranks.
            A world of 1 changes no dtype.

    Raises:
        ValueError: The numbers do not fit each other.

    Example:
        >>> batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
        >>> KJTAllToAll(None, [3], order=[1, 0, 1])(batch).wait().wait().values()
        tensor([2, 3, 1, 2, 3])

    Source:
        TorchRec's ``torchrec.distributed.dist_data.KJTAllToAll``, which takes one round more and wants a batch in
        which each key stands once, in rank order.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        splits: Sequence[int],
        stagger: int = 1,
        *,
        order: Sequence[int] | None = None,
        ids_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        world_size = 1 if pg is None else pg.size()
        if len(splits) != world_size:
            raise ValueError(f"splits {list(splits)} are for {len(splits)} ranks, and there are {world_size}")
        if stagger < 1 or world_size % stagger:
            raise ValueError(f"stagger {stagger} does not divide the {world_size} ranks into equal hosts")
        if ids_dtype not in (None, torch.int32, torch.int64):
            raise ValueError(f"ids travel as torch.int32 or torch.int64, not as {ids_dtype}")
        self._pg = pg
        self._slots = Slots(splits, order)
        self._ids_dtype = ids_dtype
        # Ranks that are at different exchanges would read each other's ids. A module numbers its own, the same way on
        # every rank; 0 says nothing.
        self.number: int = 0
        self.title: str = ""
        local = world_size // stagger
        self._ranks = [host * local + rank for rank in range(local) for host in range(stagger)]

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[KJTArrival]:
        """Issue round 1. Waiting for the result issues round 2; waiting for that gives the batch.

        Raises:
            ValueError: The batch has not the keys that are to be sent; or, at the first wait and on every rank, some
                ranks' batches have weights and others' have none.
            TypeError: Ids are no integers.
        """
        if not isinstance(features, KeyedJaggedTensor):
            raise TypeError(f"ids are exchanged as a KeyedJaggedTensor, got {type(features).__name__}")
        self._slots.check(features.keys())
        values = features.values()
        if values.is_floating_point() and values.numel():
            raise TypeError(f"the batch holds {values.dtype} where ids are due: {features.keys()}; give integers")
        if self._pg is None or len(self._ranks) == 1:
            return NoWait(KJTArrival.at_home(features, self._slots))
        return _Sizes(self._pg, self._slots, features, self._ids_dtype, self._ranks, (self.number, self.title))

    def send_status(self, status: int) -> Awaitable[Any]:
        """Take part in round 1 without a batch, and tell the other ranks why.

        Args:
            status: A negative number, which waiting raises on every rank.

        Raises:
            RanksWithoutBatch: At the wait.
        """
        if self._pg is None or len(self._ranks) == 1:
            return NoWait(None)
        return _Status(self._pg, status)


class RanksWithoutBatch(Exception):
    """Some ranks had no batch to send. All ranks raise it at the wait for round 1, and none sends round 2.

    Args:
        statuses: What each rank has said, W numbers; None of a rank that has a batch.
    """

    def __init__(self, statuses: Sequence[int | None]) -> None:
        without = [rank for rank, status in enumerate(statuses) if status is not None]
        super().__init__(
            f"ranks {without} have no batch for this exchange: their iterators have ended, or failed; give every rank "
            "as many batches as the others"
        )
        self.statuses = list(statuses)


@dataclass(frozen=True)
class ArrivedIds:
    """Ids in the order in which they came: rank after rank, slot after slot.

    Args:
        values: ``[N]``.
        counts: Ids of each rank and slot, ``[W][F]``.
    """

    values: torch.Tensor
    counts: list[list[int]]


@dataclass(frozen=True)
class _Arriving:
    """What round 1 has told.

    Args:
        keys: Of my slots.
        samples: B of every rank.
        strides: Samples of each rank and slot ``[W][F]`` where they differ by feature.
        ids: N_s, ids of every rank.
        ranks: Whose samples come first: a permutation of the ranks.
    """

    keys: list[str]
    samples: list[int]
    strides: list[list[int]] | None
    ids: list[int]
    ranks: list[int]

    def lists(self) -> list[int]:
        """Lists of ids of every rank."""
        if self.strides is not None:
            return [sum(of_rank) for of_rank in self.strides]
        return [len(self.keys) * samples for samples in self.samples]


class KJTArrival(Awaitable[KeyedJaggedTensor]):
    """A batch on its way, of which the sizes are known.

    ``wait()`` gives my slots, feature-major, with the samples of rank 0 first; a key may stand in it twice.

    Args:
        arriving: The sizes.
        packed: The buffer that arrives.
        weights: The weights that arrive, or None.
        slots: What I sent.
        starts: Where the ids of each key of the batch begin that I sent, ``[F + 1]``.

    Attributes:
        batch_size_per_rank: B of every rank, W numbers: whose samples the arriving ones are.
        batch_size_per_rank_per_feature: With variable batch the samples of each rank and slot, ``[W][F]``, else None.
    """

    def __init__(
        self,
        arriving: _Arriving,
        packed: Awaitable[torch.Tensor] | None,
        weights: Awaitable[torch.Tensor] | None,
        slots: Slots,
        starts: list[int] | None,
    ) -> None:
        self.batch_size_per_rank = arriving.samples
        self.batch_size_per_rank_per_feature = arriving.strides
        self._arriving = arriving
        self._packed = packed
        self._weights = weights
        self._sent = (slots, starts)

    @classmethod
    def at_home(cls, features: KeyedJaggedTensor, slots: Slots) -> KJTArrival:
        """In a world of 1 the batch has nowhere to go."""
        if not slots.is_identity or slots.needs != len(features.keys()):
            features = features.permute(slots.positions_of(0))
        strides = [features.stride_per_key()] if features.variable_stride_per_key() else None
        arrival = cls(_Arriving(features.keys(), [features.stride()], strides, [], [0]), None, None, slots, None)
        arrival._awaited = features
        return arrival

    def sent_counts(self) -> list[list[int]]:
        """Ids that I sent to each rank, slot by slot: ``[W][F_r]``."""
        slots, starts = self._sent
        return [self._awaited.length_per_key()] if starts is None else slots.per_slot(starts)

    def wait_by_rank(self) -> ArrivedIds:
        """The ids in order of arrival, nothing reordered: for rows that are sent back one by one."""
        if self._packed is None:
            features = self.wait()
            return ArrivedIds(features.values(), [features.length_per_key()])
        lengths, values = self._slices(self._packed.wait())
        return ArrivedIds(torch.cat(values), self._counts(lengths))

    def _wait_impl(self) -> KeyedJaggedTensor:
        assert self._packed is not None, "only a batch at home has no buffer, and it needs no wait"
        arriving = self._arriving
        lengths, values = self._slices(self._packed.wait())
        weights = list(self._weights.wait().split_with_sizes(arriving.ids)) if self._weights is not None else None
        counts, ranks = self._counts(lengths), arriving.ranks

        def arranged(parts: list[torch.Tensor], sizes: list[list[int]]) -> torch.Tensor:
            if len(arriving.keys) <= 1:
                return torch.cat([parts[rank] for rank in ranks])
            return feature_major([parts[rank] for rank in ranks], [sizes[rank] for rank in ranks])

        strides = None
        if arriving.strides is None:
            by_feature = [lengths[rank].view(len(arriving.keys), arriving.samples[rank]) for rank in ranks]
            all_lengths = torch.cat(by_feature, dim=1).view(-1)
        else:
            all_lengths = arranged(lengths, arriving.strides)
            strides = torch.tensor([arriving.strides[rank] for rank in ranks], dtype=torch.int32).t().contiguous()
        return KeyedJaggedTensor._from_parts(
            arriving.keys,
            arranged(values, counts),
            None if weights is None else arranged(weights, counts),
            all_lengths,
            None,
            sum(arriving.samples) if strides is None else None,
            [sum(of_slot) for of_slot in zip(*counts, strict=True)],
            strides,
        )

    def _slices(self, packed: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Lengths and ids of every rank."""
        sizes = [size for pair in zip(self._arriving.lists(), self._arriving.ids, strict=True) for size in pair]
        slices = list(packed.split_with_sizes(sizes))
        return slices[::2], slices[1::2]

    def _counts(self, lengths: list[torch.Tensor]) -> list[list[int]]:
        """Ids of each rank and slot ``[W][F]``. A sync point, unless there is one slot at most."""
        arriving = self._arriving
        slots = len(arriving.keys)
        if slots <= 1:
            return [[count] * slots for count in arriving.ids]
        if arriving.strides is None:
            return torch.stack([part.view(slots, -1).sum(dim=1) for part in lengths]).tolist()
        bounds = running_sum([samples for of_rank in arriving.strides for samples in of_rank])
        starts = offsets_at(lengths_to_offsets(torch.cat(lengths).long()), bounds)
        flat = [end - start for start, end in pairwise(starts)]
        return [flat[first : first + slots] for first in range(0, len(flat), slots)]


class _Status(Awaitable[None]):
    """Round 1 of a rank without a batch, in flight."""

    def __init__(self, group: dist.ProcessGroup, status: int) -> None:
        device, world_size = comm.message_device(group), group.size()
        sizes = ints_on_device([(0, 0, status << _NUMBER)] * world_size, torch.int64, device)
        each = [SIZES_PER_PEER] * world_size
        self._sizes = comm.all_to_all(sizes.view(-1), each, each, group, SIZES_STAGE)

    def _wait_impl(self) -> None:
        _check_exchange([form >> _NUMBER for form in self._sizes.wait()[2::SIZES_PER_PEER].tolist()], 0, "")


class _Sizes(Awaitable[KJTArrival]):
    """Round 1 in flight; to wait for it is to issue round 2."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots: Slots,
        features: KeyedJaggedTensor,
        ids_dtype: torch.dtype | None,
        ranks: list[int],
        identity: tuple[int, str],
    ) -> None:
        self._group, self._slots, self._features, self._ranks = group, slots, features, ranks
        self._identity = identity
        self._starts = features.offset_per_key()
        self._counts = slots.sums(self._starts)
        samples, values = features.stride(), features.values()
        form = (ids_dtype or values.dtype).itemsize
        form |= _VARIABLE if features.variable_stride_per_key() else 0
        form |= _WEIGHTED if features.weights_or_none() is not None else 0
        form |= identity[0] << _NUMBER
        sizes = ints_on_device([(count, samples, form) for count in self._counts], torch.int64, values.device)
        each = [SIZES_PER_PEER] * len(self._counts)
        self._sizes = comm.all_to_all(sizes.view(-1), each, each, group, SIZES_STAGE)

    def _wait_impl(self) -> KJTArrival:
        arriving = self._sizes.wait().view(-1, SIZES_PER_PEER).tolist()
        report()  # the device was waited for, and with it the check of these ids: no id that no table has is sent
        ids, samples, forms = (list(column) for column in zip(*arriving, strict=True))
        _check_exchange([form >> _NUMBER for form in forms], *self._identity)
        _check_weights(forms)
        # Every rank sees the same W forms, so that all take the same rounds and choose the same dtype.
        strides = self._exchange_strides() if any(form & _VARIABLE for form in forms) else None
        dtype = torch.int64 if max(form & _ITEMSIZE for form in forms) > 4 else torch.int32
        group, slots, features, counts = self._group, self._slots, self._features, self._counts
        keys = features.keys()
        sizes = _Arriving([keys[at] for at in slots.positions_of(group.rank())], samples, strides, ids, self._ranks)
        lists_out = slots.sums(features.lengths_offset_per_key())
        out = [lists + count for lists, count in zip(lists_out, counts, strict=True)]
        into = [lists + count for lists, count in zip(sizes.lists(), ids, strict=True)]
        packed = comm.all_to_all(slots.pack(features, dtype), out, into, group, IDS_STAGE)
        weights = features.weights_or_none()
        if weights is not None:
            gathered = slots.gather(weights.float(), self._starts)
            weights = comm.all_to_all(gathered, counts, ids, group, WEIGHTS_STAGE)
        return KJTArrival(sizes, packed, weights, slots, self._starts)

    def _exchange_strides(self) -> list[list[int]]:
        """Samples of each rank and slot of mine ``[W][F]``: the round that variable batch takes more. Blocks."""
        mine = self._slots.splits[self._group.rank()]
        sent = [
            samples for of_rank in self._slots.per_slot(self._features.lengths_offset_per_key()) for samples in of_rank
        ]
        flat = ints_on_device(sent, torch.int64, self._features.device())
        into = [mine] * len(self._slots.splits)
        arrived = comm.all_to_all(flat, self._slots.splits, into, self._group, STRIDES_STAGE).wait().tolist()
        return [arrived[rank * mine : (rank + 1) * mine] for rank in range(len(into))]


def _check_exchange(numbers: Sequence[int], mine: int, title: str) -> None:
    """Refuse, on every rank alike, that ranks have no batch, or are at different exchanges."""
    if min(numbers) < 0:
        raise RanksWithoutBatch([number if number < 0 else None for number in numbers])
    others = [rank for rank, number in enumerate(numbers) if number != mine]
    if others:
        raise ValueError(
            f"this rank sends ids of {title or 'an exchange without a number'}, which is exchange {mine}, and rank "
            f"{others[0]} is at exchange {numbers[others[0]]}: call sharded collections in the same order on every "
            "rank (a loop over a set has none)"
        )


def _check_weights(forms: Sequence[int]) -> None:
    """Refuse, on every rank alike, that some ranks send weights and others wait for none."""
    with_weights = [rank for rank, form in enumerate(forms) if form & _WEIGHTED]
    if 0 < len(with_weights) < len(forms):
        without = [rank for rank in range(len(forms)) if rank not in with_weights]
        raise ValueError(
            f"the batches of ranks {with_weights} have weights, those of ranks {without} have none: "
            "give every rank's batch weights=, or none of them"
        )


__all__ = ["ArrivedIds", "KJTAllToAll", "KJTArrival", "RanksWithoutBatch"]
