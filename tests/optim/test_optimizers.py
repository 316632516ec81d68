"""Optimizers beyond torch's own, and what may be said when one is applied."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import tutorec.optim
from tutorec._kernels.backend import backend, use_backend
from tutorec.distributed.fused_params import optimizer_spec_of_parameter
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim import PartialRowWiseAdam, RowWiseAdagrad, apply_optimizer_in_backward
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

needs_fbgemm = pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
both = pytest.mark.parametrize("name", ["torch", pytest.param("fbgemm", marks=needs_fbgemm)])


def by_hand(
    row: list[float], grads: list[list[float]], lr: float, eps: float, decay: float
) -> list[float]:
    """Partial row-wise Adam for one row, number by number."""
    beta1, beta2 = 0.8, 0.9
    mean, spread = [0.0] * len(row), 0.0
    for step, grad in enumerate(grads, start=1):
        mean = [beta1 * m + (1 - beta1) * g for m, g in zip(mean, grad, strict=True)]
        spread = beta2 * spread + (1 - beta2) * sum(g * g for g in grad) / len(grad)
        root = math.sqrt(spread / (1 - beta2**step)) + eps
        row = [
            w - lr * (m / (1 - beta1**step) / root + decay * w)
            for w, m in zip(row, mean, strict=True)
        ]
    return row


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_partial_rowwise_adam_follows_its_formula(decay: float) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.0, 1.0]]))
    start = weight.detach().clone()
    optimizer = PartialRowWiseAdam([weight], lr=0.1, betas=(0.8, 0.9), eps=0.01, weight_decay=decay)
    grads = [[1.0, -2.0, 3.0], [0.5, 0.0, 0.0], [-4.0, 1.0, 1.0]]
    for grad in grads:
        weight.grad = torch.tensor([grad, [-each for each in grad]])
        optimizer.step()
    for row, sign in ((0, 1.0), (1, -1.0)):
        signed = [[sign * each for each in grad] for grad in grads]
        assert weight[row].tolist() == pytest.approx(
            by_hand(start[row].tolist(), signed, 0.1, 0.01, decay), rel=1e-5
        )
    state = optimizer.state[weight]
    assert (float(state["step"]), list(state["exp_avg_sq"].shape)) == (3.0, [2, 1])


@both
def test_partial_rowwise_adam_moves_touched_rows_only_and_counts_every_backward(name: str) -> None:
    with use_backend(name):
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 4, "t", feature_names=["f"])])
        table = ebc.embedding_bags["t"].weight
        start = table.detach().clone()
        options = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 0.01}
        apply_optimizer_in_backward(PartialRowWiseAdam, [table], options)  # type: ignore[list-item]
        for ids in ([2, 2, 0], [1], [2]):
            batch = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
            ebc(batch).values().sum().backward()
    first = by_hand(start[0].tolist(), [[1.0] * 4], 0.1, 0.01, 0.0)
    assert table[0].tolist() == pytest.approx(first, rel=1e-4)  # type: ignore[index]
    assert torch.equal(table[3], start[3])  # type: ignore[index]
    [optimizer] = table._in_backward_optimizers  # type: ignore[union-attr]
    assert float(optimizer.state[table]["step"]) == 3.0
    spread = optimizer.state[table]["exp_avg_sq"].flatten().tolist()
    assert spread == pytest.approx([0.1, 0.1, 0.9 * 0.4 + 0.1, 0.0])


def test_rows_of_16_bits_have_a_state_of_32() -> None:
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    optimizer = PartialRowWiseAdam([weight], lr=1.0)
    weight.grad = torch.full_like(weight, 1e-4)  # whose square float16 does not know
    optimizer.step()
    assert optimizer.state[weight]["exp_avg_sq"].dtype == torch.float32
    assert weight.flatten().tolist() == pytest.approx([0.0] * 4, abs=1e-3)
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": -1.0}, "PartialRowWiseAdam: the learning rate is -1.0"),
        ({"lr": math.nan}, "PartialRowWiseAdam: the learning rate is nan"),
        ({"eps": -1.0}, "eps=-1.0 must be a number of at least 0"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be a number of at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be numbers of at least 0 and below 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PartialRowWiseAdam([nn.Parameter(torch.ones(1, 1))], **options)


def test_it_is_fused_where_its_table_is_sharded() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    apply_optimizer_in_backward(
        PartialRowWiseAdam, [weight], {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.1}
    )
    spec = optimizer_spec_of_parameter("t", weight)
    assert spec is not None
    assert (spec.kind, spec.learning_rate, spec.beta1, spec.beta2, spec.weight_decay) == (
        "partial_rowwise_adam",
        0.5,
        0.8,
        0.9,
        0.1,
    )


def test_sharding_takes_the_rate_of_now() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    [optimizer] = weight._in_backward_optimizers  # type: ignore[attr-defined]
    optimizer.param_groups[0]["lr"] = 0.125
    spec = optimizer_spec_of_parameter("t", weight)
    assert spec is not None and spec.learning_rate == 0.125
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match=r"'t': SGD.* learning rate is nan"):
        optimizer_spec_of_parameter("t", weight)


def test_names_of_torchs_optimizers_are_torchs() -> None:
    assert tutorec.optim.SGD is torch.optim.SGD
    assert tutorec.optim.Adam is torch.optim.Adam
    assert tutorec.optim.Adagrad is torch.optim.Adagrad


# --- what apply_optimizer_in_backward takes


def two() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "said"),
    [
        (
            torch.optim.SGD,
            {"learning_rate": 0.1},
            TypeError,
            "unexpected keyword argument 'learning_rate'",
        ),
        (
            RowWiseAdagrad,
            {"learning_rate": 0.1},
            TypeError,
            r"RowWiseAdagrad does not take \['learning_rate'\]",
        ),
        (torch.optim.SGD, {"lr": -0.1}, ValueError, "Invalid learning rate: -0.1"),
        (torch.optim.Adam, {"lr": math.nan}, ValueError, "Invalid learning rate: nan"),
    ],
)
def test_bad_arguments_leave_every_parameter_as_it_is(
    kind: Any, arguments: Any, error: Any, said: str
) -> None:
    parameters = two()
    with pytest.raises(error, match=said):
        apply_optimizer_in_backward(kind, parameters, arguments)
    assert not any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


def test_bad_parameters_leave_the_others_as_they_are() -> None:
    good, bad = two()
    bad.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\[3\] does not require grad"):
        apply_optimizer_in_backward(torch.optim.SGD, [good, bad], {"lr": 0.1})
    assert not hasattr(good, "_in_backward_optimizers")


def test_optimizers_that_take_any_word_may_have_it() -> None:
    class Open(torch.optim.SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, lr=options["speed"])

    parameter = nn.Parameter(torch.ones(1))
    apply_optimizer_in_backward(Open, [parameter], {"speed": 0.5})
    parameter.sum().backward()
    assert parameter.tolist() == [0.5]


@both
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam], ids=lambda kind: kind.__name__
)
def test_a_rate_that_becomes_bad_is_told_with_the_table(
    name: str, kind: type[torch.optim.Optimizer]
) -> None:
    with use_backend(name):
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 4, "t", feature_names=["f"])])
        layer = nn.Linear(4, 1)
        for module in (ebc, layer):
            apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
        before = ebc.embedding_bags["t"].weight.detach().clone()
        batch = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
        ebc.embedding_bags["t"].weight._in_backward_optimizers[0].param_groups[0]["lr"] = math.nan  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"\[4, 4\]: the learning rate is nan"):
            ebc(batch).values().sum().backward()
        assert torch.equal(ebc.embedding_bags["t"].weight, before)
        layer.bias._in_backward_optimizers[0].param_groups[0]["lr"] = -1.0  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"learning rate is -1\.0"):
            layer(torch.ones(1, 4)).sum().backward()
