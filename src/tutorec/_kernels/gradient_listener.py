"""Gradients of rows, told to whoever listens at the moment in which backward uses them up.

An operator with a listener puts a node behind its lookup that passes gradients on as they are and reports them first:
its backward runs before the lookup's, hence before any row moves. Without a listener there is no node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.table_steps import TouchedRows, touched_rows
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec._kernels.tbe_update import sum_rows

# (index of the table, rows [U] rising, summed gradient of each [U, D]); may be called more than once in a backward.
GradientListener = Callable[[int, Tensor, Tensor], None]


class HasListener(Protocol):
    """What may be listened to."""

    gradient_listener: GradientListener | None
    optimizer: OptimizerSpec | None


def report_rows(listener: GradientListener, touched: TouchedRows, rows: int) -> None:
    """Tell the gradient of one table with R rows.

    Example:
        >>> import torch
        >>> touched = TouchedRows(0, torch.tensor([5, 2, 5]), None, None, torch.tensor([[1.0], [2.0], [4.0]]))
        >>> report_rows(lambda table, rows, sums: print(table, rows.tolist(), sums.tolist()), touched, rows=9)
        0 [2, 5] [[2.0], [5.0]]
    """
    groups = touched.sorted(rows)
    listener(touched.table, groups.rows, sum_rows(touched.grad, groups))


def report_batch(
    listener: GradientListener, batch: PooledBatch, grad: Tensor, columns: Sequence[int], rows: Sequence[int]
) -> None:
    """Tell the gradient of every table that a batch reads.

    Args:
        listener: Is told.
        batch: What was looked up.
        grad: Of the pooled rows [B, sum of D over features].
        columns: D of each table.
        rows: R of each table.
    """
    for touched in touched_rows(batch, grad, columns):
        report_rows(listener, touched, rows[touched.table])


@dataclass(frozen=True)
class LookedUp:
    """What one call of an operator looked up.

    Attributes:
        batch: Ids, bags and weights.
        pooled: Whether bags became one row each; otherwise each id has a row of its own.
        columns: D of each table.
        rows: R of each table.
    """

    batch: PooledBatch
    pooled: bool
    columns: Sequence[int]
    rows: Sequence[int]

    def report(self, listener: GradientListener, grad: Tensor) -> None:
        """Tell what the gradient of the result means for each table."""
        if self.pooled:
            report_batch(listener, self.batch, grad, self.columns, self.rows)
            return
        features = self.batch.feature_tables
        samples = (self.batch.offsets.numel() - 1) // len(features)
        bounds = self.batch.offsets[::samples].tolist() if samples else [0] * (len(features) + 1)
        for table, (first, last) in zip(features, pairwise(bounds), strict=True):
            touched = TouchedRows(table, self.batch.values[first:last], None, None, grad[first:last])
            report_rows(listener, touched, self.rows[table])


def listened(found: Tensor, op: HasListener, looked_up: LookedUp) -> Tensor:
    """What was looked up, with the node that reports behind it.

    Args:
        found: Pooled rows [B, sum of D over features], or rows [N, D] where nothing is pooled.
        op: Whose ``gradient_listener`` at the time of backward is told.
        looked_up: Where the rows came from.
    """
    return cast(Tensor, _Listened.apply(found, op, looked_up))


class _Listened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: Tensor, op: HasListener, looked_up: LookedUp) -> Tensor:
        ctx.op, ctx.looked_up = op, looked_up
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op: HasListener = ctx.op
        if op.gradient_listener is not None and op.optimizer is not None:
            with torch.no_grad():
                ctx.looked_up.report(op.gradient_listener, op.optimizer.limited(grads[0]))
        return grads[0], None, None


__all__ = ["GradientListener", "LookedUp", "listened", "report_batch", "report_rows"]
