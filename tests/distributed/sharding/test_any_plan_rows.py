"""Any plan on any batch equals the unsharded collection, row by row: the cases of `test_any_plan`,
not pooled.
"""

from __future__ import annotations

import pytest
import torch
from distributed.cases import group, tables_of
from distributed.row_cases import loss, plain
from distributed.sharding.test_any_plan import (
    Case,
    apply_optimizers,
    batch_of,
    cases,
    covering_cases,
    first_step,
    generator,
    with_drawn,
)
from torch import Tensor
from torch.testing import assert_close

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig

Found = dict[str, tuple[Tensor, Tensor, Tensor | None]]


def collection(case: Case) -> EmbeddingCollection:
    torch.manual_seed(3)
    return EmbeddingCollection(
        [
            EmbeddingConfig(
                t.num_embeddings, t.embedding_dim, t.name, feature_names=t.feature_names
            )
            for t in case.tables
        ]
    )


def run_cases(
    rank: int, world_size: int, drawn: list[Case]
) -> list[tuple[Found, dict[str, Tensor]]]:
    """Results of each case, and this rank's pieces after one step: `table/row/column` -> rows."""
    env = ShardingEnv.from_process_group(group())
    found = []
    for case in drawn:
        ec = collection(case)
        words = {name: generator(word) for name, word in case.words.items()}
        plan = construct_module_sharding_plan(ec, words, local_size=env.local_size)
        apply_optimizers(case, ec.embeddings)
        sharded = EmbeddingCollectionSharder().shard(ec, plan, env)
        rows = sharded(batch_of(case, rank)).wait()
        loss(rows, rank).backward()
        pieces: dict[str, Tensor] = {}
        for table in tables_of(sharded):
            for index, piece in enumerate(piece for piece in table.shards if piece.rank == rank):
                name = f"embeddings.{table.name}.weight" + (f"_{index}" if index else "")
                key = f"{table.name}/{piece.row_offset}/{piece.column_offset}"
                pieces[key] = sharded.get_parameter(name).detach().clone()
        found.append((plain(rows), pieces))
    return found


def unsharded(case: Case, world_size: int) -> tuple[list[Found], dict[str, Tensor]]:
    """Results of each rank's batch, and the tables after one step with the mean of the ranks'
    gradients.
    """
    ec = collection(case)
    results = [ec(batch_of(case, rank)) for rank in range(world_size)]
    torch.stack([loss(rows, rank) for rank, rows in enumerate(results)]).sum().backward()
    tables = {}
    for name, table in ec.embeddings.items():
        tables[name] = first_step(case, name, table.get_parameter("weight"), world_size)
    return [plain(rows) for rows in results], tables


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "hosts"), [(1, 1), (2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.world4)]
)
def test_any_plan_on_any_batch_equals_unsharded_row_by_row(ranks, world_size, hosts):
    local_size = world_size // hosts
    drawn = with_drawn(covering_cases(world_size, local_size), cases(world_size, local_size), 12)
    of_ranks = ranks(world_size, hosts=hosts).run(run_cases, drawn)
    for index, case in enumerate(drawn):
        results, tables = unsharded(case, world_size)
        for rank in range(world_size):
            found, pieces = of_ranks[rank][index]
            assert set(found) == set(results[rank])
            for key, (values, lengths, _) in found.items():
                about = f"{key} on rank {rank}\n{case}"
                assert_close(
                    values, results[rank][key][0], msg=lambda text, about=about: f"{text}\n{about}"
                )
                assert torch.equal(lengths, results[rank][key][1]), about
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
