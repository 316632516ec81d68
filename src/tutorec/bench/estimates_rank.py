"""What ``bench estimates`` runs on each rank: steps of drawn plans in turn, and the constants of a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.tbe import GroupSpec, TableSpec, build_table_batch
from tutorec.bench.harness import Sample, interleave, time_call
from tutorec.distributed import comm
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import EmbeddingModuleShardingPlan, ShardingType
from tutorec.distributed.shard_geometry import (
    ShardPiece,
    column_wise_pieces,
    data_parallel_pieces,
    parameter_sharding,
    row_wise_pieces,
    table_wise_pieces,
)
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_STAGE = "bench"
_FUSED = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.01}
_BATCHES = 4  # drawn once; rounds take turns
# Of the constants: tables, rows, samples, ids of a bag and widths of the lookups; bytes of an exchange.
_LOOKUP, _WIDTHS = (4, 200_000, 256, 10), (16, 64, 128)
_PACKET = 2**20


@dataclass(frozen=True)
class DrawnTable:
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
        kind: `ShardingType` value.
        ranks: Of its pieces, where they are free.
    """

    kind: str
    ranks: tuple[int, ...]

    def pieces(self, table: DrawnTable, world_size: int) -> list[ShardPiece]:
        """What ranks hold."""
        rows, columns, count = table.rows, table.columns, len(self.ranks)
        return {
            "table_wise": lambda: table_wise_pieces(rows, columns, self.ranks[0]),
            "column_wise": lambda: column_wise_pieces(rows, [columns // count] * count, self.ranks),
            "row_wise": lambda: row_wise_pieces(rows, columns, range(world_size)),
            "data_parallel": lambda: data_parallel_pieces(rows, columns, world_size),
        }[self.kind]()


Plan = dict[str, Cut]


class Constants(NamedTuple):
    """What a machine does.

    Args:
        row_bandwidth: Bytes per ms of rows and bags that a lookup moves.
        backward: Time of the bytes of an update for that of the bytes of a lookup.
        id_ms: Of an id in an update, beyond its bytes.
        wire_bandwidth: Bytes per ms that a rank sends.
        latency_ms: Of an exchange, the code around it included.
    """

    row_bandwidth: float
    backward: float
    id_ms: float
    wire_bandwidth: float
    latency_ms: float


def measure_plans(
    tables: Sequence[DrawnTable], plans: Sequence[Plan], samples: int, rounds: int, rank: int, world_size: int
) -> list[list[Sample]]:
    """Steps of each plan on this rank, in turn with the others; every rank calls it at the same time.

    Args:
        tables: The tables.
        plans: How they are cut.
        samples: B of each rank.
        rounds: Rounds that count.
        rank: This rank.
        world_size: W.

    Returns:
        For each plan one measurement for each round.
    """
    batches = [_batch(tables, samples, 100 * rank + number) for number in range(_BATCHES)]

    def variant(plan: Plan) -> Callable[[int], Sample]:
        step = _stepper(tables, plan, samples, world_size)

        def sample(number: int) -> Sample:
            comm.all_gather_ints([number], _group(), _STAGE)  # all ranks begin together
            return time_call(lambda: step(batches[number % _BATCHES]))

        return sample

    found = interleave({str(number): variant(plan) for number, plan in enumerate(plans)}, rounds, warmup=2)
    return [found[str(number)] for number in range(len(plans))]


def measure_constants(rounds: int, rank: int, world_size: int) -> Constants:
    """The constants, while the other ranks are as busy; of the quickest round, which nothing else has disturbed.

    Args:
        rounds: How many.
        rank: This rank.
        world_size: W.
    """
    moved, forward, backward = (np.array(each) for each in zip(*(_lookup_ms(w, rounds) for w in _WIDTHS), strict=True))
    bandwidth = float(moved.sum() / forward.sum())
    # Of lookups of several widths: backward = slope * bytes + what their ids take.
    slope, of_ids = np.polyfit(moved, backward, 1)
    _, _, samples, pooling = _LOOKUP
    packet = torch.zeros(_PACKET // 4 * world_size)
    counts = [_PACKET // 4] * world_size

    def exchange() -> object:
        return comm.all_to_all(packet, counts, counts, _group(), _STAGE).wait()

    # Tables of a row: what is left of a step are its exchanges, and the code around them.
    tables = [DrawnTable("t0", 1, 4, 1), DrawnTable("t1", 1, 4, 1)]
    whole, rows = Cut("table_wise", (0,)), Cut("row_wise", ())
    steps = [_stepper(tables, plan, 1, world_size) for plan in ({"t0": whole, "t1": whole}, {"t0": whole, "t1": rows})]
    batch = _batch(tables, 1, rank)
    one, two = (_least_ms(lambda step=step: step(batch), 4 * rounds) for step in steps)
    return Constants(
        row_bandwidth=bandwidth,
        backward=float(slope) * bandwidth,
        id_ms=float(of_ids) / (_LOOKUP[0] * samples * pooling),
        wire_bandwidth=(world_size - 1) * _PACKET / _least_ms(exchange, rounds),
        latency_ms=(two - one) / 4,
    )


def _lookup_ms(columns: int, rounds: int) -> tuple[float, float, float]:
    """The bytes that a lookup moves by the formula of the cost, its milliseconds, and those of its update."""
    count, rows, samples, pooling = _LOOKUP
    spec = GroupSpec(tuple(TableSpec(f"t{i}", rows, columns) for i in range(count)), tuple(range(count)))
    operator = build_table_batch(spec, optimizer=OptimizerSpec("rowwise_adagrad"), device=torch.device("cpu"))
    ids, bags = count * samples * pooling, count * samples
    offsets = torch.arange(0, ids + 1, pooling, dtype=torch.int32)
    forward, backward = [], []
    for _ in range(rounds):
        values = torch.randint(0, rows, (ids,), dtype=torch.int32)
        comm.all_gather_ints([0], _group(), _STAGE)
        # Nothing waits here for another rank, so that time of the processor leaves out what else the machine does.
        first = process_time()
        pooled = operator(values, offsets)
        second = process_time()
        gradient = torch.ones_like(pooled)
        third = process_time()
        pooled.backward(gradient)
        forward.append(second - first)
        backward.append(process_time() - third)
    moved = ids * (8 + max(4 * columns, 128)) + 4 * bags * columns
    return float(moved), 1e3 * min(forward), 1e3 * min(backward)


def _stepper(
    tables: Sequence[DrawnTable], plan: Mapping[str, Cut], samples: int, world_size: int
) -> Callable[[KeyedJaggedTensor], None]:
    """A training step of the collection under a plan; built here, which every rank does together."""
    configs = [
        EmbeddingBagConfig(
            num_embeddings=table.rows, embedding_dim=table.columns, name=table.name, feature_names=[table.feature]
        )
        for table in tables
    ]
    entries = EmbeddingModuleShardingPlan(
        {
            table.name: parameter_sharding(
                ShardingType(plan[table.name].kind), plan[table.name].pieces(table, world_size), "cpu"
            )
            for table in tables
        }
    )
    module = EmbeddingBagCollection(configs, device=torch.device("meta"))
    sharded = EmbeddingBagCollectionSharder(_FUSED).shard(
        module, entries, ShardingEnv.from_process_group(_group()), torch.device("cpu")
    )
    gradient = torch.ones(samples, sum(table.columns for table in tables))

    def step(batch: KeyedJaggedTensor) -> None:
        sharded(batch).wait().values().backward(gradient)

    return step


def _batch(tables: Sequence[DrawnTable], samples: int, number: int) -> KeyedJaggedTensor:
    """Ids spread evenly over rows, equally many in each bag."""
    draw = torch.Generator().manual_seed(number)
    ids = [torch.randint(0, table.rows, (samples * table.pooling,), generator=draw) for table in tables]
    lengths = torch.tensor([table.pooling for table in tables]).repeat_interleave(samples)
    return KeyedJaggedTensor([table.feature for table in tables], torch.cat(ids), lengths=lengths)


def _least_ms(call: Callable[[], object], rounds: int) -> float:
    """Milliseconds of a call that all ranks make together, in the quickest round."""
    found = []
    for _ in range(rounds):
        comm.all_gather_ints([0], _group(), _STAGE)
        first = perf_counter()
        call()
        found.append(perf_counter() - first)
    return 1e3 * min(found)


def _group() -> dist.ProcessGroup:
    group = comm.default_group()
    assert group is not None, "the ranks of a pool have a group"
    return group
