"""What callers say about a fused optimizer: every spelling, every argument, every refusal by name
and number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tutorec._kernels.specs import OptimizerSpec
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.fused_params import optimizer_spec, optimizer_spec_of_parameter
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.emb_optim_type import EmbOptimType
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad

SPELLINGS = {
    "sgd": (EmbOptimType.SGD, EmbOptimType.EXACT_SGD, "sgd", "exact_sgd"),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, "exact_adagrad", "adagrad"),
    "rowwise_adagrad": (
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.ROWWISE_ADAGRAD,
        "rowwise_adagrad",
    ),
    "adam": (EmbOptimType.ADAM, "adam"),
    "partial_rowwise_adam": (
        EmbOptimType.PARTIAL_ROWWISE_ADAM,
        "partial_row_wise_adam",
        "partial_rowwise_adam",
    ),
}


@pytest.mark.parametrize(
    ("kind", "spelling"), [(kind, each) for kind, all_ in SPELLINGS.items() for each in all_]
)
def test_every_spelling_names_its_kernel(kind: str, spelling: Any):
    assert optimizer_spec({"optimizer": spelling, "lr": 0.5}) == OptimizerSpec(kind, 0.5)  # type: ignore[arg-type]


def test_every_argument_arrives():
    words = {"learning_rate": 0.1, "eps": 0.2, "beta1": 0.3, "beta2": 0.4, "weight_decay": 0.5}
    wanted = OptimizerSpec("adam", 0.1, 0.2, 0.5, 0.3, 0.4, max_gradient=2.0)
    assert (
        optimizer_spec({"optimizer": "adam", **words, "gradient_clipping": True, "max_gradient": 2})
        == wanted
    )
    assert optimizer_spec({"gradient_clipping": True}).max_gradient == 1.0  # fbgemm's default
    assert optimizer_spec({"gradient_clipping": False}).max_gradient is None
    # What TorchRec's pipeline takes besides, and what rounds rows of float16 there.
    assert optimizer_spec(
        {"prefetch_pipeline": True, "stochastic_rounding": False}
    ) == optimizer_spec({})


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (
            {"momentum": 0.9},
            ValueError,
            r"unknown keys \['momentum'\]: known are optimizer, learning_rate, lr, eps,",
        ),
        (
            {"optimizer": EmbOptimType.LAMB},
            ValueError,
            r"the optimizer 'lamb', which has no fused form here",
        ),
        ({"learning_rate": -1}, ValueError, r"learning_rate=-1.0 must be a finite number"),
        ({"learning_rate": float("nan")}, ValueError, r"learning_rate=nan must be a finite number"),
        ({"learning_rate": "0.1"}, TypeError, r"learning_rate='0.1' is a str, not a number"),
        ({"lr": 1, "learning_rate": 1}, ValueError, r"names the learning rate twice"),
        (
            {"max_gradient": 1.0},
            ValueError,
            r"max_gradient=1.0 has no effect without gradient_clipping=True",
        ),
        (
            {"optimizer": "adam", "beta1": 1.5},
            ValueError,
            r"beta1=1.5 must be at least 0 and less than 1",
        ),
        (
            {"optimizer": "sgd", "beta2": 0.5},
            ValueError,
            r"beta2=0.5 is for adam and partial_rowwise_adam, not sgd",
        ),
        (
            {"optimizer": "exact_adagrad", "weight_decay": 0.1},
            ValueError,
            r"weight_decay=0.1 with adagrad",
        ),
        (
            {"optimizer": "adam", "weight_decay": -0.1},
            ValueError,
            r"weight_decay=-0.1 must be a finite number",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_makes_no_sense_is_refused_when_the_sharder_is_made(
    words: Any, kind: type[Exception], message: str
):
    with pytest.raises(kind, match=message):
        EmbeddingBagCollectionSharder(words)


def marked(optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> nn.Parameter:
    table = nn.Parameter(torch.ones(3, 4))
    apply_optimizer_in_backward(optimizer, [table], arguments)
    return table


@pytest.mark.parametrize(
    ("optimizer", "arguments", "spec"),
    [
        (torch.optim.SGD, {}, OptimizerSpec("sgd", 1e-3)),
        (
            torch.optim.SGD,
            {"lr": 0.5, "momentum": 0.0, "foreach": False},
            OptimizerSpec("sgd", 0.5),
        ),
        (torch.optim.Adagrad, {}, OptimizerSpec("adagrad", 1e-2, eps=1e-8)),
        (
            torch.optim.Adagrad,
            {"lr": 0.5, "eps": 0.1, "lr_decay": 0},
            OptimizerSpec("adagrad", 0.5, eps=0.1),
        ),
        (torch.optim.Adam, {}, OptimizerSpec("adam", 1e-3)),
        (
            torch.optim.Adam,
            {"lr": 0.5, "betas": (0.8, 0.9), "eps": 0.1, "amsgrad": False, "weight_decay": 0},
            OptimizerSpec("adam", 0.5, eps=0.1, beta1=0.8, beta2=0.9),
        ),
        (torch.optim.AdamW, {}, OptimizerSpec("adam", 1e-3, weight_decay=1e-2)),
        (torch.optim.AdamW, {"weight_decay": 0.3}, OptimizerSpec("adam", 1e-3, weight_decay=0.3)),
        (RowWiseAdagrad, {}, OptimizerSpec("rowwise_adagrad", 1e-2, eps=1e-8)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_optimizer_in_backward_becomes_the_fused_one_that_computes_the_same(
    optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any], spec: OptimizerSpec
):
    assert optimizer_spec_of_parameter("item", marked(optimizer, arguments)) == spec


@pytest.mark.parametrize(
    ("optimizer", "arguments", "message"),
    [
        (
            torch.optim.Adam,
            {"amsgrad": True},
            r"table 'item': Adam\(amsgrad=True\) in backward has no fused form",
        ),
        (
            torch.optim.Adam,
            {"weight_decay": 0.1},
            r"Adam\(weight_decay=0.1\).*; use AdamW, whose decay it has",
        ),
        (torch.optim.AdamW, {"maximize": True}, r"AdamW\(maximize=True\)"),
        (torch.optim.SGD, {"momentum": 0.9}, r"SGD\(momentum=0.9\) in backward has no fused form"),
        (
            torch.optim.SGD,
            {"weight_decay": 0.1},
            r"table 'item': SGD in backward: weight_decay=0.1 with sgd",
        ),
        (torch.optim.Adagrad, {"lr_decay": 0.1}, r"Adagrad\(lr_decay=0.1\)"),
        (
            torch.optim.Adagrad,
            {"initial_accumulator_value": 0.1},
            r"Adagrad\(initial_accumulator_value=0.1\)",
        ),
        (
            torch.optim.Adagrad,
            {"weight_decay": 0.1},
            r"Adagrad in backward: weight_decay=0.1 with adagrad",
        ),
        (RowWiseAdagrad, {"lr_decay": 0.1}, r"RowWiseAdagrad\(lr_decay=0.1\)"),
        (
            torch.optim.RMSprop,
            {},
            (
                r"RMSprop in backward has no fused form.*; use one of SGD, Adagrad, "
                r"RowWiseAdagrad, Adam, AdamW, "
            ),
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_fused_form_does_not_do_is_refused_by_name(
    optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        optimizer_spec_of_parameter("item", marked(optimizer, arguments))


def test_adagrad_without_eps_is_the_same_in_backward_and_in_fused_params():
    in_fused_params = optimizer_spec({"optimizer": "exact_adagrad", "learning_rate": 0.5})
    assert (
        optimizer_spec_of_parameter("item", marked(torch.optim.Adagrad, {"lr": 0.5}))
        == in_fused_params
    )


def test_two_optimizers_on_one_table_are_refused():
    table = marked(torch.optim.SGD, {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.Adam, [table], {"lr": 0.1})
    with pytest.raises(
        ValueError,
        match=r"table 'item'.*several.*\['SGD', 'Adam'\]",
    ):
        optimizer_spec_of_parameter("item", table)
