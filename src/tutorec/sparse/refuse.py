"""What is wrong with a batch: searched for and said after a check has failed, or for rare parts.

The checks themselves, which each batch passes, are in ``validate.py``.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from tutorec.sparse.layout import lengths_of_offsets

_BATCH = "KeyedJaggedTensor"


def require_tensors(owner: str, arguments: Mapping[str, Any], optional: bool = False) -> None:
    """Check that arguments are tensors, or replace one as a proxy of torch.fx does.

    Args:
        owner: Name of the class or function, for the message.
        arguments: Name of an argument -> its value.
        optional: Whether an argument may be None.

    Raises:
        TypeError: One is something else.

    Example:
        >>> require_tensors("JaggedTensor", {"ids": [1, 2]})
        Traceback (most recent call last):
            ...
        TypeError: JaggedTensor: ids must be a tensor, got list; convert: torch.as_tensor(ids)
    """
    for name, value in arguments.items():
        if (value is None and optional) or hasattr(type(value), "__torch_function__"):
            continue

        remedy = ""
        with suppress(TypeError, ValueError, RuntimeError):
            if torch.as_tensor(value).dim() > 0:
                remedy = f"; convert: torch.as_tensor({name})"
        raise TypeError(f"{owner}: {name} must be a tensor, got {type_name(value)}{remedy}")


def type_name(value: Any) -> str:
    """The name of a value's type, with its module unless it is one of Python's own."""
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def refuse_batch(owner: str, batch: Any) -> NoReturn:
    """Say what a module takes that is not given a KeyedJaggedTensor.

    Args:
        owner: The module, for the message.
        batch: What it is given.

    Raises:
        TypeError: Always.
    """
    remedy = "KeyedJaggedTensor(keys, values, lengths=lengths)"
    if isinstance(batch, Mapping) and all(hasattr(lists, "lengths") for lists in batch.values()):
        remedy = "KeyedJaggedTensor.from_jt_dict(features)"
    elif hasattr(batch, "to_padded_dense"):
        remedy = "KeyedJaggedTensor.from_jt_dict({name of the feature: features})"
    raise TypeError(
        f"{owner} takes a KeyedJaggedTensor, got {type(batch).__name__}; build one: {remedy}"
    )


def require_features(jt_dict: Any) -> None:
    """Check that ``KeyedJaggedTensor.from_jt_dict`` is given jagged tensors by feature.

    Args:
        jt_dict: What it is given.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(jt_dict, Mapping):
        raise TypeError(
            f"{_BATCH}.from_jt_dict: a dict of JaggedTensors by feature is needed, got "
            f"{type_name(jt_dict)}"
        )
    for key, feature in jt_dict.items():
        if not hasattr(feature, "weights_or_none"):
            raise TypeError(
                f"{_BATCH}.from_jt_dict: feature {key!r} must be a JaggedTensor, got "
                f"{type_name(feature)}; make one: JaggedTensor(torch.as_tensor(values), "
                "lengths=lengths)"
            )


def refuse_lists(
    owner: str,
    total: int,
    lengths: Tensor | None,
    offsets: Tensor | None,
    keys: Sequence[str] = (),
    bounds: Sequence[int] = (),
) -> NoReturn:
    """Say why lengths and offsets do not describe the ids.

    Args:
        owner: Name of the class, for the message.
        total: N.
        lengths: ``[L]`` or None.
        offsets: ``[L + 1]`` or None; at least one of the two is given.
        keys: F feature names, if lists belong to features.
        bounds: Where each key's lists start, and the end of the last ``[F + 1]``.

    Raises:
        ValueError: A length is negative, offsets fall or do not start at 0, they do not end at N,
            or the two disagree.
    """

    def location(index: int) -> str:
        if not keys:
            return f"sample {index}"
        key = bisect_right(bounds, index) - 1
        return f"feature {keys[key]!r}, sample {index - bounds[key]}"

    if offsets is None:
        assert lengths is not None, "lengths or offsets are given"
        negative = (lengths < 0).nonzero()
        if len(negative):
            index = int(negative[0])
            raise ValueError(
                f"{owner}: lengths[{index}] = {int(lengths[index])} ({location(index)}); "
                "a length counts ids, and an empty list has length 0"
            )

        ids = sum(lengths.tolist())  # in Python: a sum of int64 may wrap
        raise ValueError(
            f"{owner}: lengths add up to {ids}, and there are {total} values; every id belongs to "
            f"exactly one of the {lengths.numel()} lists"
        )

    first = int(offsets[0])
    last = int(offsets[-1])
    if first != 0:
        raise ValueError(f"{owner}: offsets must start at 0, got offsets[0] = {first}")
    # compared and not subtracted: a difference may wrap
    falling = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falling):
        index = int(falling[0])
        raise ValueError(
            f"{owner}: offsets must not fall: offsets[{index}] = {int(offsets[index])} and "
            f"offsets[{index + 1}] = {int(offsets[index + 1])} ({location(index)}); an empty list "
            "repeats the offset"
        )
    if last != total:
        raise ValueError(
            f"{owner}: offsets end at {last}, and there are {total} values; the last offset is "
            "the number of ids"
        )

    steps = lengths_of_offsets(offsets)
    assert lengths is not None, "offsets alone describe the ids"
    index = int((lengths != steps).nonzero()[0])
    raise ValueError(
        f"{owner}: lengths and offsets disagree: lengths[{index}] = {int(lengths[index])}, and "
        f"the offsets give {int(steps[index])} ({location(index)}); pass one of the two, the other "
        "is derived"
    )


def refuse_list_count(
    keys: list[str], lists: int, stride_per_key: list[int], argument: str
) -> None:
    """Say why a batch does not have one list for each key and sample.

    Args:
        keys: F feature names.
        lists: L, its lists.
        stride_per_key: Samples of each key.
        argument: Name of the argument that says so, empty if none does.

    Raises:
        ValueError: Always.
    """
    total = sum(stride_per_key)
    rule = "there is one length per key and sample, key after key"
    if argument == "stride":
        reason = (
            f"stride says {stride_per_key[0]} samples, for which {total} lists are needed; {rule}, "
            "and without stride= the number of samples is lists over keys"
        )
    elif argument:
        samples = dict(zip(keys, stride_per_key, strict=True))
        reason = (
            f"{argument} says {samples} samples, which add up to {total} lists; {rule}: either "
            f"lengths (or offsets) or {argument} must change"
        )
    elif not keys:
        reason = "a batch without keys has no lists; name the features with keys=[...]"
    else:
        reason = (
            f"{lists} is not a multiple of {len(keys)}; {rule} (keys with different numbers of "
            "samples say so with stride_per_key_per_rank=)"
        )

    raise ValueError(f"{_BATCH}: {lists} lists of ids for {len(keys)} keys {keys}: {reason}")


def check_stride_per_key(
    keys: list[str], stride: int | None, strides: Sequence[int], ranks: Tensor | None
) -> None:
    """Check that ``stride_per_key`` goes with the keys and with what else says numbers of samples.

    Args:
        keys: F feature names.
        stride: The argument ``stride``.
        strides: The argument ``stride_per_key``.
        ranks: The argument ``stride_per_key_per_rank`` ``[F, W]``.

    Raises:
        ValueError: It does not.
    """
    if len(strides) != len(keys):
        raise ValueError(
            f"{_BATCH}: stride_per_key {list(strides)} has {len(strides)} numbers and there are "
            f"{len(keys)} keys {keys}; it says the samples of each key"
        )

    # mostly all are one number, which is counted in a third of the time of min()
    same = not strides or strides.count(strides[0]) == len(strides)
    if min(strides[:1] if same else strides, default=0) < 0:
        raise ValueError(
            f"{_BATCH}: stride_per_key says {list(strides)} samples for the keys {keys}; a number "
            "of samples is 0 or more"
        )
    if ranks is not None and ranks.sum(1).tolist() != list(strides):
        raise ValueError(
            f"{_BATCH}: stride_per_key says {list(strides)} samples, and stride_per_key_per_rank "
            f"adds up to {ranks.sum(1).tolist()} for the keys {keys}; give one of the two"
        )
    if ranks is None and stride is not None and any(count != stride for count in strides):
        raise ValueError(
            f"{_BATCH}: stride says {stride} samples, and stride_per_key {list(strides)} for the "
            f"keys {keys}; give one of the two"
        )


def check_inverse(
    batch_keys: list[str], stride_per_key: list[int], inverse: tuple[list[str], Tensor]
) -> None:
    """Check that each sample of the whole batch means a list that its feature has.

    Args:
        batch_keys: F feature names.
        stride_per_key: Lists of each.
        inverse: Keys, and which list each sample means ``[F, B]``.

    Raises:
        TypeError: ``inverse`` is not keys and a tensor.
        ValueError: One does not.
    """
    if not isinstance(inverse, Sequence) or len(inverse) != 2:
        raise TypeError(
            f"{_BATCH}: inverse_indices must be a pair, keys and a tensor [F, B], got "
            f"{type_name(inverse)}"
        )
    keys, indices = inverse
    require_tensors(_BATCH, {"inverse_indices[1]": indices})

    if indices.is_floating_point():
        raise ValueError(
            f"{_BATCH}: inverse_indices are {indices.dtype}, and the number of a list is an "
            "integer; convert them: inverse_indices.long()"
        )
    if indices.dim() != 2 or indices.shape[0] != len(keys):
        raise ValueError(
            f"{_BATCH}: inverse_indices have shape {list(indices.shape)} for the keys {keys}; they "
            "hold one row for each key and one column for each sample of the whole batch"
        )

    lists = dict(zip(batch_keys, stride_per_key, strict=True))
    unknown = [key for key in keys if key not in lists]
    if unknown:
        raise ValueError(f"{_BATCH}: inverse_indices name {unknown}, and the keys are {batch_keys}")

    limits = torch.tensor([lists[key] for key in keys], device=indices.device).unsqueeze(1)
    wrong = ((indices < 0) | (indices >= limits)).nonzero()
    if len(wrong):
        row, sample = wrong[0].tolist()
        raise ValueError(
            f"{_BATCH}: inverse_indices of feature {keys[row]!r}, sample {sample}, hold "
            f"{int(indices[row, sample])}, and the feature has {lists[keys[row]]} lists (0 to "
            f"{lists[keys[row]] - 1})"
        )


def check_joined(
    keys: list[str], samples: list[int], weighted: int, ranks: list[int], inverse: int
) -> None:
    """Check that batches can be joined into one; TorchScript compiles this as it stands.

    Args:
        keys: The keys of all batches.
        samples: B of each batch.
        weighted: How many batches have weights.
        ranks: How many ranks each batch has that is of variable batch size.
        inverse: How many batches have inverse indices.

    Raises:
        ValueError: A key occurs twice, or the batches do not agree.
    """
    where = "KeyedJaggedTensor.concat"
    count = len(samples)
    if len({key: key for key in keys}) != len(keys):
        raise ValueError(f"{where}: keys occur twice: {keys}; each key names one feature")

    names = ["weights", "variable batch", "inverse indices"]
    for name, have in zip(names, [weighted, len(ranks), inverse]):  # noqa: B905 (TorchScript)
        if have != 0 and have != count:
            raise ValueError(
                f"{where}: {name} differ: {have} of {count} batches have {name}; all must, or none"
            )

    name, sizes = ("samples", samples) if len(ranks) == 0 else ("ranks", ranks)
    if min(sizes) != max(sizes):
        raise ValueError(f"{where}: {name} differ: {sizes}; all batches must have the same")
