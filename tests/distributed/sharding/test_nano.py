"""The library trains what nano, *TorchRec in 300 lines*, trains, on drawn tables and batches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from distributed.cases import group
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tutorec import nano
from tutorec.distributed import sharding_plan as plans
from tutorec.distributed.checkpoint import full_state_dict
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

RATE = 0.25
RULES = {
    "exact_sgd": partial(nano.sgd, rate=RATE),
    "exact_row_wise_adagrad": partial(nano.rowwise_adagrad, rate=RATE),
}
STEPS = 2


@dataclass(frozen=True)
class Case:
    """Tables, how each is sharded, and what ranks bring."""

    pooling: str
    rows: tuple[int, int, int]
    ways: tuple[str, str, str]
    samples: tuple[int, ...]
    longest: int
    rule: str
    seed: int

    def tables(self) -> list[nano.Table]:
        """The first is read by two features."""
        features = (("a", "b"), ("c",), ("d",))
        return [
            nano.Table(f"t{index}", rows, 16, keys, self.pooling)
            for index, (rows, keys) in enumerate(zip(self.rows, features, strict=True))
        ]

    def start(self) -> dict[str, nano.Rows]:
        draw = torch.Generator().manual_seed(self.seed)
        return {
            table.name: nano.Rows(
                torch.rand(table.rows, 16, generator=draw) - 0.5, torch.zeros(table.rows, 16)
            )
            for table in self.tables()
        }

    def batch(self, rank: int, step: int) -> nano.Batch:
        draw = torch.Generator().manual_seed(self.seed + 100 * step + rank)
        rows = {key: table.rows for table in self.tables() for key in table.features}
        lengths = torch.randint(self.longest + 1, (4, self.samples[rank]), generator=draw)
        counts = lengths.sum(dim=1).tolist()
        values = [
            torch.randint(below, (count,), generator=draw)
            for below, count in zip(rows.values(), counts, strict=True)
        ]
        return nano.Batch([*rows], torch.cat(values), lengths)

    def fit(self, look_up: Any, rank: int) -> list[Tensor]:
        """The outputs of all steps, whose gradients differ everywhere."""
        found = []
        for step in range(STEPS):
            rows = look_up(self.batch(rank, step))
            for key, out in sorted(rows.items()):
                numbers = torch.linspace(-1, 1, max(out.numel(), 2)) * (rank + 1)
                rows[key] = (out.cpu() * numbers[: out.numel()].view(out.shape)).sum()
                found.append(out.detach().cpu())
            torch.stack([*rows.values()]).sum().backward()
        return found


def cases(world_size: int) -> st.SearchStrategy[Case]:
    ways = st.sampled_from(["table_wise", "row_wise", "column_wise", "replicated"])
    return st.builds(
        Case,
        pooling=st.sampled_from(["sum", "mean", "none"]),
        rows=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
        ways=st.tuples(ways, ways, ways),
        samples=st.tuples(*[st.integers(0, 4)] * world_size),
        longest=st.integers(0, 3),
        rule=st.sampled_from(sorted(RULES)),
        seed=st.integers(0, 999),
    )


def by_nano(case: Case, world_size: int) -> tuple[list[list[Tensor]], dict[str, nano.Rows]]:
    ways = {
        "table_wise": nano.TableWise(world_size - 1),
        "row_wise": nano.RowWise(),
        "column_wise": nano.ColumnWise(),
        "replicated": nano.Replicated(),
    }
    plan = {f"t{index}": ways[way] for index, way in enumerate(case.ways)}

    def train(group: nano.Group) -> tuple[list[Tensor], dict[str, nano.Rows]]:
        collection = nano.Collection(group, case.tables(), plan, case.start(), RULES[case.rule])
        return case.fit(collection, group.rank), collection.save()

    results = nano.run_ranks(world_size, train)
    return [outputs for outputs, _ in results], results[0][1]


def by_library(
    rank: int, world_size: int, drawn: list[Case]
) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    return [train(case, rank, world_size) for case in drawn]


def train(case: Case, rank: int, world_size: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    ways: dict[str, Any] = {
        "table_wise": lambda: plans.table_wise(world_size - 1),
        "row_wise": plans.row_wise,
        "column_wise": lambda: plans.column_wise([*range(world_size)]),
        "replicated": plans.data_parallel,
    }
    rows_alone = case.pooling == "none"
    shared = [
        {
            "num_embeddings": table.rows,
            "embedding_dim": 16,
            "name": table.name,
            "feature_names": [*table.features],
        }
        for table in case.tables()
    ]
    module: Any
    if rows_alone:
        module = EmbeddingCollection([EmbeddingConfig(**words) for words in shared])
    else:
        pooling = PoolingType[case.pooling.upper()]
        module = EmbeddingBagCollection(
            [EmbeddingBagConfig(**words, pooling=pooling) for words in shared]
        )
    for name, weight in module.named_parameters():
        weight.data.copy_(case.start()[name.split(".")[1]].weight)
    words = {f"t{index}": ways[way]() for index, way in enumerate(case.ways)}
    plan = plans.construct_module_sharding_plan(module, words)
    make: Any = EmbeddingCollectionSharder if rows_alone else EmbeddingBagCollectionSharder
    params = {"optimizer": case.rule, "learning_rate": RATE}
    sharded = make(params).shard(module, plan, ShardingEnv.from_process_group(group()))

    def look_up(batch: nano.Batch) -> dict[str, Tensor]:
        stride = batch.lengths.shape[1]
        lengths = batch.lengths.view(-1)
        features = KeyedJaggedTensor(batch.keys, batch.values, lengths=lengths, stride=stride)
        rows = sharded(features.to(device())).wait()
        if rows_alone:
            return {key: jagged.values() for key, jagged in rows.items()}
        return rows.to_dict()

    return case.fit(look_up, rank), full_state_dict(sharded)


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.world4)])
def test_drawn_batches_train_what_nano_trains(ranks: Any, world_size: int) -> None:
    base = Case(
        pooling="sum",
        rows=(9, 5, 1),
        ways=("row_wise", "column_wise", "replicated"),
        samples=(3,) * world_size,
        longest=3,
        rule="exact_sgd",
        seed=7,
    )
    drawn = [
        replace(base, pooling=pooling, rule=rule, samples=(0, *base.samples[1:]))
        for pooling in ("sum", "mean", "none")
        for rule in RULES
    ]
    drawn += [replace(base, longest=0), replace(base, ways=("table_wise",) * 3)]

    @settings(max_examples=20)
    @given(cases(world_size))
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    of_ranks = ranks(world_size).run(by_library, drawn=drawn)
    for number, case in enumerate(drawn):
        outputs, tables = by_nano(case, world_size)
        for rank, results in enumerate(of_ranks):
            found, _ = results[number]
            for mine, theirs in zip(found, outputs[rank], strict=True):
                assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=f"{case} on rank {rank}")
        _, weights = of_ranks[0][number]
        for name, weight in weights.items():
            whole = tables[name.split(".")[1]].weight
            assert_close(weight.cpu(), whole, rtol=1e-4, atol=1e-5, msg=f"{name} of {case}")
