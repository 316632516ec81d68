"""Sizes and offsets of the shards of a table as arrays: what the planner enumerates and estimates.

`plan/geometry.py` has the same shards with their ranks, as plans list them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.plan.plan import SHARDING_TRAITS, ShardingType

MIN_CW_DIM: int = 128  # minimum columns of a column shard; TorchRec's value


def slice_width(columns: int, at_least: int) -> int:
    """D of the equal column shards of a table: the smallest allowed width.

    It divides D, is a multiple of 4, and is at least ``at_least``; if there is no such width, the
    table is not split.

    Args:
        columns: D of the table.
        at_least: Minimum width, at least 1.

    Example:
        >>> (
        ...     slice_width(64, at_least=32),
        ...     slice_width(64, at_least=33),
        ...     slice_width(10, at_least=2),
        ... )
        (32, 64, 10)

    Source:
        The rule of TorchRec's
        ``torchrec.distributed.sharding_plan.calculate_shard_sizes_and_offsets``.
    """
    first = -(-max(at_least, 1) // 4) * 4
    return next((width for width in range(first, columns, 4) if columns % width == 0), columns)


def cut_arrays(
    kind: ShardingType, shape: tuple[int, int], world_size: int, local_size: int, width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sizes ``[P, 2]`` and offsets ``[P, 2]`` of a table's shards as arrays, without ranks.

    A row is the ``(rows, columns)`` of a shard, or its offset ``(row, column)``, in the order of
    the functions of `plan/geometry.py`. The arrays are read-only: equal rows may share memory.

    Args:
        kind: The sharding type.
        shape: ``(R, D)``.
        world_size: W.
        local_size: Ranks per host.
        width: D of a column shard; it divides ``shape[1]`` and is used by the types that split
            columns.

    Example:
        >>> sizes, offsets = cut_arrays(
        ...     ShardingType.GRID_SHARD, (5, 8), world_size=4, local_size=2, width=4
        ... )
        >>> sizes.tolist(), offsets.tolist()
        ([[3, 4], [2, 4], [3, 4], [2, 4]], [[0, 0], [3, 0], [0, 4], [3, 4]])
    """
    rows, columns = shape
    traits = SHARDING_TRAITS[kind]
    slices = columns // width if traits.splits_columns else 1

    if kind is ShardingType.DATA_PARALLEL:
        table = np.array([rows, columns], dtype=np.int64), np.zeros(2, dtype=np.int64)
        return np.broadcast_to(table[0], (world_size, 2)), np.broadcast_to(
            table[1], (world_size, 2)
        )

    row_ranges = 1
    if traits.splits_rows:
        row_ranges = local_size if traits.splits_rows_in_host else world_size
    starts = np.minimum(np.arange(row_ranges + 1, dtype=np.int64) * -(-rows // row_ranges), rows)
    sizes = np.empty((slices, row_ranges, 2), dtype=np.int64)
    offsets = np.empty_like(sizes)
    sizes[:, :, 0] = starts[1:] - starts[:-1]
    sizes[:, :, 1] = columns // slices
    offsets[:, :, 0] = starts[:-1]
    offsets[:, :, 1] = (np.arange(slices, dtype=np.int64) * (columns // slices))[:, None]
    return sizes.reshape(-1, 2), offsets.reshape(-1, 2)
