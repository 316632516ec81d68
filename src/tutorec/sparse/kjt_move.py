"""A batch elsewhere: copied, moved, pinned, freed; every part goes the same way.

What TorchScript leaves alone here is a method of `KeyedJaggedTensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def each_part(batch: KeyedJaggedTensor, change: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
    """The batch with every tensor changed the same way; strides stay on the host.

    Args:
        batch: The batch.
        change: Makes a tensor of the same shape.

    Returns:
        A batch that knows what the first one knew.
    """
    weights, lengths, offsets = batch._weights, batch._lengths, batch._offsets
    changed = batch._from_parts(
        batch._keys,
        change(batch._values),
        None if weights is None else change(weights),
        None if lengths is None else change(lengths),
        None if offsets is None else change(offsets),
        batch._stride,
    )
    _copy_facts(changed, batch)
    inverse = batch._inverse_indices
    changed._inverse_indices = None if inverse is None else (inverse[0], change(inverse[1]))
    _keep_pending(changed, batch)
    return changed


def each_on_device(
    batch: KeyedJaggedTensor, device: torch.device, non_blocking: bool, weights_dtype: torch.dtype | None
) -> KeyedJaggedTensor:
    """The batch on a device.

    Args:
        batch: The batch.
        device: Where its tensors go.
        non_blocking: Whether a copy from page-locked memory may overlap with what follows.
        weights_dtype: Dtype of the weights there, or None for the one that they have.

    Returns:
        A batch that knows what the first one knew.
    """
    moved = each_part(batch, lambda part: part.to(device, non_blocking=non_blocking))
    if weights_dtype is not None and moved._weights is not None:
        moved._weights = moved._weights.to(weights_dtype)
    return moved


@torch.jit.unused
def flatten_lengths(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with lengths as one dimension [F * B]: as they are here anyhow."""
    return each_part(batch, lambda part: part)


@torch.jit.unused
def pin_memory(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A copy in page-locked memory, from which a copy to a GPU can overlap with computation."""
    return each_part(batch, lambda part: part.pin_memory())


def uninitialised_like(batch: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    """A batch of the same keys, strides and shapes, with numbers still to come."""
    made = each_part(batch, lambda part: torch.empty_like(part, device=device))
    made._pending = None
    return made


def without_keys(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch of no keys with the same stride, dtypes and device: the share of one who gets no feature."""
    weights, strides = batch._weights, batch._stride_per_key_per_rank
    return batch._from_parts(
        [],
        batch._values.new_empty(0),
        None if weights is None else weights.new_empty(0),
        batch.lengths().new_empty(0),
        None,
        batch.stride(),
        [],
        strides,
    )


@torch.jit.unused
def unsync(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Forget the ids per key."""
    batch._length_per_key = batch._offset_per_key = None
    return batch


@torch.jit.unused
def copy_(target: KeyedJaggedTensor, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
    """Copy the other's parts, of equal keys and shapes, into this one's memory, with what is known of them.

    Raises:
        ValueError: Keys differ, or only one of the two has weights.
    """
    if target._keys != kjt._keys:
        raise ValueError(
            f"KeyedJaggedTensor.copy_: the source has the keys {kjt._keys} and the target {target._keys}; make the "
            "target with KeyedJaggedTensor.empty_like(source, device)"
        )
    copy_numbers("KeyedJaggedTensor", target, kjt, non_blocking)
    mine, theirs = target._inverse_indices, kjt._inverse_indices
    if mine is not None and theirs is not None:
        target._inverse_indices = (theirs[0], mine[1].copy_(theirs[1], non_blocking=non_blocking))
    _copy_facts(target, kjt)
    # What was derived from the numbers that were here.
    target._jt_dict = target._shared_offsets = None
    _keep_pending(target, kjt)
    return target


def copy_numbers(owner: str, target: Any, source: Any, non_blocking: bool) -> None:
    """Copy values, weights, lengths and offsets of a batch, or of one feature, into another's memory.

    Args:
        owner: Name of their class, for the message.
        target: What is written.
        source: What is read; the part of lengths and offsets that it lacks is derived.
        non_blocking: Whether a copy from page-locked memory may overlap with what follows.

    Raises:
        ValueError: Only one of the two has weights, or their shapes differ; nothing is copied then.
    """
    if (target._weights is None) != (source._weights is None):
        has, lacks = ("source", "target") if target._weights is None else ("target", "source")
        raise ValueError(
            f"{owner}.copy_: the {has} has weights and the {lacks} has no weights; make the target with "
            f"{owner}.empty_like(source, device)"
        )
    found, room = [(list(part._values.shape), part.lengths().numel()) for part in (source, target)]
    if found != room:
        raise ValueError(
            f"{owner}.copy_: the source has values of shape {found[0]} and {found[1]} lengths, and the target has room "
            f"for {room[0]} and {room[1]}; make the target with {owner}.empty_like(source, device)"
        )
    target._values.copy_(source._values, non_blocking=non_blocking)
    if target._weights is not None:
        target._weights.copy_(source._weights, non_blocking=non_blocking)
    if target._lengths is not None:
        target._lengths.copy_(source.lengths(), non_blocking=non_blocking)
    if target._offsets is not None:
        target._offsets.copy_(source.offsets(), non_blocking=non_blocking)


def _keep_pending(target: KeyedJaggedTensor, source: KeyedJaggedTensor) -> None:
    """Leave to check what is still to be checked; on the CPU nobody's word is taken for it until then."""
    target._pending = source._pending
    if target._pending is not None and target._values.is_cpu:
        target._length_per_key = target._offset_per_key = None


def _copy_facts(target: KeyedJaggedTensor, source: KeyedJaggedTensor) -> None:
    """Take over what is known on the host."""
    target._stride = source._stride
    target._stride_per_key_per_rank = source._stride_per_key_per_rank
    target._stride_per_key = source._stride_per_key
    target._length_per_key = source._length_per_key
    target._lengths_offset_per_key = source._lengths_offset_per_key
    target._offset_per_key = source._offset_per_key
    target._index_per_key = source._index_per_key


def tensors_of(batch: KeyedJaggedTensor) -> list[Tensor]:
    """Every tensor on the batch's device."""
    inverse = batch._inverse_indices
    parts = (batch._values, batch._weights, batch._lengths, batch._offsets, None if inverse is None else inverse[1])
    return [part for part in parts if part is not None]


@torch.jit.unused
def record_stream(batch: KeyedJaggedTensor, stream: Any) -> None:
    """Tell the allocator that ``stream`` reads the parts."""
    for part in tensors_of(batch):
        part.record_stream(stream)


@torch.jit.unused
def size_in_bytes(batch: KeyedJaggedTensor) -> int:
    """Bytes of all tensors, those of strides and inverse indices among them."""
    strides = batch._stride_per_key_per_rank
    parts = tensors_of(batch) + ([] if strides is None else [strides])
    return sum(part.numel() * part.element_size() for part in parts)


@torch.jit.unused
def clear_storage(batch: KeyedJaggedTensor) -> int:
    """Give the parts' memory back at once, whoever else holds them; the bytes that were freed."""
    freed = 0
    for part in (batch._values, batch._weights, batch._lengths, batch._offsets):
        if part is not None:
            freed += part.numel() * part.element_size()
            part.untyped_storage().resize_(0)
    return freed
