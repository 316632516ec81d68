"""Variable batch: features with different numbers of samples, as pure functions over their strides.

A feature that changes rarely (a user's country, beside the items of a session) need not be stored once for every
sample. Its lists are stored once each, so that features have strides of their own, and ``inverse_indices`` say which
of a feature's lists each sample of the whole batch means::

    keys                     ["user", "item"]
    stride_per_key_per_rank  [[2],                 user has 2 lists
                              [3]]                 item has 3
    inverse_indices          (["user", "item"],    sample 0 means list 0 of user, samples 1 and 2 list 1
                              [[0, 1, 1],
                               [0, 1, 2]])

Columns of ``stride_per_key_per_rank`` are ranks: after an exchange a feature's lists are those of rank 0, then those
of rank 1. Before one there is one column. TorchScript compiles these functions as they stand.
"""

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.kjt_layout import as_int64


def strides_of_ranks(given: Tensor | list[list[int]]) -> Tensor:
    """Lists of each key (rows) and rank (columns) as a tensor of the CPU [F, W]."""
    if isinstance(given, Tensor):
        return given.cpu() if given.is_cuda else given
    else:
        if not is_scripting():
            _check_ranks(given)
        return torch.tensor(given, dtype=torch.int32)


def _check_ranks(given: list[list[int]]) -> None:
    """Raise unless there is a list for each key, each of as many whole numbers."""
    numbers = [number for key in given for number in key]
    if len({len(key) for key in given}) > 1 or any(isinstance(number, float) for number in numbers):
        raise ValueError(
            f"KeyedJaggedTensor: stride_per_key_per_rank is {given}; it holds one list for each key with one whole "
            "number of samples for each rank, such as [[2], [3]]"
        )


def stride_of(
    keys: list[str],
    lengths: Tensor | None,
    offsets: Tensor | None,
    strides: Tensor | None,
    inverse_indices: tuple[list[str], Tensor] | None,
) -> int:
    """B, samples of the whole batch; 0 without keys.

    Args:
        keys: F feature names.
        lengths: ``[F * B]`` or None.
        offsets: ``[F * B + 1]`` or None.
        strides: Lists of each key and rank ``[F, W]``, or None where every key has B.
        inverse_indices: Keys, and which list each sample means ``[F, B]``.

    Returns:
        B: with inverse indices their number of columns, with variable batch otherwise the most lists of a key, else
        the number of lists over F, rounded down.
    """
    if len(keys) == 0:
        return 0
    if strides is not None and strides.numel() > 0:
        if inverse_indices is not None and inverse_indices[1].numel() > 0:
            return inverse_indices[1].shape[-1]
        return int(strides.sum(dim=1).max().item())
    if offsets is not None and offsets.numel() > 0:
        return (offsets.numel() - 1) // len(keys)
    if lengths is not None:
        return lengths.numel() // len(keys)
    return 0


def strides_of(keys: list[str], stride: int, strides: Tensor | None) -> list[int]:
    """Lists of each key: B each, or with variable batch the sums over the ranks."""
    if strides is None or len(keys) == 0:
        return [stride] * len(keys)
    found: list[int] = strides.sum(dim=1).tolist()
    return found


def take_rows(strides: Tensor | None, indices: list[int]) -> Tensor | None:
    """Row ``indices[i]`` at position i, or None."""
    if strides is None:
        return None
    return strides[torch.tensor(indices, dtype=torch.int64)]


def strides_as_lists(strides: Tensor | None) -> list[list[int]]:
    """Lists of each key and rank in Python; an empty list where every key has B."""
    if strides is None:
        return []
    found: list[list[int]] = as_int64(strides).tolist()
    return found
