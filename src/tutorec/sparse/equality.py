"""Whether two jagged or keyed tensors hold the same, for tests and for looking into a pipeline.

Numbers are compared, not representations: lengths and offsets say the same, and their dtypes, like
those of ids, may differ. Floating-point values and weights are compared as ``torch.allclose`` does.
Each function returns False, and raises nothing, when it is given something else than its two
tensors. Reading the results is a sync point.
"""

from typing import Any

import torch
from torch import Tensor

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# A graph that is traced keeps the comparison as one call.
torch.fx.wrap("jt_is_equal")
torch.fx.wrap("kjt_is_equal")
torch.fx.wrap("kt_is_equal")


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Whether two jagged tensors hold the same lists, with the same weights.

    Args:
        jt_1: One, values ``[N, ...]``.
        jt_2: The other.

    Returns:
        True if samples, values and weights agree.

    Example:
        >>> import torch
        >>> one = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> two = JaggedTensor(torch.tensor([5, 7, 1]), offsets=torch.tensor([0, 1, 3]))
        >>> jt_is_equal(one, two), jt_is_equal(one, "a string")
        (True, False)

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.jt_is_equal``.
    """
    return _agree(jt_1, jt_2, JaggedTensor, "lengths values weights_or_none")


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Whether two batches have the same keys in order, lists, samples and weights.

    Args:
        kjt_1: One, ids ``[N]``.
        kjt_2: The other.

    Returns:
        True if keys, samples of each key, ids, weights and inverse indices agree.

    Example:
        >>> import torch
        >>> one = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2])
        ... )
        >>> kjt_is_equal(one, one.permute([0, 1])), kjt_is_equal(one, one.permute([1, 0]))
        (True, False)

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.kjt_is_equal``.
    """
    methods = (
        "keys stride stride_per_key length_per_key lengths values weights_or_none "
        "inverse_indices_or_none"
    )
    return _agree(kjt_1, kjt_2, KeyedJaggedTensor, methods)


def kt_is_equal(kt_1: object, kt_2: object) -> bool:
    """Whether two keyed tensors hold the same keys in the same order, with the same columns.

    Args:
        kt_1: One, values ``[B, D]``.
        kt_2: The other.

    Returns:
        True if keys, sizes, the dimension that the keys cut, and values agree.

    Example:
        >>> import torch
        >>> one = KeyedTensor(["a"], [2], torch.tensor([[1.0, 2.0]]))
        >>> kt_is_equal(one, one), kt_is_equal(one, KeyedTensor(["b"], [2], one.values()))
        (True, False)

    See Also:
        ``kjt_is_equal``; TorchRec has no such function for its ``KeyedTensor``.
    """
    return _agree(kt_1, kt_2, KeyedTensor, "keys length_per_key key_dim values")


def _agree(left: object, right: object, cls: type, methods: str) -> bool:
    """Whether both are of one type and their methods return the same."""
    if not (isinstance(left, cls) and isinstance(right, cls)):
        return False
    return all(_same(getattr(left, name)(), getattr(right, name)()) for name in methods.split())


def _same(left: Any, right: Any) -> bool:
    """Whether two values are equal; tensors have the same shape and close numbers."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return all(map(_same, left, right))
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return type(left) is type(right) and left == right

    common = torch.promote_types(left.dtype, right.dtype)
    return left.shape == right.shape and torch.allclose(left.to(common), right.to(common))
