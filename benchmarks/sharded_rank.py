"""What ``bench sharded`` runs on each rank: one case in both libraries, on the same input."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness import Sample, interleave
from benchmarks.memory import peak_during, resident
from benchmarks.peer import (
    OURS,
    RATE,
    Batch,
    Library,
    Sizes,
    bag_configs,
    finish,
    fresh_batches,
    fuse_optimizer,
    time_each,
)
from tutorec._validation import validation
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
from tutorec.spmd.devices import device

_STAGE = "bench"
_PLAN_TYPES = ("ParameterSharding", "EmbeddingModuleShardingPlan")


@dataclass(frozen=True)
class Case:
    """One thing that is measured.

    Args:
        name: Its name.
        kind: Forward, a whole training step, or the exchange of ids alone.
        sharding: A `ShardingType` value.
        optimizer: ``"sgd"`` or ``"rowwise_adagrad"``.
        samples: B of each rank.
        repeats: Calls in one measurement, each on a fresh batch.
    """

    name: str
    kind: Literal["forward", "step", "exchange"]
    sharding: str = "table_wise"
    optimizer: str = "rowwise_adagrad"
    samples: int = 256
    repeats: int = 2


@dataclass
class Found:
    """What a rank found.

    Args:
        distance: The largest difference between the two libraries' results, before anything was
            timed.
        samples: Variant -> one measurement for each round; empty where the results differ.
        traffic: What one call of ours sent from this rank.
    """

    distance: float = 0.0
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


# Gives a KeyedTensor, or where ids alone are exchanged a KeyedJaggedTensor.
Call = Callable[[Batch], Any]

# Float32 sums in another order, two steps of them.
TOLERANCE = 1e-4


def measure(
    case: Case,
    sizes: Sizes,
    roots: Sequence[str],
    rounds: int,
    rank: int,
    world_size: int,
    hosts: int = 1,
) -> Found:
    """Time a case on this rank and its device, in turn with the others; collective.

    Args:
        case: What to run.
        sizes: On which tables.
        roots: Libraries; ours first.
        rounds: Rounds that count.
        rank: This rank.
        world_size: W.
        hosts: Hosts that share the ranks evenly.

    Returns:
        Its samples; without them where results differ on some rank.
    """
    quiet(roots)
    made = {root: _call(Library(root), case, sizes, world_size // hosts) for root in roots}
    calls = {root: call for root, (call, _) in made.items()}
    batches = partial(fresh_batches, sizes, case.samples, device=device(), rank=rank)
    measured = Found(_distance(batches(-1000, 2), calls, [pieces for _, pieces in made.values()]))
    if not everywhere(measured.distance <= TOLERANCE):
        return measured
    [one] = batches(-2000, 1)
    with count_traffic() as measured.traffic:
        calls[OURS](one)

    def variant(root: str, checks: bool) -> Callable[[int], Sample]:
        def sample(number: int) -> Sample:
            fresh = batches(number, case.repeats)
            with validation(checks):
                everywhere(True)  # all ranks begin together
                return time_each(calls[root], fresh)

        return sample

    variants = {f"{case.name}: {root}": variant(root, world_size > 1) for root in roots}
    if world_size == 1:
        variants[f"{case.name}: {OURS} checked"] = variant(OURS, True)
    measured.samples = interleave(variants, rounds, warmup=2)
    return measured


def step_memory(root: str, sizes: Sizes, rank: int, world_size: int) -> tuple[int, int]:
    """Peak bytes of three row-wise Adagrad steps after a warm-up, and bytes of the rank's rows.

    Args:
        root: The library.
        sizes: Its tables.
        rank: This rank.
        world_size: W.
    """
    case = Case("memory", "step")

    def steps(of: Sizes, count: int) -> tuple[Callable[[], None], int]:
        call, pieces = _call(Library(root), case, of, world_size, on_meta=True)
        batches = fresh_batches(of, case.samples, 0, count, device(), rank)
        held = sum(piece.numel() * piece.element_size() for piece in pieces().values())
        gc.collect()

        def run_them() -> None:
            for batch in batches:
                call(batch)

        return run_them, held

    steps(Sizes(sizes.tables, 100, sizes.columns, sizes.pooling), 2)[0]()
    before = resident()
    run_them, held = steps(sizes, 3)
    return peak_during(run_them) - before, held


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
    """Whether all ranks say so; each waits here for the others."""
    flags = comm.all_gather_ints([int(flag)], rank_group(), _STAGE)
    return all(of_rank for (of_rank,) in flags)


Pieces = Callable[[], dict[tuple[str, int, int], Tensor]]


def _call(
    library: Library, case: Case, sizes: Sizes, local_size: int, on_meta: bool = False
) -> tuple[Call, Pieces]:
    """What is timed, and this rank's shards: (name, first row, first column) -> rows."""
    if case.kind == "exchange":
        return _exchange(library, sizes), dict
    sharded, optimizer = _sharded(library, case, sizes, local_size, on_meta)
    batch_of = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
    # Alike for every feature: the peer brings columns home in another order than the caller's.
    values = torch.linspace(-1, 1, case.samples * sizes.columns, device=device())
    gradient = values.view(case.samples, -1).repeat(1, sizes.tables)

    def call(batch: Batch) -> Any:
        keys, values, lengths = batch
        with torch.no_grad() if case.kind == "forward" else nullcontext():
            result = sharded(batch_of(keys, values, lengths=lengths)).wait()
            pooled = result.values()
        if case.kind == "step":
            if optimizer is not None:
                optimizer.zero_grad()
            pooled.backward(gradient)
            if optimizer is not None:
                optimizer.step()
        finish(pooled)
        return result

    def pieces() -> dict[tuple[str, int, int], Tensor]:
        return {(name, row, column): piece for name, row, column, piece in table_pieces(sharded)}

    if not on_meta:
        fill_tables(pieces(), sizes)
    return call, pieces


def _exchange(library: Library, sizes: Sizes) -> Call:
    """Send ids as a sharded collection does: ours in 32 bits, since no table has 2**31 rows."""
    group = rank_group()
    bounds = [sizes.tables * r // group.size() for r in range(group.size() + 1)]
    narrow = {"ids_dtype": torch.int32} if library.root == OURS else {}
    splits = [end - first for first, end in pairwise(bounds)]
    move = library.get("distributed.dist_data.KJTAllToAll")(group, splits, **narrow)
    batch_of = library.get("sparse.jagged_tensor.KeyedJaggedTensor")

    def call(batch: Batch) -> Any:
        keys, values, lengths = batch
        arrived = move(batch_of(keys, values, lengths=lengths)).wait().wait()
        arrived.values(), arrived.lengths(), arrived.offsets()
        return arrived

    return call


def _sharded(
    library: Library, case: Case, sizes: Sizes, local_size: int, on_meta: bool
) -> tuple[Any, Any]:
    """The sharded collection, and the optimizer that a peer's data-parallel tables need."""
    made = library.get("modules.embedding_modules.EmbeddingBagCollection")
    collection = made(
        tables=bag_configs(library, sizes), device=torch.device("meta") if on_meta else device()
    )
    by_caller = case.sharding == "data_parallel" and library.root != OURS
    if not by_caller:
        fuse_optimizer(library, case.optimizer, collection)
    sharder = library.get("distributed.embeddingbag.EmbeddingBagCollectionSharder")()
    env = library.get("distributed.types.ShardingEnv").from_process_group(rank_group())
    plan = module_plan(library, sizes, case.sharding, local_size)
    sharded = sharder.shard(collection, plan, env, device())
    optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE) if by_caller else None
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
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    plan = construct_module_sharding_plan(
        collection,
        {table.name: generators[sharding](i) for i, table in enumerate(tables)},
        local_size=local_size,
        world_size=world_size,
        device_type=device().type,
    )
    return in_library(library, plan, "dense" if sharding == "data_parallel" else "fused")


def in_library(library: Library, plan: Any, kernel: str) -> Any:
    """A plan of ours, entry by entry, in a library's classes.

    Args:
        library: Whose plan.
        plan: Of one module.
        kernel: Of every table, where it is not ours.
    """
    if library.root == OURS:
        return plan
    entry_of, plan_of = (library.get(f"distributed.types.{name}") for name in _PLAN_TYPES)
    entries = plan_of()
    for name, ours in plan.items():
        entries[name] = entry_of(
            ours.sharding_type, kernel, ranks=ours.ranks, sharding_spec=ours.sharding_spec
        )
    return entries


def table_pieces(sharded: Any) -> Iterator[tuple[str, int, int, Tensor]]:
    """(table, first row, first column, rows) of this rank; writing to the rows changes tables."""
    for name, value in sharded.state_dict().items():
        table = name.split(".")[-2]
        if not hasattr(value, "local_shards"):
            yield table, 0, 0, value.detach()
            continue
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield table, row, column, shard.tensor.detach()


def slowest(of_ranks: Sequence[dict[str, list[Sample]]]) -> dict[str, list[Sample]]:
    """Of each variant and round the slowest rank's seconds."""
    return {
        name: [
            Sample(max(sample.cpu for sample in one), max(sample.wall for sample in one))
            for one in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)
        ]
        for name in of_ranks[0]
    }


def agreed(results: Sequence[Found], differ: str) -> dict[str, list[Sample]]:
    """The slowest rank's samples; refuses libraries whose results differ.

    Args:
        results: Of each rank.
        differ: What differs then, as in ``"a and b differ"``.

    Raises:
        ValueError: Results differed on some rank, so that nothing was timed.
    """
    if not all(of_rank.samples for of_rank in results):
        worst = max(range(len(results)), key=lambda rank: results[rank].distance)
        raise ValueError(
            f"{differ} by up to {results[worst].distance:.2g} on rank {worst}; nothing was timed"
        )
    return slowest([of_rank.samples for of_rank in results])


@torch.no_grad()
def fill_tables(pieces: dict[tuple[str, int, int], Tensor], sizes: Sizes) -> None:
    """The same rows in every library, under any plan."""
    for i in range(sizes.tables):
        of_table = {place: piece for place, piece in pieces.items() if place[0] == f"t{i}"}
        if not of_table:
            continue
        rows = (
            torch.rand(sizes.rows, sizes.columns, generator=torch.Generator().manual_seed(i)) - 0.5
        )
        for (_, row, column), piece in of_table.items():
            piece.copy_(rows[row : row + piece.shape[0], column : column + piece.shape[1]])


def _distance(batches: list[Batch], calls: dict[str, Call], pieces: Sequence[Pieces]) -> float:
    """How far the libraries differ after two batches: outputs, and every shard."""
    ours, *others = [
        [part for batch in batches for part in _tensors(call(batch))] for call in calls.values()
    ]
    my_pieces, *other_pieces = [of_library() for of_library in pieces]
    distance = 0.0
    for theirs, their_pieces in zip(others, other_pieces, strict=True):
        if [a.shape for a in ours] != [
            b.shape for b in theirs
        ] or my_pieces.keys() != their_pieces.keys():
            return float("inf")
        pairs = [
            *zip(ours, theirs, strict=True),
            *((my_pieces[k], their_pieces[k]) for k in my_pieces),
        ]
        distance = max([distance, *(float((a - b).abs().max()) for a, b in pairs if a.numel())])
    return distance


def _tensors(result: Any) -> list[Tensor]:
    """Of a KeyedTensor its features by name, of a KeyedJaggedTensor ids and lengths."""
    if hasattr(result, "lengths"):
        return [result.values(), result.lengths()]
    return [result[key].detach() for key in sorted(result.keys())]
