"""Unsharded tables updated during backward: rows of the batch move as a dense optimizer moves them,
others do not.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import pool_collection
from strategies import jagged_batches, rows_of, table_sets
from torch import Tensor, nn
from torch.optim import Optimizer

from tutorec._kernels.backend import backend, use_backend
from tutorec._kernels.specs import OptimizerSpec
from tutorec.distributed.fused_params import optimizer_spec_of_parameter
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

needs_fbgemm = pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
BACKENDS = ["torch", pytest.param("fbgemm", marks=needs_fbgemm)]
both = pytest.mark.parametrize("name", BACKENDS)
RATE = 0.25

# In these, a row without gradient does not move, so that dense steps are the reference.
AGREEING: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": RATE}),
    (torch.optim.SGD, {"lr": RATE, "maximize": True}),
    (RowWiseAdagrad, {"lr": RATE}),
    (RowWiseAdagrad, {"lr": RATE, "lr_decay": 0.5, "eps": 0.1, "initial_accumulator_value": 0.3}),
    (torch.optim.Adagrad, {"lr": RATE, "initial_accumulator_value": 0.1}),
]
# In these it moves or its state does, so that they are compared where every batch touches the same
# rows.
DECAYING: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.Adam, {"lr": RATE}),
    (torch.optim.AdamW, {"lr": RATE, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.RMSprop, {"lr": RATE, "momentum": 0.9, "centered": True}),
    (torch.optim.SGD, {"lr": RATE, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": RATE, "weight_decay": 0.1}),
    (RowWiseAdagrad, {"lr": RATE, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": RATE, "weight_decay": 0.1, "lr_decay": 0.2}),
    (torch.optim.Adamax, {"lr": RATE}),
    (torch.optim.Adadelta, {"lr": RATE}),
    (torch.optim.NAdam, {"lr": RATE}),
    (torch.optim.Rprop, {"lr": RATE}),
]


def name_of(case: object) -> str:
    return case.__name__ if isinstance(case, type) else ""


def two_tables(
    weighted: bool = False, data_type: DataType = DataType.FP32
) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(6, 8, "t1", data_type, feature_names=["item", "user"]),
        EmbeddingBagConfig(5, 4, "t2", data_type, feature_names=["item"]),
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


def batch(ids: list[int] | None = None, weights: Tensor | None = None) -> KeyedJaggedTensor:
    """Item: [1, 2], []; user: [2], [2, 0]. Row 2 of t1 is there three times, through
    two features.
    """
    values = torch.tensor([1, 2, 2, 2, 0] if ids is None else ids)
    return KeyedJaggedTensor(["item", "user"], values, weights, lengths=torch.tensor([2, 0, 1, 2]))


def optimizer_of(table: nn.Module) -> Optimizer:
    [optimizer] = table.weight._in_backward_optimizers  # type: ignore[union-attr]
    return optimizer


def train_densely(
    ebc: EmbeddingBagCollection, batches: list[KeyedJaggedTensor], rule: Callable[..., Optimizer]
) -> None:
    """One step of an ordinary optimizer for each batch, with dense gradients."""
    optimizer = rule(list(ebc.parameters()))
    for features in batches:
        optimizer.zero_grad(set_to_none=False)
        loss_of(ebc(features).values()).backward()
        optimizer.step()


def loss_of(pooled: Tensor) -> Tensor:
    """Gradients of one sign: a sum near 0, which rounding turns round, would turn Adam's whole step
    round.
    """
    return (pooled * torch.linspace(0.5, 2.0, pooled.numel()).view(pooled.shape)).sum()


@both
@given(data=st.data(), weighted=st.booleans(), case=st.sampled_from(AGREEING))
def test_two_steps_equal_dense_steps(
    name: str, data: st.DataObject, weighted: bool, case: tuple[type[Optimizer], dict[str, Any]]
) -> None:
    kind, arguments = case
    # where weights cancel, it would turn what rounding leaves into a whole step
    if kind is not torch.optim.SGD:
        arguments = {**arguments, "eps": 0.1}
    pooling = data.draw(st.sampled_from([PoolingType.SUM, PoolingType.SQRTN, None]))
    tables = data.draw(table_sets(pooling=PoolingType.SUM if weighted else pooling))
    if data.draw(st.booleans()):  # widths that fbgemm can address
        for table in tables:
            table.embedding_dim *= 4
    drawn = [data.draw(jagged_batches(rows_of(tables), weighted=weighted)) for _ in range(2)]
    with use_backend(name):
        ebc = EmbeddingBagCollection(tables, is_weighted=weighted)
        start = {key: table.weight.detach().clone() for key, table in ebc.embedding_bags.items()}
        dense = {key: weight.clone().requires_grad_() for key, weight in start.items()}
        apply_optimizer_in_backward(kind, ebc.parameters(), arguments)
        optimizer = kind(list(dense.values()), **arguments)  # type: ignore[call-arg]
        for one in drawn:
            pooled = ebc(one.kjt()).values()
            expected = pool_collection(tables, dense, one.ids, one.weights, one.samples)
            torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-4)
            if not one.flat_ids:
                continue
            loss_of(pooled).backward()
            optimizer.zero_grad()
            loss_of(expected).backward()
            for weight in dense.values():  # a batch without ids of a table is a step of it, too
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            optimizer.step()
    for table in tables:
        moved = ebc.embedding_bags[table.name].weight
        assert moved.grad is None
        present = {
            i
            for one in drawn
            for feature in table.feature_names
            for bag in one.ids[feature]
            for i in bag
        }
        for row in set(range(table.num_embeddings)) - present:
            assert torch.equal(moved[row], start[table.name][row])
        torch.testing.assert_close(moved, dense[table.name], rtol=1e-3, atol=1e-3)


@both
@pytest.mark.parametrize(("kind", "arguments"), [*AGREEING, *DECAYING], ids=name_of)
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
def test_touched_rows_move_as_a_dense_optimizer_moves_them(
    name: str, kind: type[Optimizer], arguments: dict[str, Any], data_type: DataType
) -> None:
    with use_backend(name):
        ebc = two_tables(data_type=data_type)
        dense = copy.deepcopy(ebc)
        start = copy.deepcopy(ebc.state_dict())
        apply_optimizer_in_backward(kind, ebc.parameters(), arguments)
        for _ in range(3):
            loss_of(ebc(batch()).values()).backward()
        train_densely(dense, [batch()] * 3, lambda params: kind(params, **arguments))  # type: ignore[call-arg]
    touched = {"t1": [0, 1, 2], "t2": [1, 2]}
    tolerance = {DataType.FP32: 1e-5, DataType.FP16: 1e-2, DataType.BF16: 6e-2}[data_type]
    for key, rows in touched.items():
        moved, expected = ebc.embedding_bags[key].weight, dense.embedding_bags[key].weight
        before = start[f"embedding_bags.{key}.weight"]
        assert moved.grad is None
        torch.testing.assert_close(moved[rows], expected[rows], rtol=tolerance, atol=tolerance)
        others = [row for row in range(before.shape[0]) if row not in rows]
        assert torch.equal(moved[others], before[others])
        assert bool(torch.isfinite(moved).all())


@both
def test_no_gradient_of_a_tables_size_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(parameter: Tensor) -> None:
        raise AssertionError(f"a gradient of shape {list(parameter.shape)} was accumulated")

    with use_backend(name):
        ebc = two_tables()
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": RATE})
        for parameter in ebc.parameters():
            parameter.register_post_accumulate_grad_hook(refuse)
        loss_of(ebc(batch()).values()).backward()


@both
@pytest.mark.parametrize("kind", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adam], ids=name_of)
def test_schedulers_change_the_rate_through_param_groups(name: str, kind: type[Optimizer]) -> None:
    with use_backend(name):
        ebc, twin = two_tables(), two_tables()
        twin.load_state_dict(ebc.state_dict())
        apply_optimizer_in_backward(kind, ebc.parameters(), {"lr": 1.0})
        optimizers = [optimizer_of(table) for table in ebc.embedding_bags.values()]
        schedulers = [
            torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers
        ]
        dense = kind(list(twin.parameters()), lr=1.0)  # type: ignore[call-arg]
        slower = torch.optim.lr_scheduler.StepLR(dense, 1, gamma=0.5)
        for _ in range(3):
            loss_of(ebc(batch()).values()).backward()
            dense.zero_grad()
            loss_of(twin(batch()).values()).backward()
            dense.step()
            # torch would warn of a step before the optimizer's
            for scheduler in (*schedulers, slower):
                scheduler.step()
    for own, expected in zip(ebc.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@both
def test_the_rate_is_that_of_the_backward_and_tables_may_differ_in_it(name: str) -> None:
    with use_backend(name):
        ebc = two_tables()
        start = copy.deepcopy(ebc.state_dict())
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        pooled = ebc(batch()).values()
        optimizer_of(ebc.embedding_bags["t1"]).param_groups[0]["lr"] = 0.5
        optimizer_of(ebc.embedding_bags["t2"]).param_groups[0]["lr"] = torch.tensor(0.0)
        pooled.sum().backward()
    assert torch.equal(ebc.embedding_bags["t2"].weight, start["embedding_bags.t2.weight"])
    moved = ebc.embedding_bags["t1"].weight - start["embedding_bags.t1.weight"]
    torch.testing.assert_close(moved[:4, 0], torch.tensor([-0.5, -0.5, -1.5, 0.0]))


@both
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adagrad, torch.optim.Adam], ids=name_of
)
def test_optimizer_state_is_stored_and_loaded(name: str, kind: type[Optimizer]) -> None:
    with use_backend(name):
        ebc = two_tables()
        apply_optimizer_in_backward(kind, ebc.parameters(), {"lr": RATE})
        loss_of(ebc(batch()).values()).backward()
        stored = [
            copy.deepcopy(optimizer_of(table).state_dict()) for table in ebc.embedding_bags.values()
        ]
        twin = two_tables()
        twin.load_state_dict(ebc.state_dict())
        apply_optimizer_in_backward(kind, twin.parameters(), {"lr": 99.0})
        for table, state in zip(twin.embedding_bags.values(), stored, strict=True):
            # torch would share the tensors
            optimizer_of(table).load_state_dict(copy.deepcopy(state))
        for one in (ebc, twin):
            loss_of(one(batch([0, 0, 4, 1, 2])).values()).backward()
    for own, expected in zip(ebc.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, expected)
    if kind is RowWiseAdagrad:
        [state] = stored[1]["state"].values()
        assert state["sum"].shape == (5, 1)
        assert state["sum"].nonzero()[:, 0].tolist() == [1, 2]
        assert float(state["step"]) == 1.0


@both
@pytest.mark.parametrize("kind", [torch.optim.SGD, RowWiseAdagrad], ids=name_of)
def test_each_backward_is_a_step(name: str, kind: type[Optimizer]) -> None:
    with use_backend(name):
        ebc = two_tables()
        start = copy.deepcopy(ebc)
        apply_optimizer_in_backward(kind, ebc.parameters(), {"lr": RATE})
        first, second = ebc(batch()).values(), ebc(batch([4, 4, 1, 1, 1])).values()
        loss_of(second).backward(retain_graph=True)
        loss_of(first).backward()
        loss_of(second).backward()
        order = [batch([4, 4, 1, 1, 1]), batch(), batch([4, 4, 1, 1, 1])]
        train_densely(start, order, lambda params: kind(params, lr=RATE))  # type: ignore[call-arg]
    for own, expected in zip(ebc.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@both
def test_without_grad_nothing_moves(name: str) -> None:
    with use_backend(name):
        ebc = two_tables()
        before = copy.deepcopy(ebc.state_dict())
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": RATE})
        with torch.no_grad():
            assert not ebc(batch()).values().requires_grad
        with torch.inference_mode():
            ebc(batch())
        loss_of(ebc(batch()).values())
    for key, weight in ebc.state_dict().items():
        assert torch.equal(weight, before[key])


@both
def test_weights_of_ids_get_the_gradient_of_the_rows_that_were_looked_up(name: str) -> None:
    with use_backend(name):
        ebc = two_tables(weighted=True)
        dense = copy.deepcopy(ebc)
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": RATE})
        own = torch.tensor([0.5, 2.0, -1.0, 1.0, 3.0], requires_grad=True)
        plain = own.detach().clone().requires_grad_()
        waiting = loss_of(ebc(batch(weights=own)).values())
        # rows move before the other's backward
        loss_of(ebc(batch(weights=own.detach())).values()).backward()
        waiting.backward()
        loss_of(dense(batch(weights=plain)).values()).backward()
    torch.testing.assert_close(own.grad, plain.grad)
    expected = [2 * weight.grad for weight in dense.parameters()]  # type: ignore[operator]
    for moved, before, grad in zip(ebc.parameters(), dense.parameters(), expected, strict=True):
        torch.testing.assert_close(moved, before - RATE * grad)


@both
def test_unmarked_and_frozen_tables_are_left_to_others(name: str) -> None:
    with use_backend(name):
        ebc = two_tables()
        start = copy.deepcopy(ebc.state_dict())
        apply_optimizer_in_backward(
            torch.optim.SGD, [ebc.embedding_bags["t1"].weight], {"lr": RATE}
        )
        loss_of(ebc(batch()).values()).backward()
        assert ebc.embedding_bags["t1"].weight.grad is None
        assert ebc.embedding_bags["t2"].weight.grad is not None
        assert torch.equal(ebc.embedding_bags["t2"].weight, start["embedding_bags.t2.weight"])
        assert not torch.equal(ebc.embedding_bags["t1"].weight, start["embedding_bags.t1.weight"])
        moved = ebc.embedding_bags["t1"].weight.detach().clone()
        ebc.embedding_bags["t1"].weight.requires_grad_(False)
        loss_of(ebc(batch()).values()).backward()
        assert torch.equal(ebc.embedding_bags["t1"].weight, moved)


@both
def test_tied_tables_move_once(name: str) -> None:
    tables = [EmbeddingBagConfig(5, 4, key, feature_names=[key + "_id"]) for key in ("a", "b", "c")]
    features = KeyedJaggedTensor(
        ["a_id", "b_id", "c_id"], torch.tensor([4, 1, 4]), lengths=torch.tensor([1, 1, 1])
    )
    with use_backend(name):
        ebc = EmbeddingBagCollection(tables)
        ebc.embedding_bags["c"].weight = ebc.embedding_bags["a"].weight
        start = ebc.embedding_bags["a"].weight.detach().clone()
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": RATE})
        ebc(features).values().sum().backward()
    moved = start - ebc.embedding_bags["a"].weight
    # One update with the summed gradient of 2: the state is 4, and the row moves by rate * 2 / 2.
    torch.testing.assert_close(moved[4], torch.full((4,), RATE))
    state = optimizer_of(ebc.embedding_bags["a"]).state[ebc.embedding_bags["a"].weight]
    assert state["sum"].view(-1).tolist() == [0.0, 0.0, 0.0, 0.0, 4.0]


@both
def test_a_variable_batch_is_updated_through_its_inverse_indices(name: str) -> None:
    stored = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([5, 3, 1, 2]),
        lengths=torch.tensor([1, 1, 0, 2]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["item", "user"], torch.tensor([[2, 0, 1, 2], [0, 0, 0, 0]])),
    )
    full = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([5] * 4 + [1, 2, 3, 1, 2]),
        lengths=torch.tensor([1, 1, 1, 1, 2, 1, 0, 2]),
    )
    with use_backend(name):
        ebc, twin = two_tables(), two_tables()
        twin.load_state_dict(ebc.state_dict())
        for one, features in ((ebc, stored), (twin, full)):
            apply_optimizer_in_backward(RowWiseAdagrad, one.parameters(), {"lr": RATE})
            loss_of(one(features).values()).backward()
    for own, expected in zip(ebc.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


@needs_fbgemm
@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adagrad], ids=name_of
)
@pytest.mark.parametrize(
    ("pooling", "weights"),
    [
        (PoolingType.SUM, None),
        (PoolingType.MEAN, None),
        (PoolingType.SQRTN, None),
        (PoolingType.SUM, [0.5, 2, -1, 0, 3]),
    ],
)
def test_fbgemm_and_torch_move_rows_alike(
    kind: type[Optimizer], pooling: PoolingType, weights: list[float] | None
) -> None:
    def make() -> EmbeddingBagCollection:
        tables = [
            EmbeddingBagConfig(6, 8, "t1", feature_names=["item", "user"], pooling=pooling),
            EmbeddingBagConfig(5, 8, "t2", feature_names=["item"], pooling=pooling),
        ]
        return EmbeddingBagCollection(tables, is_weighted=weights is not None)

    def features() -> KeyedJaggedTensor:
        return batch(weights=None if weights is None else torch.tensor(weights))

    ebc, twin = make(), make()
    twin.load_state_dict(ebc.state_dict())
    for one, name in ((ebc, "fbgemm"), (twin, "torch")):
        apply_optimizer_in_backward(kind, one.parameters(), {"lr": RATE})
        with use_backend(name):
            for _ in range(2):
                loss_of(one(features()).values()).backward()
    for own, expected in zip(
        ebc.embedding_bags.values(), twin.embedding_bags.values(), strict=True
    ):
        torch.testing.assert_close(own.weight, expected.weight)
        torch.testing.assert_close(
            optimizer_of(own).state[own.weight], optimizer_of(expected).state[expected.weight]
        )


@both
def test_gradients_that_cancel_move_no_row_far(name: str) -> None:
    """A row whose gradients cancel but for rounding moves by at most the rate times the root of D,
    as every row.
    """
    # Rows 0 to 39 are in the batch four times, with factors a, b, -a, -b; rows 40 to 239 once.
    ids = torch.cat([torch.arange(40).repeat(4), torch.arange(40, 240)])
    one, two = torch.rand(40) + 0.1, torch.rand(40) + 0.1
    factors = torch.cat([one, two, -one, -two, torch.ones(200)])
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(360, dtype=torch.int64))
    with use_backend(name):
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(240, 8, "t", feature_names=["item"])])
        start = ebc.embedding_bags["t"].weight.detach().clone()
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": RATE})
        (
            ebc(features).values() * factors.unsqueeze(1) * torch.linspace(0.1, 0.7, 8)
        ).sum().backward()
    moved = (ebc.embedding_bags["t"].weight - start).detach().abs()
    assert float(moved.max()) <= RATE * 8**0.5 + 1e-4
    assert float(moved[40:].min()) > 0.0


def test_torchs_own_function_takes_the_same_road() -> None:
    with warnings.catch_warnings(action="ignore"):
        from torch.distributed.optim import _apply_optimizer_in_backward
    ebc, twin = two_tables(), two_tables()
    twin.load_state_dict(ebc.state_dict())
    _apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": RATE})
    apply_optimizer_in_backward(RowWiseAdagrad, twin.parameters(), {"lr": RATE})
    for one in (ebc, twin):
        for _ in range(2):
            loss_of(one(batch()).values()).backward()
    for own, expected in zip(ebc.parameters(), twin.parameters(), strict=True):
        assert own.grad is None
        assert torch.equal(own, expected)


def test_dense_parameters_step_when_their_gradient_is_there() -> None:
    layer, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(layer.state_dict())
    apply_optimizer_in_backward(torch.optim.Adam, layer.parameters(), {"lr": RATE})
    optimizer = torch.optim.Adam(twin.parameters(), lr=RATE)
    for _ in range(2):
        optimizer.zero_grad()
        for one in (layer, twin):
            one(torch.arange(6.0).view(2, 3)).square().sum().backward()
        optimizer.step()
    for own, expected in zip(layer.parameters(), twin.parameters(), strict=True):
        assert own.grad is None
        torch.testing.assert_close(own, expected)
    assert not list(in_backward_optimizer_filter(layer.named_parameters()))


def test_a_dense_use_of_a_marked_table_still_steps() -> None:
    ebc = two_tables()
    weight = ebc.embedding_bags["t1"].weight
    before = weight.detach().clone()
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": RATE})
    weight.sum().backward()
    torch.testing.assert_close(weight, before - RATE)
    assert weight.grad is None


def test_two_optimizers_on_one_table_step_one_after_the_other() -> None:
    ebc, twin = two_tables(), two_tables()
    twin.load_state_dict(ebc.state_dict())
    for rate in (RATE, 2 * RATE):
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": rate})
    apply_optimizer_in_backward(torch.optim.SGD, twin.parameters(), {"lr": 3 * RATE})
    for one in (ebc, twin):
        loss_of(one(batch()).values()).backward()
    for own, expected in zip(ebc.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


def test_hooks_of_an_optimizer_are_called() -> None:
    ebc, seen = two_tables(), []
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": RATE})
    optimizer_of(ebc.embedding_bags["t2"]).register_step_post_hook(
        lambda *parts: seen.append("stepped")
    )
    loss_of(ebc(batch()).values()).backward()
    assert seen == ["stepped"]


@both
def test_rows_without_pooling_are_updated_too(name: str) -> None:
    config = EmbeddingConfig(4, 2, "t", feature_names=["one", "two"], init_fn=nn.init.ones_)
    features = KeyedJaggedTensor(
        ["one", "two"], torch.tensor([3, 3, 0, 0]), lengths=torch.tensor([3, 1])
    )
    with use_backend(name):
        ec = EmbeddingCollection([config])
        apply_optimizer_in_backward(torch.optim.SGD, ec.parameters(), {"lr": RATE})
        rows = ec(features)
        assert rows["one"].values().shape == (3, 2)
        (rows["one"].values().sum() + 2.0 * rows["two"].values().sum()).backward()
    assert ec.embeddings["t"].weight[:, 0].tolist() == [1.0 - 3 * RATE, 1.0, 1.0, 1.0 - 2 * RATE]


@both
@pytest.mark.parametrize("pooled", [True, False])
def test_ids_that_change_before_backward_are_noticed(name: str, pooled: bool) -> None:
    with use_backend(name):
        bags = EmbeddingBagCollection([EmbeddingBagConfig(6, 8, "t", feature_names=["item"])])
        collection = (
            bags
            if pooled
            else EmbeddingCollection([EmbeddingConfig(6, 8, "t", feature_names=["item"])])
        )
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": RATE})
        ids = torch.tensor([1, 2])
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([1, 1]))
        rows = collection(features) if pooled else collection(features)["item"]
        ids.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            rows.values().sum().backward()


def test_what_cannot_be_applied_is_refused() -> None:
    ebc = two_tables()
    with pytest.raises(ValueError, match=r"shape \[6, 8\] does not require grad"):
        apply_optimizer_in_backward(
            torch.optim.SGD, [ebc.embedding_bags["t1"].weight.requires_grad_(False)], {"lr": 1.0}
        )
    ebc = two_tables()
    apply_optimizer_in_backward(torch.optim.Adafactor, ebc.parameters(), {"lr": 1.0})
    with pytest.raises(TypeError, match=r"Adafactor.* each row.* table of 6 rows"):
        loss_of(ebc(batch()).values()).backward()
    ebc = two_tables()
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
    optimizer_of(ebc.embedding_bags["t1"]).param_groups[0]["params"] = []
    with pytest.raises(ValueError, match=r"SGD.* no longer holds.*\[6, 8\]"):
        loss_of(ebc(batch()).values()).backward()


def test_sharding_reads_the_marks() -> None:
    for kind, arguments, expected in (
        (torch.optim.SGD, {"lr": 0.5}, OptimizerSpec("sgd", 0.5)),
        (
            RowWiseAdagrad,
            {"lr": 0.5, "lr_decay": 0.0},
            OptimizerSpec("rowwise_adagrad", 0.5, eps=1e-8),
        ),
        (RowWiseAdagrad, {"eps": 0.1}, OptimizerSpec("rowwise_adagrad", 0.01, eps=0.1)),
    ):
        table = two_tables().embedding_bags["t1"].weight
        apply_optimizer_in_backward(kind, [table], arguments)
        assert optimizer_spec_of_parameter("t1", table) == expected
    with pytest.raises(ValueError, match="lr_decay"):
        table = two_tables().embedding_bags["t1"].weight
        apply_optimizer_in_backward(RowWiseAdagrad, [table], {"lr_decay": 0.5})
        optimizer_spec_of_parameter("t1", table)


@pytest.mark.parametrize("kind", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adam])
def test_a_deep_copy_trains_as_the_original_and_apart_from_it(
    kind: type[torch.optim.Optimizer],
) -> None:
    model = nn.ModuleList([two_tables(), nn.Linear(3, 2, bias=False)])
    apply_optimizer_in_backward(kind, model.parameters(), {"lr": RATE})

    def step(model: Any) -> list[torch.Tensor]:
        loss_of(model[0](batch()).values()).backward()
        model[1](torch.ones(4, 3)).sum().backward()
        assert all(weight.grad is None for weight in model.parameters())
        return [weight.detach().clone() for weight in model.parameters()]

    step(model)
    [one] = cast(Any, model[1].weight)._in_backward_optimizers
    one.param_groups[0]["lr"] = 2 * RATE
    twin, start = copy.deepcopy(model), [weight.detach().clone() for weight in model.parameters()]
    moved = step(twin)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), start, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(moved, start, strict=True))
    assert all(torch.equal(*pair) for pair in zip(moved, step(model), strict=True))
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        [its_own], [own] = (
            cast(Any, its)._in_backward_optimizers,
            cast(Any, mine)._in_backward_optimizers,
        )
        assert its_own is not own
        assert its_own.param_groups[0]["params"][0] is its
    assert all(
        torch.equal(*pair) for pair in zip(step(copy.deepcopy(twin)), step(model), strict=True)
    )


def test_a_deep_copy_of_a_tensor_and_of_tied_tables_carries_its_optimizer() -> None:
    weight = torch.ones(2, requires_grad=True)
    apply_optimizer_in_backward(torch.optim.SGD, cast(Any, [weight]), {"lr": 0.5})
    twin, again = copy.deepcopy([weight, weight])
    assert twin is again
    twin.sum().backward()
    assert (twin.tolist(), weight.tolist(), twin.grad) == ([0.5, 0.5], [1.0, 1.0], None)
