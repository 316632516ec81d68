"""Lookups whose backward updates the rows: unsharded tables are trained without a dense gradient.

If ``apply_optimizer_in_backward`` has set an optimizer on a table, the collections look it up
through this module, and backward passes the touched rows only to the optimizer. The semantics are
those of fused kernels, the same as for sharded tables:

- Rows that are not in the batch, and their state, do not change; momentum and weight decay apply to
  touched rows only.
- Gradients of repeated ids in a batch are summed before one update of their row; so are those of
  features that share a table.
- Every backward is a step, with the learning rate at that time: two forwards followed by two
  backwards are two steps, and so is a second backward through a retained graph.
- It is a step of every table, also of one without ids in the batch: its optimizer counts it, and no
  row changes.

It also supports torch's ``_apply_optimizer_in_backward``, which sets the same attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.table_steps import TouchedRows, join_gradients, step_tables, touched_rows
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec._kernels.tbe_update import sum_rows
from tutorec.optim.row_update import kernel_update, update_rows

# Attribute of a table, if set: called with touched rows [U] and their summed gradients [U, D].
GRADIENT_LISTENER = "_gradient_listener"
_PLAIN = (Tensor, nn.Parameter)


def is_updated_in_backward(table: Tensor) -> bool:
    """Whether backward would update a table after a lookup made now.

    Example:
        >>> import torch
        >>> from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> table = torch.nn.Parameter(torch.ones(3, 2))
        >>> before = is_updated_in_backward(table)
        >>> apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.1})
        >>> before, is_updated_in_backward(table)
        (False, True)
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_tracing():
        return False
    return (
        table.requires_grad
        and type(table) in _PLAIN
        and bool(getattr(table, "_in_backward_optimizers", None))
    )


def look_up(tables: Sequence[Tensor], batches: Sequence[PooledBatch]) -> list[Tensor]:
    """Pool the bags of each batch [B, sum of D] in float32; backward updates the tables.

    All features of a collection are passed in one call, so that those of one table are one update.

    Args:
        tables: [R, D] each; backward updates those that are read.
        batches: The batches; one whose weights require a gradient has one feature.

    Example:
        >>> import torch
        >>> from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> table = torch.nn.Parameter(torch.ones(3, 2))
        >>> apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.25})
        >>> batch = PooledBatch(
        ...     torch.tensor([2, 2, 0]), torch.tensor([0, 2, 3]), None, False, (0,)
        ... )
        >>> [pooled] = look_up([table], [batch])
        >>> pooled.sum().backward()
        >>> table[:, 0].tolist(), table.grad  # row 2 is in the batch twice, row 1 is not
        ([0.75, 1.0, 0.5], None)
    """
    # tied tables once
    read = {id(tables[table]): tables[table] for batch in batches for table in batch.feature_tables}
    positions = {key: index for index, key in enumerate(read)}
    batches = [
        replace(
            batch,
            feature_tables=tuple(positions[id(tables[table])] for table in batch.feature_tables),
        )
        for batch in batches
    ]

    # The lookup has one anchor as input: each table as an input would cost a node in backward.
    anchor = torch.empty(0, requires_grad=True)
    pooled = _UpdatingLookup.apply(
        anchor, [*read.values()], batches, *[batch.weights for batch in batches]
    )
    return list(cast(tuple[Tensor, ...], pooled))


def pool(tables: Sequence[Tensor], batch: PooledBatch) -> Tensor:
    """Pooled rows of a batch [B, sum of D] in float32, in one call or feature by feature."""
    scattered = address_tables(tables, batch.feature_tables)
    if scattered is not None:
        return scattered.pool(batch)

    features = batch.feature_tables
    samples = (batch.offsets.numel() - 1) // len(features)
    pooled = []
    for feature, table in enumerate(features):
        offsets = batch.offsets[feature * samples : (feature + 1) * samples + 1]
        ids = slice(*offsets[[0, -1]].tolist()) if len(features) > 1 else slice(None)
        weights = None if batch.weights is None else batch.weights[ids].to(tables[table].dtype)
        rows = F.embedding_bag(
            batch.values[ids],
            tables[table],
            offsets - offsets[0],
            mode="mean" if batch.mean else "sum",
            per_sample_weights=weights,
            include_last_offset=True,
        )
        pooled.append(rows.float())
    return torch.cat(pooled, dim=1)


class _UpdatingLookup(torch.autograd.Function):
    """Lookup; backward returns the gradients of the weights, and updates the rows of the tables."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        tables: Sequence[Tensor],
        batches: Sequence[PooledBatch],
        *weights: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tables = tables
        ctx.batches = batches
        # Another backward may update the rows before the weights' gradient is computed, so copy
        # them.
        ctx.rows = [
            tables[batch.feature_tables[0]].detach()[batch.values] if needed else None
            for batch, needed in zip(batches, ctx.needs_input_grad[3:], strict=True)
        ]

        # Ids that are changed in place before backward are an error, as everywhere in autograd.
        ctx.save_for_backward(
            *(
                tensor
                for batch in batches
                for tensor in (batch.values, batch.offsets, batch.weights)
            )
        )
        return tuple(pool(tables, batch) for batch in batches)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        weight_grads = [
            None if rows is None or grad is None else _weights_gradient(batch, rows, grad)
            for batch, rows, grad in zip(ctx.batches, ctx.rows, grads, strict=True)
        ]
        arrived = [
            (batch, grad)
            for batch, grad in zip(ctx.batches, grads, strict=True)
            if grad is not None
        ]

        _update(ctx.tables, arrived)
        increment_version(ctx.tables)
        return (None, None, None, *weight_grads)


def _update(tables: Sequence[Tensor], arrived: Sequence[tuple[PooledBatch, Tensor]]) -> None:
    """One step of the optimizers of each table with a gradient, from all features that read it."""
    stepped = sorted({table for batch, _ in arrived for table in batch.feature_tables})
    optimizers = {table: cast(Any, tables[table])._in_backward_optimizers for table in stepped}
    updates = {
        table: [kernel_update(optim, tables[table]) for optim in optimizers[table]]
        for table in stepped
    }
    listeners = {table: getattr(tables[table], GRADIENT_LISTENER, None) for table in stepped}
    known = [
        entries[0] for entries in updates.values() if len(entries) == 1 and entries[0] is not None
    ]

    if len(arrived) == 1 and len(known) == len(tables) and not any(listeners.values()):
        rows = [table.detach() for table in tables]
        [(batch, grad)] = arrived
        step_tables(
            rows,
            [update.states for update in known],
            batch,
            grad,
            [update.step for update in known],
        )
        return

    columns = [table.shape[1] for table in tables]
    gradients = {table: list[TouchedRows]() for table in stepped}
    for batch, grad in arrived:
        for touched in touched_rows(batch, grad, columns):
            gradients[touched.table].append(touched)

    for index, entries in gradients.items():
        table = tables[index]
        touched = join_gradients(entries)
        groups = touched.sorted(table.shape[0])
        if (listener := listeners[index]) is not None:
            listener(groups.rows, sum_rows(touched.grad, groups))
        for optimizer, update in zip(optimizers[index], updates[index], strict=True):
            update_rows(optimizer, update, table, touched.grad, groups)


def _weights_gradient(batch: PooledBatch, rows: Tensor, grad: Tensor) -> Tensor:
    """Gradient of each id's weight: its row times the gradient of its bag [N]."""
    assert batch.weights is not None and not batch.mean, "a mean of weighted rows is a sum here"
    bags = torch.repeat_interleave(batch.offsets.diff(), output_size=batch.values.numel())
    return (rows.float() * grad[bags]).sum(1).to(batch.weights.dtype)
