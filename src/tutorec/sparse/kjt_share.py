"""The offsets of the parts of one batch, computed for all of them when the first part is asked.

A batch that is split into single keys is asked for the offsets of every part, or of none. Each part for itself costs
an operation a part; all of them together are one running sum over a matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tutorec.sparse.kjt_layout import offsets_by_key

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


# Of fewer parts each finds its own faster.
FEW_PARTS = 4


class SharedOffsets:
    """Offsets of F neighbouring parts of B lists each, to be computed at the first question.

    Args:
        lengths: Ids per list of all parts ``[F * B]``.
        offsets: Their offsets ``[F * B + 1]`` where they are known.
        parts: F.
        stride: B.
    """

    __slots__ = ("_found", "_lengths", "_offsets", "_parts", "_stride")

    def __init__(self, lengths: Tensor, offsets: Tensor | None, parts: int, stride: int) -> None:
        self._lengths = lengths
        self._offsets = offsets
        self._parts = parts
        self._stride = stride
        self._found: list[Tensor] | None = None

    def of(self, part: int) -> Tensor:
        """Offsets of one part [B + 1], starting at 0."""
        if self._found is None:
            self._found = offsets_by_key(self._lengths, self._offsets, self._parts, self._stride)
        return self._found[part]


def share_offsets(batch: KeyedJaggedTensor, parts: list[KeyedJaggedTensor]) -> None:
    """Let the parts of a batch that was split into single keys find their offsets together.

    Args:
        batch: The batch.
        parts: What it was split into.
    """
    if len(parts) != len(batch._keys) or len(parts) < FEW_PARTS or batch._stride_per_key_per_rank is not None:
        return
    lengths = batch._lengths
    if type(lengths) is not Tensor or any(len(part._keys) != 1 for part in parts):
        return
    shared = SharedOffsets(lengths, batch._offsets, len(parts), batch.stride())
    for position, part in enumerate(parts):
        part._shared_offsets = (shared, position)


def offsets_found_together(part: KeyedJaggedTensor, shared: tuple[SharedOffsets, int]) -> Tensor:
    """The offsets of a part whose siblings share theirs; they are its own from then on."""
    part._offsets = offsets = shared[0].of(shared[1])
    part._shared_offsets = None
    return offsets
