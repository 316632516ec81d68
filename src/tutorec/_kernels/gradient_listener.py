"""Gradients of rows, reported to a listener at the moment in which backward uses them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tutorec._kernels.table_steps import TouchedRows, touched_rows
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec._kernels.tbe_update import sum_rows

__all__ = ["GradientListener", "report_batch", "report_rows"]

# (index of the table, rows [U] rising, summed gradient of each [U, D]); may be called more than
# once in a backward.
GradientListener = Callable[[int, Tensor, Tensor], None]


def report_rows(listener: GradientListener, touched: TouchedRows, rows: int) -> None:
    """Tell the gradient of one table with R rows.

    Example:
        >>> import torch
        >>> touched = TouchedRows(
        ...     0, torch.tensor([5, 2, 5]), None, None, torch.tensor([[1.0], [2.0], [4.0]])
        ... )
        >>> report_rows(
        ...     lambda table, rows, sums: print(table, rows.tolist(), sums.tolist()),
        ...     touched,
        ...     rows=9,
        ... )
        0 [2, 5] [[2.0], [5.0]]
    """
    groups = touched.sorted(rows)
    listener(touched.table, groups.rows, sum_rows(touched.grad, groups))


def report_batch(
    listener: GradientListener,
    batch: PooledBatch,
    grad: Tensor,
    columns: Sequence[int],
    rows: Sequence[int],
) -> None:
    """Tell the gradient of every table that a batch reads.

    Args:
        listener: Is told.
        batch: What was looked up.
        grad: Of the pooled rows [B, sum of D over features].
        columns: D of each table.
        rows: R of each table.
    """
    for touched in touched_rows(batch, grad, columns):
        report_rows(listener, touched, rows[touched.table])
