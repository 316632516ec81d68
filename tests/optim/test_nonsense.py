"""Arguments of another kind than asked for: an error that says which, never one out of the middle of the library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.clipping import GradientClippingOptimizer
from tutorec.optim.debug_grads import debug_grads
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import PartialRowWiseAdam, in_backward_optimizer_filter
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

PAIR = torch.tensor([0.1, 0.2])


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2, 2))


def dense() -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper({"w": weight()}, lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("kind", [RowWiseAdagrad, PartialRowWiseAdam])
@pytest.mark.parametrize("name", ["lr", "eps", "weight_decay"])
@pytest.mark.parametrize("value", ["x", "0.1", None, [1.0], PAIR], ids=str)
def test_numbers_of_optimizers_are_numbers(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}: .*(must be a number|must be a finite number) of at least 0"
    ):
        kind([weight()], **{name: value})


@pytest.mark.parametrize("betas", ["x", 0.9, (0.9,), (0.9, None), (0.9, 0.9, 0.9)])
def test_betas_are_two_numbers(betas: Any) -> None:
    with pytest.raises(ValueError, match=r"PartialRowWiseAdam: betas=.* must be numbers .* two of them"):
        PartialRowWiseAdam([weight()], betas=betas)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_gradient": "x"}, ValueError, "max_gradient='x' must be a number of at least 0"),
        ({"max_gradient": None}, ValueError, "max_gradient=None must be a number"),
        ({"norm_type": "foo"}, ValueError, "norm_type='foo' must be a number above 0, or 'inf'"),
        ({"norm_type": None}, ValueError, "norm_type=None must be a number above 0"),
        ({"norm_type": math.nan}, ValueError, "norm_type=nan must be a number above 0"),
        ({"reduce_norm": 3}, TypeError, r"reduce_norm is a int: pass model.reduce_norm\(\)"),
        ({"reduce_norm": lambda part, largest: part}, TypeError, "reduce_norm is a function: pass model.reduce_norm"),
        ({"param_to_pgs": [1]}, TypeError, "param_to_pgs is a list: pass a dict from parameters"),
        ({"clipping": 3}, ValueError, "3 is not a valid GradientClipping: use one of GradientClipping.NORM"),
    ],
)
def test_what_clipping_is_told_is_checked_when_it_is_made(options: dict[str, Any], error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        GradientClippingOptimizer(dense(), **options)


@pytest.mark.parametrize(
    ("params", "arguments", "said"),
    [
        ([weight()], None, "optimizer_kwargs is a NoneType; pass a dict"),
        ([weight()], "lr", "optimizer_kwargs is a str; pass a dict"),
        ([weight()], [("lr", 0.1)], "optimizer_kwargs is a list; pass a dict"),
        ([weight()], {1: 0.1, "lr": 0.1}, r"SGD takes no \[1\]"),
        (None, {"lr": 0.1}, r"params is a NoneType; pass parameters, model.parameters\(\)"),
        (nn.Linear(1, 1), {"lr": 0.1}, "params is a Linear; pass parameters"),
    ],
)
def test_what_is_applied_in_backward_is_checked(params: Any, arguments: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        apply_optimizer_in_backward(torch.optim.SGD, params, arguments)


@pytest.mark.parametrize("model", ["x", None, [nn.Linear(1, 1)]])
def test_gradients_are_those_of_a_model(model: Any) -> None:
    with pytest.raises(TypeError, match=r"debug_grads watches a model, got a (str|NoneType|list)"), debug_grads(model):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, r"takes pairs \(name, parameter\), got a NoneType: model.named_parameters\(\)"),
        (nn.Linear(1, 1), "got a Linear: model.named_parameters"),
        ([weight()], "got a Parameter among them: model.named_parameters"),
    ],
)
def test_the_filter_takes_pairs(given: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        list(in_backward_optimizer_filter(given))


MAKERS: list[Callable[[], KeyedOptimizer]] = [
    dense,
    lambda: CombinedOptimizer([("a", dense())]),
    lambda: WarmupOptimizer(dense(), []),
    lambda: GradientClippingOptimizer(dense()),
]


@pytest.mark.parametrize("make", MAKERS, ids=["keyed", "combined", "warmup", "clipping"])
@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (None, TypeError, "what is loaded is a NoneType"),
        ("state", TypeError, "what is loaded is a str"),
        ([1], TypeError, "what is loaded is a list"),
        ({}, ValueError, r"it has no 'state', only \[\]"),
        ({1: 2, "x": 3}, ValueError, r"it has no 'state', only \[1, 'x'\]"),
        ({"state": None}, TypeError, "'state' in what is loaded is a NoneType"),
        ({"state": {"w": None}}, TypeError, "the state of 'w' in what is loaded is a NoneType"),
    ],
)
def test_what_is_no_state_dict_is_refused(
    make: Callable[[], KeyedOptimizer], given: Any, error: Any, said: str
) -> None:
    for call in (make().load_state_dict, make().check_state_dict):
        with pytest.raises(error, match=rf"{said}.*pass the dict that optimizer.state_dict\(\) gave"):
            call(given)


@pytest.mark.parametrize("pair", [("a",), (1, dense()), ("a", dense(), "b")])
def test_combined_are_pairs_of_a_prefix_and_an_optimizer(pair: Any) -> None:
    with pytest.raises(TypeError, match=r"takes pairs \(prefix, optimizer\), got \("):
        CombinedOptimizer([pair])


@pytest.mark.parametrize(
    ("stages", "error", "said"),
    [
        (None, TypeError, "stages is a NoneType: pass a list"),
        (WarmupStage(), TypeError, "stages is a WarmupStage: pass a list"),
        ([WarmupStage(policy="slow")], ValueError, "policy='slow' of the stage .* is none of WarmupPolicy.NONE"),  # type: ignore[arg-type]
        ([WarmupStage(max_iters="x")], ValueError, "max_iters='x' of the stage .* must be a number"),  # type: ignore[arg-type]
        ([WarmupStage(value=None)], ValueError, "value=None of the stage .* must be a number"),  # type: ignore[arg-type]
        ([WarmupStage(decay_iters="x")], ValueError, "decay_iters='x' of the stage"),  # type: ignore[arg-type]
        (
            [WarmupStage(WarmupPolicy.INTERPOLATE, 5, start_interpolating_iters=1, end_value="x")],  # type: ignore[arg-type]
            ValueError,
            "end_value='x' of the stage .* must be a number, or None",
        ),
    ],
)
def test_stages_are_made_of_numbers(stages: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        WarmupOptimizer(dense(), stages)


def test_a_policy_may_be_given_by_its_name_and_steps_as_a_float() -> None:
    warm = WarmupOptimizer(dense(), [WarmupStage("linear", max_iters=1e1, value=0.5)], lr=1.0)  # type: ignore[arg-type]
    assert warm.param_groups[0]["lr"] == 0.5
