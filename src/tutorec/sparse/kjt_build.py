"""A batch taken apart into features, and put together from features or from other batches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.kjt_checks import pending_of_joined
from tutorec.sparse.kjt_layout import offsets_by_key, offsets_of_lengths, split_optional
from tutorec.sparse.kjt_variable import strides_of_ranks
from tutorec.sparse.validate import LARGEST_INT32, check_keys, check_same, refuse_wrapping

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# While a graph is traced, this stays whole as a call in it, and TorchScript compiles it as it stands.
torch.fx.wrap("offsets_by_key")
torch.fx.wrap("offsets_of_lengths")

# Keys, values, weights, lengths, offsets, stride, ids per key, strides of ranks.
Parts = tuple[list[str], Tensor, Tensor | None, Tensor, Tensor | None, int, list[int] | None, Tensor | None]


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


def feature_at(
    values: Tensor, weights: Tensor | None, lengths: Tensor, ids: list[int], lists: list[int]
) -> JaggedTensor:
    """One feature of a valid batch: views.

    Args:
        values: ``[N]``, of the batch.
        weights: ``[N]`` or None.
        lengths: ``[F * B]``.
        ids: Where the feature's ids begin and end.
        lists: Its first list, and how many it has.

    Returns:
        The feature's lists.
    """
    start, end = ids[0], ids[1]
    if weights is not None:
        weights = weights[start:end]
    return one_feature(values[start:end], weights, lengths[lists[0] : lists[0] + lists[1]], None)


def all_features(
    keys: list[str],
    values: Tensor,
    weights: Tensor | None,
    lengths: list[Tensor],
    offsets: list[Tensor] | None,
    length_per_key: list[int],
) -> dict[str, JaggedTensor]:
    """Every feature of a valid batch by name: views.

    Args:
        keys: F feature names.
        values: ``[N]``.
        weights: ``[N]`` or None.
        lengths: Each key's own ``[B]``.
        offsets: Each key's own ``[B + 1]``, or None to leave them to the features.
        length_per_key: Ids of each key.

    Returns:
        Each feature's lists, in the order of the keys.
    """
    features: dict[str, JaggedTensor] = {}
    count = len(keys)
    if count == 0:
        return features
    value_pieces = values.split_with_sizes(length_per_key)
    if not is_scripting():
        unweighted = weights is None and type(values) is Tensor
        if unweighted:
            return _unweighted_features(keys, value_pieces, lengths, offsets)
    weight_pieces = split_optional(weights, length_per_key, count)
    for position, key in enumerate(keys):
        mine: Tensor | None = None
        if offsets is not None:
            mine = offsets[position]
        features[key] = one_feature(value_pieces[position], weight_pieces[position], lengths[position], mine)
    return features


def _unweighted_features(
    keys: list[str], values: Sequence[Tensor], lengths: Sequence[Tensor], offsets: Sequence[Tensor] | None
) -> dict[str, JaggedTensor]:
    """The same for the usual case in eager code, where this loop is a fourth of the time."""
    make = JaggedTensor._from_parts
    if offsets is None:
        return {key: make(ids, None, some, None) for key, ids, some in zip(keys, values, lengths, strict=True)}
    parts = zip(keys, values, lengths, offsets, strict=True)
    return {key: make(ids, None, some, starts) for key, ids, some, starts in parts}


def offsets_of_features(
    pieces: list[Tensor], lengths: Tensor, offsets: Tensor | None, stride_per_key: list[int], together: bool
) -> list[Tensor]:
    """Each key's own offsets [B + 1], starting at 0: in one operation for keys of equal strides, or one by one.

    Args:
        pieces: Each key's lengths ``[B]``.
        lengths: ``[F * B]``.
        offsets: ``[F * B + 1]`` where they are known.
        stride_per_key: Samples of each key.
        together: All keys have the same number of samples, and there is more than one key.

    Returns:
        One tensor for each key.
    """
    if not is_scripting():
        # Torch gets the shape of windows wrong where the number of samples is unknown.
        together = together and not torch.compiler.is_compiling()
    if together:
        return offsets_by_key(lengths, offsets, len(stride_per_key), stride_per_key[0])
    return [offsets_of_lengths(piece) for piece in pieces]


def parts_of_features(features: dict[str, JaggedTensor]) -> Parts:
    """One batch from one jagged tensor per feature; ids per key are known on the host already.

    Args:
        features: Each feature's lists, all or none with weights. Features with different numbers of samples make a
            batch of variable batch size.

    Returns:
        The parts of the batch.

    Raises:
        TypeError: The features are no dict of jagged tensors.
        ValueError: Only some features have weights.
    """
    if not features:
        empty = JaggedTensor.empty()
        return [], empty.values(), None, empty.lengths(), empty.offsets(), 0, [], None
    if not isinstance(features, Mapping):
        raise TypeError(f"KeyedJaggedTensor.from_jt_dict takes a dict of features, got {type(features).__name__}")
    if not all(isinstance(part, JaggedTensor) for part in features.values()):
        kinds = {key: type(part).__name__ for key, part in features.items()}
        raise TypeError(f"KeyedJaggedTensor.from_jt_dict takes a JaggedTensor for each key, got {kinds}")
    keys, values, weights, lengths = [], [], [], []
    for key, part in features.items():
        keys.append(key)
        values.append(part.values())
        lengths.append(part.lengths())
        weight = part.weights_or_none()
        if weight is not None:
            weights.append(weight)
    if weights and len(weights) < len(keys):
        found = {key: part.weights_or_none() is not None for key, part in features.items()}
        check_same("from_jt_dict", "weights", found)
    counts = [value.shape[0] for value in values]
    samples = [length.shape[0] for length in lengths]
    variable = samples.count(samples[0]) < len(samples)
    strides = strides_of_ranks([[one] for one in samples]) if variable else None
    joined = torch.cat(weights) if weights else None
    ids, numbers = _end_to_end("from_jt_dict", values, lengths)
    return keys, ids, joined, numbers, None, max(samples), counts, strides


def _end_to_end(operation: str, values: list[Tensor], lengths: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and lengths of several batches, which int32 lengths of each may count and those of all may not."""
    ids, numbers = torch.cat(values), torch.cat(lengths)
    if type(ids) is Tensor and ids.numel() > LARGEST_INT32:
        refuse_wrapping(f"KeyedJaggedTensor.{operation}", ids, numbers)
    return ids, numbers


def join(batches: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
    """One batch with the keys of all.

    Args:
        batches: At least one; keys distinct, all with the same samples or all of variable batch size with the same
            ranks, all or none with weights, all or none with inverse indices.

    Returns:
        The batch. Its ids per key are known if they are known for each.

    Raises:
        TypeError: The batches are no list of KeyedJaggedTensors.
        ValueError: No batch is given, a key occurs twice, or the batches do not agree.
    """
    if hasattr(batches, "stride_per_key") or any(not hasattr(one, "stride_per_key") for one in batches):
        kinds = [type(one).__name__ for one in batches] if isinstance(batches, list | tuple) else "no list"
        raise TypeError(f"KeyedJaggedTensor.concat takes a list of KeyedJaggedTensors, got {kinds}")
    if not batches:
        raise ValueError("KeyedJaggedTensor.concat: no batches given; KeyedJaggedTensor.empty() makes an empty one")
    keys: list[str] = []
    values, lengths = [], []
    known: list[int] | None = []
    plain, checked = True, True
    first = batches[0]
    stride = first.stride()
    for batch in batches:
        own, numbers, counts = batch._keys, batch._lengths, batch._length_per_key
        if numbers is None:
            numbers = batch.lengths()
        keys += own
        values.append(batch._values)
        lengths.append(numbers)
        known = None if known is None or counts is None else known + counts
        if batch._pending is not None:
            checked = False
        if batch._weights is not None or batch._stride_per_key_per_rank is not None or batch._inverse_indices:
            plain = False
        elif (not own or numbers.numel() != stride * len(own)) and batch.stride() != stride:
            check_same("concat", "samples", {str(one.keys()): one.stride() for one in batches})
    if len(set(keys)) != len(keys):
        check_keys("KeyedJaggedTensor.concat", keys)
    ids, numbers = _end_to_end("concat", values, lengths)
    joined = first._from_parts(keys, ids, None, numbers, None, stride, known)
    if not plain:
        _join_the_rest(batches, joined)
    if not checked:
        joined._pending = pending_of_joined(batches)
    return joined


def join_keys(parts: list[list[str]]) -> list[str]:
    """The keys of all batches; for TorchScript.

    Raises:
        ValueError: A key occurs twice.
    """
    keys: list[str] = []
    for part in parts:
        for key in part:
            if key in keys:
                raise ValueError("KeyedJaggedTensor.concat: a key occurs twice; each key names one feature")
            keys.append(key)
    return keys


def join_optional(parts: list[Tensor | None]) -> Tensor | None:
    """The batches' parts end to end, None where no batch has one; for TorchScript.

    Raises:
        ValueError: Only some have one.
    """
    there: list[Tensor] = []
    for part in parts:
        if part is not None:
            there.append(part)
    if len(there) > 0 and len(there) < len(parts):
        raise ValueError("KeyedJaggedTensor.concat: weights differ; all batches have them, or none")
    if len(there) == 0:
        return None
    return torch.cat(there)


def _join_the_rest(batches: list["KeyedJaggedTensor"], joined: "KeyedJaggedTensor") -> None:
    """Join what few batches have: weights, strides of their own, inverse indices."""
    _check_agreement(batches)
    weights = [batch._weights for batch in batches if batch._weights is not None]
    strides = [one._stride_per_key_per_rank for one in batches if one._stride_per_key_per_rank is not None]
    inverse = [batch._inverse_indices for batch in batches if batch._inverse_indices is not None]
    if weights:
        joined._weights = torch.cat(weights)
    if strides:
        joined._stride_per_key_per_rank = torch.cat(strides)
        joined._stride = max(batch.stride() for batch in batches)
    else:
        check_same("concat", "samples", {str(one.keys()): one.stride() for one in batches})
    if inverse:
        names = [key for some, _ in inverse for key in some]
        joined._inverse_indices = (names, torch.cat([rows for _, rows in inverse]))


def _check_agreement(batches: list["KeyedJaggedTensor"]) -> None:
    """Check that all or none have weights, strides of their own (of the same ranks) and inverse indices."""
    for what, has in (
        ("weights", lambda batch: batch._weights is not None),
        ("variable batch", lambda batch: batch.variable_stride_per_key()),
        ("ranks", lambda batch: len(batch.stride_per_key_per_rank()[0]) if batch.stride_per_key_per_rank() else 0),
        ("inverse indices", lambda batch: batch._inverse_indices is not None),
    ):
        check_same("concat", what, {str(batch.keys()): has(batch) for batch in batches})
