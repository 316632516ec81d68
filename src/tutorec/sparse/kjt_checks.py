"""Checks of what a caller says about a batch: its form, and that its lengths, offsets and strides fit its ids.

The form (shapes, dtypes, devices, keys, the number of lists) is checked as a batch is built. The numbers of a batch of
few lists are, too: a small example fails where it is written. Those of a larger one are checked once, before the first
result that depends on them: a batch that is only passed on, copied or joined costs nothing. Until then ``_pending``
tells what is to be checked, and what the caller says follows from the numbers is not believed.

A batch that fits is recognised by few operations, and what they found out is kept for later calls. Only a batch that
does not fit is searched for the culprit.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutorec.sparse.jagged_layout import FEW_LISTS
from tutorec.sparse.kjt_layout import (
    differences,
    offset_per_key_of,
    offsets_at,
    offsets_of_lengths,
    positions,
    running_sum,
)
from tutorec.sparse.validate import LARGEST_INT32, check_form, check_keys, check_lists, checkable, refuse_lists

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_BATCH = "KeyedJaggedTensor"
_INDEX_TYPES = frozenset({torch.int64, torch.int32})
# The keys that were last found to be distinct: comparing with them takes a fourth of the time.
_distinct: list[str] = []

# What is to be checked: whether lengths and whether offsets were given, the ids per key and the keys' starts that the
# caller says he knows, and for a batch that was joined the keys and ids of each that had not been checked before.
# Plain tuples and lists, which TorchScript and torch.load know.
Pending = tuple[bool, bool, list[int] | None, list[int] | None, list[tuple[int, int]]]


def check_batch(batch: KeyedJaggedTensor) -> None:
    """Check what a caller gave: its form now, its numbers now if it has few lists on the CPU, else at their first use.

    Args:
        batch: The batch.

    Raises:
        ValueError: A part has the wrong shape, dtype or device, a key occurs twice, or the numbers do not fit.
    """
    if not checkable(batch._values):
        refuse_lists(_BATCH, values=batch._values)
        return
    try:
        lists = _plain_lists(batch)
    except AttributeError:
        refuse_lists(_BATCH, weights=batch._weights, lengths=batch._lengths, offsets=batch._offsets)
        raise
    if batch._index_per_key is not None or batch._lengths_offset_per_key is not None or batch._jt_dict:
        _check_known(batch)
    if lists < 0:
        lists = _check_form(batch)
    given = batch._length_per_key, batch._offset_per_key
    batch._pending = (batch._lengths is not None, batch._offsets is not None, *given, [])
    if batch._values.is_cpu:
        if lists <= FEW_LISTS:
            check_numbers(batch)
        else:
            batch._length_per_key = batch._offset_per_key = None


def check_numbers(batch: KeyedJaggedTensor) -> None:
    """Check the numbers that a caller gave, if that is still to be done; what is found on the way is kept.

    Args:
        batch: The batch.

    Raises:
        ValueError: Lengths, offsets, ids per key or inverse indices do not fit each other.
    """
    pending = batch._pending
    if pending is None:
        return
    lengths, offsets = _given_parts(batch, pending)
    lists = (offsets if lengths is None else lengths).numel()  # type: ignore[union-attr]
    counts = (_few_fit if lists <= FEW_LISTS else _many_fit)(batch, lengths, offsets)
    if counts is None or (pending[4] and not _borders_fit(counts, pending[4])):
        _raise_what_does_not_fit(batch, lengths, offsets, pending[4])
    if pending[2] is not None or pending[3] is not None:
        _check_given_counts(batch, pending, counts)
    if batch._inverse_indices is not None:
        _check_inverse(batch, batch._inverse_indices)
    batch._length_per_key, batch._pending = counts, None


def _check_given_counts(batch: KeyedJaggedTensor, pending: Pending, counts: list[int] | None) -> None:
    for name, given in (("length_per_key", pending[2]), ("offset_per_key", pending[3] and differences(pending[3]))):
        if given is not None and list(given) != counts:
            raise ValueError(
                f"{_BATCH}: {name} says that the keys {batch._keys} have {given} ids, and the lengths say {counts}; "
                "leave it out"
            )


def confirm(batch: KeyedJaggedTensor, counts: list[int]) -> None:
    """The same for somebody who has summed up the lengths already.

    Args:
        batch: A batch that is still to be checked.
        counts: Ids per key, sums of its lengths in their own dtype.

    Raises:
        ValueError: As ``check_numbers``.
    """
    ids, lengths = batch._values.shape[0], batch._lengths
    if batch._pending == (True, False, None, None, []) and batch._inverse_indices is None and sum(counts) == ids:
        assert lengths is not None, "lengths were given"
        low, high = _ends(lengths)
        if low >= 0 and high * lengths.numel() <= LARGEST_INT32:  # so that no sum can have overflown
            batch._pending = None
            return
    check_numbers(batch)


def pending_of_joined(batches: list[KeyedJaggedTensor]) -> Pending:
    """What is to be checked of a batch that is joined from others, some of which are not checked yet.

    Sums that are wrong in two of them may be right together, so each one's own sum is kept. What gets lost as they
    are joined, such as their offsets, is checked now.

    Args:
        batches: The batches.

    Returns:
        What is to be checked of the lengths of all.

    Raises:
        ValueError: The numbers of a batch do not fit.
    """
    borders: list[tuple[int, int]] = []
    for batch in batches:
        pending = batch._pending
        if pending is not None and (pending[:4] != (True, False, None, None) or batch._inverse_indices is not None):
            check_numbers(batch)
            pending = None
        own = [(len(batch._keys), batch._values.shape[0])]
        borders += own if pending is None else pending[4] or own
    return True, False, None, None, borders


def _given_parts(batch: KeyedJaggedTensor, pending: Pending) -> tuple[Tensor | None, Tensor | None]:
    """Lengths and offsets as the caller gave them, without the one that was derived from the other."""
    lengths = batch._lengths if pending[0] else None
    offsets = batch._offsets if pending[1] else None
    return (batch._lengths, batch._offsets) if lengths is None and offsets is None else (lengths, offsets)


def _borders_fit(counts: list[int], borders: list[tuple[int, int]]) -> bool:
    """Whether the keys of each batch that was joined have as many ids as it had."""
    first = 0
    for keys, ids in borders:
        if sum(counts[first : first + keys]) != ids:
            return False
        first += keys
    return True


def _plain_lists(batch: KeyedJaggedTensor) -> int:
    """The number of lists of a batch in the usual form, which few questions recognise; -1 says nothing."""
    keys, lengths, offsets = batch._keys, batch._lengths, batch._offsets
    if lengths is None or batch._weights is not None or batch._stride_per_key_per_rank is not None or not keys:
        return -1
    lists = lengths.numel()
    stride = lists // len(keys)
    fits = (
        lists == stride * len(keys)
        and (batch._stride is None or batch._stride == stride)
        and (keys == _distinct or _are_distinct(keys))
        and lengths.dtype in _INDEX_TYPES
        and batch._values.numel() <= LARGEST_INT32
        and lengths.dim() == 1
        and lengths.is_cpu
        and batch._values.is_cpu
    )
    if fits and offsets is not None:
        fits = offsets.numel() == lists + 1 and offsets.dim() == 1 and offsets.dtype in _INDEX_TYPES and offsets.is_cpu
    if not fits:
        return -1
    batch._stride = stride
    return lists


def _are_distinct(keys: list[str]) -> bool:
    """Whether no key occurs twice; remembered, for the batches of one program have the same keys."""
    if len(set(keys)) != len(keys):
        return False
    _distinct[:] = keys
    return True


def _check_form(batch: KeyedJaggedTensor) -> int:
    """Check what needs no look at the numbers; the number of lists."""
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
        return lists
    strides = batch.stride_per_key()
    if lists == sum(strides):
        return lists
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


def _check_known(batch: KeyedJaggedTensor) -> None:
    """Check what a caller says he knows against what it follows from."""
    index, bounds, features = batch._index_per_key, batch._lengths_offset_per_key, batch._jt_dict
    if index is not None and index != positions(batch._keys):
        raise ValueError(f"{_BATCH}: index_per_key is {index}, and the keys are {batch._keys}; leave it out")
    if bounds is not None and list(bounds) != running_sum(batch.stride_per_key()):
        raise ValueError(
            f"{_BATCH}: lengths_offset_per_key is {bounds}, and the keys {batch._keys} have {batch.stride_per_key()} "
            "samples; leave it out"
        )
    if features and list(features) != batch._keys:
        raise ValueError(f"{_BATCH}: jt_dict has the keys {list(features)}, and the batch {batch._keys}; leave it out")


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


def _few_fit(batch: KeyedJaggedTensor, lengths: Tensor | None, offsets: Tensor | None) -> list[int] | None:
    """Ids per key of few lists, looked at in Python; None if they do not fit."""
    if offsets is None:
        assert lengths is not None, "the form is checked: lengths or offsets are there"
        numbers = lengths.tolist()
    else:
        starts: list[int] = offsets.tolist()
        numbers = differences(starts)
        if starts[0] != 0 or (lengths is not None and numbers != lengths.tolist()):
            return None
    if (numbers and min(numbers) < 0) or sum(numbers) != batch._values.shape[0]:
        return None
    return sums_per_key(numbers, batch)


def _many_fit(batch: KeyedJaggedTensor, lengths: Tensor | None, offsets: Tensor | None) -> list[int] | None:
    """Ids per key of many lists, looked at by tensor operations; None if they do not fit."""
    if offsets is not None:
        if not _rise(offsets, lengths):
            return None
        starts = starts_of_keys(batch, offsets)
        if starts[0] != 0:
            return None
        counts = differences(starts)
    else:
        assert lengths is not None, "the form is checked: lengths or offsets are there"
        low, high = _ends(lengths) if lengths.numel() else (0, 0)
        if low < 0 or high > batch._values.shape[0]:  # the sum of longer ones may wrap
            return None
        if batch._stride_per_key_per_rank is not None or lengths.numel() == 0:
            counts = differences(starts_of_keys(batch, offsets_of_lengths(lengths.long())))
        else:
            counts = row_sums(lengths, len(batch._keys), high)
    return counts if sum(counts) == batch._values.shape[0] else None


def _ends(lengths: Tensor) -> tuple[int, int]:
    """The shortest and the longest list. One sync point."""
    low, high = torch.aminmax(lengths)
    if lengths.is_cpu:
        return int(low), int(high)
    shortest, longest = torch.stack((low, high)).tolist()
    return shortest, longest


def row_sums(lengths: Tensor, keys: int, most: int) -> list[int]:
    """Ids per key where all keys have the same number of samples. A sync point.

    Args:
        lengths: ``[F * B]``.
        keys: F.
        most: No list is longer.

    Returns:
        F sums. Taken in int32 where that holds them, which is five times as fast as int64.
    """
    rows = lengths.view(keys, -1)
    fits = lengths.dtype is torch.int32 and most * rows.shape[1] <= LARGEST_INT32
    counts: list[int] = rows.sum(1, dtype=torch.int32 if fits else torch.int64).tolist()
    return counts


def _rise(offsets: Tensor, lengths: Tensor | None) -> bool:
    """Whether offsets never fall, and rise by the lengths where those are given.

    Reading the memory of the CPU as arrays takes a quarter of the time that tensor operations take here: they are
    slow at comparing integers and at asking whether all of many truths hold.
    """
    # Compared and not subtracted: a difference may wrap.
    if not offsets.is_cpu:
        steps = offsets[1:] - offsets[:-1]
        rise = not bool((offsets[1:] < offsets[:-1]).any())
        return rise and (lengths is None or torch.equal(lengths.to(steps.dtype), steps))
    ends = offsets.numpy()
    rise = not bool((ends[1:] < ends[:-1]).any())
    return rise and (lengths is None or bool((ends[1:] - ends[:-1] == lengths.numpy()).all()))


def starts_of_keys(batch: KeyedJaggedTensor, offsets: Tensor) -> list[int]:
    """Where each key's ids start, and the end of the last, read from the offsets. A sync point."""
    if batch._stride_per_key_per_rank is None:
        return offset_per_key_of(offsets, len(batch._keys), batch.stride())
    return offsets_at(offsets, batch.lengths_offset_per_key())


def sums_per_key(numbers: list[int], batch: KeyedJaggedTensor) -> list[int]:
    """Ids per key from the ids per list."""
    if batch._stride_per_key_per_rank is None:
        stride = batch.stride()
        if stride == 0:
            return [0] * len(batch._keys)
        if stride == 1:
            return numbers
        return [sum(numbers[first : first + stride]) for first in range(0, len(numbers), stride)]
    return [sum(numbers[low:high]) for low, high in pairwise(batch.lengths_offset_per_key())]


def _raise_what_does_not_fit(
    batch: KeyedJaggedTensor, lengths: Tensor | None, offsets: Tensor | None, borders: list[tuple[int, int]]
) -> None:
    """Search for the reason; of a batch that was joined, in one after the other of those that it was joined from."""
    bounds, keys = batch.lengths_offset_per_key(), batch._keys

    def place(index: int) -> str:
        key = bisect_right(bounds, index) - 1
        return f"feature {keys[key]!r}, sample {index - bounds[key]}"

    if not borders:
        check_lists(_BATCH, batch._values, lengths, offsets, place)
    key = start = 0
    for count, ids in borders:
        assert lengths is not None, "a batch that was joined has lengths"
        first, end = bounds[key], bounds[key + count]
        mine = batch._values[start : start + ids]
        check_lists(_BATCH, mine, lengths[first:end], None, lambda index, first=first: place(first + index))
        key, start = key + count, start + ids
    raise AssertionError(f"a batch of the keys {keys} does not fit, and the search for the reason found none")


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
