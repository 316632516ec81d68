"""A batch cut into smaller ones, whose offsets are computed for all of them at once.

A batch that is split into single keys is asked for the offsets of every part, or of none. Each part for itself costs
an operation a part; all of them together are one operation over a matrix. That operation tells the ids per key, too:
where those are unknown, it comes first; where they are known, it waits until the first part is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutorec._kernels.jagged import lengths_to_offsets
from tutorec.sparse.kjt_checks import confirm
from tutorec.sparse.kjt_layout import offsets_by_key, offsets_of_lengths, segment_sums, split_optional

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# While a graph is traced, this stays whole as a call in it.
torch.fx.wrap("offsets_of_lengths")

# Of fewer parts each finds its own faster. More than the two tensors that stand for the offsets to be found.
FEW_PARTS = 4


# The offsets of all parts once one has been asked for them, before that the lengths of all [F * B] (and their offsets
# [F * B + 1] where they are known); which part this is; and F. Plain enough for TorchScript.
Shared = tuple[list[Tensor], int, int]


def offsets_found(part: KeyedJaggedTensor) -> Tensor:
    """The offsets of a batch that has none yet: found with its siblings' if they share theirs; its own from then on."""
    shared = part._shared_offsets
    if shared is None:
        lengths = part._lengths
        assert lengths is not None, "lengths or offsets are always there"
        offsets = lengths_to_offsets(lengths) if type(lengths) is Tensor else offsets_of_lengths(lengths)
    else:
        found, position, parts = shared
        if len(found) < parts:
            found[:] = offsets_by_key(found[0], found[1] if len(found) > 1 else None, parts, part.stride())
        offsets = found[position]
        part._shared_offsets = None
    part._offsets = offsets
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
    if not wanted or known or keys < FEW_PARTS or batch._stride_per_key_per_rank is not None:
        return None
    if type(lengths) is not Tensor or not lengths.is_cpu or lengths.numel() == 0 or torch.compiler.is_compiling():
        return None
    rows = offsets_of_lengths(lengths.view(keys, -1))
    counts: list[int] = rows[:, -1].tolist()
    if batch._pending is not None:
        confirm(batch, counts)
    batch._length_per_key = counts
    return list(rows.unbind(0))


def cut(batch: KeyedJaggedTensor, segments: list[int]) -> list[KeyedJaggedTensor]:
    """The parts of a batch that is split, in eager code.

    Args:
        batch: The batch.
        segments: Keys of each part; together all keys.

    Returns:
        Batches of the same stride. A part of all keys is the batch itself.
    """
    keys, count, weights, strides = batch._keys, len(segments), batch._weights, batch._stride_per_key_per_rank
    if count == len(keys) == segments.count(1) and count > 1 and weights is None and strides is None:
        return _singles(batch)
    counts, stride, make = batch.length_per_key(), batch.stride(), batch._from_parts
    if count == 1:
        return [batch]
    sizes = segment_sums(counts, segments)
    values = batch._values.split_with_sizes(sizes)
    lengths = batch.lengths().split_with_sizes(segment_sums(batch.stride_per_key(), segments))
    weight_pieces = split_optional(weights, sizes, count)
    stride_pieces = split_optional(strides, segments, count)
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


def _singles(batch: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
    """One part for each key, the usual case: its loop is a fourth of the time."""
    found = find_together(batch, wanted=True)
    counts, lengths = batch.length_per_key(), batch.lengths()
    keys, values, stride, make = batch._keys, batch._values, batch.stride(), batch._from_parts
    count = len(keys)
    # Views of which autograd knows nothing take a fourth less time. Not so for ids: a lookup saves them for its
    # backward, and autograd is to notice when the batch's memory was filled anew in between.
    ids, numbers = values.split_with_sizes(counts), lengths.unsafe_split_with_sizes([stride] * count)
    if found is not None:
        parts = zip(keys, ids, numbers, found, counts, strict=True)
        return [make([key], own, None, one, starts, stride, [size]) for key, own, one, starts, size in parts]
    parts = zip(keys, ids, numbers, counts, strict=True)
    made = [make([key], own, None, one, None, stride, [size]) for key, own, one, size in parts]
    if count >= FEW_PARTS and count > 2:
        together = [lengths] if batch._offsets is None else [lengths, batch._offsets]
        for position, part in enumerate(made):
            part._shared_offsets = (together, position, count)
    return made
