"""A model over several ranks: tables sharded, the rest replicated.

Tables are large and cheap to compute with, so each lies on one rank and ids travel (*model parallel*). What is dense is
small and expensive to compute with, so every rank has it whole and gradients are averaged (*data parallel*). Over very
many ranks tables may be replicated, too, a replica for each group of ranks (`DMPCollection`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from tutorec.distributed.agreement import check_agreement
from tutorec.distributed.collectives.autograd import division_fact, get_gradient_division
from tutorec.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper, sharded_parts
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.gradient_norm import NormOverRanks
from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingPlan
from tutorec.distributed.replicas import AllReduce, ReplicaGroups, ReplicaMean
from tutorec.distributed.shard import (
    allocate_dense_parts,
    collections_of,
    default_env,
    make_plan,
    move_dense_parts,
    replaced,
)
from tutorec.distributed.sharded_module import ModuleSharder
from tutorec.distributed.sharded_module import ShardedModule as ShardedModule
from tutorec.distributed.sharding_plan import check_plan_fits, get_default_sharders
from tutorec.distributed.tables import usable_device
from tutorec.optim.fused import FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer


class DistributedModelParallel(nn.Module, FusedOptimizerModule):
    """Shards every collection of tables in a model and wraps the rest in DistributedDataParallel.

    To build one is a collective: every rank does it with the same model and plan. Collections that are parts of
    ``module`` are replaced in it, so that their unsharded tables can be freed; the dense parts are the same objects. A
    collection that the plan leaves out stays whole on every rank.

    Args:
        module: The model; dense parts take rank 0's weights, tables those of the rank that is to hold them.
        env: The ranks; all ranks of the default process group by default.
        device: Where this rank computes, by default :func:`tutorec.spmd.device`; on meta tables have shapes only, and
            dense parts stay where they are.
        plan: Path of each collection -> its plan; by default `EmbeddingShardingPlanner` makes one, on rank 0 for all.
        sharders: One for each class of modules that is to be sharded.
        init_data_parallel: Wrap the dense parts now; otherwise call ``init_data_parallel()`` before the first training
            step, for example after a first forward that gives lazy layers their sizes.
        init_parameters: Where a dense part is on the meta device, allocate it and call its ``reset_parameters``;
            otherwise that is the caller's, before ``init_data_parallel()``.
        data_parallel_wrapper: Wraps the dense parts; `DefaultDataParallelWrapper` by default.

    Raises:
        TypeError: ``sharders`` holds a class, or the plan is not a `ShardingPlan`.
        ValueError: There is no process group, the model is wrapped already, a dense part cannot be allocated, or the
            plan does not fit; `PlannerError` where none is given and none is found.
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
        self._wrapper = data_parallel_wrapper if data_parallel_wrapper is not None else DefaultDataParallelWrapper()
        self._dense_env = self._env  # the ranks that have the dense parts
        self._ddp_is_built, self._divides = False, get_gradient_division()
        for path in list(shardable):
            # Not held any longer than needed: once it is replaced in the model, the unsharded one can be freed.
            found, sharder = shardable.pop(path)
            module_plan = self._plan.get_plan_for_module(path)
            if module_plan is not None:
                module = replaced(module, found, sharder.shard(found, module_plan, self._env, self.device, path))
        if init_parameters:
            allocate_dense_parts(module, self.device, {})
        move_dense_parts(module, self.device)
        self._dmp_wrapped_module: nn.Module = module
        self._optimizer = _fused_optimizer(module)
        self.register_load_state_dict_pre_hook(_insert_wrapped_path)
        if init_data_parallel:
            self.init_data_parallel()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; where it is a collection of tables, lazily.

        Raises:
            ValueError: `set_gradient_division` was called after the dense parts were wrapped, or tables have no rows.
        """
        if self.device.type == "meta":
            raise ValueError(
                "this DistributedModelParallel is on the meta device: its tables have shapes and no rows to look up; "
                "build it with device=torch.device('cpu') to use it"
            )
        if self._ddp_is_built and get_gradient_division() is not self._divides:
            was, now = ("mean", "sum") if self._divides else ("sum", "mean")
            raise ValueError(
                f"this model's dense parts take the {was} of the ranks' gradients since it was built, and "
                f"set_gradient_division asks for the {now} now: call it before DistributedModelParallel"
            )
        return self._dmp_wrapped_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """As of every module; the message says so where it is the model inside that has it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_dmp_wrapped_module" not in self.__dict__.get("_modules", {}) or not hasattr(self.module, name):
                raise
        raise AttributeError(
            f"DistributedModelParallel has no {name!r}, the model inside has: write .module.{name}; where torch's "
            "get_model_state_dict asks for it, call state_dict() instead, which names every table on every rank"
        )

    @property
    def module(self) -> nn.Module:
        """The model with its collections sharded, without DistributedDataParallel around it."""
        wrapped = self._dmp_wrapped_module
        return wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped

    @property
    def plan(self) -> ShardingPlan:
        """The plan."""
        return self._plan

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """What updates this rank's tables during backward; parameter names are those of the unsharded model."""
        return self._optimizer

    def reduce_norm(self) -> NormOverRanks:
        """For `GradientClippingOptimizer`: the norm of all gradients, those on other ranks too."""
        return NormOverRanks(self.module, self._env)

    def init_data_parallel(self) -> None:
        """Wrap the dense parts, if there are any and they are not wrapped yet."""
        if not self._ddp_is_built:
            self._divides = get_gradient_division()
            self._wrapper.wrap(self, self._dense_env, self.device)
            self._ddp_is_built = True

    # Names are those of the unsharded model, whatever is wrapped around it here.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) as in the unsharded model; of the tables, this rank's."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, buffer) as in the unsharded model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def bare_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """`named_parameters`, each parameter once: in TorchRec's edition, too, the two give the same."""
        return self.module.named_parameters(prefix, recurse)

    def sparse_grad_parameter_names(self, destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Names of weights of torch's own embeddings that ask for sparse gradients, appended to ``destination``."""
        names = [] if destination is None else destination
        for path, part in self.module.named_modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
                names.append(".".join(each for each in (prefix, path, "weight") if each))
        return names

    def state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state under the unsharded model's names; a table cut up is a ShardedTensor that knows all its shards."""
        if destination is None:
            return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        return self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True
    ) -> Any:
        """Copy state in, of names that begin with ``prefix``; tables may be whole, as an unsharded model's are."""
        wanted = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        return self.module.load_state_dict(wanted, strict)


class DMPCollection(DistributedModelParallel):
    """A model whose tables are sharded over each of several groups of ranks: 2D parallelism.

    Every group of G ranks is a `DistributedModelParallel` of its own as far as tables go: its batches alone move its
    replica of them, by the mean of the gradients of G ranks. Dense parts have one gradient, the mean of all W ranks.
    :meth:`sync`, which the training loop calls every so many steps, replaces tables and the state of their fused
    optimizers by the mean over replicas::

        for step, batch in enumerate(batches, 1):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                model.sync()

    All replicas begin with the tables of the first one. The number of steps that an Adam counts is the same in all. The
    state of an optimizer that steps outside of backward, of tables with the kernel ``dense``, stays each replica's own.

    Args:
        module: The model.
        device: Where this rank computes; None: :func:`tutorec.spmd.device`.
        plan: For the G ranks of a group, which it numbers from 0; None: `EmbeddingShardingPlanner` makes one for them.
        world_size: W, the ranks of ``global_pg``.
        sharding_group_size: G.
        global_pg: All ranks.
        node_group_size: How many of a group's ranks table-row-wise and grid take for a host; by default those that
            ``LOCAL_WORLD_SIZE`` puts on one.
        sharders: As of `DistributedModelParallel`, and so are the next three.
        init_data_parallel: Wrap the dense parts now.
        init_parameters: Allocate dense parts that are on the meta device.
        data_parallel_wrapper: Wraps the dense parts.
        use_inter_host_allreduce: Groups of consecutive ranks, so that steps stay on few hosts and the mean crosses;
            otherwise a group takes every (W / G)-th rank, and the mean stays on few hosts.
        custom_all_reduce: See :meth:`set_all_reduce_hook`.

    Raises:
        ValueError: The ranks make no such groups, or as of `DistributedModelParallel`.
        AgreementError: Ranks differ.

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.DMPCollection``, with its default strategy and one plan.
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
        facts = {
            "world_size": str(world_size),
            "sharding_group_size": str(sharding_group_size),
            "use_inter_host_allreduce": str(use_inter_host_allreduce),
            "the plan": "is to be made" if plan is None else f"{zlib.crc32(str(plan).encode()):08x}",
        }
        check_agreement("DMPCollection", facts, everyone, _bad_world_size(world_size, everyone))
        groups = ReplicaGroups.of(global_pg, sharding_group_size, use_inter_host_allreduce)
        env = ShardingEnv(sharding_group_size, groups.sharding.rank(), groups.sharding, local_size=node_group_size)
        if plan is None:
            makers = _checked_sharders(sharders) if sharders is not None else get_default_sharders()
            plan = make_plan(module, makers, env, usable_device(device, {}), everyone=everyone)
        super().__init__(module, env, device, plan, sharders, False, init_parameters, data_parallel_wrapper)
        self._dense_env, self._groups, self._all_reduce = everyone, groups, custom_all_reduce
        parts = [part for _, part in sharded_parts(self.module) if isinstance(part, ShardedEmbeddingModule)]
        self._replicas = ReplicaMean(parts, groups.replica)
        if self.device.type != "meta":
            self._replicas.spread()
        if init_data_parallel:
            self.init_data_parallel()

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Replace tables, and the state of their fused optimizers, by the mean over replicas; all ranks call it."""
        self._replicas.average(include_optimizer_state, self._all_reduce)

    def set_all_reduce_hook(self, reduce_hook: AllReduce) -> None:
        """Let ``reduce_hook(tensors)`` put the mean over replicas into tensors, in place: weights, then states.

        It calls collectives by itself, on the group ``device_mesh.get_group("replicate")``.
        """
        self._all_reduce = reduce_hook

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks ``[W / G, G]``, with the dimensions ``"replicate"`` and ``"shard"``."""
        return DeviceMesh.from_group(
            [self._groups.replica, self._groups.sharding],
            self.device.type,
            mesh=torch.tensor(self._groups.ranks, dtype=torch.int),
            mesh_dim_names=("replicate", "shard"),
        )

    @property
    def dense_group(self) -> dist.ProcessGroup:
        """All ranks, which have the dense parts together."""
        group = self._dense_env.process_group
        assert group is not None, "a DMPCollection is made of a process group"
        return group

    @property
    def replica(self) -> int:
        """Which replica of the tables this rank holds a part of, from 0."""
        return self._groups.replica.rank()

    def reduce_norm(self) -> NormOverRanks:
        """As of `DistributedModelParallel`, where only dense parts have gradients.

        Raises:
            ValueError: A sharded table has the kernel ``dense``: the norm of its gradient differs from replica to
                replica, and dense parts, clipped by different norms, would drift apart.
        """
        tables = [held.table for part in self._replicas.parts for held in part.held_tables()]
        if dense := [table.name for table in tables if table.kernel is EmbeddingComputeKernel.DENSE]:
            raise ValueError(
                f"the gradient of table {dense[0]!r} differs from replica to replica, so that no norm is shared by all "
                "ranks: give it compute_kernel='fused', or clip dense parts alone"
            )
        return super().reduce_norm()


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """The model inside of `DistributedModelParallel` and torch's wrappers around it.

    Example:
        >>> get_unwrapped_module(nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.get_unwrapped_module``.
    """
    while isinstance(module, DistributedModelParallel | DistributedDataParallel):
        module = module._dmp_wrapped_module if isinstance(module, DistributedModelParallel) else module.module
    return module


def get_module(module: nn.Module) -> nn.Module:
    """The model inside of `DistributedModelParallel`, with torch's wrapper for data parallelism around it.

    Source:
        TorchRec's ``torchrec.distributed.model_parallel.get_module``.
    """
    while isinstance(module, DistributedModelParallel):
        module = module._dmp_wrapped_module
    return module


def _insert_wrapped_path(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """What `state_dict` left out of the names comes back, where this model is a part of one that is loaded."""
    assert isinstance(module, DistributedModelParallel), "the hook of a DistributedModelParallel"
    inner = "_dmp_wrapped_module." + ("" if module.module is module._dmp_wrapped_module else "module.")
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}{inner}{name.removeprefix(prefix)}"] = state_dict.pop(name)


def _checked_sharders(sharders: Sequence[ModuleSharder[Any]]) -> list[ModuleSharder[Any]]:
    """The sharders; of a class nothing would be sharded, and nobody told."""
    for sharder in sharders:
        if isinstance(sharder, type):
            raise TypeError(
                f"sharders holds the class {sharder.__name__}: pass objects, [EmbeddingBagCollectionSharder()]"
            )
    return list(sharders)


def _bad_world_size(world_size: int, everyone: ShardingEnv) -> Exception | None:
    if world_size == everyone.world_size:
        return None
    return ValueError(f"world_size={world_size}, and global_pg has {everyone.world_size} ranks: give that number")


def _check_wrapped_once(module: nn.Module) -> None:
    """Refuse a model that has been wrapped: DDP would take the shards in it for dense parameters.

    Raises:
        ValueError: It, or a part of it, is wrapped.
    """
    for path, part in module.named_modules():
        if isinstance(part, DistributedModelParallel):
            what = f"module {path!r}" if path else "the module"
            raise ValueError(
                f"{what} is a DistributedModelParallel already, its tables are sharded: wrap the whole model once, "
                "before any part of it"
            )


def _fused_optimizer(module: nn.Module) -> CombinedOptimizer:
    """The optimizers of all sharded parts; names begin with the part's path."""
    return CombinedOptimizer(
        [
            (f"{path}.{key}".strip("."), optimizer)
            for path, part in sharded_parts(module)
            if isinstance(part, FusedOptimizerModule)
            for key, optimizer in _optimizers_of(part)
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
    """The plan, if it fits the model and the other ranks shard and replicate the same parts."""
    problem: Exception | None = None
    facts: dict[str, str] = {}
    try:
        check_plan_fits(plan, {path: found for path, (found, _) in shardable.items()})
        sharded = [path for path in shardable if path in plan.plan]
        facts |= {"collections that the plan shards": str(sharded), **division_fact()}
        facts |= {
            f"parameter {name!r}: shape": "not known yet" if is_lazy(parameter) else str(list(parameter.shape))
            for name, parameter in model.named_parameters()
            if not any(path == "" or name.startswith(f"{path}.") for path in sharded)
        }
    except (ValueError, TypeError) as error:
        problem = error
    check_agreement("DistributedModelParallel", facts, env, problem)
    return plan


def _given_or_made(
    plan: ShardingPlan | None,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    env: ShardingEnv,
    device: torch.device,
) -> ShardingPlan:
    """The caller's plan; where no rank has one, the planner's: rank 0 makes it for all."""
    problem: Exception | None = None
    if plan is not None and not isinstance(plan, ShardingPlan):
        problem = TypeError(
            f"plan is a {type(plan).__name__} and no ShardingPlan, which maps the paths of collections to their "
            "plans: plan=ShardingPlan({'path.in.the.model': construct_module_sharding_plan(...)})"
        )
    check_agreement("DistributedModelParallel", {"a plan is given": str(plan is not None)}, env, problem)
    if plan is not None:
        return plan
    return make_plan(model, sharders, env, device)
