"""Hand-written plans: one sharding type for each table.

Corresponds to TorchRec's ``torchrec.distributed.sharding_plan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from tutorec._check import is_int
from tutorec.distributed import comm
from tutorec.distributed.core.env import local_world_size
from tutorec.distributed.core.sharders import CollectionSharder, ModuleSharder
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from tutorec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from tutorec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from tutorec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import (
    TableShard,
    bucket_rows,
    column_wise_shards,
    data_parallel_shards,
    grid_shards,
    host_ranks,
    parameter_sharding,
    row_wise_shards,
    table_wise_shards,
)
from tutorec.distributed.plan.geometry import (
    calculate_shard_sizes_and_offsets as calculate_shard_sizes_and_offsets,
)
from tutorec.distributed.plan.geometry import placement as placement_of
from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from tutorec.distributed.plan.plan import ShardingPlan as ShardingPlan
from tutorec.distributed.quant_embedding import QUANT_SHARDERS
from tutorec.spmd.rank import device as own_device


@dataclass(frozen=True)
class Machine:
    """The ranks for which a plan is made.

    Args:
        world_size: W, number of ranks.
        local_size: Ranks per host.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: A number of ranks is less than 1, or the device type is unknown.
    """

    world_size: int
    local_size: int
    device_type: str

    def __post_init__(self) -> None:
        for name, number in (("world_size", self.world_size), ("local_size", self.local_size)):
            if not is_int(number, 1):
                raise ValueError(f"{name} is a number of ranks, at least 1, got {number!r}")

    def checked_rank(self, rank: int) -> int:
        """Return the rank if it exists; raise otherwise."""
        if not is_int(rank):
            raise TypeError(f"a rank is an integer from 0 to {self.world_size - 1}, got {rank!r}")
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"the world has {self.world_size} ranks, 0 to {self.world_size - 1}; "
                "pass world_size= to plan for another world"
            )
        return rank

    def checked_host(self, host: int) -> int:
        """Return the host if it exists; raise otherwise."""
        hosts = self.world_size // self.local_size
        if not is_int(host):
            raise TypeError(f"a host is an integer from 0 to {hosts - 1}, got {host!r}")
        if self.world_size % self.local_size:
            raise ValueError(
                f"{self.world_size} ranks cannot be divided into hosts of {self.local_size} ranks; "
                "pass local_size= and world_size= that divide"
            )

        if not 0 <= host < hosts:
            raise ValueError(
                f"host {host} does not exist; the {hosts} hosts are 0 to {hosts - 1}: "
                f"the world has {self.world_size} ranks, {self.local_size} per host; "
                "pass local_size= and world_size= to plan for other hosts"
            )
        return host


@dataclass(frozen=True, repr=False)
class ParameterShardingGenerator:
    """How one table will be sharded, before its shape is known; `table_wise` and others return it.

    Args:
        call: The call that made it, for messages: ``"table_wise(rank=1)"``.
        sharding_type: The sharding type.
        compute_kernel: The compute kernel; None for the default of the collection's sharder.
        cut: ``(R, D, machine)`` -> shards in plan order.
        devices: Device type of each shard; None for that of the plan.
    """

    call: str
    sharding_type: ShardingType
    compute_kernel: EmbeddingComputeKernel | None
    cut: Callable[[int, int, Machine], list[TableShard]]
    devices: Sequence[str] | None = None

    def __call__(
        self,
        param: torch.Tensor,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[Any],
    ) -> ParameterSharding:
        """Return the plan entry of a table; the signature of TorchRec's generators."""
        rows, columns = param.shape
        kernels = sharder.compute_kernels(self.sharding_type.value, device_type)
        machine = Machine(world_size, local_size, device_type)

        return self.generate(
            "of this parameter", (rows, columns), machine, _default_kernel(kernels)
        )

    def generate(
        self,
        table: str,
        shape: tuple[int, int],
        machine: Machine,
        default_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.FUSED,
    ) -> ParameterSharding:
        """Return the plan entry of a table.

        Args:
            table: Its name.
            shape: ``(R, D)``.
            machine: The ranks.
            default_kernel: The kernel to use if none was requested.
        """
        try:
            shards = self.cut(*shape, machine)
            devices = [machine.device_type] * len(shards) if self.devices is None else self.devices
            if len(devices) != len(shards):
                raise ValueError(
                    f"it names {len(devices)} devices for {len(shards)} shards; name one for each"
                )
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.call} for table {table!r}: {error}") from None

        kernel = self.compute_kernel or default_kernel
        return parameter_sharding(self.sharding_type, shards, devices, machine.local_size, kernel)

    def __repr__(self) -> str:
        return self.call


def data_parallel(compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """Replicate the table on every rank; backward exchanges gradients, forward sends nothing.

    Args:
        compute_kernel: An `EmbeddingComputeKernel` value; by default ``"fused"``, and ``"quant"``
            for quantized collections. The functions below have the same default.

    Example:
        >>> data_parallel()
        data_parallel()
    """
    return ParameterShardingGenerator(
        "data_parallel()",
        ShardingType.DATA_PARALLEL,
        _kernel(compute_kernel),
        lambda rows, columns, machine: data_parallel_shards(rows, columns, machine.world_size),
    )


def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Put the whole table on one rank.

    TorchRec's hand-written plans use the kernel ``dense`` by default, which ignores
    ``fused_params``.

    Args:
        rank: The rank.
        device: ``"cpu"`` or ``"cuda"``, stored in the plan; by default that of the plan. Quantized
            collections use it, since one process drives their devices. A trained table is always on
            its rank's own device.
        compute_kernel: As in `data_parallel`.

    Raises:
        ValueError: There is no such kernel.

    Example:
        >>> table_wise(rank=1)
        table_wise(rank=1)
    """
    return ParameterShardingGenerator(
        f"table_wise(rank={rank})",
        ShardingType.TABLE_WISE,
        _kernel(compute_kernel),
        lambda rows, columns, machine: table_wise_shards(rows, columns, machine.checked_rank(rank)),
        None if device is None else (_device_type(device),),
    )


def row_wise(
    sizes_placement: tuple[Sequence[int], str | Sequence[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: int | None = None,
) -> ParameterShardingGenerator:
    """Split the table by rows over all ranks, ``ceil(R / W)`` each; the last ranks may have fewer.

    Args:
        sizes_placement: Rows of each rank, which add up to at least R, and the device of all or of
            each; see `table_wise`.
        compute_kernel: As in `data_parallel`.
        num_buckets: Split between buckets of ``R / num_buckets`` rows only; the first ranks get one
            more bucket.

    Raises:
        ValueError: Sizes and buckets are both given, or the sizes add up to less than R.

    Example:
        >>> row_wise(), row_wise(([10, 6], "cpu"))
        (row_wise(), row_wise(sizes_placement=([10, 6], 'cpu')))
    """
    if sizes_placement is None:
        call = "row_wise()" if num_buckets is None else f"row_wise(num_buckets={num_buckets})"

        def cut(rows: int, columns: int, machine: Machine) -> list[TableShard]:
            sizes = (
                None if num_buckets is None else bucket_rows(rows, machine.world_size, num_buckets)
            )
            return row_wise_shards(rows, columns, range(machine.world_size), sizes)

        return ParameterShardingGenerator(call, ShardingType.ROW_WISE, _kernel(compute_kernel), cut)

    if num_buckets is not None:
        raise ValueError(f"row_wise takes sizes or num_buckets={num_buckets}, not both")
    sizes = list(sizes_placement[0])
    placement = sizes_placement[1]
    devices = [placement] * len(sizes) if isinstance(placement, str) else list(placement)

    return ParameterShardingGenerator(
        f"row_wise(sizes_placement={(sizes, placement)})",
        ShardingType.ROW_WISE,
        _kernel(compute_kernel),
        lambda rows, columns, machine: row_wise_shards(rows, columns, range(len(sizes)), sizes),
        [_device_type(device) for device in devices],
    )


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
    device_types: Sequence[str] | None = None,
) -> ParameterShardingGenerator:
    """Split the table by columns over several ranks.

    Args:
        ranks: The rank of each shard, in column order; a rank may occur several times. By default
            all ranks, or as many of the first ranks as there are sizes.
        size_per_rank: D of each shard; a rank with 0 holds no shard. By default all are equal.
        compute_kernel: As in `data_parallel`.
        device_types: The device of each shard; see `table_wise`.

    Raises:
        TypeError: A size is not an integer.

    Example:
        >>> column_wise(ranks=[0, 1]), column_wise(size_per_rank=[16, 48])
        (column_wise(ranks=[0, 1]), column_wise(size_per_rank=[16, 48]))
    """
    passed = {"ranks": ranks, "size_per_rank": size_per_rank}
    arguments = ", ".join(
        f"{name}={list(numbers)}" for name, numbers in passed.items() if numbers is not None
    )

    sizes = list(size_per_rank) if size_per_rank is not None else None
    if sizes is not None and not all(map(is_int, sizes)):
        raise TypeError(f"size_per_rank lists whole numbers of columns, got {sizes}")

    def cut(rows: int, columns: int, machine: Machine) -> list[TableShard]:
        holders = (
            list(ranks)
            if ranks is not None
            else list(range(len(sizes or range(machine.world_size))))
        )
        return _columns_cut(rows, columns, [machine.checked_rank(rank) for rank in holders], sizes)

    devices = None if device_types is None else [_device_type(device) for device in device_types]
    kernel = _kernel(compute_kernel)
    return ParameterShardingGenerator(
        f"column_wise({arguments})", ShardingType.COLUMN_WISE, kernel, cut, devices
    )


def table_row_wise(
    host_index: int, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Split the table by rows over the ranks of one host.

    Args:
        host_index: The host, from 0.
        compute_kernel: As in `data_parallel`.

    Example:
        >>> table_row_wise(host_index=1)
        table_row_wise(host_index=1)
    """

    def cut(rows: int, columns: int, machine: Machine) -> list[TableShard]:
        return row_wise_shards(
            rows, columns, host_ranks(machine.checked_host(host_index), machine.local_size)
        )

    return ParameterShardingGenerator(
        f"table_row_wise(host_index={host_index})",
        ShardingType.TABLE_ROW_WISE,
        _kernel(compute_kernel),
        cut,
    )


def table_column_wise(
    host_index: int | None = None,
    ranks: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Split the table by columns over ranks of one host; TorchRec has no function for it.

    Give either a host or ranks.

    Args:
        host_index: The host, from 0; its ranks share the columns.
        ranks: The ranks, all of one host, in column order.
        compute_kernel: As in `data_parallel`.

    Raises:
        ValueError: Both a host and ranks are given, or neither.

    Example:
        >>> table_column_wise(host_index=1), table_column_wise(ranks=[2, 3])
        (table_column_wise(host_index=1), table_column_wise(ranks=[2, 3]))
    """
    if (host_index is None) == (ranks is None):
        raise ValueError(
            f"table_column_wise takes a host or ranks of one host, got host_index={host_index} and "
            f"ranks={ranks}: table_column_wise(host_index=0)"
        )
    arguments = f"host_index={host_index}" if ranks is None else f"ranks={list(ranks)}"

    def cut(rows: int, columns: int, machine: Machine) -> list[TableShard]:
        if ranks is None:
            assert host_index is not None, "one of the two is given, which has been checked"
            holders = list(host_ranks(machine.checked_host(host_index), machine.local_size))
        else:
            holders = [machine.checked_rank(rank) for rank in ranks]
            hosts = sorted({rank // machine.local_size for rank in holders})
            if len(hosts) > 1:
                raise ValueError(
                    f"its ranks are on hosts {hosts}, {machine.local_size} ranks per host, and "
                    f"must share one; column_wise(ranks={holders}) takes ranks of any host"
                )
        return _columns_cut(rows, columns, holders, None)

    return ParameterShardingGenerator(
        f"table_column_wise({arguments})",
        ShardingType.TABLE_COLUMN_WISE,
        _kernel(compute_kernel),
        cut,
    )


def grid_shard(
    host_indexes: Sequence[int], compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Split the table by columns over hosts, and each column shard by rows over its host's ranks.

    Args:
        host_indexes: The hosts, from 0, in column order.
        compute_kernel: As in `data_parallel`.

    Example:
        >>> grid_shard(host_indexes=[0, 1])
        grid_shard(host_indexes=[0, 1])
    """
    hosts = list(host_indexes)

    def cut(rows: int, columns: int, machine: Machine) -> list[TableShard]:
        checked = [machine.checked_host(host) for host in hosts]
        return grid_shards(
            rows, _equal_widths(columns, checked, "hosts"), checked, machine.local_size
        )

    return ParameterShardingGenerator(
        f"grid_shard(host_indexes={hosts})", ShardingType.GRID_SHARD, _kernel(compute_kernel), cut
    )


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[Any] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """The same sharding for every table of a module, for `construct_module_sharding_plan`.

    Args:
        module: An unsharded collection.
        parameter_sharding_generator: How to shard each table.
        sharder: The sharder of ``module``; the default sharder of its class if None.

    Raises:
        TypeError: It is not a generator: for example ``row_wise`` instead of ``row_wise()``.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(8, 4, "products", feature_names=["item"])]
        ... )
        >>> plan = construct_module_sharding_plan(
        ...     ebc, apply_to_all(ebc, row_wise()), world_size=2
        ... )
        >>> plan["products"].ranks, [shard.shard_sizes for shard in plan["products"].shards()]
        ([0, 1], [[4, 4], [4, 4]])
    """
    if not isinstance(parameter_sharding_generator, ParameterShardingGenerator):
        raise TypeError(f"every table is given {_shown(parameter_sharding_generator)}: {_REMEDY}")
    sharder = sharder if sharder is not None else default_sharder(module)
    return {name: parameter_sharding_generator for name in sharder.shardable_parameters(module)}


def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Make the plan of one module from a generator for each of its tables.

    Args:
        module: An unsharded collection; it may be on the meta device.
        per_param_sharding: Table name -> `table_wise`, `row_wise` and so on, for every table; or a
            function ``(parameter, local_size, world_size, device_type, sharder) ->
            ParameterSharding``.
        sharder: The sharder of ``module``; the default sharder of its class if None.
        local_size: Ranks per host; by default ``LOCAL_WORLD_SIZE``, else all ranks.
        world_size: W; by default that of the process group, else 1.
        device_type: ``"cuda"`` or ``"cpu"``; by default that of :func:`tutorec.spmd.device`.

    Raises:
        TypeError: Not a dict of generators, or an argument of a generator is not a number.
        ValueError: A table is missing, or cannot be sharded by its generator.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(8, 4, "products", feature_names=["item"])]
        ... )
        >>> plan = construct_module_sharding_plan(
        ...     ebc, {"products": table_wise(rank=1)}, world_size=2
        ... )
        >>> plan["products"].ranks, plan["products"].compute_kernel
        ([1], 'fused')

    Source:
        TorchRec's ``torchrec.distributed.sharding_plan.construct_module_sharding_plan``.
    """
    sharder = sharder if sharder is not None else default_sharder(module)
    parameters = sharder.shardable_parameters(module)
    if not isinstance(per_param_sharding, Mapping):
        raise TypeError(
            f"per_param_sharding maps each table to a generator, got {_shown(per_param_sharding)}: "
            f"{{{next(iter(parameters), 'table')!r}: row_wise(), ...}}, or apply_to_all(module, "
            "row_wise())"
        )

    missing = [name for name in parameters if name not in per_param_sharding]
    surplus = [name for name in per_param_sharding if name not in parameters]
    if missing or surplus:
        raise ValueError(
            f"per_param_sharding must name each table of the module once: missing {missing}, "
            f"unknown {surplus}; its tables are {list(parameters)}"
        )

    group = comm.default_group()
    if world_size is None:
        world_size = group.size() if group is not None else 1
    if local_size is None:
        local_size = local_world_size() or world_size
    machine = Machine(world_size, local_size, _device_type(device_type))

    plan = EmbeddingModuleShardingPlan()
    for name, parameter in parameters.items():
        rows, columns = parameter.shape
        generator = per_param_sharding[name]
        if isinstance(generator, ParameterShardingGenerator):
            kernels = sharder.compute_kernels(generator.sharding_type.value, machine.device_type)
            plan[name] = generator.generate(
                name, (rows, columns), machine, _default_kernel(kernels)
            )
        elif callable(generator) and generator not in _CONSTRUCTORS.values():
            plan[name] = generator(parameter, local_size, world_size, machine.device_type, sharder)
        else:
            raise TypeError(f"table {name!r} is given {_shown(generator)}: {_REMEDY}")

    return plan


_CONSTRUCTORS: dict[ShardingType, Callable[..., ParameterShardingGenerator]] = {
    ShardingType.DATA_PARALLEL: data_parallel,
    ShardingType.TABLE_WISE: table_wise,
    ShardingType.COLUMN_WISE: column_wise,
    ShardingType.ROW_WISE: row_wise,
    ShardingType.TABLE_ROW_WISE: table_row_wise,
    ShardingType.TABLE_COLUMN_WISE: table_column_wise,
    ShardingType.GRID_SHARD: grid_shard,
}


def get_sharding_constructor_from_type(
    sharding_type: ShardingType,
) -> Callable[..., ParameterShardingGenerator]:
    """Return the function of this module for a sharding type.

    Example:
        >>> get_sharding_constructor_from_type(ShardingType.TABLE_WISE)(rank=1)
        table_wise(rank=1)

    Source:
        TorchRec's ``torchrec.distributed.sharding_plan.get_sharding_constructor_from_type``.
    """
    return _CONSTRUCTORS[sharding_type]


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """The placement of a shard, in torch's notation; with TorchRec's order of arguments.

    Example:
        >>> placement("cuda", rank=3, local_size=2)
        'rank:3/cuda:1'

    Source:
        TorchRec's ``torchrec.distributed.sharding_plan.placement``.
    """
    return placement_of(rank, compute_device, local_size)


_DEFAULT_SHARDERS: tuple[type[CollectionSharder[Any]], ...] = (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
    *QUANT_SHARDERS,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
)


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """One sharder with default settings for each class of modules that can be sharded.

    Example:
        >>> [type(sharder).__name__ for sharder in get_default_sharders()[:2]]
        ['EmbeddingBagCollectionSharder', 'EmbeddingCollectionSharder']

    Source:
        TorchRec's ``torchrec.distributed.sharding_plan.get_default_sharders``.
    """
    return [sharder() for sharder in _DEFAULT_SHARDERS]


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """Class of a collection -> its sharder with default settings.

    Example:
        >>> kinds = [kind.__module__.split(".")[1] for kind in get_module_to_default_sharders()]
        >>> kinds.count("modules"), kinds.count("quant")
        (6, 4)

    Source:
        TorchRec's ``torchrec.distributed.sharding_plan.get_module_to_default_sharders``.
    """
    return {sharder.unsharded_class: sharder() for sharder in _DEFAULT_SHARDERS}


def default_sharder(module: nn.Module) -> ModuleSharder[Any]:
    """The sharder of the module's class with default settings.

    Args:
        module: A collection.

    Raises:
        ValueError: No default sharder shards modules of its class.
    """
    for sharder in _DEFAULT_SHARDERS:
        if sharder.unsharded_class is type(module):
            return sharder()

    # The quantized collections have the class names of the float collections.
    names = dict.fromkeys(sharder.unsharded_class.__name__ for sharder in _DEFAULT_SHARDERS)
    raise ValueError(
        f"there is no sharder for a {type(module).__name__}: pass sharder=, or a module of "
        f"{', '.join(names)}; shard_modules shards those inside a model"
    )


def _default_kernel(built: Sequence[str]) -> EmbeddingComputeKernel:
    """The default kernel of a sharder: fused if supported, else its first kernel."""
    fused = EmbeddingComputeKernel.FUSED
    return fused if fused.value in built or not built else EmbeddingComputeKernel(built[0])


_REMEDY = "pass table_wise(rank=0), row_wise() or another generator"


def _shown(value: object) -> str:
    """Text of an invalid value, for messages; for a function that was not called, its name."""
    return (
        f"{value.__name__}, which is not called" if isinstance(value, FunctionType) else repr(value)
    )


def _device_type(given: str | torch.device | None) -> str:
    """The device type, ``"cpu"`` or ``"cuda"``, in torch's spelling."""
    if given is None:
        return own_device().type
    try:
        return torch.device(given).type
    except RuntimeError:
        raise ValueError(f"device_type {given!r} is not a device type: 'cpu' or 'cuda'") from None


def _kernel(compute_kernel: str | None) -> EmbeddingComputeKernel | None:
    if compute_kernel is None:
        return None
    try:
        return EmbeddingComputeKernel(compute_kernel)
    except ValueError:
        names = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
        raise ValueError(f"kernel {compute_kernel!r} is unknown: use one of {names}") from None


def _columns_cut(
    rows: int, columns: int, ranks: list[int], sizes: list[int] | None
) -> list[TableShard]:
    """Column shards on ``ranks``, of equal widths unless sizes are given."""
    if sizes is None:
        return column_wise_shards(rows, _equal_widths(columns, ranks, "ranks"), ranks)
    if len(sizes) != len(ranks) or min(sizes, default=0) < 0 or sum(sizes) != columns:
        raise ValueError(
            f"{len(sizes)} sizes add up to {sum(sizes)}, for {len(ranks)} ranks and a table of "
            f"{columns} columns; give one size, at least 0, for each rank, {columns} in all"
        )
    return [shard for shard in column_wise_shards(rows, sizes, ranks) if shard.columns]


def _equal_widths(columns: int, holders: list[int], what: str) -> list[int]:
    """D of the column shard of each rank or host."""
    if not holders:
        raise ValueError(f"it names no {what} to hold the columns; name at least one")
    if columns % len(holders):
        fitting = max(count for count in range(1, len(holders) + 1) if columns % count == 0)
        raise ValueError(
            f"its {columns} columns do not divide by {len(holders)} {what}; {fitting} of them "
            f"would do, {holders[:fitting]}, or column_wise(ranks, size_per_rank=[...]) with a "
            "width for each rank"
        )

    return [columns // len(holders)] * len(holders)
