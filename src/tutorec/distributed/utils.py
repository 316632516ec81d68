"""Helpers for code around sharded models, under TorchRec's names.

Corresponds to TorchRec's ``torchrec.distributed.utils``.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from tutorec._kernels.backend import fbgemm_module
from tutorec.distributed.core.cache_params import CACHE_KEYS
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.fused_params import emb_optim_type
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.optim.emb_optim_type import EmbOptimType
from tutorec.spmd.rank import device as own_device
from tutorec.types import DataType

T = TypeVar("T")


def get_device_type() -> str:
    """The device type of this rank.

    Example:
        >>> get_device_type() in ("cpu", "cuda")
        True
    """
    return own_device().type


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


def append_prefix(prefix: str, name: str) -> str:
    """Join two names by a dot; an empty one is omitted.

    Example:
        >>> append_prefix("model", "weight"), append_prefix("", "weight")
        ('model.weight', 'weight')
    """
    return f"{prefix}.{name}" if prefix and name else prefix + name


def filter_state_dict(state_dict: Mapping[str, T], name: str) -> OrderedDict[str, T]:
    """The entries whose names begin with ``name.``, without that prefix.

    Example:
        >>> dict(filter_state_dict({"over.weight": 1, "overall": 2}, "over"))
        {'weight': 1}
    """
    start = f"{name}."
    return OrderedDict(
        (key.removeprefix(start), value)
        for key, value in state_dict.items()
        if key.startswith(start)
    )


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Add a prefix to all names, in place, including those of ``_metadata``.

    Example:
        >>> state = {"weight": 1}
        >>> add_prefix_to_state_dict(state, "model.")
        >>> state
        {'model.weight': 1}
    """
    renamed = {prefix + key: state_dict[key] for key in sorted(state_dict)}
    state_dict.clear()
    state_dict.update(renamed)

    metadata = state_dict.get("_metadata")
    if metadata is not None:
        for key in [key for key in metadata if key]:
            metadata[prefix + key] = metadata.pop(key)


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


def optimizer_type_to_emb_opt_type(optimizer_class: type[torch.optim.Optimizer]) -> EmbOptimType:
    """The fused form of an optimizer class.

    Raises:
        ValueError: The class has no fused form.

    Example:
        >>> optimizer_type_to_emb_opt_type(torch.optim.SGD).name
        'EXACT_SGD'
    """
    return emb_optim_type(optimizer_class)


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None,
    param_fused_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Merge the ``fused_params`` of a sharder with those of a table, which take precedence.

    Example:
        >>> merge_fused_params({"learning_rate": 0.1, "eps": 1e-8}, {"lr": 0.5})
        {'learning_rate': 0.5, 'eps': 1e-08}
    """
    table_params = {
        "learning_rate" if key == "lr" else key: value
        for key, value in (param_fused_params or {}).items()
    }

    return {**copy.deepcopy(dict(fused_params or {})), **table_params}


def add_params_from_parameter_sharding(
    fused_params: dict[str, Any] | None, parameter_sharding: ParameterSharding
) -> dict[str, Any]:
    """Update ``fused_params`` in place with a table's plan entry, which takes precedence.

    Example:
        >>> from tutorec.distributed.core.cache_params import CacheParams
        >>> entry = ParameterSharding(
        ...     "table_wise", "fused_uvm_caching", cache_params=CacheParams(load_factor=0.1)
        ... )
        >>> add_params_from_parameter_sharding({"cache_load_factor": 0.2}, entry)
        {'cache_load_factor': 0.1}
    """
    merged = {} if fused_params is None else fused_params
    cache = parameter_sharding.cache_params
    keys = {**CACHE_KEYS, "prefetch_pipeline": "prefetch_pipeline"}
    options = {key: getattr(cache, field, None) for key, field in keys.items()}
    for name in ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype"):
        options[name] = getattr(parameter_sharding, name)
    merged.update({key: value for key, value in options.items() if value is not None})
    return merged


def convert_to_fbgemm_types(fused_params: dict[str, Any]) -> dict[str, Any]:
    """Replace data types by fbgemm's ``SparseType``, in place; requires fbgemm.

    Example:
        >>> convert_to_fbgemm_types({"learning_rate": 0.5})
        {'learning_rate': 0.5}
    """
    for key in ("cache_precision", "weights_precision", "output_dtype"):
        if isinstance(fused_params.get(key), DataType):
            sparse_types = fbgemm_module("fbgemm_gpu.split_embedding_configs").SparseType
            fused_params[key] = sparse_types[fused_params[key].name]
    return fused_params


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
