"""The mean or the sum of the ranks' gradients: tables and dense layers follow one switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from distributed import row_cases
from distributed.cases import batch, coefficients, collection, home, local_weights, seed_of, shard
from torch import Tensor, nn

from tutorec.distributed.collectives.autograd import gradient_divisor
from tutorec.distributed.comm_ops import get_gradient_division, set_gradient_division
from tutorec.distributed.data_parallel import DefaultDataParallelWrapper
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from tutorec.optim import debug_grads
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@contextmanager
def dividing(mean: bool) -> Iterator[None]:
    """The ranks of the pool outlive the test."""
    before = get_gradient_division()
    set_gradient_division(mean)
    try:
        yield
    finally:
        set_gradient_division(before)


def pooled_gradients(
    rank: int, world_size: int, kind: str, kernel: str, mean: bool
) -> dict[str, Tensor]:
    """This rank's part of the gradient of each table."""
    with dividing(mean):
        model = shard(collection(), kind=kind, kernel=kernel, learning_rate=1.0)
        before = local_weights(model)
        found = model(batch(seed_of(rank, 0), 3 + rank)).values()
        (found * coefficients(found, rank)).sum().backward()
        if kernel == "dense":
            return {
                name: rows.grad for name, rows in model.named_parameters() if rows.grad is not None
            }
        return {name: before[name] - rows for name, rows in local_weights(model).items()}


def row_gradients(rank: int, world_size: int, kind: str, mean: bool) -> dict[str, Tensor]:
    with dividing(mean):
        model = row_cases.shard(row_cases.collection(), kind=kind)
        with debug_grads(model) as grads:
            row_cases.loss(model(batch(seed_of(rank, 0), 3 + rank)).wait(), rank).backward()
        return {name: gradient.to_dense() for name, gradient in grads.items()}


@pytest.mark.parametrize(
    "kind", ["table_wise", "row_wise", "grid_shard", "column_wise", "data_parallel"]
)
@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_the_sum_is_the_mean_times_the_ranks(ranks, kind: str, kernel: str) -> None:
    of_mean, of_sum = (ranks(2).run(pooled_gradients, kind, kernel, mean) for mean in (True, False))
    for mean, total in zip(of_mean, of_sum, strict=True):
        assert set(mean) == set(total)
        for name, gradient in mean.items():
            torch.testing.assert_close(total[name], 2 * gradient, rtol=1e-4, atol=1e-5)
    assert any(gradient.any() for gradient in of_mean[0].values())


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_so_it_is_of_rows_that_are_not_pooled(ranks, kind: str) -> None:
    of_mean, of_sum = (ranks(2).run(row_gradients, kind, mean) for mean in (True, False))
    for mean, total in zip(of_mean, of_sum, strict=True):
        assert set(mean) == set(total)
        for name, gradient in mean.items():
            torch.testing.assert_close(total[name], 2 * gradient)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = collection()
        torch.manual_seed(3)
        self.over = nn.Linear(
            sum(config.embedding_dim * len(config.feature_names) for config in row_cases.tables()),
            1,
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(features).values()).square().sum()


def plan(ebc: nn.Module, world_size: int) -> ShardingPlan:
    words = {f"t{index}": table_wise(home(index, world_size)) for index in (0, 2)} | {
        "t1": data_parallel("fused")
    }
    return ShardingPlan(
        {"tables": construct_module_sharding_plan(ebc, words, world_size=world_size)}
    )


def one_step(
    rank: int, world_size: int, mean: bool, precision: str | None = None
) -> dict[str, Tensor]:
    with dividing(mean):
        sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.1})
        module = Model()
        wrapper = DefaultDataParallelWrapper(allreduce_comm_precision=precision)
        model = DistributedModelParallel(
            module,
            plan=plan(module.tables, world_size),
            sharders=[sharder],
            data_parallel_wrapper=wrapper,
        )
        for step in range(2):
            model.zero_grad()
            model(batch(seed_of(rank, step), 3)).backward()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.startswith("over"):
                        assert parameter.grad is not None
                        parameter -= 0.01 * parameter.grad
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mean", [True, False])
def test_a_model_trains_as_one_process_with_that_mean_or_sum(ranks, mean: bool) -> None:
    model = Model()
    for step in range(2):
        model.zero_grad()
        losses = torch.stack([model(batch(seed_of(rank, step), 3)) for rank in range(2)])
        (losses.mean() if mean else losses.sum()).backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    parameter -= (0.01 if name.startswith("over") else 0.1) * parameter.grad
    expected = dict(model.named_parameters())
    for of_rank in ranks(2).run(one_step, mean):
        for name, weight in of_rank.items():
            torch.testing.assert_close(
                weight, expected[name].detach(), rtol=1e-4, atol=1e-5, msg=name
            )


def test_gradients_that_travel_in_16_bits_are_summed_too(ranks) -> None:
    narrow, wide = (
        ranks(2).run(one_step, False, precision)[0]["over.weight"] for precision in ("fp16", None)
    )
    torch.testing.assert_close(narrow, wide, rtol=1e-2, atol=1e-3)


def disagree(rank: int, world_size: int) -> None:
    with dividing(rank == 0):
        shard(collection())


def change_late(rank: int, world_size: int) -> list[str]:
    found = []
    module = Model()
    model = DistributedModelParallel(module, plan=plan(module.tables, world_size))
    with dividing(False):
        try:
            model(batch(1, 3))
        except ValueError as error:
            found.append(str(error))
    model(batch(1, 3)).backward()
    return found


def test_ranks_that_differ_are_told(ranks) -> None:
    with pytest.raises(
        Exception,
        match=r"set_gradient_division\) is sum on rank 1 and mean on rank 0",
    ):
        ranks(2).run(disagree)


def test_a_model_keeps_to_what_it_was_built_with(ranks) -> None:
    for found in ranks(2).run(change_late):
        assert (
            len(found) == 1
            and "use the mean of the ranks' gradients since it was built" in found[0]
        )


def test_the_switch_starts_with_the_mean() -> None:
    assert get_gradient_division() is True
    assert gradient_divisor(8) == 8
