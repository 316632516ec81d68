"""fbgemm's CUDA operators on tables in separate memory; the CPU's are in ``scattered_tables``.

The operators are those behind fbgemm's ``SplitTableBatchedEmbeddingBagsCodegen``, called without
that class: it owns its tables, and these stay parameters of a collection. The update sorts the ids
of all tables once and moves each row once, with any of the optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tutorec._kernels.backend import fbgemm_module
from tutorec._kernels.specs import UpdateStep

__all__ = ["look_up", "update"]

_FP32_OUTPUT = 0
_WORD = 16  # bytes that a kernel reads of a gradient at once
# A warp updates a row; of one with more ids in the batch than this, several do. fbgemm's own.
_IDS_PER_WARP = 32


@dataclass(frozen=True)
class _Absent:
    """Empty tensors for what these tables do not have: rows in host memory, and a cache of them.

    Attributes:
        rows: Of the tables' dtype [0].
        cache: [0, 0].
        slots: int32 [0].
        states: float32 [0].
    """

    rows: Tensor
    cache: Tensor
    slots: Tensor
    states: Tensor


@lru_cache(maxsize=16)
def _absent(dtype: torch.dtype, device: torch.device) -> _Absent:
    fbgemm_module("fbgemm_gpu")  # loads the operators' CUDA libraries
    return _Absent(
        torch.empty(0, dtype=dtype, device=device),
        torch.empty(0, 0, dtype=dtype, device=device),
        torch.empty(0, dtype=torch.int32, device=device),
        torch.empty(0, device=device),
    )


def look_up(
    first: Tensor, geometry: Any, ids: Sequence[Tensor], mode: int, weights: Tensor | None
) -> Tensor:
    """Pooled rows of a batch [B, sum of D] in float32; no autograd.

    Args:
        first: The first feature's table.
        geometry: Where the tables are, a ``scattered_tables`` geometry with its tensors on the GPU.
        ids: Ids [N] and bag bounds [F * B + 1].
        mode: fbgemm's code of the pooling.
        weights: float32 [N], or None.
    """
    absent = _absent(first.dtype, first.device)
    name = "unweighted" if weights is None else "weighted"
    forward = getattr(torch.ops.fbgemm, f"split_embedding_codegen_forward_{name}_cuda").default

    with torch._C._AutoDispatchBelowAutograd():
        return forward(
            first.detach().view(-1),
            absent.rows,
            absent.cache,
            geometry.placements,
            geometry.starts,
            geometry.columns,
            geometry.total,
            geometry.widest,
            *ids,
            mode,
            *(() if weights is None else (weights,)),
            absent.slots,
            absent.slots,
            _FP32_OUTPUT,
            False,
        )


def update(
    first: Tensor,
    geometry: Any,
    ids: Sequence[Tensor],
    mode: int,
    weights: Tensor | None,
    grad: Tensor,
    states: Sequence[Sequence[Tensor]],
    step: UpdateStep,
) -> None:
    """Move each row of a batch once.

    Args:
        first: See ``look_up``.
        geometry: See ``look_up``.
        ids: See ``look_up``.
        mode: See ``look_up``.
        weights: See ``look_up``.
        grad: Of the pooled rows [B, sum of D].
        states: Of each feature's table, float32.
        step: The optimizer, its rate and its number.
    """
    absent = _absent(first.dtype, first.device)
    rule = step.rule
    features = len(states)
    samples = (ids[1].numel() - 1) // features
    bits, mask = torch.ops.fbgemm.get_infos_metadata.default(first, samples, features)

    state_arguments = [
        argument
        for number in range(len(rule.states))
        for argument in (
            states[0][number].view(-1),
            absent.states,
            geometry.placements,
            _distances(tuple(state[number] for state in states)),
        )
    ]

    rate = torch.tensor(step.rate)
    options: tuple[Any, ...] = (*state_arguments, rate)
    if rule.kind == "adagrad":
        options = (*options, rule.eps)
    elif rule.kind == "rowwise_adagrad":
        options = (*options, rule.eps, 0.0, 0, 0.0)  # weight decay and its mode, maximum norm
    elif rule.kind == "adam":  # with fbgemm's row counters, which the last argument turns off
        counters = (absent.states, absent.states, geometry.placements, geometry.starts)
        options = (*options, *counters, *_of_adam(step), False)
    elif rule.kind == "partial_rowwise_adam":
        options = (*options, *_of_adam(step))

    grad = grad.contiguous()
    if grad.data_ptr() % _WORD:
        grad = grad.clone()

    name = "unweighted" if weights is None else "weighted"
    getattr(
        torch.ops.fbgemm, f"split_embedding_backward_codegen_{rule.kind}_{name}_exact_cuda"
    ).default(
        grad,
        first.detach().view(-1),
        absent.rows,
        absent.cache,
        geometry.placements,
        geometry.starts,
        geometry.columns,
        geometry.widest,
        geometry.mixed,
        geometry.rows,
        geometry.bits,
        *ids,
        mode,
        *(() if weights is None else (weights,)),
        absent.slots,
        0,
        _IDS_PER_WARP,
        False,
        bits,
        mask,
        False,
        True,
        *options,
    )


def _of_adam(step: UpdateStep) -> tuple[float, float, float, float, int]:
    rule = step.rule
    return rule.eps, rule.beta1, rule.beta2, rule.weight_decay, int(step.number)


def _distances(tensors: tuple[Tensor, ...]) -> Tensor:
    """Elements from the first tensor to each [F], on their device."""
    return _on_device(
        tuple((tensor.data_ptr() - tensors[0].data_ptr()) // tensor.itemsize for tensor in tensors),
        tensors[0].device,
    )


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)
