"""What ``sharded`` runs on each rank: one case in both libraries, on the same input."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.library import (
    OURS,
    RATE,
    Batch,
    Library,
    Sizes,
    bag_configs,
    finish,
    fresh_batches,
    fuse_optimizer,
)
from benchmarks.memory import peak_during, resident
from benchmarks.rows import Row, Timed, time_row
from tutorec.distributed import comm
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tutorec.distributed.traffic import Traffic, count_traffic
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd.rank import device

_STAGE = "bench"


@dataclass(frozen=True)
class Case:
    """One operation that is measured.

    Args:
        name: Its name.
        operation: Forward, a whole training step, or the exchange of ids alone.
        sharding: A `ShardingType` value.
        optimizer: ``"sgd"`` or ``"rowwise_adagrad"``.
        samples: B of each rank; None: that of the tables' sizes.
        calls: Calls in one measurement; None: those of the tables' sizes.
    """

    name: str
    operation: Literal["forward", "step", "exchange"]
    sharding: str = "table_wise"
    optimizer: str = "rowwise_adagrad"
    samples: int | None = None
    calls: int | None = None

    def sizes(self, tables: Sizes) -> Sizes:
        """The tables with the case's batches."""
        samples = self.samples or tables.samples
        return replace(tables, samples=samples, calls=self.calls or tables.calls)


# (table, first row, first column) -> rows of a rank's shard
Shards = dict[tuple[str, int, int], Tensor]


def measure(
    case: Case,
    tables: Sizes,
    roots: Sequence[str],
    rounds: int,
    rank: int,
    world_size: int,
    hosts: int = 1,
) -> tuple[Timed, Traffic]:
    """Time a case on this rank and its device, in turn with the others; collective.

    Args:
        case: The operation.
        tables: Its tables.
        roots: Libraries; ours first.
        rounds: Rounds that count.
        rank: This rank.
        world_size: W.
        hosts: Hosts that share the ranks evenly.

    Returns:
        Its samples, and what one call of ours sent from this rank.
    """
    quiet(roots)
    sizes = case.sizes(tables)
    calls: dict[str, Callable[[Batch], Any]] = {}
    states: dict[str, Callable[[], Shards]] = {}
    for root in roots:
        calls[root], states[root] = _call(Library(root), case, sizes, world_size // hosts)

    def inputs(_: str, number: int) -> list[Batch]:
        return fresh_batches(sizes, number, device(), rank)

    checked = True if world_size > 1 else None
    row = Row(case.name, calls, inputs, states, tensors=_tensors, checked=checked)
    timed = time_row(row, rounds, everywhere)

    traffic = Traffic()
    if timed.samples:
        with count_traffic() as traffic:
            calls[OURS](inputs(OURS, -2000)[0])
    return timed, traffic


def step_memory(root: str, sizes: Sizes, rank: int, world_size: int) -> tuple[int, int]:
    """Peak bytes of three row-wise Adagrad steps after a warm-up, and bytes of the rank's rows.

    Args:
        root: The library.
        sizes: Its tables.
        rank: This rank.
        world_size: W.
    """

    def steps(sizes: Sizes) -> tuple[Callable[[], None], int]:
        call, shards = _call(Library(root), Case("memory", "step"), sizes, world_size, on_meta=True)
        batches = fresh_batches(sizes, 0, device(), rank)
        weights = sum(rows.nbytes for rows in shards().values())
        gc.collect()

        def run_steps() -> None:
            for batch in batches:
                call(batch)

        return run_steps, weights

    warm_up, _ = steps(replace(sizes, rows=100, calls=2))
    warm_up()
    before = resident()
    run_steps, weights = steps(replace(sizes, calls=3))
    return peak_during(run_steps) - before, weights


def quiet(roots: Iterable[str]) -> None:
    """Let libraries log errors only, and show no warnings: those of a peer do not matter here."""
    for root in roots:
        logging.getLogger(root).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def rank_group() -> dist.ProcessGroup:
    """The group of all ranks; every case runs on a rank of a pool."""
    group = comm.default_group()
    assert group is not None, "a case runs on a rank of a pool"
    return group


def everywhere(flag: bool) -> bool:
    """Whether a flag is true on all ranks; each waits here for the others."""
    flags = comm.all_gather_ints([int(flag)], rank_group(), _STAGE)
    return all(rank_flag for (rank_flag,) in flags)


def _call(
    library: Library, case: Case, sizes: Sizes, local_size: int, on_meta: bool = False
) -> tuple[Callable[[Batch], Any], Callable[[], Shards]]:
    """What is timed, and what gives this rank's shards."""
    if case.operation == "exchange":
        return _exchange(library, sizes), dict

    sharded, optimizer = _sharded(library, case, sizes, local_size, on_meta)
    # Alike for every feature: the peer returns columns in another order than the caller's.
    values = torch.linspace(-1, 1, sizes.samples * sizes.columns, device=device())
    gradient = values.view(sizes.samples, -1).repeat(1, sizes.tables)

    def forward(batch: Batch) -> Any:
        with torch.no_grad():
            result = sharded(library.batch(batch)).wait()
            finish(result.values())
        return result

    def step(batch: Batch) -> Any:
        result = sharded(library.batch(batch)).wait()
        pooled = result.values()
        if optimizer is not None:
            optimizer.zero_grad()
        pooled.backward(gradient)
        if optimizer is not None:
            optimizer.step()
        finish(pooled)
        return result

    if not on_meta:
        fill_tables(shards_of(sharded), sizes)
    return forward if case.operation == "forward" else step, lambda: shards_of(sharded)


def _exchange(library: Library, sizes: Sizes) -> Callable[[Batch], Any]:
    """Send ids as a sharded collection does: ours in 32 bits, since no table has 2**31 rows."""
    group = rank_group()
    bounds = [sizes.tables * rank // group.size() for rank in range(group.size() + 1)]
    splits = [end - first for first, end in pairwise(bounds)]
    narrow = {"ids_dtype": torch.int32} if library.root == OURS else {}
    exchange = library.get("distributed.dist_data.KJTAllToAll")(group, splits, **narrow)

    def call(batch: Batch) -> Any:
        received = exchange(library.batch(batch)).wait().wait()
        received.values(), received.lengths(), received.offsets()
        return received

    return call


def _sharded(
    library: Library, case: Case, sizes: Sizes, local_size: int, on_meta: bool
) -> tuple[Any, Any]:
    """The sharded collection, and the optimizer that a peer's data-parallel tables need."""
    collection = library.get("modules.embedding_modules.EmbeddingBagCollection")(
        tables=bag_configs(library, sizes), device=torch.device("meta") if on_meta else device()
    )
    stepped_by_caller = case.sharding == "data_parallel" and library.root != OURS
    if not stepped_by_caller:
        fuse_optimizer(library, case.optimizer, collection)

    sharder = library.get("distributed.embeddingbag.EmbeddingBagCollectionSharder")()
    env = library.get("distributed.types.ShardingEnv").from_process_group(rank_group())
    plan = module_plan(library, sizes, case.sharding, local_size)
    sharded = sharder.shard(collection, plan, env, device())
    optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE) if stepped_by_caller else None
    return sharded, optimizer


def module_plan(library: Library, sizes: Sizes, sharding: str, local_size: int) -> Any:
    """The same plan in both libraries; kernels are fused, but for the peer's data-parallel tables.

    Ours is copied for the peer entry by entry: its hand-written plans choose dense kernels, cannot
    name the ranks of a host, and cut no grid of tables of 64 columns.

    Args:
        library: Whose plan.
        sizes: The tables.
        sharding: A `ShardingType` value, of all tables.
        local_size: L, ranks of a host.
    """
    world_size = rank_group().size()
    hosts = world_size // local_size
    generators: dict[str, Callable[[int], ParameterShardingGenerator]] = {
        "data_parallel": lambda i: data_parallel(),
        "table_wise": lambda i: table_wise(rank=i % world_size),
        "row_wise": lambda i: row_wise(),
        "column_wise": lambda i: column_wise(ranks=sorted({i % world_size, (i + 1) % world_size})),
        "table_column_wise": lambda i: table_column_wise(host_index=i % hosts),
        "table_row_wise": lambda i: table_row_wise(host_index=i % hosts),
        "grid_shard": lambda i: grid_shard(host_indexes=list(range(hosts))),
    }
    tables = bag_configs(Library(OURS), sizes)
    plan = construct_module_sharding_plan(
        EmbeddingBagCollection(tables, device=torch.device("meta")),
        {table.name: generators[sharding](i) for i, table in enumerate(tables)},
        local_size=local_size,
        world_size=world_size,
        device_type=device().type,
    )
    if library.root == OURS:
        return plan

    kernel = "dense" if sharding == "data_parallel" else "fused"
    entry_class = library.get("distributed.types.ParameterSharding")
    entries = library.get("distributed.types.EmbeddingModuleShardingPlan")()
    for name, ours in plan.items():
        entries[name] = entry_class(
            ours.sharding_type, kernel, ranks=ours.ranks, sharding_spec=ours.sharding_spec
        )
    return entries


def shards_of(sharded: Any) -> Shards:
    """The rows of this rank; writing to them changes tables."""
    return {(table, row, column): rows for table, row, column, rows in _local_shards(sharded)}


def _local_shards(sharded: Any) -> Iterator[tuple[str, int, int, Tensor]]:
    for name, value in sharded.state_dict().items():
        table = name.split(".")[-2]
        if not hasattr(value, "local_shards"):
            yield table, 0, 0, value.detach()
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield table, row, column, shard.tensor.detach()


@torch.no_grad()
def fill_tables(shards: Shards, sizes: Sizes) -> None:
    """The same rows in every library, under any plan."""
    for index in range(sizes.tables):
        table_shards = {key: rows for key, rows in shards.items() if key[0] == f"t{index}"}
        if not table_shards:
            continue

        generator = torch.Generator().manual_seed(index)
        table = torch.rand(sizes.rows, sizes.columns, generator=generator) - 0.5
        for (_, row, column), rows in table_shards.items():
            rows.copy_(table[row : row + rows.shape[0], column : column + rows.shape[1]])


def _tensors(result: Any) -> list[Tensor]:
    """Of a KeyedTensor its features by name, of a KeyedJaggedTensor ids and lengths."""
    if hasattr(result, "lengths"):
        return [result.values(), result.lengths()]
    return [result[key].detach() for key in sorted(result.keys())]
