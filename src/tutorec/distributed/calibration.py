"""The speeds of this machine, from steps that are really trained: what ``tutorec calibrate`` does.

An estimate is a sum of counts, each times a number of the machine: bytes of lookups, bytes of
updates, distinct rows of updates, bytes on the wire, exchanges (`cost`). So steps are trained whose
counts differ as far as they can, forward and backward timed apart, and the numbers are those, none
below zero, that come nearest to what was measured, by the sum of squared relative errors. What was
measured are steps as a program takes them, with all the Python and copying around a kernel.

The clock is the processor's on the CPU, which leaves out what else the machine does and the waiting
for other ranks, and on a GPU the wall's, with the device synchronized. Of each step the lower
quartile of the rounds counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tutorec._calibration import Calibration, fingerprint
from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import (
    TableShard,
    column_wise_shards,
    data_parallel_shards,
    parameter_sharding,
    row_wise_shards,
    table_wise_shards,
)
from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan, ShardingType
from tutorec.distributed.planner.cost import exchanges, fixed_cost, shard_perf
from tutorec.distributed.planner.options import TableProfile
from tutorec.distributed.planner.topology import Floats, Topology
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd.pool import Ranks

_FUSED = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.01}
_BATCHES = 3  # drawn once; rounds take turns
_TIMEOUT = 300.0
_STAGE = "calibration"
# How often each step is trained: the first rounds do not count. With the cases below this is all
# that is done, so that it takes seconds: 14 rounds of less than 0.2 s, and 200 MB of tables to be
# made.
WARMUP = 2
ROUNDS = 12
_LEAST = 1e-15  # ms of a byte: what took no time at all is as fast as this
_COPIED = 16 * 2**20  # bytes from the host to a device


@dataclass(frozen=True)
class TableSize:
    """A table that one feature reads.

    Args:
        name: Its name.
        rows: R.
        columns: D.
        pooling: Ids in each bag.
    """

    name: str
    rows: int
    columns: int
    pooling: int

    @property
    def feature(self) -> str:
        """Who reads it."""
        return f"f_{self.name}"


@dataclass(frozen=True)
class Cut:
    """How a table is cut.

    Args:
        sharding: `ShardingType` value.
        ranks: Of its shards, where they are free.
    """

    sharding: str
    ranks: tuple[int, ...] = ()

    def shards(self, table: TableSize, world_size: int) -> list[TableShard]:
        """The shards of all ranks."""
        rows = table.rows
        columns = table.columns
        if self.sharding == "table_wise":
            return table_wise_shards(rows, columns, self.ranks[0])
        if self.sharding == "row_wise":
            return row_wise_shards(rows, columns, range(world_size))
        if self.sharding == "data_parallel":
            return data_parallel_shards(rows, columns, world_size)

        count = len(self.ranks)
        return column_wise_shards(rows, [columns // count] * count, self.ranks)


Plan = dict[str, Cut]
# Sharding types, rows, columns, ids of a bag, samples of a rank. Of each type a table for every
# rank, so that all ranks have the same to do. Hardly anything to do but exchanges; rows in the
# processor's cache and not; narrow and wide; many bytes to send; all together.
_ALL = ("table_wise", "row_wise", "column_wise", "data_parallel")
CASES: tuple[tuple[tuple[str, ...], int, int, int, int], ...] = (
    *(((sharding,), 8, 8, 1, 1) for sharding in _ALL),
    (_ALL, 8, 8, 1, 1),
    (("table_wise",), 1000, 64, 40, 256),
    (("table_wise",), 50_000, 64, 40, 256),
    (("table_wise",), 50_000, 16, 40, 256),
    (("table_wise",), 20_000, 128, 40, 256),
    (("row_wise",), 10_000, 64, 2, 1024),
    (("row_wise",), 50_000, 64, 20, 256),
    (("column_wise",), 20_000, 64, 20, 256),
    (("data_parallel",), 20_000, 64, 10, 256),
    (_ALL, 20_000, 64, 10, 256),
)


def case_plan(number: int, world_size: int) -> tuple[list[TableSize], Plan, int]:
    """The tables of a case, how they are cut, and B.

    Example:
        >>> tables, plan, samples = case_plan(0, 2)
        >>> [plan[table.name].ranks for table in tables], samples
        ([(0,), (1,)], 1)
    """
    types, rows, columns, pooling, samples = CASES[number]
    tables: list[TableSize] = []
    plan: Plan = {}

    for sharding in types:
        for rank in range(world_size):
            table = TableSize(f"t{len(tables)}", rows, columns, pooling)
            slices = (rank, (rank + 1) % world_size)
            ranks = {"table_wise": (rank,), "column_wise": slices}.get(sharding, ())
            plan[table.name] = Cut(sharding, ranks)
            tables.append(table)

    return tables, plan, samples


def loads(
    tables: Sequence[TableSize], plan: Mapping[str, Cut], samples: int, topology: Topology
) -> Floats:
    """The planner's milliseconds per rank without latency ``[W, 6]``; columns are `Perf`'s.

    Args:
        tables: The tables.
        plan: How each is cut.
        samples: B of a rank.
        topology: The machine.
    """
    estimates = np.zeros((topology.world_size, 6))
    for table in tables:
        ids = (float(samples * table.pooling),)
        profile = TableProfile(
            "",
            table.name,
            table.rows,
            table.columns,
            features=(table.feature,),
            samples=(float(samples),),
            ids=ids,
        )

        cut = plan[table.name]
        shards = cut.shards(table, topology.world_size)
        sizes = np.array([shard.sizes for shard in shards])
        perf = shard_perf(profile, ShardingType(cut.sharding), "fused", sizes, topology)
        np.add.at(estimates, [shard.rank for shard in shards], perf)

    return estimates


def estimated_ms(
    tables: Sequence[TableSize], plan: Mapping[str, Cut], samples: int, topology: Topology
) -> float:
    """The planner's milliseconds of a step under a plan: of the slowest rank, and of the exchanges.

    Args:
        tables: The tables.
        plan: How each is cut.
        samples: B of a rank.
        topology: The machine.

    Example:
        >>> tables, plan, samples = case_plan(6, 2)
        >>> rows = {table.name: Cut("row_wise") for table in tables}
        >>> both = [
        ...     estimated_ms(tables, cuts, samples, Topology.laptop(2)) for cuts in (rows, plan)
        ... ]
        >>> both[0] > both[1] > 0
        True
    """
    types = {cut.sharding for cut in plan.values()}
    busiest = float(loads(tables, plan, samples, topology).sum(axis=1).max())
    return busiest + sum(fixed_cost(topology, sharding, pooled=True) for sharding in types)


def calibrate(devices: Sequence[str] | None = None) -> Calibration:
    """Measure this machine: two ranks on its processor, and one on each GPU; nothing is saved.

    Args:
        devices: Device types; by default ``"cpu"``, and ``"cuda"`` where there are GPUs.
    """
    gpus = torch.cuda.device_count()
    speeds = {}

    for device in devices or ("cpu", *(("cuda",) if gpus else ())):
        world_size = 2 if device == "cpu" else gpus
        with Ranks(
            world_size, backend="gloo" if device == "cpu" else "auto", timeout=_TIMEOUT
        ) as ranks:
            measured = ranks.run(_measure, device)
        speeds[device] = solve(np.stack([seconds for seconds, _ in measured], axis=1) * 1e3, device)

        copied = [copy_bandwidth for _, copy_bandwidth in measured if copy_bandwidth]
        if copied:
            speeds[device]["hbm_to_ddr_mem_bw"] = float(np.mean(copied))
    return Calibration(datetime.now(UTC).date().isoformat(), fingerprint(), speeds)


def solve(times: Floats, device: str) -> dict[str, float]:
    """The machine's numbers from the times of the cases.

    Args:
        times: ``[cases, W, 2]`` ms of each rank, forward and backward.
        device: What they were measured on.

    Returns:
        Arguments of `Topology`. Without a second rank those of exchanges are left out.
    """
    from scipy.optimize import nnls  # brings all of scipy's optimizers

    world_size = times.shape[1]
    counts = np.stack([_counts(number, world_size, device) for number in range(len(CASES))])
    measured = times > 0
    lines = counts[measured] / times[measured][:, None]
    used = np.flatnonzero(lines.any(axis=0))
    scale = lines[:, used].max(axis=0)

    numbers = np.zeros(lines.shape[1])
    numbers[used] = nnls(lines[:, used] / scale, np.ones(len(lines)))[0] / scale
    lookup, update, row_ms, wire, latency = np.maximum(numbers, [_LEAST, 0, 0, _LEAST, 0]).tolist()

    memory = "ddr_mem_bw" if device == "cpu" else "hbm_mem_bw"
    constants = {memory: 1 / lookup, "bwd_compute_multiplier": update / lookup, "row_ms": row_ms}
    if world_size == 1:
        return constants
    return {**constants, "intra_host_bw": 1 / wire, "latency_ms": latency}


def _counts(number: int, world_size: int, device: str) -> Floats:
    """The work of a case ``[W, 2, 5]``, forward and backward: `cost` with speeds of one."""
    tables, plan, samples = case_plan(number, world_size)
    ones: dict[str, Any] = {
        "ddr_mem_bw": 1.0,
        "hbm_mem_bw": 1.0,
        "intra_host_bw": 1.0,
    }
    again, moved, with_rows = (
        loads(
            tables,
            plan,
            samples,
            Topology(world_size, device, bwd_compute_multiplier=update, row_ms=row, **ones),
        )
        for update, row in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
    )

    counts = np.zeros((world_size, 2, 5))
    counts[:, 0, 0] = moved[:, 0]
    counts[:, 1, 0] = again[:, 2]
    counts[:, 1, 1] = moved[:, 2] - again[:, 2]
    counts[:, 1, 2] = with_rows[:, 2] - moved[:, 2]
    counts[:, 0, 3] = moved[:, 1] + moved[:, 4]
    counts[:, 1, 3] = moved[:, 3]

    for sharding in {cut.sharding for cut in plan.values()}:
        rounds = exchanges(Topology(world_size, device), ShardingType(sharding), pooled=True)
        back = rounds if sharding == "data_parallel" else min(rounds, 1)
        counts[:, :, 4] += rounds - back, back
    return counts


def _measure(device_type: str, rank: int, world_size: int) -> tuple[Floats, float]:
    """``[cases, 2]`` seconds forward and backward of this rank; bytes per ms from host, or 0."""
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
    group = _rank_group()
    steps = []
    for number in range(len(CASES)):
        tables, plan, samples = case_plan(number, world_size)
        batches = [
            draw_batch(tables, samples, 100 * rank + batch, device) for batch in range(_BATCHES)
        ]
        steps.append((Step(tables, plan, samples, device), batches))

    times = np.zeros((ROUNDS + WARMUP, len(steps), 2))
    for turn in range(len(times)):
        for number, (step, batches) in enumerate(steps):
            comm.all_gather_ints([turn], group, _STAGE)  # all ranks begin together
            times[turn, number] = step.seconds(batches[turn % _BATCHES])

    return np.percentile(times[WARMUP:], 25, axis=0), _copy_bandwidth(device)


class Step:
    """A training step of a sharded collection; all ranks build one together.

    Args:
        tables: The tables.
        plan: How each is cut.
        samples: B of a rank.
        device: Where they live.
    """

    def __init__(
        self,
        tables: Sequence[TableSize],
        plan: Mapping[str, Cut],
        samples: int,
        device: torch.device,
    ) -> None:
        group = _rank_group()
        configs = [
            EmbeddingBagConfig(
                num_embeddings=table.rows,
                embedding_dim=table.columns,
                name=table.name,
                feature_names=[table.feature],
            )
            for table in tables
        ]

        entries = {
            table.name: parameter_sharding(
                ShardingType(plan[table.name].sharding),
                plan[table.name].shards(table, group.size()),
                device.type,
            )
            for table in tables
        }

        module = EmbeddingBagCollection(configs, device=torch.device("meta"))
        env = ShardingEnv.from_process_group(group)
        sharder = EmbeddingBagCollectionSharder(_FUSED)
        self._sharded = sharder.shard(module, EmbeddingModuleShardingPlan(entries), env, device)
        self._gradient = torch.ones(samples, sum(table.columns for table in tables), device=device)
        self._device = device

    def __call__(self, batch: KeyedJaggedTensor) -> None:
        """Forward and backward."""
        self._sharded(batch).wait().values().backward(self._gradient)

    def seconds(self, batch: KeyedJaggedTensor) -> tuple[float, float]:
        """Seconds of forward and of backward, by the clock of the device."""
        first = self._now()
        pooled = self._sharded(batch).wait().values()
        second = self._now()
        pooled.backward(self._gradient)
        return second - first, self._now() - second

    def _now(self) -> float:
        if self._device.type == "cpu":
            return process_time()
        torch.cuda.synchronize(self._device)
        return perf_counter()


def draw_batch(
    tables: Sequence[TableSize], samples: int, number: int, device: torch.device
) -> KeyedJaggedTensor:
    """Ids spread evenly over rows, equally many in each bag.

    Args:
        tables: The tables.
        samples: B.
        number: Which of the batches.
        device: Its device.
    """
    draw = torch.Generator().manual_seed(number)
    ids = [
        torch.randint(0, table.rows, (samples * table.pooling,), generator=draw) for table in tables
    ]

    lengths = torch.tensor([table.pooling for table in tables]).repeat_interleave(samples)
    return KeyedJaggedTensor(
        [table.feature for table in tables], torch.cat(ids), lengths=lengths
    ).to(device)


def _rank_group() -> dist.ProcessGroup:
    group = comm.default_group()
    assert group is not None, "a step is measured on a rank of a pool"
    return group


def _copy_bandwidth(device: torch.device) -> float:
    """Bytes per ms of a copy from page-locked memory; 0 on the CPU, where there is none."""
    if device.type == "cpu":
        return 0.0
    host = torch.zeros(_COPIED, dtype=torch.uint8, pin_memory=True)

    def copy() -> float:
        torch.cuda.synchronize(device)
        first = perf_counter()
        host.to(device)
        torch.cuda.synchronize(device)
        return 1e3 * (perf_counter() - first)

    return _COPIED / float(np.percentile([copy() for _ in range(ROUNDS)], 25))


def speeds_text(topology: Topology) -> str:
    """The speeds of one rank, in a line."""

    def gib(bandwidth: float) -> str:
        return f"{bandwidth * 1000 / 1024**3:.2f} GiB/s"

    memory = topology.ddr_mem_bw if topology.compute_device == "cpu" else topology.hbm_mem_bw
    copied = ""
    if topology.compute_device != "cpu":
        copied = f", from the host {gib(topology.hbm_to_ddr_mem_bw)}"

    return (
        f"rows of a lookup {gib(memory)}; an update {topology.bwd_compute_multiplier:.2f} times "
        f"that and {topology.row_ms * 1e6:.0f} ns a row; sent {gib(topology.intra_host_bw)}, "
        f"{topology.latency_ms:.3f} ms an exchange{copied}"
    )


__all__ = [
    "CASES",
    "Cut",
    "Plan",
    "Step",
    "TableSize",
    "calibrate",
    "draw_batch",
    "estimated_ms",
    "loads",
    "solve",
    "speeds_text",
]
