"""Thresholds on the page "Which cut for which table", from the planner's cost functions.

``{choosing-table} copies``    rows from which replicas cost more than one whole table
``{choosing-table} memory``    how large a table may be that lies on one rank, or on one host
``{choosing-table} columns``   from which bag on rows are cheaper to split than columns
``{choosing-table} rows``      what a table that is cut by rows costs everybody, and spares one
``{choosing-table} hosts``     what adding inside the host saves, on this network and a faster one
``{choosing-table} types``     what one more sharding type costs before it carries anything
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sphinx.application import Sphinx
from tables import GeneratedTable

from tutorec._kernels.specs import OptimizerSpec
from tutorec.distributed.plan import ShardingType
from tutorec.distributed.plan.sizes import cut_arrays
from tutorec.distributed.planner.cost import fixed_cost, shard_perf
from tutorec.distributed.planner.options import TableProfile
from tutorec.distributed.planner.shard_estimators import shard_storage
from tutorec.distributed.planner.topology import Topology

MACHINES = {
    "two processes on a laptop": "laptop",
    "8 A100-80": "8xA100-80",
    "8 H100": "8xH100",
    "8 H200": "8xH200",
    "8 hosts of 8 H100": "8xH100x8",
    "64 hosts of 8 H100": "8xH100x64",
}
BATCHES = (512, 4096)  # samples of a rank
COLUMNS, WIDTH = 64, 32  # of a table, and of a slice
FREE = 0.85  # of a rank's memory, as the planner's default leaves
MANY_ROWS = 10_000_000
LONGEST_BAG = 100_000

TW, CW, RW = ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.ROW_WISE
TWRW, DP = ShardingType.TABLE_ROW_WISE, ShardingType.DATA_PARALLEL


def table(rows: int = MANY_ROWS, bag: float = 1.0, batch: int = 4096) -> TableProfile:
    """A table of one feature, with row-wise Adagrad."""
    return TableProfile(
        path="",
        name="table",
        rows=rows,
        columns=COLUMNS,
        features=("feature",),
        samples=(float(batch),),
        ids=(batch * bag,),
        optimizer=OptimizerSpec("rowwise_adagrad", 0.01),
    )


def pieces(kind: ShardingType, facts: TableProfile, machine: Topology) -> np.ndarray:
    """Rows and columns of the pieces, ``[P, 2]``."""
    shape = (facts.rows, facts.columns)
    return cut_arrays(kind, shape, machine.world_size, machine.local_world_size, WIDTH)[0]


def of_each_rank(kind: ShardingType, facts: TableProfile, machine: Topology) -> float:
    """Milliseconds per rank of one table among many such tables that are spread evenly."""
    return (
        shard_perf(facts, kind, "fused", pieces(kind, facts, machine), machine).sum()
        / machine.world_size
    )


def of_its_holder(facts: TableProfile, machine: Topology) -> float:
    """Milliseconds that the table costs the rank that has it whole."""
    return of_each_rank(TW, facts, machine) * machine.world_size


def first(holds: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to ``most`` from which on ``holds``; None: none of them."""
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def copies_lose(machine: Topology, batch: int) -> int | None:
    """Rows from which on a copy on every rank costs more than a table that is whole."""

    def loses(rows: int) -> bool:
        facts = table(rows, batch=batch)
        return of_each_rank(DP, facts, machine) > of_each_rank(TW, facts, machine)

    return first(loses, MANY_ROWS)


def largest(kind: ShardingType, machine: Topology) -> float:
    """Bytes of the largest table whose pieces fit, with their state and the buffers of a batch."""
    storage = machine.devices[0].storage
    free = FREE * (storage.ddr if machine.compute_device == "cpu" else storage.hbm)

    def too_large(rows: int) -> bool:
        facts = table(rows)
        return (
            shard_storage(facts, kind, "fused", pieces(kind, facts, machine), machine)
            .sum(axis=1)
            .max()
            > free
        )

    rows = first(too_large, 2**40)
    if rows is None:
        raise ValueError(
            f"2 ** 40 rows fit {machine.world_size} ranks of {storage}: no machine is so large"
        )
    return 4.0 * COLUMNS * (rows - 1)


def by_rows(machine: Topology) -> ShardingType:
    """The cut by rows that fits the machine: inside a host where there are several."""
    return TWRW if machine.num_hosts > 1 else RW


def rows_beat_columns(machine: Topology) -> int | None:
    """Ids in a bag from which on a cut by rows costs less than two slices of columns."""

    def beats(bag: int) -> bool:
        facts = table(bag=bag)
        return of_each_rank(by_rows(machine), facts, machine) < of_each_rank(CW, facts, machine)

    return first(beats, LONGEST_BAG)


def rows_pay(kind: ShardingType, machine: Topology) -> int | None:
    """The bag length from which a row-wise cut costs others at most half of what it saves."""

    def pays(bag: int) -> bool:
        facts = table(bag=bag)
        return of_each_rank(kind, facts, machine) <= of_its_holder(facts, machine) / 2

    return first(pays, LONGEST_BAG)


def adding_inside_saves(machine: Topology) -> float:
    """How many times as long a row-wise table takes as a table-row-wise one."""
    return of_each_rank(RW, table(), machine) / of_each_rank(TWRW, table(), machine)


def with_a_fast_network(machine: Topology) -> Topology:
    """The same hosts, between which a rank sends as fast as inside."""
    return Topology.hosts(
        machine.num_hosts,
        machine.local_world_size,
        machine.compute_device,
        hbm_mem_bw=machine.hbm_mem_bw,
        intra_host_bw=machine.intra_host_bw,
        inter_host_bw=machine.intra_host_bw,
    )


def _count(value: float | None, most: int) -> str:
    return f"none up to {most:,}" if value is None else f"{value:,.0f}"


def _ids(value: int | None) -> str:
    return "1 id" if value == 1 else f"{_count(value, LONGEST_BAG)} ids"


def _gb(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value < 1e11 else f"{value / 1e9:,.0f} GB"


class ChoosingTable(GeneratedTable):
    """One of the page's tables, by its name."""

    required_arguments = 1

    @property
    def header(self) -> tuple[str, ...]:  # type: ignore[override]
        return HEADERS[self.arguments[0]]

    def rows(self) -> list[tuple[str, ...]]:
        return threshold_rows(self.arguments[0])


HEADERS = {
    "copies": ("machine", *(f"copy up to, {batch:,} samples a rank" for batch in BATCHES)),
    "memory": ("machine", "whole on a rank, up to", "split over a host, up to"),
    "columns": ("machine", "a cut by rows", "costs less than two slices of columns from"),
    "rows": ("machine", "row-wise pays from", "table-row-wise pays from"),
    "hosts": ("machine", "row-wise takes", "with a network as fast as the wires inside"),
    "types": ("machine", "table-, column- or row-wise", "table-row-wise, grid", "data-parallel"),
}


def threshold_rows(name: str) -> list[tuple[str, ...]]:
    """The rows of the table of that name: a machine each."""
    machines = {words: Topology.preset(preset) for words, preset in MACHINES.items()}
    several = {words: machine for words, machine in machines.items() if machine.num_hosts > 1}
    if name == "copies":
        return [
            (
                words,
                *(f"{_count((copies_lose(machine, b) or 0) - 1, MANY_ROWS)} rows" for b in BATCHES),
            )
            for words, machine in machines.items()
        ]
    if name == "memory":
        return [
            (words, _gb(largest(TW, machine)), _gb(largest(TWRW, machine)))
            for words, machine in machines.items()
        ]
    if name == "columns":
        return [
            (words, by_rows(machine).value.replace("_", "-"), _ids(rows_beat_columns(machine)))
            for words, machine in machines.items()
        ]
    if name == "rows":
        return [
            (
                words,
                _ids(rows_pay(RW, machine)),
                _ids(rows_pay(TWRW, machine)) if machine.num_hosts > 1 else "one host: the same",
            )
            for words, machine in machines.items()
        ]
    if name == "hosts":
        return [
            (
                words,
                f"{adding_inside_saves(machine):.1f} times as long",
                f"{adding_inside_saves(with_a_fast_network(machine)):.1f} times",
            )
            for words, machine in several.items()
        ]
    return [
        (
            words,
            *(f"{fixed_cost(machine, kind.value, pooled=True):.2f} ms" for kind in (TW, TWRW, DP)),
        )
        for words, machine in machines.items()
    ]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("choosing-table", ChoosingTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
