"""The bytes that one rank holds of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def held_bytes(model: nn.Module) -> int:
    """Bytes of the parameters, and of the state of optimizers in backward, on this rank.

    Of a sharded table these are its shards on this rank. Rows in a file count as rows in memory,
    and so do the spare rows of that file.
    Memory that several tensors share counts once, and a tensor on the meta device is 0 bytes.
    Buffers, gradients, caches and the state of other optimizers do not count.

    Args:
        model: A sharded or unsharded model.

    Example:
        >>> from torch import nn
        >>> held_bytes(nn.Linear(3, 2)), held_bytes(nn.Linear(3, 2, device="meta"))
        (32, 0)
    """
    tensors = [*model.parameters(), *_states(model)]
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    }
    return sum(storages.values())


def _states(model: nn.Module) -> Iterator[Tensor]:
    """State tensors of all optimizers that update parameters in backward."""
    for module in model.modules():
        if (fused := getattr(module, "fused_optimizer", None)) is not None:
            yield from _tensors(fused.state.values())
    for parameter in model.parameters():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            yield from _tensors(optimizer.state.values())


def _tensors(states: Iterable[Any]) -> Iterator[Tensor]:
    import torch

    for state in states:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value
