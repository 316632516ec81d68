"""What a piece of a table costs the rank that holds it, in milliseconds of one training step.

One short function for each sharding type counts the work of each piece (`Work`): ids that are looked up, rows that are
given, bytes that arrive and leave. What they count is what a step of expected batches sends. `piece_perf` then
divides by how fast the machine is. The names in brackets, as (eq-cost-tw), are those of the equations in the book.

Letters: W ranks, L of them on a host, H = W / L hosts. Of a table with R rows and D columns, one rank's batch has S
bags and N ids, of all features together. A piece has r rows and d columns; ids are expected to spread evenly over rows,
so that n = N * r / R of each rank fall into the piece. On the wire an id takes b_i bytes (4, or 8 where R is 2 ** 31 or
more), its weight b_w (4, or none), a number of a row b_r, a number of a gradient b_g. What a holder moves in a step::

                      from each rank               looked up    to each rank           back
    tw, cw, twcw      b_i * (S + N) + b_w * N      W * N        b_r * S * d            b_g * S * d
    rw                b_i * (S + n) + b_w * n      W * n        b_r * S * d            b_g * S * d
    twrw, grid        as rw                        W * n        in two steps           in two steps
    dp                nothing                      N            nothing                its batch, or R * D numbers
    not pooled        as above                     as above     b_r * n * d            b_g * n * d

The time of an exchange is that of the slower of two wires, since both are busy at once: what a rank sends inside its
host, and what it sends to others. To be added for each collection and sharding type: `fixed_cost`, the latency of its
exchanges.

A kernel that is added to the library registers its model here, and the planner takes it into account::

    register_kernel("dense", KernelModel(row_bandwidth=lambda topology: topology.ddr_mem_bw / 2, updates=False))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.planner.constants import DENSE_BANDWIDTH, DENSE_GRADIENT_PASSES, ROW_READ_BYTES
from tutorec.distributed.planner.options import Floats, Ints, TableFacts
from tutorec.distributed.planner.topology import CollectiveType, Topology
from tutorec.errors import PlannerError, PlannerErrorType

_FLOAT = 4  # bytes of a number that is computed with
_ID = 8  # bytes of an id that is read

Size = tuple[int, int]  # rows and columns of a piece


# Kernels


def device_bandwidth(topology: Topology) -> float:
    """Bytes per ms of the memory that a rank computes in.

    Example:
        >>> device_bandwidth(Topology(1, "cuda", hbm_mem_bw=5.0)), device_bandwidth(Topology(1, "cpu", ddr_mem_bw=3.0))
        (5.0, 3.0)
    """
    return topology.ddr_mem_bw if topology.compute_device == "cpu" else topology.hbm_mem_bw


def slower_bandwidth(topology: Topology) -> float:
    """Bytes per ms between a rank's memory and the next slower one: on the CPU a disk, else the host's memory.

    Example:
        >>> slower_bandwidth(Topology(1, "cpu", ssd_mem_bw=2.0))
        2.0
    """
    return topology.ssd_mem_bw if topology.compute_device == "cpu" else topology.hbm_to_ddr_mem_bw


def on_device(topology: Topology, stored: Ints, slower: int = 0) -> Ints:
    """Rows in the memory of the device: bytes ``[P]`` -> ``[P, 3]``, HBM, DDR and SSD.

    Args:
        topology: The machines.
        stored: Bytes of each piece.
        slower: 1 for the next slower memory.

    Example:
        >>> on_device(Topology(1, "cpu"), np.array([7])).tolist()
        [[0, 7, 0]]
    """
    memory = np.zeros((len(stored), 3), dtype=np.int64)
    memory[:, (topology.compute_device == "cpu") + slower] = stored
    return memory


def in_slower_memory(topology: Topology, stored: Ints) -> Ints:
    """Rows in the next slower memory: bytes ``[P]`` -> ``[P, 3]``, on the CPU SSD, else DDR."""
    return on_device(topology, stored, slower=1)


@dataclass(frozen=True)
class KernelModel:
    """What the planner knows of a kernel.

    Args:
        row_bandwidth: Bytes per ms at which rows are looked up and updated on a topology.
        updates: Whether backward updates the rows, and keeps the state that this takes; else it leaves a gradient as
            large as the shard.
        memory: Where rows and state lie: ``(topology, bytes [P]) -> [P, 3]``, HBM, DDR and SSD.
        devices: Where it runs.
        serves: Whether rows are looked up only, for one process that drives all devices: nothing is updated, and ids
            and rows travel between that process and its devices.

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
    """Let the planner consider a kernel, or estimate it in another way.

    Args:
        value: The `EmbeddingComputeKernel` value.
        model: What it costs.

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
    """Value -> model of the kernels that the planner may choose; those that run on ``device`` where one is named.

    Example:
        >>> sorted(registered_kernels("cpu"))
        ['dense', 'fused', 'fused_uvm', 'fused_uvm_caching', 'quant']
    """
    return {value: model for value, model in _kernels.items() if device is None or device in model.devices}


def kernel_model(value: str) -> KernelModel:
    """The model of a kernel, by the name of today or of 2022.

    Raises:
        PlannerError: None has been registered.

    Example:
        >>> kernel_model("batched_fused") is kernel_model("fused")
        True
    """
    model = _kernels.get(value) or _kernels.get(value.removeprefix("batched_"))
    if model is None:
        raise PlannerError(
            f"the planner cannot estimate the compute kernel {value!r}: it knows {', '.join(_kernels)}; "
            "register_kernel(value, KernelModel(...)) adds one",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )
    return model


register_kernel("fused", KernelModel())
register_kernel("fused_uvm", KernelModel(memory=in_slower_memory))
register_kernel("fused_uvm_caching", KernelModel(memory=in_slower_memory))
register_kernel("dense", KernelModel(lambda topology: DENSE_BANDWIDTH * device_bandwidth(topology), updates=False))
register_kernel("quant", KernelModel(devices=("cpu", "cuda"), serves=True))


# Work


class Leg(NamedTuple):
    """Bytes that the holder of a piece sends or receives in one exchange.

    Args:
        inside: From or to the other ranks of its host.
        across: From or to ranks of other hosts.
        collective: What kind of exchange it is.
    """

    inside: float
    across: float
    collective: CollectiveType = CollectiveType.ALL_TO_ALL

    def ms(self, topology: Topology) -> float:
        """Milliseconds: those of the slower wire (eq-cost-wire)."""
        bandwidths, local = topology.comms_bandwidths, topology.intra_group_size
        return max(
            self.inside / bandwidths.get_bw(local, local, self.collective) if self.inside else 0.0,
            self.across / bandwidths.get_bw(local, topology.world_size, self.collective) if self.across else 0.0,
        )


class Work(NamedTuple):
    """What the holder of a piece does in a step.

    Args:
        lookups: Ids looked up forward.
        outputs: Rows given forward: partial sums of bags, or rows as they are.
        updates: Ids whose rows are updated backward.
        gradients: Gradients of rows that backward takes in.
        lists: Lengths of bags that arrive with the ids.
        table: Numbers of gradients of whole tables that are summed over ranks (data-parallel).
        ids_in: Bytes of ids, lengths and weights on their way in, exchange after exchange.
        rows_home: Bytes of rows on their way home.
        gradients_back: Bytes on the way back.
    """

    lookups: float
    outputs: float
    updates: float
    gradients: float
    lists: float
    table: float = 0.0
    ids_in: tuple[Leg, ...] = ()
    rows_home: tuple[Leg, ...] = ()
    gradients_back: tuple[Leg, ...] = ()


def table_wise_work(facts: TableFacts, size: Size, topology: Topology) -> Work:
    """The holder looks up for all ranks, and sends each its rows (eq-cost-tw).

    From each rank ``b_i * (S + N) + b_w * N`` bytes of ids, W * N lookups, to each rank ``b_r * S * D`` bytes of rows.
    """
    return _rows_to_ranks(facts, size, topology)


def column_wise_work(facts: TableFacts, size: Size, topology: Topology) -> Work:
    """A slice is a table of fewer columns, and each slice is sent all ids (eq-cost-cw).

    From each rank ``b_i * (S + N) + b_w * N`` bytes of ids, W * N lookups, to each rank ``b_r * S * d`` bytes of rows.
    """
    return _rows_to_ranks(facts, size, topology)


def row_wise_work(facts: TableFacts, size: Size, topology: Topology) -> Work:
    """The holder sends every rank a partial sum of each of its bags (eq-cost-rw).

    From each rank ``b_i * (S + n) + b_w * n`` bytes of ids, W * n lookups, to each rank ``b_r * S * D`` bytes of rows.
    """
    return _rows_to_ranks(facts, size, topology, CollectiveType.REDUCE_SCATTER, CollectiveType.ALL_GATHER)


def table_row_wise_work(facts: TableFacts, size: Size, topology: Topology) -> Work:
    """As row-wise inside a host; finished sums then travel between hosts, each once (eq-cost-twrw).

    ``b_r * H * S * d`` bytes to each of the L - 1 other ranks of the host, then ``b_r * S * d`` to one rank of each of
    the H - 1 other hosts; gradients the other way round. Rows that are not pooled go to their ranks at once.
    """
    work = _rows_to_ranks(facts, size, topology)
    if not facts.pooled:
        return work
    hosts, peers = topology.num_hosts, topology.intra_group_size - 1
    numbers = facts.total_samples * size[1]

    def two_steps(wire_bytes: int) -> tuple[Leg, Leg]:
        inside = Leg(wire_bytes * hosts * peers * numbers, 0.0, CollectiveType.REDUCE_SCATTER)
        return inside, Leg(0.0, wire_bytes * (hosts - 1) * numbers)

    home, back = two_steps(facts.row_wire_bytes), two_steps(facts.gradient_wire_bytes)[::-1]
    return work._replace(rows_home=home, gradients_back=back)


def grid_work(facts: TableFacts, size: Size, topology: Topology) -> Work:
    """Each block of columns is a table-row-wise table of d columns (eq-cost-grid)."""
    return table_row_wise_work(facts, size, topology)


def data_parallel_work(facts: TableFacts, size: Size, topology: Topology) -> Work:
    """A rank looks up for itself; backward it tells all others (eq-cost-dp).

    To each rank ``b_i * (S + N) + b_w * N + 4 * S * D`` bytes, its batch with the gradients of its rows, and every rank
    makes the update of all batches. Or, where all batches together are more than ``8 * R * D`` bytes, gradients of the
    whole table are summed: ``8 * R * D / W`` bytes to each rank, and every rank moves all rows by the sum.
    """
    world_size, ids = topology.world_size, facts.total_ids
    whole = float(facts.rows * facts.columns)
    lists = facts.total_samples if facts.pooled else 0.0
    bags = lists if facts.pooled else ids
    batch = (_id_bytes(facts) + _weight_bytes(facts)) * ids + _FLOAT * bags * facts.columns
    in_sum = world_size * (batch + _FLOAT * lists) > 2 * _FLOAT * whole
    if world_size == 1:
        return Work(ids, bags, ids, bags, lists)
    inside, across = _peers(topology)
    if in_sum:
        sent = 2 * _FLOAT * whole / world_size
        back = Leg(inside * sent, across * sent, CollectiveType.ALL_GATHER)
        return Work(ids, bags, ids, bags, lists, table=whole, gradients_back=(back,))
    sent = batch + _id_bytes(facts) * lists
    back = Leg(inside * sent, across * sent, CollectiveType.ALL_GATHER)
    return Work(ids, bags, world_size * ids, world_size * bags, world_size * lists, gradients_back=(back,))


WORK: dict[ShardingType, Callable[[TableFacts, Size, Topology], Work]] = {
    ShardingType.DATA_PARALLEL: data_parallel_work,
    ShardingType.TABLE_WISE: table_wise_work,
    ShardingType.COLUMN_WISE: column_wise_work,
    ShardingType.ROW_WISE: row_wise_work,
    ShardingType.TABLE_ROW_WISE: table_row_wise_work,
    ShardingType.TABLE_COLUMN_WISE: column_wise_work,
    ShardingType.GRID_SHARD: grid_work,
}


def serving_work(facts: TableFacts, size: Size, topology: Topology) -> Work:
    """One process asks its devices: the ids of one batch go out, rows come back, nothing is updated (eq-cost-serve).

    Of a piece's n ids and S bags ``b_i * (S + n) + b_w * n`` bytes to its device, n lookups, ``4 * S * d`` bytes back.
    On the CPU devices share one memory, and nothing travels.
    """
    found = facts.total_ids * size[0] / max(facts.rows, 1)
    bags = facts.total_samples
    rows = bags if facts.pooled else found
    apart = topology.compute_device != "cpu" and topology.world_size > 1
    ids_in = Leg(_id_bytes(facts) * (bags + found) + _weight_bytes(facts) * found, 0.0)
    rows_home = Leg(_FLOAT * rows * size[1], 0.0)
    return Work(
        lookups=found,
        outputs=rows,
        updates=0.0,
        gradients=0.0,
        lists=bags,
        ids_in=(ids_in,) if apart else (),
        rows_home=(rows_home,) if apart else (),
    )


def work_of(kernel: KernelModel, sharding_type: ShardingType) -> Callable[[TableFacts, Size, Topology], Work]:
    """What counts the work of a piece.

    Example:
        >>> work_of(kernel_model("quant"), ShardingType.ROW_WISE).__name__
        'serving_work'
    """
    return serving_work if kernel.serves else WORK[sharding_type]


def piece_perf(
    facts: TableFacts, sharding_type: ShardingType, compute_kernel: str, sizes: Ints, topology: Topology
) -> Floats:
    """Milliseconds that each piece takes of a step on its rank, ``[P, 6]``: columns as the fields of `Perf`.

    A lookup of i ids that gives s rows of d columns moves ``i * (8 + max(4 * d, 128)) + s * 4 * d`` bytes at the
    bandwidth of the kernel (eq-cost-forward). The update moves as many, times the topology's multiplier, and five times
    the bytes of each whole gradient; each distinct row takes the topology's ``row_ms`` besides (eq-cost-backward).
    Exchanges take as long as their slower wire (eq-cost-wire). Of a table in a file, each lookup that misses reads a
    row with its optimizer state, which is written back later.

    Args:
        facts: The table.
        sharding_type: How it is cut.
        compute_kernel: `EmbeddingComputeKernel` value.
        sizes: ``[P, 2]`` rows and columns of the pieces.
        topology: The machines.

    Returns:
        The milliseconds; not to be written to, since pieces of one size share a line.

    Raises:
        PlannerError: Nothing is known of the kernel.

    Example:
        >>> facts = TableFacts("", "item", 1000, 32, features=("f",), samples=(10.0,), ids=(20.0,))
        >>> machine = Topology(2, "cuda", hbm_mem_bw=1.0, intra_host_bw=1.0)
        >>> piece_perf(facts, ShardingType.TABLE_WISE, "fused", np.array([[1000, 32]]), machine).tolist()
        [[8000.0, 1280.0, 16000.0, 1280.0, 120.0, 0.0]]
    """
    kernel = kernel_model(compute_kernel)
    count = work_of(kernel, sharding_type)
    few, places = distinct_sizes(sizes)
    lines = [_perf(facts, kernel, size, count(facts, size, topology), topology) for size in few]
    return spread_lines(np.array(lines).reshape(-1, 6), places)


def fixed_cost(topology: Topology, sharding_type: str, pooled: bool) -> float:
    """Milliseconds that the exchanges of a collection and type take however little is sent (eq-cost-fixed).

    The topology's latency, as many times as there are `exchanges`.

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
    """How many exchanges a step of a collection and sharding type takes one after the other.

    Sizes, ids, rows home and gradients back are four. Table-row-wise sums take two steps each way where there are
    hosts of several ranks; copies exchange sizes, ids and gradients, backward only.

    Example:
        >>> exchanges(Topology.hosts(2, 2), ShardingType.TABLE_ROW_WISE, pooled=True)
        6
    """
    if topology.world_size == 1:
        return 0
    if sharding_type is ShardingType.DATA_PARALLEL:
        return 3
    if pooled and sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        return 2 + 2 * ((topology.intra_group_size > 1) + (topology.num_hosts > 1))
    return 4


def distinct_sizes(sizes: Ints) -> tuple[list[Size], Ints]:
    """The sizes that pieces have, each once, and for each piece which of them; thousands of pieces have two or three.

    Example:
        >>> few, places = distinct_sizes(np.array([[3, 4], [3, 4], [1, 4]]))
        >>> few, places.tolist()
        ([(1, 4), (3, 4)], [1, 1, 0])
    """
    if (sizes == sizes[:1]).all():  # np.unique takes 30 us, and there are thousands of options
        few, places = sizes[:1], np.zeros(len(sizes), dtype=np.int64)
    else:
        few, places = np.unique(sizes, axis=0, return_inverse=True)
    return [(rows, columns) for rows, columns in few.tolist()], places.ravel()


def spread_lines(lines: NDArray[Any], places: Ints) -> NDArray[Any]:
    """For each piece the line of its size; a view where there is one."""
    if len(lines) == 1:
        return np.broadcast_to(lines, (len(places), lines.shape[1]))
    return lines[places]


def _perf(facts: TableFacts, kernel: KernelModel, size: Size, work: Work, topology: Topology) -> list[float]:
    """The line of a piece."""
    rows, columns = size
    bandwidth = kernel.row_bandwidth(topology)
    row_bytes = _ID + max(facts.row_bytes(columns), ROW_READ_BYTES)
    forward = work.lookups * row_bytes + _FLOAT * work.outputs * columns
    backward = topology.bwd_compute_multiplier * (work.updates * row_bytes + _FLOAT * work.gradients * columns)
    if facts.weighted:
        backward *= topology.weighted_feature_bwd_compute_multiplier
    whole = work.table + (0 if kernel.updates else rows * columns)
    missed = 0.0 if facts.cache is None else facts.cache.miss_rate * work.lookups
    moved = facts.row_bytes(columns) + _state_bytes_of_a_row(facts, columns)
    return [
        forward / bandwidth,
        sum(leg.ms(topology) for leg in work.rows_home),
        (backward + DENSE_GRADIENT_PASSES * _FLOAT * whole) / bandwidth
        + topology.row_ms * _distinct(work.updates, rows),
        sum(leg.ms(topology) for leg in work.gradients_back),
        sum(leg.ms(topology) for leg in work.ids_in),
        2 * missed * moved / slower_bandwidth(topology),  # read, and later written back
    ]


def _distinct(ids: float, rows: int) -> float:
    """Expected number of distinct rows of a piece that so many ids hit when they spread evenly."""
    return -rows * math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else min(ids, rows)


def _state_bytes_of_a_row(facts: TableFacts, columns: int) -> int:
    states = () if facts.optimizer is None else facts.optimizer.states
    return _FLOAT * sum(1 if state.rowwise else columns for state in states)


def _rows_to_ranks(
    facts: TableFacts,
    size: Size,
    topology: Topology,
    home: CollectiveType = CollectiveType.ALL_TO_ALL,
    back: CollectiveType = CollectiveType.ALL_TO_ALL,
) -> Work:
    """Ids from every rank, and to every rank the rows of its bags or ids that the piece has."""
    found = facts.total_ids * size[0] / max(facts.rows, 1)
    bags = facts.total_samples
    rows = bags if facts.pooled else found
    inside, across = _peers(topology)
    ids_in = _id_bytes(facts) * (bags + found) + _weight_bytes(facts) * found
    rows_home, gradients_back = (each * rows * size[1] for each in (facts.row_wire_bytes, facts.gradient_wire_bytes))
    world_size = topology.world_size
    return Work(
        lookups=world_size * found,
        outputs=world_size * rows,
        updates=world_size * found,
        gradients=world_size * rows,
        lists=world_size * bags,
        ids_in=(Leg(inside * ids_in, across * ids_in),),
        rows_home=(Leg(inside * rows_home, across * rows_home, home),),
        gradients_back=(Leg(inside * gradients_back, across * gradients_back, back),),
    )


def _peers(topology: Topology) -> tuple[int, int]:
    """Other ranks of a rank's host, and ranks of other hosts."""
    return topology.intra_group_size - 1, topology.world_size - topology.intra_group_size


def _id_bytes(facts: TableFacts) -> int:
    return 4 if facts.rows < 2**31 else 8


def _weight_bytes(facts: TableFacts) -> int:
    return 4 if facts.weighted else 0
