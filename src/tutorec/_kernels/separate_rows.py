"""One row for each id, without autograd: out of tables that lie apart in one call, or out of one large lookup."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tutorec._kernels.separate import SeparateTables, find_tables

__all__ = ["gather_rows", "take_rows"]

_FP32_OUTPUT = 0
# From so many ids on fbgemm's kernel, which fetches rows ahead of their use, beats torch's gather on one thread.
_MANY_IDS = 2048


def gather_rows(tables: SeparateTables, values: Tensor, offsets: Tensor) -> Tensor:
    """The rows of a feature-major batch, in the order of its ids; no autograd.

    Args:
        tables: Tables of one width D, and the table of each feature; the caller keeps them alive.
        values: Ids [N].
        offsets: Where each list begins [F*B+1].

    Returns:
        Rows [N, D] in float32.

    Example:
        >>> import torch
        >>> from tutorec._kernels.separate import find_tables
        >>> tables = [torch.ones(3, 4), torch.full((2, 4), 10.0)]
        >>> found = find_tables(tables, feature_tables=(1, 0))
        >>> rows = None if found is None else gather_rows(found, torch.tensor([1, 0, 2]), torch.tensor([0, 1, 3]))
        >>> rows is None or rows[:, 0].tolist() == [10.0, 1.0, 1.0]
        True
    """
    here = tables.geometry
    if values.dtype != offsets.dtype:  # the operator takes both as int32 or both as int64
        values, offsets = values.long(), offsets.long()
    # Below the autograd keys: the operator has no derivative of its own, and none is wanted here.
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.fbgemm.split_embedding_nobag_codegen_forward_cpu.default(
            tables.first.detach(), here.starts, here.widest, here.rows, values.contiguous(), offsets, _FP32_OUTPUT
        )


def take_rows(table: Tensor, ids: Tensor) -> Tensor:
    """The rows of one table [R, D] at ids [N], in float32: [N, D]; no autograd.

    Example:
        >>> import torch
        >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 1, 0])).flatten().tolist()
        [2.0, 2.0, 1.0]
    """
    if ids.numel() >= _MANY_IDS and torch.get_num_threads() == 1:
        found = find_tables([table], (0,))
        if found is not None:
            # The operator pools: every id is a bag of its own.
            return found.pool(ids, torch.arange(ids.numel() + 1, dtype=ids.dtype), None, False)
    return F.embedding(ids, table).float()
