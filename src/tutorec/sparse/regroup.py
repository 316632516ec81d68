"""Regrouping: columns from several keyed tensors, side by side in the order that an interaction wants them.

The functions here know no class, so that TorchScript compiles them as they stand.
"""

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]


def regroup(
    keys: list[list[str]], sizes: list[list[int]], values: list[Tensor], dims: list[int], groups: list[list[str]]
) -> list[Tensor]:
    """One tensor for each group of keys, the keys' slices side by side.

    A slice is a view, so the whole cost is one copy into each group's result. On the CPU that beats operators that
    permute columns: they first join all tensors, and copy a second time.

    Args:
        keys: The keys of each keyed tensor; a key may be in one of them only.
        sizes: The sizes of their slices.
        values: Their values ``[B, D]``.
        dims: The dimension that the keys of each cut.
        groups: The keys of each result, in order. A key may be used more than once; a group without keys gives no
            columns, ``[B, 0]``, so that a model whose list of features is empty needs no case of its own.

    Returns:
        One tensor per group, ``[B, sum of the keys' columns]``.

    Raises:
        KeyError: No keyed tensor has the key.
        ValueError: Two of them have it, they cut different dimensions, a group is a string, or there is none to take a
            group from.

    Example:
        >>> import torch
        >>> values = [torch.tensor([[1, 2, 3]]), torch.tensor([[4]])]
        >>> regroup([["a", "b"], ["c"]], [[1, 2], [1]], values, [1, 1], [["c", "a"], ["b"]])
        [tensor([[4, 1]]), tensor([[2, 3]])]

    See Also:
        ``KeyedTensor.regroup``.
    """
    pieces: dict[str, Tensor] = {}
    count = 0
    for position, names in enumerate(keys):
        if len(names) == 1:
            pieces[names[0]] = values[position]
        else:
            parts = values[position].split_with_sizes(sizes[position], dims[position])
            for index, name in enumerate(names):
                pieces[name] = parts[index]
        count += len(names)
    if not is_scripting() and (len(pieces) != count or dims.count(dims[0] if dims else 1) != len(dims)):
        _refuse(keys, dims)
    dim = dims[0] if len(dims) > 0 else 1
    if not is_scripting():
        _check_groups(pieces, groups)
    out: list[Tensor] = []
    for group in groups:
        if len(group) > 0:
            out.append(torch.cat([pieces[name] for name in group], dim=dim))
        else:
            out.append(values[0].narrow(dim, 0, 0))
    return out


def check_tensor_list(keys: list[str], tensors: list[Tensor], key_dim: int) -> None:
    """Check what ``KeyedTensor.from_tensor_list`` is given: as many tensors as keys, which have the dimension.

    Raises:
        ValueError: They differ in number, there are none, or a tensor has no dimension ``key_dim``.
    """
    if len(keys) != len(tensors):
        raise ValueError(f"KeyedTensor.from_tensor_list: {len(keys)} keys {keys} for {len(tensors)} tensors")
    if not tensors:
        raise ValueError(
            "KeyedTensor.from_tensor_list: no tensors given; KeyedTensor([], [], torch.empty(0, 0)) has no keys"
        )
    for key, tensor in zip(keys, tensors, strict=True):
        if not -tensor.dim() <= key_dim < tensor.dim():
            raise ValueError(
                f"KeyedTensor.from_tensor_list: the tensor of key {key!r} has shape {list(tensor.shape)} and no "
                f"dimension {key_dim}, which the keys cut"
            )


def _refuse(keys: list[list[str]], dims: list[int]) -> None:
    """Say what is wrong with the keyed tensors."""
    flat = [name for names in keys for name in names]
    repeated = sorted({name for name in flat if flat.count(name) > 1})
    if repeated:
        raise ValueError(f"regroup: keys {repeated} are in more than one keyed tensor: {keys}; rename them in one")
    raise ValueError(f"regroup: keyed tensors cut different dimensions {sorted(set(dims))}; use one key_dim")


def _check_groups(pieces: dict[str, Tensor], groups: list[list[str]]) -> None:
    """Raise for a group with a key that no keyed tensor has."""
    there = pieces.keys()
    for position, group in enumerate(groups):
        if isinstance(group, str):
            raise ValueError(f"regroup: group {position} is the string {group!r}, no list of keys; write [{group!r}]")
        if not group and not there:
            raise ValueError(f"regroup: group {position} of {groups} names no key, and no keyed tensor says what B is")
        if not there >= set(group):
            missing = next(name for name in group if name not in there)
            raise KeyError(f"regroup: group {position} wants key {missing!r}, and the keyed tensors have {list(there)}")
