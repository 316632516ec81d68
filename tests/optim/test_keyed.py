"""Optimizers by name: state out and in, several as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.tbe import GroupSpec, TableSpec, build_table_batch
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.optim import (
    CombinedOptimizer,
    EmbeddingFusedOptimizer,
    EmbOptimType,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    in_backward_optimizer_filter,
)


def adam(layer: nn.Module, lr: float = 0.1) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(layer.named_parameters()), lambda params: torch.optim.Adam(params, lr=lr))


def train(layer: nn.Module, optimizer: KeyedOptimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.ones(3, 2)).square().sum().backward()
        optimizer.step()


def fused(kind: str = "rowwise_adagrad") -> tuple[EmbeddingFusedOptimizer, nn.Module]:
    group = GroupSpec((TableSpec("item", 6, 4), TableSpec("user", 5, 4)), feature_tables=(0, 1))
    batch = build_table_batch(group, optimizer=OptimizerSpec(kind, 0.1), device=torch.device("cpu"))  # type: ignore[arg-type]
    parameters = [nn.Parameter(rows) for rows in batch.table_weights()]
    return EmbeddingFusedOptimizer(batch, ["item.weight", "user.weight"], parameters), batch


def look_up(batch: nn.Module) -> None:
    batch(torch.tensor([1, 2, 2]), torch.tensor([0, 1, 3])).sum().backward()


def test_wrapper_steps_like_the_optimizer_that_it_wraps():
    layer = nn.Linear(2, 1)
    twin = copy.deepcopy(layer)
    train(layer, adam(layer))
    plain = torch.optim.Adam(twin.parameters(), lr=0.1)
    for _ in range(2):
        plain.zero_grad()
        twin(torch.ones(3, 2)).square().sum().backward()
        plain.step()
    assert torch.equal(layer.weight, twin.weight)


def test_state_dict_is_keyed_by_name_and_continues_training_elsewhere():
    layer = nn.Linear(2, 1)
    optimizer = adam(layer)
    train(layer, optimizer)
    twin = copy.deepcopy(layer)
    other = adam(twin, lr=0.7)
    assert set(optimizer.state_dict()) == {"state"}
    optimizer.save_param_groups(True)
    other.save_param_groups(True)
    stored = copy.deepcopy(optimizer.state_dict())
    assert set(stored["state"]) == {"weight", "bias"}
    assert stored["param_groups"][0]["params"] == ["bias", "weight"]
    other.load_state_dict(stored)
    assert other.param_groups[0]["lr"] == 0.1
    train(layer, optimizer, 1)
    train(twin, other, 1)
    assert torch.equal(layer.weight, twin.weight)


def test_learning_rate_scheduler_of_torch_drives_a_wrapped_optimizer():
    layer = nn.Linear(2, 1)
    optimizer = adam(layer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(layer, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_combined_optimizer_prefixes_names_and_shares_groups():
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    combined = CombinedOptimizer([("a", adam(one)), ("b", adam(two, lr=0.2))])
    assert sorted(combined.params) == ["a.bias", "a.weight", "b.bias", "b.weight"]
    assert [group["lr"] for group in combined.param_groups] == [0.1, 0.2]
    combined.param_groups[1]["lr"] = 0.3
    assert combined.optimizers[1][1].param_groups[0]["lr"] == 0.3
    train(nn.Sequential(one, two), combined)
    combined.save_param_groups(True)
    state = copy.deepcopy(combined.state_dict())
    assert set(state["state"]) == {"a.bias", "a.weight", "b.bias", "b.weight"}
    fresh = CombinedOptimizer([("a", adam(one)), ("b", adam(two))])
    fresh.save_param_groups(True)
    fresh.load_state_dict(state)
    assert fresh.state_dict()["param_groups"][1]["lr"] == 0.3
    assert torch.equal(
        fresh.state_dict()["state"]["a.weight"]["exp_avg"], combined.state_dict()["state"]["a.weight"]["exp_avg"]
    )


def test_combining_two_optimizers_of_one_name_is_refused():
    layer = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"Duplicate param key weight: .* give one of them a prefix"):
        CombinedOptimizer([adam(layer), adam(layer)])


def test_an_empty_combination_is_legitimate_and_an_empty_wrapper_explained():
    nothing = CombinedOptimizer([])
    nothing.step()
    nothing.zero_grad()
    assert (repr(nothing), nothing.params, nothing.state_dict()) == ("", {}, {"state": {}})
    with pytest.raises(ValueError, match=r"no parameters to optimize: fused tables are updated during backward"):
        KeyedOptimizerWrapper({}, lambda params: torch.optim.SGD(params, lr=0.1))


def test_state_that_does_not_fit_is_refused_by_name():
    layer = nn.Linear(2, 1)
    optimizer = adam(layer)
    train(layer, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    bad = {"state": {**state["state"], "other": {}}}
    with pytest.raises(ValueError, match=r"parameter count: 2 vs 3: \[\] are here only, \['other'\] are in what"):
        optimizer.load_state_dict(bad)
    del state["state"]["bias"]
    with pytest.raises(ValueError, match=r"\['bias'\] are here only"):
        optimizer.load_state_dict(state)
    short = copy.deepcopy(optimizer.state_dict())
    short["state"]["weight"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"state 'weight / exp_avg' is \[1, 2\] here and \[3\] in what is loaded"):
        optimizer.load_state_dict(short)


def test_parameters_outside_of_every_group_are_refused():
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="param_groups hold 0 parameters and params names 1"):
        KeyedOptimizer({"weight": weight}, {}, [{"params": []}])


def test_fused_optimizer_prints_rate_and_state_by_name():
    optimizer, batch = fused()
    assert repr(optimizer) == "EmbeddingFusedOptimizer (\nParameter Group 0\n    lr: 0.1\n)"
    look_up(batch)
    state = optimizer.state_dict()["state"]
    assert state["item.weight"]["item.momentum1"].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert state["user.weight"]["user.momentum1"].tolist() == [0.0, 0.0, 4.0, 0.0, 0.0]
    optimizer.step()
    optimizer.zero_grad()


def test_fused_state_loads_into_another_operator():
    optimizer, batch = fused()
    look_up(batch)
    other, other_batch = fused()
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other_batch.load_table_weights(batch.table_weights())  # type: ignore[operator]
    look_up(batch)
    look_up(other_batch)
    for mine, theirs in zip(batch.table_weights(), other_batch.table_weights(), strict=True):  # type: ignore[operator]
        assert torch.equal(mine, theirs)


def test_filter_leaves_out_what_backward_updates():
    layer = nn.Linear(2, 1)
    layer.bias._in_backward_optimizers = []  # type: ignore[attr-defined]
    assert [name for name, _ in in_backward_optimizer_filter(layer.named_parameters())] == ["weight"]
    assert [name for name, _ in in_backward_optimizer_filter(layer.named_parameters(), include=True)] == ["bias"]


@pytest.mark.parametrize(
    "optimizer", [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ROWWISE_ADAGRAD, "exact_row_wise_adagrad"]
)
def test_all_spellings_of_an_optimizer_mean_the_same(optimizer):
    spec = optimizer_spec({"optimizer": optimizer, "lr": 0.02, "eps": 0.002})
    assert (spec.kind, spec.learning_rate, spec.eps) == ("rowwise_adagrad", 0.02, 0.002)
    assert optimizer_spec(None) == optimizer_spec({"optimizer": EmbOptimType.SGD, "learning_rate": 0.01})


def test_names_and_values_are_fbgemms_and_its_members_are_accepted():
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    theirs = {member.name: member.value for member in configs.EmbOptimType}
    assert {member.name: member.value for member in EmbOptimType} == theirs
    assert optimizer_spec({"optimizer": configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD}).kind == "rowwise_adagrad"
    assert str(EmbOptimType.EXACT_SGD) == str(configs.EmbOptimType.EXACT_SGD)
