"""Any plan on any batch equals the unsharded collection: many drawn tables, plans and batches in
one run of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from distributed.cases import group, on_rank, tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import rows_of, table_sets
from torch import Tensor
from torch.testing import assert_close

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
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
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

RATE, EPS = 0.25, 0.5
# One of its own for each table. Both of the latter make the same first step; neither sees how a
# table is cut.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": RATE}),
    "adagrad": (torch.optim.Adagrad, {"lr": RATE, "eps": EPS}),
    "adam": (torch.optim.Adam, {"lr": RATE, "eps": EPS}),
}
Word = tuple[str, Any]


@dataclass(frozen=True)
class Case:
    """What one run does: tables, a word for each, and a batch for each rank, as plain lists."""

    tables: list[EmbeddingBagConfig]
    weighted: bool
    words: dict[str, Word]
    ids: list[dict[str, list[list[int]]]]  # of each rank
    # strides of each rank's features, None where all have as many lists
    samples: list[dict[str, int] | None]
    inverse: list[list[list[int]] | None]
    optimizers: dict[str, str]  # of each table


def generator(word: Word) -> ParameterShardingGenerator:
    kind, where = word
    makers = {
        "tw": lambda: table_wise(where),
        "cw": lambda: column_wise(size_per_rank=where[1], ranks=where[0]),
        "rw": row_wise,
        "twrw": lambda: table_row_wise(where),
        "twcw": lambda: table_column_wise(ranks=where),
        "grid": lambda: grid_shard(where),
        "dp": data_parallel,
    }
    return makers[kind]()


@st.composite
def words(draw: st.DrawFn, columns: int, world_size: int, local_size: int) -> Word:
    hosts = world_size // local_size
    kinds = ["tw", "rw", "cw", "twrw", "dp"] + (["twcw", "grid"] if columns % 2 == 0 else [])
    kind = draw(st.sampled_from(kinds))
    rank = st.integers(0, world_size - 1)
    host = st.integers(0, hosts - 1)
    if kind == "tw":
        return kind, draw(rank)
    if kind == "cw":
        cut = draw(st.integers(1, columns))
        sizes = [cut, columns - cut] if cut < columns else [columns]
        return kind, ([draw(rank) for _ in sizes], sizes)
    if kind == "twrw":
        return kind, draw(host)
    if kind == "twcw":
        chosen = draw(host)
        on_host = st.integers(chosen * local_size, (chosen + 1) * local_size - 1)
        return kind, [draw(on_host), draw(on_host)]
    return kind, [draw(host), draw(host)] if kind == "grid" else None


@st.composite
def cases(draw: st.DrawFn, world_size: int, local_size: int) -> Case:
    weighted = draw(st.booleans())
    pooling = None if not weighted else draw(st.sampled_from([PoolingType.SUM, PoolingType.SQRTN]))
    tables = draw(table_sets(pooling=pooling))
    rows = rows_of(tables)
    features = draw(st.permutations(list(rows)))
    ids: list[dict[str, list[list[int]]]] = []
    samples: list[dict[str, int] | None] = []
    inverse: list[list[list[int]] | None] = []
    variable = draw(st.booleans())
    for _ in range(world_size):
        count = draw(st.integers(0, 4))
        strides = {
            name: draw(st.integers(1, 3)) if variable and count else count for name in features
        }
        bag = {name: st.lists(st.integers(0, rows[name] - 1), max_size=3) for name in features}
        ids.append({name: [draw(bag[name]) for _ in range(strides[name])] for name in features})
        samples.append(strides if variable else None)
        means = [
            [draw(st.integers(0, strides[name] - 1)) for _ in range(count)] for name in features
        ]
        inverse.append(means if variable and count else None)
    placed = {t.name: draw(words(t.embedding_dim, world_size, local_size)) for t in tables}
    optimizers = {t.name: draw(st.sampled_from([*OPTIMIZERS])) for t in tables}
    return Case(tables, weighted, placed, ids, samples, inverse, optimizers)


def covering_words(world_size: int, local_size: int) -> list[Word]:
    """Every sharding type once, on the last rank and host; replicas twice, of a large and of a tiny
    table.
    """
    last_rank, last_host = world_size - 1, world_size // local_size - 1
    on_host = [last_host * local_size, last_rank]
    kinds = [("tw", last_rank), ("cw", ([last_rank, 0], [6, 2])), ("rw", None), ("twrw", last_host)]
    return [*kinds, ("twcw", on_host), ("grid", [last_host, 0]), ("dp", None), ("dp", None)]


def covering_case(world_size: int, local_size: int, *, weighted: bool, variable: bool) -> Case:
    """All sharding types, optimizers and poolings at once; rank 0 of two and more is empty where
    strides are fixed.
    """
    words, poolings = (
        covering_words(world_size, local_size),
        [PoolingType.SUM, PoolingType.SQRTN, PoolingType.MEAN],
    )
    poolings = poolings[:2] if weighted else poolings
    tables, ids = [], []
    for i in range(len(words)):
        rows = 1 if i == len(words) - 1 else 12 + i
        features = [f"f{i}", f"f{(i + 1) % 3}"] if i > 2 and rows > 1 else [f"f{i}"]
        pooling = poolings[i % len(poolings)]
        tables.append(EmbeddingBagConfig(rows, 8, f"t{i}", feature_names=features, pooling=pooling))
    rows_below = rows_of(tables)
    samples: list[dict[str, int] | None] = []
    inverse: list[list[list[int]] | None] = []
    for rank in range(world_size):
        count = 0 if rank == 0 and world_size > 1 and not variable else 2 + rank
        strides = {
            name: 1 + (rank + i) % 3 if variable else count for i, name in enumerate(rows_below)
        }
        ids.append(
            {
                name: [
                    [(rank + sample + k) % below for k in range(sample % 3)]
                    for sample in range(strides[name])
                ]
                for name, below in rows_below.items()
            }
        )
        samples.append(strides if variable else None)
        means = [[sample % stride for sample in range(count)] for stride in strides.values()]
        inverse.append(means if variable else None)
    optimizers = {table.name: [*OPTIMIZERS][i % len(OPTIMIZERS)] for i, table in enumerate(tables)}
    return Case(
        tables,
        weighted,
        {f"t{i}": one for i, one in enumerate(words)},
        ids,
        samples,
        inverse,
        optimizers,
    )


def covering_cases(world_size: int, local_size: int) -> list[Case]:
    """What must be run whatever is drawn: every sharding type with fixed and variable strides,
    plain and weighted.
    """
    return [
        covering_case(world_size, local_size, weighted=weighted, variable=variable)
        for weighted in (False, True)
        for variable in (False, True)
    ]


def with_drawn(covering: list[Case], strategy: st.SearchStrategy[Case], count: int) -> list[Case]:
    """The covering cases, then drawn ones; one run of the ranks takes all of them."""
    collected = list(covering)

    @settings(max_examples=count)
    @given(strategy)
    def collect(case: Case) -> None:
        collected.append(case)

    collect()
    return collected


def batch_of(case: Case, rank: int) -> KeyedJaggedTensor:
    ids, strides, inverse = case.ids[rank], case.samples[rank], case.inverse[rank]
    lists = [one for of_feature in ids.values() for one in of_feature]
    values = torch.tensor([number for one in lists for number in one], dtype=torch.int64)
    weights = (
        torch.arange(1, values.numel() + 1).remainder(5).float() / 2 if case.weighted else None
    )
    lengths = torch.tensor([len(one) for one in lists], dtype=torch.int64)
    if strides is None:
        stride = len(next(iter(ids.values())))
        return on_rank(
            KeyedJaggedTensor(list(ids), values, weights, lengths=lengths, stride=stride)
        )
    made = KeyedJaggedTensor(
        list(ids),
        values,
        weights,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides.values()],
        inverse_indices=None if inverse is None else (list(ids), torch.tensor(inverse)),
    )
    return on_rank(made)


def collection(case: Case) -> EmbeddingBagCollection:
    torch.manual_seed(3)
    return EmbeddingBagCollection(case.tables, is_weighted=case.weighted)


def apply_optimizers(case: Case, tables: Any) -> None:
    """Leave each table's optimizer on it, for the sharder to read; ``tables`` are
    modules by name.
    """
    for name, optimizer in case.optimizers.items():
        kind, words = OPTIMIZERS[optimizer]
        apply_optimizer_in_backward(kind, [tables[name].weight], words)


def first_step(case: Case, name: str, weight: Tensor, world_size: int) -> Tensor:
    """A table [R, D] after the first step with the mean of the ranks' gradients, of which ``.grad``
    is the sum.
    """
    if weight.grad is None:
        return weight.detach()
    mean = weight.grad / world_size
    way = mean if case.optimizers[name] == "sgd" else mean / (mean.abs() + EPS)
    return weight.detach() - RATE * way


def gradient(like: Tensor, rank: int) -> Tensor:
    numbers = torch.linspace(-1, 1, max(like.numel(), 2)).to(like.device)
    return numbers[: like.numel()].view_as(like) * (rank + 1)


def run_cases(
    rank: int, world_size: int, drawn: list[Case]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Output of each case, and this rank's pieces after one step: `table/row/column` -> rows."""
    env = ShardingEnv.from_process_group(group())
    found = []
    for case in drawn:
        ebc = collection(case)
        plan = construct_module_sharding_plan(
            ebc,
            {name: generator(word) for name, word in case.words.items()},
            local_size=env.local_size,
        )
        apply_optimizers(case, ebc.embedding_bags)
        sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env)
        out = sharded(batch_of(case, rank)).wait()
        out.values().backward(gradient(out.values(), rank))
        pieces: dict[str, Tensor] = {}
        for table in tables_of(sharded):
            mine = [piece for piece in table.shards if piece.rank == rank]
            for index, piece in enumerate(mine):
                name = f"embedding_bags.{table.name}.weight" + (f"_{index}" if index else "")
                key = f"{table.name}/{piece.row_offset}/{piece.column_offset}"
                pieces[key] = sharded.get_parameter(name).detach().clone()
        found.append((out.values().detach(), pieces))
    return found


def unsharded(case: Case, world_size: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs of each rank's batch, and the tables after one step with the mean of the ranks'
    gradients.
    """
    ebc = collection(case)
    outputs = []
    for rank in range(world_size):
        out = ebc(batch_of(case, rank)).values()
        outputs.append(out.detach())
        if out.requires_grad and out.numel():
            (out * gradient(out.detach(), rank)).sum().backward()
    tables = {}
    for name, bag in ebc.embedding_bags.items():
        tables[name] = first_step(case, name, bag.get_parameter("weight"), world_size)
    return outputs, tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "hosts"), [(1, 1), (2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.world4)]
)
def test_any_plan_on_any_batch_equals_unsharded(ranks, world_size, hosts):
    local_size = world_size // hosts
    drawn = with_drawn(covering_cases(world_size, local_size), cases(world_size, local_size), 12)
    of_ranks = ranks(world_size, hosts=hosts).run(run_cases, drawn)
    for index, case in enumerate(drawn):
        outputs, tables = unsharded(case, world_size)
        for rank in range(world_size):
            found, pieces = of_ranks[rank][index]
            assert_close(
                found,
                outputs[rank],
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, case=case: f"{text}\n{case}",
            )
            for key, rows in pieces.items():
                name, row, column = key.split("/")
                part = tables[name][int(row) :][: rows.shape[0], int(column) :][:, : rows.shape[1]]
                about = f"{key}\n{case}"
                assert_close(
                    rows,
                    part,
                    rtol=1e-5,
                    atol=1e-5,
                    msg=lambda text, about=about: f"{text}\n{about}",
                )
