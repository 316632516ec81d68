"""A model over several ranks: tables sharded, the rest replicated.

Tables are large and cheap to compute with, so each lies on one rank and ids travel (*model parallel*). What is dense is
small and expensive to compute with, so every rank has it whole and gradients are averaged (*data parallel*).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutorec.distributed import comm
from tutorec.distributed.agreement import check_agreement
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import ShardingPlan
from tutorec.distributed.sharded_module import ModuleSharder, ShardedModule
from tutorec.distributed.sharding_plan import check_plan_fits, default_sharders
from tutorec.optim.fused import FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer

DataParallelWrapper = Callable[[nn.Module, ShardingEnv, torch.device], nn.Module]

# Buffers are not sent around at each forward. torch 2.13 says so by another name and warns at the older one.
_SYNC_BUFFERS = "forward_sync_buffers"
_DDP_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {_SYNC_BUFFERS if _SYNC_BUFFERS in _DDP_PARAMETERS else "broadcast_buffers": False}


class DistributedModelParallel(nn.Module):
    """Shards every collection of tables in a model and wraps the rest in DistributedDataParallel.

    To build one is a collective: every rank does it with the same model and plan. Collections that are parts of
    ``module`` are replaced in it, so that their unsharded tables can be freed; the dense parts are the same objects. A
    collection that the plan leaves out stays whole on every rank.

    Args:
        module: The model; dense parts take rank 0's weights, tables those of the rank that is to hold them.
        env: The ranks; all ranks of the default process group by default.
        device: Where this rank computes, by default the CPU.
        plan: Path of each collection -> its plan; by default `EmbeddingShardingPlanner` makes one, on rank 0 for all.
        sharders: One for each class of modules that is to be sharded.
        init_data_parallel: Wrap the dense parts now; otherwise call ``init_data_parallel()`` before the first batch.
        init_parameters: Where a dense part is on the meta device, allocate it and call its ``reset_parameters``.
        data_parallel_wrapper: Wraps the dense parts; `wrap_in_ddp` by default.

    Raises:
        ValueError: There is no process group, the model is wrapped already, or the plan does not fit it;
            `PlannerError` where none is given and none is found.
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
        self._env = env if env is not None else _default_env()
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            self.device = torch.device("cpu")
        sharders = sharders if sharders is not None else default_sharders()
        shardable = dict(_shardable_modules(module, sharders))
        plan = _given_or_made(plan, module, sharders, self._env, self.device)
        self._plan = _agreed_plan(plan, module, shardable, self._env)
        self._wrap = data_parallel_wrapper if data_parallel_wrapper is not None else wrap_in_ddp
        self._ddp_is_built = False
        for path, (found, sharder) in shardable.items():
            module_plan = self._plan.get_plan_for_module(path)
            if module_plan is None:
                continue
            sharded = sharder.shard(found, module_plan, self._env, self.device, path)
            module = _replaced(module, found, sharded)
        _move_dense_parts(module, self.device, init_parameters)
        self._dmp_wrapped_module: nn.Module = module
        self._optimizer = CombinedOptimizer(
            [
                (f"{path}.{key}".strip("."), optimizer)
                for path, part in _sharded_parts(module)
                if isinstance(part, FusedOptimizerModule)
                for key, optimizer in _optimizers_of(part)
            ]
        )
        if init_data_parallel:
            self.init_data_parallel()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; where it is a collection of tables, lazily."""
        return self._dmp_wrapped_module(*args, **kwargs)

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

    def init_data_parallel(self) -> None:
        """Wrap the dense parts, if there are any and they are not wrapped yet."""
        if not self._ddp_is_built:
            self._ddp_is_built = True
            self._dmp_wrapped_module = self._wrap(self._dmp_wrapped_module, self._env, self.device)

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
        """(name, parameter) of the dense parts."""
        sharded = set(sharded_parameter_names(self.module))
        for name, parameter in self.module.named_parameters(recurse=recurse):
            if name not in sharded:
                yield f"{prefix}.{name}" if prefix else name, parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state under the unsharded model's names; of the tables, this rank's."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy state in."""
        return self.module.load_state_dict(state_dict, strict, assign)


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


def wrap_in_ddp(module: nn.Module, env: ShardingEnv, device: torch.device) -> nn.Module:
    """The model with its dense parts in DistributedDataParallel; the model itself where it has none.

    DDP broadcasts rank 0's parameters when it wraps. Every sharded parameter is kept out of its sight, or each rank's
    shard would become rank 0's without an error.

    Args:
        module: The model, its collections sharded.
        env: The ranks.
        device: Of the dense parts.

    Raises:
        ValueError: There are dense parameters and no process group.
    """
    ignored = sharded_parameter_names(module)
    dense = [name for name, parameter in module.named_parameters() if name not in ignored and parameter.requires_grad]
    if not dense:
        return module
    if env.process_group is None:
        raise ValueError(
            f"DistributedDataParallel needs a process group for the dense parameters ({dense[0]!r} and "
            f"{len(dense) - 1} more), and this ShardingEnv has none: use ShardingEnv.from_process_group, or "
            "init_data_parallel=False"
        )
    # DDP reads this attribute of the module that it is given.
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(ignored))
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=env.process_group,
        gradient_as_bucket_view=True,
        **_KEEP_BUFFERS,
    )


def sharded_parameter_names(module: nn.Module) -> set[str]:
    """Names of all parameters and buffers inside sharded modules, nested ones too."""
    return {
        f"{path}.{name}" if path else name
        for path, part in _sharded_parts(module)
        for names in (part.named_parameters(), part.named_buffers())
        for name, _ in names
    }


def _sharded_parts(module: nn.Module) -> Iterator[tuple[str, ShardedModule[Any, Any, Any, Any]]]:
    for path, part in module.named_modules():
        if isinstance(part, ShardedModule):
            yield path, part


def _optimizers_of(part: FusedOptimizerModule) -> list[tuple[str, Any]]:
    optimizer = part.fused_optimizer
    return optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else [("", optimizer)]


def _shardable_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, tuple[nn.Module, ModuleSharder[Any]]]]:
    """Path -> (module, its sharder), outermost only."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    done: list[str] = []
    for path, part in module.named_modules():
        if type(part) in by_type and not any(path.startswith(f"{outer}.") for outer in done):
            done.append(path)
            yield path, (part, by_type[type(part)])


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
        facts["collections that the plan shards"] = str(sharded)
        facts |= {
            f"parameter {name!r}: shape": str(list(parameter.shape))
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
    # Most programs bring a plan or plan by themselves, and need not wait for the planner's modules.
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
    from tutorec.distributed.planner.topology import Topology

    topology = Topology(env.world_size, device.type, local_world_size=env.local_size)
    planner = EmbeddingShardingPlanner(topology)
    if env.process_group is None:
        return planner.plan(model, sharders)
    return planner.collective_plan(model, sharders, env.process_group)


def _replaced(model: nn.Module, part: nn.Module, sharded: nn.Module) -> nn.Module:
    """The model with ``sharded`` wherever ``part`` stands: two places may share it, and the model may be it."""
    if model is part:
        return sharded
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is part:
                setattr(parent, name, sharded)
    return model


def _move_dense_parts(module: nn.Module, device: torch.device, init_parameters: bool) -> None:
    """Bring everything outside of sharded modules to the device; what is on meta is allocated and drawn."""
    if isinstance(module, ShardedModule):
        return
    own = list(module._parameters.values()) + list(module._buffers.values())
    if any(tensor is not None and tensor.is_meta for tensor in own):
        reset = getattr(module, "reset_parameters", None)
        if not init_parameters or reset is None:
            raise ValueError(
                f"a {type(module).__name__} of the model is on the meta device and has no values to train with: "
                "build it on the CPU, or give it a reset_parameters method and leave init_parameters=True"
            )
        module.to_empty(device=device, recurse=False)
        reset()
    for tensor in [*module._parameters.values(), *module._buffers.values()]:
        if tensor is not None and tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
    for child in module.children():
        _move_dense_parts(child, device, init_parameters)


def _default_env() -> ShardingEnv:
    group = comm.default_group()
    if group is None:
        raise ValueError(
            "DistributedModelParallel needs a process group, and none has been started: call it inside "
            "tutorec.spmd.Ranks(world_size).run(...), or start one of a single rank with tutorec.spmd.init()"
        )
    return ShardingEnv.from_process_group(group)
