"""`DistributedModelParallel`: tables are sharded over the ranks, dense layers are replicated.

Tables are large and cheap to compute with, so each shard is on one rank, and ids are sent to it
(*model parallel*). Dense layers are small and expensive to compute with, so every rank has a
replica, and gradients are averaged (*data parallel*). With very many ranks, tables can be
replicated as well, once per group of ranks (`DMPCollection`).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from tutorec._check import warn_caller
from tutorec._loaded import is_sharded, value_problem
from tutorec.distributed.collectives.autograd import division_fact, get_gradient_division
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.sharded_module import ShardedModule as ShardedModule
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.core.tables import usable_device
from tutorec.distributed.data_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    sharded_parts,
)
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.fused_params import names_optimizer
from tutorec.distributed.gradient_norm import NormOverRanks
from tutorec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingPlan
from tutorec.distributed.replicas import AllReduce, ReplicaGroups, ReplicaMean
from tutorec.distributed.shard import (
    allocate_dense_parts,
    check_plan_fits,
    collections_of,
    default_env,
    make_plan,
    move_dense_parts,
    replaced,
)
from tutorec.distributed.sharding_plan import get_default_sharders
from tutorec.optim.fused import FusedOptimizerModule
from tutorec.optim.in_backward import follow_steps
from tutorec.optim.keyed import CombinedOptimizer


class DistributedModelParallel(nn.Module, FusedOptimizerModule):
    """Shards every collection of a model and wraps the dense layers in DistributedDataParallel.

    Construction is collective: every rank calls it with the same model and plan. Collections inside
    ``module`` are replaced, so that their unsharded tables can be freed; dense layers are kept. A
    collection that the plan does not name is replicated, and the caller's optimizer trains it.

    Who trains a table does not depend on plan, ranks or machine: the optimizer that
    ``apply_optimizer_in_backward`` or the sharder's ``fused_params`` name, in backward. Where
    neither does, it is SGD with a learning rate of 0.01, and a warning names the tables. A table
    with ``compute_kernel="dense"``, which the caller alone requests, is left to the caller's
    optimizer.

    Args:
        module: The model. Dense layers get rank 0's weights, each table those of the rank that will
            hold it.
        env: The ranks; all ranks of the default process group by default.
        device: Device of this rank; :func:`tutorec.spmd.device` by default. On meta, tables have
            shapes only and dense layers are not moved.
        plan: Path of each collection -> its plan; by default `EmbeddingShardingPlanner` plans on
            rank 0 for all ranks.
        sharders: One sharder per class of modules to shard.
        init_data_parallel: Whether to wrap the dense layers now. Otherwise call
            ``init_data_parallel()`` before the first training step, for example after a forward
            that sets the sizes of lazy layers.
        init_parameters: Whether to allocate dense layers on the meta device and call their
            ``reset_parameters``. Otherwise the caller does so before ``init_data_parallel()``.
        data_parallel_wrapper: Wraps the dense layers; `DefaultDataParallelWrapper` by default.

    Raises:
        TypeError: ``sharders`` contains a class, or the plan is not a `ShardingPlan`.
        ValueError: There is no process group, the model is already wrapped, a dense layer cannot be
            allocated, or the plan does not fit. `PlannerError` if no plan is given and the planner
            finds none.
        AgreementError: Ranks differ.

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.DistributedModelParallel``.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
    ) -> None:
        super().__init__()
        _check_wrapped_once(module)
        self._env = env if env is not None else default_env("DistributedModelParallel")
        self.device = usable_device(device, {})

        sharders = _checked_sharders(sharders) if sharders is not None else get_default_sharders()
        shardable = dict(collections_of(module, sharders))
        plan = _given_or_made(plan, module, sharders, self._env, self.device)
        self._plan = _agreed_plan(plan, module, shardable, self._env)
        _say_what_is_not_sharded(self._plan, shardable, self._env)

        self._wrapper = (
            data_parallel_wrapper
            if data_parallel_wrapper is not None
            else DefaultDataParallelWrapper()
        )
        self._dense_env = self._env  # the ranks that share the dense layers
        self._ddp_is_built = False
        self._divides = get_gradient_division()

        for path in list(shardable):
            # Drop the reference, so that the unsharded collection can be freed once it is replaced.
            collection, sharder = shardable.pop(path)
            module_plan = self._plan.get_plan_for_module(path)
            if module_plan is not None:
                module = replaced(
                    module,
                    collection,
                    sharder.shard(collection, module_plan, self._env, self.device, path),
                )

        if init_parameters:
            allocate_dense_parts(module, self.device, {})
        move_dense_parts(module, self.device)
        self._dmp_wrapped_module: nn.Module = module
        self._optimizer = _fused_optimizer(module)
        follow_steps(self)

        self.register_load_state_dict_pre_hook(_insert_wrapped_path)
        if init_data_parallel:
            self.init_data_parallel()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; the result of a collection is lazy.

        Raises:
            ValueError: `set_gradient_division` was called after the dense layers were wrapped, or
                tables are on meta.
        """
        if self.device.type == "meta":
            raise ValueError(
                "this DistributedModelParallel is on the meta device: its tables have shapes and "
                "no rows to look up; build it with device=torch.device('cpu') to use it"
            )

        if self._ddp_is_built and get_gradient_division() is not self._divides:
            was, now = ("mean", "sum") if self._divides else ("sum", "mean")
            raise ValueError(
                f"this model's dense layers use the {was} of the ranks' gradients since it was "
                f"built, and set_gradient_division asks for the {now} now: call it before "
                "DistributedModelParallel"
            )

        return self._dmp_wrapped_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look up an attribute; the error names one that only the wrapped model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_dmp_wrapped_module" not in self.__dict__.get("_modules", {}) or not hasattr(
                self.module, name
            ):
                raise
        raise AttributeError(
            f"DistributedModelParallel has no {name!r}, the model inside has: write "
            f".module.{name}; where torch's get_model_state_dict asks for it, call state_dict() "
            "instead, which names every table on every rank"
        )

    @property
    def module(self) -> nn.Module:
        """The model with sharded collections, without DistributedDataParallel."""
        wrapped = self._dmp_wrapped_module
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan."""
        return self._plan

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers that update this rank's tables during backward, under unsharded names."""
        return self._optimizer

    def reduce_norm(self) -> NormOverRanks:
        """For `GradientClippingOptimizer`: computes the norm of the gradients of all ranks."""
        return NormOverRanks(self.module, self._env)

    def init_data_parallel(self) -> None:
        """Wrap the dense layers, if there are any and they are not wrapped yet."""
        if not self._ddp_is_built:
            self._divides = get_gradient_division()
            self._wrapper.wrap(self, self._dense_env, self.device)
            self._ddp_is_built = True

    def copy(self, device: torch.device) -> DistributedModelParallel:
        """A copy for serving: tensors on this rank's device are on ``device``, others stay.

        Raises:
            TypeError: Tables are sharded for training, and belong to their process group.
        """
        memo: dict[int, Any] = {id(env): env for env in (self._env, self._dense_env)}
        memo[id(self._dmp_wrapped_module)] = copy.deepcopy(self.module, memo)

        twin = copy.deepcopy(self, memo)
        twin.device = device
        twin._ddp_is_built = False
        return twin._apply(lambda held: held.to(device) if held.device == self.device else held)

    # Names are those of the unsharded model, whatever wraps it here.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) under unsharded names; of the tables, this rank's shards."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer) under unsharded names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def bare_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """`named_parameters` without duplicates; the two are the same, as in TorchRec."""
        return self.module.named_parameters(prefix, recurse)

    @staticmethod
    def _sharded_parameter_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
        """Names of sharded parameters; TorchRec's tests exclude them from the dense optimizer."""
        for path, child in get_unwrapped_module(module).named_modules(prefix=prefix):
            if isinstance(child, ShardedEmbeddingModule):
                yield from child.sharded_parameter_names(path)

    def sparse_grad_parameter_names(
        self, destination: list[str] | None = None, prefix: str = ""
    ) -> list[str]:
        """Append the names of torch embeddings with sparse gradients to ``destination``."""
        names = [] if destination is None else destination
        for path, child in self.module.named_modules():
            if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
                names.append(".".join(name for name in (prefix, path, "weight") if name))
        return names

    def state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """State under unsharded names; a sharded table is a ShardedTensor with all its shards.

        A file that ``torch.save`` writes of it can be loaded by the same ranks alone, each its own,
        in a process group and with ``weights_only=False``. For one file for any process, save
        ``tutorec.distributed.checkpoint.full_state_dict(model)``, or use ``save_checkpoint``.
        """
        if destination is None:
            return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True
    ) -> Any:
        """Load the state of names that begin with ``prefix``; tables may be whole tensors.

        Raises:
            ValueError: A conversion would change numbers, other than by rounding; or as raised by
                the module.
        """
        selected = {
            name.removeprefix(prefix): value
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }

        for name, tensor in chain(self.named_parameters(), self.named_buffers()):
            loaded = selected.get(name)
            if isinstance(loaded, torch.Tensor) and not is_sharded(loaded):
                problem = value_problem(repr(name), tensor.dtype, loaded)
                if problem is not None:
                    raise ValueError(problem)

        return self.module.load_state_dict(selected, strict)


class DMPCollection(DistributedModelParallel):
    """A model whose tables are sharded over each of several groups of ranks: 2D parallelism.

    Every group of G ranks shards one replica of the tables. The batches of the group alone update
    it, with the mean gradient of its G ranks. Dense layers have one gradient, the mean of all W
    ranks. :meth:`sync`, which the training loop calls every few steps, replaces tables and the
    state of their fused optimizers by the mean over replicas::

        for step, batch in enumerate(batches, 1):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                model.sync()

    `TrainPipelineSparseDist` and `TrainPipelineSemiSync` call it themselves, every
    ``dmp_collection_sync_interval_batches`` batches, and by default after each.

    All replicas start with the tables of the first one. Adam's step count is the same in all.
    Tables with the kernel ``dense`` have an optimizer outside of backward; its state is not
    averaged.

    Args:
        module: The model.
        device: Device of this rank; :func:`tutorec.spmd.device` if None.
        plan: Plan for the G ranks of a group, numbered from 0; made by `EmbeddingShardingPlanner`
            if None.
        world_size: W, the ranks of ``global_pg``.
        sharding_group_size: G.
        global_pg: All ranks.
        node_group_size: Ranks of a group that table-row-wise and grid sharding treat as one host;
            by default the ranks of a group that share a host according to ``LOCAL_WORLD_SIZE``.
        sharders: As in `DistributedModelParallel`.
        init_data_parallel: As in `DistributedModelParallel`.
        init_parameters: As in `DistributedModelParallel`.
        data_parallel_wrapper: As in `DistributedModelParallel`.
        use_inter_host_allreduce: If true, groups are consecutive ranks: steps stay on few hosts and
            the mean crosses hosts. If false, a group is every (W / G)-th rank, and the mean stays
            on few hosts.
        custom_all_reduce: See :meth:`set_all_reduce_hook`.

    Raises:
        ValueError: The ranks cannot be divided into such groups, or as for
            `DistributedModelParallel`.
        AgreementError: Ranks differ.

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.DMPCollection``, with its default strategy
        and one plan.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None,
        plan: ShardingPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        *,
        node_group_size: int | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: AllReduce | None = None,
    ) -> None:
        everyone = ShardingEnv.from_process_group(global_pg)
        arguments = {
            "world_size": str(world_size),
            "sharding_group_size": str(sharding_group_size),
            "use_inter_host_allreduce": str(use_inter_host_allreduce),
            "the plan": "is to be made"
            if plan is None
            else f"{zlib.crc32(str(plan).encode()):08x}",
        }
        check_agreement("DMPCollection", arguments, everyone, _bad_world_size(world_size, everyone))

        groups = ReplicaGroups.of(global_pg, sharding_group_size, use_inter_host_allreduce)
        env = ShardingEnv(
            sharding_group_size, groups.sharding.rank(), groups.sharding, local_size=node_group_size
        )

        if plan is None:
            plan_sharders = (
                _checked_sharders(sharders) if sharders is not None else get_default_sharders()
            )
            plan = make_plan(
                module, plan_sharders, env, usable_device(device, {}), everyone=everyone
            )
        super().__init__(
            module, env, device, plan, sharders, False, init_parameters, data_parallel_wrapper
        )

        self._dense_env = everyone
        self._groups = groups
        self._all_reduce = custom_all_reduce
        collections = [
            child
            for _, child in sharded_parts(self.module)
            if isinstance(child, ShardedEmbeddingModule)
        ]

        _check_no_mappings(self.module)
        self._replicas = ReplicaMean(collections, groups.replica)
        if self.device.type != "meta":
            self._replicas.spread()
        if init_data_parallel:
            self.init_data_parallel()

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Average tables and fused optimizer state over replicas; a collective call."""
        self._replicas.average(include_optimizer_state, self._all_reduce)

    def set_all_reduce_hook(self, reduce_hook: AllReduce) -> None:
        """Set ``reduce_hook(tensors)``, which averages tensors over replicas, in place.

        It is called with the weights and then with the optimizer states, and issues its own
        collectives on the group ``device_mesh.get_group("replicate")``.
        """
        self._all_reduce = reduce_hook

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks ``[W / G, G]``, with dimensions ``"replicate"`` and ``"shard"``."""
        return DeviceMesh.from_group(
            [self._groups.replica, self._groups.sharding],
            self.device.type,
            mesh=torch.tensor(self._groups.ranks, dtype=torch.int),
            mesh_dim_names=("replicate", "shard"),
        )

    @property
    def dense_group(self) -> dist.ProcessGroup:
        """All ranks, which share the dense layers."""
        group = self._dense_env.process_group
        assert group is not None, "a DMPCollection has a process group"
        return group

    @property
    def replica(self) -> int:
        """Index of this rank's replica of the tables, from 0."""
        return self._groups.replica.rank()

    def reduce_norm(self) -> NormOverRanks:
        """As in `DistributedModelParallel`, if only dense layers have gradients.

        Raises:
            ValueError: A sharded table has the kernel ``dense``. Its gradient norm would differ
                between replicas, and clipping by different norms would make the dense layers
                diverge.
        """
        tables = [
            shards.table
            for collection in self._replicas.parts
            for shards in collection.local_shards()
        ]
        if dense := [
            table.name for table in tables if table.kernel is EmbeddingComputeKernel.DENSE
        ]:
            raise ValueError(
                f"the gradient of table {dense[0]!r} differs between replicas, and clipping needs "
                "one norm on all ranks: give it compute_kernel='fused', or clip dense parts alone"
            )

        return super().reduce_norm()


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the model inside `DistributedModelParallel` and torch's wrappers.

    Example:
        >>> get_unwrapped_module(nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.get_unwrapped_module``.
    """
    while isinstance(module, DistributedModelParallel | DistributedDataParallel):
        module = (
            module._dmp_wrapped_module
            if isinstance(module, DistributedModelParallel)
            else module.module
        )
    return module


def get_module(module: nn.Module) -> nn.Module:
    """Return the model inside `DistributedModelParallel`, with torch's data-parallel wrapper.

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.get_module``.
    """
    while isinstance(module, DistributedModelParallel):
        module = module._dmp_wrapped_module
    return module


def _insert_wrapped_path(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Restore the path that `state_dict` drops from names, if this model is part of another."""
    assert isinstance(module, DistributedModelParallel), "the hook of a DistributedModelParallel"
    inner = "_dmp_wrapped_module." + (
        "" if module.module is module._dmp_wrapped_module else "module."
    )
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}{inner}{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _checked_sharders(sharders: Sequence[ModuleSharder[Any]]) -> list[ModuleSharder[Any]]:
    """Check that sharders are objects: a class would silently shard nothing."""
    for sharder in sharders:
        if isinstance(sharder, type):
            raise TypeError(
                f"sharders holds the class {sharder.__name__}: pass objects, "
                "[EmbeddingBagCollectionSharder()]"
            )
    return list(sharders)


def _bad_world_size(world_size: int, everyone: ShardingEnv) -> Exception | None:
    if world_size == everyone.world_size:
        return None
    return ValueError(
        f"world_size={world_size}, and global_pg has {everyone.world_size} ranks: give that number"
    )


def _check_no_mappings(module: nn.Module) -> None:
    """Refuse replicas of remapped tables: each replica would give a row to another id.

    Raises:
        ValueError: A collection remaps ids.
    """
    for path, child in module.named_modules():
        if isinstance(child, BaseShardedManagedCollisionEmbeddingCollection):
            raise ValueError(
                f"module {path!r} remaps ids, by a mapping of its own in each replica, and a mean "
                "over replicas would mix rows of different ids: use DistributedModelParallel"
            )


def _check_wrapped_once(module: nn.Module) -> None:
    """Raise if the model or a part of it is already wrapped: DDP would treat its shards as dense.

    Raises:
        ValueError: A DistributedModelParallel was found.
    """
    for path, child in module.named_modules():
        if isinstance(child, DistributedModelParallel):
            subject = f"module {path!r}" if path else "the module"
            raise ValueError(
                f"{subject} is already a DistributedModelParallel: wrap the whole model once, "
                "before any part of it"
            )


def _fused_optimizer(module: nn.Module) -> CombinedOptimizer:
    """The fused optimizers of all sharded modules; names begin with the module's path."""
    return CombinedOptimizer(
        [
            (f"{path}.{key}".strip("."), optimizer)
            for path, child in sharded_parts(module)
            if isinstance(child, FusedOptimizerModule)
            for key, optimizer in _optimizers_of(child)
        ]
    )


def _optimizers_of(part: FusedOptimizerModule) -> list[tuple[str, Any]]:
    optimizer = part.fused_optimizer
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [("", optimizer)]


def _agreed_plan(
    plan: ShardingPlan,
    model: nn.Module,
    shardable: Mapping[str, tuple[nn.Module, ModuleSharder[Any]]],
    env: ShardingEnv,
) -> ShardingPlan:
    """Check that the plan fits the model and that all ranks shard the same modules."""
    problem: Exception | None = None
    description: dict[str, str] = {}
    try:
        check_plan_fits(plan, {path: collection for path, (collection, _) in shardable.items()})
        sharded = [path for path in shardable if path in plan.plan]
        description |= {"collections that the plan shards": str(sharded), **division_fact()}
        description |= {
            f"parameter {name!r}: shape": "not known yet"
            if is_lazy(parameter)
            else str(list(parameter.shape))
            for name, parameter in model.named_parameters()
            if not any(path == "" or name.startswith(f"{path}.") for path in sharded)
        }
    except (ValueError, TypeError) as error:
        problem = error

    check_agreement("DistributedModelParallel", description, env, problem)
    return plan


def _say_what_is_not_sharded(
    plan: ShardingPlan,
    shardable: Mapping[str, tuple[nn.Module, ModuleSharder[Any]]],
    env: ShardingEnv,
) -> None:
    """Warn of collections that the plan leaves out although an optimizer is named for them."""
    left = [
        path
        for path, (_, sharder) in shardable.items()
        if path not in plan.plan and names_optimizer(getattr(sharder, "fused_params", None))
    ]
    if left and env.rank == 0:
        warn_caller(
            f"the plan does not name {', '.join(map(repr, left))}: every rank keeps a copy, for "
            "which fused_params are not used, and your own optimizer has to update it. Name the "
            "collection in the plan; data_parallel() copies its tables, too"
        )


def _given_or_made(
    plan: ShardingPlan | None,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    env: ShardingEnv,
    device: torch.device,
) -> ShardingPlan:
    """The caller's plan; if no rank has one, rank 0 runs the planner for all."""
    problem: Exception | None = None
    if plan is not None and not isinstance(plan, ShardingPlan):
        problem = TypeError(
            f"plan is a {type(plan).__name__} and no ShardingPlan, which maps the paths of "
            "collections to their plans: plan=ShardingPlan({'path.in.the.model': "
            "construct_module_sharding_plan(...)})"
        )

    check_agreement(
        "DistributedModelParallel", {"a plan is given": str(plan is not None)}, env, problem
    )
    if plan is not None:
        return plan
    return make_plan(model, sharders, env, device)
