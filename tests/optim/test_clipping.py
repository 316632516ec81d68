"""Gradients cut to size: what is left of them, what the norm was, and that nothing else happens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from optim.idle import IdleOptimizer
from torch import Tensor, nn

from tutorec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
)


def clipped(
    grads: list[Tensor | None], **options: Any
) -> tuple[list[Tensor | None], GradientClippingOptimizer]:
    """What one step makes of gradients."""
    parameters = [nn.Parameter(torch.zeros(3 if grad is None else grad.shape)) for grad in grads]
    named = {f"p{index}": parameter for index, parameter in enumerate(parameters)}
    inner = IdleOptimizer(named, {}, [{"params": [parameter]} for parameter in parameters])
    optimizer = GradientClippingOptimizer(inner, **options)
    optimizer.zero_grad()
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    optimizer.step()
    return [parameter.grad for parameter in parameters], optimizer


@pytest.mark.parametrize("norm_type", [1, 2.0, 3, "inf"])
@pytest.mark.parametrize("bound", [0.0, 0.5, 5.0, 100.0])
def test_the_norm_of_all_is_bounded_as_torch_bounds_it(
    norm_type: float | str, bound: float
) -> None:
    grads = [torch.tensor([3.0, -4.0]), torch.tensor([[1.0, 2.0], [0.0, 5.0]]), torch.tensor(2.0)]
    reference = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(reference, grads, strict=True):
        parameter.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_(reference, bound, float(norm_type))
    options: dict[str, Any] = {
        "clipping": GradientClipping.NORM,
        "max_gradient": bound,
        "norm_type": norm_type,
    }
    found, optimizer = clipped([grad.clone() for grad in grads], **options)
    for own, other in zip(found, reference, strict=True):
        torch.testing.assert_close(own, other.grad)
    assert optimizer.last_total_grad_norm is not None
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)


def test_gradients_within_the_bound_keep_every_bit() -> None:
    [found], _ = clipped(
        [torch.tensor([0.3, 0.7])], clipping=GradientClipping.NORM, max_gradient=1.0
    )
    assert found is not None and found.tolist() == torch.tensor([0.3, 0.7]).tolist()


def test_values_are_cut_one_by_one() -> None:
    found, optimizer = clipped(
        [torch.tensor([2.0, -4.0, 0.5]), torch.tensor([1.5])],
        clipping=GradientClipping.VALUE,
        max_gradient=1,
    )
    assert [None if grad is None else grad.tolist() for grad in found] == [[1.0, -1.0, 0.5], [1.0]]
    assert optimizer.last_total_grad_norm is None


@pytest.mark.parametrize("clipping", [GradientClipping.VALUE, GradientClipping.NONE, "none"])
def test_the_norm_before_clipping_is_tracked_where_asked(clipping: Any) -> None:
    found, optimizer = clipped(
        [torch.tensor([3.0, 4.0])], clipping=clipping, max_gradient=1.0, track_grad_norm=True
    )
    assert float(optimizer.last_total_grad_norm) == 5.0  # type: ignore[arg-type]
    assert found[0] is not None
    assert found[0].tolist() == ([1.0, 1.0] if clipping is GradientClipping.VALUE else [3.0, 4.0])


def test_parameters_without_a_gradient_and_empty_ones_are_passed_over() -> None:
    for norm_type in (2.0, "inf"):
        options: dict[str, Any] = {
            "clipping": GradientClipping.NORM,
            "max_gradient": 1.0,
            "norm_type": norm_type,
        }
        found, _ = clipped([None, torch.zeros(0, 4), torch.tensor([2.0])], **options)
        assert found[0] is None and found[2] is not None
        assert found[2].tolist() == pytest.approx([1.0], abs=1e-5)
        found, optimizer = clipped([None], **options)
        assert (found, optimizer.last_total_grad_norm) == ([None], None)


def test_a_sparse_gradient_counts_once_for_each_row() -> None:
    table = nn.Embedding(4, 1, sparse=True)
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"w": table.weight}, lambda params: torch.optim.SGD(params, lr=1.0)),
        GradientClipping.NORM,
        max_gradient=1.0,
    )
    before = table.weight.detach().clone()
    table(torch.tensor([3, 3, 3, 1])).sum().backward()
    optimizer.step()
    moved = (before - table.weight.detach()).flatten()
    torch.testing.assert_close(
        moved, torch.tensor([0.0, 1.0, 0.0, 3.0]) / math.sqrt(10.0), atol=1e-5, rtol=1e-5
    )


def test_meta_parameters_are_left_alone() -> None:
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    inner = IdleOptimizer({"p": parameter}, {}, [{"params": [parameter]}])
    optimizer = GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=0.0)
    parameter.grad = torch.ones(2, device="meta")
    optimizer.step()
    assert optimizer.last_total_grad_norm is None


def test_the_parts_that_can_be_called_alone_agree_with_the_step() -> None:
    _, optimizer = clipped(
        [torch.tensor([3.0, 4.0])], clipping=GradientClipping.NONE, max_gradient=1.0
    )
    norm, grads = optimizer.compute_total_grad_norm()
    assert (float(norm), [grad.tolist() for grad in grads]) == (5.0, [[3.0, 4.0]])
    assert float(optimizer.clip_grad_norm_()) == 5.0  # type: ignore[arg-type]
    assert grads[0].tolist() == pytest.approx([0.6, 0.8], abs=1e-5)


def test_what_was_wrapped_steps_with_what_is_left() -> None:
    layer = nn.Linear(1, 1, bias=False)
    dense = KeyedOptimizerWrapper(
        {"weight": layer.weight}, lambda params: torch.optim.SGD(params, lr=1.0)
    )
    optimizer = GradientClippingOptimizer(
        CombinedOptimizer([("over", dense)]), GradientClipping.VALUE, 0.5
    )
    before = layer.weight.item()
    layer(torch.tensor([7.0])).sum().backward()
    optimizer.step()
    assert layer.weight.item() == pytest.approx(before - 0.5)
    assert repr(optimizer) == repr(optimizer._optimizer)


class TwoRanks:
    """As if another rank had a part of the second parameter."""

    def __init__(self, sharded: list[Tensor], other: float) -> None:
        self.ids, self.other = {id(each) for each in sharded}, other

    def is_sharded(self, parameter: Tensor) -> bool:
        return id(parameter) in self.ids

    def __call__(self, part: Tensor, largest: bool) -> Tensor:
        return part.clamp(min=self.other) if largest else part + self.other


@pytest.mark.parametrize(
    ("norm_type", "other", "norm"), [(2, 16.0, 5.0), (1, 4.0, 7.0), ("inf", 4.0, 4.0)]
)
def test_the_norm_takes_in_what_other_ranks_have(
    norm_type: float | str, other: float, norm: float
) -> None:
    whole, part = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    inner = IdleOptimizer({"whole": whole, "part": part}, {}, [{"params": [whole, part]}])
    optimizer = GradientClippingOptimizer(
        inner, GradientClipping.NORM, 1.0, norm_type=norm_type, reduce_norm=TwoRanks([part], other)
    )
    whole.grad, part.grad = torch.tensor([3.0]), torch.tensor([0.0])
    optimizer.step()
    assert float(optimizer.last_total_grad_norm) == pytest.approx(norm)  # type: ignore[arg-type]
    assert whole.grad.tolist() == pytest.approx([3.0 / norm], abs=1e-5)
    whole.grad = part.grad = None  # a rank without gradients takes part all the same
    optimizer.step()
    assert float(optimizer.last_total_grad_norm) == pytest.approx(4.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_gradient": -1.0}, "max_gradient=-1.0 must be a number of at least 0"),
        ({"max_gradient": math.nan}, "max_gradient=nan must be a number"),
        ({"norm_type": 0.0}, "norm_type=0.0 must be a number above 0"),
        ({"clipping": "most"}, "'most' is not a valid GradientClipping"),
    ],
)
def test_bounds_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        clipped([torch.ones(1)], **options)


def test_two_ways_to_other_ranks_are_one_too_many() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    inner = IdleOptimizer({"p": parameter}, {}, [{"params": [parameter]}])
    with pytest.raises(ValueError, match="param_to_pgs and reduce_norm both"):
        GradientClippingOptimizer(
            inner,
            param_to_pgs={parameter: [object()]},
            reduce_norm=TwoRanks([], 0.0),
            enable_global_grad_clip=True,
        )
