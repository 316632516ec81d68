"""Optimizers for tables beyond torch's, and the filter of parameters for ordinary optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam

from tutorec._kernels.memory import unwritten_zeros
from tutorec.optim.rates import check_number, check_rate
from tutorec.optim.rowwise_adagrad import RowOptimizer


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that are *not* updated during backward and need an ordinary optimizer.

    Args:
        named_parameters: As from ``model.named_parameters()``.
        include: Whether to yield the parameters that backward updates instead.

    Yields:
        (name, parameter).

    Example:
        >>> import torch
        >>> [
        ...     name
        ...     for name, _ in in_backward_optimizer_filter(
        ...         torch.nn.Linear(2, 1).named_parameters()
        ...     )
        ... ]
        ['weight', 'bias']

    Source:
        TorchRec's ``torchrec.optim.optimizers.in_backward_optimizer_filter``.
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter


class PartialRowWiseAdam(RowOptimizer):
    """Adam with a row-wise second moment: the mean of squared gradients is one number per row.

    For row r with gradient g, in step t::

        exp_avg[r] = beta1 * exp_avg[r] + (1 - beta1) * g
        exp_avg_sq[r] = beta2 * exp_avg_sq[r] + (1 - beta2) * mean(g**2)
        table[r] -= lr * (
            exp_avg[r] / (1 - beta1**t) / (sqrt(exp_avg_sq[r] / (1 - beta2**t)) + eps)
            + weight_decay * table[r]
        )

    With ``apply_optimizer_in_backward`` it updates only the rows in the batch, and is fused for
    sharded tables (``EmbOptimType.PARTIAL_ROWWISE_ADAM``). As an ordinary optimizer it updates all
    rows.

    Args:
        params: Matrices [R, D], or groups of them.
        lr: Learning rate.
        betas: Decay rates of the two means.
        eps: Added to the square root.
        weight_decay: Decoupled weight decay, as in AdamW.

    Raises:
        ValueError: A number is negative or NaN, or a beta is not below 1.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1, 2))
        >>> weight.grad = torch.tensor([[3.0, 4.0]])
        >>> PartialRowWiseAdam([weight], lr=1.0).step()
        >>> weight * torch.tensor([9.0 + 16.0]).div(
        ...     2
        ... ).sqrt()  # at first g, divided by the root of its mean square
        tensor([[-3., -4.]], grad_fn=<MulBackward0>)

    Source:
        TorchRec's ``torchrec.optim.optimizers.PartialRowWiseAdam``, which has no ``step``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_rate(lr, "PartialRowWiseAdam")
        for name, number in (("eps", eps), ("weight_decay", weight_decay)):
            check_number(number, f"PartialRowWiseAdam: {name}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(
                f"PartialRowWiseAdam: betas={betas!r} must be numbers of at least 0 and below 1"
            )

        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def _move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter))
        beta1, beta2 = group["betas"]
        rate = float(group["lr"])
        mean = state["exp_avg"]
        spread = state["exp_avg_sq"]

        state["step"] += 1
        number = state["step"].item()
        mean.lerp_(grad, 1 - beta1)
        spread.lerp_(grad.square().mean(1, keepdim=True), 1 - beta2)
        root = (spread / (1 - beta2**number)).sqrt_().add_(group["eps"])
        step = (mean / (1 - beta1**number)).div_(root).add_(parameter, alpha=group["weight_decay"])
        parameter.sub_(step.mul_(rate))


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    # In float32 also for 16-bit rows, whose squared gradients would underflow.
    zeros = unwritten_zeros(parameter.shape, device=parameter.device)
    return {
        "step": torch.tensor(0.0),
        "exp_avg": zeros,
        "exp_avg_sq": zeros.new_zeros(len(zeros), 1),
    }


__all__ = ["SGD", "Adagrad", "Adam", "PartialRowWiseAdam", "in_backward_optimizer_filter"]
