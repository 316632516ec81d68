"""Batches from nested Python lists and back: how a batch is written by hand, in a test or at a server's door."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from numbers import Real

import torch

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import running_sum

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

    Features may differ in their number of samples; the batch is then one of variable batch size, with
    ``stride_per_key()`` as many samples as each feature has lists.

    Args:
        ids: The ids of each feature, in the order of the batch's keys.
        weights: A weight for each id, in the same form, or None.
        device: Where the batch is built; by default torch's default device.
        dtype: Of the ids: ``torch.int64`` or ``torch.int32``.

    Returns:
        The batch, with the ids of each key counted already.

    Raises:
        TypeError: There is no dictionary of features, or a feature holds no list for each sample.
        ValueError: The weights have another form than the ids, an id is no whole number, or a weight no number.

    Example:
        >>> batch = kjt_from_lists({"item": [[7, 8], [9]], "user": [[], [4, 5]]})
        >>> batch.lengths()
        tensor([2, 1, 0, 2])
        >>> kjt_from_lists({"item": [[7]], "user": [[1], [2], [3]]}).stride_per_key()
        [1, 3]

    See Also:
        ``kjt_to_lists``. TorchRec has no such function; its users write ``values`` and ``lengths`` by hand.
    """
    for what, lists in (("ids", ids), ("weights", {} if weights is None else weights)):
        if not isinstance(lists, Mapping):
            raise TypeError(
                f"kjt_from_lists: {what} are {type(lists).__name__}, and should be a dictionary of features, such as "
                "{'item': [[7, 8], [9]]}"
            )
    keys = list(ids)
    for key in keys:
        _check_form(key, ids[key])
    bags = [bag for key in keys for bag in ids[key]]
    counts = [len(bag) for bag in bags]
    if weights is not None:
        _check_weights(ids, weights)
    flat_ids = list(chain.from_iterable(bags))
    # torch would cut off the fraction of a float without a word.
    if any(issubclass(kind, float) for kind in set(map(type, flat_ids))):
        raise ValueError(_odd_id(ids, dtype))
    try:
        values = torch.tensor(flat_ids, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(_odd_id(ids, dtype)) from None
    flat_weights = None
    if weights is not None:
        flat = [weight for key in keys for bag in weights[key] for weight in bag]
        try:
            flat_weights = torch.tensor(flat, dtype=torch.float32, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(_odd_weight(weights)) from None
    samples = [len(ids[key]) for key in keys]
    same = len(set(samples)) <= 1
    starts = running_sum([sum(map(len, ids[key])) for key in keys])
    return KeyedJaggedTensor(
        keys,
        values,
        flat_weights,
        lengths=torch.tensor(counts, dtype=torch.int64, device=device),
        stride=samples[0] if same and samples else None,
        stride_per_key_per_rank=None if same else [[count] for count in samples],
        length_per_key=[end - start for start, end in pairwise(starts)],
        offset_per_key=starts,
    )


def kjt_to_lists(kjt: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    """The ids of a batch as ``ids[feature][sample]``, the inverse of ``kjt_from_lists``. A sync point.

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
        >>> kjt_weights_to_lists(kjt_from_lists({"item": [[7, 8], [9]]}, {"item": [[0.5, 1.0], [2.0]]}))
        {'item': [[0.5, 1.0], [2.0]]}

    See Also:
        ``kjt_to_lists``.
    """
    weights = kjt.weights_or_none()
    return None if weights is None else _lists(kjt, weights.tolist())


def _lists(kjt: KeyedJaggedTensor, flat: list) -> dict[str, list[list]]:
    """Cut what belongs to each id into one list for each key and sample."""
    kjt._check_numbers()
    bounds = kjt.offsets().tolist()
    samples = running_sum(kjt.stride_per_key())
    return {
        key: [flat[start:end] for start, end in pairwise(bounds[first : last + 1])]
        for key, (first, last) in zip(kjt.keys(), pairwise(samples), strict=True)
    }


def _check_form(key: str, bags: Sequence[Sequence[object]]) -> None:
    """Raise unless there is a list for each sample; a flat list of ids is the mistake that people make."""
    if isinstance(bags, (str, bytes)) or not isinstance(bags, Sequence):
        raise TypeError(
            f"kjt_from_lists: feature {key!r} holds {type(bags).__name__}, and should hold a list of lists: "
            "one list of ids for each sample"
        )
    for sample, bag in enumerate(bags):
        if isinstance(bag, (str, bytes)) or not isinstance(bag, Sequence):
            raise TypeError(
                f"kjt_from_lists: feature {key!r}, sample {sample}, is {bag!r} and should be a list of ids; "
                f"a sample with one id is a list of one: [{bag!r}]"
            )


def _check_weights(ids: Ids, weights: Weights) -> None:
    """Raise unless there is exactly one weight for each id."""
    if set(ids) != set(weights):
        raise ValueError(
            f"kjt_from_lists: ids have the features {list(ids)}, and weights have {list(weights)}; "
            "give weights for all features or for none"
        )
    for key, bags in ids.items():
        if len(bags) != len(weights[key]):
            raise ValueError(
                f"kjt_from_lists: feature {key!r} has ids for {len(bags)} samples and weights for {len(weights[key])}"
            )
        for sample, (bag, mine) in enumerate(zip(bags, weights[key], strict=True)):
            if len(bag) != len(mine):
                raise ValueError(
                    f"kjt_from_lists: feature {key!r}, sample {sample}, has {len(bag)} ids and {len(mine)} weights; "
                    "give one weight for each id"
                )


def _odd_weight(weights: Weights) -> str:
    """Where the weight stands that is no number."""
    for key, bags in weights.items():
        for sample, bag in enumerate(bags):
            for number in bag:
                if not isinstance(number, Real):
                    return f"kjt_from_lists: feature {key!r}, sample {sample}, holds weight {number!r}; give a number"
    return "kjt_from_lists: the weights make no torch.float32 tensor; give numbers"


def _odd_id(ids: Ids, dtype: torch.dtype) -> str:
    """Where the id stands that is no whole number, or none that ``dtype`` holds."""
    for key, bags in ids.items():
        for sample, bag in enumerate(bags):
            for number in bag:
                place = f"kjt_from_lists: feature {key!r}, sample {sample}, holds id {number!r}"
                if number is None or isinstance(number, float):
                    return f"{place}; ids are whole numbers"
                try:
                    torch.tensor(number, dtype=dtype)
                except (TypeError, ValueError, RuntimeError):
                    return f"{place}, which {dtype} does not hold; hash it to a row, or use torch.int64"
    return f"kjt_from_lists: the ids make no {dtype} tensor"
