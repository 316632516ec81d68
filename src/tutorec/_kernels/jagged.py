"""Jagged data in flat tensors: values of all bags one behind the other, and where each bag begins.

Each function runs fbgemm's operator where fbgemm was chosen and plain torch elsewhere, with the
same result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend, chosen
from tutorec._kernels.older_torch import BEFORE_2_11

__all__ = ["jagged_to_padded_dense", "lengths_to_offsets"]

# The backend that was last asked for, and what it finds offsets with.
_offsets_operator: list[Any] = [None, None]
# What fbgemm's operator for the CPU is compiled for.
_DENSE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Offsets of bags from lengths: [L] -> [L+1], of the same dtype; of a matrix row by row.

    Example:
        >>> import torch
        >>> from tutorec._kernels.jagged import lengths_to_offsets
        >>> lengths_to_offsets(torch.tensor([2, 0, 3])).tolist()
        [0, 2, 2, 5]
    """
    if not is_scripting():
        if not is_compiling() and torch.is_inference_mode_enabled():
            # a batch keeps its offsets, and autograd saves nothing that inference mode has made
            with torch.inference_mode(False):
                return lengths_to_offsets(lengths)

        if lengths.is_cpu:
            if not is_compiling():
                return _running_sum()(lengths)
            if backend().name == "fbgemm":
                return torch.ops.fbgemm.asynchronous_complete_cumsum.default(lengths)

        if not is_compiling():
            return _offsets_in_torch(lengths)

    # writing into a view, as eager code does, makes a graph that refuses a batch of one sample
    return torch.nn.functional.pad(lengths.cumsum(-1, dtype=lengths.dtype), [1, 0])


def _offsets_in_torch(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros([*lengths.shape[:-1], lengths.shape[-1] + 1])
    torch.cumsum(lengths, -1, out=offsets[..., 1:])
    return offsets


def _running_sum() -> Callable[[Tensor], Tensor]:
    """The CPU operator for offsets: fbgemm's, without the two Python layers in front of it.

    They cost a third of a small call; so would asking every time what the backend is called.
    """
    choice = chosen.current or backend()
    if choice is not _offsets_operator[0]:
        operator: Any = _offsets_in_torch
        if choice.name == "fbgemm":
            operator = torch.ops.fbgemm.asynchronous_complete_cumsum.default
        _offsets_operator[:] = choice, getattr(operator, "_op", operator)

    return _offsets_operator[1]


def jagged_to_padded_dense(
    values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0
) -> Tensor:
    """Rows of different length, padded: [N] or [N, D] -> [B, max_length] or [B, max_length, D].

    Rows longer than ``max_length`` are cut, shorter ones are filled with ``padding``.

    Example:
        >>> import torch
        >>> from tutorec._kernels.jagged import jagged_to_padded_dense
        >>> jagged_to_padded_dense(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), 2).tolist()
        [[1, 2], [3, 0]]
    """
    if not is_scripting():
        dense = values.dtype in _DENSE_DTYPES and values.dim() <= 2 and not is_compiling()
        if BEFORE_2_11 and values.requires_grad:
            dense = False  # fbgemm 1.3 pads, and torch warns of its gradient
        if dense and values.is_cpu and backend().name == "fbgemm":
            return torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [max_length], padding)

    return _padded_in_torch(values, offsets, max_length, padding)


def _padded_in_torch(values: Tensor, offsets: Tensor, max_length: int, padding: float) -> Tensor:
    """A gather with one padding row: no shape depends on a number."""
    count = values.size(0)
    column = torch.arange(max_length, device=values.device)
    source = offsets[:-1].unsqueeze(1) + column
    source = source.masked_fill(source >= offsets[1:].unsqueeze(1), count)

    rest = list(values.shape[1:])
    padded = torch.cat([values, values.new_full([1] + rest, padding)])  # noqa: RUF005
    return padded.index_select(0, source.reshape(-1)).view([source.size(0), max_length] + rest)  # noqa: RUF005
