"""The tensors of a model and its optimizers, under the names of the unsharded model.

An optimizer that runs inside backward is attached to its parameters and is read from there. The
caller passes any other optimizer. The tensors are the live ones; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tutorec.distributed import comm
from tutorec.distributed.checkpoint.entries import Entry, Form, Part
from tutorec.distributed.checkpoint.mappings import stored_mappings
from tutorec.distributed.core.tables import PlacedTable
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from tutorec.distributed.mc_modules import ShardedManagedCollisionCollection
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.geometry import ShardPiece
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.errors import CheckpointError
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.optim.fused import EmbeddingFusedOptimizer, FusedOptimizer
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

# Parts whose tensors are stored in a form of their own.
_WHOLE_PARTS = ShardedEmbeddingModule, ShardedManagedCollisionCollection, ManagedCollisionModule
# Path of optimizer states in the nested state dict; the parameter and the state name follow.
STATE = ("optimizer", "state")


@dataclass(frozen=True)
class ParamRef:
    """The parameter of the unsharded model that a local parameter is, or is a shard of.

    Args:
        name: In the unsharded model.
        table: The table that it is a shard of; None for a dense parameter.
        piece: The shard.
    """

    name: str
    table: PlacedTable | None = None
    piece: ShardPiece | None = None


@dataclass(frozen=True)
class Optimized:
    """A parameter and its optimizer.

    Args:
        place: The parameter of the unsharded model.
        parameter: The local parameter.
        optimizer: Holds the state in ``state[parameter]``; a torch or a keyed optimizer.
    """

    place: ParamRef
    parameter: torch.Tensor
    optimizer: Optimizer

    @cached_property
    def group(self) -> dict[str, Any]:
        """The group of the optimizer that holds the parameter."""
        for group in self.optimizer.param_groups:
            if any(each is self.parameter for each in cast(list[torch.Tensor], group["params"])):
                return group
        return {}

    @property
    def is_fused(self) -> bool:
        """Whether the state belongs to the kernel: it always exists and is updated in place."""
        return isinstance(self.optimizer, FusedOptimizer)

    @property
    def rule(self) -> str:
        """The rule of its updates: the kernel's, ``"sgd"``, or the class of a torch optimizer."""
        if isinstance(self.optimizer, EmbeddingFusedOptimizer):
            spec = self.optimizer.operator.optimizer
            assert spec is not None, "a fused operator is built with an optimizer"
            return spec.kind
        return type(self.optimizer).__name__

    @property
    def states(self) -> MutableMapping[torch.Tensor, Any]:
        """The optimizer's state by parameter; for a wrapper, only the wrapper's own state."""
        return (
            self.optimizer.own_state
            if isinstance(self.optimizer, OptimizerWrapper)
            else self.optimizer.state
        )

    @property
    def state(self) -> Mapping[str, Any]:
        """Name -> tensor or number; empty before a torch optimizer's first step."""
        return self.states.get(self.parameter, {})


@dataclass
class Contents:
    """The tensors of a model on this rank, and the optimizers that update them.

    Args:
        model: Weights and buffers, by name.
        optimized: Parameters that have an optimizer, in the order of the model.
        group: The ranks that share the model, or None.
        plan: The plan of a `DistributedModelParallel`.
        take_up: What makes the mappings of ids take up what was loaded.
        settle: What then brings ids to the ranks that own them now; collectives.
    """

    model: dict[str, Entry] = field(default_factory=dict)
    optimized: list[Optimized] = field(default_factory=list)
    group: dist.ProcessGroup | None = None
    plan: ShardingPlan | None = None
    take_up: list[Callable[[], None]] = field(default_factory=list)
    settle: list[Callable[[], None]] = field(default_factory=list)


def group_of(model: Any) -> dist.ProcessGroup | None:
    """The ranks that share a model: those of its sharded tables, else the default group."""
    if not isinstance(model, nn.Module):
        # Not a model. The default group lets the other ranks receive the error.
        return comm.default_group()
    if isinstance(model, DistributedModelParallel):
        return model._env.process_group
    for part in model.modules():
        if isinstance(part, ShardedEmbeddingModule):
            return part.env.group_for("a checkpoint")
    return comm.default_group()


def contents_of(model: nn.Module, optimizer: KeyedOptimizer | None = None) -> Contents:
    """Find the tensors of a model and of its optimizers.

    Args:
        model: A `DistributedModelParallel`, a sharded module, or any other module; a
            DistributedDataParallel wrapper is skipped.
        optimizer: The optimizer outside of backward. It may also hold parameters that backward
            updates.

    Raises:
        CheckpointError: A parameter has two optimizers, or the model's state holds a value that is
            not a tensor.
        TypeError: ``model`` is not a module, or ``optimizer`` is not a keyed optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a checkpoint is of a torch.nn.Module, got a {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, KeyedOptimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}, whose parameters are numbered and have no "
            "names: give it as "
            "KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), "
            "lambda params: ...)"
        )
    plan = model.plan if isinstance(model, DistributedModelParallel) else None
    contents = Contents(group=group_of(model), plan=plan)
    places: dict[int, tuple[ParamRef, torch.Tensor]] = {}
    for path, part in _parts(model):
        prefix = f"{path}." if path else ""
        if isinstance(part, ShardedEmbeddingModule):
            contents.model |= _table_entries(prefix, part, places)
            continue
        if isinstance(part, ShardedManagedCollisionCollection | ManagedCollisionModule):
            for module, state, entries in stored_mappings(prefix, part):
                contents.model |= entries
                if module is not None:
                    contents.take_up.append(partial(module.load_state_by_row, state))
            continue
        if isinstance(part, BaseShardedManagedCollisionEmbeddingCollection):
            contents.settle.append(part.move_ids_to_owners)
        contents.model |= _dense_entries(prefix, part)
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(id(parameter), (ParamRef(prefix + name), parameter))
    contents.optimized = _optimized(places, optimizer)
    return contents


def optimizer_facts(contents: Contents) -> dict[str, str]:
    """The facts that must be equal on all ranks: which dense parameters have which optimizer."""
    return {
        f"the optimizer of {one.place.name!r}": type(one.optimizer).__name__
        for one in contents.optimized
        if one.place.table is None
    }


def optimizer_entries(contents: Contents) -> Iterable[Entry]:
    """The states of this rank's parameters; those of a table's shards are one entry."""
    entries: dict[tuple[str, ...], Entry] = {}
    for one in contents.optimized:
        for key, value in one.state.items():
            if isinstance(value, torch.Tensor):
                entry = state_entry(one, key, value)
                if (known := entries.get(entry.path)) is not None:
                    entry = replace(known, parts=known.parts + entry.parts)
                entries[entry.path] = entry
    return entries.values()


def state_entry(one: Optimized, key: str, value: torch.Tensor) -> Entry:
    """A state of a parameter as a tensor of the checkpoint.

    Raises:
        CheckpointError: It cannot be sharded like its table.
    """
    path = (*STATE, one.place.name, key)
    return Entry(
        path, state_form(one, value), (Part(value.detach(), one.place.piece),), one.place.table
    )


def state_form(one: Optimized, value: torch.Tensor) -> Form:
    """How a state of a parameter is stored: by its shape beside the parameter's.

    Raises:
        CheckpointError: It belongs to a table shard, and is neither a scalar, nor one number per
            row or per weight.
    """
    if one.place.piece is None or value.dim() == 0:
        return Form.WHOLE
    if value.shape == one.parameter.shape:
        return Form.TABLE
    if value.shape[0] == one.parameter.shape[0] and value.numel() == value.shape[0]:
        return Form.ROWS
    raise CheckpointError(
        f"a state of {one.place.name!r} is {list(value.shape)} for a piece of "
        f"{list(one.parameter.shape)}: it has neither a number for each weight nor one for each "
        "row, and cannot be cut as the table is"
    )


def _parts(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module), not below sharded modules; wrappers do not appear in the path."""
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        yield from _parts(module.module, path)
        return
    yield path, module
    # named_modules() yields a shared module only once; here it is needed under all its names.
    for child, part in module._modules.items():
        if part is not None and not isinstance(module, _WHOLE_PARTS):
            yield from _parts(part, f"{path}.{child}" if path else child)


def _table_entries(
    prefix: str,
    part: ShardedEmbeddingModule[Any, Any, Any, Any, Any],
    places: dict[int, tuple[ParamRef, torch.Tensor]],
) -> dict[str, Entry]:
    """The tables of a sharded module; records in ``places`` which parameter is which shard."""
    entries: dict[str, Entry] = {}
    for held in part.held_tables():
        name, parts = prefix + held.name, []
        for rows, piece in zip(held.rows, held.pieces, strict=True):
            places.setdefault(id(rows), (ParamRef(name, held.table, piece), rows))
            parts.append(Part(rows.detach(), piece))
        entries[name] = Entry(("model", name), Form.TABLE, tuple(parts), held.table)
    return entries


def _dense_entries(prefix: str, part: nn.Module) -> dict[str, Entry]:
    """The module's direct parameters and buffers, not copied."""
    values: dict[str, Any] = {}
    part._save_to_state_dict(values, prefix, False)
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} of the model's state is a {type(value).__name__}, and a checkpoint "
                "holds tensors: pass what is small as extra="
            )
        parameter = part._parameters.get(name.removeprefix(prefix))
        has_no_size = parameter is not None and is_lazy(parameter)
        if has_no_size or value.is_meta or value.layout is not torch.strided:
            what = (
                "has no size yet"
                if has_no_size
                else "is on the meta device"
                if value.is_meta
                else "is sparse"
            )
            raise CheckpointError(
                f"{name!r} of the model {what}, and a checkpoint holds dense numbers: run one "
                "forward, use model.to_empty(device='cpu'), or make it dense first"
            )
    return {
        name: Entry(("model", name), Form.WHOLE, (Part(value),)) for name, value in values.items()
    }


def _optimized(
    places: Mapping[int, tuple[ParamRef, torch.Tensor]],
    optimizer: KeyedOptimizer | None,
) -> list[Optimized]:
    """Each parameter with its optimizer: the caller's, or the one attached to it."""
    outside = {
        id(parameter): (name, leaf, parameter) for name, leaf, parameter in _leaves(optimizer)
    }
    optimized = []
    for number, (place, parameter) in places.items():
        inside: list[Optimizer] = list(getattr(parameter, "_in_backward_optimizers", None) or [])
        if number in outside:
            _, leaf, _ = outside.pop(number)
            inside = inside if any(leaf is each for each in inside) else [*inside, leaf]
        if len(inside) > 1:
            kinds = ", ".join(type(each).__name__ for each in inside)
            raise CheckpointError(
                f"parameter {place.name!r} has {len(inside)} optimizers ({kinds}): leave it one"
            )
        if inside:
            optimized.append(Optimized(place, parameter, inside[0]))
    for name, leaf, parameter in outside.values():
        # Not the model's: for example, a wrapper's own step count.
        optimized.append(Optimized(ParamRef(name), parameter, leaf))
    return optimized


def _leaves(optimizer: KeyedOptimizer | None) -> Iterator[tuple[str, Optimizer, torch.Tensor]]:
    """(name, optimizer that holds its state, parameter) of all parameters of a keyed optimizer."""
    if optimizer is None:
        return
    if isinstance(optimizer, CombinedOptimizer):
        for key, part in optimizer.optimizers:
            for name, leaf, parameter in _leaves(part):
                yield CombinedOptimizer.prepend_opt_key(name, key), leaf, parameter
        return
    inner: Any = getattr(optimizer, "_optimizer", None)
    below = list(_leaves(inner)) if isinstance(inner, KeyedOptimizer) else []
    yield from below
    seen = {id(parameter) for _, _, parameter in below}
    keeper = (
        inner
        if isinstance(inner, Optimizer) and not isinstance(inner, KeyedOptimizer)
        else optimizer
    )
    for name, parameter in optimizer.params.items():
        if id(parameter) not in seen:
            yield name, keeper, parameter
