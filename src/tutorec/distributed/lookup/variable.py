"""Variable batch for lookups that want as many samples of every slot: bags are padded with empty ones, results cut.

An empty bag costs one number and looks nothing up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def pad_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with empty bags behind those of each key, so that all keys have as many.

    Example:
        >>> batch = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 6, 7]), lengths=torch.tensor([1, 1, 1]),
        ...                           stride_per_key_per_rank=[[1], [2]])
        >>> pad_bags(batch).lengths()
        tensor([1, 0, 1, 1])
    """
    strides, lengths = features.stride_per_key(), features.lengths()
    most = max(strides)
    padded = lengths.new_zeros(len(strides), most)
    for row, own in zip(padded, lengths.split(strides), strict=True):
        row[: own.numel()] = own
    return KeyedJaggedTensor._from_parts(
        features.keys(), features.values(), features.weights_or_none(), padded.view(-1), None, most, None
    )


def flatten_by_rank(pooled: torch.Tensor, features: KeyedJaggedTensor, columns: Sequence[int]) -> torch.Tensor:
    """What was pooled of padded bags, without the padding: for each rank and each slot its samples' columns, flat.

    Args:
        pooled: ``[most samples of a slot, D]``.
        features: The batch before it was padded; its strides say whose samples they are.
        columns: D of each slot.
    """
    of_slots = [
        block[: sum(samples)].split(samples)
        for block, samples in zip(pooled.split(list(columns), dim=1), features.stride_per_key_per_rank(), strict=True)
    ]
    return torch.cat([piece.reshape(-1) for of_rank in zip(*of_slots, strict=True) for piece in of_rank])
