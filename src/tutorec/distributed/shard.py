"""Sharding without a wrapper: replace the collections of a model by sharded ones, and leave the rest alone.

`DistributedModelParallel` does this and replicates the dense parts, which is what training wants. Here a model keeps
its class, its other parts and its forward: for serving, where one process drives several devices, and for training
loops that replicate by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from tutorec.distributed import comm
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import EmbeddingModuleShardingPlan, ModuleShardingPlan, ShardingPlan
from tutorec.distributed.sharded_module import ModuleSharder, ShardedModule
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    check_plan_fits,
    construct_module_sharding_plan,
    get_default_sharders,
    get_module_to_default_sharders,
)
from tutorec.quant.packed_tables import PackedTables
from tutorec.spmd.devices import device as own_device


def shard(
    module: nn.Module,
    plan: ModuleShardingPlan | Mapping[str, Any] | ParameterShardingGenerator,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[Any] | None = None,
) -> nn.Module:
    """The sharded form of one collection.

    Args:
        module: The collection; it stays as it is.
        plan: Table name -> entry of a plan, or what is to be done with it (`table_wise`, `row_wise` ...); or one of
            these for all tables.
        env: The ranks; those of the default process group by default.
        device: Where tables are to live, by default :func:`tutorec.spmd.device`.
        sharder: Shards it; the one for its class by default.

    Raises:
        TypeError: The plan is neither, or both.
        ValueError: There is no sharder for such a module, no process group, or the plan does not fit.

    Example:
        >>> from tutorec.distributed.sharding_plan import table_wise
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "products", feature_names=["item"])])
        >>> type(shard(ebc, table_wise(rank=0), ShardingEnv.from_local(1, 0))).__name__
        'ShardedEmbeddingBagCollection'

    Source:
        TorchRec's ``torchrec.distributed.shard.shard``.
    """
    if sharder is None:
        sharder = get_module_to_default_sharders().get(type(module))
    if sharder is None:
        known = ", ".join(dict.fromkeys(kind.__name__ for kind in get_module_to_default_sharders()))
        raise ValueError(
            f"there is no sharder for a {type(module).__name__}: pass sharder=, or a collection ({known}); "
            "shard_modules shards the collections inside a model"
        )
    env = env if env is not None else default_env("shard")
    device = torch.device(device) if device is not None else own_device()
    if isinstance(plan, ParameterShardingGenerator):
        plan = apply_to_all(module, plan, sharder)
    plan = cast(Mapping[str, Any], plan)
    generators = {name: entry for name, entry in plan.items() if isinstance(entry, ParameterShardingGenerator)}
    if generators and len(generators) == len(plan):
        made = construct_module_sharding_plan(module, generators, sharder, env.local_size, env.world_size, device.type)
    elif generators:
        raise TypeError(
            f"tables {sorted(generators)} are given words such as table_wise(rank=0), and the others entries "
            "of a plan: use one of the two for all tables"
        )
    else:
        made = EmbeddingModuleShardingPlan(plan)
    return sharder.shard(module, made, env, device)


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Replace every collection inside a model by its sharded form; the rest of the model is left alone.

    Args:
        module: The model. Collections inside it are replaced in place; if it is a collection itself, its sharded form
            is returned and it stays as it is.
        env: The ranks; those of the default process group by default. ``ShardingEnv.from_local(n, 0)``: one process
            with n devices, for quantized collections.
        device: Where tables are to live, by default :func:`tutorec.spmd.device`.
        plan: Path of each collection -> its plan; made by `EmbeddingShardingPlanner` by default. Collections that it
            leaves out stay as they are.
        sharders: One for each class of collections.
        init_params: Whether to allocate dense parts that are on the meta device, and to bring all to ``device``.

    Returns:
        The model.

    Raises:
        PlannerError: No plan is given and none is found.
        ValueError: There is no process group, or the plan does not fit.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "products", feature_names=["item"])])
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
    """`shard_modules` under the name that TorchRec's introduction calls; ``planner`` makes a plan if none is given."""
    sharders = get_default_sharders() if sharders is None else list(sharders)
    env = env if env is not None else default_env("shard_modules")
    device = torch.device(device) if device is not None else own_device()
    found = dict(collections_of(module, sharders))
    if plan is None:
        plan = make_plan(module, sharders, env, device, planner)
    check_plan_fits(plan, {path: part for path, (part, _) in found.items()})
    for path in list(found):
        # Not held any longer than needed: once it is replaced in the model, the unsharded one can be freed.
        part, sharder = found.pop(path)
        module_plan = plan.get_plan_for_module(path)
        if module_plan is not None:
            module = replaced(module, part, sharder.shard(part, module_plan, env, device, path))
    if init_params and device.type != "meta":
        allocate_dense_parts(module, device, {})
        move_dense_parts(module, device)
    return module


def collections_of(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, tuple[nn.Module, ModuleSharder[Any]]]]:
    """Path -> (module, its sharder), outermost only.

    Args:
        module: The model.
        sharders: One for each class of collections.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    done: list[str] = []
    for path, part in module.named_modules():
        if type(part) in by_type and not any(path.startswith(f"{outer}.") for outer in done):
            done.append(path)
            yield path, (part, by_type[type(part)])


def default_env(caller: str) -> ShardingEnv:
    """All ranks of the default process group.

    Args:
        caller: Who needs them, for the message.

    Raises:
        ValueError: No process group has been started.
    """
    group = comm.default_group()
    if group is None:
        raise ValueError(
            f"{caller} needs a process group, and none has been started: call it inside "
            "tutorec.spmd.Ranks(world_size).run(...), or start one of a single rank with tutorec.spmd.init(); a "
            "quantized model needs none, env=ShardingEnv.from_local(world_size=1, rank=0)"
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
    """The planner's plan: where there is a process group, rank 0 makes it for all.

    Args:
        model: The model.
        sharders: One for each class of collections.
        env: The ranks that hold the tables.
        device: Of their tables.
        planner: Makes it; `EmbeddingShardingPlanner` for these ranks by default.
        everyone: All ranks that are to have the plan; those of ``env`` by default.

    Raises:
        PlannerError: None is found.
    """
    # Most programs bring a plan or plan by themselves, and need not wait for the planner's modules.
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
    from tutorec.distributed.planner.topology import Topology, this_machine

    everyone = env if everyone is None else everyone
    if planner is None:
        plans = everyone.world_size == 1 or (everyone.process_group is not None and everyone.rank == 0)
        machine = this_machine if plans else Topology  # what was measured counts on the rank that plans
        topology = machine(everyone.world_size, device.type, local_world_size=everyone.local_size)
        if everyone is not env:
            topology = topology.part(range(env.world_size), env.local_size)
        planner = EmbeddingShardingPlanner(topology)
    if everyone.process_group is None:
        return planner.plan(model, list(sharders))
    return planner.collective_plan(model, list(sharders), everyone.process_group)


def replaced(model: nn.Module, part: nn.Module, sharded: nn.Module) -> nn.Module:
    """The model with ``sharded`` wherever ``part`` stands: two places may share it, and the model may be it.

    Args:
        model: Changed in place.
        part: What is replaced.
        sharded: What comes in its place.
    """
    if model is part:
        return sharded
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is part:
                setattr(parent, name, sharded)
    return model


def allocate_dense_parts(module: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Allocate and draw what is on the meta device outside of sharded modules.

    Quantized tables stay there: `meta_to_cpu_placement` allocates them, and a lookup before that is refused.

    Args:
        module: Changed in place.
        device: Where it is allocated.
        made: Old -> new, so that what is shared stays shared.

    Raises:
        ValueError: A part cannot draw its values.
    """
    if isinstance(module, ShardedModule | PackedTables):
        return
    on_meta = [name for name, own in module._parameters.items() if own is not None and own.is_meta]
    buffers_on_meta = [name for name, own in module._buffers.items() if own is not None and own.is_meta]
    if on_meta or buffers_on_meta:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise ValueError(
                f"a {type(module).__name__} of the model is on the meta device ({[*on_meta, *buffers_on_meta]}) and "
                "has no values to train with: build it on the CPU, or give it a reset_parameters method"
            )
        for name in on_meta:
            old = module._parameters[name]
            assert old is not None, "looked at above"
            if old not in made:
                made[old] = nn.Parameter(torch.empty_like(old, device=device), requires_grad=old.requires_grad)
            module._parameters[name] = made[old]
        for name in buffers_on_meta:
            buffer = module._buffers[name]
            assert buffer is not None, "looked at above"
            module._buffers[name] = torch.zeros_like(buffer, device=device)
        reset()
    for child in module.children():
        allocate_dense_parts(child, device, made)


def move_dense_parts(module: nn.Module, device: torch.device) -> None:
    """Bring everything outside of sharded modules to the device, but what is on meta.

    Args:
        module: Changed in place.
        device: Where to; on meta there is no place for numbers, and everything stays where it is.
    """
    if isinstance(module, ShardedModule) or device.type == "meta":
        return
    # Not parameters and buffers one by one: a module may hold more that moves with it.
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False)
    for child in module.children():
        move_dense_parts(child, device)
