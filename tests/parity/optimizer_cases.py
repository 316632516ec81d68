"""Optimizers by name: what they store, print, warm up and clip."""

from __future__ import annotations

import itertools
from typing import Any

from registry import case, filled, numbers, of


def layer() -> Any:
    """Known weights."""
    import torch

    made = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for index, parameter in enumerate(made.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter))
    return made


def stored(state: Any) -> Any:
    import torch

    if isinstance(state, dict):
        return {name: stored(value) for name, value in state.items()}
    return numbers(state) if isinstance(state, torch.Tensor) else state


@case
def optimizers_combined(root: str) -> Any:
    import torch

    keyed, one, two = of(root, "optim.keyed"), layer(), torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        two.weight.fill_(0.5)
    adam = keyed.KeyedOptimizerWrapper(
        dict(one.named_parameters()), lambda params: torch.optim.Adam(params, lr=0.25)
    )
    sgd = keyed.KeyedOptimizerWrapper(
        {"last": two.weight}, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5)
    )
    combined = keyed.CombinedOptimizer([("over", adam), ("", keyed.OptimizerWrapper(sgd))])
    for _ in range(3):
        combined.zero_grad()
        two(one(filled(4, 3))).square().mean().backward()
        combined.step()
    without_groups = sorted(combined.state_dict())
    combined.save_param_groups(True)
    found = combined.state_dict()
    groups = [{name: group[name] for name in ("params", "lr")} for group in found["param_groups"]]
    return [
        without_groups,
        sorted(combined.params),
        stored(found["state"]),
        groups,
        numbers(one.weight),
    ]


@case
def optimizers_printed(root: str) -> Any:
    import torch

    keyed = of(root, "optim.keyed")
    sgd = keyed.KeyedOptimizerWrapper(
        {"w": layer().weight}, lambda params: torch.optim.SGD(params, lr=0.5)
    )
    combined = keyed.CombinedOptimizer([("a", sgd)])
    return [
        repr(sgd),
        repr(combined),
        repr(keyed.OptimizerWrapper(combined)),
        repr(keyed.CombinedOptimizer([])),
    ]


@case
def warmup(root: str) -> Any:
    import torch

    keyed, schedules = of(root, "optim.keyed"), of(root, "optim.warmup")
    policies = schedules.WarmupPolicy
    plans: list[list[tuple[Any, dict[str, Any]]]] = [
        [(policies.LINEAR, {"max_iters": 5, "value": 0.1})],
        [
            (policies.CONSTANT, {"max_iters": 3, "value": 0.5, "lr_scale": 2.0}),
            (policies.POLY, {"max_iters": 9, "value": 2.0, "decay_iters": 12}),
        ],
        [
            (policies.STEP, {"max_iters": 7, "value": 0.5, "decay_iters": 2}),
            (policies.INVSQRT, {"max_iters": 12}),
        ],
        [
            (
                policies.COSINE_ANNEALING_WARM_RESTARTS,
                {"max_iters": 9, "value": 0.2, "sgdr_period": 4},
            )
        ],
        [],
    ]
    found = []
    for plan in plans:
        weight = layer().weight
        inner = keyed.KeyedOptimizerWrapper(
            {"w": weight}, lambda params: torch.optim.SGD(params, lr=9.0)
        )
        stages = [schedules.WarmupStage(policy, **options) for policy, options in plan]
        optimizer = schedules.WarmupOptimizer(inner, stages, lr=0.25)
        rates = [optimizer.param_groups[0]["lr"]]
        for _ in range(14):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
        found.append([rates, numbers(weight), stored(optimizer.state_dict()["state"])])
    return found


@case
def clipping(root: str) -> Any:
    import torch

    keyed, module = of(root, "optim.keyed"), of(root, "optim.clipping")
    found = []
    for mode, bound, norm in itertools.product(
        ("NORM", "VALUE", "NONE"), (0.0, 0.5, 3.0, 50.0), (1, 2.0, "inf")
    ):
        made = layer()
        inner = keyed.KeyedOptimizerWrapper(
            dict(made.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.5)
        )
        optimizer = module.GradientClippingOptimizer(
            inner, module.GradientClipping[mode], bound, norm, track_grad_norm=True
        )
        made(filled(4, 3)).square().mean().backward()
        optimizer.step()
        found.append(
            [numbers(made.weight), numbers(made.bias), float(optimizer.last_total_grad_norm)]
        )
    return found
