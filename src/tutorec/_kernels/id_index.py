"""Indices of ids on the CPU: hash tables that fbgemm's operator looks many ids up in at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tutorec._kernels.backend import backend

_FREE, _GONE = -1, -2
# turns the largest int64, which is not an id, into the mark of a free slot
_FLIP = torch.iinfo(torch.int64).min
_SLOTS_PER_ID = 2
BYTES_PER_ID = 16 * _SLOTS_PER_ID


def has_index(ids: Tensor) -> bool:
    """Whether ids on their device are looked up in an index instead of a sorted search."""
    return (
        ids.is_cpu
        and backend().name == "fbgemm"
        and not ids.is_inference()
        and not torch.compiler.is_compiling()
    )


class IdIndex:
    """Id -> number, by open addressing with linear probing. Ids are any int64 but the largest.

    Args:
        slots: ``[2 * N, 2]`` for up to N ids.

    Example:
        >>> import torch
        >>> from tutorec._kernels.backend import backend
        >>> if backend().name == "fbgemm":
        ...     [index] = IdIndices([4]).tables
        ...     index.fill(torch.tensor([10**12, -1]), torch.tensor([7, 8]))
        ...     assert index.find(torch.tensor([-1, 5, 10**12])).tolist() == [8, -1, 7]
        ...     assert index.replace(torch.tensor([-1]), torch.tensor([5]), torch.tensor([8]))
        ...     assert index.find(torch.tensor([-1, 5, 10**12])).tolist() == [-2, 8, 7]
    """

    def __init__(self, slots: Tensor) -> None:
        self._slots, self._bounds, self._used = slots, torch.tensor([0, slots.shape[0]]), 0

    def fill(self, ids: Tensor, numbers: Tensor) -> None:
        """Hold these distinct ids [N] with their numbers, 0 or more [N], and no others."""
        self._slots.fill_(_FREE)
        self._used = 0
        self._put(ids, numbers)

    def find(self, ids: Tensor) -> Tensor:
        """The number of each id [N], below 0 for an id that is not there."""
        return _look_up(ids, torch.tensor([0, ids.numel()]), self._slots, self._bounds)

    def replace(self, left: Tensor, came: Tensor, numbers: Tensor) -> bool:
        """Remove some ids and add others; False if slots run out, and ``fill`` must rebuild."""
        if 4 * (self._used + came.numel()) > 3 * self._slots.shape[0]:
            return False
        used = self._used  # those that leave keep their slots
        self._put(left, torch.full_like(left, _GONE))
        self._used = used
        self._put(came, numbers)
        return True

    def _put(self, ids: Tensor, numbers: Tensor) -> None:
        bounds = torch.tensor([0, ids.numel()])
        torch.ops.fbgemm.pruned_hashmap_insert(
            ids ^ _FLIP, numbers, bounds, self._slots, self._bounds
        )
        self._used += ids.numel()


class IdIndices:
    """The indices of several tables, side by side in one array.

    Args:
        sizes: Ids of each table at most.

    Attributes:
        tables: The index of each table.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        bounds = [0, *accumulate(_SLOTS_PER_ID * size for size in sizes)]
        self._slots, self._bounds = torch.full((bounds[-1], 2), _FREE), torch.tensor(bounds)
        self.tables = [
            IdIndex(slots) for slots in self._slots.split([_SLOTS_PER_ID * size for size in sizes])
        ]

    def find(self, ids: Tensor, bounds: Tensor) -> Tensor:
        """The number of each id [N], negative if absent; table t has ``bounds[t]:bounds[t+1]``."""
        return _look_up(ids, bounds, self._slots, self._bounds)


def _look_up(ids: Tensor, bounds: Tensor, slots: Tensor, bounds_of_slots: Tensor) -> Tensor:
    return torch.ops.fbgemm.pruned_hashmap_lookup(ids ^ _FLIP, bounds, slots, bounds_of_slots)
