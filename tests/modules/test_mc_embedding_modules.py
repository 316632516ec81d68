"""Tables behind managed collisions: what is looked up, and what an eviction leaves of the id
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    evict,
    return_custom_metadata,
    return_remapped_lengths_as_mask,
)
from tutorec.modules.mc_modules import (
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.optimizers import PartialRowWiseAdam
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.quant.whole_model import quantize
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

ROWS, COLUMNS = 5, 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "rowwise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.25}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.75)}),
    "partial_rowwise_adam": (PartialRowWiseAdam, {"lr": 0.1}),
}


def build(pooled: bool, init_fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    kind = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables: list[Any] = [kind(ROWS, COLUMNS, "t", feature_names=["item"], init_fn=init_fn)]
    mapping = MCHManagedCollisionModule(
        ROWS, torch.device("cpu"), LRU_EvictionPolicy(), eviction_interval=1
    )
    mappings = ManagedCollisionCollection({"t": mapping}, tables)
    if pooled:
        return ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables), mappings, **kwargs
        )
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables), mappings, **kwargs)


def weight_of(model: Any) -> torch.nn.Parameter:
    return next(model._embedding_module.parameters())


def batch(*ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["item"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
    )


def loss_of(result: Any, scale: float) -> torch.Tensor:
    values = result["item"].values() if isinstance(result, dict) else result.values()
    return (values * torch.linspace(1, 2, values.numel()).view(values.shape) * scale).sum()


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_evicted_row_trains_like_a_new_one(name: str, in_backward: bool, pooled: bool):
    """One step of the new id moves its row as the first step of an id moves a row that was never
    used.
    """
    kind, arguments = OPTIMIZERS[name]

    def trained(batches: list[KeyedJaggedTensor]) -> torch.Tensor:
        model = build(pooled, lambda weight: weight.fill_(0.5), return_remapped_features=True)
        weight, optimizer = weight_of(model), None
        if in_backward:
            apply_optimizer_in_backward(kind, [weight], arguments)
        else:
            optimizer = kind([weight], **arguments)
        for number, one in enumerate(batches):
            if optimizer is not None:
                optimizer.zero_grad()
            result, rows = model(one)
            loss_of(result, 1.0 if number == len(batches) - 1 else 3.0).backward()
            if optimizer is not None:
                optimizer.step()
        return weight.detach()[rows.values()]

    new = batch(100, 101)
    used, fresh = (
        trained([batch(1, 2, 3, 4), batch(1, 2, 3, 4), new]),
        trained([batch(1), batch(1), new]),
    )
    torch.testing.assert_close(used, fresh, rtol=1e-6, atol=1e-7)
    assert not torch.equal(used, torch.full_like(used, 0.5))


def test_rows_that_keep_their_id_keep_values_and_state():
    model = build(True)
    weight = weight_of(model)
    apply_optimizer_in_backward(torch.optim.Adagrad, [weight], {"lr": 0.1})
    for _ in range(2):
        loss_of(model(batch(1, 2, 3, 4))[0], 1.0).backward()
    values, sums = weight.detach().clone(), weight._in_backward_optimizers[0].state[weight]["sum"]  # pyright: ignore
    before = sums.clone()
    model(batch(3, 4, 100))
    given = model._managed_collision_collection._managed_collision_modules["t"]
    rows = given.eval()({"t": batch(3, 4)["item"]})["t"].values()
    lost = given({"t": batch(100)["item"]})["t"].values()
    assert torch.equal(weight.detach()[rows], values[rows]) and torch.equal(
        sums[rows], before[rows]
    )
    assert bool((weight.detach()[lost] != values[lost]).all()) and bool((sums[lost] == 0).all())
    assert bool((before[lost] > 0).all())
    assert bool((weight.detach()[lost].abs() <= ROWS**-0.5).all())


def test_eval_mode_changes_neither_mapping_nor_rows():
    model = build(False, return_remapped_features=True)
    model(batch(1, 2))
    state = {key: value.clone() for key, value in model.eval().state_dict().items()}
    result, rows = model(batch(7, 1))
    assert rows.values()[0] == ROWS - 1
    assert torch.equal(result["item"].values(), weight_of(model)[rows.values()])
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_remapped_features_are_returned_where_asked_for():
    assert build(True)(batch(1))[1] is None
    pooled, rows = build(True, return_remapped_features=True)(batch(1, 1))
    assert pooled.values().shape == (2, COLUMNS)
    assert rows.values()[0] == rows.values()[1]
    mask = build(True).lookup_remapped_lengths_mask(batch(1, 2))
    assert mask.tolist() == [True, True]


def test_masks_say_which_lists_have_ids():
    features = KeyedJaggedTensor(["item"], torch.arange(3), lengths=torch.tensor([1, 0, 2]))
    for mask in (
        return_remapped_lengths_as_mask(features),
        build(True).lookup_remapped_lengths_mask(features),
    ):
        assert mask.tolist() == [True, False, True]
    assert return_custom_metadata(torch.tensor([7])).tolist() == [7]


def test_state_dict_has_torchrecs_names():
    assert set(build(True).state_dict()) == {
        "_embedding_module.embedding_bags.t.weight",
        "_managed_collision_collection._managed_collision_modules.t._output_segments_tensor",
        "_managed_collision_collection._managed_collision_modules.t._current_iter_tensor",
        "_managed_collision_collection._managed_collision_modules.t._mch_sorted_raw_ids",
        "_managed_collision_collection._managed_collision_modules.t._mch_remapped_ids_mapping",
        "_managed_collision_collection._managed_collision_modules.t._mch_last_access_iter",
    }


def test_backward_through_a_reset_row_is_an_error_unless_allowed():
    """The gradient of a square needs the rows that the forward read."""
    for allowed in (False, True):
        table = EmbeddingBagConfig(ROWS, COLUMNS, "t", feature_names=["item"])
        model = EmbeddingBagCollection([table])
        loss = weight_of_collection(model).square().sum()
        evict({"t": torch.tensor([0])}, model, in_place=allowed)
        if allowed:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def weight_of_collection(collection: EmbeddingBagCollection) -> torch.nn.Parameter:
    return next(collection.parameters())


def test_tables_and_mappings_of_different_configs_are_refused():
    mapping = MCHManagedCollisionModule(ROWS, torch.device("cpu"), LRU_EvictionPolicy(), 1)
    tables = [EmbeddingBagConfig(ROWS, COLUMNS, "t", feature_names=["item"])]
    others = [EmbeddingBagConfig(ROWS, COLUMNS + 1, "t", feature_names=["item"])]
    with pytest.raises(ValueError, match=r"differ.* build both from one"):
        ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(others), ManagedCollisionCollection({"t": mapping}, tables)
        )


@pytest.mark.parametrize("pooled", [True, False])
def test_quantized_model_remaps_in_front_of_packed_rows(pooled: bool):
    model = build(pooled, return_remapped_features=True)
    for _ in range(2):
        model(batch(10**12, 7, 7))
    served = quantize(model, torch.int8).eval()
    expected, rows = model.eval()(batch(7, 10**12, 99))
    result, served_rows = served(batch(7, 10**12, 99))
    assert torch.equal(served_rows.values(), rows.values())
    values, close = (
        (result.values(), expected.values())
        if pooled
        else (result["item"].values(), expected["item"].values())
    )
    torch.testing.assert_close(values, close, rtol=0, atol=2 * ROWS**-0.5 / 255)
    assert values.unique(dim=0).shape[0] == 3
    with pytest.raises(TypeError, match=r"not trained.* call eval"):
        served.train()(batch(1, 2, 3))
