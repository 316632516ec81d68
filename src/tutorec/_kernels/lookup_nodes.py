"""The nodes of the autograd graph around a lookup.

All are identities of the lookup's input or output. Those of the output run in backward before the
lookup's own backward, hence before the rows of a fused op move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tutorec._kernels.specs import GroupSpec
from tutorec._kernels.table_steps import TouchedRows, touched_rows
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec._kernels.tbe_update import sum_rows

__all__ = ["Cut", "GradientListener", "ReportedLookup", "WeightsGradient", "as_one_buffer"]

# (index of the table, rows [U] rising, summed gradient of each [U, D]); may be called more than
# once in a backward.
GradientListener = Callable[[int, Tensor, Tensor], None]
# of a table in a buffer: first element, rows, elements from row to row, columns
Cut = tuple[int, int, int, int]


def as_one_buffer(flat: Tensor, cuts: Sequence[Cut], tables: Sequence[Tensor]) -> Tensor:
    """Parameters [R, D] that are views of one buffer, seen by autograd as the buffer [elements].

    Args:
        flat: The buffer.
        cuts: For each table in it (first element, rows, elements from row to row, columns).
        tables: The Parameters; the gradient of the buffer comes back to them as views of one
            tensor.
    """
    return (
        cast(Tensor, _AsOneBuffer.apply(flat, cuts, *tables)) if torch.is_grad_enabled() else flat
    )


class _AsOneBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, cuts: Sequence[Cut], *tables: Tensor) -> Tensor:
        ctx.cuts = cuts
        return flat.view(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return (
            None,
            None,
            *(
                grad[start : start + rows * stride].view(rows, stride)[:, :columns]
                for start, rows, stride, columns in ctx.cuts
            ),
        )


class WeightsGradient(torch.autograd.Function):
    """The gradient of the ids' weights of a lookup: identity on its output.

    Its backward runs before the lookup's, hence before the rows of a fused op move. (fbgemm's CPU
    kernels give this gradient too, but from rows that the fused update has already moved.)

    ``apply`` takes the result [B, D] of detached weights, the weights [N], which require a
    gradient, the ``TableBatch`` that made the lookup, ids [N], and bag bounds [F * B + 1].
    """

    @staticmethod
    def forward(
        ctx: Any, pooled: Tensor, weights: Tensor, op: Any, values: Tensor, offsets: Tensor
    ) -> Tensor:
        """The result as it is."""
        ctx.op = op
        ctx.values = values
        ctx.offsets = offsets
        return pooled.view_as(pooled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient as it is, and that of the weights [N]."""
        (grad,) = grads
        spec: GroupSpec = ctx.op.spec
        lengths = ctx.offsets.diff().view(len(spec.feature_tables), -1)
        bounds = [0, *lengths.sum(1).cumsum(0).tolist()]

        weight_grads = []
        column = 0
        for feature, table in enumerate(spec.feature_tables):
            ids = ctx.values[bounds[feature] : bounds[feature + 1]]
            own = grad[:, column : column + spec.tables[table].columns]
            rows = ctx.op.rows_at(table, ids)
            weight_grads.append((rows * own[torch.repeat_interleave(lengths[feature])]).sum(1))
            column += spec.tables[table].columns

        return grad, torch.cat(weight_grads), None, None, None


class ReportedLookup(torch.autograd.Function):
    """Reports the gradient of a lookup to the op's listener: identity on its output.

    Its backward runs before the lookup's, hence before any row moves. ``apply`` takes the result of
    the lookup, the ``TableBatch`` that made it, and what was looked up.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, op: Any, batch: PooledBatch) -> Tensor:
        """The result as it is."""
        ctx.op = op
        ctx.batch = batch
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient as it is, reported."""
        op = ctx.op
        if op.gradient_listener is not None and op.optimizer is not None:
            with torch.no_grad():
                _report(op.gradient_listener, op.spec, ctx.batch, op.optimizer.limited(grads[0]))
        return grads[0], None, None


def _report(listener: GradientListener, spec: GroupSpec, batch: PooledBatch, grad: Tensor) -> None:
    """Report the summed gradients of the rows that a batch has looked up in each table."""
    gradients = touched_rows(batch, grad, [table.columns for table in spec.tables])
    if spec.pooling == "none":
        counts = batch.offsets.diff().view(len(spec.feature_tables), -1).sum(1).tolist()
        features = zip(
            spec.feature_tables, batch.values.split(counts), grad.split(counts), strict=True
        )
        gradients = (TouchedRows(table, ids, None, None, rows) for table, ids, rows in features)

    for touched in gradients:
        groups = touched.sorted(spec.tables[touched.table].rows)
        listener(touched.table, groups.rows, sum_rows(touched.grad, groups))
