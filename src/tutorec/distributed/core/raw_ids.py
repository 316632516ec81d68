"""Raw ids: which rank gives an id that is not a row yet its row.

A table whose ids are remapped (`mc_modules`) is looked up by raw ids, whose number is not known or
far larger than the table. Where its rows are split, the raw ids are split too: into K buckets, of
which each row range owns some::

    input size 4000, K = 2    raw ids 0 to 1999    2000 to 3999    any other id, and every id
    a table of 16 rows        rows 0 to 7          8 to 15         without a size: id modulo K

An id is remapped to a row of the range that owns its bucket, so that the ranks need not ask each
other. What is sent is the raw id, eight bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tutorec.sparse.hashing import bucket_of
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import ints_on_device


@dataclass(frozen=True)
class RawIds:
    """How the raw ids of each feature fall into buckets.

    Args:
        widths: Raw ids of a bucket, for each feature; 0: the ids are unbounded.
        bounds: For each feature the first bucket of each row range, and the number of buckets.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([1999, 2000, 4001]), lengths=torch.tensor([3])
        ... )
        >>> RawIds([2000], [[0, 1, 2]]).buckets_of(batch)
        tensor([0, 1, 1])
    """

    widths: Sequence[int]
    bounds: Sequence[Sequence[int]]

    def buckets_of(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """The bucket of each id ``[N]``."""
        ids = features.values().long()
        counts = features.length_per_key()

        buckets = [bounds[-1] for bounds in self.bounds]
        numbers = ints_on_device([list(self.widths), buckets, counts], torch.int64, ids.device)
        per_id = numbers[:2].repeat_interleave(numbers[2], dim=1, output_size=ids.numel())
        return bucket_of(ids, per_id[0], per_id[1])


__all__ = ["RawIds"]
