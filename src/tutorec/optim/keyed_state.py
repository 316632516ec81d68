"""Saving and loading of optimizer states: conversion to plain values, and checks before any change.

A state is a dict: name -> tensor, ShardedTensor, number, dict, or an object with a ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from tutorec._loaded import value_problem


def extract_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with copied dicts and with ``state_dict()`` of objects; tensors are live.

    Example:
        >>> import torch
        >>> extract_state({"deep": {"step": 3}, "norm": torch.nn.ReLU()})
        {'deep': {'step': 3}, 'norm': OrderedDict()}
    """
    values: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            values[name] = extract_state(value)
        elif callable(getattr(value, "state_dict", None)):
            values[name] = value.state_dict()
        else:
            values[name] = value
    return values


def check_form(state_dict: Mapping[str, Any]) -> None:
    """Raise if a loaded value is not an optimizer's state dict: ``{"state": {name: {...}}}``.

    Raises:
        ValueError: It has no ``"state"``.

    Example:
        >>> check_form({"weight": None})
        Traceback (most recent call last):
        ValueError: not an optimizer's state dict: it has no 'state', only ['weight']
    """
    if "state" not in state_dict:
        raise ValueError(f"not an optimizer's state dict: it has no 'state', only {[*state_dict]}")


def check_names(
    counted: str, missed: str, own: Iterable[str], new: Iterable[str], of: str = ""
) -> None:
    """Raise if names differ; the message begins as TorchRec's, and lists the differing names.

    Args:
        counted: Start of the message if the numbers of names differ.
        missed: Start of the message otherwise, with ``{}`` for a name.
        own: Local names.
        new: Loaded names.
        of: What they belong to.

    Raises:
        ValueError: They differ.

    Example:
        >>> check_names(
        ...     "Different parameter count", "Parameter {} not found", ["a"], ["a", "b"]
        ... )
        Traceback (most recent call last):
        ValueError: Different parameter count: 1 vs 2: [] are here only, ['b'] are in ...
    """
    present = set(own)
    loaded = set(new)
    missing = sorted(present - loaded, key=str)
    surplus = sorted(loaded - present, key=str)

    if missing or surplus:
        counts = f"{counted}: {len(present)} vs {len(loaded)}{of and ' of '}{of}"
        title = counts if len(present) != len(loaded) else missed.format(missing[0])
        raise ValueError(f"{title}: {missing} are here only, {surplus} are in what is loaded only")


def check_state(own: Mapping[str, Any], new: Mapping[str, Any], path: Sequence[str]) -> None:
    """Raise if ``load_state`` cannot copy.

    Args:
        own: The local state.
        new: The loaded state.
        path: Names that lead to it, for messages.

    Raises:
        ValueError: Names, types of values, numbers of shards or shapes differ, or a conversion
            would change numbers.
    """
    where = " / ".join(path)
    if not isinstance(new, Mapping):
        raise _differs(where, "a dict", f"a {type(new).__name__}")
    check_names("Different state size", f"State {{}} of {where!r} not found", own, new, repr(where))
    for name, value in own.items():
        _check_value(value, new[name], [*path, name])


def load_state(own: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Copy a checked state: into existing tensors, otherwise as a replacement."""
    for name, value in own.items():
        other = new[name]
        shards = _local_shards(value)
        new_shards = _local_shards(other)

        if isinstance(value, dict):
            load_state(value, other)
        elif callable(getattr(value, "load_state_dict", None)):
            value.load_state_dict(other)
        elif shards is not None and new_shards is not None:
            for shard, loaded in zip(shards, new_shards, strict=True):
                shard.detach().copy_(loaded)
        elif isinstance(value, torch.Tensor):
            value.detach().copy_(torch.as_tensor(other))
        else:
            own[name] = deepcopy(other)


def _check_value(value: Any, other: Any, path: Sequence[str]) -> None:
    where = " / ".join(path)
    shards = _local_shards(value)
    theirs = _local_shards(other)

    if isinstance(value, dict):
        check_state(value, other, path)
    elif (shards is None) != (theirs is None):
        raise ValueError(
            f"optimizer state {where!r} is a {type(value).__name__} here and a "
            f"{type(other).__name__} in what is loaded, and one of the two is sharded: "
            "tutorec.distributed.checkpoint saves and loads it under any plan"
        )
    elif shards is not None and theirs is not None:
        if len(shards) != len(theirs):
            raise ValueError(
                f"Different number of shards {len(shards)} vs {len(theirs)} for the path of "
                f"{where!r}: it was stored under another plan; tutorec.distributed.checkpoint "
                "loads what any plan has stored"
            )
        for shard, loaded in zip(shards, theirs, strict=True):
            _check_numbers(where, shard, loaded)
    elif isinstance(value, torch.Tensor):
        if not isinstance(other, torch.Tensor | int | float):
            raise _differs(where, "a tensor", f"a {type(other).__name__}")
        _check_numbers(where, value, torch.as_tensor(other))


def _check_numbers(where: str, own: torch.Tensor, new: torch.Tensor) -> None:
    if own.shape != new.shape:
        raise _differs(where, list(own.shape), list(new.shape))
    # Positions and counts of steps are whole numbers in either dtype.
    problem = value_problem(f"optimizer state {where!r}", own.dtype, new, counts=True)
    if problem is not None:
        raise ValueError(problem)


def _differs(where: str, here: object, loaded: object) -> ValueError:
    return ValueError(f"optimizer state {where!r} is {here} here and {loaded} in what is loaded")


def _local_shards(value: Any) -> list[torch.Tensor] | None:
    """This rank's shards of a ShardedTensor or a distributed DTensor; None for anything else."""
    local = value.to_local() if hasattr(value, "to_local") else value
    if not hasattr(local, "local_shards"):
        return None
    return [getattr(shard, "tensor", shard) for shard in local.local_shards()]


__all__ = ["check_form", "check_names", "check_state", "extract_state", "load_state"]
