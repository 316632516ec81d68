"""Lookups whose backward moves the rows: unsharded tables trained without a gradient of their size.

A table of 10 million rows of which a batch touches a thousand should not cost 10 million rows of gradient. Where
``apply_optimizer_in_backward`` has left an optimizer on a table, the collections look it up through here, and backward
hands the optimizer the touched rows only. The semantics are those of fused kernels, the same as of sharded tables:

- Rows that are not in the batch, and their state, do not move; momentum and weight decay reach touched rows only.
- Ids that repeat in a batch are summed before one update of their row; so are the features that share a table.
- Every backward is a step, with the learning rate in force then: two forwards that wait for their backwards give two
  steps, and so does a second backward through a retained graph.
- It is a step of every table, also of one that the batch has no ids of: its optimizer counts it, and no row moves.

Works with torch's ``_apply_optimizer_in_backward`` too, which leaves the same marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from tutorec._kernels.separate import SeparateTables, find_tables
from tutorec._kernels.tbe_update import sum_rows
from tutorec._kernels.weighted_step import FEW_IDS, PooledBatch, step_rowwise_adagrad
from tutorec.optim.row_update import RowGradients, fused_rule, group_of, mark_stepped, update_rows

# What a table has while somebody listens: called with touched rows [U] and their summed gradients [U, D].
GRADIENT_LISTENER = "_gradient_listener"
_PLAIN = (Tensor, nn.Parameter)
_FEW_IDS = FEW_IDS


@dataclass(frozen=True)
class Bags:
    """What one feature looks up in one table.

    Attributes:
        table: [R, D].
        ids: [N].
        offsets: [B + 1]; None where every id is a bag of its own.
        weights: Factor of each id [N], or None for 1; gets its gradient where it requires one.
        mean: Whether a bag's sum is divided by its number of ids.
    """

    table: Tensor
    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    mean: bool = False


def updates_in_backward(tables: Iterable[Tensor]) -> bool:
    """Whether a lookup in these tables, made now, is to be followed by their update during backward.

    Example:
        >>> import torch
        >>> from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> table = torch.nn.Parameter(torch.ones(3, 2))
        >>> before = updates_in_backward([table])
        >>> apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.1})
        >>> before, updates_in_backward([table])
        (False, True)
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_tracing():
        return False
    return any(_is_updated(table) for table in tables)


def look_up(bags: Sequence[Bags]) -> list[Tensor]:
    """Pool each feature's bags [B, D], or take its rows [N, D], so that backward updates the marked tables.

    All features of a collection go into one call: those that share a table are then one update. Unmarked tables are
    looked up as always and get their gradients. Rows of 16 bits come out as float32.

    Example:
        >>> import torch
        >>> from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> table = torch.nn.Parameter(torch.ones(3, 2))
        >>> apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.25})
        >>> [pooled] = look_up([Bags(table, torch.tensor([2, 2, 0]), torch.tensor([0, 2, 3]))])
        >>> pooled.sum().backward()
        >>> table[:, 0].tolist(), table.grad  # row 2 is in the batch twice, row 1 is not
        ([0.75, 1.0, 0.5], None)
    """
    marked = [one for one in bags if _is_updated(one.table)]
    weights = [one.weights for one in marked]
    found = iter(cast(tuple[Tensor, ...], _UpdatingLookup.apply(_anchor(), marked, *weights)) if marked else ())
    return [next(found) if _is_updated(one.table) else _forward(one) for one in bags]


def look_up_batch(tables: Sequence[Tensor], batch: PooledBatch) -> Tensor | None:
    """``look_up`` for a whole collection: one call forward and, where it pays, one backward.

    Args:
        tables: [R, D] each.
        batch: What is looked up.

    Returns:
        Pooled rows side by side [B, sum of D]; None where ``look_up`` is to do it: not every table is updated in
        backward, or fbgemm cannot address them.
    """
    if not all(_is_updated(table) for table in tables):
        return None
    found = find_tables(tables, batch.feature_tables)
    return None if found is None else cast(Tensor, _UpdatingBatch.apply(_anchor(), found, tables, batch))


def _is_updated(table: Tensor) -> bool:
    return table.requires_grad and type(table) in _PLAIN and bool(getattr(table, "_in_backward_optimizers", None))


def _anchor() -> Tensor:
    """What autograd records a lookup by. The tables are no inputs: each would cost a visit in backward, for nothing."""
    return torch.empty(0, requires_grad=True)


def _forward(one: Bags) -> Tensor:
    if one.offsets is None:
        rows = F.embedding(one.ids, one.table).float()
        return rows if one.weights is None else rows * one.weights.unsqueeze(1)
    weights = None if one.weights is None else one.weights.to(one.table.dtype)
    mode = "mean" if one.mean else "sum"
    return F.embedding_bag(
        one.ids, one.table, one.offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
    ).float()


class _UpdatingLookup(torch.autograd.Function):
    """Looks up; backward gives the weights their gradients, and the tables none: it moves their rows."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, bags: Sequence[Bags], *weights: Tensor | None) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bags = bags
        # Rows move before their weights' gradient may be asked for (another backward comes first): a copy is kept.
        wanted = ctx.needs_input_grad[2:]
        ctx.rows = [one.table.detach()[one.ids] if need else None for one, need in zip(bags, wanted, strict=True)]
        # Ids that change in place until backward are an error, as everywhere in autograd.
        ctx.save_for_backward(*(part for one in bags for part in (one.ids, one.offsets, one.weights)))
        return tuple(_forward(one) for one in bags)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        parts: dict[int, list[tuple[Bags, Tensor]]] = {}
        of_weights: list[Tensor | None] = []
        for one, rows, grad in zip(ctx.bags, ctx.rows, grads, strict=True):
            of_weights.append(None if rows is None or grad is None else _weights_gradient(one, rows, grad))
            if grad is not None:
                parts.setdefault(id(one.table), []).append((one, grad))
        _report(parts.values())
        _update_tables(parts.values())
        increment_version([one.table for one in ctx.bags])
        return (None, None, *of_weights)


class _UpdatingBatch(torch.autograd.Function):
    """The same for a whole batch at once."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, found: SeparateTables, tables: Sequence[Tensor], batch: PooledBatch
    ) -> Tensor:
        ctx.tables, ctx.batch = tables, batch
        ctx.save_for_backward(batch.values, batch.offsets, batch.weights)
        return found.pool(batch.values, batch.offsets, batch.weights, batch.mean)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        _ = ctx.saved_tensors
        batch: PooledBatch = ctx.batch
        if any(getattr(table, GRADIENT_LISTENER, None) is not None for table in ctx.tables):
            _report(_features_of_tables(ctx.tables, batch, grads[0]).values())
        if not (batch.values.numel() and _step_in_one_call(ctx.tables, batch, grads[0])):
            _step_by_table(ctx.tables, batch, grads[0])
        increment_version(ctx.tables)
        return None, None, None, None


def _step_in_one_call(tables: Sequence[Tensor], batch: PooledBatch, grad: Tensor) -> bool:
    """Update all tables with fbgemm's operators, if they share a rule that it knows and that is the fastest way."""
    optimizers = [optimizer for table in tables for optimizer in cast(Any, table)._in_backward_optimizers]
    if len(optimizers) != len(tables):
        return False
    rules = [fused_rule(optimizer, table) for optimizer, table in zip(optimizers, tables, strict=True)]
    rule, found = rules[0], find_tables(tables, batch.feature_tables)
    if rule is None or found is None or any(other != rule for other in rules):
        return False
    arguments = batch.values, batch.offsets, batch.weights, batch.mean
    if rule.kind == "sgd":
        found.step_sgd(grad, arguments, rule.rate)
    elif not found.geometry.grouped or group_of(optimizers[0], tables[0])["lr_decay"]:
        return False
    else:
        states = [optimizer.state[table] for optimizer, table in zip(optimizers, tables, strict=True)]
        sums = [state["sum"].view(-1) for state in states]
        if batch.values.numel() <= _FEW_IDS * len(tables):
            of_features = [sums[table] for table in batch.feature_tables]
            found.step_rowwise_adagrad(grad, arguments, of_features, rule.rate, rule.eps)
        elif not step_rowwise_adagrad(found, tables, sums, batch, grad, rule.rate, rule.eps):
            return False
        counts = {id(state["step"]): state["step"] for state in states}  # tied tables have one
        torch._foreach_add_([*counts.values()], 1)  # pyright: ignore[reportPrivateImportUsage]
    for optimizer in optimizers:
        mark_stepped(optimizer)
    return True


def _step_by_table(tables: Sequence[Tensor], batch: PooledBatch, grad: Tensor) -> None:
    """Update table by table, each with its optimizer."""
    _update_tables(_features_of_tables(tables, batch, grad).values())


def _features_of_tables(
    tables: Sequence[Tensor], batch: PooledBatch, grad: Tensor
) -> dict[int, list[tuple[Bags, Tensor]]]:
    """For each table, by its index, the bags and gradients of its features; tied tables are one."""
    samples, column = grad.shape[0], 0
    windows = batch.offsets.unfold(0, samples + 1, samples or 1)
    if not samples:
        windows = windows.expand(len(batch.feature_tables), 1)
    bounds = [*windows[:, 0].tolist(), batch.values.numel()]
    first_of = {id(table): index for index, table in reversed(list(enumerate(tables)))}
    found: dict[int, list[tuple[Bags, Tensor]]] = {}
    for feature, index in enumerate(batch.feature_tables):
        table, own = tables[index], slice(bounds[feature], bounds[feature + 1])
        weights = None if batch.weights is None else batch.weights[own]
        bags = Bags(table, batch.values[own], windows[feature], weights, batch.mean)
        found.setdefault(first_of[id(table)], []).append((bags, grad[:, column : column + table.shape[1]]))
        column += table.shape[1]
    return found


def _update_tables(parts: Iterable[list[tuple[Bags, Tensor]]]) -> None:
    """One step for each table, from the gradients of all its features."""
    for features in parts:
        table, touched = features[0][0].table, _row_gradients(features)
        for optimizer in cast(Any, table)._in_backward_optimizers:
            update_rows(optimizer, table, touched)


def _report(parts: Iterable[list[tuple[Bags, Tensor]]]) -> None:
    """Tell each table's gradient to who listens to it, before its rows move."""
    for features in parts:
        listener = getattr(features[0][0].table, GRADIENT_LISTENER, None)
        if listener is not None:
            touched = _row_gradients(features)
            listener(touched.groups.rows, sum_rows(touched.grad, touched.groups))


def _bag_of_each(one: Bags) -> Tensor | None:
    return None if one.offsets is None else torch.repeat_interleave(one.offsets.diff(), output_size=one.ids.numel())


def _weights_gradient(one: Bags, rows: Tensor, grad: Tensor) -> Tensor:
    """Of each id's weight: its row times the gradient of its bag [N]."""
    bags = _bag_of_each(one)
    assert one.weights is not None and not one.mean, "the mean of weighted rows reaches this as a sum"
    return (rows.float() * (grad if bags is None else grad[bags])).sum(1).to(one.weights.dtype)


def _row_gradients(parts: Sequence[tuple[Bags, Tensor]]) -> RowGradients:
    """The gradient of one table from all features that looked rows up in it."""
    ids, bags, weights, grads, start = [], [], [], [], 0
    weighted = any(one.weights is not None for one, _ in parts)
    for one, grad in parts:
        if one.mean and one.offsets is not None:
            grad = grad / one.offsets.diff().clamp(min=1).unsqueeze(1)
        own = _bag_of_each(one)
        own = torch.arange(grad.shape[0], device=grad.device) if own is None and (start or len(parts) > 1) else own
        ids.append(one.ids)
        bags.append(own if own is None or not start else own + start)
        grads.append(grad)
        if weighted:
            weights.append(grad.new_ones(one.ids.numel()) if one.weights is None else one.weights.detach().float())
        start += grad.shape[0]
    rows = parts[0][0].table.shape[0]
    if len(parts) == 1:
        grad = grads[0] if grads[0].stride(1) == 1 else grads[0].contiguous()
        return RowGradients(ids[0], bags[0], weights[0] if weighted else None, grad, rows)
    joined = [torch.cat(part) for part in (ids, bags, grads)]
    return RowGradients(joined[0], joined[1], torch.cat(weights) if weighted else None, joined[2], rows)
