"""Ids travel to the rank that owns their table, in two rounds (three with weights).

Round 1 tells every rank how much it is going to receive: three integers per peer. Round 2 sends lengths and ids in one
packed buffer, since a round costs more than what is in it. Weights are a third, issued together with the second.

    what I send to rank r     [lengths of r's features, F_r * B | their ids, N_r]     one slice of the buffer
    what I receive from s     [lengths of my features, F * B_s  | their ids, N_s]
    what I make of it         F features, sum of B_s samples, samples of rank 0 first

Ranks may differ in B and in the dtype of their ids: all ids travel in the widest dtype that any rank uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait
from tutorec.distributed import comm
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

SIZES_STAGE = "input sizes"
IDS_STAGE = "input ids"
WEIGHTS_STAGE = "input weights"

# Ids of one peer, its samples, and the bytes of one of its ids.
SIZES_PER_PEER = 3


class KJTAllToAll(nn.Module):
    """My samples, every feature -> every sample, my features.

    Args:
        pg: The ranks; None in a world of 1.
        splits: F_r, how many of the batch's features each rank receives: W numbers. The features of the batch stand
            in rank order.

    Source:
        TorchRec's ``KJTAllToAll``, which takes one round more.
    """

    def __init__(self, pg: dist.ProcessGroup | None, splits: Sequence[int]) -> None:
        super().__init__()
        self._pg = pg
        self._splits = list(splits)

    def forward(self, features: KeyedJaggedTensor) -> Awaitable[KJTArrival]:
        """Issue round 1. Waiting for the result issues round 2; waiting for that gives the batch."""
        if self._pg is None or len(self._splits) == 1:
            return NoWait(KJTArrival.at_home(features))
        return _Sizes(self._pg, self._splits, features)


class KJTArrival(Awaitable[KeyedJaggedTensor]):
    """A batch on its way, of which the sizes are known.

    Args:
        batch_size_per_rank: B of every rank, W numbers: whose samples the arriving ones are.
        packed: The buffer that arrives.
        weights: The weights that arrive, or None.
        keys: My features.
        counts: N_s, ids from every rank.
    """

    def __init__(
        self,
        batch_size_per_rank: list[int],
        packed: Awaitable[torch.Tensor] | None,
        weights: Awaitable[torch.Tensor] | None,
        keys: list[str],
        counts: list[int],
    ) -> None:
        self.batch_size_per_rank = batch_size_per_rank
        self._packed = packed
        self._weights = weights
        self._keys = keys
        self._counts = counts

    @classmethod
    def at_home(cls, features: KeyedJaggedTensor) -> KJTArrival:
        """In a world of 1 the batch has nowhere to go."""
        arrival = cls([features.stride()], None, None, features.keys(), [])
        arrival._awaited = features
        return arrival

    def _wait_impl(self) -> KeyedJaggedTensor:
        assert self._packed is not None, "only a batch at home has no buffer, and it needs no wait"
        per_rank, feature_count = self.batch_size_per_rank, len(self._keys)
        packed = self._packed.wait()
        weights = self._weights.wait() if self._weights is not None else None
        head = [feature_count * samples for samples in per_rank]
        slices = packed.split([size for pair in zip(head, self._counts, strict=True) for size in pair])
        lengths = [part.view(feature_count, samples) for part, samples in zip(slices[::2], per_rank, strict=True)]
        all_lengths = torch.cat(lengths, dim=1)
        if feature_count <= 1:
            values = torch.cat(slices[1::2])
            counts = [values.numel()] * feature_count
        else:
            # Each rank's ids stand feature after feature; the batch wants all ranks' ids of feature 0, then of 1, ...
            by_rank = torch.stack([part.sum(dim=1) for part in lengths]).tolist()
            values = _feature_major(slices[1::2], by_rank)
            weights = _feature_major(weights.split(self._counts), by_rank) if weights is not None else None
            counts = [sum(of_feature) for of_feature in zip(*by_rank, strict=True)]
        return KeyedJaggedTensor._from_parts(
            self._keys, values, weights, all_lengths.view(-1), None, sum(per_rank), counts
        )


class _Sizes(Awaitable[KJTArrival]):
    """Round 1 in flight; to wait for it is to issue round 2."""

    def __init__(self, group: dist.ProcessGroup, splits: list[int], features: KeyedJaggedTensor) -> None:
        world_size = len(splits)
        assert sum(splits) == len(features.keys()), f"splits {splits} do not cover features {features.keys()}"
        bounds = [0, *accumulate(splits)]
        starts = features.offset_per_key()
        self._group, self._splits, self._bounds, self._features = group, splits, bounds, features
        self._counts = [starts[bounds[rank + 1]] - starts[bounds[rank]] for rank in range(world_size)]
        samples, itemsize = features.stride(), features.values().element_size()
        sizes = torch.tensor(
            [(count, samples, itemsize) for count in self._counts], dtype=torch.int64, device=features.device()
        )
        each = [SIZES_PER_PEER] * world_size
        self._sizes = comm.all_to_all(sizes.view(-1), each, each, group, SIZES_STAGE)

    def _wait_impl(self) -> KJTArrival:
        arriving = self._sizes.wait().view(-1, SIZES_PER_PEER).tolist()
        counts, batch_sizes, itemsizes = (list(column) for column in zip(*arriving, strict=True))
        # Every rank sees the same W itemsizes, so that all choose the same dtype.
        dtype = torch.int64 if max(itemsizes) > 4 else torch.int32
        features, splits, samples = self._features, self._splits, self._features.stride()
        mine = splits[self._group.rank()]
        out = [count + split * samples for count, split in zip(self._counts, splits, strict=True)]
        into = [count + mine * batch for count, batch in zip(counts, batch_sizes, strict=True)]
        packed = comm.all_to_all(self._pack(dtype), out, into, self._group, IDS_STAGE)
        weights = features.weights_or_none()
        if weights is not None:
            weights = comm.all_to_all(weights.float().contiguous(), self._counts, counts, self._group, WEIGHTS_STAGE)
        first = self._bounds[self._group.rank()]
        return KJTArrival(batch_sizes, packed, weights, features.keys()[first : first + mine], counts)

    def _pack(self, dtype: torch.dtype) -> torch.Tensor:
        """Lengths and ids for rank 0, lengths and ids for rank 1, ..."""
        features, samples = self._features, self._features.stride()
        lengths = features.lengths().to(dtype).split([split * samples for split in self._splits])
        values = features.values().to(dtype).split(self._counts)
        return torch.cat([part for pair in zip(lengths, values, strict=True) for part in pair])


def _feature_major(of_ranks: Sequence[torch.Tensor], counts: list[list[int]]) -> torch.Tensor:
    """Ids rank after rank -> ids feature after feature; ``counts[rank][feature]`` ids each."""
    pieces = [part.split(sizes) for part, sizes in zip(of_ranks, counts, strict=True)]
    return torch.cat([piece for of_feature in zip(*pieces, strict=True) for piece in of_feature])
