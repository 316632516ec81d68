"""Tables that every rank has whole, of which rows are looked up one by one; as `replicated`, for rows not pooled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tutorec._kernels.optimizer_spec import UpdateStep
from tutorec._kernels.table_steps import TouchedRows
from tutorec.distributed.collectives.autograd import gradient_divisor
from tutorec.distributed.collectives.kjt import ArrivedIds
from tutorec.distributed.collectives.sparse_gradients import RowGradients
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.lookup.base import ShardRows
from tutorec.distributed.lookup.copies import ReplicatedLookup
from tutorec.distributed.lookup.rows import GroupedEmbeddingsLookup


class ReplicatedEmbeddingsLookup(ReplicatedLookup):
    """My ids, every feature of the tables that all ranks have -> their rows.

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
        super().__init__(GroupedEmbeddingsLookup(groups, rows_of, device, ranks=1), groups, env, ids_dtype)

    def forward(self, ids: ArrivedIds) -> torch.Tensor:
        """My ids of each slot -> their rows in the same order, flat."""
        if not torch.is_grad_enabled():
            return self._lookup(ids)
        self.check_recorded()
        # Recorded also where nothing needs a gradient here: the other ranks count on this one.
        anchor = torch.empty(0, device=ids.values.device, requires_grad=True)
        return cast(torch.Tensor, _RowLookup.apply(anchor, self, ids, *self.dense_parameters()))

    def _find(self, ids: ArrivedIds) -> torch.Tensor:
        """Rows, flat, without a graph."""
        return self._lookup(ids)

    def _step(
        self, values: torch.Tensor, counts: Sequence[int], grad: torch.Tensor, steps: Sequence[Sequence[UpdateStep]]
    ) -> list[torch.Tensor]:
        """Exchange gradients and move fused copies; every rank calls it together.

        Args:
            values: My ids.
            counts: Of each feature.
            grad: Of their rows, flat.
            steps: Of each group and table, as they were in force at the forward.

        Returns:
            The mean gradient ``[R, D]`` of each dense table.
        """
        group = self.process_group()
        exchange = RowGradients(group, self._tables, self._ids_dtype)
        agreed = exchange.agree(counts)
        bagged = [table for table, as_bags in enumerate(agreed.as_bags) if as_bags]
        in_sum = [table for table, as_bags in enumerate(agreed.as_bags) if not as_bags]
        mean = grad / gradient_divisor(group.size())
        arriving = exchange.gather(agreed, values, mean) if bagged else None
        summed = exchange.add(self._gradients(values, counts, mean, in_sum)) if in_sum else None
        found: dict[int, torch.Tensor] = {}
        if arriving is not None:
            rows = dict(zip(bagged, arriving.wait(), strict=True))
            for own, of_tables in zip(self._groups, steps, strict=True):
                found |= own.take_rows(rows, of_tables)
        if summed is not None:
            sums = dict(zip(in_sum, summed.wait(), strict=True))
            for own, of_tables in zip(self._groups, steps, strict=True):
                found |= own.take_sums(sums, of_tables)
        return [found[table] for table in sorted(found)]

    def _gradients(
        self, values: torch.Tensor, counts: Sequence[int], grad: torch.Tensor, tables: Sequence[int]
    ) -> list[torch.Tensor]:
        """The gradient of some tables, from my ids alone, as `table_gradient` gives it."""
        ends = [*accumulate((table.features for table in self._tables), initial=0)]
        ids = [*accumulate(counts, initial=0)]
        of_tables = [ids[last] - ids[first] for first, last in pairwise(ends)]
        elements = [count * table.columns for count, table in zip(of_tables, self._tables, strict=True)]
        parts, rows = values.split_with_sizes(of_tables), grad.split_with_sizes(elements)
        found = []
        for table in tables:
            group = next(group for group in self._groups if table in group.tables)
            own = group.limited(rows[table].view(-1, self._tables[table].columns))
            touched = TouchedRows(table, parts[table], None, None, own)
            found.append(self.table_gradient(table, touched, grad.device))
        return found


class _RowLookup(torch.autograd.Function):
    """Looks rows up; backward is the exchange, and gives dense tables their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        lookup: ReplicatedEmbeddingsLookup,
        ids: ArrivedIds,
        *dense: nn.Parameter,
    ) -> torch.Tensor:
        rows = lookup._find(ids)
        # What is in force now is what backward applies.
        ctx.lookup, ctx.steps, ctx.counts = lookup, lookup.next_steps(), ids.counts[0]
        ctx.save_for_backward(ids.values)
        return rows

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        lookup: ReplicatedEmbeddingsLookup = ctx.lookup
        return None, None, None, *lookup._step(values, ctx.counts, grads[0], ctx.steps)


__all__ = ["ReplicatedEmbeddingsLookup"]
