"""A batch cut into smaller ones, whose offsets are computed for all of them when the first is asked.

A batch that is split into single keys is asked for the offsets of every part, or of none. Each part for itself costs
an operation a part; all of them together are one operation over a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutorec.sparse.kjt_layout import offsets_by_key, offsets_of_lengths, split_optional

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# Of fewer parts each finds its own faster.
FEW_PARTS = 4


class SharedOffsets:
    """Offsets of F neighbouring parts of one key and B lists each, to be computed at the first question.

    Args:
        lengths: Ids per list of all parts ``[F * B]``.
        offsets: Their offsets ``[F * B + 1]`` where they are known.
        parts: F.
        stride: B.
    """

    __slots__ = ("_lengths", "_offsets", "_parts", "_stride", "found")

    def __init__(self, lengths: Tensor, offsets: Tensor | None, parts: int, stride: int) -> None:
        self._lengths = lengths
        self._offsets = offsets
        self._parts = parts
        self._stride = stride
        self.found: list[Tensor] | None = None

    def find(self) -> list[Tensor]:
        """Each part's own offsets [B + 1], starting at 0."""
        self.found = offsets_by_key(self._lengths, self._offsets, self._parts, self._stride)
        return self.found


def offsets_found_together(part: KeyedJaggedTensor, shared: tuple[SharedOffsets, int]) -> Tensor:
    """The offsets of a part whose siblings share theirs; they are its own from then on."""
    together, position = shared
    found = together.found
    if found is None:
        found = together.find()
    part._offsets = offsets = found[position]
    part._shared_offsets = None
    return offsets


def find_together(batch: KeyedJaggedTensor, wanted: bool) -> list[Tensor] | None:
    """Each key's own offsets where neither the ids per key nor the offsets are known: the first are in the second.

    Args:
        batch: The batch; the ids per key that are found become known to it.
        wanted: Whether the offsets are asked for.

    Returns:
        F tensors ``[B + 1]``, or None where they are not wanted or another road is shorter.
    """
    known = batch._offsets is not None or batch._length_per_key is not None or batch._offset_per_key is not None
    keys, lengths = len(batch._keys), batch._lengths
    if not wanted or known or keys < FEW_PARTS or not batch._checked or batch._stride_per_key_per_rank is not None:
        return None
    if type(lengths) is not Tensor or not lengths.is_cpu or lengths.numel() == 0 or torch.compiler.is_compiling():
        return None
    rows = offsets_of_lengths(lengths.view(keys, -1))
    batch._length_per_key = rows[:, -1].tolist()
    return list(rows.unbind(0))


def cut(
    batch: KeyedJaggedTensor,
    segments: Sequence[int],
    sizes: Sequence[int],
    values: Sequence[Tensor],
    lengths: Sequence[Tensor],
) -> list[KeyedJaggedTensor]:
    """The parts of a batch that is split, from the pieces of its ids and lengths.

    Args:
        batch: The batch.
        segments: Keys of each part.
        sizes: Ids of each part.
        values: Ids, part by part.
        lengths: Ids per list, part by part.

    Returns:
        Batches of the same stride. A part of all keys is the batch itself.
    """
    if len(segments) == 1:
        return [batch]
    keys, counts, stride, make = batch._keys, batch.length_per_key(), batch.stride(), batch._from_parts
    strides, weights = batch._stride_per_key_per_rank, batch._weights
    if weights is None and strides is None and len(segments) == len(keys) == segments.count(1):
        parts = [
            make([key], ids, None, one, None, stride, [count])
            for key, ids, one, count in zip(keys, values, lengths, counts, strict=True)
        ]
        if len(parts) >= FEW_PARTS:
            together = SharedOffsets(batch.lengths(), batch._offsets, len(parts), stride)
            for position, part in enumerate(parts):
                part._shared_offsets = (together, position)
        return parts
    weight_pieces = split_optional(weights, list(sizes), len(segments))
    stride_pieces = split_optional(strides, list(segments), len(segments))
    parts, start = [], 0
    for part, segment in enumerate(segments):
        end = start + segment
        if segment == len(keys):
            parts.append(batch)
        else:
            mine = weight_pieces[part], lengths[part], None, stride, counts[start:end], stride_pieces[part]
            parts.append(make(keys[start:end], values[part], *mine))
        start = end
    return parts
