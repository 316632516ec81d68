"""Reordering and padding of a batch's features for an operator."""

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def features_in_order(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """Return the batch with its features in the given order; the batch itself if it has that order.

    A leaf of traced graphs, since the order of keys in later batches is unknown. TorchScript
    compiles the function.

    Args:
        features: F features, B samples.
        names: Features of the result; one may occur twice, and others of the batch are dropped.

    Returns:
        The batch of these features.

    Raises:
        KeyError: The batch lacks a feature.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["user", "item"], torch.tensor([4, 7, 8]), lengths=torch.tensor([1, 2])
        ... )
        >>> features_in_order(batch, ["item", "user"]).values()
        tensor([7, 8, 4])
    """
    keys = features.keys()
    if keys == names:
        return features

    order: list[int] = []
    for name in names:
        if name not in keys:
            if is_scripting():
                raise KeyError(name)
            raise KeyError(f"the tables need feature '{name}', and the batch has the keys {keys}")
        order.append(keys.index(name))
    return features.permute(order)


torch.fx.wrap("features_in_order")


def with_equal_strides(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Pad the features of a variable batch with empty bags to the same number of bags.

    Args:
        features: F features with different numbers of bags.

    Returns:
        A batch of the same ids, without inverse indices.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"],
        ...     torch.tensor([5, 6, 7]),
        ...     lengths=torch.tensor([1, 1, 1]),
        ...     stride_per_key_per_rank=[[1], [2]],
        ... )
        >>> with_equal_strides(batch).lengths().tolist()
        [1, 0, 1, 1]
    """
    strides = features.stride_per_key()
    most = max(strides, default=0)
    lengths = features.lengths()
    even = lengths.new_zeros(len(strides), most)
    for row, bag_lengths in zip(even, lengths.split_with_sizes(strides), strict=True):
        row[: bag_lengths.numel()] = bag_lengths

    weights: Tensor | None = features.weights_or_none()
    counts = features.length_per_key()
    return KeyedJaggedTensor._from_parts(
        features.keys(), features.values(), weights, even.view(-1), None, most, counts
    )
