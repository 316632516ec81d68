"""Batches from nested Python lists and back, for tests and servers."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

Ids = Mapping[str, Sequence[Sequence[int]]]
Weights = Mapping[str, Sequence[Sequence[float]]]


def kjt_from_lists(
    ids: Ids,
    weights: Weights | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """A batch from one list of ids for each sample of each feature: ``ids[feature][sample]``.

    Features may differ in their number of samples; the batch is then one of variable batch size,
    with ``stride_per_key()`` as many samples as each feature has lists.

    Args:
        ids: The ids of each feature, in the order of the batch's keys.
        weights: A weight for each id, in the same form, or None.
        device: Where the batch is built; by default torch's default device.
        dtype: Of the ids: ``torch.int64`` or ``torch.int32``.

    Returns:
        The batch, with the ids of each key counted already.

    Raises:
        ValueError: A sample is not a list of whole numbers that ``dtype`` holds, or the weights do
            not have the form of the ids.

    Example:
        >>> batch = kjt_from_lists({"item": [[7, 8], [9]], "user": [[], [4, 5]]})
        >>> batch.lengths()
        tensor([2, 1, 0, 2])
        >>> kjt_from_lists({"item": [[7]], "user": [[1], [2], [3]]}).stride_per_key()
        [1, 3]

    See Also:
        ``kjt_to_lists``. TorchRec has no such function; its users write ``values`` and ``lengths``
        by hand.
    """
    keys = list(ids)
    if weights is not None:
        _check_weights(ids, weights)

    return KeyedJaggedTensor(
        keys,
        _flat("ids", ids, keys, dtype, device),
        None if weights is None else _flat("weights", weights, keys, torch.float32, device),
        lengths=torch.tensor(
            [len(bag) for key in keys for bag in ids[key]], dtype=torch.int64, device=device
        ),
        stride_per_key=[len(ids[key]) for key in keys],
    ).sync()


def kjt_to_lists(kjt: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    """The ids of a batch as ``ids[feature][sample]``, the inverse of ``kjt_from_lists``.

    Args:
        kjt: The batch.

    Returns:
        For each key, in order, one list of ids for each of its samples.

    Example:
        >>> kjt_to_lists(kjt_from_lists({"item": [[7, 8], [9]], "user": [[], [4, 5]]}))
        {'item': [[7, 8], [9]], 'user': [[], [4, 5]]}

    See Also:
        ``kjt_weights_to_lists``.
    """
    return _lists(kjt, kjt.values().tolist())


def kjt_weights_to_lists(kjt: KeyedJaggedTensor) -> dict[str, list[list[float]]] | None:
    """The weights of a batch in the form of ``kjt_to_lists``, None where it has none. A sync point.

    Args:
        kjt: The batch.

    Returns:
        For each key one list of weights for each sample, or None.

    Example:
        >>> kjt_weights_to_lists(
        ...     kjt_from_lists({"item": [[7, 8], [9]]}, {"item": [[0.5, 1.0], [2.0]]})
        ... )
        {'item': [[0.5, 1.0], [2.0]]}

    See Also:
        ``kjt_to_lists``.
    """
    weights = kjt.weights_or_none()
    return None if weights is None else _lists(kjt, weights.tolist())


def _lists(kjt: KeyedJaggedTensor, flat: list) -> dict[str, list[list]]:
    """Cut what belongs to each id into one list for each key and sample."""
    kjt._check_numbers()
    offsets = kjt.offsets().tolist()
    bounds = pairwise(kjt.lengths_offset_per_key())

    lists: dict[str, list[list]] = {}
    for key, (first, last) in zip(kjt.keys(), bounds, strict=True):
        lists[key] = [flat[start:end] for start, end in pairwise(offsets[first : last + 1])]
    return lists


def _check_weights(ids: Ids, weights: Weights) -> None:
    """Raise unless there is exactly one weight for each id."""
    for key in {**ids, **weights}:
        samples = zip_longest(ids.get(key, ()), weights.get(key, ()))
        for sample, (bag, bag_weights) in enumerate(samples):
            if bag is None or bag_weights is None or len(bag) != len(bag_weights):
                raise ValueError(
                    f"kjt_from_lists: feature {key!r}, sample {sample}, has the ids {bag} and the "
                    f"weights {bag_weights}; give one weight for each id"
                )


def _flat(
    noun: str,
    lists: Ids | Weights,
    keys: list[str],
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """The numbers of all lists in order; an error names the sample that ``dtype`` cannot hold."""
    bags = [bag for key in keys for bag in lists.get(key, ())]
    try:
        return _tensor(list(chain.from_iterable(bags)), dtype, device)
    except (TypeError, ValueError, RuntimeError):
        # Search the sample that is not a list of numbers.
        for key in keys:
            for sample, bag in enumerate(lists[key]):
                try:
                    _tensor(list(bag), dtype, device)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise ValueError(
                        f"kjt_from_lists: feature {key!r}, sample {sample}, is {bag!r} and should "
                        f"be a list of {noun} that {dtype} holds: {error}"
                    ) from error
        raise


def _tensor(numbers: list[Any], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """The numbers as a tensor, without torch's silent conversion of 3.5 to 3 and of True to 1."""
    types = set(map(type, numbers))
    if not dtype.is_floating_point and any(issubclass(cls, float | bool) for cls in types):
        raise TypeError("ids are whole numbers: use int(id)")

    flat = torch.tensor(numbers, dtype=dtype, device=device)
    if flat.dim() != 1:
        raise TypeError(f"a sample is a flat list, and its shape is {list(flat.shape)}")
    return flat
