"""Sharding without a wrapper: the collections of a model are replaced by sharded ones.

`DistributedModelParallel` does this and also wraps the dense layers in DistributedDataParallel, for
training. Here the model keeps its class, its other layers and its forward. Use it for serving,
where one process drives several devices, and for training loops that replicate dense layers
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.plan.plan import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ShardingPlan,
)
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    construct_module_sharding_plan,
    default_sharder,
    get_default_sharders,
)
from tutorec.quant.packed_tables import PackedTables
from tutorec.spmd.rank import device as own_device


def shard(
    module: nn.Module,
    plan: ModuleShardingPlan | Mapping[str, Any] | ParameterShardingGenerator,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[Any] | None = None,
) -> nn.Module:
    """Shard one collection.

    Args:
        module: The collection; it is not changed.
        plan: Table name -> plan entry or generator (`table_wise`, `row_wise` and so on); or one of
            these for all tables.
        env: The ranks; those of the default process group by default.
        device: Device of the tables; :func:`tutorec.spmd.device` by default.
        sharder: The sharder; the default sharder of the module's class if None.

    Raises:
        TypeError: The plan has neither entries nor generators, or mixes them.
        ValueError: No sharder for the module, no process group, or a plan that does not fit.

    Example:
        >>> from tutorec.distributed.sharding_plan import table_wise
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(8, 4, "products", feature_names=["item"])]
        ... )
        >>> type(shard(ebc, table_wise(rank=0), ShardingEnv.from_local(1, 0))).__name__
        'ShardedEmbeddingBagCollection'

    Source:
        TorchRec's ``torchrec.distributed.shard.shard``.
    """
    sharder = sharder if sharder is not None else default_sharder(module)
    env = env if env is not None else default_env("shard")
    device = torch.device(device) if device is not None else own_device()
    if isinstance(plan, ParameterShardingGenerator):
        plan = apply_to_all(module, plan, sharder)
    plan = cast(Mapping[str, Any], plan)
    generators = {
        name: entry for name, entry in plan.items() if isinstance(entry, ParameterShardingGenerator)
    }

    if generators and len(generators) == len(plan):
        collection_plan = construct_module_sharding_plan(
            module, generators, sharder, env.local_size, env.world_size, device.type
        )
    elif generators:
        raise TypeError(
            f"tables {sorted(generators)} have generators such as table_wise(rank=0), and the "
            "others have entries of a plan: use one of the two for all tables"
        )
    else:
        collection_plan = EmbeddingModuleShardingPlan(plan)

    return sharder.shard(module, collection_plan, env, device)


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Replace every collection of a model by its sharded form, and leave the rest unchanged.

    Args:
        module: The model. Collections inside it are replaced in place. A model that is a collection
            itself is not changed; its sharded form is returned.
        env: The ranks; those of the default process group by default. ``ShardingEnv.from_local(n,
            0)`` is one process with n devices, for quantized collections.
        device: Device of the tables; :func:`tutorec.spmd.device` by default.
        plan: Path of each collection -> its plan; made by `EmbeddingShardingPlanner` by default.
            Collections that it does not name are not sharded.
        sharders: One sharder per class of collections.
        init_params: Whether to allocate dense parameters that are on the meta device, and to move
            everything to ``device``.

    Returns:
        The model.

    Raises:
        PlannerError: No plan is given and the planner finds none.
        ValueError: There is no process group, or the plan does not fit.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(8, 4, "products", feature_names=["item"])]
        ... )
        >>> model = shard_modules(nn.Sequential(ebc), ShardingEnv.from_local(1, 0))
        >>> type(model[0]).__name__
        'ShardedEmbeddingBagCollection'

    Source:
        TorchRec's ``torchrec.distributed.shard.shard_modules``.
    """
    return _shard_modules(module, env, device, plan, sharders, init_params)


def _shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool | None = False,
    planner: Any = None,
) -> nn.Module:
    """`shard_modules` under another name of TorchRec's; ``planner`` plans if no plan is given."""
    sharders = get_default_sharders() if sharders is None else list(sharders)
    env = env if env is not None else default_env("shard_modules")
    device = torch.device(device) if device is not None else own_device()
    collections = dict(collections_of(module, sharders))
    if plan is None:
        plan = make_plan(module, sharders, env, device, planner)
    check_plan_fits(plan, {path: collection for path, (collection, _) in collections.items()})

    for path in list(collections):
        # Drop the reference, so that the unsharded collection can be freed once it is replaced.
        collection, sharder = collections.pop(path)
        module_plan = plan.get_plan_for_module(path)
        if module_plan is not None:
            module = replaced(
                module, collection, sharder.shard(collection, module_plan, env, device, path)
            )

    if init_params and device.type != "meta":
        allocate_dense_parts(module, device, {})
        move_dense_parts(module, device)
    return module


def collections_of(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, tuple[nn.Module, ModuleSharder[Any]]]]:
    """Path -> (module, its sharder), for outermost modules that have a sharder.

    Args:
        module: The model.
        sharders: One sharder per class of collections.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    outermost: list[str] = []

    for path, child in module.named_modules():
        if type(child) in by_type and not any(path.startswith(f"{outer}.") for outer in outermost):
            outermost.append(path)
            yield path, (child, by_type[type(child)])


def check_plan_fits(plan: ShardingPlan, paths: Mapping[str, nn.Module]) -> None:
    """Check that every module that a plan names can be sharded.

    Args:
        plan: Path of a module -> its plan.
        paths: Path -> module, for the modules that have a sharder.

    Raises:
        ValueError: A path does not exist, or its module cannot be sharded.

    Example:
        >>> from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan
        >>> check_plan_fits(ShardingPlan({"sparse": EmbeddingModuleShardingPlan()}), {})
        Traceback (most recent call last):
            ...
        ValueError: the plan names module 'sparse', which the model does not have; ...
    """
    for path in plan.plan:
        if path not in paths:
            raise ValueError(
                f"the plan names module {path!r}, which the model does not have; modules that can "
                f"be sharded: {list(paths)}"
            )


def default_env(caller: str) -> ShardingEnv:
    """The environment of the default process group.

    Args:
        caller: The function that needs it, for the message.

    Raises:
        ValueError: No process group has been started.
    """
    group = comm.default_group()
    if group is None:
        raise ValueError(
            f"{caller} needs a process group, and none has been started: call it inside "
            "tutorec.spmd.Ranks(world_size).run(...), or start one of a single rank with "
            "tutorec.spmd.init(); a quantized model needs none, "
            "env=ShardingEnv.from_local(world_size=1, rank=0)"
        )
    return ShardingEnv.from_process_group(group)


def make_plan(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    env: ShardingEnv,
    device: torch.device,
    planner: Any = None,
    everyone: ShardingEnv | None = None,
) -> ShardingPlan:
    """Run the planner; with a process group, rank 0 plans for all ranks.

    Args:
        model: The model.
        sharders: One sharder per class of collections.
        env: The ranks that hold the tables.
        device: Device of their tables.
        planner: The planner; an `EmbeddingShardingPlanner` for these ranks by default.
        everyone: The ranks that receive the plan; those of ``env`` by default.

    Raises:
        PlannerError: The planner finds no plan.
    """
    # Imported late: programs that bring their own plan need not load the planner.
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
    from tutorec.distributed.planner.topology import Topology, this_machine

    everyone = env if everyone is None else everyone
    if planner is None:
        plans = everyone.world_size == 1 or (
            everyone.process_group is not None and everyone.rank == 0
        )
        # measurements of the planning rank's machine count
        machine = this_machine if plans else Topology
        topology = machine(everyone.world_size, device.type, local_world_size=everyone.local_size)
        if everyone is not env:
            topology = topology.part(range(env.world_size), env.local_size)
        planner = EmbeddingShardingPlanner(topology)

    if everyone.process_group is None:
        return planner.plan(model, list(sharders))
    return planner.collective_plan(model, list(sharders), everyone.process_group)


def replaced(model: nn.Module, part: nn.Module, sharded: nn.Module) -> nn.Module:
    """Return the model with every occurrence of ``part`` replaced by ``sharded``.

    Args:
        model: Changed in place.
        part: The module to replace.
        sharded: Its replacement.
    """
    if model is part:
        return sharded
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is part:
                setattr(parent, name, sharded)
    return model


def allocate_dense_parts(
    module: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Allocate and initialize parameters on the meta device outside sharded modules.

    Quantized tables stay on meta: `meta_to_cpu_placement` allocates them, and a lookup before that
    raises.

    Args:
        module: Changed in place.
        device: Device on which to allocate.
        made: Old tensor -> new tensor, so that shared tensors stay shared.

    Raises:
        ValueError: A module has no ``reset_parameters`` method.
    """
    if isinstance(module, ShardedModule | PackedTables):
        return

    on_meta = [
        name for name, tensor in module._parameters.items() if tensor is not None and tensor.is_meta
    ]
    buffers_on_meta = [
        name for name, tensor in module._buffers.items() if tensor is not None and tensor.is_meta
    ]

    if on_meta or buffers_on_meta:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"a {type(module).__name__} of the model is on the meta device "
                f"({[*on_meta, *buffers_on_meta]}) and has no values to train with: build it on "
                "the CPU, or give it a reset_parameters method"
            )

        for name in on_meta:
            old = module._parameters[name]
            assert old is not None, "checked above"
            if old not in made:
                made[old] = nn.Parameter(
                    torch.empty_like(old, device=device), requires_grad=old.requires_grad
                )
            module._parameters[name] = made[old]
        for name in buffers_on_meta:
            buffer = module._buffers[name]
            assert buffer is not None, "checked above"
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        reset()

    for child in module.children():
        allocate_dense_parts(child, device, made)


def move_dense_parts(module: nn.Module, device: torch.device) -> None:
    """Move everything outside sharded modules to the device, except tensors on meta.

    Args:
        module: Changed in place.
        device: The device; if it is meta, nothing is moved.
    """
    if isinstance(module, ShardedModule) or device.type == "meta":
        return
    # Not parameter by parameter: a module may have further state that moves with it.
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False)
    for child in module.children():
        move_dense_parts(child, device)
