"""What a batch in eager code makes of its parts at once: one form for them, and their ids per key read cheaply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.deferred import report
from tutorec.sparse.jagged_layout import FEW_LISTS
from tutorec.sparse.kjt_checks import check_numbers, row_sums, sums_per_key
from tutorec.sparse.kjt_variable import strides_of_ranks
from tutorec.sparse.traced import kind_of
from tutorec.sparse.validate import key_list

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def settle(batch: KeyedJaggedTensor) -> None:
    """Bring what a caller gave into one form, without a look at the numbers.

    Keys become a list of their own, so that a caller who changes his does not rename features; lengths [F, B] become
    [F * B]; a batch without lists needs neither lengths nor offsets; strides that differ make a variable batch.

    Args:
        batch: The batch, whose parts are as the caller gave them.

    Raises:
        ValueError: ``keys`` is one string, or there are neither lengths nor offsets.
    """
    keys, lengths, strides = batch._keys, batch._lengths, batch._stride_per_key
    if type(batch._values) is not Tensor and not isinstance(batch._values, Tensor):
        batch.__class__ = kind_of(type(batch), batch._values)
    if type(keys) is list:
        batch._keys = keys[:]
    elif not isinstance(keys, torch.fx.Proxy):
        batch._keys = key_list("KeyedJaggedTensor", keys)
    if lengths is None:
        _settle_without_lengths(batch)
    elif isinstance(lengths, Tensor) and lengths.dim() == 2:
        batch._lengths = lengths.reshape(-1)
    if strides is not None and batch._stride_per_key_per_rank is None and len(set(strides)) > 1:
        batch._stride_per_key_per_rank = strides_of_ranks([[stride] for stride in strides])


def _settle_without_lengths(batch: KeyedJaggedTensor) -> None:
    offsets = batch._offsets
    if offsets is None and batch._keys:
        raise ValueError(
            "KeyedJaggedTensor: neither lengths nor offsets given; one of them says where the lists of ids end"
        )
    if offsets is None:
        batch._lengths = torch.empty(0, dtype=torch.int64, device=batch._values.device)
    elif isinstance(offsets, Tensor) and offsets.dim() == 1 and offsets.shape[0] == 0:
        batch._lengths, batch._offsets = offsets, None


def counts_of_lists(batch: KeyedJaggedTensor) -> list[int] | None:
    """Ids per key straight from the lengths, where that is cheaper than by the offsets; None where it is not.

    Args:
        batch: The batch.

    Returns:
        Ids of each key, or None: read them from the offsets.
    """
    values, lengths = batch._values, batch._lengths
    if type(lengths) is Tensor and lengths.is_cpu and batch._pending is batch._offsets is batch._length_per_key is None:
        few = lengths.numel() <= FEW_LISTS and not is_compiling() and not is_tracing()
        if few and values.is_cpu:
            return sums_per_key(lengths.tolist(), batch)
    if batch._length_per_key is not None or not isinstance(values, Tensor):
        return batch._length_per_key
    if values.is_meta:
        return _spread(values.shape[0], len(batch._keys))
    if type(values) is not Tensor or is_compiling() or is_tracing():
        return None
    if not values.is_cpu:
        report()  # this is a sync point, where the device tells what its checks of earlier ids have found
    if batch._pending is not None:
        check_numbers(batch)
        return batch._length_per_key
    if lengths is None or batch._offsets is not None or not values.is_cpu:
        return None
    if batch._stride_per_key_per_rank is not None:
        return None
    return row_sums(lengths, len(batch._keys), values.shape[0] // batch.stride())


def _spread(total: int, keys: int) -> list[int]:
    """A stand-in for ids per key where there are no numbers (meta tensors): as even as can be, more to the first."""
    if keys == 0:
        return []
    return [total // keys + total % keys] + [total // keys] * (keys - 1)
