"""Every kernel in few lines of torch, for the book, and for tests of the other kernels.

The jagged functions run wherever fbgemm is missing; the lookups and updates are oracles, written to
be read. They take one table and its ids, make whatever they need in full, and leave speed to
``tbe_torch`` and fbgemm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorec._kernels.optimizer_spec import OptimizerSpec

__all__ = [
    "adagrad_update",
    "adam_update",
    "bucketize",
    "embedding_bag_forward",
    "embedding_bag_gradient",
    "jagged_to_padded_dense",
    "lengths_to_offsets",
    "rowwise_adagrad_update",
    "sgd_update",
    "update",
]


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Offsets of bags from lengths: [L] -> [L+1], or row by row [F, L] -> [F, L+1].

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import lengths_to_offsets
        >>> lengths_to_offsets(torch.tensor([2, 0, 3])).tolist()
        [0, 2, 2, 5]
    """
    offsets = lengths.new_zeros([*lengths.shape[:-1], lengths.shape[-1] + 1])
    torch.cumsum(lengths, -1, out=offsets[..., 1:])
    return offsets


def jagged_to_padded_dense(
    values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0
) -> Tensor:
    """Rows of different length, padded: [N] or [N, D] -> [B, max_length] or [B, max_length, D].

    Rows longer than ``max_length`` are cut, shorter ones are filled with ``padding``.

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import jagged_to_padded_dense
        >>> jagged_to_padded_dense(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), 2).tolist()
        [[1, 2], [3, 0]]
    """
    lengths = offsets.diff()
    batch = lengths.numel()
    place = torch.arange(max_length, device=values.device)
    present = place < lengths.unsqueeze(1)
    source = (offsets[:-1].unsqueeze(1) + place)[present]
    dense = values.new_full((batch, max_length, *values.shape[1:]), padding)
    return dense.index_put((present,), values[source])


def bucketize(
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Sequence[int],
    bounds: Sequence[Sequence[int]],
    keep_places: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Bucketize ids by row range: lengths [S], values [N] -> [buckets * S], and three [N].

    See ``bucketize.py`` for the arguments.

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import bucketize
        >>> lengths, ids = torch.tensor([3, 1]), torch.tensor([4, 0, 2, 3])
        >>> bucketize(lengths, ids, None, [2], [[0, 3, 5]])[:2]
        (tensor([2, 0, 1, 1]), tensor([0, 2, 1, 0]))
    """
    lists, count, buckets = lengths.numel(), values.numel(), len(bounds[0]) - 1
    firsts = torch.tensor(bounds, dtype=torch.int64, device=values.device)[:, :-1]
    per_feature = torch.tensor(list(segments), device=values.device)
    feature = torch.arange(len(bounds), device=values.device).repeat_interleave(
        per_feature, output_size=lists
    )
    bag = torch.arange(lists, device=values.device).repeat_interleave(lengths, output_size=count)
    bucket = torch.zeros_like(bag)
    for later in firsts[:, 1:].unbind(1):
        bucket += values >= later[feature[bag]]
    # Of bytes a stable sort is a tenth of one of int64.
    order = (bucket.to(torch.uint8) if buckets <= 256 else bucket).argsort(stable=True)
    counts = lengths.new_zeros(buckets * lists)
    counts.index_add_(0, bucket * lists + bag, torch.ones_like(bag, dtype=lengths.dtype))
    inside = values - firsts[feature[bag], bucket].to(values.dtype)
    return (
        counts,
        inside[order],
        None if weights is None else weights[order],
        order.argsort() if keep_places else None,
    )


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

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import embedding_bag_forward
        >>> table = torch.tensor([[1.0], [10.0], [100.0]])
        >>> embedding_bag_forward(
        ...     table, torch.tensor([0, 2, 2]), torch.tensor([0, 2, 3]), "mean"
        ... ).tolist()
        [[50.5], [100.0]]
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
    """Dense gradient [R, D] of a table: gradients [N, D] of rows, summed over repeated ids.

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import embedding_bag_gradient
        >>> embedding_bag_gradient(
        ...     torch.zeros(3, 1), torch.tensor([2, 0, 2]), torch.ones(3, 1)
        ... ).flatten().tolist()
        [1.0, 0.0, 2.0]
    """
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

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import sgd_update
        >>> sgd_update(
        ...     torch.ones(3, 1), torch.tensor([2, 0, 2]), torch.ones(3, 1), 0.25
        ... ).flatten().tolist()
        [0.75, 1.0, 0.5]
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

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import rowwise_adagrad_update
        >>> grads = torch.tensor([[3.0, 3.0], [1.0, 1.0]])
        >>> ids = torch.tensor([0, 0])
        >>> zeros = torch.zeros(2, 2), torch.zeros(2)
        >>> weight, momentum = rowwise_adagrad_update(*zeros, ids, grads, 0.5)
        >>> weight.tolist(), momentum.tolist()
        ([[-0.5, -0.5], [0.0, 0.0]], [16.0, 0.0])
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

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import adagrad_update
        >>> weight, momentum = adagrad_update(
        ...     torch.zeros(1, 2),
        ...     torch.zeros(1, 2),
        ...     torch.tensor([0]),
        ...     torch.tensor([[3.0, -4.0]]),
        ...     0.5,
        ... )
        >>> weight.tolist(), momentum.tolist()
        ([[-0.5, 0.5]], [[9.0, 16.0]])
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

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import adam_update
        >>> fresh = torch.zeros(1, 2), torch.zeros(1, 2)
        >>> rule, grads = OptimizerSpec("adam", eps=0.0), torch.tensor([[3.0, -4.0]])
        >>> ids = torch.tensor([0])
        >>> weight, _ = adam_update(rule, torch.zeros(1, 2), fresh, ids, grads, 0.5, number=1)
        >>> weight.tolist()  # the first step is the rate, whatever the gradient
        [[-0.5, 0.5]]
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

    Example:
        >>> import torch
        >>> from tutorec._kernels.reference import update
        >>> rule, grads = OptimizerSpec("sgd"), torch.ones(1, 1)
        >>> update(rule, torch.ones(2, 1), (), torch.tensor([1]), grads, rate=0.25, number=1)[
        ...     0
        ... ].flatten().tolist()
        [1.0, 0.75]
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
