"""Helpers for code around sharded models, under TorchRec's names.

Corresponds to TorchRec's ``torchrec.distributed.utils``.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from tutorec.distributed.core.sharded_module import ShardedModule

T = TypeVar("T")


def none_throws(optional: T | None, message: str = "Unexpected `None`") -> T:
    """Return the value if it is not None.

    Raises:
        AssertionError: It is None.

    Example:
        >>> none_throws(3)
        3
    """
    if optional is None:
        raise AssertionError(message)
    return optional


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Paths of the topmost modules without sharded modules, in a model that has some.

    Example:
        >>> get_unsharded_module_names(nn.Sequential(nn.Linear(2, 2)))
        []
    """
    if isinstance(model, ShardedModule) or not _holds_sharded(model):
        return []
    names = []
    for name, child in model.named_children():
        if not _holds_sharded(child):
            names.append(name)
        names += [f"{name}.{path}" for path in get_unsharded_module_names(child)]
    return names


def _holds_sharded(module: nn.Module) -> bool:
    return any(isinstance(child, ShardedModule) for child in module.modules())


def copy_to_device(
    module: nn.Module, current_device: torch.device, to_device: torch.device
) -> nn.Module:
    """A deep copy of a module, with the tensors of one device moved to another.

    Args:
        module: The module.
        current_device: Device whose tensors are moved; other tensors keep their device.
        to_device: Device of the moved copies.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> twin = copy_to_device(layer, torch.device("cpu"), torch.device("meta"))
        >>> twin.weight.is_meta, layer.weight.is_meta
        (True, False)
    """
    return copy.deepcopy(module)._apply(
        lambda held: held.to(to_device) if held.device == current_device else held
    )


class CopyableMixin(nn.Module):
    """A module with a ``copy`` method.

    Example:
        >>> class Layer(CopyableMixin):
        ...     pass
        >>> type(Layer().copy(torch.device("cpu"))).__name__
        'Layer'

    Source:
        TorchRec's ``torchrec.distributed.utils.CopyableMixin``.
    """

    def copy(self, device: torch.device) -> nn.Module:
        """A deep copy with CPU tensors moved to ``device``."""
        return copy_to_device(self, current_device=torch.device("cpu"), to_device=device)


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Move a module's parameters to a device; initialize those on ``meta`` by ``reset_parameters``.

    Example:
        >>> layer = nn.Linear(2, 1, device="meta")
        >>> init_parameters(layer, torch.device("cpu"))
        >>> layer.weight.is_meta
        False
    """
    drawn = any(parameter.is_meta for parameter in module.parameters())
    if all(parameter.device == device for parameter in module.parameters()):
        return

    module.to_empty(device=device) if drawn else module.to(device)
    for child in module.modules() if drawn else ():
        if callable(reset := getattr(child, "reset_parameters", None)):
            reset()
