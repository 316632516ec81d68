"""The update of a fused lookup alone, from tables, a batch and the gradient of its pooled rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tutorec._kernels.adagrad_stalls import updates_in_torch
from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.specs import UpdateStep
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec._kernels.tbe_update import RowGroups, apply_update, sort_rows

__all__ = ["TouchedRows", "join_gradients", "step_tables", "touched_rows"]


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

    def sorted(self, rows: int) -> RowGroups:
        """The ids sorted by row, of a table with R rows."""
        return sort_rows(self.ids, self.bags, self.weights, rows)


def touched_rows(batch: PooledBatch, grad: Tensor, columns: Sequence[int]) -> Iterator[TouchedRows]:
    """The gradient of each table that a batch reads, each table once.

    Args:
        batch: What was looked up.
        grad: Of the pooled rows [B, sum of D over features].
        columns: D of each table.

    Example:
        >>> import torch
        >>> batch = PooledBatch(
        ...     torch.tensor([5, 2, 5]), torch.tensor([0, 2, 3]), None, False, (0, 0)
        ... )
        >>> [touched] = touched_rows(batch, torch.tensor([[1.0, 10.0]]), columns=[1])
        >>> touched.ids.tolist(), touched.grad.tolist()
        ([5, 2, 5], [[1.0], [10.0]])
    """
    samples = grad.shape[0]
    features = batch.feature_tables
    bounds = batch.offsets[::samples].tolist() if samples else [0] * (len(features) + 1)
    starts = [*accumulate((columns[table] for table in features), initial=0)]
    lengths = batch.offsets.diff().view(len(features), samples)

    gradients_by_table: dict[int, list[TouchedRows]] = {}
    for feature, table in enumerate(features):
        ids = slice(bounds[feature], bounds[feature + 1])
        bag_grad = grad[:, starts[feature] : starts[feature + 1]]
        if batch.mean:
            bag_grad = bag_grad / lengths[feature].clamp(min=1).unsqueeze(1)
        bags = torch.repeat_interleave(lengths[feature], output_size=ids.stop - ids.start)
        weights = None if batch.weights is None else batch.weights[ids]
        gradients_by_table.setdefault(table, []).append(
            TouchedRows(table, batch.values[ids], bags, weights, bag_grad)
        )

    for gradients in gradients_by_table.values():
        yield join_gradients(gradients)


def join_gradients(parts: Sequence[TouchedRows]) -> TouchedRows:
    """The gradient of one table from several of its features.

    Args:
        parts: Of one table, with bags.

    Example:
        >>> import torch
        >>> one = TouchedRows(
        ...     0, torch.tensor([5]), torch.tensor([0]), None, torch.tensor([[1.0]])
        ... )
        >>> join_gradients([one, one]).bags.tolist()
        [0, 1]
    """
    if len(parts) == 1:
        return replace(parts[0], grad=parts[0].grad.contiguous())
    starts = accumulate((term.grad.shape[0] for term in parts), initial=0)
    ones = [
        term.grad.new_ones(1).expand(term.ids.numel()) if term.weights is None else term.weights
        for term in parts
    ]

    return TouchedRows(
        parts[0].table,
        torch.cat([term.ids for term in parts]),
        torch.cat(
            [
                term.bags + start
                for term, start in zip(parts, starts, strict=False)
                if term.bags is not None
            ]
        ),
        None if all(term.weights is None for term in parts) else torch.cat(ones),
        torch.cat([term.grad for term in parts]),
    )


@torch.no_grad()
def step_tables(
    tables: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    batch: PooledBatch,
    grad: Tensor,
    steps: Sequence[UpdateStep],
) -> None:
    """Update every row of a batch once with the sum of its gradients, as a fused backward does.

    Args:
        tables: [R, D], changed in place.
        states: What the rule keeps of each table, [R] or [R, D] each, changed in place; nothing for
            sgd.
        batch: What was looked up.
        grad: Of the pooled rows [B, sum of D over features].
        steps: Of each table the optimizer, its rate, and which step it is.

    Example:
        >>> import torch
        >>> from tutorec._kernels.specs import OptimizerSpec
        >>> table = torch.zeros(3, 4)
        >>> batch = PooledBatch(
        ...     torch.tensor([1, 1]), torch.tensor([0, 1, 2]), None, False, (0,)
        ... )
        >>> step_tables(
        ...     [table],
        ...     [()],
        ...     batch,
        ...     torch.ones(2, 4),
        ...     [UpdateStep(OptimizerSpec("sgd"), rate=0.5)],
        ... )
        >>> table[:, 0].tolist()
        [0.0, -1.0, 0.0]
    """
    if not batch.values.numel():
        return

    scattered = address_tables(tables, batch.feature_tables)
    step = steps[0]
    same = all(other == step for other in steps)
    if scattered is not None and same and not updates_in_torch(step.rule.kind, batch):
        feature_states = [states[table] for table in batch.feature_tables]
        if scattered.step(grad, batch, feature_states, step):
            return

    for touched in touched_rows(batch, grad, [table.shape[1] for table in tables]):
        table = tables[touched.table]
        groups = touched.sorted(table.shape[0])
        apply_update(table, states[touched.table], touched.grad, groups, steps[touched.table])
