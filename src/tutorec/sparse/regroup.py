"""Regrouping: columns from several keyed tensors, side by side in the order that an interaction wants them."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tutorec.sparse.keyed import KeyedTensor


def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[Tensor]:
    """One tensor for each group of keys, the keys' slices side by side.

    A slice is a view, so the whole cost is one copy into each group's result.

    Args:
        keyed_tensors: Where the keys are looked up; a key may be in one of them only.
        groups: The keys of each result, in order. A key may be used more than once.

    Returns:
        One tensor per group, ``[B, sum of the keys' columns]``.

    Raises:
        KeyError: No keyed tensor has the key.
        ValueError: Two of them have it, a group is empty, or they cut different dimensions.

    Example:
        >>> import torch
        >>> from tutorec.sparse.keyed import KeyedTensor
        >>> one = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1, 2, 3]]))
        >>> two = KeyedTensor(["c"], [1], torch.tensor([[4]]))
        >>> regroup([one, two], [["c", "a"], ["b"]])
        [tensor([[4, 1]]), tensor([[2, 3]])]
    """
    pieces: dict[str, Tensor] = {}
    for keyed in keyed_tensors:
        before = len(pieces)
        pieces.update(keyed.to_dict())
        if len(pieces) != before + len(keyed.keys()):
            raise ValueError(_repeated(keyed_tensors))
    dims = {keyed.key_dim() for keyed in keyed_tensors}
    if len(dims) > 1:
        raise ValueError(f"regroup: keyed tensors cut different dimensions {sorted(dims)}; use one key_dim")
    dim = dims.pop() if dims else 1
    out = []
    for position, group in enumerate(groups):
        if not group:
            raise ValueError(f"regroup: group {position} of {groups} names no key; leave it out")
        try:
            out.append(torch.cat([pieces[key] for key in group], dim=dim))
        except KeyError as error:
            raise KeyError(
                f"regroup: group {position} wants key {error.args[0]!r}, and the keyed tensors have {list(pieces)}"
            ) from None
    return out


def _repeated(keyed_tensors: list["KeyedTensor"]) -> str:
    lists = [keyed.keys() for keyed in keyed_tensors]
    keys = [key for names in lists for key in names]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    return f"regroup: keys {repeated} are in more than one keyed tensor: {lists}"
