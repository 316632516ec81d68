"""Cost model: milliseconds of one training step that a shard takes on its rank.

One short function per sharding type counts the work of each shard (`Work`): ids looked up, row
elements returned, bytes received and sent, for expected batches. `shard_perf` divides them by the
speeds of the machine. Names in parentheses, such as (eq-cost-tw), are those of the equations in the
book.

W ranks, L per host, H = W / L hosts. The table has R rows and D columns. One rank's batch has S
bags and N ids, over all features. A shard has r rows and d columns; ids are assumed to be uniform
over rows, so n = N * r / R ids of each rank fall into the shard. On the wire an id takes b_i bytes
(4, or 8 where R is 2 ** 31 or more), its weight b_w (4, or 0), a row element b_r, a gradient
element b_g. The holder of a shard sends and receives in a step::

                      from each rank             looked up    to each rank         back
    tw, cw, twcw      b_i * (S + N) + b_w * N    W * N        b_r * S * d          b_g * S * d
    rw                b_i * (S + n) + b_w * n    W * n        b_r * S * d          b_g * S * d
    twrw, grid        as rw                      W * n        in two steps         in two steps
    dp                nothing                    N            nothing              batch, or R * D
    not pooled        as above                   as above     b_r * n * d          b_g * n * d

An exchange takes the time of the slower of two links, which work in parallel: the one inside the
host and the one to other hosts. `fixed_cost`, the latency of the exchanges, is added per collection
and sharding type.

Register a model for a new kernel here, and the planner considers it::

    register_kernel(
        "dense", KernelModel(row_bandwidth=lambda t: t.ddr_mem_bw / 2, updates=False)
    )
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.plan.plan import SHARDING_TRAITS, EmbeddingComputeKernel, ShardingType
from tutorec.distributed.planner.constants import (
    DENSE_BANDWIDTH,
    DENSE_GRADIENT_PASSES,
    ROW_READ_BYTES,
)
from tutorec.distributed.planner.options import TableProfile
from tutorec.distributed.planner.topology import PERF_FIELDS, CollectiveType, Floats, Ints, Topology
from tutorec.errors import PlannerError, PlannerErrorType

_FLOAT = 4  # bytes of an element in computation
_ID = 8  # bytes of an id in memory

Size = tuple[int, int]  # rows and columns of a shard


# Kernels


def device_bandwidth(topology: Topology) -> float:
    """Bandwidth of the memory that a rank computes in, in bytes per ms.

    Example:
        >>> (
        ...     device_bandwidth(Topology(1, "cuda", hbm_mem_bw=5.0)),
        ...     device_bandwidth(Topology(1, "cpu", ddr_mem_bw=3.0)),
        ... )
        (5.0, 3.0)
    """
    return topology.ddr_mem_bw if topology.compute_device == "cpu" else topology.hbm_mem_bw


def slower_bandwidth(topology: Topology) -> float:
    """Bandwidth to the next slower memory, in bytes per ms: disk on the CPU, else host memory.

    Example:
        >>> slower_bandwidth(Topology(1, "cpu", ssd_mem_bw=2.0))
        2.0
    """
    return topology.ssd_mem_bw if topology.compute_device == "cpu" else topology.hbm_to_ddr_mem_bw


def on_device(topology: Topology, stored: Ints, slower: int = 0) -> Ints:
    """Place rows in device memory: bytes ``[P]`` -> ``[P, 3]``, HBM, DDR and SSD.

    Args:
        topology: The machines.
        stored: Bytes of each shard.
        slower: 1 for the next slower memory: SSD on the CPU, else DDR.

    Example:
        >>> on_device(Topology(1, "cpu"), np.array([7])).tolist()
        [[0, 7, 0]]
    """
    memory = np.zeros((len(stored), 3), dtype=np.int64)
    memory[:, (topology.compute_device == "cpu") + slower] = stored
    return memory


@dataclass(frozen=True)
class KernelModel:
    """The planner's model of a kernel.

    Args:
        row_bandwidth: Bytes per ms of lookups and updates, on a topology.
        updates: Whether backward updates the rows and stores optimizer state; if false, it fills a
            gradient of the shard's size.
        memory: The memory of rows and state: ``(topology, bytes [P]) -> [P, 3]``, HBM, DDR and SSD.
        devices: Device types that support it.
        serves: Whether it is for serving by one process that drives all devices: no updates; ids
            and rows are copied between the process and its devices.

    Example:
        >>> registered_kernels()["fused"].updates, registered_kernels()["dense"].updates
        (True, False)
    """

    row_bandwidth: Callable[[Topology], float] = device_bandwidth
    updates: bool = True
    memory: Callable[[Topology, Ints], Ints] = on_device
    devices: tuple[str, ...] = ("cpu", "cuda", "mtia")
    serves: bool = False


_kernels: dict[str, KernelModel] = {}


def register_kernel(value: str, model: KernelModel) -> None:
    """Register a kernel for the planner, or replace its model.

    Args:
        value: The `EmbeddingComputeKernel` value.
        model: Its model.

    Raises:
        PlannerError: There is no kernel of that name.
    """
    names = [kernel.value for kernel in EmbeddingComputeKernel]
    if value not in names:
        raise PlannerError(
            f"compute kernel {value!r} is unknown: register one of {', '.join(names)}",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )

    _kernels[value] = model


def registered_kernels(device: str | None = None) -> dict[str, KernelModel]:
    """Value -> model of the registered kernels, all or those that run on ``device``.

    Example:
        >>> sorted(registered_kernels("cpu"))
        ['dense', 'fused', 'fused_uvm', 'fused_uvm_caching', 'quant']
    """
    return {
        value: model
        for value, model in _kernels.items()
        if device is None or device in model.devices
    }


def kernel_model(value: str) -> KernelModel:
    """The model of a kernel, by its current or older name.

    Raises:
        PlannerError: No model is registered.

    Example:
        >>> kernel_model("batched_fused") is kernel_model("fused")
        True
    """
    model = _kernels.get(value.removeprefix("batched_"))
    if model is None:
        raise PlannerError(
            f"the planner cannot estimate the compute kernel {value!r}: it knows "
            f"{', '.join(_kernels)}; register_kernel(value, KernelModel(...)) adds one",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )

    return model


register_kernel("fused", KernelModel())
for _value in ("fused_uvm", "fused_uvm_caching"):
    register_kernel(_value, KernelModel(memory=partial(on_device, slower=1)))
register_kernel(
    "dense",
    KernelModel(lambda topology: DENSE_BANDWIDTH * device_bandwidth(topology), updates=False),
)
register_kernel("quant", KernelModel(devices=("cpu", "cuda"), serves=True))


# Work


class Leg(NamedTuple):
    """Bytes that the holder of a shard sends or receives in one exchange.

    Args:
        inside: From or to the other ranks of its host.
        across: From or to ranks of other hosts.
        collective: Kind of collective.
    """

    inside: float
    across: float
    collective: CollectiveType = CollectiveType.ALL_TO_ALL

    def ms(self, topology: Topology) -> float:
        """Milliseconds of the slower link (eq-cost-wire)."""
        bandwidths = topology.comms_bandwidths
        local = topology.intra_group_size
        return max(
            self.inside / bandwidths.get_bw(local, local, self.collective) if self.inside else 0.0,
            self.across / bandwidths.get_bw(local, topology.world_size, self.collective)
            if self.across
            else 0.0,
        )


class Work(NamedTuple):
    """The work of the holder of a shard in a step.

    Args:
        lookups: Ids looked up in forward.
        outputs: Elements returned in forward: partial sums of bags, or unpooled rows.
        updates: Ids whose rows are updated in backward.
        gradients: Elements of row gradients received in backward.
        lists: Lengths of bags received with the ids.
        table: Elements of table gradients that are summed over ranks (data-parallel).
        twice: Whether backward looks the updated ids up again (data-parallel).
        ids_in: Bytes of received ids, lengths and weights, per exchange.
        rows_home: Bytes of rows sent back.
        gradients_back: Bytes of received gradients.
    """

    lookups: float
    outputs: float
    updates: float
    gradients: float
    lists: float
    table: float = 0.0
    twice: bool = False
    ids_in: tuple[Leg, ...] = ()
    rows_home: tuple[Leg, ...] = ()
    gradients_back: tuple[Leg, ...] = ()


def table_wise_work(
    table: TableProfile,
    size: Size,
    topology: Topology,
    rows_collective: CollectiveType = CollectiveType.ALL_TO_ALL,
    gradients_collective: CollectiveType = CollectiveType.ALL_TO_ALL,
) -> Work:
    """Table-wise: the holder looks up all ranks' ids and returns their rows (eq-cost-tw).

    It receives ``b_i * (S + N) + b_w * N`` bytes of ids from each rank, makes W * N lookups, and
    sends ``b_r * S * d`` bytes of rows to each rank. A column shard is a table of d columns, which
    gets all ids (eq-cost-cw); a shard of r rows gets n of the N ids.

    Args:
        table: The table.
        size: Rows and columns of the shard.
        topology: The machines.
        rows_collective: The collective that returns rows.
        gradients_collective: The collective that sends their gradients.
    """
    shard_ids = table.total_ids * size[0] / max(table.rows, 1)
    bags = table.total_samples
    rows = bags if table.pooled else shard_ids
    inside, across = _peers(topology)
    ids_in = id_wire_bytes(table.rows) * (bags + shard_ids) + _weight_bytes(table) * shard_ids
    rows_home = table.row_wire_bytes * rows * size[1]
    gradients_back = table.gradient_wire_bytes * rows * size[1]
    world_size = topology.world_size

    return Work(
        lookups=world_size * shard_ids,
        outputs=world_size * rows,
        updates=world_size * shard_ids,
        gradients=world_size * rows,
        lists=world_size * bags,
        ids_in=(Leg(inside * ids_in, across * ids_in),),
        rows_home=(Leg(inside * rows_home, across * rows_home, rows_collective),),
        gradients_back=(
            Leg(inside * gradients_back, across * gradients_back, gradients_collective),
        ),
    )


def row_wise_work(table: TableProfile, size: Size, topology: Topology) -> Work:
    """Row-wise: the holder returns a partial sum of every bag of every rank (eq-cost-rw).

    It receives ``b_i * (S + n) + b_w * n`` bytes of ids from each rank, makes W * n lookups, and
    sends ``b_r * S * D`` bytes of rows to each rank.
    """
    return table_wise_work(
        table, size, topology, CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER
    )


def table_row_wise_work(table: TableProfile, size: Size, topology: Topology) -> Work:
    """Table-row-wise: row-wise inside a host, then one sum per sample between hosts (eq-cost-twrw).

    The holder sends ``b_r * H * S * d`` bytes to each of the L - 1 other ranks of its host, then
    ``b_r * S * d`` to one rank of each of the H - 1 other hosts; gradients in reverse. Unpooled
    rows are sent to their ranks directly. Each column shard of a grid is such a table
    (eq-cost-grid).
    """
    work = table_wise_work(table, size, topology)
    if not table.pooled:
        return work

    hosts = topology.num_hosts
    peers = topology.intra_group_size - 1
    numbers = table.total_samples * size[1]

    def two_steps(wire_bytes: int) -> tuple[Leg, Leg]:
        inside = Leg(wire_bytes * hosts * peers * numbers, 0.0, CollectiveType.REDUCE_SCATTER)
        return inside, Leg(0.0, wire_bytes * (hosts - 1) * numbers)

    rows_home = two_steps(table.row_wire_bytes)
    gradients_back = two_steps(table.gradient_wire_bytes)[::-1]
    return work._replace(rows_home=rows_home, gradients_back=gradients_back)


def data_parallel_work(table: TableProfile, size: Size, topology: Topology) -> Work:
    """Data-parallel: a rank looks up its own ids and exchanges gradients in backward (eq-cost-dp).

    It sends each rank ``b_i * (S + N) + b_w * N + 4 * S * D`` bytes, its batch with the gradients
    of its rows, and every rank looks all batches up again and applies their update. If all batches
    together exceed ``8 * R * D`` bytes, gradients of the whole table are summed instead:
    ``8 * R * D / W`` bytes to each rank, and every rank updates all rows with the sum.
    """
    world_size = topology.world_size
    ids = table.total_ids
    table_elements = float(table.rows * table.columns)
    lists = table.total_samples if table.pooled else 0.0
    bags = lists if table.pooled else ids
    batch = (id_wire_bytes(table.rows) + _weight_bytes(table)) * ids + _FLOAT * bags * table.columns
    work = Work(ids, bags, ids, bags, lists)
    if world_size == 1:
        return work

    in_sum = fewer_bytes_as_sum(world_size * (batch + _FLOAT * lists), table_elements)
    sent = (
        2 * _FLOAT * table_elements / world_size
        if in_sum
        else batch + id_wire_bytes(table.rows) * lists
    )
    inside, across = _peers(topology)
    back = Leg(inside * sent, across * sent, CollectiveType.ALL_GATHER)
    if in_sum:
        return work._replace(table=table_elements, gradients_back=(back,))

    return work._replace(
        updates=world_size * ids,
        gradients=world_size * bags,
        lists=world_size * lists,
        twice=True,
        gradients_back=(back,),
    )


def _work_of(sharding_type: ShardingType) -> Callable[[TableProfile, Size, Topology], Work]:
    """The function that counts the work of a type; it follows from where the rows of a bag are."""
    if sharding_type is ShardingType.DATA_PARALLEL:
        return data_parallel_work
    traits = SHARDING_TRAITS[sharding_type]
    if traits.splits_rows_in_host:
        return table_row_wise_work
    return row_wise_work if traits.splits_rows else table_wise_work


WORK = {sharding_type: _work_of(sharding_type) for sharding_type in ShardingType}


def serving_work(table: TableProfile, size: Size, topology: Topology) -> Work:
    """Serving: one process sends ids to its devices and gets rows back (eq-cost-serve).

    For a shard's n ids and S bags: ``b_i * (S + n) + b_w * n`` bytes to its device, n lookups, ``4
    * S * d`` bytes back. CPU devices share one memory, and nothing is copied.
    """
    shard_ids = table.total_ids * size[0] / max(table.rows, 1)
    bags = table.total_samples
    rows = bags if table.pooled else shard_ids
    apart = topology.compute_device != "cpu" and topology.world_size > 1
    ids_in = Leg(
        id_wire_bytes(table.rows) * (bags + shard_ids) + _weight_bytes(table) * shard_ids, 0.0
    )
    rows_home = Leg(_FLOAT * rows * size[1], 0.0)

    return Work(
        lookups=shard_ids,
        outputs=rows,
        updates=0.0,
        gradients=0.0,
        lists=bags,
        ids_in=(ids_in,) if apart else (),
        rows_home=(rows_home,) if apart else (),
    )


def work_counter(
    kernel: KernelModel, sharding_type: ShardingType
) -> Callable[[TableProfile, Size, Topology], Work]:
    """The function that counts the work of a shard.

    Example:
        >>> work_counter(kernel_model("quant"), ShardingType.ROW_WISE).__name__
        'serving_work'
    """
    return serving_work if kernel.serves else WORK[sharding_type]


def shard_perf(
    table: TableProfile,
    sharding_type: ShardingType,
    compute_kernel: str,
    sizes: Ints,
    topology: Topology,
) -> Floats:
    """Milliseconds of a step that each shard takes on its rank, ``[P, 6]``, in the order of `Perf`.

    A lookup of i ids that returns s rows of d columns moves ``i * (8 + max(4 * d, 128)) + s * 4 *
    d`` bytes at the bandwidth of the kernel (eq-cost-forward). The update moves the same bytes
    times the topology's multiplier, once more where rows are looked up again (data-parallel), plus
    five times the bytes of a dense gradient, plus ``row_ms`` per distinct row (eq-cost-backward).
    Exchanges take the time of their slower link (eq-cost-wire). For a table in a file, each row
    that misses the cache is read with its optimizer state, and written back later.

    Args:
        table: The table.
        sharding_type: Its sharding type.
        compute_kernel: `EmbeddingComputeKernel` value.
        sizes: ``[P, 2]`` rows and columns of the shards.
        topology: The machines.

    Returns:
        The milliseconds; read-only, since shards of equal size share memory.

    Raises:
        PlannerError: The kernel has no model.

    Example:
        >>> table = TableProfile(
        ...     "", "item", 1000, 32, features=("f",), samples=(10.0,), ids=(20.0,)
        ... )
        >>> machine = Topology(2, "cuda", hbm_mem_bw=1.0, intra_host_bw=1.0)
        >>> shard_perf(
        ...     table, ShardingType.TABLE_WISE, "fused", np.array([[1000, 32]]), machine
        ... ).tolist()
        [[8000.0, 1280.0, 16000.0, 1280.0, 120.0, 0.0]]
    """
    kernel = kernel_model(compute_kernel)
    count = work_counter(kernel, sharding_type)
    return for_each_size(
        sizes,
        lambda size: _perf(table, kernel, size, count(table, size, topology), topology),
        len(PERF_FIELDS),
    )


def fixed_cost(topology: Topology, sharding_type: str, pooled: bool) -> float:
    """Fixed milliseconds of the exchanges of a collection and sharding type (eq-cost-fixed).

    It is the topology's latency times the number of `exchanges`.

    Args:
        topology: The machines.
        sharding_type: `ShardingType` value.
        pooled: Whether the collection pools.

    Example:
        >>> fixed_cost(Topology(2, "cuda", latency_ms=0.5), "table_wise", pooled=True)
        2.0
    """
    return topology.latency_ms * exchanges(topology, ShardingType(sharding_type), pooled)


def exchanges(topology: Topology, sharding_type: ShardingType, pooled: bool) -> int:
    """Number of sequential exchanges in a step of a collection and sharding type.

    There are four: sizes, ids, rows and gradients. Table-row-wise sums take two steps each way on
    several hosts of several ranks. Replicas exchange sizes, ids and gradients, in backward only.

    Example:
        >>> exchanges(Topology.hosts(2, 2), ShardingType.TABLE_ROW_WISE, pooled=True)
        6
    """
    if topology.world_size == 1:
        return 0
    if sharding_type is ShardingType.DATA_PARALLEL:
        return 3
    if pooled and SHARDING_TRAITS[sharding_type].splits_rows_in_host:
        return 2 + 2 * ((topology.intra_group_size > 1) + (topology.num_hosts > 1))

    return 4


def for_each_size(
    sizes: Ints,
    line: Callable[[Size], Sequence[float]],
    count: int,
    dtype: type[np.generic] = np.float64,
) -> NDArray[Any]:
    """``count`` numbers of each shard, ``[P, count]``, computed once for each distinct size.

    Thousands of shards have two or three distinct sizes, and neighbours mostly the same one.

    Args:
        sizes: ``[P, 2]`` rows and columns of the shards.
        line: The numbers of a shard of this size.
        count: How many they are.
        dtype: Their type.

    Returns:
        The numbers; read-only, since shards of equal size share memory.

    Example:
        >>> for_each_size(np.array([[3, 4], [3, 4], [1, 4]]), lambda size: size, 2).tolist()
        [[3.0, 4.0], [3.0, 4.0], [1.0, 4.0]]
    """
    differ = (sizes[1:] != sizes[:-1]).any(axis=1)
    starts = np.flatnonzero(np.concatenate([[True], differ]))[: len(sizes)]
    run_sizes = [(rows, columns) for rows, columns in sizes[starts].tolist()]
    lines = {size: line(size) for size in dict.fromkeys(run_sizes)}
    numbers = np.array([lines[size] for size in run_sizes], dtype).reshape(-1, count)

    if len(numbers) == 1:
        return np.broadcast_to(numbers, (len(sizes), count))
    return np.repeat(numbers, np.diff(starts, append=len(sizes)), axis=0)


def _perf(
    table: TableProfile, kernel: KernelModel, size: Size, work: Work, topology: Topology
) -> list[float]:
    """The milliseconds of one shard."""
    rows, columns = size
    bandwidth = kernel.row_bandwidth(topology)
    row_bytes = table.row_bytes(columns)
    forward = moved_bytes(work.lookups, row_bytes, work.outputs * columns)
    factor = update_factor(topology, table.weighted) + work.twice
    backward = factor * moved_bytes(work.updates, row_bytes, work.gradients * columns)
    gradient_elements = work.table + (0 if kernel.updates else rows * columns)
    missed = table.miss_rate * work.lookups
    states = table.optimizer.states if table.optimizer else ()
    state_bytes = _FLOAT * sum(1 if state.rowwise else columns for state in states)
    moved = row_bytes + state_bytes

    return [
        forward / bandwidth,
        sum(leg.ms(topology) for leg in work.rows_home),
        (backward + dense_gradient_bytes(gradient_elements)) / bandwidth
        + topology.row_ms * distinct_rows(work.updates, rows),
        sum(leg.ms(topology) for leg in work.gradients_back),
        sum(leg.ms(topology) for leg in work.ids_in),
        2 * missed * moved / slower_bandwidth(topology),  # read, and later written back
    ]


def moved_bytes(ids: Any, row_bytes: Any, elements: Any) -> Any:
    """Bytes that a lookup or an update of rows moves; the arguments are numbers or arrays.

    Args:
        ids: Number of ids.
        row_bytes: Bytes of a stored row.
        elements: Elements of the returned rows, or of their gradients.

    Example:
        >>> float(moved_bytes(10.0, row_bytes=256, elements=64))
        2896.0
    """
    return ids * (_ID + np.maximum(row_bytes, ROW_READ_BYTES)) + _FLOAT * elements


def dense_gradient_bytes(elements: Any) -> Any:
    """Bytes that a dense gradient of a number of elements moves in addition to an update."""
    return DENSE_GRADIENT_PASSES * _FLOAT * elements


def update_factor(topology: Topology, weighted: bool) -> float:
    """Time of an update relative to a lookup."""
    factor = topology.bwd_compute_multiplier
    if weighted:
        factor *= topology.weighted_feature_bwd_compute_multiplier
    return factor


def fewer_bytes_as_sum(batch_bytes: float, elements: float) -> bool:
    """Whether replicas exchange the gradient of a whole table, not those of its batches.

    Args:
        batch_bytes: Ids, lengths, weights and gradients of the batches of all ranks.
        elements: Elements of the table.
    """
    return batch_bytes > 2 * _FLOAT * elements


def distinct_rows(ids: float, rows: int) -> float:
    """Expected number of distinct rows among uniformly distributed ids.

    Example:
        >>> round(distinct_rows(1000, 1000))
        632
    """
    return -rows * math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else min(ids, rows)


def _peers(topology: Topology) -> tuple[int, int]:
    """Number of other ranks on a rank's host, and of ranks on other hosts."""
    return topology.intra_group_size - 1, topology.world_size - topology.intra_group_size


def id_wire_bytes(rows: int) -> int:
    """Bytes of an id of a table of R rows on the wire."""
    return 4 if rows < 2**31 else 8


def _weight_bytes(table: TableProfile) -> int:
    return 4 if table.weighted else 0
