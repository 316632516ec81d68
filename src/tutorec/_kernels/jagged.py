"""Jagged data in flat tensors: values of all bags one behind the other, and where each bag begins.

Each function runs fbgemm's operator where fbgemm was chosen and plain torch elsewhere, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tutorec._kernels import reference
from tutorec._kernels.backend import backend

__all__ = ["jagged_to_padded_dense", "lengths_to_offsets"]

# What fbgemm's operator for the CPU is compiled for.
_DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Where each bag begins, and where the last one ends: [L] -> [L+1], of the lengths' dtype; of a matrix row by row.

    Example:
        >>> import torch
        >>> from tutorec._kernels.jagged import lengths_to_offsets
        >>> lengths_to_offsets(torch.tensor([2, 0, 3])).tolist()
        [0, 2, 2, 5]
    """
    if lengths.is_cpu and backend().name == "fbgemm":
        if is_compiling():
            return torch.ops.fbgemm.asynchronous_complete_cumsum.default(lengths)
        return _running_sum()(lengths)
    return reference.lengths_to_offsets(lengths)


@cache
def _running_sum() -> Callable[[Tensor], Tensor]:
    """The operator of fbgemm without the two layers of Python in front of it, which cost a third of a small call."""
    operator = torch.ops.fbgemm.asynchronous_complete_cumsum.default
    return getattr(operator, "_op", operator)


def jagged_to_padded_dense(values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0) -> Tensor:
    """Rows of different length as a rectangle: [N] or [N, D] -> [B, max_length] or [B, max_length, D].

    Rows longer than ``max_length`` are cut, shorter ones are filled with ``padding``.

    Example:
        >>> import torch
        >>> from tutorec._kernels.jagged import jagged_to_padded_dense
        >>> jagged_to_padded_dense(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), 2).tolist()
        [[1, 2], [3, 0]]
    """
    if _fbgemm_runs(values) and values.dtype in _DENSE_DTYPES and values.dim() <= 2:
        return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [max_length], padding)
    return reference.jagged_to_padded_dense(values, offsets, max_length, padding)


def _fbgemm_runs(tensor: Tensor) -> bool:
    """Whether fbgemm's operators are loaded and take this tensor: they are the CPU ones."""
    return tensor.is_cpu and backend().name == "fbgemm"
