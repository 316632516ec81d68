"""Gradient clipping before a step, by norm or by value, over several ranks if requested.

Fused tables have no gradients when ``step`` is called. They are clipped inside backward, with
``fused_params={"gradient_clipping": True, "max_gradient": ...}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum, unique
from typing import Any, Protocol

import torch
from torch import Tensor

from tutorec.optim.in_backward import check_clipped
from tutorec.optim.keyed import KeyedOptimizer, OptimizerWrapper
from tutorec.optim.rates import check_number

_ROUNDING = 1e-6


@unique
class GradientClipping(Enum):
    """The bounded quantity: the norm of all gradients, each element, or none.

    Source:
        TorchRec's ``torchrec.optim.clipping.GradientClipping``.
    """

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class ReduceNorm(Protocol):
    """Knows which gradients are sharded over ranks, and reduces numbers over ranks.

    ``DistributedModelParallel.reduce_norm()`` returns one. Every rank calls it at every step, even
    if it has no gradients.
    """

    def is_sharded(self, parameter: Tensor) -> bool:
        """Whether other ranks hold other shards of the parameter or of its table."""
        ...

    def __call__(self, local: Tensor, largest: bool) -> Tensor:
        """The sum over ranks of ``local []``, or the maximum."""
        ...


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips gradients before each step of another optimizer.

    With NORM all gradients are multiplied by ``max_gradient / norm`` if the norm of all of them, as
    one vector, is larger than ``max_gradient``. All ranks must use the same factor, or replicas of
    dense parameters diverge. If some gradients are on one rank only (sharded tables with the
    ``dense`` kernel), the norm must therefore be computed over all ranks.

    Args:
        optimizer: The optimizer.
        clipping: What is bounded.
        max_gradient: The bound.
        norm_type: p of the norm, ``"inf"`` for the largest element.
        enable_global_grad_clip: Whether ``param_to_pgs`` is used.
        param_to_pgs: Parameter -> the process groups over which it is sharded. Ranks without such a
            parameter do not take part, so every rank must have a shard of it; ``reduce_norm`` has
            no such limit.
        track_grad_norm: Whether ``last_total_grad_norm`` is computed with VALUE and NONE, too.
        reduce_norm: ``model.reduce_norm()`` of a `DistributedModelParallel`, for the norm over all
            ranks.

    Raises:
        ValueError: A bound or p is negative or NaN; both ``param_to_pgs`` and ``reduce_norm`` are
            given; or backward updates a parameter, where clipping comes too late.

    Example:
        >>> import torch
        >>> from tutorec.optim.keyed import KeyedOptimizerWrapper
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> plain = KeyedOptimizerWrapper(
        ...     {"weight": weight}, lambda params: torch.optim.SGD(params, lr=1.0)
        ... )
        >>> weight.grad = torch.tensor([3.0, 4.0])  # of norm 5
        >>> GradientClippingOptimizer(plain, GradientClipping.NORM, max_gradient=1.0).step()
        >>> [round(number, 4) for number in weight.tolist()]
        [-0.6, -0.8]

    Source:
        TorchRec's ``torchrec.optim.clipping.GradientClippingOptimizer``.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Sequence[Any]] | None = None,
        track_grad_norm: bool = False,
        reduce_norm: ReduceNorm | None = None,
    ) -> None:
        super().__init__(optimizer)
        self._clipping = GradientClipping(clipping)
        if self._clipping is not GradientClipping.NONE:
            check_clipped(list(self.params.values()), type(self).__name__)
        self._max_gradient = check_number(max_gradient, "max_gradient")
        self._norm_type = float(norm_type)
        if not self._norm_type > 0:
            raise ValueError(f"norm_type={norm_type!r} must be a number above 0, or 'inf'")

        groups_by_id = {
            id(parameter): tuple(groups)
            for parameter, groups in (param_to_pgs or {}).items()
            if groups
        }
        if groups_by_id and reduce_norm is not None:
            raise ValueError(
                "param_to_pgs and reduce_norm both say how to reach other ranks: give one of them"
            )

        self._groups_of = groups_by_id if enable_global_grad_clip else {}
        self._reduce = reduce_norm
        self._track_grad_norm = track_grad_norm
        self._last_total_grad_norm: Tensor | None = None

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm before clipping at the last step ``[]``; None if it was not computed."""
        return self._last_total_grad_norm

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Clip, then step."""
        self._last_total_grad_norm = None
        if not any(parameter.is_meta for parameter in self._parameters()):
            if self._clipping is GradientClipping.NORM:
                self._last_total_grad_norm = self.clip_grad_norm_()
            elif self._track_grad_norm:
                self._last_total_grad_norm, _ = self.compute_total_grad_norm()
            if self._clipping is GradientClipping.VALUE:
                for grad in self._gradients(lambda parameter: True):
                    grad.clamp_(-self._max_gradient, self._max_gradient)

        return super().step(closure)

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor | None:
        """Scale gradients so that their norm is at most the bound; returns the old norm ``[]``."""
        norm, grads = self.compute_total_grad_norm()
        if not grads:
            return norm if self._reduce is not None else None

        # The small constant is torch's and TorchRec's; it avoids a division by zero.
        factor = (self._max_gradient / (norm + _ROUNDING)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor.to(grads[0].device))  # pyright: ignore[reportPrivateImportUsage]
        return norm

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients ``[]``, over ranks if requested, and this rank's gradients."""
        reduce = self._reduce
        groups_by_id = self._groups_of
        sharded = (lambda parameter: False) if reduce is None else reduce.is_sharded
        grads = self._gradients(
            lambda parameter: not sharded(parameter) and id(parameter) not in groups_by_id
        )
        powers = [self._power(grads)]
        if reduce is not None:
            gradients = self._gradients(sharded)
            powers.append(reduce(self._power(gradients), self._largest))
            grads += gradients

        for groups in dict.fromkeys(groups_by_id.values()):
            owners = [
                owner for owner in self._parameters() if groups_by_id.get(id(owner)) == groups
            ]
            gradients = [_dense(owner) for owner in owners if owner.grad is not None]
            # A rank without gradients has a zero on the CPU, for which another backend than the
            # other ranks' would be used.
            power = self._power(gradients).to(owners[0].device)
            powers.append(_reduce_in_groups(power, groups, self._largest))
            grads += gradients

        device = grads[0].device if grads else torch.device("cpu")
        total = torch.stack([value.to(device) for value in powers])
        norm = total.amax() if self._largest else total.sum().pow(1.0 / self._norm_type)
        return norm.float(), grads

    @property
    def _largest(self) -> bool:
        return math.isinf(self._norm_type)

    def _power(self, grads: Sequence[Tensor]) -> Tensor:
        """The sum of p-th powers ``[]``, which can be summed over ranks; or the maximum."""
        filled = [grad for grad in grads if grad.numel()]
        if not filled:
            return torch.zeros((), dtype=torch.float64)
        each_norm = torch._foreach_norm(filled, self._norm_type)  # pyright: ignore[reportPrivateImportUsage]
        norms = torch.stack([norm.double() for norm in each_norm])
        return norms.amax() if self._largest else norms.pow(self._norm_type).sum()

    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _gradients(self, selected: Callable[[Tensor], bool]) -> list[Tensor]:
        """The gradients to clip, as dense writable tensors of this rank."""
        return [
            _dense(parameter)
            for parameter in self._parameters()
            if parameter.grad is not None and selected(parameter)
        ]


def _dense(parameter: Tensor) -> Tensor:
    """The elements of a gradient: the values of a sparse one, the local shard of a DTensor."""
    grad = parameter.grad
    assert grad is not None, "only parameters with a gradient come here"
    if grad.is_sparse:
        if not grad.is_coalesced():
            grad = parameter.grad = grad.coalesce()
        return grad._values()

    to_local = getattr(grad, "to_local", None)
    return to_local() if to_local is not None else grad


def _reduce_in_groups(local: Tensor, groups: Sequence[Any], largest: bool) -> Tensor:
    """Reduce over the caller's process groups, with the methods of the groups themselves."""
    from torch.distributed import ReduceOp

    for group in groups:
        group.allreduce([local], ReduceOp.MAX if largest else ReduceOp.SUM).wait()
    return local


__all__ = ["GradientClipping", "GradientClippingOptimizer", "ReduceNorm"]
