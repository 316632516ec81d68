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
from torch.compiler import is_compiling
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from tutorec._validation import validation_enabled
from tutorec.sparse.layout import (
    FEW_LISTS,
    LARGEST_INT32,
    differences,
    ids_by_offsets,
    ids_per_key,
    lengths_of_offsets,
    segment_sums,
)
from tutorec.sparse.refuse import type_name

_BATCH = "KeyedJaggedTensor"
_INDEX_TYPES = (torch.int32, torch.int64)


def checkable(values: Tensor) -> bool:
    """Whether a tensor's numbers may be read now: checks are on, and nothing is traced."""
    return (
        validation_enabled()
        and type(values) is Tensor
        and not values.is_meta
        and not is_compiling()
        and not is_tracing()
    )


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
    many, on_cpu = values.numel() > LARGEST_INT32, values.is_cpu
    for name, part in (("lengths", lengths), ("offsets", offsets)):
        if part is None:
            continue
        if part.dim() != 1 or (part.dtype not in _INDEX_TYPES and part.numel()):
            raise ValueError(
                f"{owner}: {name} must have one dimension, got shape {list(part.shape)}, and be "
                f"int32 or int64, got {part.dtype}; convert them: {name}.view(-1).long()"
            )
        if not (on_cpu and part.is_cpu) and part.device != values.device:
            raise ValueError(
                f"{owner}: {name} are on {part.device} and values on {values.device}; use one "
                "device"
            )
        if many:
            refuse_wrapping(owner, values, part)
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
    given: Tensor = lengths if offsets is None else offsets  # type: ignore[assignment]
    if given.numel() <= FEW_LISTS and given.is_cpu:
        numbers: list[int] = given.tolist()
        if offsets is not None:
            first, numbers = numbers[0], differences(numbers)
            if first != 0 or (lengths is not None and lengths.tolist() != numbers):
                return None
        fits = sum(numbers) == total and min(numbers, default=0) >= 0
        return segment_sums(numbers, stride_per_key) if fits else None
    if offsets is None:
        low, high = torch.stack(torch.aminmax(given)).tolist() if given.numel() else (0, 0)
        if low < 0 or high > total:  # the sum of longer lists may wrap
            return None
        counts = ids_per_key(given, stride_per_key, high * given.numel())
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
