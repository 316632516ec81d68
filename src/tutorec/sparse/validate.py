"""Checks of keys, lengths, offsets, strides: fused operations; a search after a failure.

The form of a batch (shapes, dtypes, devices, keys) is checked where the batch is built, and so are
the numbers of few lists on the CPU. Those of many lists, and on another device, where reading a
number would stop the device, are checked at their first use (``KeyedJaggedTensor.sync`` is one): a
batch that is only passed on or copied costs nothing. While a model is traced, scripted,
exported or compiled there are no numbers to look at, and no check runs.
"""

from collections.abc import Iterable, KeysView, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from tutorec.sparse.layout import (
    FEW_LISTS,
    LARGEST_INT32,
    KeyedLayout,
    differences,
    ids_by_offsets,
    ids_per_key,
    lengths_of_offsets,
    segment_sums,
)
from tutorec.sparse.refuse import (
    check_inverse,
    check_stride_per_key,
    refuse_list_count,
    refuse_lists,
    require_tensors,
    type_name,
)

_BATCH = "KeyedJaggedTensor"
_INDEX_TYPES = (torch.int32, torch.int64)
# What a caller may give although it follows from the other arguments.
_DERIVED = ("length_per_key", "offset_per_key", "lengths_offset_per_key", "index_per_key")
# The keys that were last found to be distinct: most batches of a program have the same ones.
_distinct: list[str] = []


def check_layout(layout: KeyedLayout, values: Tensor, weights: Tensor | None) -> None:
    """Check a batch where it is built: its form, and few numbers on the CPU.

    Args:
        layout: The layout. Many numbers, and numbers on another device, are left to
            ``check_numbers``.
        values: ``[N]``.
        weights: ``[N]`` or None.

    Raises:
        TypeError: A part is not a tensor.
        ValueError: The parts do not describe one batch.
    """
    keys = layout._keys
    if keys != _distinct:
        check_names(_BATCH, keys)
        check_keys(_BATCH, keys)
        _distinct[:] = keys

    try:
        lists = check_form(_BATCH, values, weights, layout._lengths, layout._offsets)
    except AttributeError:
        tensors = {"weights": weights, "lengths": layout._lengths, "offsets": layout._offsets}
        require_tensors(_BATCH, tensors, optional=True)
        raise

    ranks = layout._stride_per_key_per_rank
    strides = layout._stride_per_key
    if ranks is None and strides is None:
        stride = layout._stride
        if stride is None:
            stride = lists // len(keys) if keys else 0
        if lists != len(keys) * stride:
            argument = "" if layout._stride is None else "stride"
            refuse_list_count(keys, lists, [stride] * len(keys), argument)
        layout._stride = stride
    else:
        _check_samples(layout, lists)

    layout._checked = False
    if not values.is_cpu:
        return
    if (
        layout._length_per_key is not None
        or layout._offset_per_key is not None
        or layout._lengths_offset_per_key is not None
        or layout._index_per_key is not None
    ):
        _check_derived(layout, values.shape[0])
    elif lists <= FEW_LISTS:
        check_numbers(layout, values.shape[0])


def _check_samples(layout: KeyedLayout, lists: int) -> None:
    """Check the samples of each key, and make the layout variable where they differ."""
    keys = layout._keys
    ranks = layout._stride_per_key_per_rank
    strides = layout._stride_per_key
    if ranks is not None:
        check_strides(keys, ranks)
    if strides is not None:
        check_stride_per_key(keys, layout._stride, strides, ranks)
        layout.vary(strides)

    if lists != sum(layout.stride_per_key()):
        argument = "stride_per_key" if ranks is None else "stride_per_key_per_rank"
        refuse_list_count(keys, lists, layout.stride_per_key(), argument)


def _check_derived(layout: KeyedLayout, total: int) -> None:
    """Check what follows from the other arguments: if wrong it would shift later results."""
    arguments = {name: getattr(layout, f"_{name}") for name in _DERIVED}
    for name in _DERIVED:
        setattr(layout, f"_{name}", None)

    check_numbers(layout, total)
    for name, argument in arguments.items():
        if argument is None:
            continue
        derived = layout._length_per_key if name == "length_per_key" else getattr(layout, name)()
        if argument != derived:
            raise ValueError(
                f"{_BATCH}: {name} is {argument}, and the other arguments say {derived}; "
                "leave it out"
            )


def check_numbers(layout: KeyedLayout, total: int, count: bool = True) -> None:
    """Check the numbers of an unchecked layout. A sync point.

    Args:
        layout: The layout. Its ids per key or its offsets are known afterwards.
        total: N.
        count: Whether the ids per key are needed. A lookup needs the offsets, and they are enough
            for the check.

    Raises:
        ValueError: Lengths or offsets do not describe N ids, or an inverse index is not a list.
    """
    lengths = layout._lengths
    offsets = layout._offsets
    strides = layout.stride_per_key()
    counts = None
    if count or total > LARGEST_INT32:
        counts = count_ids(total, lengths, offsets, strides)
        fit = counts is not None
    else:
        fit = _are_offsets(layout.offsets(), total)
        if offsets is not None and lengths is not None:
            fit = fit and torch.equal(lengths, lengths_of_offsets(offsets))

    if not fit:
        bounds = layout.lengths_offset_per_key()
        refuse_lists(_BATCH, total, lengths, offsets, layout._keys, bounds)
    if layout._inverse_indices is not None:
        check_inverse(layout._keys, strides, layout._inverse_indices)

    if counts is not None:
        layout._length_per_key = counts
    layout._checked = True


def _are_offsets(offsets: Tensor, total: int) -> bool:
    """Whether offsets [L + 1] of the CPU begin with 0, never fall, and end with the number of ids.

    The offsets of negative lengths fall somewhere, and so do those of a sum that wraps.
    """
    bounds = offsets.numpy()
    return bounds[0] == 0 and bounds[-1] == total and bool((bounds[:-1] <= bounds[1:]).all())


def check_form(
    owner: str,
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
) -> int:
    """Check what needs no numbers: shapes, dtypes and devices of a jagged tensor's parts.

    Args:
        owner: Name of the class, for the message.
        values: ``[N, ...]``.
        weights: ``[N]`` or None.
        lengths: ``[L]`` or None.
        offsets: ``[L + 1]`` or None; at least one of the two is given.

    Returns:
        L.

    Raises:
        ValueError: A part has the wrong shape, dtype or device.
    """
    if values.dim() == 0:
        raise ValueError(
            f"{owner}: values are one number without a dimension; give a list, [N]: values.view(1)"
        )

    many = values.numel() > LARGEST_INT32
    on_cpu = values.is_cpu
    for name, numbers in (("lengths", lengths), ("offsets", offsets)):
        if numbers is None:
            continue
        if numbers.dim() != 1 or (numbers.dtype not in _INDEX_TYPES and numbers.numel()):
            raise ValueError(
                f"{owner}: {name} must have one dimension, got shape {list(numbers.shape)}, and be "
                f"int32 or int64, got {numbers.dtype}; convert them: {name}.view(-1).long()"
            )
        if not (on_cpu and numbers.is_cpu) and numbers.device != values.device:
            raise ValueError(
                f"{owner}: {name} are on {numbers.device} and values on {values.device}; use one "
                "device"
            )
        if many:
            refuse_wrapping(owner, values, numbers)

    if offsets is not None and offsets.numel() == 0:
        raise ValueError(
            f"{owner}: offsets are empty; they start with 0, so even an empty batch has one entry"
        )
    if offsets is not None and lengths is not None and offsets.numel() != lengths.numel() + 1:
        raise ValueError(
            f"{owner}: {lengths.numel()} lengths and {offsets.numel()} offsets; L lengths go with "
            "L + 1 offsets"
        )

    if weights is not None:
        if weights.is_complex():
            refuse_complex(owner, weights)
        if not (on_cpu and weights.is_cpu) and weights.device != values.device:
            raise ValueError(
                f"{owner}: weights are on {weights.device} and values on {values.device}; use one "
                "device"
            )
        if weights.dim() == 0 or weights.shape[0] != values.shape[0]:
            count = weights.shape[0] if weights.dim() else "one number in place of"
            raise ValueError(
                f"{owner}: {count} weights for {values.shape[0]} values; give one weight per id"
            )
    return lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]


def refuse_complex(owner: str, weights: Tensor) -> None:
    """Refuse complex weights: a lookup would drop the imaginary part; TorchScript compiles it.

    Args:
        owner: Name of the class, for the message.
        weights: ``[N]``.

    Raises:
        ValueError: They are complex.
    """
    if weights.is_complex():
        raise ValueError(
            f"{owner}: weights are {weights.dtype}, and a weight is a real number that multiplies "
            "a row; give their real part: weights.real"
        )


def refuse_wrapping(owner: str, values: Tensor, numbers: Tensor) -> None:
    """Refuse more ids than int32 lengths or offsets count: offsets would wrap.

    Args:
        owner: Name of the class, for the message.
        values: ``[N, ...]``.
        numbers: Lengths or offsets.

    Raises:
        ValueError: N is larger than the largest int32, and the numbers are int32.
    """
    if values.shape[0] > LARGEST_INT32 and numbers.dtype is torch.int32:
        raise ValueError(
            f"{owner}: {values.shape[0]} values, and lengths or offsets in int32, which count up "
            f"to {LARGEST_INT32}; convert them: lengths.long()"
        )


def count_ids(
    total: int, lengths: Tensor | None, offsets: Tensor | None, stride_per_key: list[int]
) -> list[int] | None:
    """Ids of each key, or None where lengths and offsets do not describe so many ids. A sync point.

    Args:
        total: N.
        lengths: ``[L]`` or None.
        offsets: ``[L + 1]`` or None; at least one of the two is given.
        stride_per_key: Samples of each key, F numbers.

    Returns:
        F numbers, or None.

    Example:
        >>> lengths = torch.tensor([2, 1])
        >>> count_ids(3, lengths, None, [1, 1]), count_ids(4, lengths, None, [1, 1])
        ([2, 1], None)
    """
    tensor: Tensor = lengths if offsets is None else offsets  # type: ignore[assignment]
    if tensor.numel() <= FEW_LISTS and tensor.is_cpu:
        numbers: list[int] = tensor.tolist()
        if offsets is not None:
            first = numbers[0]
            numbers = differences(numbers)
            if first != 0 or (lengths is not None and lengths.tolist() != numbers):
                return None
        fits = sum(numbers) == total and min(numbers, default=0) >= 0
        return segment_sums(numbers, stride_per_key) if fits else None

    if offsets is None:
        low, high = torch.stack(torch.aminmax(tensor)).tolist() if tensor.numel() else (0, 0)
        if low < 0 or high > total:  # the sum of longer lists may wrap
            return None
        counts = ids_per_key(tensor, stride_per_key, high * tensor.numel())
    else:
        # Compared and not subtracted: a difference may wrap.
        fits = (offsets[0] == 0) & (offsets[1:] >= offsets[:-1]).all()
        if lengths is not None:
            fits = fits & (lengths == lengths_of_offsets(offsets)).all()
        if not bool(fits):
            return None
        counts = ids_by_offsets(offsets, stride_per_key)
    return counts if sum(counts) == total else None


def check_strides(keys: list[str], strides: Tensor) -> None:
    """Check that there is one row of strides for each key, and none negative.

    Raises:
        ValueError: There is not.
    """
    if strides.dim() != 2 or strides.shape[0] != len(keys):
        raise ValueError(
            f"{_BATCH}: stride_per_key_per_rank has shape {list(strides.shape)} and there are "
            f"{len(keys)} keys {keys}; it holds one list for each key with one number of samples "
            "for each rank, such as [[2], [3]]; leave it out where all keys have as many samples"
        )
    if strides.is_floating_point():
        raise ValueError(
            f"{_BATCH}: stride_per_key_per_rank is {strides.dtype}, and numbers of samples are "
            "integers; convert it: stride_per_key_per_rank.int()"
        )
    negative = (strides < 0).nonzero()
    if len(negative):
        key, rank = negative[0].tolist()
        raise ValueError(
            f"{_BATCH}: stride_per_key_per_rank says {int(strides[key, rank])} samples for feature "
            f"{keys[key]!r} of rank {rank}; a number of samples is 0 or more"
        )


def key_list(owner: str, keys: Iterable[str]) -> list[str]:
    """The keys as a new list, so that a caller who changes his list does not rename features.

    Args:
        owner: Name of the class, for the message.
        keys: The keys.

    Returns:
        The keys, copied.

    Raises:
        TypeError: ``keys`` is not iterable.
        ValueError: ``keys`` is one string, or has no order.
    """
    if isinstance(keys, str | bytes):
        raise ValueError(
            f"{owner}: keys must be a list of names, got the string {keys!r}; write [{keys!r}]"
        )
    if isinstance(keys, Set) and not isinstance(keys, KeysView):
        raise ValueError(
            f"{owner}: keys are a {type_name(keys)}, which has no order; features are stored in "
            "the order of the keys, so give a list"
        )
    if not isinstance(keys, Iterable):
        raise TypeError(f"{owner}: keys must be a list of names, got {type_name(keys)}")
    return list(keys)


def check_keys(owner: str, keys: Sequence[str]) -> None:
    """Check that keys are distinct.

    Args:
        owner: Name of the class, for the message.
        keys: The keys.

    Raises:
        ValueError: A key occurs twice.
    """
    if len(set(keys)) != len(keys):
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(
            f"{owner}: keys occur twice: {repeated} in {keys}; each key names one feature"
        )


def check_names(owner: str, keys: Sequence[Any]) -> None:
    """Check that keys are strings.

    Args:
        owner: Name of the class, for the message.
        keys: The keys.

    Raises:
        ValueError: One is not.
    """
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(
                f"{owner}: keys must be strings, the names of features; got {key!r}, "
                f"{type_name(key)}"
            )


def check_positions(where: str, indices: list[int], keys: list[str]) -> None:
    """Check that there is a key at each position; TorchScript compiles this as it stands.

    Raises:
        ValueError: A position is negative, or there is no key at it.
    """
    if len(indices) == 0 or (min(indices) >= 0 and max(indices) < len(keys)):
        return

    for index in indices:
        if index < 0 or index >= len(keys):
            raise ValueError(
                f"{where}: position {index} is outside of 0 to {len(keys) - 1}; the keys are {keys}"
            )


def check_segments(where: str, segments: list[int], keys: list[str]) -> None:
    """Check that segments, possibly empty, hold all keys; TorchScript compiles it.

    Raises:
        ValueError: One is negative, or all of them hold another number of keys.
    """
    if sum(segments) != len(keys):
        raise ValueError(
            f"{where}: segments {segments} hold {sum(segments)} keys, and the batch has "
            f"{len(keys)}: {keys}"
        )
    if len(segments) > 0 and min(segments) < 0:
        raise ValueError(
            f"{where}: segments {segments} hold a negative number of keys; each is 0 or more"
        )
