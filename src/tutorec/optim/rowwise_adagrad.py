"""`RowWiseAdagrad`: Adagrad with one accumulator per row instead of one per element."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutorec._kernels.memory import unwritten_zeros
from tutorec.optim.rates import check_number


class RowOptimizer(Optimizer, ABC):
    """Base of optimizers for tables: a step moves each parameter by its gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad.float(), group)
        return loss

    @abstractmethod
    def _move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter by its gradient in float32."""


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one accumulator per row: the sum of the row's mean squared gradients.

    For row r with the summed gradient g, in step t::

        sum[r] += mean(g**2)
        table[r] -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum[r]) + eps)

    The state of a table [R, D] is ``sum`` [R, 1] and ``step``, the number t of steps. With
    ``apply_optimizer_in_backward`` it updates only the rows in the batch; as an ordinary optimizer
    it uses whole dense gradients. The two agree, since a row without gradient does not change,
    except through ``weight_decay``: an ordinary optimizer adds it to every row's gradient, backward
    only to those of the rows in the batch.

    Args:
        params: Matrices [R, D], or groups of them.
        lr: Learning rate.
        lr_decay: Decay of the learning rate per step.
        weight_decay: Factor of the weights that is added to the gradient.
        initial_accumulator_value: Initial value of ``sum``.
        eps: Added to the square root.
        maximize: Whether to maximize the objective.
        unused: Accepted and ignored, as in TorchRec.

    Raises:
        ValueError: A number is negative.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> RowWiseAdagrad([weight], lr=1.0).step()
        >>> weight[0] * ((9 + 16) / 2) ** 0.5  # the root of the mean of 9 and 16
        tensor([-3., -4.], grad_fn=<MulBackward0>)

    See Also:
        TorchRec's ``torchrec.optim.rowwise_adagrad.RowWiseAdagrad``.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **unused: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        for name, number in defaults.items():
            check_number(number, f"RowWiseAdagrad: {name}")
        super().__init__(params, {**defaults, "maximize": maximize})

        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = _new_state(parameter, group["initial_accumulator_value"])

    def share_memory(self) -> None:
        """Move the state into shared memory."""
        for state in self.state.values():
            state["sum"].share_memory_()

    def _move(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] += 1
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"]:
            grad = grad.add(parameter, alpha=group["weight_decay"])

        state["sum"] += grad.square().mean(1, keepdim=True)
        root = state["sum"].float().sqrt().add_(group["eps"])
        parameter.sub_(grad.div(root).mul_(rate_of_step(group, state["step"].item())))


def rate_of_step(group: dict[str, Any], step: float) -> float:
    """The learning rate of a parameter group at step t, counted from 1."""
    return float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])


def _new_state(parameter: Tensor, value: float) -> dict[str, Tensor]:
    # In float32 also for 16-bit rows, in which a growing sum would soon stop changing.
    rows = unwritten_zeros((parameter.shape[0], 1), device=parameter.device)
    if value:
        rows.fill_(value)
    return {"step": torch.tensor(0.0), "sum": rows}
