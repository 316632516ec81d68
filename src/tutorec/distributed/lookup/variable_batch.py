"""A variable batch in a lookup: padded before it, cut after it.

Operators take the same number of bags for every slot. So a variable batch is padded with empty
bags, and the results are cut. An empty bag costs one number and no lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def pad_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Pad each key with empty bags, so that all keys have the same number of bags.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"],
        ...     torch.tensor([5, 6, 7]),
        ...     lengths=torch.tensor([1, 1, 1]),
        ...     stride_per_key_per_rank=[[1], [2]],
        ... )
        >>> pad_bags(batch).lengths()
        tensor([1, 0, 1, 1])
    """
    strides = features.stride_per_key()
    lengths = features.lengths()
    longest = max(strides)

    padded = lengths.new_zeros(len(strides), longest)
    for row, slot_lengths in zip(padded, lengths.split(strides), strict=True):
        row[: slot_lengths.numel()] = slot_lengths

    return KeyedJaggedTensor._from_parts(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        padded.view(-1),
        None,
        longest,
        None,
    )


def flatten_by_rank(
    pooled: torch.Tensor, features: KeyedJaggedTensor, columns: Sequence[int]
) -> torch.Tensor:
    """Remove the padding of a pooled batch; flat, for each rank and slot its samples' columns.

    Args:
        pooled: ``[most samples of a slot, D]``.
        features: The batch before padding; its strides give the samples of each rank.
        columns: D of each slot.
    """
    blocks_by_slot = [
        block[: sum(samples)].split(samples)
        for block, samples in zip(
            pooled.split(list(columns), dim=1), features.stride_per_key_per_rank(), strict=True
        )
    ]
    return torch.cat(
        [chunk.reshape(-1) for chunks in zip(*blocks_by_slot, strict=True) for chunk in chunks]
    )
