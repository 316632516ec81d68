"""Whether two jagged or keyed tensors hold the same, for tests and for looking into a pipeline.

Numbers are compared, not representations: lengths and offsets say the same, and their dtypes, like those of ids, may
differ. Floating-point values and weights are compared as ``torch.allclose`` does. Each function returns False, and
raises nothing, when it is given something else than its two tensors. Reading the results is a sync point.
"""

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
    return (
        isinstance(jt_1, JaggedTensor)
        and isinstance(jt_2, JaggedTensor)
        and _same(jt_1.lengths(), jt_2.lengths())
        and _same(jt_1.values(), jt_2.values())
        and _same(jt_1.weights_or_none(), jt_2.weights_or_none())
    )


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Whether two batches hold the same keys in the same order, with the same lists, samples and weights.

    Args:
        kjt_1: One, ids ``[N]``.
        kjt_2: The other.

    Returns:
        True if keys, samples of each key, ids, weights and inverse indices agree.

    Example:
        >>> import torch
        >>> one = KeyedJaggedTensor(["a", "b"], torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> kjt_is_equal(one, one.permute([0, 1])), kjt_is_equal(one, one.permute([1, 0]))
        (True, False)

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.kjt_is_equal``.
    """
    return (
        isinstance(kjt_1, KeyedJaggedTensor)
        and isinstance(kjt_2, KeyedJaggedTensor)
        and kjt_1.keys() == kjt_2.keys()
        and kjt_1.stride() == kjt_2.stride()
        and kjt_1.stride_per_key() == kjt_2.stride_per_key()
        and kjt_1.length_per_key() == kjt_2.length_per_key()
        and _same(kjt_1.lengths(), kjt_2.lengths())
        and _same(kjt_1.values(), kjt_2.values())
        and _same(kjt_1.weights_or_none(), kjt_2.weights_or_none())
        and _same_inverse(kjt_1.inverse_indices_or_none(), kjt_2.inverse_indices_or_none())
    )


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
    return (
        isinstance(kt_1, KeyedTensor)
        and isinstance(kt_2, KeyedTensor)
        and kt_1.keys() == kt_2.keys()
        and list(kt_1.length_per_key()) == list(kt_2.length_per_key())
        and kt_1.key_dim() == kt_2.key_dim()
        and _same(kt_1.values(), kt_2.values())
    )


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    """Whether both are missing, or both are there with the same shape and numbers."""
    if one is None or two is None:
        return one is None and two is None
    if one.shape != two.shape:
        return False
    if one.dtype != two.dtype:
        common = torch.promote_types(one.dtype, two.dtype)
        one, two = one.to(common), two.to(common)
    return torch.allclose(one, two)


def _same_inverse(one: tuple[list[str], Tensor] | None, two: tuple[list[str], Tensor] | None) -> bool:
    """The same for inverse indices."""
    if one is None or two is None:
        return one is None and two is None
    return list(one[0]) == list(two[0]) and _same(one[1], two[1])
