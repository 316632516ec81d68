"""Tables that every rank has whole: looked up without a word, moved alike on all ranks.

    forward    my bags -> my pooled rows                                                   (no traffic)
    backward   gradient of my pooled rows -> every rank's -> the same update everywhere    (`sparse_gradients`)

With a fused kernel each copy, and its state, makes the step that one table would make on the batch of all ranks. With a
dense kernel every rank gets the same ``.grad``, the mean over ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tutorec._kernels.jagged import lengths_to_offsets
from tutorec._kernels.optimizer_spec import UpdateStep
from tutorec._kernels.pooling import bag_weights, kernel_pooling
from tutorec._kernels.table_steps import TouchedRows, touched_rows
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec.distributed.collectives.autograd import gradient_divisor
from tutorec.distributed.collectives.sparse_gradients import PooledGradients, features_of
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.lookup.base import ShardRows
from tutorec.distributed.lookup.copies import CopiedGroup, ReplicatedLookup
from tutorec.distributed.lookup.grouped import GroupedPooledEmbeddingsLookup
from tutorec.distributed.lookup.variable import flatten_by_rank, pad_bags
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class ReplicatedPooledEmbeddingsLookup(ReplicatedLookup):
    """My samples, every feature of the tables that all ranks have -> my samples' pooled rows.

    To build one is a collective, and so is every backward.

    Args:
        groups: The tables.
        rows_of: Writes the initial rows of a table.
        device: Where the rows live.
        env: The ranks.
        ids_dtype: What ids travel as.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        rows_of: ShardRows,
        device: torch.device,
        env: ShardingEnv,
        ids_dtype: torch.dtype,
    ) -> None:
        super().__init__(GroupedPooledEmbeddingsLookup(groups, rows_of, device), groups, env, ids_dtype)
        self._columns = [columns for group in groups for columns in group.columns]
        self._weighted = groups[0].spec().weighted

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """My slots, B samples -> ``[B, D]``; of a variable batch each slot's samples' columns, flattened."""
        if not torch.is_grad_enabled():
            return self._lookup(features)
        if features.variable_stride_per_key():
            return flatten_by_rank(self.forward(pad_bags(features)), features, self._columns)
        self.check_recorded()
        # Recorded also where nothing needs a gradient here: the other ranks count on this one.
        anchor = torch.empty(0, device=features.device(), requires_grad=True)
        return cast(torch.Tensor, _PooledLookup.apply(anchor, self, features, *self.dense_parameters()))

    def _pool(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """``[B, D]``, without a graph."""
        return self._lookup(features)

    def _step(self, bags: _Bags, steps: Sequence[Sequence[UpdateStep]]) -> list[torch.Tensor]:
        """Exchange gradients and move fused copies; every rank calls it together.

        Args:
            bags: Mine.
            steps: Of each group and table, as they were in force at the forward.

        Returns:
            The mean gradient ``[R, D]`` of each dense table.
        """
        group = self.process_group()
        exchange = PooledGradients(group, self._tables, self._ids_dtype, self._weighted)
        agreed = exchange.agree(bags.lengths.shape[1], bags.counts)
        arriving = summed = None
        if any(agreed.as_bags):
            arriving = exchange.gather(agreed, bags.lengths, bags.values, bags.weights, bags.grad)
        in_sum = [table for table, as_bags in enumerate(agreed.as_bags) if not as_bags]
        if in_sum:
            summed = exchange.add(self._gradients(bags, in_sum))
        found: dict[int, torch.Tensor] = {}
        if arriving is not None:
            every, features = arriving.wait(), features_of(self._tables, agreed.as_bags)
            counts = [sum(of_ranks[feature] for of_ranks in agreed.ids) for feature in features]
            columns = [self._columns[feature] for feature in features]
            all_bags = _Bags(features, counts, columns, every.lengths, every.values, every.weights, every.grad)
            for own, of_tables in zip(self._groups, steps, strict=True):
                found |= own.take_bags(*all_bags.of_group(own), of_tables)
        if summed is not None:
            sums = dict(zip(in_sum, summed.wait(), strict=True))
            for own, of_tables in zip(self._groups, steps, strict=True):
                found |= own.take_sums(sums, of_tables)
        return [found[table] for table in sorted(found)]

    def _gradients(self, bags: _Bags, tables: Sequence[int]) -> list[torch.Tensor]:
        """The gradient of some tables, from my bags alone, as `table_gradient` gives it."""
        found: dict[int, TouchedRows] = {}
        for group in self._groups:
            if set(group.tables).isdisjoint(tables):
                continue
            batch, grad = bags.of_group(group)
            for touched in touched_rows(batch, grad, [self._tables[table].columns for table in group.tables]):
                table = group.tables[touched.table]
                if table in tables:
                    found[table] = touched
        return [self.table_gradient(table, found.get(table), bags.grad.device) for table in tables]


@dataclass(frozen=True)
class _Bags:
    """What was looked up, and the gradient of what came out.

    Args:
        features: Which of the lookup's features, rising.
        counts: Ids of each.
        columns: D of each.
        lengths: ``[F, B]``.
        values: ``[N]``, feature after feature.
        weights: ``[N]`` or None.
        grad: ``[B, sum of D]``.
    """

    features: Sequence[int]
    counts: Sequence[int]
    columns: Sequence[int]
    lengths: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor | None
    grad: torch.Tensor

    def of_group(self, group: CopiedGroup) -> tuple[PooledBatch, torch.Tensor]:
        """What the operator of a group looked up, and its gradient, limited."""
        first = bisect_left(self.features, group.features.start)
        last = bisect_left(self.features, group.features.stop)
        ids, columns = [*accumulate(self.counts, initial=0)], [*accumulate(self.columns, initial=0)]
        own, spec = slice(ids[first], ids[last]), group.operator.spec
        values, offsets = self.values[own], lengths_to_offsets(self.lengths[first:last].reshape(-1))
        weights = None if self.weights is None else self.weights[own]
        weights = bag_weights(spec.pooling, offsets, weights, values.numel())
        mean = kernel_pooling(spec.pooling, spec.weighted) == "mean"
        tables = tuple(group.feature_tables[feature - group.features.start] for feature in self.features[first:last])
        grad = group.limited(self.grad[:, columns[first] : columns[last]])
        return PooledBatch(values, offsets, weights, mean, tables), grad


class _PooledLookup(torch.autograd.Function):
    """Pools rows; backward is the exchange, and gives dense tables their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        lookup: ReplicatedPooledEmbeddingsLookup,
        features: KeyedJaggedTensor,
        *dense: nn.Parameter,
    ) -> torch.Tensor:
        pooled = lookup._pool(features)
        # What is in force now is what backward applies.
        ctx.lookup, ctx.steps = lookup, lookup.next_steps()
        ctx.counts, ctx.samples = features.length_per_key(), features.stride()
        ctx.save_for_backward(features.lengths(), features.values(), features.weights_or_none())
        return pooled

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        lengths, values, weights = ctx.saved_tensors
        lookup: ReplicatedPooledEmbeddingsLookup = ctx.lookup
        columns = lookup._columns
        lengths = lengths.view(len(columns), ctx.samples)
        # Once divided here, it is the mean over ranks that is added up.
        grad = grads[0] / gradient_divisor(lookup._env.world_size)
        bags = _Bags(range(len(columns)), ctx.counts, columns, lengths, values, weights, grad)
        return None, None, None, *lookup._step(bags, ctx.steps)


__all__ = ["ReplicatedPooledEmbeddingsLookup"]
