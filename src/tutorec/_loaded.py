"""Checks of state loaded into a module or an optimizer: tensors of one process, numbers that fit.

torch's ``copy_`` converts any numbers: 300 is 44 as int8, 1e6 infinite as float16, and a complex
number loses its imaginary part. Here numbers may be rounded to another floating-point format, and
nothing else may change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

_BLOCK = 1 << 20  # numbers that are checked at once


def dtype_problem(
    label: str, here: torch.dtype, loaded: torch.dtype, *, single: bool = False
) -> str | None:
    """Why numbers of one dtype cannot be loaded as another; None if they can, or values decide.

    Args:
        label: The name of the numbers, for the message.
        here: The dtype to load into.
        loaded: The dtype of the numbers.
        single: Whether it is one number, such as a count of steps: its value decides.

    Example:
        >>> dtype_problem("'weight'", torch.float32, torch.float64)
        >>> dtype_problem("'ids'", torch.int8, torch.int64)
        "'ids' is torch.int8 here and torch.int64 in what is loaded, and a conversion can ..."
    """
    if here == loaded or single or _rounds(here, loaded):
        return None

    if _kind(here) == _kind(loaded) == "integer":
        range_here = torch.iinfo(here)
        range_loaded = torch.iinfo(loaded)
        if range_here.min <= range_loaded.min and range_here.max >= range_loaded.max:
            return None

    return (
        f"{label} is {here} here and {loaded} in what is loaded, and a conversion can change the "
        f"numbers: make it {loaded} here, or load a converted copy, value.to({here})"
    )


def values_decide(here: torch.dtype, loaded: torch.dtype) -> bool:
    """Whether numbers of one dtype may be out of the other's range, if `dtype_problem` is None."""
    if here == loaded:
        return False
    if _rounds(here, loaded):
        return torch.finfo(here).max < torch.finfo(loaded).max
    return dtype_problem("", here, loaded) is not None


def value_problem(
    label: str, here: torch.dtype, loaded: Tensor, *, counts: bool = False
) -> str | None:
    """Why numbers cannot be loaded as another dtype, by their values; None if they can.

    Args:
        label: The name of the numbers, for the message.
        here: The dtype to load into.
        loaded: The numbers.
        counts: Whether whole numbers may be loaded as floats that are equal to them.

    Example:
        >>> value_problem("'weight'", torch.float16, torch.tensor([1.0, 1e6]))
        "'weight' is torch.float16 here, and 1 of the loaded numbers does not fit: ..."
    """
    counted = counts and _kind(loaded.dtype) == "integer" and _kind(here) == "float"
    single = counted or loaded.dim() == 0
    problem = dtype_problem(label, here, loaded.dtype, single=single)
    if problem is not None or loaded.is_meta or not values_decide(here, loaded.dtype):
        return problem

    for block in loaded.detach().reshape(-1).split(_BLOCK):
        if _rounds(here, block.dtype):
            numbers = torch.view_as_real(block) if block.is_complex() else block
            # Not 8 bits, whose formats have few operators.
            block = numbers.double() if numbers.dtype is torch.float64 else numbers.float()
            # Infinite afterwards, or the largest number, as some formats have no infinity.
            lost = block.isfinite() & (block.abs() > torch.finfo(here).max)
        else:
            lost = block.to(here).to(block.dtype) != block

        if bool(lost.any()):
            count = int(lost.sum())
            return (
                f"{label} is {here} here, and {count} of the loaded numbers does not fit: "
                f"{block[lost][0].item()}; make it {loaded.dtype} here, or load a converted copy, "
                f"value.to({here})"
            )

    return None


def is_sharded(value: Any) -> bool:
    """Whether a value is a ShardedTensor, of which this process holds shards only."""
    return hasattr(type(value), "local_shards")


def check_loaded(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any] | None = None,
    *_: Any,
) -> None:
    """Check the tensors of a state dict for a module that is not sharded, before they are loaded.

    A hook for ``register_load_state_dict_pre_hook``. With ``assign=True`` the loaded tensors
    replace the module's, and nothing is converted.

    Args:
        module: The module.
        state_dict: The state dict of a model that holds it.
        prefix: Path of the module in the model, and a dot.
        local_metadata: The metadata of the module in the state dict.

    Raises:
        ValueError: A tensor is sharded, or its numbers would be changed.
    """
    replaced = (local_metadata or {}).get("assign_to_params_buffers", False)
    for name, own in _tensors(module):
        key = f"{prefix}{name}"
        loaded = state_dict.get(key)
        if is_sharded(loaded):
            raise ValueError(
                f"{key!r} is a {type(loaded).__name__}, the state of a sharded model, and this "
                f"{type(module).__name__} is not sharded: load "
                "tutorec.distributed.checkpoint.full_state_dict(sharded_model), which every rank "
                "calls and rank 0 receives"
            )

        if isinstance(loaded, Tensor) and not replaced:
            problem = value_problem(repr(key), own.dtype, loaded)
            if problem is not None:
                raise ValueError(problem)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module, by name."""
    return chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )


def _rounds(here: torch.dtype, loaded: torch.dtype) -> bool:
    """Whether a conversion rounds numbers and does no more, as long as they are in range."""
    return _kind(here) == _kind(loaded) and _kind(here) in ("float", "complex")


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "integer"


__all__ = [
    "check_loaded",
    "dtype_problem",
    "is_sharded",
    "value_problem",
    "values_decide",
]
