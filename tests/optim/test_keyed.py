"""Optimizers by name: state out and in, several as one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from kernels.implementations import copy_numbers
from optim.idle import IdleOptimizer
from torch import nn

from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe_build import build_table_batch
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.optim import (
    CombinedOptimizer,
    EmbeddingFusedOptimizer,
    EmbOptimType,
    EmptyFusedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    in_backward_optimizer_filter,
)


def adam(layer: nn.Module, lr: float = 0.1) -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(
        dict(layer.named_parameters()), lambda params: torch.optim.Adam(params, lr=lr)
    )


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


class ForwardingWrapper(OptimizerWrapper):
    """A wrapper with TorchRec's signature, which hands False on."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)


def test_zero_grad_drops_gradients_through_a_wrapper_that_asks_for_zeros():
    layer = nn.Linear(2, 1)
    optimizer = ForwardingWrapper(adam(layer))
    layer(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    before = layer.weight.detach().clone()
    for _ in range(3):  # without a gradient Adam's momentum moves nothing
        optimizer.zero_grad()
        optimizer.step()
    assert layer.weight.grad is None
    assert torch.equal(layer.weight, before)


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
        fresh.state_dict()["state"]["a.weight"]["exp_avg"],
        combined.state_dict()["state"]["a.weight"]["exp_avg"],
    )


def test_combining_two_optimizers_of_one_name_is_refused():
    layer = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"key weight: .* a prefix"):
        CombinedOptimizer([adam(layer), adam(layer)])


def test_an_empty_combination_is_legitimate_and_an_empty_wrapper_explained():
    nothing = CombinedOptimizer([])
    nothing.step()
    nothing.zero_grad()
    assert (repr(nothing), nothing.params, nothing.state_dict()) == ("", {}, {"state": {}})
    with pytest.raises(ValueError, match=r"no parameters.* fused tables"):
        KeyedOptimizerWrapper({}, lambda params: torch.optim.SGD(params, lr=0.1))


def test_state_that_does_not_fit_is_refused_by_name():
    layer = nn.Linear(2, 1)
    optimizer = adam(layer)
    train(layer, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    bad = {"state": {**state["state"], "other": {}}}
    with pytest.raises(ValueError, match=r"2.*3: \[\].*\['other'\]"):
        optimizer.load_state_dict(bad)
    del state["state"]["bias"]
    with pytest.raises(ValueError, match=r"\['bias'\] are here only"):
        optimizer.load_state_dict(state)
    short = copy.deepcopy(optimizer.state_dict())
    short["state"]["weight"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'weight / exp_avg'.*\[1, 2\].*\[3\]"):
        optimizer.load_state_dict(short)


def test_parameters_outside_of_every_group_are_refused():
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"param_groups.*0.*1"):
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
    copy_numbers(other_batch.table_weights(), batch.table_weights())  # type: ignore[operator]
    look_up(batch)
    look_up(other_batch)
    for mine, theirs in zip(batch.table_weights(), other_batch.table_weights(), strict=True):  # type: ignore[operator]
        assert torch.equal(mine, theirs)


def test_filter_leaves_out_what_backward_updates():
    layer = nn.Linear(2, 1)
    layer.bias._in_backward_optimizers = []  # type: ignore[attr-defined]
    assert [name for name, _ in in_backward_optimizer_filter(layer.named_parameters())] == [
        "weight"
    ]
    assert [
        name for name, _ in in_backward_optimizer_filter(layer.named_parameters(), include=True)
    ] == ["bias"]


@pytest.mark.parametrize(
    "optimizer",
    [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ROWWISE_ADAGRAD, "exact_row_wise_adagrad"],
)
def test_all_spellings_of_an_optimizer_mean_the_same(optimizer):
    spec = optimizer_spec({"optimizer": optimizer, "lr": 0.02, "eps": 0.002})
    assert (spec.kind, spec.learning_rate, spec.eps) == ("rowwise_adagrad", 0.02, 0.002)
    assert optimizer_spec(None) == optimizer_spec(
        {"optimizer": EmbOptimType.SGD, "learning_rate": 0.01}
    )


def test_names_and_values_are_fbgemms_and_its_members_are_accepted():
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    theirs = {member.name: member.value for member in configs.EmbOptimType}
    # fbgemm 1.9 adds one: those of 1.8, TorchRec's, are ours
    assert {member.name: member.value for member in EmbOptimType}.items() <= theirs.items()
    assert theirs.keys() - EmbOptimType.__members__.keys() <= {"ROWWISE_RMSPROP_AR"}
    assert (
        optimizer_spec({"optimizer": configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD}).kind
        == "rowwise_adagrad"
    )
    assert str(EmbOptimType.EXACT_SGD) == str(configs.EmbOptimType.EXACT_SGD)


# --- what the public tests of TorchRec ask of the same classes


class Halves:
    """A value of which each rank has a part, as a ShardedTensor."""

    def __init__(self, *parts: torch.Tensor) -> None:
        self._parts = [type("Shard", (), {"tensor": part})() for part in parts]

    def local_shards(self):
        return self._parts


class Counter:
    """A state that stores and loads itself."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def two_parameters() -> tuple[KeyedOptimizer, list[torch.Tensor]]:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    state = {
        one: {
            "number": 1.0,
            "tensor": torch.tensor([5.0, 6.0]),
            "parts": Halves(torch.ones(2), torch.ones(3)),
        },
        two: {"deep": {"tensor": torch.zeros(2), "own": Counter(3)}},
    }
    groups = [{"params": [one], "a": 3.0, "b": 4.0}, {"params": [two], "a": 5.0, "b": 6.0}]
    optimizer = KeyedOptimizer({"one": one, "two": two}, state, groups)
    optimizer.save_param_groups(True)
    return optimizer, [one, two]


def changed(state_dict):
    """Every value another one, in objects of its own."""
    return {
        "state": {
            "one": {
                "number": 10.0,
                "tensor": torch.tensor([50.0, 60.0]),
                "parts": Halves(torch.full((2,), 7.0), torch.full((3,), 8.0)),
            },
            "two": {"deep": {"tensor": torch.ones(2), "own": {"count": 30}}},
        },
        "param_groups": [{**group, "a": group["a"] + 1} for group in state_dict["param_groups"]],
    }


def test_every_kind_of_state_is_loaded_into_what_is_there():
    optimizer, (one, two) = two_parameters()
    before = optimizer.state_dict()
    tensor, parts = optimizer.state[one]["tensor"], optimizer.state[one]["parts"]
    assert before["param_groups"] == [
        {"params": ["one"], "a": 3.0, "b": 4.0},
        {"params": ["two"], "a": 5.0, "b": 6.0},
    ]
    assert before["state"]["two"]["deep"]["own"] == {"count": 3}
    groups = optimizer.param_groups
    optimizer.load_state_dict(changed(before))
    assert optimizer.state[one]["number"] == 10.0
    assert (optimizer.state[one]["tensor"] is tensor, tensor.tolist()) == (True, [50.0, 60.0])
    assert [shard.tensor.tolist() for shard in parts.local_shards()] == [[7.0] * 2, [8.0] * 3]
    assert optimizer.state[two]["deep"]["own"].count == 30
    assert [group["a"] for group in groups] == [4.0, 6.0]


def broken(name: str, state_dict):
    """A state dict that does not fit, each in its own way."""
    state, groups = state_dict["state"], state_dict["param_groups"]
    {
        "count": lambda: state.pop("two"),
        "name": lambda: state.update(three=state.pop("two")),
        "size": lambda: state["one"].pop("number"),
        "key": lambda: state["one"].update(other=state["one"].pop("number")),
        "shape": lambda: state["one"].update(tensor=torch.zeros(3)),
        "dtype": lambda: state["one"].update(tensor=torch.ones(2, dtype=torch.complex64)),
        "deep": lambda: state["two"]["deep"].update(tensor=torch.zeros(1)),
        "shards": lambda: state["one"].update(parts=Halves(torch.ones(2))),
        "shard": lambda: state["one"].update(parts=Halves(torch.ones(2), torch.ones(2))),
        "kind": lambda: state["one"].update(parts=torch.ones(5)),
        "no tensor": lambda: state["one"].update(tensor="50"),
        "no dict": lambda: state["two"].update(deep=1),
        "no groups": lambda: state_dict.pop("param_groups"),
        "no state": lambda: state_dict.pop("state"),
        "groups": groups.pop,
        "group": lambda: groups[1].update(params=["three"]),
        "group size": lambda: groups[1].pop("b"),
        "group key": lambda: groups[1].update(c=groups[1].pop("b")),
    }[name]()
    return state_dict


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("count", r"Different parameter count: 2 vs 1: \['two'\] are here only"),
        (
            "name",
            (
                r"Parameter two not found: \['two'\] are here only, \['three'\] are in what is "
                r"loaded "
                r"only"
            ),
        ),
        ("size", r"Different state size: 3 vs 2 of 'one': \['number'\] are here only"),
        ("key", r"State number of 'one' not found: .*\['other'\] are in what is loaded only"),
        ("shape", r"optimizer state 'one / tensor' is \[2\] here and \[3\] in what is loaded"),
        ("dtype", r"'one / tensor' is torch.float32 here and torch.complex64 in what is loaded"),
        (
            "deep",
            r"optimizer state 'two / deep / tensor' is \[2\] here and \[1\] in what is loaded",
        ),
        ("shards", r"Different number of shards 2 vs 1 for the path of 'one / parts'"),
        ("shard", r"optimizer state 'one / parts' is \[3\] here and \[2\] in what is loaded"),
        (
            "kind",
            r"'one / parts' is a Halves here and a Tensor in what .*tutorec.distributed.checkpoint",
        ),
        ("no tensor", r"optimizer state 'one / tensor' is a tensor here and a str"),
        ("no dict", r"optimizer state 'two / deep' is a dict here and a int"),
        ("no groups", r"has no param_groups: it was stored without save_param_groups\(True\)"),
        ("no state", r"not an optimizer's state dict: it has no 'state', only \['param_groups'\]"),
        ("groups", r"Different param_groups count: 2 vs 1"),
        ("group", r"Group two not found"),
        ("group size", r"Different param_group size: 3 vs 2 of group two: \['b'\] are here only"),
        ("group key", r"Group key b not found for group two"),
    ],
)
@pytest.mark.parametrize("combined", [False, True])
def test_what_does_not_fit_is_refused_before_anything_moves(name, said, combined):
    optimizer, (one, _) = two_parameters()
    outer: KeyedOptimizer = optimizer
    if combined:
        nothing = KeyedOptimizer({}, {}, [])
        nothing.save_param_groups(True)
        outer = OptimizerWrapper(CombinedOptimizer([nothing, optimizer]))
    with pytest.raises(ValueError, match=said):
        outer.load_state_dict(broken(name, changed(optimizer.state_dict())))
    assert optimizer.state[one]["number"] == 1.0
    assert optimizer.state[one]["tensor"].tolist() == [5.0, 6.0]
    assert [group["a"] for group in optimizer.param_groups] == [3.0, 5.0]


def test_state_of_what_is_no_parameter_is_refused():
    one = torch.tensor([1.0])
    with pytest.raises(
        ValueError,
        match=r"keys are not: \['stranger'\]",
    ):
        KeyedOptimizer({"one": one}, {one: 1.0, "stranger": 2.0}, [{"params": [one]}])  # type: ignore[dict-item]


def test_parameters_are_not_added_later():
    optimizer, _ = two_parameters()
    for one in (optimizer, OptimizerWrapper(optimizer), CombinedOptimizer([optimizer])):
        with pytest.raises(NotImplementedError, match="cannot take further parameters"):
            one.add_param_group({"params": []})
    with pytest.raises(NotImplementedError, match="KeyedOptimizer has no step"):
        optimizer.step()


@pytest.mark.parametrize("build", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_init_state_makes_the_state_and_moves_nothing(build):
    dense = nn.Parameter(torch.ones(2, 3))
    options = {"momentum": 0.9} if build is torch.optim.SGD else {}
    optimizer = KeyedOptimizerWrapper(
        {"dense": dense}, lambda params: build(params, lr=0.1, weight_decay=0.5, **options)
    )
    optimizer.init_state()
    assert dense.grad is not None and not dense.grad.any()
    assert optimizer.state_dict()["state"]["dense"]
    assert torch.equal(dense, torch.ones(2, 3))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_init_state_gives_the_named_ones_sparse_gradients():
    dense, sparse = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1, 4))
    inner = KeyedOptimizerWrapper(
        {"d": dense, "s": sparse}, lambda params: torch.optim.SGD(params, lr=0.1)
    )
    for outer, name in ((inner, "s"), (OptimizerWrapper(CombinedOptimizer([("x", inner)])), "x.s")):
        dense.grad = sparse.grad = None
        outer.init_state({name})
        assert dense.grad is not None and not dense.grad.is_sparse
        assert sparse.grad is not None and sparse.grad.is_sparse


def test_init_state_of_fused_tables_makes_no_gradient():
    optimizer, _ = fused()
    CombinedOptimizer([optimizer]).init_state()
    assert all(parameter.grad is None for parameter in optimizer.params.values())
    assert EmptyFusedOptimizer().init_state() is None


@pytest.mark.parametrize(
    "wrap", [lambda one: one, OptimizerWrapper, lambda one: CombinedOptimizer([("x", one)])]
)
def test_optimizers_are_pickled_whole(wrap):
    layer = nn.Linear(2, 1)
    optimizer = wrap(adam(layer))
    optimizer.save_param_groups(True)
    train(layer, optimizer)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    mine, theirs = optimizer.state_dict(), other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for name, state in mine["state"].items():
        torch.testing.assert_close(theirs["state"][name], state)
    other.step()
    assert list(other.params) == list(optimizer.params)


def test_a_wrapper_sees_and_changes_what_it_wraps():
    optimizer, (one, _) = two_parameters()
    outer = OptimizerWrapper(optimizer)
    state = outer.state_dict()
    state["state"]["one"] = {**state["state"]["one"], "number": 999.0}
    state["param_groups"][0]["a"] = 998.0
    outer.load_state_dict(state)
    assert optimizer.state[one]["number"] == outer.state[one]["number"] == 999.0
    assert optimizer.param_groups[0]["a"] == outer.param_groups[0]["a"] == 998.0
    assert outer.params is optimizer.params


def test_a_combination_names_strangers_and_steps_its_closure_once():
    layer = nn.Linear(2, 1)
    combined = CombinedOptimizer([("a", adam(layer)), ("b", IdleOptimizer({}, {}, []))])
    calls: list[float] = []
    assert combined.step(lambda: calls.append(1.0) or 7.0) == 7.0
    assert calls == [1.0]
    train(layer, combined)
    state = copy.deepcopy(combined.state_dict())
    state["state"]["weight"] = state["state"]["a.weight"]
    with pytest.raises(
        ValueError,
        match=r"2.*3:.*\['weight'\]",
    ):
        combined.load_state_dict(state)
    assert CombinedOptimizer.prepend_opt_key("", "key") == "key"
    assert CombinedOptimizer.prepend_opt_key("name", "") == "name"


def test_steps_and_hyper_parameters_reach_those_who_ask_for_them():
    class Asking(torch.optim.SGD):
        seen: list[object]

        def set_optimizer_step(self, step):
            self.seen = [step]

        def update_hyper_parameters(self, params_dict):
            self.seen.append(params_dict)

    weight, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    asking = KeyedOptimizerWrapper({"w": weight}, lambda params: Asking(params, lr=0.1))
    silent = KeyedOptimizerWrapper({"b": bias}, lambda params: torch.optim.SGD(params, lr=0.1))
    outer = OptimizerWrapper(CombinedOptimizer([asking, OptimizerWrapper(silent)]))
    outer.set_optimizer_step(5)
    outer.update_hyper_parameters({"beta": 1})
    assert asking._optimizer.seen == [5, {"beta": 1}]  # type: ignore[attr-defined]


def test_a_factory_may_ask_for_the_names():
    seen = []

    def build(named):
        seen.extend(named)
        return torch.optim.SGD(list(named.values()), lr=0.1)

    KeyedOptimizerWrapper({"w": nn.Parameter(torch.ones(1))}, build, pass_params_dict=True)
    assert seen == ["w"]


def test_sharded_tensors_of_torch_are_loaded_shard_by_shard(ranks):
    assert ranks(2).run(load_sharded) == [[9.0, 9.0], [9.0, 9.0]]


def load_sharded(rank: int, world_size: int) -> list[float]:
    from torch.distributed._shard import sharded_tensor, sharding_spec

    spec = sharding_spec.ChunkShardingSpec(
        dim=0, placements=[f"rank:{each}/cpu" for each in range(world_size)]
    )
    one = torch.tensor([1.0])
    state = {one: {"momentum": sharded_tensor.full(spec, (4,), fill_value=1.0)}}
    optimizer = KeyedOptimizer({"one": one}, state, [{"params": [one]}])
    optimizer.load_state_dict(
        {"state": {"one": {"momentum": sharded_tensor.full(spec, (4,), fill_value=9.0)}}}
    )
    return optimizer.state_dict()["state"]["one"]["momentum"].local_shards()[0].tensor.tolist()
