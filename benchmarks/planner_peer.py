"""A model with drawn tables, planned by a library that is named: the same code plans with both."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Sample, time_call
from benchmarks.library import Library
from tutorec.distributed.planner.options import Shard, ShardArrays, ShardingOption
from tutorec.distributed.planner.problem import PlanningProblem, cost
from tutorec.distributed.planner.topology import Perf, Storage

BATCH_SIZE = 512
# HBM that is left of a rank's 32 GiB once the planner's own reservation is taken off
_ROOM = 27 * 2**30
_SMALLEST = 1e3
_LARGEST = 1e8
_LONGEST_BAG = 50.0
_WIDTHS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Draw:
    """A drawn model, and the machines that it is planned for.

    Args:
        seed: Of its tables.
        tables: How many.
        world_size: W.
        local_size: L.
        filled: Bytes of all tables as a part of what the ranks have for them; 0: as they were
            drawn.
    """

    seed: int
    tables: int
    world_size: int
    local_size: int
    filled: float = 0.0

    @property
    def name(self) -> str:
        """Tables x ranks."""
        return f"{self.tables}x{self.world_size}"


@dataclass(frozen=True)
class DrawnTable:
    """Rows R, columns D, and ids of a bag."""

    name: str
    rows: int
    columns: int
    pooling: float

    @property
    def feature(self) -> str:
        """The table's only feature."""
        return f"f_{self.name}"


def draw_tables(draw: Draw) -> list[DrawnTable]:
    """Rows from 1,000 to 100,000,000 and bags of 1 to 50 ids, both log-uniform; usual widths.

    Example:
        >>> [table] = draw_tables(
        ...     Draw(seed=0, tables=1, world_size=2, local_size=2, filled=0.5)
        ... )
        >>> round(table.rows * table.columns * 4 / (2 * 27 * 2**30), 3)
        0.5
    """
    rng = np.random.default_rng(draw.seed)
    rows = np.exp(rng.uniform(np.log(_SMALLEST), np.log(_LARGEST), draw.tables))
    columns = rng.choice(_WIDTHS, draw.tables)
    pooling = np.exp(rng.uniform(0.0, np.log(_LONGEST_BAG), draw.tables)).round(1)
    if draw.filled:
        rows *= draw.filled * draw.world_size * _ROOM / (rows * columns * 4).sum()

    tables = []
    for index in range(draw.tables):
        count = max(10, int(rows[index]))
        tables.append(DrawnTable(f"t{index}", count, int(columns[index]), float(pooling[index])))
    return tables


@dataclass(frozen=True)
class Planned:
    """What a library's planner made of a model.

    Args:
        sample: Seconds of planning, enumeration included.
        ms: Milliseconds of a step by its own cost model; None where it found no plan.
        bound: Of all plans by that model, where the planner says so.
        error: What it said where it found none.
    """

    sample: Sample
    ms: float | None = None
    bound: float | None = None
    error: str = ""


class Model:
    """A drawn model in a library.

    Args:
        library: Which.
        draw: Which model.
    """

    def __init__(self, library: Library, draw: Draw) -> None:
        self.library = library
        self.draw = draw
        self.tables = draw_tables(draw)
        with _quiet():
            config = library.get("modules.embedding_configs.EmbeddingBagConfig")
            tables = [
                config(
                    num_embeddings=table.rows,
                    embedding_dim=table.columns,
                    name=table.name,
                    feature_names=[table.feature],
                )
                for table in self.tables
            ]
            collection = library.get("modules.embedding_modules.EmbeddingBagCollection")
            self.module = collection(device=torch.device("meta"), tables=tables)
            sharder = library.get("distributed.embeddingbag.EmbeddingBagCollectionSharder")
            self.sharders = [sharder()]

    def topology(self) -> Any:
        """GPUs with TorchRec's default memory and speeds, the same in both libraries."""
        return self._planner_class("types.Topology")(
            world_size=self.draw.world_size,
            local_world_size=self.draw.local_size,
            compute_device="cuda",
        )

    def constraints(self) -> dict[str, Any]:
        """Ids of a bag, and nothing else."""
        constraints = self._planner_class("types.ParameterConstraints")
        return {table.name: constraints(pooling_factors=[table.pooling]) for table in self.tables}

    def _planner_class(self, name: str) -> Any:
        return self.library.get(f"distributed.planner.{name}")

    def plan(self) -> Planned:
        """Plan with the library's default planner, constructed for this plan."""
        planner_class = self._planner_class("planners.EmbeddingShardingPlanner")
        planner: Any = None
        plan: Any = None

        def call() -> None:
            nonlocal planner, plan
            planner = planner_class(
                topology=self.topology(),
                batch_size=BATCH_SIZE,
                constraints=self.constraints(),
                stats=[],
            )
            try:
                plan = planner.plan(self.module, self.sharders)
            except Exception as error:  # the peer's PlannerError is a class of its own
                plan = error

        with _quiet():
            sample = time_call(call)
        if isinstance(plan, Exception):
            return Planned(sample, error=f"{type(plan).__name__}: {str(plan).splitlines()[0]}")

        report = getattr(plan, "report", None)
        if report is None:
            return Planned(sample, self._slowest(planner))
        milliseconds = cost(report.inputs.problem, report.placement)
        return Planned(sample, milliseconds, report.bound.ms)

    def problem(self) -> PlanningProblem:
        """The library's options with its own estimates, on what its reservation leaves."""
        topology = self.topology()
        constraints = self.constraints()
        enumerator = self._planner_class("enumerators.EmbeddingEnumerator")
        reservation = self._planner_class("storage_reservations.HeuristicalStorageReservation")
        with _quiet():
            options = enumerator(topology, BATCH_SIZE, constraints).enumerate(
                self.module, self.sharders
            )
            reserved = reservation(percentage=0.15).reserve(
                topology, BATCH_SIZE, self.module, self.sharders, constraints
            )

        # TorchRec's topology may lack a group size, and the total of its Perf leaves the exchange
        # of ids out.
        group = getattr(reserved, "intra_group_size", None) or reserved.local_world_size
        ranks: Any = SimpleNamespace(
            world_size=reserved.world_size, intra_group_size=group, devices=reserved.devices
        )
        return PlanningProblem.of([_with_our_shards(option) for option in options], ranks)

    def _slowest(self, planner: Any) -> float:
        """Milliseconds of the slowest rank, as the peer's planner rates its own plan."""
        load = np.zeros(self.draw.world_size)
        for option in planner._best_plan:  # TorchRec keeps the chosen options nowhere else
            for shard in option.shards:
                load[shard.rank] += shard.perf.total
        return float(load.max())


def _with_our_shards(option: Any) -> ShardingOption:
    """An option of either library as ours, of which the search needs shards and sharding type."""
    shards = [
        Shard(
            shard.size,
            shard.offset,
            Storage(shard.storage.hbm, shard.storage.ddr),
            Perf(shard.perf.total, 0.0, 0.0, 0.0),
        )
        for shard in option.shards
    ]

    return ShardingOption(
        option.name,
        option.tensor,
        option.module,
        input_lengths=option.input_lengths,
        batch_size=option.batch_size,
        sharding_type=option.sharding_type,
        partition_by=option.partition_by,
        compute_kernel=option.compute_kernel,
        shards=ShardArrays.from_shards(shards),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings and log lines, of which a peer has many."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
