"""Checks of keys, lengths and offsets: a few fused operations, and a search for the culprit only after one fails.

The form of a batch is checked where it is built, and so are the numbers of few lists on the CPU. Those of many lists,
and on another device, where reading a result would stop the device, are checked at their first use
(``KeyedJaggedTensor.sync`` is one; see ``kjt_checks.py``). While a model is traced, scripted, exported or compiled
there are no numbers to look at, and no check runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral

import numpy as np
import torch
from torch import Tensor
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from tutorec._validation import validation_enabled
from tutorec.sparse.kjt_layout import lengths_of_offsets, offsets_of_lengths

_BATCH = "KeyedJaggedTensor"
_INDEX_TYPES = (torch.int64, torch.int32)
LARGEST_INT32 = torch.iinfo(torch.int32).max


def checkable(values: Tensor) -> bool:
    """Whether the numbers of a tensor may be looked at now: checks are on, and nothing is being traced."""
    return (
        validation_enabled()
        and type(values) is Tensor
        and not values.is_meta
        and not torch.compiler.is_compiling()
        and not is_tracing()
    )


def check_form(
    owner: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> None:
    """Check what needs no look at the numbers: shapes, dtypes and devices of a jagged tensor's parts.

    Args:
        owner: Name of the class, for the message.
        values: ``[N, ...]``.
        weights: ``[N]`` or None.
        lengths: ``[L]`` or None.
        offsets: ``[L + 1]`` or None.

    Raises:
        ValueError: A part has the wrong shape, dtype or device.
    """
    if values.dim() == 0:
        raise ValueError(
            f"{owner}: values are one number without a dimension; give a list of them, [N]: values.view(1)"
        )
    for name, part in (("lengths", lengths), ("offsets", offsets)):
        if part is None:
            continue
        if part.dtype not in _INDEX_TYPES and part.numel():
            raise ValueError(f"{owner}: {name} must be int32 or int64, got {part.dtype}; convert them: {name}.long()")
        if part.dim() != 1:
            raise ValueError(
                f"{owner}: {name} must have one dimension, got shape {list(part.shape)}; flatten them: {name}.view(-1)"
            )
        if not (part.is_cpu and values.is_cpu) and part.device != values.device:
            raise ValueError(f"{owner}: {name} are on {part.device} and values on {values.device}; use one device")
        refuse_wrapping(owner, values, part)
    if offsets is not None and offsets.numel() == 0:
        raise ValueError(f"{owner}: offsets are empty; they start with 0, so even an empty batch has one entry")
    if weights is not None and weights.shape[:1] != values.shape[:1]:
        raise ValueError(f"{owner}: {weights.shape[0]} weights for {values.shape[0]} values; give one weight per id")


def refuse_wrapping(owner: str, values: Tensor, numbers: Tensor) -> None:
    """Refuse more ids than int32 lengths or offsets can count: offsets have the dtype of the lengths, and would wrap.

    Args:
        owner: Name of the class, for the message.
        values: ``[N, ...]``.
        numbers: Lengths or offsets.

    Raises:
        ValueError: N is larger than the largest int32, and the numbers are int32.
    """
    # ``numel`` is asked first because it is cheap.
    if values.numel() > LARGEST_INT32 and values.shape[0] > LARGEST_INT32 and numbers.dtype is torch.int32:
        raise ValueError(
            f"{owner}: {values.shape[0]} values, and lengths or offsets in int32, which count up to {LARGEST_INT32}; "
            "convert them: lengths.long()"
        )


def check_lists(
    owner: str, values: Tensor, lengths: Tensor | None, offsets: Tensor | None, place: Callable[[int], str]
) -> Tensor:
    """Check that lengths and offsets describe ``values``: each id in exactly one list.

    Args:
        owner: Name of the class, for the message.
        values: ``[N, ...]``.
        lengths: ``[L]`` or None.
        offsets: ``[L + 1]`` or None; at least one of the two is given.
        place: Says in words where list i belongs, such as ``feature 'user', sample 3``.

    Returns:
        The offsets, computed on the way where they were not given.

    Raises:
        ValueError: A length is negative, offsets fall or do not start at 0, they do not end at N, or the two disagree.
    """
    count = values.shape[0]
    if offsets is None:
        assert lengths is not None, "callers have checked that lengths or offsets are given"
        offsets = offsets_of_lengths(lengths)
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(_negative_length(owner, lengths, place))
        # In int64, for the last offset may have wrapped; in Python where that sum may have wrapped, too.
        wide = lengths.numel() > 0 and int(lengths.max()) > count
        total = sum(lengths.tolist()) if wide else int(lengths.sum())
        if total != count:
            raise ValueError(
                f"{owner}: lengths add up to {total}, and there are {count} values; "
                f"every id belongs to exactly one of the {lengths.numel()} lists"
            )
        return offsets
    steps = lengths_of_offsets(offsets)
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"{owner}: offsets must start at 0, got offsets[0] = {first}")
    falling = offsets[1:] < offsets[:-1]  # compared and not subtracted: a difference may wrap
    if bool(falling.any()):
        index = int(falling.nonzero()[0])
        raise ValueError(
            f"{owner}: offsets must not fall: offsets[{index}] = {int(offsets[index])} and offsets[{index + 1}] = "
            f"{int(offsets[index + 1])} ({place(index)}); an empty list repeats the offset"
        )
    if last != count:
        raise ValueError(
            f"{owner}: offsets end at {last}, and there are {count} values; the last offset is the number of ids"
        )
    if lengths is not None:
        _check_agreement(owner, lengths, steps, place)
    return offsets


def _check_agreement(owner: str, lengths: Tensor, steps: Tensor, place: Callable[[int], str]) -> None:
    """Check that given lengths are the steps of given offsets."""
    if lengths.numel() != steps.numel():
        raise ValueError(
            f"{owner}: {lengths.numel()} lengths and {steps.numel() + 1} offsets; L lengths go with L + 1 offsets"
        )
    wrong = lengths != steps
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"{owner}: lengths and offsets disagree: lengths[{index}] = {int(lengths[index])}, and the offsets give "
            f"{int(steps[index])} ({place(index)}); pass one of the two, the other is derived"
        )


def _negative_length(owner: str, lengths: Tensor, place: Callable[[int], str]) -> str:
    index = int((lengths < 0).nonzero()[0])
    return (
        f"{owner}: lengths[{index}] = {int(lengths[index])} ({place(index)}); "
        "a length counts ids, and an empty list has length 0"
    )


def refuse_lists(owner: str, **parts: object) -> None:
    """Raise where a part that must be a tensor is a list, a number or an array; a tracer's stand-ins pass.

    Args:
        owner: Name of the class, for the message.
        parts: The parts by name.

    Raises:
        TypeError: A part is none of torch's.
    """
    for name, part in parts.items():
        if isinstance(part, list | tuple | int | float | str | np.ndarray):
            remedy = f"torch.from_numpy({name})" if isinstance(part, np.ndarray) else f"torch.tensor({name})"
            raise TypeError(f"{owner}: {name} must be a tensor, got {type(part).__name__}; write {remedy}")


def key_list(owner: str, keys: Iterable[str]) -> list[str]:
    """The keys as a list of their own, so that a caller who changes his list does not rename features.

    Args:
        owner: Name of the class, for the message.
        keys: The keys.

    Returns:
        The keys, copied.

    Raises:
        ValueError: ``keys`` is one string.
    """
    if isinstance(keys, str):
        raise ValueError(f"{owner}: keys must be a list of names, got the string {keys!r}; write [{keys!r}]")
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
        repeated = sorted({key for key in keys if list(keys).count(key) > 1})
        raise ValueError(f"{owner}: keys occur twice: {repeated} in {list(keys)}; each key names one feature")


def check_same(operation: str, what: str, found: Mapping[str, object]) -> None:
    """Check that the parts of one batch agree, such as in their number of samples.

    Args:
        operation: What puts the parts together.
        what: What should be the same.
        found: What each part has.

    Raises:
        ValueError: Two parts differ.
    """
    if len(set(found.values())) > 1:
        raise ValueError(f"{_BATCH}.{operation}: {what} differ: {dict(found)}; all must be the same")


def check_positions(where: str, positions: Sequence[int], keys: Sequence[str]) -> None:
    """Raise unless every position is that of a key.

    Raises:
        TypeError: Positions are no list of whole numbers.
        ValueError: A position is negative, or there is no key at it.
    """
    _check_whole(where, "positions of keys", positions)
    if positions and (min(positions) < 0 or max(positions) >= len(keys)):
        outside = [position for position in positions if not 0 <= position < len(keys)]
        raise ValueError(f"{where}: positions {outside} are outside of 0 to {len(keys) - 1}; the keys are {list(keys)}")


def missing_key(owner: str, key: str, keys: Sequence[str]) -> KeyError:
    """The error for a key that is not there; it names the keys that are."""
    return KeyError(f"{owner} has no key {key!r}; its keys are {list(keys)}")


def check_segments(where: str, segments: Sequence[int], keys: Sequence[str]) -> None:
    """Raise unless segments cut all keys into pieces, some of which may be empty.

    Raises:
        TypeError: Segments are no list of whole numbers.
        ValueError: One is negative, or together they hold another number of keys.
    """
    _check_whole(where, "numbers of keys", segments)
    if sum(segments) != len(keys):
        raise ValueError(
            f"{where}: segments {list(segments)} hold {sum(segments)} keys, and the batch has {len(keys)}: {list(keys)}"
        )
    if segments and min(segments) < 0:
        raise ValueError(f"{where}: segments {list(segments)} hold a negative number of keys; each is 0 or more")


def _check_whole(where: str, what: str, numbers: Sequence[int]) -> None:
    """Raise unless these are whole numbers in a list or a tuple."""
    if not isinstance(numbers, list | tuple):
        raise TypeError(f"{where} takes a list of {what}, got {type(numbers).__name__}: {numbers!r}")
    for number in numbers:
        if type(number) is not int and not isinstance(number, Integral | torch.SymInt):
            raise TypeError(f"{where} takes {what}, whole numbers, got {number!r} in {list(numbers)}")
