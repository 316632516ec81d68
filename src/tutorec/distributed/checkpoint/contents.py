"""The tensors of a model and its optimizers, under the names of the unsharded model.

An optimizer that runs inside backward is attached to its parameters and is read from there. The
caller passes any other optimizer. The tensors are the live ones; nothing is copied, except for the
states of managed collisions, which are stored by row: the row of an id is the position of the id,
and a rank loads the ids of its rows. `mc_resharding` then moves ids to the ranks that own them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
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
from tutorec.distributed.checkpoint.entries import Entry, Form, LocalShard
from tutorec.distributed.core.tables import Table
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from tutorec.distributed.mc_modules import ShardedManagedCollisionCollection, TableMapping
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.geometry import TableShard
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.errors import CheckpointError
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.optim.fused import EmbeddingFusedOptimizer, FusedOptimizer
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer, OptimizerWrapper

# Path of optimizer states in the nested state dict; the parameter and the state name follow.
STATE = ("optimizer", "state")


@dataclass
class Parameter:
    """A parameter of the model, and the optimizer that updates it.

    Args:
        name: Its name in the unsharded model.
        tensor: The local parameter.
        table: The table that it is a shard of; None for a dense parameter.
        bounds: The shard's rectangle of the table.
        optimizer: Holds the state in ``state[tensor]``; a torch or a keyed optimizer.
    """

    name: str
    tensor: torch.Tensor
    table: Table | None = None
    bounds: TableShard | None = None
    optimizer: Optimizer | None = None

    @cached_property
    def group(self) -> dict[str, Any]:
        """The group of the optimizer that holds the parameter."""
        assert self.optimizer is not None, f"{self.name!r} has no optimizer"
        for group in self.optimizer.param_groups:
            if any(parameter is self.tensor for parameter in group["params"]):
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
        if isinstance(self.optimizer, OptimizerWrapper):
            return self.optimizer.own_state
        return cast(Optimizer, self.optimizer).state

    @property
    def state(self) -> Mapping[str, Any]:
        """Name -> tensor or number; empty before a torch optimizer's first step."""
        return self.states.get(self.tensor, {})

    @property
    def tensor_states(self) -> dict[str, torch.Tensor]:
        """The states that are tensors."""
        return {key: value for key, value in self.state.items() if isinstance(value, torch.Tensor)}

    def state_entry(self, key: str, value: torch.Tensor) -> Entry:
        """A state as a tensor of the checkpoint; its shape decides how it is stored.

        Raises:
            CheckpointError: It belongs to a table shard, and is neither a scalar, nor one number
                per row or per weight.
        """
        rows = self.tensor.shape[0] if self.tensor.dim() else 1
        if self.bounds is None or value.dim() == 0:
            form = Form.WHOLE
        elif value.shape == self.tensor.shape:
            form = Form.TABLE
        elif value.shape[0] == rows and value.numel() == rows:
            form = Form.ROWS
        else:
            raise CheckpointError(
                f"a state of {self.name!r} is {list(value.shape)} for a shard of "
                f"{list(self.tensor.shape)}: it has neither a number for each weight nor one for "
                "each row, and cannot be sharded as the table is"
            )
        shard = LocalShard(value.detach(), self.bounds)
        return Entry((*STATE, self.name, key), form, (shard,), self.table)


@dataclass
class Contents:
    """The tensors of a model on this rank, and the optimizers that update them.

    Args:
        model: Weights and buffers, by name.
        optimized: Parameters that have an optimizer, in the order of the model.
        plan: The plan of a `DistributedModelParallel`.
        load_mappings: What copies loaded states into the mappings of managed collisions.
        move_ids: What then moves ids to the ranks that own them; collectives.
    """

    model: dict[str, Entry] = field(default_factory=dict)
    optimized: list[Parameter] = field(default_factory=list)
    plan: ShardingPlan | None = None
    load_mappings: list[Callable[[], None]] = field(default_factory=list)
    move_ids: list[Callable[[], None]] = field(default_factory=list)

    def optimizer_entries(self) -> list[Entry]:
        """The states of this rank's parameters; those of a table's shards are one entry."""
        entries: dict[tuple[str, ...], Entry] = {}
        for parameter in self.optimized:
            for key, value in parameter.tensor_states.items():
                entry = parameter.state_entry(key, value)
                if entry.path in entries:
                    shards = entries[entry.path].shards + entry.shards
                    entry = replace(entry, shards=shards)
                entries[entry.path] = entry
        return list(entries.values())

    def dense_optimizers(self) -> dict[str, str]:
        """The optimizer classes of dense parameters, which must be equal on all ranks."""
        return {
            f"the optimizer of {parameter.name!r}": type(parameter.optimizer).__name__
            for parameter in self.optimized
            if parameter.table is None
        }


def process_group(model: Any) -> dist.ProcessGroup | None:
    """The ranks that share a model: those of its sharded tables, else the default group.

    Anything that is not a model has the default group, so that all ranks receive the error.
    """
    if isinstance(model, DistributedModelParallel):
        return model._env.process_group
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, ShardedEmbeddingModule):
                return module.env.group_for("a checkpoint")
    return comm.default_group()


def collect_contents(model: nn.Module, optimizer: KeyedOptimizer | None = None) -> Contents:
    """Collect the tensors of a model and of its optimizers.

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

    contents = Contents(plan=model.plan if isinstance(model, DistributedModelParallel) else None)
    parameters: dict[int, Parameter] = {}
    for path, module in _modules(model):
        prefix = f"{path}." if path else ""
        if isinstance(module, ShardedEmbeddingModule):
            _add_tables(contents, parameters, prefix, module)
        elif isinstance(module, ShardedManagedCollisionCollection):
            for mapping in module.mappings:
                _add_table_mapping(contents, prefix, mapping, module.rank)
        elif isinstance(module, ManagedCollisionModule):
            _add_mapping(contents, prefix, module)
        else:
            if isinstance(module, BaseShardedManagedCollisionEmbeddingCollection):
                contents.move_ids.append(module.move_ids_to_owners)
            _add_dense(contents, parameters, prefix, module)

    contents.optimized = _match_optimizers(parameters, optimizer)
    return contents


def _modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module), not below sharded modules; wrappers do not appear in the path."""
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        yield from _modules(module.module, path)
        return

    yield path, module
    leaves = ShardedEmbeddingModule, ShardedManagedCollisionCollection, ManagedCollisionModule
    if isinstance(module, leaves):
        return

    # named_modules() yields a shared module only once; here it is needed under all its names.
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, f"{path}.{name}" if path else name)


def _add_tables(
    contents: Contents,
    parameters: dict[int, Parameter],
    prefix: str,
    module: ShardedEmbeddingModule[Any, Any, Any, Any, Any],
) -> None:
    """Add the tables of a sharded module."""
    for local_table in module.local_shards():
        name = prefix + local_table.name
        table = local_table.table
        shards: list[LocalShard] = []
        for rows, bounds in zip(local_table.rows, local_table.shards, strict=True):
            parameters.setdefault(id(rows), Parameter(name, rows, table, bounds))
            shards.append(LocalShard(rows.detach(), bounds))
        contents.model[name] = Entry(("model", name), Form.TABLE, tuple(shards), table)


def _add_mapping(contents: Contents, prefix: str, module: ManagedCollisionModule) -> None:
    """Add the states of an unsharded mapping of managed collisions."""
    state = module.state_by_row()
    for key, value in state.items():
        name = prefix + key
        contents.model[name] = Entry(("model", name), Form.WHOLE, (LocalShard(value),))
    contents.load_mappings.append(partial(module.load_state_by_row, state))


def _add_table_mapping(contents: Contents, prefix: str, mapping: TableMapping, rank: int) -> None:
    """Add the states of a sharded mapping of managed collisions, under unsharded names."""
    prefix = f"{prefix}_managed_collision_modules.{mapping.table.name}."
    shards = tuple(shard for shard in mapping.table.shards if shard.rows)
    table = replace(mapping.table, shards=shards)
    # A rank without rows has shapes, too, which all ranks compare.
    bounds = mapping.shard or TableShard(rank, 0, 0, 0, table.columns)

    local = mapping.local
    state = local.state_by_row() if local is not None else {}
    for key, empty in mapping.full.state_by_row().items():
        name = prefix + key
        is_once = key in mapping.full.once_per_table
        shape = empty.shape if is_once else (0, *empty.shape[1:])
        value = state.get(key, torch.zeros(shape, dtype=empty.dtype))

        form = Form.WHOLE if is_once else Form.ROWS
        local_shard = LocalShard(value, None if is_once else bounds)
        contents.model[name] = Entry(("model", name), form, (local_shard,), table)
    if local is not None:
        contents.load_mappings.append(partial(local.load_state_by_row, state))


def _add_dense(
    contents: Contents, parameters: dict[int, Parameter], prefix: str, module: nn.Module
) -> None:
    """Add the module's direct parameters and buffers."""
    values: dict[str, Any] = {}
    module._save_to_state_dict(values, prefix, False)
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} of the model's state is a {type(value).__name__}, and a checkpoint "
                "holds tensors: pass what is small as extra="
            )

        if is_lazy(value) or value.is_meta or value.layout is not torch.strided:
            raise CheckpointError(
                f"{name!r} of the model has no size yet, is on the meta device, or is sparse, and "
                "a checkpoint holds dense numbers: run one forward, use "
                "model.to_empty(device='cpu'), or make it dense first"
            )
        contents.model[name] = Entry(("model", name), Form.WHOLE, (LocalShard(value),))

    for name, parameter in module.named_parameters(recurse=False):
        parameters.setdefault(id(parameter), Parameter(prefix + name, parameter))


def _match_optimizers(
    parameters: Mapping[int, Parameter], optimizer: KeyedOptimizer | None
) -> list[Parameter]:
    """The parameters that have an optimizer: the caller's, or the one attached to them.

    Raises:
        CheckpointError: A parameter has two optimizers.
    """
    outside = {id(parameter.tensor): parameter for parameter in _optimizer_parameters(optimizer)}
    optimized: list[Parameter] = []
    for number, parameter in parameters.items():
        optimizers = list(getattr(parameter.tensor, "_in_backward_optimizers", None) or [])
        if number in outside:
            passed = outside.pop(number).optimizer
            if not any(passed is attached for attached in optimizers):
                optimizers.append(passed)

        if len(optimizers) > 1:
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise CheckpointError(
                f"parameter {parameter.name!r} has {len(optimizers)} optimizers ({names}): leave "
                "it one"
            )
        if optimizers:
            optimized.append(replace(parameter, optimizer=optimizers[0]))

    # What is left is not the model's: for example, a wrapper's own step count.
    return optimized + list(outside.values())


def _optimizer_parameters(optimizer: KeyedOptimizer | None) -> Iterator[Parameter]:
    """The parameters of a keyed optimizer, each with the optimizer that holds its state."""
    if optimizer is None:
        return
    if isinstance(optimizer, CombinedOptimizer):
        for key, member in optimizer.optimizers:
            for parameter in _optimizer_parameters(member):
                name = CombinedOptimizer.prepend_opt_key(parameter.name, key)
                yield replace(parameter, name=name)
        return

    inner: Any = getattr(optimizer, "_optimizer", None)
    inner_ids: set[int] = set()
    state_owner: Optimizer = optimizer
    if isinstance(inner, KeyedOptimizer):
        for parameter in _optimizer_parameters(inner):
            inner_ids.add(id(parameter.tensor))
            yield parameter
    elif isinstance(inner, Optimizer):
        state_owner = inner

    for name, tensor in optimizer.params.items():
        if id(tensor) not in inner_ids:
            yield Parameter(name, tensor, optimizer=state_owner)
