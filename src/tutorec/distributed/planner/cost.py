"""What a piece of a table costs the rank that holds it, in milliseconds of one training step.

One short function for each sharding type counts the work of each piece (`Work`): ids that are looked up, rows that are
given, bytes that arrive and leave. What they count is what `shard_traffic` says of expected batches. `piece_perf` then
divides by how fast the machine is. The names in brackets, as (eq-cost-tw), are those of the equations in the book.

Letters: W ranks, L of them on a host, H = W / L hosts. Of a table with R rows and D columns, one rank's batch has S
bags and N ids, of all features together. A piece has r rows and d columns; ids are expected to spread evenly over rows,
so that n = N * r / R of each rank fall into the piece. On the wire an id takes b_i bytes (4, or 8 where R is 2 ** 31 or
more), its weight b_w (4, or none), a number of a row b_r, a number of a gradient b_g.

                      from each rank               looked up    to each rank           back
    tw, cw, twcw      b_i * (S + N) + b_w * N      W * N        b_r * S * d            b_g * S * d
    rw                b_i * (S + n) + b_w * n      W * n        b_r * S * d            b_g * S * d
    twrw, grid        as rw                        W * n        in two steps           in two steps
    dp                nothing                      N            nothing                its batch, or R * D numbers
    not pooled        as above                     as above     b_r * n * d            b_g * n * d

The time of an exchange is that of the slower of two wires, since both are busy at once: what a rank sends inside its
host, and what it sends to others. To be added for each collection and sharding type: `fixed_cost`, the latency of its
exchanges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.constants import DENSE_GRADIENT_PASSES, ROW_READ_BYTES
from tutorec.distributed.planner.kernels import KernelModel, kernel_model
from tutorec.distributed.planner.options import Floats, Ints
from tutorec.distributed.planner.table_facts import TableFacts
from tutorec.distributed.planner.topology import CollectiveType, Topology

_FLOAT = 4  # bytes of a number that is computed with
_ID = 8  # bytes of an id that is read


@dataclass(frozen=True)
class Leg:
    """Bytes that the holder of each piece sends or receives in one exchange, ``[P]``.

    Args:
        inside: From or to the other ranks of its host.
        across: From or to ranks of other hosts.
        collective: What kind of exchange it is.
    """

    inside: Floats
    across: Floats
    collective: CollectiveType = CollectiveType.ALL_TO_ALL

    @property
    def bytes(self) -> Floats:
        """Both together, ``[P]``."""
        return self.inside + self.across

    def ms(self, topology: Topology) -> Floats:
        """Milliseconds of each piece: of its slower wire (eq-cost-wire)."""
        bandwidths, local = topology.comms_bandwidths, topology.intra_group_size
        return np.maximum(
            self.inside / bandwidths.get_bw(local, local, self.collective),
            self.across / bandwidths.get_bw(local, max(topology.world_size, local), self.collective),
        )


@dataclass(frozen=True)
class Work:
    """What the holder of each piece does in a step; arrays ``[P]``.

    Args:
        lookups: Ids looked up forward.
        outputs: Rows given forward: partial sums of bags, or rows as they are.
        updates: Ids whose rows are updated backward.
        gradients: Gradients of rows that backward takes in.
        lists: Lengths of bags that arrive with the ids.
        table: Numbers of gradients of whole tables that are summed over ranks (data-parallel).
        ids_in: Bytes of ids, lengths and weights on their way in.
        rows_home: Bytes of rows on their way home, exchange after exchange.
        gradients_back: Bytes on the way back.
    """

    lookups: Floats
    outputs: Floats
    updates: Floats
    gradients: Floats
    lists: Floats
    table: Floats
    ids_in: tuple[Leg, ...]
    rows_home: tuple[Leg, ...]
    gradients_back: tuple[Leg, ...]


def table_wise_work(facts: TableFacts, sizes: Ints, topology: Topology) -> Work:
    """The holder looks up for all ranks, and sends each its rows (eq-cost-tw).

    From each rank ``b_i * (S + N) + b_w * N`` bytes of ids, W * N lookups, to each rank ``b_r * S * D`` bytes of rows.
    """
    return _rows_to_ranks(facts, sizes, topology)


def column_wise_work(facts: TableFacts, sizes: Ints, topology: Topology) -> Work:
    """A slice is a table of fewer columns, and each slice is sent all ids (eq-cost-cw).

    From each rank ``b_i * (S + N) + b_w * N`` bytes of ids, W * N lookups, to each rank ``b_r * S * d`` bytes of rows.
    """
    return _rows_to_ranks(facts, sizes, topology)


def row_wise_work(facts: TableFacts, sizes: Ints, topology: Topology) -> Work:
    """The holder sends every rank a partial sum of each of its bags (eq-cost-rw).

    From each rank ``b_i * (S + n) + b_w * n`` bytes of ids, W * n lookups, to each rank ``b_r * S * D`` bytes of rows.
    """
    return _rows_to_ranks(facts, sizes, topology, CollectiveType.REDUCE_SCATTER)


def table_row_wise_work(facts: TableFacts, sizes: Ints, topology: Topology) -> Work:
    """As row-wise inside a host; finished sums then travel between hosts, each once (eq-cost-twrw).

    ``b_r * H * S * d`` bytes to each of the L - 1 other ranks of the host, then ``b_r * S * d`` to one rank of each of
    the H - 1 other hosts; gradients the other way round. Rows that are not pooled go to their ranks at once.
    """
    work = _rows_to_ranks(facts, sizes, topology)
    if not facts.pooled:
        return work
    hosts, peers = topology.num_hosts, topology.intra_group_size - 1
    numbers = facts.total_samples * sizes[:, 1].astype(np.float64)

    def two_steps(wire_bytes: int) -> tuple[Leg, Leg]:
        inside = Leg(wire_bytes * hosts * peers * numbers, np.zeros_like(numbers), CollectiveType.REDUCE_SCATTER)
        return inside, Leg(np.zeros_like(numbers), wire_bytes * (hosts - 1) * numbers)

    home, back = two_steps(facts.row_wire_bytes), two_steps(facts.gradient_wire_bytes)[::-1]
    return replace(work, rows_home=home, gradients_back=back)


def grid_work(facts: TableFacts, sizes: Ints, topology: Topology) -> Work:
    """Each block of columns is a table-row-wise table of d columns (eq-cost-grid)."""
    return table_row_wise_work(facts, sizes, topology)


def data_parallel_work(facts: TableFacts, sizes: Ints, topology: Topology) -> Work:
    """A rank looks up for itself; backward it tells all others (eq-cost-dp).

    To each rank ``b_i * (S + N) + b_w * N + 4 * S * D`` bytes, its batch with the gradients of its rows, and every rank
    makes the update of all batches. Or, where all batches together are more than ``8 * R * D`` bytes, gradients of the
    whole table are summed: ``8 * R * D / W`` bytes to each rank, and every rank moves all rows by the sum.
    """
    world_size = topology.world_size
    columns, whole = facts.columns, float(facts.rows * facts.columns)
    ids, lists = facts.total_ids, facts.total_samples if facts.pooled else 0.0
    bags = lists if facts.pooled else ids
    per_rank = (_id_bytes(facts) + _weight_bytes(facts)) * ids + _FLOAT * (lists + bags * columns)
    as_sums = world_size * per_rank > 2 * _FLOAT * whole
    if world_size == 1 or as_sums:
        updates, gradients, sent = ids, bags, 2 * _FLOAT * whole / world_size
    else:
        updates, gradients = world_size * ids, world_size * bags
        sent = _id_bytes(facts) * (lists + ids) + _weight_bytes(facts) * ids + _FLOAT * bags * columns
    one = np.ones(len(sizes))
    inside, across = _peers(topology)
    return Work(
        lookups=ids * one,
        outputs=bags * one,
        updates=updates * one,
        gradients=gradients * one,
        lists=updates / max(ids, 1.0) * lists * one,
        table=whole * one if world_size > 1 and as_sums else 0 * one,
        ids_in=(),
        rows_home=(),
        gradients_back=(Leg(inside * sent * one, across * sent * one, CollectiveType.ALL_GATHER),),
    )


WORK: dict[ShardingType, Callable[[TableFacts, Ints, Topology], Work]] = {
    ShardingType.DATA_PARALLEL: data_parallel_work,
    ShardingType.TABLE_WISE: table_wise_work,
    ShardingType.COLUMN_WISE: column_wise_work,
    ShardingType.ROW_WISE: row_wise_work,
    ShardingType.TABLE_ROW_WISE: table_row_wise_work,
    ShardingType.TABLE_COLUMN_WISE: column_wise_work,
    ShardingType.GRID_SHARD: grid_work,
}


def piece_perf(
    facts: TableFacts, sharding_type: ShardingType, compute_kernel: str, sizes: Ints, topology: Topology
) -> Floats:
    """Milliseconds that each piece takes of a step on its rank, ``[P, 6]``: columns as the fields of `Perf`.

    A lookup of i ids that gives s rows of d columns moves ``i * (8 + max(4 * d, 128)) + s * 4 * d`` bytes at the
    bandwidth of the kernel (eq-cost-forward). The update moves as many, times the topology's multiplier, and five times
    the bytes of each whole gradient (eq-cost-backward). Exchanges take as long as their slower wire (eq-cost-wire).

    Args:
        facts: The table.
        sharding_type: How it is cut.
        compute_kernel: `EmbeddingComputeKernel` value.
        sizes: ``[P, 2]`` rows and columns of the pieces.
        topology: The machines.

    Raises:
        PlannerError: Nothing is known of the kernel.

    Example:
        >>> facts = TableFacts("", "item", 1000, 32, features=("f",), samples=(10.0,), ids=(20.0,))
        >>> machine = Topology(2, "cuda", hbm_mem_bw=1.0, intra_host_bw=1.0)
        >>> piece_perf(facts, ShardingType.TABLE_WISE, "fused", np.array([[1000, 32]]), machine).tolist()
        [[8000.0, 1280.0, 16000.0, 1280.0, 120.0, 0.0]]
    """
    work, kernel = WORK[sharding_type](facts, sizes, topology), kernel_model(compute_kernel)
    bandwidth = kernel.row_bandwidth(topology)
    perf = np.zeros((len(sizes), 6))
    perf[:, 0] = _moved(facts, sizes, work.lookups, work.outputs) / bandwidth
    perf[:, 1] = _wire(work.rows_home, topology)
    perf[:, 2] = _backward_bytes(facts, kernel, sizes, work, topology) / bandwidth
    perf[:, 3] = _wire(work.gradients_back, topology)
    perf[:, 4] = _wire(work.ids_in, topology)
    return perf


def fixed_cost(topology: Topology, sharding_type: str, pooled: bool) -> float:
    """Milliseconds that the exchanges of a collection and sharding type take however little is sent (eq-cost-fixed).

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
    """How many exchanges a step of a collection and sharding type takes one after the other: e above.

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


def _rows_to_ranks(
    facts: TableFacts, sizes: Ints, topology: Topology, home: CollectiveType = CollectiveType.ALL_TO_ALL
) -> Work:
    """Ids from every rank, and to every rank the rows of its bags or ids that the piece has."""
    found: Floats = facts.total_ids * sizes[:, 0] / max(facts.rows, 1)
    bags: Floats = np.full(len(sizes), facts.total_samples)
    rows = bags if facts.pooled else found
    inside, across = _peers(topology)

    def leg(from_each: Floats, collective: CollectiveType) -> tuple[Leg, ...]:
        return (Leg(inside * from_each, across * from_each, collective),)

    world_size = topology.world_size
    back = CollectiveType.ALL_GATHER if home is CollectiveType.REDUCE_SCATTER else home
    return Work(
        lookups=world_size * found,
        outputs=world_size * rows,
        updates=world_size * found,
        gradients=world_size * rows,
        lists=world_size * bags,
        table=np.zeros(len(sizes)),
        ids_in=leg(_id_bytes(facts) * (bags + found) + _weight_bytes(facts) * found, CollectiveType.ALL_TO_ALL),
        rows_home=leg(facts.row_wire_bytes * rows * sizes[:, 1], home),
        gradients_back=leg(facts.gradient_wire_bytes * rows * sizes[:, 1], back),
    )


def _moved(facts: TableFacts, sizes: Ints, ids: Floats, bags: Floats) -> Floats:
    """Bytes that a lookup moves: ids and rows in, bags out."""
    columns = sizes[:, 1]
    return ids * (_ID + np.maximum(facts.element_bytes * columns, ROW_READ_BYTES)) + _FLOAT * bags * columns


def _backward_bytes(facts: TableFacts, kernel: KernelModel, sizes: Ints, work: Work, topology: Topology) -> Floats:
    """Bytes that an update moves, as many times as it takes longer than a lookup, and those of whole gradients."""
    factor = topology.bwd_compute_multiplier
    if facts.weighted:
        factor *= topology.weighted_feature_bwd_compute_multiplier
    moved = factor * _moved(facts, sizes, work.updates, work.gradients)
    whole = work.table + (0.0 if kernel.updates else (sizes[:, 0] * sizes[:, 1]).astype(np.float64))
    return moved + DENSE_GRADIENT_PASSES * _FLOAT * whole


def _wire(legs: tuple[Leg, ...], topology: Topology) -> Floats | float:
    """Milliseconds of exchanges one after the other."""
    return sum((leg.ms(topology) for leg in legs), start=0.0)


def _peers(topology: Topology) -> tuple[int, int]:
    """Other ranks of a rank's host, and ranks of other hosts."""
    return topology.intra_group_size - 1, topology.world_size - topology.intra_group_size


def _id_bytes(facts: TableFacts) -> int:
    return 4 if facts.rows < 2**31 else 8


def _weight_bytes(facts: TableFacts) -> int:
    return 4 if facts.weighted else 0
