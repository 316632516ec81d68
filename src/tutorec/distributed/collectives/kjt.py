"""The exchange of ids: they are sent to the ranks that own their tables.

It takes two rounds, three with weights, and one more with a variable batch. Round 1 tells every
rank how much it will receive: three integers per peer. Round 2 sends lengths and ids in one packed
buffer, since a round has a high fixed cost. Weights are sent in a third round, issued together with
the second. If features have different numbers of samples on some rank, all ranks exchange those
numbers between rounds 1 and 2.

::

    sent to rank r            [lengths of r's slots, F_r * B    | their ids, N_r]  one buffer slice
    received from rank s      [lengths of local slots, F * B_s  | their ids, N_s]
    result                    F slots, sum of B_s samples, samples of rank 0 first

A *slot* is one feature on one rank: a feature that two ranks look up, or two tables of one rank,
has two slots (`SendOrder`). Ranks may have different B and id dtypes: ids are sent in the widest
dtype of all ranks, or in the agreed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutorec._kernels.jagged import lengths_to_offsets
from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed import comm
from tutorec.sparse.deferred import raise_deferred_id_errors
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import ids_by_offsets, ints_on_device

SIZES_STAGE = "input sizes"
STRIDES_STAGE = "input strides"
IDS_STAGE = "input ids"
WEIGHTS_STAGE = "input weights"

# For one peer: its ids, its samples, and its format.
SIZES_PER_PEER = 3
# The format in bits: bytes per id, two flags, and above them the number of the exchange.
_ITEMSIZE_MASK = 0x0F
_VARIABLE_FLAG = 0x10
_WEIGHTED_FLAG = 0x20
_NUMBER_SHIFT = 8


class KJTAllToAll(nn.Module):
    """Local samples, all features -> all samples, local features.

    Rank r sends rank s 24 bytes of sizes, then ``itemsize * (F_s * B_r + N_rs)`` bytes of lengths
    and ids. Weights add ``4 * N_rs`` bytes. A variable batch adds ``8 * F_s`` bytes, and the sum of
    the strides of s's slots replaces ``F_s * B_r``.

    Args:
        pg: The ranks; None in a world of 1.
        splits: F_r, the number of slots of each rank: W numbers.
        stagger: Order of the received samples: with hosts of ``W / stagger`` ranks, those of the
            first rank of each host, then those of the second of each, and so on. 1 is rank order.
        order: For each slot, rank after rank, the position of its key in the input batch. A key may
            occur several times or not at all; None takes the keys in order. No permuted copy of the
            batch is made.
        ids_dtype: Dtype in which ids are sent and received. Ids must fit, which is not checked.
            None for the widest dtype of the ranks. A world of 1 keeps the dtype.

    Raises:
        ValueError: ``splits``, ``stagger``, ``order`` and the number of ranks do not match.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2])
        ... )
        >>> KJTAllToAll(None, [3], order=[1, 0, 1])(batch).wait().wait().values()
        tensor([2, 3, 1, 2, 3])

    Source:
        TorchRec's ``torchrec.distributed.dist_data.KJTAllToAll``, which takes one more round and
        needs a batch with each key once, in rank order.
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
            raise ValueError(
                f"splits {list(splits)} are for {len(splits)} ranks, and there are {world_size}"
            )
        if stagger < 1 or world_size % stagger:
            raise ValueError(f"stagger {stagger} does not divide the {world_size} ranks into hosts")

        self._pg = pg
        self._send_order = SendOrder(splits, order)
        self._ids_dtype = ids_dtype
        # Ranks at different exchanges would read each other's ids, so a module numbers its
        # exchanges in the same way on every rank. 0 means that no rank numbers them.
        self.number: int = 0
        self.title: str = ""

        local = world_size // stagger
        self._ranks = [host * local + rank for rank in range(local) for host in range(stagger)]

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[KJTArrival]:
        """Issue round 1. Waiting for the result issues round 2; waiting for that returns the batch.

        Raises:
            ValueError: The keys of the batch are not those to send; or, at the first wait and on
                every rank, the batches of some ranks have weights and those of others do not.
            TypeError: Ids are not integers.
        """
        self._send_order.check(features.keys())
        values = features.values()
        if values.is_floating_point() and values.numel():
            raise TypeError(
                f"the batch has values of {values.dtype}, which cannot be ids: "
                f"{features.keys()}; give integers"
            )

        if self._pg is None or len(self._ranks) == 1:
            return NoWait(KJTArrival.of_one_rank(features, self._send_order))

        form = (self._ids_dtype or values.dtype).itemsize | self.number << _NUMBER_SHIFT
        if features.variable_stride_per_key():
            form |= _VARIABLE_FLAG
        if features.weights_or_none() is not None:
            form |= _WEIGHTED_FLAG
        counts = self._send_order.sums(features.length_per_key())
        message = ints_on_device(
            [(count, features.stride(), form) for count in counts], torch.int64, values.device
        )
        return KJTSizesAwaitable(self, self._pg, features, counts, message)

    def send_ids(
        self,
        group: dist.ProcessGroup,
        features: KeyedJaggedTensor,
        counts: Sequence[int],
        sizes: Sequence[Sequence[int]],
    ) -> KJTArrival:
        """Issue round 2, and round 3 with weights.

        Args:
            group: The ranks.
            features: The batch.
            counts: Ids for each rank, W numbers.
            sizes: What round 1 brought: ids, samples and format of each rank, ``[W][3]``.

        Raises:
            ValueError: Only some ranks send weights, or a rank is at another exchange.
        """
        ids = [size[0] for size in sizes]
        samples = [size[1] for size in sizes]
        forms = [size[2] for size in sizes]
        _check_exchange([form >> _NUMBER_SHIFT for form in forms], self.number, self.title)
        _check_weights(forms)

        # Every rank sees the same W formats, so all take the same rounds and choose the same dtype.
        send_order = self._send_order
        strides = None
        if any(form & _VARIABLE_FLAG for form in forms):
            strides = _exchange_strides(group, send_order, features)
        widest = max(form & _ITEMSIZE_MASK for form in forms)
        dtype = torch.int64 if widest > 4 else torch.int32

        keys = features.keys()
        local_keys = [keys[position] for position in send_order.positions_of(group.rank())]
        sent_counts = send_order.per_slot(features.length_per_key())
        arrival = KJTArrival(local_keys, samples, strides, ids, self._ranks, sent_counts)

        bags = send_order.sums(features.stride_per_key())
        arrival.packed = comm.all_to_all(
            send_order.pack(features, dtype),
            [*map(add, bags, counts)],
            [*map(add, arrival.bags(), ids)],
            group,
            IDS_STAGE,
        )
        weights = features.weights_or_none()
        if weights is not None:
            gathered = send_order.gather(weights.float(), features.length_per_key())
            arrival.weights = comm.all_to_all(gathered, counts, ids, group, WEIGHTS_STAGE)
        return arrival

    def send_status(self, status: int, device: torch.device) -> Awaitable[Any]:
        """Take part in round 1 without a batch, and report why.

        Args:
            status: A negative number, which every rank's wait raises.
            device: That of the other ranks' batches: a group may carry tensors of the CPU and of
                GPUs by different backends, which do not meet.

        Raises:
            RanksWithoutBatch: At the wait.
        """
        if self._pg is None or len(self._ranks) == 1:
            return NoWait(None)

        group = self._pg
        message = ints_on_device(
            [(0, 0, status << _NUMBER_SHIFT)] * group.size(), torch.int64, device
        )
        return KJTStatusAwaitable(group, message)


class KJTSizesAwaitable(Awaitable["KJTArrival"]):
    """Round 1 in flight; waiting for it sends the ids.

    Args:
        exchange: The exchange.
        group: The ranks.
        features: The batch.
        counts: Ids for each rank, W numbers.
        message: What each rank is told, ``[W, SIZES_PER_PEER]``.
    """

    def __init__(
        self,
        exchange: KJTAllToAll,
        group: dist.ProcessGroup,
        features: KeyedJaggedTensor,
        counts: Sequence[int],
        message: torch.Tensor,
    ) -> None:
        self._exchange = exchange
        self._group = group
        self._features = features
        self._counts = counts
        self._sizes = _send_sizes(group, message)

    def _wait_impl(self) -> KJTArrival:
        sizes = self._sizes.wait().view(-1, SIZES_PER_PEER).tolist()
        features = self._features
        del self._features

        if not features.values().is_cpu:
            # The device is synchronized, so its id check is done: no bad id is sent.
            raise_deferred_id_errors()
        return self._exchange.send_ids(self._group, features, self._counts, sizes)


class KJTStatusAwaitable(Awaitable[None]):
    """Round 1 in flight, of a rank without a batch; waiting for it raises.

    Args:
        group: The ranks.
        message: What each rank is told, ``[W, SIZES_PER_PEER]``.
    """

    def __init__(self, group: dist.ProcessGroup, message: torch.Tensor) -> None:
        self._sizes = _send_sizes(group, message)

    def _wait_impl(self) -> None:
        forms = self._sizes.wait()[2::SIZES_PER_PEER].tolist()
        _check_exchange([form >> _NUMBER_SHIFT for form in forms], 0, "")


class RanksWithoutBatch(Exception):
    """Raised on all ranks when they wait for round 1, if some of them have no batch to send.

    Args:
        statuses: The status of each rank, W numbers; None for a rank with a batch.
    """

    def __init__(self, statuses: Sequence[int | None]) -> None:
        without = [rank for rank, status in enumerate(statuses) if status is not None]
        super().__init__(
            f"ranks {without} have no batch for this exchange: their iterators have ended, or "
            "failed; give every rank as many batches as the others"
        )
        self.statuses = list(statuses)


@dataclass(frozen=True)
class ArrivedIds:
    """Ids in order of arrival: rank after rank, slot after slot.

    Args:
        values: ``[N]``.
        counts: Ids of each rank and slot, ``[W][F]``.
    """

    values: torch.Tensor
    counts: list[list[int]]


class KJTArrival(Awaitable[KeyedJaggedTensor]):
    """Awaitable of a batch in flight whose sizes are known.

    ``wait()`` returns the local slots, feature-major, with the samples of rank 0 first; a key may
    occur twice.

    Args:
        keys: Keys of the local slots.
        samples: B of every rank.
        strides: Samples of each rank and slot ``[W][F]`` if they differ by feature.
        ids: N_s, number of ids from every rank.
        ranks: Order of the samples: a permutation of the ranks.
        sent_counts: Ids sent to each rank, slot by slot: ``[W][F_r]``.

    Attributes:
        batch_size_per_rank: B of every rank, W numbers.
        batch_size_per_rank_per_feature: For a variable batch, the samples of each rank and slot,
            ``[W][F]``, else None.
        sent_counts: As given.
        packed: Received lengths and ids; None if nothing was sent.
        weights: Received weights, if any.
    """

    packed: Awaitable[torch.Tensor] | None = None
    weights: Awaitable[torch.Tensor] | None = None

    def __init__(
        self,
        keys: list[str],
        samples: list[int],
        strides: list[list[int]] | None,
        ids: list[int],
        ranks: list[int],
        sent_counts: list[list[int]],
    ) -> None:
        self.batch_size_per_rank = samples
        self.batch_size_per_rank_per_feature = strides
        self.sent_counts = sent_counts
        self._keys = keys
        self._ids = ids
        self._ranks = ranks

    @classmethod
    def of_one_rank(cls, features: KeyedJaggedTensor, send_order: SendOrder) -> KJTArrival:
        """The arrival of a batch in a world of 1, where nothing is sent."""
        if not send_order.is_identity or send_order.needs != len(features.keys()):
            features = features.permute(send_order.positions_of(0))

        strides = [features.stride_per_key()] if features.variable_stride_per_key() else None
        counts = [features.length_per_key()]
        arrival = cls(features.keys(), [features.stride()], strides, [], [0], counts)
        arrival._awaited = features
        return arrival

    def bags(self) -> list[int]:
        """Number of bags that every rank sends to the local slots."""
        if self.batch_size_per_rank_per_feature is not None:
            return [sum(samples) for samples in self.batch_size_per_rank_per_feature]
        return [len(self._keys) * samples for samples in self.batch_size_per_rank]

    def wait_by_rank(self) -> ArrivedIds:
        """Return the ids in order of arrival, for rows that are returned without pooling."""
        if self.packed is None:
            return ArrivedIds(self.wait().values(), self.sent_counts)
        lengths, values = self._slices(self.packed.wait())
        return ArrivedIds(torch.cat(values), self._counts(lengths))

    def _wait_impl(self) -> KeyedJaggedTensor:
        assert self.packed is not None, "only a batch of one rank has no buffer"
        lengths, values = self._slices(self.packed.wait())
        counts = self._counts(lengths)
        weights = None
        if self.weights is not None:
            received = self.weights.wait().split_with_sizes(self._ids)
            weights = self._feature_major(received, counts)

        samples = self.batch_size_per_rank
        strides = self.batch_size_per_rank_per_feature
        if strides is None:
            stride = sum(samples)
            strides_per_key = None
            by_feature = [
                lengths[rank].view(len(self._keys), samples[rank]) for rank in self._ranks
            ]
            all_lengths = torch.cat(by_feature, dim=1).view(-1)
        else:
            stride = None
            by_rank = [strides[rank] for rank in self._ranks]
            strides_per_key = torch.tensor(by_rank, dtype=torch.int32).t().contiguous()
            all_lengths = self._feature_major(lengths, strides)

        return KeyedJaggedTensor._from_parts(
            self._keys,
            self._feature_major(values, counts),
            weights,
            all_lengths,
            None,
            stride,
            [sum(slot_counts) for slot_counts in zip(*counts, strict=True)],
            strides_per_key,
        )

    def _feature_major(
        self, received: Sequence[torch.Tensor], sizes: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """What every rank sent, slot after slot, the ranks in order inside each."""
        by_rank = [received[rank] for rank in self._ranks]
        if len(self._keys) <= 1:
            return torch.cat(by_rank)
        return feature_major(by_rank, [sizes[rank] for rank in self._ranks])

    def _slices(self, packed: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Lengths and ids of every rank."""
        sizes = [*chain.from_iterable(zip(self.bags(), self._ids, strict=True))]
        slices = list(packed.split_with_sizes(sizes))
        return slices[::2], slices[1::2]

    def _counts(self, lengths: list[torch.Tensor]) -> list[list[int]]:
        """Ids of each rank and slot ``[W][F]``. A sync point, unless there is at most one slot."""
        slots = len(self._keys)
        strides = self.batch_size_per_rank_per_feature

        if slots <= 1:
            return [[count] * slots for count in self._ids]

        if strides is None:
            by_rank = [rank_lengths.view(slots, -1).sum(dim=1) for rank_lengths in lengths]
            return torch.stack(by_rank).tolist()
        offsets = lengths_to_offsets(torch.cat(lengths).long())
        flat = ids_by_offsets(offsets, [*chain.from_iterable(strides)])
        return [flat[first : first + slots] for first in range(0, len(flat), slots)]


def _send_sizes(group: dist.ProcessGroup, message: torch.Tensor) -> Awaitable[torch.Tensor]:
    """Round 1: ``message [W, SIZES_PER_PEER]`` -> awaitable of the received messages, flat."""
    counts = [SIZES_PER_PEER] * group.size()
    return comm.all_to_all(message.view(-1), counts, counts, group, SIZES_STAGE)


def _exchange_strides(
    group: dist.ProcessGroup, send_order: SendOrder, features: KeyedJaggedTensor
) -> list[list[int]]:
    """Samples of each rank and local slot ``[W][F]``: a round of a variable batch. Blocks."""
    strides = [*chain.from_iterable(send_order.per_slot(features.stride_per_key()))]
    flat = ints_on_device(strides, torch.int64, features.device())
    local_slots = send_order.splits[group.rank()]
    counts_in = [local_slots] * len(send_order.splits)
    exchange = comm.all_to_all(flat, send_order.splits, counts_in, group, STRIDES_STAGE)

    arrived = exchange.wait().tolist()
    firsts = range(0, local_slots * len(counts_in), local_slots) if local_slots else counts_in
    return [arrived[first : first + local_slots] for first in firsts]


def _check_exchange(numbers: Sequence[int], mine: int, title: str) -> None:
    """Raise on every rank if some rank has no batch or is at a different exchange."""
    if min(numbers) < 0:
        raise RanksWithoutBatch([number if number < 0 else None for number in numbers])
    others = [rank for rank, number in enumerate(numbers) if number != mine]
    if others:
        raise ValueError(
            f"this rank sends ids of {title or 'an exchange without a number'}, which is exchange "
            f"{mine}, and rank {others[0]} is at exchange {numbers[others[0]]}: call sharded "
            "collections in the same order on every rank (a loop over a set has no fixed order)"
        )


def _check_weights(forms: Sequence[int]) -> None:
    """Raise on every rank if only some ranks send weights."""
    with_weights = [rank for rank, form in enumerate(forms) if form & _WEIGHTED_FLAG]
    if 0 < len(with_weights) < len(forms):
        without = [rank for rank in range(len(forms)) if rank not in with_weights]
        raise ValueError(
            f"the batches of ranks {with_weights} have weights, those of ranks {without} do not: "
            "give every rank's batch weights=, or none of them"
        )


class SendOrder:
    """The slots of every rank as positions in the batch to send, packed with one copy.

    The batch is cut at every key, and the segments are concatenated in the order of the slots::

        keys of the batch   a b c d    order  [2, 3 | 0, 1, 2]    splits  [2, 3]
        sent to rank 0      c d
        sent to rank 1      a b c

    No permuted copy of the batch is made.

    Args:
        splits: Number of slots of each rank: W numbers.
        order: For each slot, rank after rank, the position of its key; None takes the keys in
            order.

    Raises:
        ValueError: ``order`` and ``splits`` have different numbers of slots.

    Example:
        >>> send_order = SendOrder([2, 3], order=[2, 3, 0, 1, 2])
        >>> send_order.positions_of(rank=1), send_order.sums([1, 0, 3, 2])
        ([0, 1, 2], [5, 4])
    """

    def __init__(self, splits: Sequence[int], order: Sequence[int] | None = None) -> None:
        self.splits = list(splits)
        total = sum(self.splits)
        positions = list(range(total)) if order is None else list(order)

        if len(positions) != total:
            raise ValueError(
                f"order names {len(positions)} keys and splits {self.splits} ask for {total}: "
                "give one position for each slot"
            )

        ends = list(accumulate(self.splits))
        self._positions = [
            positions[end - size : end] for size, end in zip(self.splits, ends, strict=True)
        ]
        self._exact = order is None
        self.needs = 1 + max(positions, default=-1)
        self.is_identity = positions == list(range(total))

    def positions_of(self, rank: int) -> list[int]:
        """Positions of the keys of one rank's slots."""
        return self._positions[rank]

    def check(self, keys: Sequence[str]) -> None:
        """Raise if the batch does not have the keys to send."""
        if len(keys) < self.needs or (self._exact and len(keys) > self.needs):
            raise ValueError(
                f"the batch has {len(keys)} keys {list(keys)}, and splits {self.splits} "
                f"{'send' if self._exact else 'and the order need'} {self.needs}"
            )

    def sums(self, counts: Sequence[int]) -> list[int]:
        """Elements sent to each rank, ``[W]``; key f has ``counts[f]``."""
        return [sum(slot_counts) for slot_counts in self.per_slot(counts)]

    def per_slot(self, counts: Sequence[int]) -> list[list[int]]:
        """Elements sent to each rank, slot by slot; key f has ``counts[f]``."""
        return [[counts[position] for position in positions] for positions in self._positions]

    def cut(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[list[torch.Tensor]]:
        """The segments of each rank: views of a tensor in which key f has ``counts[f]``."""
        segments = tensor.split_with_sizes(list(counts))
        return [[segments[position] for position in positions] for positions in self._positions]

    def gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The segments of all ranks, concatenated."""
        segments = list(chain.from_iterable(self.cut(tensor, counts)))
        return torch.cat(segments) if segments else tensor[:0]

    def pack(self, features: KeyedJaggedTensor, dtype: torch.dtype) -> torch.Tensor:
        """Pack lengths and ids for rank 0, then those for rank 1, and so on, into one buffer.

        Args:
            features: The batch.
            dtype: Dtype of the buffer; an id that it cannot hold is changed silently.
        """
        # Casting whole tensors first takes half the time of a cat that casts each segment.
        lengths = self.cut(features.lengths().to(dtype), features.stride_per_key())
        values = self.cut(features.values().to(dtype), features.length_per_key())
        segments = []
        for rank_lengths, rank_values in zip(lengths, values, strict=True):
            segments += rank_lengths
            segments += rank_values
        return torch.cat(segments) if segments else features.values()[:0].to(dtype)


def feature_major(by_rank: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Reorder from rank-major to feature-major; ``counts[rank][feature]`` are the elements of each.

    Example:
        >>> feature_major([torch.tensor([1, 2]), torch.tensor([3, 4, 5])], [[1, 1], [2, 1]])
        tensor([1, 3, 4, 2, 5])
    """
    segments = [
        elements.split_with_sizes(list(sizes))
        for elements, sizes in zip(by_rank, counts, strict=True)
    ]
    return torch.cat([*chain.from_iterable(zip(*segments, strict=True))])


__all__ = ["ArrivedIds", "KJTAllToAll", "KJTArrival", "RanksWithoutBatch", "SendOrder"]
