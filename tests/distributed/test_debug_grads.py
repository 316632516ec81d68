"""The gradients that backward uses up, seen on every rank: together they are those of
one process.
"""

from __future__ import annotations

import pytest
import torch
from distributed import row_cases
from distributed.cases import (
    batch,
    coefficients,
    collection,
    kind_of,
    local_weights,
    seed_of,
    shard,
)
from torch import Tensor, nn

from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.modules.embedding_configs import PoolingType
from tutorec.optim import apply_optimizer_in_backward, debug_grads

KINDS = ["table_wise", "column_wise", "row_wise", "grid_shard", "data_parallel", "mixed"]


def watched(
    rank: int, world_size: int, kind: str, sizes: list[int]
) -> tuple[dict[str, Tensor], bool]:
    """The gradients of one step on this rank, and whether the rows are those of a model that nobody
    watches.
    """
    models = [shard(collection(), kind=kind, learning_rate=0.5) for _ in range(2)]
    with debug_grads(models[0]) as grads:
        for model in models:
            found = model(batch(seed_of(rank, 0), sizes[rank])).values()
            (found * coefficients(found, rank)).sum().backward()
    rows = [local_weights(model) for model in models]
    same = all(torch.equal(rows[0][name], rows[1][name]) for name in rows[0])
    return {name: gradient.to_dense() for name, gradient in grads.items()}, same


def expected(world_size: int, sizes: list[int]) -> dict[str, Tensor]:
    ebc = collection()
    for rank in range(world_size):
        found = ebc(batch(seed_of(rank, 0), sizes[rank])).values()
        ((found * coefficients(found, rank)).sum() / world_size).backward()
    return {
        name: parameter.grad
        for name, parameter in ebc.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[4, 3], [40, 0]], ids=["few", "one rank alone"])
def test_gradients_of_all_ranks_are_those_of_one_process(
    ranks, kind: str, sizes: list[int]
) -> None:
    found = ranks(2).run(watched, kind, sizes)
    for index, (name, gradient) in enumerate(expected(2, sizes).items()):
        assert name == f"embedding_bags.t{index}.weight"
        parts = [grads[name] for grads, _ in found if name in grads]
        if kind_of(kind, index) == "data_parallel":
            assert len(parts) == 2
            for part in parts:
                torch.testing.assert_close(part, gradient)
        else:
            torch.testing.assert_close(torch.stack(parts).sum(0), gradient)
    assert all(same for _, same in found)


def watched_rows(rank: int, world_size: int, kind: str) -> dict[str, Tensor]:
    model = row_cases.shard(row_cases.collection(), kind=kind)
    with debug_grads(model) as grads:
        row_cases.loss(model(batch(seed_of(rank, 0), 3 + rank)).wait(), rank).backward()
    return {name: gradient.to_dense() for name, gradient in grads.items()}


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_so_are_those_of_rows_that_are_not_pooled(ranks, kind: str) -> None:
    whole = row_cases.collection()
    for rank in range(2):
        (row_cases.loss(whole(batch(seed_of(rank, 0), 3 + rank)), rank) / 2).backward()
    found = ranks(2).run(watched_rows, kind)
    for name, parameter in whole.named_parameters():
        parts = [grads[name] for grads in found if name in grads]
        total = parts[0] if kind == "data_parallel" else torch.stack(parts).sum(0)
        torch.testing.assert_close(total, parameter.grad)


def watched_forms(
    rank: int, world_size: int, pooling: PoolingType, weighted: bool, optimizer: str
) -> dict[str, Tensor]:
    model = shard(collection(pooling, weighted), optimizer, kind="mixed with copies")
    with debug_grads(model) as grads:
        found = model(batch(seed_of(rank, 0), 3 + rank, weighted)).values()
        (found * coefficients(found, rank)).sum().backward()
    return {name: gradient.to_dense() for name, gradient in grads.items()}


@pytest.mark.parametrize(
    ("pooling", "weighted", "optimizer"),
    [
        (PoolingType.MEAN, False, "exact_sgd"),
        (PoolingType.SQRTN, True, "exact_row_wise_adagrad"),
        (PoolingType.SUM, True, "adam"),
    ],
)
def test_pooling_weights_and_the_optimizer_are_taken_into_account(
    ranks, pooling: PoolingType, weighted: bool, optimizer: str
) -> None:
    whole = collection(pooling, weighted)
    for rank in range(2):
        found = whole(batch(seed_of(rank, 0), 3 + rank, weighted)).values()
        ((found * coefficients(found, rank)).sum() / 2).backward()
    of_ranks = ranks(2).run(watched_forms, pooling, weighted, optimizer)
    for index, (name, parameter) in enumerate(whole.named_parameters()):
        parts = [grads[name] for grads in of_ranks if name in grads]
        total = (
            parts[0]
            if kind_of("mixed with copies", index) == "data_parallel"
            else torch.stack(parts).sum(0)
        )
        torch.testing.assert_close(total, parameter.grad)


def names_inside_a_larger_model(rank: int, world_size: int) -> tuple[set[str], set[str]]:
    tables = collection()
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.5})
    # The dense part puts DistributedDataParallel between the model and its tables.
    wrapped = DistributedModelParallel(nn.ModuleDict({"tables": tables, "dense": nn.Linear(2, 1)}))
    model = nn.ModuleDict({"part": wrapped})
    with debug_grads(model) as grads:
        wrapped.module["tables"](batch(seed_of(rank, 0), 4)).values().sum().backward()
    return set(grads), set(model.state_dict())


def test_a_sharded_part_of_a_model_keeps_the_names_of_the_unsharded_one(ranks) -> None:
    found = ranks(2).run(names_inside_a_larger_model)
    assert set.union(*(grads for grads, _ in found)) == {
        f"part.tables.{name}" for name, _ in collection().named_parameters()
    }
    assert all(grads <= names for grads, names in found)
