r"""What each optimizer does to the rows of a batch, once the gradients of each row are summed.

The formulas of SGD and both Adagrads are in ``optimizer_spec``. Adam, in step t, on the touched
rows alone:

.. math::

    m \leftarrow \beta_1 m + (1 - \beta_1) g \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \\
    \hat m = m / (1 - \beta_1^t) \qquad \hat v = v / (1 - \beta_2^t) \\
    w \leftarrow w - \eta\, (\hat m / (\sqrt{\hat v} + \epsilon) + \lambda w)

Partial row-wise Adam keeps one number v for a row, and takes the mean of :math:`g^2` over its
columns. These are the rules of fbgemm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorec._kernels.specs import UpdateStep

__all__ = ["move_rows"]

_LACKING_BITS = {torch.float16: 13, torch.bfloat16: 16}  # of the 23 in float32's mantissa


def move_rows(
    matrix: Tensor, states: Sequence[Tensor], rows: Tensor, sums: Tensor, step: UpdateStep
) -> None:
    """Move different rows, each once.

    Args:
        matrix: Rows [R, D], changed in place. Rows of 16 bits are updated in float32 and rounded.
        states: As ``step.rule.states`` says, float32 [R] or [R, D] each, changed in place.
        rows: Which ones [U].
        sums: Their gradients [U, D]; used up.
        step: The rule, its rate, and which step it is.

    Example:
        >>> import torch
        >>> from tutorec._kernels.specs import OptimizerSpec, UpdateStep
        >>> from tutorec._kernels.row_rules import move_rows
        >>> matrix, state = torch.zeros(3, 2), torch.zeros(3, 2)
        >>> step = UpdateStep(OptimizerSpec("adagrad", eps=0.0), rate=0.5)
        >>> move_rows(matrix, [state], torch.tensor([2]), torch.tensor([[3.0, -4.0]]), step)
        >>> matrix[2].tolist(), state[2].tolist()
        ([-0.5, 0.5], [9.0, 16.0])
    """
    optimizer = step.rule.kind
    eps = step.rule.eps
    if optimizer == "sgd":
        sums *= -step.rate
    elif optimizer == "rowwise_adagrad":
        (squares,) = states
        squares.index_add_(0, rows, sums.square().mean(1))
        sums *= (-step.rate / (squares.index_select(0, rows).sqrt_() + eps)).unsqueeze(1)
    elif optimizer == "adagrad":
        (squares,) = states
        own = squares.index_select(0, rows).addcmul_(sums, sums)
        squares.index_copy_(0, rows, own)
        sums.div_(own.sqrt_().add_(eps)).mul_(-step.rate)
    else:
        sums = _adam(matrix, states, rows, sums, step)

    if matrix.dtype == torch.float32:
        matrix.index_add_(0, rows, sums)
        return

    updated = matrix.index_select(0, rows).float().add_(sums)
    if step.rule.stochastic_rounding:
        _round_at_random(updated, matrix.dtype, step.seed)
    matrix.index_copy_(0, rows, updated.to(matrix.dtype))


def _round_at_random(numbers: Tensor, dtype: torch.dtype, seed: int) -> None:
    """Round float32 numbers, in place, to one of their two neighbours in ``dtype``.

    A random number is added to the bits that ``dtype`` lacks, and these are then cut off: the
    nearer neighbour is the likelier, and a number is kept on average. Numbers below 6e-5, whose
    neighbours in float16 are all 6e-8 apart, are left to rounding to nearest.
    """
    lacking = _LACKING_BITS[dtype]
    generator = torch.Generator(numbers.device).manual_seed(seed)
    noise = torch.randint(
        1 << lacking,
        numbers.shape,
        generator=generator,
        dtype=torch.int32,
        device=numbers.device,
    )
    numbers.view(torch.int32).add_(noise).bitwise_and_(-1 << lacking)


def _adam(
    matrix: Tensor, states: Sequence[Tensor], rows: Tensor, sums: Tensor, step: UpdateStep
) -> Tensor:
    """Move both means, and return how far each row is to go [U, D]."""
    rule = step.rule
    first, second = states

    squares = sums.square()
    if second.dim() == 1:
        squares = squares.mean(1)
    mean = first.index_select(0, rows).mul_(rule.beta1).add_(sums, alpha=1 - rule.beta1)
    spread = second.index_select(0, rows).mul_(rule.beta2).add_(squares, alpha=1 - rule.beta2)
    first.index_copy_(0, rows, mean)
    second.index_copy_(0, rows, spread)

    # Both means start at 0; what is missing of their weight in step t is made up for.
    root = spread.div_(1 - rule.beta2**step.number).sqrt_().add_(rule.eps)
    way = mean.div_(root if root.dim() == 2 else root.unsqueeze(1)).mul_(
        -step.rate / (1 - rule.beta1**step.number)
    )
    if rule.weight_decay:
        way.sub_(matrix.index_select(0, rows), alpha=step.rate * rule.weight_decay)
    return way
