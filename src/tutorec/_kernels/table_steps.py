"""The update of a fused lookup without the lookup: tables, a batch, the gradient of its pooled rows.

Where a table has copies, every copy is moved by the batches of all ranks, which it has not looked up itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tutorec._kernels.optimizer_spec import UpdateStep
from tutorec._kernels.separate import SeparateTables, find_tables
from tutorec._kernels.tbe_update import RowGroups, add_rows, apply_update, sort_rows, sum_rows
from tutorec._kernels.weighted_step import FEW_IDS, PooledBatch, step_rowwise_adagrad

__all__ = ["TouchedRows", "gradient_of_table", "step_rows", "step_tables", "touched_rows"]

_FEW_IDS = FEW_IDS


@dataclass(frozen=True)
class TouchedRows:
    """The gradient of one table as a batch gives it: never built, only what it is a sum of.

    Row r's is the sum of ``weights[i] * grad[bags[i]]`` over all i with ``ids[i] == r``.

    Attributes:
        table: Its index.
        ids: [N].
        bags: [N]; None for i itself.
        weights: [N], or None for 1.
        grad: [bags, D].
    """

    table: int
    ids: Tensor
    bags: Tensor | None
    weights: Tensor | None
    grad: Tensor


def touched_rows(batch: PooledBatch, grad: Tensor, columns: Sequence[int]) -> Iterator[TouchedRows]:
    """The gradient of each table that a batch reads; features of one table are neighbours.

    Args:
        batch: What was looked up.
        grad: Of the pooled rows [B, sum of D over features].
        columns: D of each table.

    Example:
        >>> import torch
        >>> batch = PooledBatch(torch.tensor([5, 2, 5]), torch.tensor([0, 2, 3]), None, False, (0, 0))
        >>> [found] = touched_rows(batch, torch.tensor([[1.0, 10.0]]), columns=[1])
        >>> found.ids.tolist(), found.grad.tolist()
        ([5, 2, 5], [[1.0], [10.0]])
    """
    samples, features = grad.shape[0], batch.feature_tables
    if samples == 0:
        return
    bounds = batch.offsets[::samples].tolist()
    starts = [*accumulate((columns[table] for table in features), initial=0)]
    lengths = batch.offsets.diff().view(len(features), samples)
    first = 0
    while first < len(features):
        table, last = features[first], first
        while last < len(features) and features[last] == table:
            last += 1
        own = slice(bounds[first], bounds[last])
        parts = [grad[:, starts[feature] : starts[feature + 1]] for feature in range(first, last)]
        of_bags = parts[0] if len(parts) == 1 else torch.cat(parts)
        counts = lengths[first:last].reshape(-1)
        if batch.mean:
            of_bags = of_bags / counts.clamp(min=1).unsqueeze(1)
        bags = torch.repeat_interleave(counts, output_size=bounds[last] - bounds[first])
        weights = None if batch.weights is None else batch.weights[own]
        yield TouchedRows(table, batch.values[own], bags, weights, of_bags.contiguous())
        first = last


def gradient_of_table(touched: TouchedRows, rows: int) -> Tensor:
    """The gradient of a whole table, [R, D]: zero for rows that are not in the batch.

    Example:
        >>> import torch
        >>> batch = PooledBatch(torch.tensor([1, 1]), torch.tensor([0, 1, 2]), None, False, (0,))
        >>> [found] = touched_rows(batch, torch.tensor([[1.0], [10.0]]), columns=[1])
        >>> gradient_of_table(found, rows=3).tolist()
        [[0.0], [11.0], [0.0]]
    """
    gradient = touched.grad.new_zeros(rows, touched.grad.shape[1])
    if gradient.is_cpu:
        add_rows(gradient, touched.ids, touched.bags, touched.weights, touched.grad, 1.0)
    else:
        # On a device rows that repeat would be added in any order, and copies would drift apart.
        groups = sort_rows(touched.ids, touched.bags, touched.weights, rows)
        gradient.index_add_(0, groups.rows, sum_rows(touched.grad, groups))
    return gradient


@torch.no_grad()
def step_tables(
    tables: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    batch: PooledBatch,
    grad: Tensor,
    steps: Sequence[UpdateStep],
) -> None:
    """Move every row of a batch once, by the sum of its gradients, as the backward of a fused lookup does.

    Args:
        tables: [R, D] in float32, changed in place.
        states: What the rule keeps of each table, [R] or [R, D] each, changed in place; nothing for sgd.
        batch: What was looked up; features of one table are neighbours.
        grad: Of the pooled rows [B, sum of D over features].
        steps: Of each table the optimizer, the same for all, its rate, and which step it is.

    Example:
        >>> import torch
        >>> from tutorec._kernels.optimizer_spec import OptimizerSpec
        >>> table = torch.zeros(3, 4)
        >>> batch = PooledBatch(torch.tensor([1, 1]), torch.tensor([0, 1, 2]), None, False, (0,))
        >>> step_tables([table], [()], batch, torch.ones(2, 4), [UpdateStep(OptimizerSpec("sgd"), rate=0.5)])
        >>> table[:, 0].tolist()
        [0.0, -1.0, 0.0]
    """
    if not batch.values.numel():
        return
    found = find_tables(tables, batch.feature_tables)
    if found is not None and _in_one_call(found, tables, states, batch, grad, steps[0]):
        return
    for touched in touched_rows(batch, grad, [table.shape[1] for table in tables]):
        table, step = tables[touched.table], steps[touched.table]
        if step.rule.kind == "sgd" and table.is_cpu:
            add_rows(table, touched.ids, touched.bags, touched.weights, touched.grad, -step.rate)
        else:
            groups = sort_rows(touched.ids, touched.bags, touched.weights, table.shape[0])
            apply_update(table, states[touched.table], touched.grad, groups, step)


@torch.no_grad()
def step_rows(table: Tensor, states: Sequence[Tensor], ids: Tensor, grad: Tensor, step: UpdateStep) -> None:
    """Move different rows of one table, each by a gradient of its own.

    Args:
        table: [R, D], changed in place.
        states: What the rule keeps, [R] or [R, D] each, changed in place; nothing for sgd.
        ids: Different rows [U].
        grad: [U, D].
        step: The optimizer, its rate, and which step it is.

    Example:
        >>> import torch
        >>> from tutorec._kernels.optimizer_spec import OptimizerSpec
        >>> table = torch.zeros(3, 1)
        >>> step_rows(table, (), torch.tensor([2]), torch.ones(1, 1), UpdateStep(OptimizerSpec("sgd"), rate=0.5))
        >>> table.flatten().tolist()
        [0.0, 0.0, -0.5]
    """
    each = torch.arange(ids.numel() + 1, device=ids.device)
    apply_update(table, states, grad, RowGroups(ids, each, each[:-1], None), step)


def _in_one_call(
    found: SeparateTables,
    tables: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    batch: PooledBatch,
    grad: Tensor,
    step: UpdateStep,
) -> bool:
    """By fbgemm, where that is the fastest way; whether it was done."""
    arguments = batch.values, batch.offsets, batch.weights, batch.mean
    if step.rule.kind == "sgd":
        found.step_sgd(grad, arguments, step.rate)
        return True
    if step.rule.kind != "rowwise_adagrad":
        return False
    squares = [state for (state,) in states]
    many = batch.values.numel() > _FEW_IDS * len(tables)
    if many and step_rowwise_adagrad(found, tables, squares, batch, grad, step.rate, step.rule.eps):
        return True
    if not found.geometry.grouped:
        return False
    of_features = [squares[table] for table in batch.feature_tables]
    found.step_rowwise_adagrad(grad, arguments, of_features, step.rate, step.rule.eps)
    return True
