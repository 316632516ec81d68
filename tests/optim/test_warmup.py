"""Rates that follow a schedule: at which step they are what, through every wrapper, down to the
kernels.
"""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from optim.idle import IdleOptimizer
from torch import nn

from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe_build import build_table_batch
from tutorec.optim import (
    CombinedOptimizer,
    EmbeddingFusedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)


def plain(lr: float = 9.0) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        {"w": nn.Parameter(torch.ones(2))}, lambda params: torch.optim.SGD(params, lr=lr)
    )


def adam(layer: nn.Module) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(layer.named_parameters()), lambda params: torch.optim.Adam(params, lr=9.0)
    )


def rates(stages: list[WarmupStage], steps: int, lr: float = 1.0) -> list[float]:
    """Before the first step and after each."""
    warm = WarmupOptimizer(plain(), stages, lr=lr)
    found = [warm.param_groups[0]["lr"]]
    for _ in range(steps):
        warm.step()
        found.append(warm.param_groups[0]["lr"])
    return found


P = WarmupPolicy


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (WarmupStage(P.LINEAR, max_iters=4, value=0.2), [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]),
        (WarmupStage(P.CONSTANT, max_iters=2, value=0.5, lr_scale=3.0), [1.5, 1.5, 1.5, 1.0]),
        (WarmupStage(P.POLY, max_iters=4, value=2.0), [1.0, 0.5625, 0.25, 0.0625, 0.0, 1.0]),
        (
            WarmupStage(P.POLY, max_iters=4, value=0.5, decay_iters=2),
            [1.0, math.sqrt(0.5), 0.0, 0.0, 0.0, 1.0],
        ),
        (
            WarmupStage(P.STEP, max_iters=4, value=0.5, decay_iters=2),
            [1.0, 1.0, 0.5, 0.5, 0.25, 1.0],
        ),
        (WarmupStage(P.STEP, max_iters=2, value=0.5), [1.0, 0.5, 0.25, 1.0]),
        (WarmupStage(P.INVSQRT, max_iters=4), [1.0, 1.0, 0.5**0.5, 3**-0.5, 0.5, 1.0]),
        (WarmupStage(P.NONE, max_iters=1, value=7.0), [1.0, 1.0]),
        (
            WarmupStage(P.COSINE_ANNEALING_WARM_RESTARTS, max_iters=4, value=0.5, sgdr_period=2),
            [1.0, 0.75, 1.0, 0.75, 1.0, 1.0],
        ),
        (
            WarmupStage(
                P.INTERPOLATE, max_iters=4, value=1.0, start_interpolating_iters=0, end_value=3.0
            ),
            [1.0, 1.5, 2.0, 2.5, 3.0, 1.0],
        ),
    ],
    ids=lambda case: case.policy.value if isinstance(case, WarmupStage) else "",
)
def test_rates_follow_the_policy_and_are_the_given_one_afterwards(
    stage: WarmupStage, expected: list[float]
) -> None:
    assert rates([stage], len(expected) - 1) == pytest.approx(expected)
    assert rates([stage], len(expected) - 1, lr=0.1) == pytest.approx(
        [0.1 * rate for rate in expected]
    )


def test_stages_follow_one_another_by_the_number_of_all_steps() -> None:
    stages = [
        WarmupStage(P.LINEAR, max_iters=2, value=0.0),
        WarmupStage(P.STEP, max_iters=5, value=0.5, decay_iters=3),
    ]
    assert rates(stages, 7) == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.5, 0.5, 1.0, 1.0])
    assert stages[0].decay_iters == -1, "the caller's stages stay as they are"


def test_without_stages_the_rate_is_the_given_one() -> None:
    assert rates([], 3, lr=0.25) == [0.25] * 4


def test_a_group_without_a_rate_gets_one() -> None:
    parameter = torch.tensor([1.0])
    warm = WarmupOptimizer(
        IdleOptimizer({"p": parameter}, {}, [{"params": [parameter]}]), [], lr=0.5
    )
    assert warm.param_groups == [{"params": [parameter], "lr": 0.5}]


@pytest.mark.parametrize(
    ("stages", "options", "said"),
    [
        ([WarmupStage(max_iters=0)], {}, r"must be greater than the previous max iter 0"),
        (
            [WarmupStage(max_iters=5), WarmupStage(max_iters=5)],
            {},
            r"must be greater than the previous max iter 5",
        ),
        (
            [WarmupStage(P.INTERPOLATE, max_iters=5)],
            {},
            r"start_interpolating_iters must be set for INTERPOLATE",
        ),
        (
            [WarmupStage(P.INTERPOLATE, max_iters=5, start_interpolating_iters=1)],
            {},
            r"end_value must be set for INTERPOLATE policy",
        ),
        (
            [WarmupStage(P.INTERPOLATE, max_iters=5, start_interpolating_iters=5, end_value=1.0)],
            {},
            r"max_iters \(5\) must be greater than start_interpolating_iters \(5\)",
        ),
        (
            [WarmupStage(P.COSINE_ANNEALING_WARM_RESTARTS, max_iters=5, sgdr_period=0)],
            {},
            r"sgdr_period=0 .* at least 1",
        ),
        (
            [WarmupStage(P.CONSTANT, max_iters=5, value=-0.5)],
            {},
            r"at step 0 in .*: the learning rate is -0.05",
        ),
        ([], {"lr": -1.0}, r"WarmupOptimizer: the learning rate is -1.0"),
        ([], {"lr": math.nan}, r"WarmupOptimizer: the learning rate is nan"),
        ([], {"lr_param": "rate"}, r"lr_param='rate' is in no parameter group"),
        ([], {"param_name": "w"}, r"param_name='w' is the name of a parameter"),
    ],
)
def test_schedules_that_cannot_be_are_refused(
    stages: list[WarmupStage], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        WarmupOptimizer(plain(), stages, **options)


def warm(inner: KeyedOptimizer, **options: Any) -> WarmupOptimizer:
    return WarmupOptimizer(inner, [WarmupStage(P.LINEAR, max_iters=100, value=0.01)], **options)


def test_the_position_is_state_and_brings_its_rate_along() -> None:
    one, two = warm(plain()), warm(plain())
    for _ in range(10):
        one.zero_grad()
        one.step()
    assert [state["warmup"].tolist() for state in one.state.values()] == [[10, 0]]
    assert one.state_dict()["state"]["__warmup"]["warmup"].tolist() == [10, 0]
    two.step()
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert (
        two.param_groups[0]["lr"]
        == one.param_groups[0]["lr"]
        == pytest.approx(0.1 * (0.01 + 0.99 * 0.1))
    )
    one.step()
    two.step()
    assert two.param_groups[0]["lr"] == one.param_groups[0]["lr"]
    assert two.state_dict()["state"]["__warmup"]["warmup"].tolist() == [11, 0]


@pytest.mark.parametrize(
    "around", [lambda one: one, lambda one: CombinedOptimizer([("dense", one)])]
)
def test_a_fresh_optimizer_takes_the_position_before_its_first_step(around: Any) -> None:
    layer, twin = nn.Linear(2, 1), nn.Linear(2, 1)
    one, two = warm(around(adam(layer))), warm(around(adam(twin)))
    one.save_param_groups(True)
    two.save_param_groups(True)
    layer(torch.ones(2)).sum().backward()
    one.step()
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert two.state_dict()["param_groups"] == one.state_dict()["param_groups"]
    assert set(two.state_dict()["state"]) == set(one.state_dict()["state"])
    assert two.state_dict()["state"]["__warmup"]["warmup"].tolist() == [1, 0]


def test_a_position_that_does_not_fit_is_refused_and_nothing_moves() -> None:
    one = warm(plain())
    one.step()
    state = copy.deepcopy(one.state_dict())
    state["state"]["__warmup"]["warmup"] = torch.tensor([4000, 2])
    with pytest.raises(
        ValueError,
        match=r"__warmup.*step 4000.*stage 2.*1",
    ):
        one.load_state_dict(state)
    with pytest.raises(
        ValueError,
        match=r"__warmup not.*without.*Warmup",
    ):
        one.load_state_dict({"state": {}})
    assert one.state_dict()["state"]["__warmup"]["warmup"].tolist() == [1, 0]


def test_two_schedules_in_one_optimizer_need_two_names() -> None:
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(ValueError, match="Duplicate param key __warmup"):
        CombinedOptimizer([warm(adam(one)), warm(plain())])
    both = CombinedOptimizer([("a", warm(adam(one))), ("b", warm(adam(two), lr=0.5))])
    both.step()
    assert [group["lr"] for group in both.param_groups] == pytest.approx(
        [0.1 * 0.0199, 0.5 * 0.0199]
    )
    state = both.state_dict()["state"]
    assert {"a.__warmup", "b.__warmup"} <= set(state)
    both.load_state_dict(copy.deepcopy(both.state_dict()))


def fused(rate: float = 1.0) -> tuple[EmbeddingFusedOptimizer, nn.Module]:
    group = GroupSpec((TableSpec("item", 3, 4),), feature_tables=(0,))
    batch = build_table_batch(
        group,
        optimizer=OptimizerSpec("sgd", rate),
        device=torch.device("cpu"),
        weights=[torch.zeros(3, 4)],
    )
    parameters = [nn.Parameter(rows) for rows in batch.table_weights()]
    return EmbeddingFusedOptimizer(batch, ["item.weight"], parameters), batch


def moved_by(optimizer: EmbeddingFusedOptimizer, batch: nn.Module) -> float:
    """How far one step moves a row whose gradient is 1."""
    before = batch.table_weights()[0][1, 0].item()  # type: ignore[operator]
    optimizer.apply_learning_rate()  # as the sharded module does at each forward
    batch(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
    return before - batch.table_weights()[0][1, 0].item()  # type: ignore[operator]


def wrapped(kind: str, inner: EmbeddingFusedOptimizer) -> KeyedOptimizer:
    return {
        "itself": lambda: inner,
        "wrapper": lambda: OptimizerWrapper(inner),
        "combined": lambda: CombinedOptimizer([("a", inner), ("b", plain())]),
        "nested": lambda: OptimizerWrapper(CombinedOptimizer([("", CombinedOptimizer([inner]))])),
    }[kind]()


KINDS = ["itself", "wrapper", "combined", "nested"]


@pytest.mark.parametrize("kind", KINDS)
def test_warmup_reaches_fused_tables_through_every_wrapper(kind: str) -> None:
    inner, batch = fused()
    outer = WarmupOptimizer(
        wrapped(kind, inner), [WarmupStage(P.LINEAR, max_iters=4, value=0.0)], lr=1.0
    )
    found = []
    for _ in range(5):
        found.append(moved_by(inner, batch))
        outer.step()
    assert found == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("kind", KINDS)
def test_schedulers_of_torch_reach_fused_tables_through_every_wrapper(kind: str) -> None:
    inner, batch = fused()
    outer = wrapped(kind, inner)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(outer, gamma=0.5)
    found = []
    for _ in range(3):
        found.append(moved_by(inner, batch))
        outer.step()
        scheduler.step()
    assert found == pytest.approx([1.0, 0.5, 0.25])


@pytest.mark.parametrize(
    "build",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5),
    ],
)
def test_a_scheduler_on_a_warmup_reaches_fused_tables_at_the_next_forward(build: Any) -> None:
    inner, batch = fused()
    outer = WarmupOptimizer(inner, [], lr=1.0)
    scheduler = build(outer)
    assert moved_by(inner, batch) == 1.0
    outer.step()
    scheduler.step()
    assert moved_by(inner, batch) == 0.5


@pytest.mark.parametrize("bad", [-0.5, math.nan, math.inf])
def test_a_rate_that_cannot_be_is_refused_by_name_at_the_next_forward(bad: Any) -> None:
    inner, batch = fused()
    OptimizerWrapper(inner).param_groups[0]["lr"] = bad
    with pytest.raises(
        ValueError,
        match=rf"fused optimizer of 'item.weight': the learning rate is {bad}, and must be",
    ):
        moved_by(inner, batch)
    dense = plain()
    dense.param_groups[0]["lr"] = bad
    with pytest.raises(
        ValueError,
        match=rf"param_groups\[0\] of SGD: the learning rate is {bad}, and must be a finite",
    ):
        dense.step()
    with pytest.raises(ValueError, match=r"param_groups\[0\] of SGD: the learning rate"):
        KeyedOptimizerWrapper(
            {"w": nn.Parameter(torch.ones(2))}, lambda params: with_rate(params, bad)
        )


def with_rate(params: Any, rate: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    return optimizer


def test_printing_shows_what_is_wrapped() -> None:
    inner, _ = fused(0.5)
    assert (
        repr(OptimizerWrapper(inner))
        == repr(inner)
        == "EmbeddingFusedOptimizer (\nParameter Group 0\n    lr: 0.5\n)"
    )
    assert repr(warm(CombinedOptimizer([("x", inner)]), lr=1.0)) == (
        "x: EmbeddingFusedOptimizer (\nParameter Group 0\n    lr: 0.01\n)"
    )


def test_a_warmup_is_pickled_with_its_position() -> None:
    one = warm(CombinedOptimizer([("d", adam(nn.Linear(2, 1)))]))
    one.step()
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    two = torch.load(file, weights_only=False)
    assert two.state_dict()["state"]["__warmup"]["warmup"].tolist() == [1, 0]
    two.step()
    assert two.param_groups[0]["lr"] == pytest.approx(0.1 * (0.01 + 0.99 * 0.02))


def test_a_stage_may_name_its_policy():
    weight = torch.nn.Parameter(torch.zeros(1))
    plain = KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
    warm = WarmupOptimizer(plain, [WarmupStage("linear", max_iters=2, value=0.5)], lr=0.1)  # type: ignore[arg-type]
    assert warm.param_groups[0]["lr"] == pytest.approx(0.05)
