"""Application of inverse indices to unpooled rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import offsets_of_lengths


def samples_of_lists(
    outputs: dict[str, JaggedTensor], features: KeyedJaggedTensor, features_of_names: dict[str, str]
) -> dict[str, JaggedTensor]:
    """The results of a batch's samples, for a batch with inverse indices.

    Args:
        outputs: The results of the stored bags, by name.
        features: The batch.
        features_of_names: The feature of each result.

    Returns:
        ``outputs`` if the batch has no inverse indices; else the results of its B samples.

    Raises:
        KeyError: The inverse indices lack a feature.
    """
    inverse = features.inverse_indices_or_none() if type(features) is KeyedJaggedTensor else None
    if inverse is None or inverse[1].dim() < 2:
        return outputs

    position = {key: index for index, key in enumerate(inverse[0])}
    missing = sorted({feature for feature in features_of_names.values() if feature not in position})
    if missing:
        raise KeyError(f"inverse_indices lack the features {missing}; they have {inverse[0]}")
    return {
        name: _take_lists(rows, inverse[1][position[features_of_names[name]]])
        for name, rows in outputs.items()
    }


def _take_lists(jagged: JaggedTensor, indices: Tensor) -> JaggedTensor:
    """The bags at ``indices`` [B], concatenated; a bag may be taken several times."""
    lengths = jagged.lengths().index_select(0, indices)
    offsets = offsets_of_lengths(lengths)
    shift = jagged.offsets().index_select(0, indices) - offsets[:-1]
    positions = torch.repeat_interleave(shift, lengths)
    positions += torch.arange(positions.numel(), device=positions.device)

    weights = jagged.weights_or_none()
    return jagged_from_parts(
        jagged.values().index_select(0, positions),
        None if weights is None else weights.index_select(0, positions),
        lengths,
        offsets,
    )
