"""From a trained model to a serving model: quantized, and sharded over the devices of one process.

Corresponds to TorchRec's ``torchrec.inference.modules``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tutorec._check import require_int
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingPlan, ShardingType
from tutorec.distributed.quant_embedding import QUANT_SHARDERS
from tutorec.distributed.shard import _shard_modules, collections_of
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import QuantConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.preparing import (
    MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT,
    quant_prep_enable_register_tbes,
)
from tutorec.quant.whole_model import (
    QUANTIZE_FIRST,
    QUANTIZED,
    spread_over_devices,
    swap_collections,
    tables_of,
)

__all__ = [
    "quantize_embeddings",
    "quantize_inference_model",
    "set_pruning_data",
    "shard_quant_model",
]


def set_pruning_data(
    model: nn.Module,
    tables_to_rows_post_pruning: Mapping[str, int],
    module_types: Sequence[type[nn.Module]] | None = None,
) -> nn.Module:
    """Set the number of first rows of some tables that quantization keeps.

    Args:
        model: A float collection, or a model with float collections.
        tables_to_rows_post_pruning: Table name -> rows to keep.
        module_types: The collections concerned; both by default.

    Returns:
        The model.

    Raises:
        KeyError: There is no such table.
        ValueError: A number is less than 1 or more than the table's rows.

    Example:
        >>> import torch, tutorec
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 64, "item")])
        >>> tutorec.quantize(set_pruning_data(ebc, {"item": 6})).packed_rows("item").shape
        torch.Size([6, 68])

    Source:
        TorchRec's ``torchrec.inference.modules.set_pruning_data``, which ignores unknown names.
    """
    classes = tuple(module_types or QUANTIZED)
    collections = [
        (module, {config.name: config.num_embeddings for config in tables_of(module)[1]})
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
        and type(module) in classes
    ]
    known = {name for _, tables in collections for name in tables}
    unknown = sorted(set(tables_to_rows_post_pruning) - known)
    if unknown:
        raise KeyError(
            f"there are no tables {unknown} in float collections; the tables are {sorted(known)}"
        )

    for _, tables in collections:
        for name, rows in tables.items():
            require_int(
                f"rows that are left of table {name!r}",
                tables_to_rows_post_pruning.get(name, rows),
                1,
                rows,
            )

    for module, _ in collections:
        setattr(
            module,
            MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT,
            dict(tables_to_rows_post_pruning),
        )

    return model


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: list[type[nn.Module]] | None = None,
    additional_mapping: dict[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
) -> nn.Module:
    """Quantize the ``EmbeddingBagCollection`` modules, and other given classes, of a model.

    Args:
        module: A collection, or a model with collections. The result is in ``eval`` mode, and
            frozen: no parameter requires gradients.
        dtype: Format of the tables.
        inplace: Whether the model itself is changed. If it is sharded, its tables stay as they are,
            with a warning; with ``inplace=False`` a sharded model is an error.
        additional_qconfig_spec_keys: Further classes to quantize.
        additional_mapping: The quantized class of each of them.
        output_dtype: Dtype of the collections' results.
        per_table_weight_dtype: Other formats for some tables, by name.

    Returns:
        The model with quantized collections.

    Raises:
        KeyError: A format is given for an unknown table, or a further class has no quantized class.
        TypeError: A format has a wrong type.
        ValueError: As in ``tutorec.quantize``.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> model = nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(10, 64, "item")]))
        >>> quantize_embeddings(model, torch.int8, inplace=False)[0].embedding_bags[
        ...     "item"
        ... ].weight.shape
        torch.Size([10, 80])

    Source:
        TorchRec's ``torchrec.inference.modules.quantize_embeddings``; ``tutorec.quantize`` takes
        all collections.
    """
    modules = module.named_modules()
    spread = next(
        filter(None, (spread_over_devices(path, submodule) for path, submodule in modules)), None
    )
    if inplace and spread is not None:
        warnings.warn(f"{spread} and stay as they are: {QUANTIZE_FIRST}", stacklevel=2)
        return module.eval()

    quantized_classes = {
        EmbeddingBagCollection: QUANTIZED[EmbeddingBagCollection],
        **(additional_mapping or {}),
    }
    selected = {
        module_class: quantized_classes[module_class]
        for module_class in [EmbeddingBagCollection, *(additional_qconfig_spec_keys or [])]
    }
    config = QuantConfig(output_dtype, dtype, per_table_weight_dtype)

    return swap_collections(module, config, selected, inplace=inplace).eval()


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: dict[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: dict[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float,
) -> nn.Module:
    """Quantize all collections of a model in place, with their operators as submodules ``tbes``.

    The model is then in ``eval`` mode and frozen: no parameter requires gradients.

    Args:
        model: A collection, whose quantized form is returned, or a model with collections.
        quantization_mapping: The quantized class of each float class, by the latter's
            ``torch.typename``; by default both collections.
        per_table_weight_dtype: Other formats for some tables, by name.
        fp_weight_dtype: TorchRec's, for tables with feature processors; has no effect.
        quantization_dtype: Format of the tables.
        output_dtype: Dtype of the collections' results.

    Returns:
        The model.

    Raises:
        KeyError: A format is given for an unknown table.
        TypeError: A format has a wrong type.
        ValueError: As in ``tutorec.quantize``; or no module has a class in the mapping.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingConfig
        >>> from tutorec.modules.embedding_collection import EmbeddingCollection
        >>> model = nn.Sequential(EmbeddingCollection([EmbeddingConfig(10, 64, "item")]))
        >>> quantize_inference_model(model)[0].embeddings["item"].weight.shape
        torch.Size([10, 80])

    Source:
        TorchRec's ``torchrec.inference.modules.quantize_inference_model``.
    """
    by_name = quantization_mapping
    if by_name is None:
        by_name = {
            torch.typename(float_class): quantized for float_class, quantized in QUANTIZED.items()
        }
    quantized_classes = {
        type(submodule): by_name[torch.typename(submodule)]
        for submodule in model.modules()
        if torch.typename(submodule) in by_name
    }
    if quantization_mapping is not None and not quantized_classes:
        raise ValueError(f"no module's class is in quantization_mapping: {[*quantization_mapping]}")

    quant_prep_enable_register_tbes(model, [*quantized_classes])
    config = QuantConfig(output_dtype, quantization_dtype, per_table_weight_dtype)
    return swap_collections(model, config, quantized_classes or QUANTIZED, inplace=True).eval()


def shard_quant_model(
    model: nn.Module,
    world_size: int = 1,
    compute_device: str = "cpu",
    sharding_device: str | None = None,
    sharders: Sequence[Any] | None = None,
    device_memory_size: int | None = None,
    constraints: Mapping[str, Any] | None = None,
    ddr_cap: int | None = None,
    sharding_plan: ShardingPlan | None = None,
) -> tuple[nn.Module, ShardingPlan]:
    """Shard the tables of a quantized model over the devices of this process.

    The result is frozen: no parameter requires gradients. A layer that another model goes on
    training belongs into this one as a copy, ``copy.deepcopy(layer)``.

    Args:
        model: The quantized model. Collections inside it are replaced in place; if it is a
            collection itself, its sharded form is returned.
        world_size: Number of devices; on the CPU they are virtual and share its memory.
        compute_device: ``"cpu"``, or ``"cuda"`` for ``cuda:0`` to ``cuda:world_size-1``.
        sharding_device: Device type of the shards; by default ``compute_device``.
        sharders: One sharder per class of collections; those of all quantized ones by default.
        device_memory_size: Bytes per device for tables; by default the GPU's memory, or 128 GiB on
            the CPU.
        constraints: Table name -> its constraints; by default every table is whole on one device.
        ddr_cap: Bytes of host memory per device.
        sharding_plan: The plan; made by `EmbeddingShardingPlanner` by default.

    Returns:
        The sharded model and its plan.

    Raises:
        PlannerError: No plan fits the devices; a table that is larger than one needs a constraint
            that cuts it.
        ValueError: There are not so many devices, nothing in the model is quantized, or the given
            plan does not fit.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.quant.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(8, 4, name, feature_names=[name])
        ...     for name in ("item", "user")
        ... ]
        >>> quantized = EmbeddingBagCollection(
        ...     tables, is_weighted=False, device=torch.device("cpu")
        ... )
        >>> sharded, plan = shard_quant_model(nn.Sequential(quantized), world_size=2)
        >>> (
        ...     type(sharded[0]).__name__,
        ...     {name: entry.ranks for name, entry in plan.plan["0"].items()},
        ... )
        ('ShardedQuantEmbeddingBagCollection', {'item': [0], 'user': [1]})

    Source:
        TorchRec's ``torchrec.inference.modules.shard_quant_model``, which supports GPUs only, and
        shards on ``meta``.
    """
    require_int("world_size", world_size, 1)
    sharders = [sharder() for sharder in QUANT_SHARDERS] if sharders is None else list(sharders)
    env = ShardingEnv.from_local(world_size, 0)

    collections = dict(collections_of(model, sharders))
    if not collections:
        raise ValueError(f"{type(model).__name__} is not quantized: tutorec.quantize(model) first")
    plan = sharding_plan
    if plan is None:
        if constraints is None:
            constraints = _whole_tables(
                name
                for collection, table_sharder in collections.values()
                for name in table_sharder.shardable_parameters(collection)
            )
        topology = _topology(world_size, compute_device, device_memory_size, ddr_cap)
        plan = _planned(model, sharders, topology, constraints)

    device = torch.device(sharding_device or compute_device)
    return _shard_modules(model, env, device, plan, sharders).requires_grad_(False), plan


def _whole_tables(names: Any) -> dict[str, Any]:
    """Constraints that keep every table whole; results equal the unsharded ones bit for bit."""
    from tutorec.distributed.planner.options import ParameterConstraints

    sharding_types = [ShardingType.TABLE_WISE.value]
    kernels = [EmbeddingComputeKernel.QUANT.value]
    return {
        name: ParameterConstraints(sharding_types=sharding_types, compute_kernels=kernels)
        for name in names
    }


def _topology(
    world_size: int, compute_device: str, device_bytes: int | None, ddr_cap: int | None
) -> Any:
    """The topology of the devices."""
    from tutorec.distributed.planner.topology import Topology

    if compute_device == "cpu":
        ddr_cap = device_bytes if ddr_cap is None else ddr_cap
        device_bytes = None
    elif device_bytes is None and compute_device == "cuda" and torch.cuda.is_available():
        device_bytes = min(
            torch.cuda.get_device_properties(i).total_memory
            for i in range(torch.cuda.device_count())
        )

    return Topology(
        world_size,
        compute_device,
        hbm_cap=device_bytes,
        ddr_cap=ddr_cap,
        local_world_size=world_size,
    )


def _planned(
    model: nn.Module, sharders: Sequence[Any], topology: Any, constraints: Mapping[str, Any]
) -> ShardingPlan:
    """The planner's plan, for one request at a time; all memory is available to tables."""
    from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
    from tutorec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    planner = EmbeddingShardingPlanner(
        topology,
        batch_size=1,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.0),
    )
    return planner.plan(model, sharders)
