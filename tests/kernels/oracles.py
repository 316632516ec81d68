"""Lookups and updates in few lines of torch: the oracles of the kernels' tests, written to be read.

They take one table and its ids, make whatever they need in full, and leave speed to ``tbe_torch``
and fbgemm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorec._kernels.specs import OptimizerSpec


def embedding_bag_forward(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor,
    pooling: str = "sum",
    weights: Tensor | None = None,
) -> Tensor:
    """Pool the rows of each bag: weight [R, D], ids [N], offsets [B+1], weights [N] -> [B, D].

    The mean divides by the number of ids, weighted or not; ``"sqrtn"`` by the root of the sum of
    squared weights, which is the root of that number where there are none; an empty bag is 0.
    ``"none"`` returns the rows [N, D].
    """
    rows = weight[ids]
    if pooling == "none":
        return rows
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    lengths = offsets.diff()
    bags = torch.arange(lengths.numel(), device=ids.device).repeat_interleave(lengths)
    pooled = rows.new_zeros(lengths.numel(), weight.shape[1]).index_add(0, bags, rows)
    if pooling == "mean":
        pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
    if pooling == "sqrtn":
        squares = torch.ones_like(ids, dtype=rows.dtype) if weights is None else weights.square()
        norms = rows.new_zeros(lengths.numel()).index_add(0, bags, squares).sqrt()
        pooled = torch.where(norms.unsqueeze(1) > 0, pooled / norms.unsqueeze(1), 0.0)
    return pooled


def embedding_bag_gradient(weight: Tensor, ids: Tensor, row_grads: Tensor) -> Tensor:
    """Dense gradient [R, D] of a table: gradients [N, D] of rows, summed over repeated ids."""
    return torch.zeros_like(weight).index_add(0, ids, row_grads)


def sgd_update(weight: Tensor, ids: Tensor, row_grads: Tensor, learning_rate: float) -> Tensor:
    r"""New weights after one step of SGD, :math:`w_r \leftarrow w_r - \eta\, g_r`, by row.

    Args:
        weight: The table [R, D]; not changed.
        ids: Rows in the batch [N].
        row_grads: Gradient of each looked-up row [N, D].
        learning_rate: The rate.

    Returns:
        The new table; rows that are not in ``ids`` are bit for bit the old ones.
    """
    return weight - learning_rate * embedding_bag_gradient(weight, ids, row_grads)


def rowwise_adagrad_update(
    weight: Tensor,
    momentum: Tensor,
    ids: Tensor,
    row_grads: Tensor,
    learning_rate: float,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    r"""New weights and state after a step of row-wise Adagrad: one number of state per row.

    .. math::

        m_r \leftarrow m_r + \tfrac1D \textstyle\sum_d g_{rd}^2 \\
        w_r \leftarrow w_r - \eta\, g_r / (\sqrt{m_r} + \epsilon)

    Args:
        weight: The table [R, D]; not changed.
        momentum: Its state [R]; not changed.
        ids: Rows in the batch [N].
        row_grads: Gradient of each looked-up row [N, D]; those of repeated ids are summed first.
        learning_rate: The rate.
        eps: Added to the root.

    Returns:
        (weight, momentum); rows that are not in ``ids`` are bit for bit the old ones.
    """
    grad = embedding_bag_gradient(weight, ids, row_grads)
    momentum = momentum + grad.square().mean(1)
    return weight - learning_rate * grad / (momentum.sqrt() + eps).unsqueeze(1), momentum


def adagrad_update(
    weight: Tensor,
    momentum: Tensor,
    ids: Tensor,
    row_grads: Tensor,
    learning_rate: float,
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    r"""New weights and state after one step of Adagrad: one number of state for each weight.

    .. math::

        m \leftarrow m + g^2, \qquad w \leftarrow w - \eta\, g / (\sqrt{m} + \epsilon)

    Args:
        weight: The table [R, D]; not changed.
        momentum: Its state [R, D]; not changed.
        ids: Rows in the batch [N].
        row_grads: Gradient of each looked-up row [N, D]; those of repeated ids are summed first.
        learning_rate: The rate.
        eps: Added to the root.

    Returns:
        (weight, momentum); rows that are not in ``ids`` are bit for bit the old ones.
    """
    grad = embedding_bag_gradient(weight, ids, row_grads)
    momentum = momentum + grad.square()
    return weight - learning_rate * grad / (momentum.sqrt() + eps), momentum


def adam_update(
    rule: OptimizerSpec,
    weight: Tensor,
    states: tuple[Tensor, Tensor],
    ids: Tensor,
    row_grads: Tensor,
    learning_rate: float,
    number: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    r"""New weights and state after step t of Adam on the rows of a batch.

    .. math::

        m \leftarrow \beta_1 m + (1 - \beta_1) g, \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
        \hat m = m / (1 - \beta_1^t), \qquad \hat v = v / (1 - \beta_2^t) \\
        w \leftarrow w - \eta\, (\hat m / (\sqrt{\hat v} + \epsilon) + \lambda w)

    Where v has one number for a row, the row's mean of :math:`g^2` stands for it: partial row-wise
    Adam.

    Args:
        rule: The betas, epsilon, and the decay lambda.
        weight: The table [R, D]; not changed.
        states: m [R, D] and v, [R, D] or [R]; not changed.
        ids: Rows in the batch [N].
        row_grads: Gradient of each looked-up row [N, D]; those of repeated ids are summed first.
        learning_rate: The rate.
        number: t, from 1.

    Returns:
        (weight, (m, v)); rows that are not in ``ids`` are bit for bit the old ones.
    """
    (mean, spread), touched = (
        states,
        torch.zeros(weight.shape[0], 1, dtype=torch.bool).index_fill(0, ids, True),
    )
    grad = embedding_bag_gradient(weight, ids, row_grads)
    squares, seen = (
        (grad.square(), touched)
        if spread.dim() == 2
        else (grad.square().mean(1), touched.squeeze(1))
    )
    mean = torch.where(touched, rule.beta1 * mean + (1 - rule.beta1) * grad, mean)
    spread = torch.where(seen, rule.beta2 * spread + (1 - rule.beta2) * squares, spread)
    root = (spread / (1 - rule.beta2**number)).sqrt() + rule.eps
    root = root if root.dim() == 2 else root.unsqueeze(1)
    way = mean / (1 - rule.beta1**number) / root + rule.weight_decay * weight
    return torch.where(touched, weight - learning_rate * way, weight), (mean, spread)


def update(
    rule: OptimizerSpec,
    weight: Tensor,
    states: Sequence[Tensor],
    ids: Tensor,
    row_grads: Tensor,
    rate: float,
    number: float,
) -> tuple[Tensor, list[Tensor]]:
    """New weights and state after one step of any rule.

    Args:
        rule: Which one.
        weight: The table [R, D]; not changed.
        states: As ``rule.states`` says; not changed.
        ids: Rows in the batch [N].
        row_grads: Gradient of each looked-up row [N, D]; those of repeated ids are summed first.
        rate: Its learning rate.
        number: Of the step, from 1.
    """
    if rule.kind == "sgd":
        return sgd_update(weight, ids, row_grads, rate), []
    if rule.kind in ("adam", "partial_rowwise_adam"):
        weight, kept = adam_update(
            rule, weight, (states[0], states[1]), ids, row_grads, rate, number
        )
        return weight, list(kept)
    of_kind = rowwise_adagrad_update if rule.kind == "rowwise_adagrad" else adagrad_update
    weight, momentum = of_kind(weight, states[0], ids, row_grads, rate, rule.eps)
    return weight, [momentum]
