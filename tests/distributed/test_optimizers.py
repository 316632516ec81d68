"""Optimizers of a model over ranks: both routes to a fused one, rates that change, gradients
clipped by one norm.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cases import batch, collection, home, seed_of, tables
from torch import Tensor, nn

from tutorec.distributed.checkpoint import load_checkpoint, save_checkpoint
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tutorec.optim import (
    Adagrad,
    Adam,
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    debug_grads,
    in_backward_optimizer_filter,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

WIDTH = sum(config.embedding_dim * len(config.feature_names) for config in tables())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = collection()
        torch.manual_seed(3)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.tables(features).values()).square().sum()


def parallel(
    model: Model, world_size: int, kernel: str = "fused", **fused_params: Any
) -> DistributedModelParallel:
    """t0 whole on one rank, t1 copied, t2 cut by rows."""
    words = {
        "t0": table_wise(home(0, world_size), compute_kernel=kernel),
        "t1": data_parallel(kernel),
        "t2": row_wise(compute_kernel=kernel),
    }
    plan = ShardingPlan(
        {"tables": construct_module_sharding_plan(model.tables, words, world_size=world_size)}
    )
    return DistributedModelParallel(
        model, plan=plan, sharders=[EmbeddingBagCollectionSharder(fused_params or None)]
    )


def dense_optimizer(model: DistributedModelParallel, lr: float = 0.01) -> KeyedOptimizerWrapper:
    named = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=lr))


def parts(model: DistributedModelParallel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# --- rates


def schedule(rank: int, world_size: int, kind: str) -> list[tuple[float, float, float]]:
    """How far a row moves for each unit of its gradient, step by step: of a table on one rank, a
    copy, a cut one.
    """
    model = parallel(Model(), world_size, optimizer="exact_sgd", learning_rate=1.0)
    everything: Any = CombinedOptimizer([model.fused_optimizer, dense_optimizer(model, lr=1.0)])
    scheduler = None
    if kind == "warmup":
        everything = WarmupOptimizer(
            everything, [WarmupStage(WarmupPolicy.STEP, max_iters=9, value=0.5)], lr=1.0
        )
    else:
        on = {"combined": everything, "fused": model.fused_optimizer}[kind]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(on, gamma=0.5)
    found = []
    for step in range(3):
        before = parts(model)
        with debug_grads(model) as grads:
            everything.zero_grad()
            model(batch(seed_of(rank, step), 4)).backward()
        after = parts(model)
        rates = []
        for name in ("t0", "t1", "t2"):
            full = f"tables.embedding_bags.{name}.weight"
            if full not in grads or not grads[full]._nnz():
                rates.append(math.nan)
                continue
            moved = (before[full] - after[full]).norm() / grads[full].to_dense().norm()
            rates.append(float(moved))
        found.append(tuple(rates))
        everything.step()
        if scheduler is not None:
            scheduler.step()
    return found


@pytest.mark.parametrize("kind", ["warmup", "combined", "fused"])
def test_a_rate_that_changes_reaches_every_kind_of_table_at_the_next_forward(
    ranks, kind: str
) -> None:
    seen = 0
    for of_rank in ranks(2).run(schedule, kind):
        for step, rates in enumerate(of_rank):
            for rate in rates:
                if not math.isnan(rate):
                    assert rate == pytest.approx(0.5**step, rel=1e-3)
                    seen += 1
    assert seen >= 12


# --- another optimizer and rate for each table, by both routes


def routes(rank: int, world_size: int, marked: bool) -> dict[str, Tensor]:
    model = Model()
    if marked:
        apply_optimizer_in_backward(
            RowWiseAdagrad, model.tables.parameters(), {"lr": 0.02, "eps": 0.002}
        )
        wrapped = parallel(model, world_size)
    else:
        options = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02, "eps": 0.002}
        wrapped = parallel(model, world_size, **options)
    for step in range(3):
        wrapped(batch(seed_of(rank, step), 4)).backward()
    return parts(wrapped)


def test_an_optimizer_applied_before_sharding_is_the_one_that_fused_params_name(ranks) -> None:
    by_mark, by_params = (ranks(2).run(routes, marked) for marked in (True, False))
    for one, other in zip(by_mark, by_params, strict=True):
        assert set(one) == set(other)
        for name, weight in one.items():
            assert torch.equal(weight, other[name]), name


APPLIED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "t0": (Adam, {"lr": 0.03, "betas": (0.8, 0.9)}),
    "t1": (PartialRowWiseAdam, {"lr": 0.02, "weight_decay": 0.1}),
    "t2": (Adagrad, {"lr": 0.05, "eps": 0.01}),
}


def one_by_one(ebc: nn.Module) -> None:
    for name, (kind, options) in APPLIED.items():
        apply_optimizer_in_backward(
            kind, [ebc.get_parameter(f"embedding_bags.{name}.weight")], options
        )


def joined(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The samples of all ranks as one batch."""
    keys = batches[0].keys()
    values = [one[key].values() for key in keys for one in batches]
    lengths = [one[key].lengths() for key in keys for one in batches]
    return KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))


def three_optimizers(rank: int, world_size: int) -> tuple[dict[str, Tensor], list[float]]:
    ebc = collection()
    one_by_one(ebc)
    words = {"t0": column_wise(ranks=[1, 0]), "t1": data_parallel("fused"), "t2": row_wise()}
    plan = ShardingPlan({"": construct_module_sharding_plan(ebc, words, world_size=world_size)})
    model = DistributedModelParallel(ebc, plan=plan)
    for step in range(3):
        found = model(batch(seed_of(rank, step), 4)).values()
        (found.square().sum() + found.sum()).backward()
    return parts(model), sorted(group["lr"] for group in model.fused_optimizer.param_groups)


def test_every_table_has_its_own_optimizer_and_rate_unsharded_and_sharded(ranks) -> None:
    whole = collection()
    one_by_one(whole)
    for step in range(3):
        # One lookup, since each is a step.
        found = whole(joined([batch(seed_of(rank, step), 4) for rank in range(2)])).values()
        ((found.square().sum() + found.sum()) / 2).backward()
    of_ranks = ranks(2).run(three_optimizers)
    whole_rows = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    for weights, rates in of_ranks:
        assert rates == [0.02, 0.03, 0.05]
        torch.testing.assert_close(
            weights["embedding_bags.t1.weight"],
            whole_rows["embedding_bags.t1.weight"],
            rtol=1e-3,
            atol=1e-4,
        )
    columns = [weights["embedding_bags.t0.weight"] for weights, _ in of_ranks]
    torch.testing.assert_close(
        torch.cat(columns[::-1], 1), whole_rows["embedding_bags.t0.weight"], rtol=1e-3, atol=1e-4
    )
    rows = [weights["embedding_bags.t2.weight"] for weights, _ in of_ranks]
    torch.testing.assert_close(
        torch.cat(rows), whole_rows["embedding_bags.t2.weight"], rtol=1e-3, atol=1e-4
    )


# --- clipping


def clip(rank: int, world_size: int, norm_type: float | str) -> tuple[float, dict[str, Tensor]]:
    """One step with tables whose gradients are kept, t0 and t2 on one rank or the other."""
    model = parallel(Model(), world_size, kernel="dense")
    optimizer = GradientClippingOptimizer(
        dense_optimizer(model, lr=1.0),
        GradientClipping.NORM,
        max_gradient=0.5,
        norm_type=norm_type,
        reduce_norm=model.reduce_norm(),
    )
    before = parts(model)
    model(batch(seed_of(rank, 0), 4)).backward()
    optimizer.step()
    assert optimizer.last_total_grad_norm is not None
    moved = {name: before[name] - parameter for name, parameter in parts(model).items()}
    return float(optimizer.last_total_grad_norm), moved


@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
def test_gradients_on_all_ranks_are_clipped_by_one_norm(ranks, norm_type: float | str) -> None:
    model = Model()
    torch.stack([model(batch(seed_of(rank, 0), 4)) for rank in range(2)]).mean().backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5, float(norm_type)))
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = ranks(2).run(clip, norm_type)
    assert [norm for norm, _ in found] == pytest.approx([norm, norm], rel=1e-4)
    assert found[0][0] == found[1][0], "all ranks clip by the very same factor"
    for name in ("over.weight", "over.bias", "tables.embedding_bags.t1.weight"):
        for _, moved in found:
            torch.testing.assert_close(moved[name], expected[name], rtol=1e-3, atol=1e-5)
    rows = torch.cat([moved["tables.embedding_bags.t2.weight"] for _, moved in found])
    torch.testing.assert_close(
        rows, expected["tables.embedding_bags.t2.weight"], rtol=1e-3, atol=1e-5
    )
    [whole] = [moved[name] for _, moved in found for name in moved if ".t0." in name]
    torch.testing.assert_close(
        whole, expected["tables.embedding_bags.t0.weight"], rtol=1e-3, atol=1e-5
    )


def clip_by_groups(rank: int, world_size: int) -> list[float]:
    """TorchRec's way: every rank has a piece of the parameter, and says which group the pieces lie
    in.
    """
    import torch.distributed as dist

    piece, whole = (nn.Parameter(torch.zeros(1, device=device())) for _ in range(2))
    inner = KeyedOptimizerWrapper(
        {"piece": piece, "whole": whole}, lambda params: torch.optim.SGD(params, lr=1.0)
    )
    world = dist.group.WORLD
    assert world is not None
    found = []
    for norm_type in (2.0, "inf"):
        # 3 and 4, and 12 once
        piece.grad, whole.grad = (
            torch.tensor([norm], device=device()) for norm in (3.0 + rank, 12.0)
        )
        optimizer = GradientClippingOptimizer(
            inner,
            GradientClipping.NORM,
            1.0,
            norm_type,
            enable_global_grad_clip=True,
            param_to_pgs={piece: [world]},
        )
        optimizer.step()
        assert optimizer.last_total_grad_norm is not None
        found += [float(optimizer.last_total_grad_norm), float(whole.grad)]
    return found


def test_process_groups_of_the_caller_are_reduced_over(ranks) -> None:
    for found in ranks(2).run(clip_by_groups):
        assert found == pytest.approx([13.0, 12.0 / 13.0, 12.0, 1.0], abs=1e-4)


# --- what is refused


def refuse(rank: int, world_size: int) -> list[str]:
    model = parallel(Model(), world_size, optimizer="exact_sgd")
    found = []
    for group in model.fused_optimizer.param_groups:
        group["lr"] = -1.0
    try:
        model(batch(1, 3))
    except ValueError as error:
        found.append(str(error))
    table = dict(model.named_parameters())["tables.embedding_bags.t2.weight"]
    try:
        apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.1})
    except ValueError as error:
        found.append(str(error))
    return found


def test_a_bad_rate_names_the_table_and_a_sharded_table_takes_no_second_optimizer(ranks) -> None:
    for rate, second in ranks(2).run(refuse):
        assert (
            "embedding_bags.t" in rate
            and "the learning rate is -1.0, and must be a finite number" in rate
        )
        assert "is a sharded table's, whose optimizer is fused already" in second


# --- state through every wrapper


def resumed(
    rank: int, world_size: int, groups: bool, path: str | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Four steps, and two whose state another model takes over for the other two, by hand or from a
    checkpoint.
    """

    def built() -> tuple[DistributedModelParallel, WarmupOptimizer]:
        model = parallel(Model(), world_size, optimizer="adam", learning_rate=9.0)
        named = dict(in_backward_optimizer_filter(model.named_parameters()))
        dense = KeyedOptimizerWrapper(named, lambda params: torch.optim.Adam(params, lr=9.0))
        stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
        clipped = GradientClippingOptimizer(
            CombinedOptimizer([("t", model.fused_optimizer), ("d", dense)])
        )
        warm = WarmupOptimizer(clipped, stages, lr=0.1)
        warm.save_param_groups(groups)
        return model, warm

    def train(model: DistributedModelParallel, optimizer: WarmupOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(batch(seed_of(rank, step), 4)).backward()
            optimizer.step()

    straight, optimizer = built()
    train(straight, optimizer, range(2))
    weights, state = straight.state_dict(), optimizer.state_dict()
    other, fresh = built()
    if path is None:
        other.load_state_dict(weights)
        fresh.load_state_dict(state)
    else:
        save_checkpoint(path, straight, optimizer)
        load_checkpoint(path, other, fresh)
    train(straight, optimizer, range(2, 4))
    train(other, fresh, range(2, 4))
    return parts(straight), parts(other), sorted(state["state"])


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("file", [None, "checkpoint"])
def test_state_of_tables_dense_layers_and_schedule_goes_on_in_another_model(
    ranks, tmp_path: Path, groups: bool, file: str | None
) -> None:
    path = None if file is None else str(tmp_path / file)
    for straight, other, names in ranks(2).run(resumed, groups, path):
        assert {"__warmup", "d.over.bias", "d.over.weight"} <= set(names)
        assert any(name.startswith("t.tables.embedding_bags.t2") for name in names)
        for name, weight in straight.items():
            assert torch.equal(weight, other[name]), name


def names_seen(rank: int, world_size: int) -> list[str]:
    model = parallel(Model(), world_size, optimizer="exact_sgd")
    with debug_grads(model) as grads:
        model(batch(seed_of(rank, 0), 4)).backward()
        try:
            grads["nobody"]
        except KeyError as error:
            said = str(error)
    return [*grads, said]


def test_gradients_of_a_whole_model_have_its_names(ranks) -> None:
    for *names, said in ranks(2).run(names_seen):
        assert set(names) <= {f"tables.embedding_bags.t{index}.weight" for index in range(3)}
        assert len(names) >= 2
        assert said.count("tables.embedding_bags.t1.weight") == 1
