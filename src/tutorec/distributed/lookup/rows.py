"""Lookup of unpooled rows: a row per id, in order of arrival.

Rows are returned in the order of their ids::

    ids of rank 0 (slot a, slot b, ...), ids of rank 1 (slot a, ...)      [N]
      | one call per group of tables
    their rows in the same order, concatenated                            [sum of N_slot * D_slot]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise

import torch
from torch import nn

from tutorec._kernels.specs import FirstRows, GroupSpec
from tutorec.distributed.collectives.kjt import ArrivedIds
from tutorec.distributed.core.initial_rows import InitialRows
from tutorec.distributed.core.tables import TableGroup
from tutorec.distributed.lookup.grouped import (
    Batch,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbeddingBag,
    GroupedLookup,
)
from tutorec.sparse.layout import ints_on_device


class BatchedFusedEmbedding(BatchedFusedEmbeddingBag):
    """Unpooled lookup of a group with a fused optimizer, which backward applies.

    Args:
        group: The shards, all of one width and one optimizer.
        weights: Initial rows ``[R, D]`` of each shard, or a function that writes them.
        device: Device of the rows.
        ranks: W, whose ids are looked up together with one update.
    """

    def __init__(
        self, group: TableGroup, weights: FirstRows, device: torch.device, ranks: int
    ) -> None:
        super().__init__(group, weights, device, _of_ranks(group, ranks), "embeddings")


class BatchedDenseEmbedding(BatchedDenseEmbeddingBag):
    """Unpooled lookup of a group without fused optimizer; backward fills a dense ``.grad``.

    Args:
        group: The shards, all of one width, without an optimizer.
        weights: Initial rows ``[R, D]`` of each shard, or a function that writes them.
        device: Device of the rows.
        ranks: W, whose ids are looked up together.
    """

    def __init__(
        self, group: TableGroup, weights: FirstRows, device: torch.device, ranks: int
    ) -> None:
        super().__init__(group, weights, device, _of_ranks(group, ranks))


class GroupedEmbeddingsLookup(GroupedLookup):
    """The ids of all ranks in local slots -> their rows.

    Args:
        groups: This rank's tables; empty on a rank without tables.
        initial_rows: Writes the initial rows of each shard.
        device: Device of the rows.
        ranks: W, the ranks whose ids arrive.

    Source:
        TorchRec's ``GroupedEmbeddingsLookup``.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        initial_rows: InitialRows,
        device: torch.device,
        ranks: int,
    ) -> None:
        super().__init__()
        self._groups = groups
        self._ranks = ranks
        self._slot_bounds = [*accumulate((len(group.features) for group in groups), initial=0)]

        self._emb_modules = nn.ModuleList()
        for group in groups:
            lookup = BatchedDenseEmbedding if group.optimizer is None else BatchedFusedEmbedding
            weights = partial(initial_rows.write, group)
            self._emb_modules.append(lookup(group, weights, device, ranks))

    def forward(self, ids: ArrivedIds) -> torch.Tensor:
        """Ids of each rank and slot -> their rows in the same order, flat."""
        if torch.is_inference_mode_enabled():
            # fbgemm registers its training operators for autograd only, which inference mode leaves
            # out.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(ids)

        groups = len(self._emb_modules)
        if groups == 0:
            return torch.empty(0, dtype=torch.float32, device=ids.values.device)
        looked_up = [
            bags(*batch) for bags, batch in zip(self._emb_modules, self._batches(ids), strict=True)
        ]

        if groups == 1:
            return looked_up[0].contiguous().view(-1)
        rows_by_group = [
            rows.split_with_sizes(sizes)
            for rows, sizes in zip(looked_up, self._sizes(ids), strict=True)
        ]
        return torch.cat(
            [rows.reshape(-1) for source in zip(*rows_by_group, strict=True) for rows in source]
        )

    def _batches(self, ids: ArrivedIds) -> list[Batch]:
        """The ids of each group, a bag for each rank and slot."""
        groups = len(self._emb_modules)
        if groups == 1:
            return [_bags(ids.values, ids.counts)]

        segments = ids.values.split_with_sizes(
            [*chain.from_iterable(zip(*self._sizes(ids), strict=True))]
        )
        return [
            _bags(torch.cat(segments[group::groups]), [counts[first:last] for counts in ids.counts])
            for group, (first, last) in enumerate(pairwise(self._slot_bounds))
        ]

    def _sizes(self, ids: ArrivedIds) -> list[list[int]]:
        """Number of ids of each group from each rank, ``[groups][W]``."""
        return [
            [sum(slot_counts[first:last]) for slot_counts in ids.counts]
            for first, last in pairwise(self._slot_bounds)
        ]


def _bags(values: torch.Tensor, counts: Sequence[Sequence[int]]) -> Batch:
    """The ids of one group, ``counts[rank][slot]`` of them, as an operator's batch."""
    bounds = [*accumulate(chain.from_iterable(counts), initial=0)]
    return values, ints_on_device(bounds, values.dtype, values.device), None


def _of_ranks(group: TableGroup, ranks: int) -> GroupSpec:
    """The group with its features repeated once per rank, with one bag each."""
    spec = group.spec()
    return replace(spec, feature_tables=spec.feature_tables * ranks)


__all__ = ["BatchedDenseEmbedding", "BatchedFusedEmbedding", "GroupedEmbeddingsLookup"]
