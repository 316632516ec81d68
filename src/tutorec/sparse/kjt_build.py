"""A batch taken apart into features, and put together from features or from other batches."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.kjt_layout import offsets_by_key, split_weights
from tutorec.sparse.validate import check_keys, check_same

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# While a graph is traced, this stays whole as a call in it, and TorchScript compiles it as it stands.
torch.fx.wrap("offsets_by_key")

# Keys, values, weights, lengths, offsets, stride, ids per key.
Parts = tuple[list[str], Tensor, Tensor | None, Tensor, Tensor | None, int, list[int] | None]


def one_feature(values: Tensor, weights: Tensor | None, lengths: Tensor, offsets: Tensor | None) -> JaggedTensor:
    """One feature of a valid batch: no check, and in eager code no constructor.

    Args:
        values: ``[N]``, of this feature.
        weights: ``[N]`` or None.
        lengths: ``[B]``.
        offsets: ``[B + 1]``, starting at 0, or None to leave them to the feature.

    Returns:
        The feature's lists.
    """
    if is_scripting():
        return JaggedTensor(values, weights, lengths, offsets)
    else:
        return JaggedTensor._from_parts(values, weights, lengths, offsets)


def all_features(
    keys: list[str],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor,
    offsets: Tensor | None,
    length_per_key: list[int],
    stride: int,
) -> dict[str, JaggedTensor]:
    """Every feature of a valid batch by name: views, with all offsets (where given) from one subtraction.

    Args:
        keys: F feature names.
        values: ``[N]``.
        weights: ``[N]`` or None.
        lengths: ``[F * B]``.
        offsets: ``[F * B + 1]``, or None to leave them to the features.
        length_per_key: Ids of each key.
        stride: B.

    Returns:
        Each feature's lists, in the order of the keys.
    """
    features: dict[str, JaggedTensor] = {}
    count = len(keys)
    if count == 0:
        return features
    value_pieces = values.split_with_sizes(length_per_key)
    weight_pieces = split_weights(weights, length_per_key, count)
    length_pieces = lengths.split_with_sizes([stride] * count)
    starts: list[Tensor] = []
    if offsets is not None:
        starts = offsets_by_key(offsets, count, stride)
    for position, key in enumerate(keys):
        mine: Tensor | None = None
        if offsets is not None:
            mine = starts[position]
        features[key] = one_feature(value_pieces[position], weight_pieces[position], length_pieces[position], mine)
    return features


def parts_of_features(features: dict[str, JaggedTensor]) -> Parts:
    """One batch from one jagged tensor per feature; ids per key are known on the host already.

    Args:
        features: Each feature's lists, all with the same samples, all or none with weights.

    Returns:
        The parts of the batch.

    Raises:
        ValueError: Numbers of samples differ, or only some have weights.
    """
    parts = list(features.values())
    if not parts:
        empty = JaggedTensor.empty()
        return [], empty.values(), None, empty.lengths(), empty.offsets(), 0, []
    lengths = [part.lengths() for part in parts]
    weighted = parts[0].weights_or_none() is not None
    strides = [length.numel() for length in lengths]
    check_same("from_jt_dict", "samples", dict(zip(features, strides, strict=True)))
    check_same("from_jt_dict", "weights", {key: part.weights_or_none() is not None for key, part in features.items()})
    values = [part.values() for part in parts]
    weights = torch.cat([part.weights() for part in parts]) if weighted else None
    counts = [value.shape[0] for value in values]
    return list(features), torch.cat(values), weights, torch.cat(lengths), None, strides[0], counts


def parts_of_batches(batches: list["KeyedJaggedTensor"]) -> Parts:
    """One batch with the keys of all.

    Args:
        batches: At least one; keys distinct, all with the same samples, all or none with weights.

    Returns:
        The parts of the batch. Ids per key are known if they are known for each.

    Raises:
        ValueError: No batch is given, a key occurs twice, numbers of samples differ, or only some have weights.
    """
    if not batches:
        raise ValueError("KeyedJaggedTensor.concat: no batches given; KeyedJaggedTensor.empty() makes an empty one")
    keys = [key for batch in batches for key in batch.keys()]
    check_keys("KeyedJaggedTensor.concat", keys)
    check_same("concat", "samples", {str(batch.keys()): batch.stride() for batch in batches})
    weighted = {str(batch.keys()): batch.weights_or_none() is not None for batch in batches}
    check_same("concat", "weights", weighted)
    known: list[int] | None = []
    for batch in batches:
        counts = batch.length_per_key_or_none()
        known = None if known is None or counts is None else known + counts
    return (
        keys,
        torch.cat([batch.values() for batch in batches]),
        torch.cat([batch.weights() for batch in batches]) if all(weighted.values()) else None,
        torch.cat([batch.lengths() for batch in batches]),
        None,
        batches[0].stride(),
        known,
    )
