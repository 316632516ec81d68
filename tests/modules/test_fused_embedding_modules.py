from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
)
from tutorec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
)
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.optimizers import PartialRowWiseAdam
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tutorec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

POOLED = [
    EmbeddingBagConfig(20, 8, "a", feature_names=["f"]),
    EmbeddingBagConfig(30, 4, "b", feature_names=["g"]),
]
ROWS = [
    EmbeddingConfig(20, 8, "a", feature_names=["f"]),
    EmbeddingConfig(30, 8, "b", feature_names=["g"]),
]


def _batch(weighted: bool = False) -> KeyedJaggedTensor:
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0, 1.5]) if weighted else None
    return KeyedJaggedTensor(
        ["f", "g"], torch.tensor([3, 3, 7, 29, 0]), weights, lengths=torch.tensor([2, 1, 0, 2])
    )


def _step(collection: nn.Module, weighted: bool = False) -> None:
    out: Any = collection(_batch(weighted))
    values = (
        torch.cat([jt.values() for jt in out.values()]) if isinstance(out, dict) else out.values()
    )
    values.square().sum().backward()


@pytest.mark.parametrize(
    ("kind", "asked", "meant"),
    [
        (torch.optim.SGD, {"lr": 0.1}, {"lr": 0.1}),
        (torch.optim.SGD, {}, {"lr": 0.01}),
        (torch.optim.Adagrad, {"learning_rate": 0.1}, {"lr": 0.1, "eps": 1e-8}),
        (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3}, {"lr": 0.1, "eps": 1e-3}),
        (torch.optim.Adam, {"lr": 0.1, "beta1": 0.5}, {"lr": 0.1, "betas": (0.5, 0.999)}),
        (PartialRowWiseAdam, {"lr": 0.1, "betas": (0.5, 0.9)}, {"lr": 0.1, "betas": (0.5, 0.9)}),
    ],
)
@pytest.mark.parametrize("pooled", [True, False])
def test_a_fused_collection_is_one_with_its_optimizer_in_backward(
    kind, asked, meant, pooled: bool
) -> None:
    plain = EmbeddingBagCollection(POOLED) if pooled else EmbeddingCollection(ROWS)
    fused = (
        FusedEmbeddingBagCollection(POOLED, kind, asked)
        if pooled
        else FusedEmbeddingCollection(ROWS, kind, asked)
    )
    fused.load_state_dict(plain.state_dict())
    apply_optimizer_in_backward(kind, plain.parameters(), meant)
    for _ in range(3):
        _step(plain)
        _step(fused)
    for (name, expected), (same, found) in zip(
        plain.named_parameters(), fused.named_parameters(), strict=True
    ):
        assert name == same and torch.equal(found, expected)
        assert found.grad is None
    assert (fused.optimizer_type(), fused.optimizer_kwargs()) == (kind, asked)


def test_rates_and_state_pass_through_the_fused_optimizer() -> None:
    made = [FusedEmbeddingBagCollection(POOLED, torch.optim.Adagrad, {"lr": 0.1}) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    optimizer = made[0].fused_optimizer()
    assert list(optimizer.params) == ["embedding_bags.a.weight", "embedding_bags.b.weight"]
    _step(made[0])
    made[1].load_state_dict(made[0].state_dict())
    made[1].fused_optimizer().load_state_dict(made[0].fused_optimizer().state_dict())
    for each in made:
        _step(each)
    for first, second in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(first, second)
    before = [table.detach().clone() for table in made[0].parameters()]
    for group in made[0].fused_optimizer().param_groups:
        group["lr"] = 0.0
    _step(made[0])
    assert all(
        torch.equal(table, old) for table, old in zip(made[0].parameters(), before, strict=True)
    )


def test_a_model_is_fused_in_place_and_keeps_its_weights() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"pooled": EmbeddingBagCollection(POOLED, is_weighted=True)})
            self.rows = EmbeddingCollection(ROWS, need_indices=True)
            self.dense = nn.Linear(2, 2)

    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.5}) is model
    assert (
        type(model.inner["pooled"]) is FusedEmbeddingBagCollection
        and model.inner["pooled"].is_weighted()
    )
    assert type(model.rows) is FusedEmbeddingCollection and model.rows.need_indices()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    _step(model.inner["pooled"], weighted=True)
    _step(model.rows)
    after = model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(
        before
    ) - {
        "dense.weight",
        "dense.bias",
    }


def test_a_collection_is_returned_fused_on_the_device_that_is_asked_for() -> None:
    fused = fuse_embedding_optimizer(
        EmbeddingBagCollection(POOLED), torch.optim.SGD, {}, torch.device("meta")
    )
    assert type(fused) is FusedEmbeddingBagCollection and all(
        table.is_meta for table in fused.parameters()
    )


def test_what_cannot_be_fused_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot.*optimizer_type=.*RMSprop.*SGD, Adagrad"):
        FusedEmbeddingBagCollection(POOLED, torch.optim.RMSprop, {})
    with pytest.raises(
        NotImplementedError,
        match=r"location=MANAGED_CACHING.*env=ShardingEnv.from_local\(1, 0\)",
    ):
        FusedEmbeddingCollection(
            ROWS, torch.optim.SGD, {}, location=SimpleNamespace(name="MANAGED_CACHING")
        )


def test_collections_of_every_kind_have_their_interface() -> None:
    for kind in (EmbeddingBagCollection, FusedEmbeddingBagCollection, QuantEmbeddingBagCollection):
        assert issubclass(kind, EmbeddingBagCollectionInterface)
    for kind in (EmbeddingCollection, FusedEmbeddingCollection, QuantEmbeddingCollection):
        assert issubclass(kind, EmbeddingCollectionInterface)
    with pytest.raises(TypeError, match="abstract"):
        EmbeddingBagCollectionInterface()
