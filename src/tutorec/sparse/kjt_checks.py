"""Checks of what a caller says about a batch: its form, and that its lengths, offsets and strides fit its ids.

A batch that fits is recognised by few operations, and what they found out is kept for later calls. Only a batch that
does not fit is searched for the culprit.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutorec.sparse.kjt_layout import differences, offset_per_key_of, offsets_at, offsets_of_lengths
from tutorec.sparse.validate import check_form, check_keys, check_lists, checkable

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_BATCH = "KeyedJaggedTensor"
# Up to this many lists their numbers are read into Python, which takes 10 ns each where a tensor operation takes 2 us.
FEW_LISTS = 256


def check_batch(batch: KeyedJaggedTensor) -> None:
    """Check what a caller gave: its form now, its numbers now on the CPU and at the first sync point elsewhere.

    Args:
        batch: The batch.

    Raises:
        ValueError: A part has the wrong shape, dtype or device, a key occurs twice, or the numbers do not fit.
    """
    if not checkable(batch._values):
        return
    _check_form(batch)
    batch._checked = False
    if batch._values.is_cpu:
        check_numbers(batch)


def check_numbers(batch: KeyedJaggedTensor) -> None:
    """Check the numbers that a caller gave, if that is still to be done; what is found on the way is kept.

    Args:
        batch: The batch.

    Raises:
        ValueError: Lengths, offsets, ids per key or inverse indices do not fit each other.
    """
    if batch._checked:
        return
    given_counts, given_starts = batch._length_per_key, batch._offset_per_key
    lists = (batch._offsets if batch._lengths is None else batch._lengths).numel()  # type: ignore[union-attr]
    if not (_few_fit(batch) if lists <= FEW_LISTS else _many_fit(batch)):
        _raise_what_does_not_fit(batch)
    batch._checked = True
    if given_counts is not None:
        _check_counts("length_per_key", given_counts, batch)
    if given_starts is not None:
        _check_counts("offset_per_key", differences(given_starts), batch)
    if batch._inverse_indices is not None:
        _check_inverse(batch, batch._inverse_indices)


def _check_form(batch: KeyedJaggedTensor) -> None:
    """Check what needs no look at the numbers."""
    keys, lengths, offsets = batch._keys, batch._lengths, batch._offsets
    check_keys(_BATCH, keys)
    check_form(_BATCH, batch._values, batch._weights, lengths, offsets)
    if batch._stride_per_key_per_rank is not None:
        _check_strides(keys, batch._stride_per_key_per_rank)
    if lengths is not None and offsets is not None and offsets.numel() != lengths.numel() + 1:
        raise ValueError(
            f"{_BATCH}: {lengths.numel()} lengths and {offsets.numel()} offsets; L lengths go with L + 1 offsets"
        )
    lists = lengths.numel() if lengths is not None else offsets.numel() - 1 if offsets is not None else 0
    stride = batch.stride()
    if batch._stride_per_key_per_rank is None and lists == len(keys) * stride:
        return
    strides = batch.stride_per_key()
    if lists == sum(strides):
        return
    if batch._stride_per_key_per_rank is not None:
        reason = f"the strides {dict(zip(keys, strides, strict=True))} ask for {sum(strides)}"
    elif keys and lists % len(keys) != 0:
        reason = f"{lists} is no multiple of {len(keys)}"
    else:
        reason = f"stride says {stride} samples"
    raise ValueError(
        f"{_BATCH}: {lists} lists of ids for {len(keys)} keys {keys}: {reason}; "
        "there is one length per key and sample, key after key (keys with different numbers of samples say so with "
        "stride_per_key_per_rank=)"
    )


def _check_strides(keys: list[str], strides: Tensor) -> None:
    """Check that there is one row of strides for each key, and none negative."""
    if strides.dim() != 2 or strides.shape[0] != len(keys):
        raise ValueError(
            f"{_BATCH}: stride_per_key_per_rank has shape {list(strides.shape)} and there are {len(keys)} keys {keys}; "
            "it holds one list for each key with one number of samples for each rank, such as [[2], [3]]"
        )
    if strides.numel() and int(strides.min()) < 0:
        key, rank = (int(where) for where in (strides < 0).nonzero()[0])
        raise ValueError(
            f"{_BATCH}: stride_per_key_per_rank says {int(strides[key, rank])} samples for feature {keys[key]!r} of "
            f"rank {rank}; a number of samples is 0 or more"
        )


def _few_fit(batch: KeyedJaggedTensor) -> bool:
    """Whether a batch of few lists fits, looked at in Python; keeps the ids per key."""
    lengths, offsets = batch._lengths, batch._offsets
    if offsets is None:
        assert lengths is not None, "the form is checked: lengths or offsets are there"
        numbers = lengths.tolist()
    else:
        starts: list[int] = offsets.tolist()
        numbers = differences(starts)
        if starts[0] != 0 or (lengths is not None and numbers != lengths.tolist()):
            return False
    if numbers and min(numbers) < 0:
        return False
    if sum(numbers) != batch._values.shape[0]:
        return False
    batch._length_per_key = sums_per_key(numbers, batch)
    return True


def _many_fit(batch: KeyedJaggedTensor) -> bool:
    """Whether a batch fits, looked at by tensor operations; keeps the offsets and where each key's ids start."""
    lengths, offsets = batch._lengths, batch._offsets
    if offsets is not None:
        if not _rise(offsets, lengths):
            return False
    else:
        assert lengths is not None, "the form is checked: lengths or offsets are there"
        offsets = offsets_of_lengths(lengths)
        if int(lengths.min()) < 0:
            return False
    starts = starts_of_keys(batch, offsets)
    if starts[0] != 0 or starts[-1] != batch._values.shape[0]:
        return False
    batch._offsets, batch._offset_per_key = offsets, starts
    batch._length_per_key = differences(starts)
    return True


def _rise(offsets: Tensor, lengths: Tensor | None) -> bool:
    """Whether offsets never fall, and rise by the lengths where those are given.

    Reading the memory of the CPU as arrays takes a quarter of the time that tensor operations take here: they are
    slow at comparing integers and at asking whether all of many truths hold.
    """
    if not offsets.is_cpu:
        steps = offsets[1:] - offsets[:-1]
        return int(steps.min()) >= 0 and (lengths is None or torch.equal(lengths.to(steps.dtype), steps))
    ends = offsets.numpy()
    if lengths is None:
        return not bool((ends[1:] < ends[:-1]).any())
    numbers = lengths.numpy()
    return bool(numbers.min() >= 0) and bool((ends[1:] - ends[:-1] == numbers).all())


def starts_of_keys(batch: KeyedJaggedTensor, offsets: Tensor) -> list[int]:
    """Where each key's ids start, and the end of the last, read from the offsets. A sync point."""
    if batch._stride_per_key_per_rank is None:
        return offset_per_key_of(offsets, len(batch._keys), batch.stride())
    return offsets_at(offsets, batch.lengths_offset_per_key())


def sums_per_key(numbers: list[int], batch: KeyedJaggedTensor) -> list[int]:
    """Ids per key from the ids per list."""
    if batch._stride_per_key_per_rank is None:
        stride = batch.stride()
        return [sum(numbers[key * stride : (key + 1) * stride]) for key in range(len(batch._keys))]
    return [sum(numbers[low:high]) for low, high in pairwise(batch.lengths_offset_per_key())]


def _raise_what_does_not_fit(batch: KeyedJaggedTensor) -> None:
    bounds, keys = batch.lengths_offset_per_key(), batch._keys

    def place(index: int) -> str:
        key = bisect_right(bounds, index) - 1
        return f"feature {keys[key]!r}, sample {index - bounds[key]}"

    check_lists(_BATCH, batch._values, batch._lengths, batch._offsets, place)
    raise AssertionError(f"a batch of the keys {keys} does not fit, and the search for the reason found none")


def _check_counts(name: str, given: list[int], batch: KeyedJaggedTensor) -> None:
    """Check the ids per key that a caller says he knows."""
    found = batch.length_per_key()
    if list(given) != found:
        raise ValueError(
            f"{_BATCH}: {name} says that the keys {batch._keys} have {given} ids, and the lengths say {found}; "
            "leave it out"
        )


def _check_inverse(batch: KeyedJaggedTensor, inverse_indices: tuple[list[str], Tensor]) -> None:
    """Check that each sample of the whole batch means a list that its feature has."""
    keys, indices = inverse_indices
    if indices.dim() != 2 or indices.shape[0] != len(keys):
        raise ValueError(
            f"{_BATCH}: inverse_indices have shape {list(indices.shape)} for the keys {keys}; they hold one row for "
            "each key and one column for each sample of the whole batch"
        )
    known, strides = batch.index_per_key(), batch.stride_per_key()
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(f"{_BATCH}: inverse_indices name {unknown}, and the keys are {batch._keys}")
    limits = torch.tensor([strides[known[key]] for key in keys], device=indices.device).unsqueeze(1)
    wrong = (indices < 0) | (indices >= limits)
    if bool(wrong.any()):
        row, sample = (int(where) for where in wrong.nonzero()[0])
        raise ValueError(
            f"{_BATCH}: inverse_indices of feature {keys[row]!r}, sample {sample}, hold {int(indices[row, sample])}, "
            f"and the feature has {int(limits[row])} lists (0 to {int(limits[row]) - 1})"
        )
