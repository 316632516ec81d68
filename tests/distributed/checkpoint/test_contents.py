"""What is in a checkpoint besides fused tables of one plan: dense kernels, unsharded models,
schedules, notes.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from distributed import cases
from distributed.cases import KINDS, MIXES, collection, column_slices, group, kind_of, tables
from distributed.checkpoint_cases import (
    OPTIMIZERS,
    Model,
    batch,
    by_column,
    held,
    sharded,
    train,
    with_optimizer,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.nn.parallel import DistributedDataParallel

from tutorec._kernels.specs import OptimizerKind, OptimizerSpec
from tutorec.distributed.checkpoint import (
    full_state_dict,
    latest_checkpoint,
    load_checkpoint,
    read_info,
    read_state_dict,
    save_checkpoint,
)
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.errors import AgreementError, CheckpointError
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import PartialRowWiseAdam
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

FIRST, MORE = range(2), range(2, 4)


# --- tables whose gradients are kept, under an optimizer of the caller's


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()


def dense(kind: str, optimizer: str) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    env, model = ShardingEnv.from_process_group(group()), Bags()
    words = {
        config.name: cases.word(kind, index, env.world_size, env.local_size, "dense")
        for index, config in enumerate(tables())
    }
    plan = ShardingPlan(
        {"ebc": construct_module_sharding_plan(model.ebc, words, local_size=env.local_size)}
    )
    parallel = DistributedModelParallel(model, plan=plan)
    factories: dict[str, Any] = {
        "adam": lambda params: torch.optim.Adam(params, lr=0.1),
        "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "rowwise": lambda params: RowWiseAdagrad(params, lr=0.1),
    }
    return parallel, KeyedOptimizerWrapper(dict(parallel.named_parameters()), factories[optimizer])


def steps_of(
    model: DistributedModelParallel, optimizer: KeyedOptimizerWrapper, rank: int, steps: range
) -> None:
    for step in steps:
        optimizer.zero_grad()
        pooled = model.module.get_submodule("ebc")(cases.batch(10 * step + rank, 3)).values()
        (pooled * cases.coefficients(pooled, step)).sum().backward()
        optimizer.step()


def shards_in_plan(model: DistributedModelParallel, optimizer: KeyedOptimizerWrapper) -> Any:
    found: dict[str, Any] = {}
    for table in model.module.get_submodule("ebc").local_shards():  # type: ignore[operator]
        for piece, rows in zip(table.shards, table.rows, strict=True):
            states = {
                key: (
                    value.view(-1) if value.dim() and value.shape != rows.shape else value
                ).clone()
                for key, value in optimizer.state[rows].items()
                if isinstance(value, Tensor)
            }
            place = [piece.row_offset, piece.column_offset, piece.rows, piece.columns]
            found.setdefault(table.name, []).append(
                (place, {"weight": rows.detach().clone(), **states})
            )
    return found


def dense_saved(path: str, kind: str, optimizer: str, rank: int) -> tuple[Any, Any]:
    model, outside = dense(kind, optimizer)
    steps_of(model, outside, rank, FIRST)
    save_checkpoint(path, model, outside)
    then = shards_in_plan(model, outside)
    steps_of(model, outside, rank, MORE)
    return then, shards_in_plan(model, outside)


def dense_loaded(path: str, kind: str, optimizer: str, rank: int, warm: bool) -> tuple[Any, Any]:
    model, outside = dense(kind, optimizer)
    if warm:  # The state that it has is overwritten; otherwise there is none yet.
        steps_of(model, outside, rank, range(1))
    load_checkpoint(path, model, outside)
    then = shards_in_plan(model, outside)
    steps_of(model, outside, rank, MORE)
    return then, shards_in_plan(model, outside)


@pytest.mark.parametrize("optimizer", ["adam", "momentum", "rowwise"])
def test_state_of_an_outside_optimizer_is_cut_as_its_tables_are(ranks, tmp_path, optimizer):
    path, before = str(tmp_path / "model"), None
    for index, kind in enumerate(
        ("column_wise", "mixed", "row_wise", "table_wise", "data_parallel")
    ):
        if before is None:
            results = ranks(2).run(lambda rank: dense_saved(path, "column_wise", optimizer, rank))
            before, end = (
                by_column([each[0] for each in results]),
                by_column([each[1] for each in results]),
            )
        after = ranks(2).run(
            lambda rank, k=kind, i=index: dense_loaded(path, k, optimizer, rank, i % 2 == 0)
        )
        found = by_column([each[0] for each in after])
        assert found.keys() == before.keys()
        for number, (name, values) in enumerate(before.items()):
            assert values.keys() == found[name].keys(), name
            for key, value in values.items():
                slices = column_slices(kind, number, value.shape[1])
                if optimizer == "rowwise" and key == "sum":
                    value = torch.cat(
                        [
                            value[:, s].mean(1, keepdim=True).expand(-1, s.stop - s.start)
                            for s in slices
                        ],
                        1,
                    )
                torch.testing.assert_close(
                    found[name][key], value, msg=lambda text, m=f"{kind} {name} {key}": m + text
                )
        if optimizer != "rowwise":
            for name, values in by_column([each[1] for each in after]).items():
                torch.testing.assert_close(values["weight"], end[name]["weight"])
    assert kind_of("mixed", 0) in KINDS
    assert MIXES["mixed"] == KINDS


# --- unsharded models


def unsharded() -> tuple[Model, CombinedOptimizer]:
    """One process, every optimizer inside backward."""
    model = Model()
    for path, table in model.named_parameters():
        if ".partial" in path:
            apply_optimizer_in_backward(PartialRowWiseAdam, [table], {"lr": 0.05, "eps": 1e-3})
    return with_optimizer(model)


def sharded_resumes(path: str, shift: int, rank: int) -> tuple[Any, dict[str, Tensor]]:
    model, optimizer = sharded(shift)
    load_checkpoint(path, model, optimizer)
    then = held(model)
    # Both ranks bring the same samples, so that the mean over ranks is what one process would do.
    train(model, optimizer, 0, MORE)
    return then, full_state_dict(model)


def sharded_trains(path: str, shift: int, rank: int) -> dict[str, Tensor]:
    model, optimizer = sharded(shift)
    train(model, optimizer, 0, FIRST)
    save_checkpoint(path, model, optimizer, step=2)
    train(model, optimizer, 0, MORE)
    return full_state_dict(model)


def without_cuts_of_columns(names: Any, shift: int) -> list[str]:
    """Those that take the same steps in one process: not the row-wise ones whose
    columns are cut.
    """
    found = []
    for name in names:
        by_row = "rowwise" in name or "partial" in name
        kind = KINDS[(int(name.removesuffix(".weight")[-1]) + shift) % len(KINDS)] if by_row else ""
        if kind not in cases.CUT_IN_TWO:
            found.append(name)
    return found


def test_an_unsharded_model_is_loaded_into_a_sharded_one_and_goes_on(ranks, tmp_path):
    path = tmp_path / "model"
    model, optimizer = unsharded()
    train(model, optimizer, 0, FIRST)
    save_checkpoint(path, model, optimizer, step=2)
    assert read_info(path).world_size == 1
    assert read_info(path).plan is None
    stored = read_state_dict(path)["optimizer"]["state"]
    train(model, optimizer, 0, MORE)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = ranks(2).run(lambda rank: sharded_resumes(str(path), 2, rank))
    assert results[1][1] == {}
    found = results[0][1]
    assert found.keys() == expected.keys()
    for name in without_cuts_of_columns(expected, 2):
        torch.testing.assert_close(
            found[name], expected[name], msg=lambda text, n=name: f"{n}\n{text}"
        )
    loaded = by_column([each[0] for each in results])
    for name, values in loaded.items():
        states = stored.get(name, {})
        names = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "exp_avg_sq"}
        for key, ours in names.items():
            if key in states and ours in values:
                whole = states[key].view(len(states[key]), -1).expand_as(values[ours])
                torch.testing.assert_close(values[ours], whole, rtol=0, atol=0)


def test_a_sharded_model_is_loaded_into_an_unsharded_one_and_goes_on(ranks, tmp_path):
    path = tmp_path / "model"
    expected = ranks(2).run(lambda rank: sharded_trains(str(path), 2, rank))[0]
    model, optimizer = unsharded()
    assert load_checkpoint(path, model, optimizer).step == 2
    train(model, optimizer, 0, MORE)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name in without_cuts_of_columns(expected, 2):
        torch.testing.assert_close(
            found[name], expected[name], msg=lambda text, n=name: f"{n}\n{text}"
        )


def test_torch_reads_a_checkpoint_by_itself_and_an_unsharded_model_takes_its_tensors(
    ranks, tmp_path
):
    path, plain = tmp_path / "model", tmp_path / "plain.pt"
    ranks(2).run(lambda rank: sharded_trains(str(path), 0, rank))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, plain)
    by_torch, ours = torch.load(plain, weights_only=True), read_state_dict(path)
    assert by_torch["model"].keys() == ours["model"].keys()
    assert all(torch.equal(value, ours["model"][name]) for name, value in by_torch["model"].items())
    model = Model()
    loaded = model.load_state_dict(by_torch["model"])
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    name = "sparse.ebc.embedding_bags.adam0.weight"
    assert by_torch["optimizer"]["state"][name].keys() == {
        "adam0.momentum1",
        "adam0.exp_avg_sq",
        "adam0.step",
    }
    assert ours["optimizer"]["state"][name]["adam0.step"].item() == 2
    assert ours["optimizer"]["options"][name]["lr"] == 0.05


# --- what does not fit


def refused(path: str, rank: int, what: str) -> tuple[str, str, bool]:
    """The error, and whether the model is as it was."""
    model, optimizer = sharded(1, ("rowwise", "adam"))
    arguments: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if what == "other tables":
        arguments["model"], _ = sharded(1, ("rowwise", "sgd"))
        arguments["optimizer"] = None
    elif what == "other optimizer":
        apply_to = Model(("rowwise", "adam"))
        arguments["model"] = other_optimizer(apply_to)
        arguments["optimizer"] = None
    elif what == "other dense optimizer" or (what == "on one rank" and rank == 1):
        over = dict(model.module.get_submodule("over").named_parameters(prefix="over"))
        arguments["optimizer"] = KeyedOptimizerWrapper(
            over, lambda params: torch.optim.SGD(params, lr=0.1)
        )
    elif what == "torch optimizer":
        arguments["optimizer"] = torch.optim.SGD(
            list(model.module.get_submodule("over").parameters()), lr=0.1
        )
    elif what == "no module":
        arguments["model"] = "model.pt"
    before = by_column([held(model)])
    try:
        load_checkpoint(path, **arguments)
    except (ValueError, TypeError) as error:
        after = by_column([held(model)])
        same = all(
            torch.equal(t.nan_to_num(), after[n][k].nan_to_num())
            for n, v in before.items()
            for k, t in v.items()
        )
        return type(error).__name__, str(error), same
    return "", "loaded", False


def other_optimizer(model: Model) -> DistributedModelParallel:
    from distributed.checkpoint_cases import plan_of

    for table in model.parameters():
        for mark in ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs"):
            if hasattr(table, mark):
                delattr(table, mark)
    return DistributedModelParallel(
        model, plan=plan_of(model, 1, ShardingEnv.from_process_group(group()))
    )


def saved_small(path: str, rank: int) -> None:
    model, optimizer = sharded(1, ("rowwise", "adam"))
    train(model, optimizer, rank, FIRST)
    save_checkpoint(path, model, optimizer)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        (
            "other tables",
            "CheckpointError",
            "the checkpoint is from another model: ['sparse.ebc.embedding_bags.sgd0.weight'",
        ),
        (
            "other optimizer",
            "CheckpointError",
            "was trained by rowwise_adagrad in backward, and here sgd in backward would go on",
        ),
        (
            "on one rank",
            "CheckpointError",
            "failed on rank 1: 'over.weight' was trained by AdamW, and here SGD would go on",
        ),
        (
            "other dense optimizer",
            "CheckpointError",
            (
                "'over.weight' was trained by AdamW, and here SGD would go on: give it AdamW "
                "again; or load_checkpoint(..., optimizer_state=False) takes the weights alone"
            ),
        ),
        ("torch optimizer", "TypeError", "whose parameters are numbered and have no names"),
        ("no module", "TypeError", "a checkpoint is of a torch.nn.Module, got a str"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(ranks, tmp_path, what, kind, words):
    path = str(tmp_path / "model")
    ranks(2).run(saved_small, path)
    for found, message, same in ranks(2).run(refused, path, what=what):
        assert found == kind, message
        assert words in message
        assert same


def weights_alone(path: str, rank: int) -> tuple[bool, bool]:
    model, optimizer = sharded(3, ("rowwise", "adam"))
    load_checkpoint(path, model, optimizer, optimizer_state=False)
    states = [tensor for of in model.fused_optimizer.state.values() for tensor in of.values()]
    whole = full_state_dict(model)
    wanted = read_state_dict(path)["model"]
    return all(torch.equal(tensor, wanted[name]) for name, tensor in whole.items()), not any(
        map(torch.any, states)
    )


def test_weights_alone_leave_the_optimizers_as_they_are(ranks, tmp_path):
    path = str(tmp_path / "model")
    ranks(2).run(saved_small, path)
    assert ranks(2).run(weights_alone, path) == [(True, True)] * 2


def notes(path: str, rank: int, what: str) -> str:
    model = cases.shard(collection())
    given: dict[str, Any] = {
        "step": {"step": -1},
        "bool": {"step": True},
        "set": {"position": {1, 2}},
        "nan": {"extra": {"loss": float("nan")}},
        "differing": {"position": {"batch": rank}},
        "paths": {},
    }[what]
    try:
        save_checkpoint(f"{path}{rank}" if what == "paths" else path, model, **given)
    except (CheckpointError, AgreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("step", "step is -1: give a number of steps, an integer from 0"),
        ("bool", "step is True: give a number of steps"),
        ("set", "position cannot be stored as JSON"),
        ("nan", "extra cannot be stored as JSON"),
        ("differing", 'position is {"batch": 1} on rank 1 and {"batch": 0} on rank 0'),
        ("paths", "path is "),
    ],
)
def test_notes_that_cannot_be_stored_or_differ_are_refused_and_leave_nothing(
    ranks, tmp_path, what, words
):
    for message in ranks(2).run(notes, str(tmp_path / "model"), what=what):
        assert words in message
        assert message.startswith(
            "AgreementError: " if what in ("differing", "paths") else "CheckpointError: "
        )
    assert list(tmp_path.iterdir()) == []


# --- the rest


def warmed(path: str, rank: int, load: bool) -> tuple[float, list[float], Any]:
    model, optimizer = sharded(0, ("rowwise",))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
    warm = WarmupOptimizer(optimizer, stages, lr=1.0)
    if load:
        load_checkpoint(path, model, warm)
    else:
        for step in range(3):
            warm.zero_grad()
            model(batch(step), step).backward()
            warm.step()
        save_checkpoint(path, model, warm)
    rate = warm.param_groups[0]["lr"]
    warm.step()
    return (
        rate,
        [group["lr"] for group in warm.param_groups],
        sorted(warm.state_dict()["state"]["__warmup"]),
    )


def test_a_schedule_goes_on_where_it_stood(ranks, tmp_path):
    path = str(tmp_path / "model")
    saved = ranks(2).run(lambda rank: warmed(path, rank, False))
    assert saved[0][0] == pytest.approx(0.37)
    assert ranks(2).run(lambda rank: warmed(path, rank, True)) == saved


def rates(path: str, rank: int, rate: float | None) -> list[float]:
    model, optimizer = sharded(0, ("rowwise",))
    if rate is not None:
        for of_group in optimizer.param_groups:
            of_group["lr"] = rate
        save_checkpoint(path, model, optimizer)
    else:
        load_checkpoint(path, model, optimizer)
        model(batch(0), 0)
        for fused in model.fused_optimizer.optimizers:
            assert fused[1].operator.learning_rate == fused[1].param_groups[0]["lr"]  # type: ignore[attr-defined]
    return [of_group["lr"] for of_group in optimizer.param_groups]


def test_rates_that_were_changed_are_stored_and_reach_the_kernels(ranks, tmp_path):
    path = str(tmp_path / "model")
    ranks(2).run(lambda rank: rates(path, rank, 0.0125))
    assert all(
        set(found) == {0.0125} for found in ranks(2).run(lambda rank: rates(path, rank, None))
    )


def one_table(path: str, rank: int, load: bool) -> list[int]:
    """More ranks than tables: a rank has nothing to save."""
    ebc = EmbeddingBagCollection(tables()[:1])
    model = cases.shard(ebc, "exact_row_wise_adagrad")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5.0)
    if not load:
        save_checkpoint(path, model)
    else:
        for parameter in model.parameters():
            parameter.data.zero_()
        load_checkpoint(path, model)
    return [int(parameter.detach().sum()) for parameter in model.parameters()]


def test_a_rank_without_tables_saves_and_loads_with_the_others(ranks, tmp_path):
    path = tmp_path / "model"
    for load in (False, True):
        results = ranks(2).run(lambda rank, now=load: one_table(str(path), rank, now))
        assert sorted(results) == [[], [5 * 11 * 8]]
    names = sorted(re.sub("[0-9a-f]{8}", "*", file.name) for file in path.iterdir())
    assert names == ["*.index", ".metadata", "__1_*_0.distcp", "manifest.json"]


def data_parallel_only(path: str, rank: int) -> list[str]:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    model(torch.randn(4, 2))
    save_checkpoint(path, model, step=1)
    return list(full_state_dict(model))


def test_a_model_without_tables_is_saved_once_under_its_own_names(ranks, tmp_path):
    path = tmp_path / "model"
    names = ranks(2).run(data_parallel_only, str(path))
    plain = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert names == [list(plain.state_dict()), []]
    load_checkpoint(path, plain)
    assert plain.state_dict()["1.num_batches_tracked"] == 1
    assert not list(path.glob("__1_*")) and list(path.glob("__0_*"))


class Around(nn.Module):
    """A model of which a sharded one is a part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.last = nn.Linear(1, 1)


def nested(path: str, rank: int) -> tuple[list[str], bool]:
    inner, _ = sharded(1, ("rowwise",))
    save_checkpoint(path, Around(inner))
    other = Around(sharded(3, ("rowwise",))[0])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_checkpoint(path, other)
    found, wanted = full_state_dict(other), full_state_dict(Around(inner))
    same = all(
        torch.equal(found[name], wanted[name]) for name in found if name.startswith("inner.")
    )
    return list(found), same


def test_a_sharded_model_inside_another_has_the_names_of_the_unsharded_one(ranks, tmp_path):
    (names, same), _ = ranks(2).run(nested, str(tmp_path / "model"))
    assert sorted(names) == sorted(Around(Model(("rowwise",))).state_dict())
    assert same


def test_state_that_is_no_tensor_is_refused_by_name(tmp_path):
    class Odd(nn.Module):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

    with pytest.raises(
        CheckpointError,
        match=r"'0\._extra_state'.*extra=",
    ):
        save_checkpoint(tmp_path / "model", nn.Sequential(Odd()))
    assert list(tmp_path.iterdir()) == []


def test_the_latest_checkpoint_is_that_of_the_highest_step(tmp_path):
    layer = nn.Linear(2, 1)
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    for name, step in (("b", 10), ("a", 9), ("c", None)):
        save_checkpoint(tmp_path / name, layer, step=step)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    (tmp_path / "z").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "b"
    (tmp_path / "b" / "manifest.json").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
    assert latest_checkpoint(str(tmp_path)) == Path(tmp_path) / "a"


def test_a_folder_of_other_things_is_not_replaced(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")
    with pytest.raises(CheckpointError, match=r"not a checkpoint \(manifest.json"):
        save_checkpoint(tmp_path / "thesis", nn.Linear(2, 1))
    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "x"


def dense_layer(optimizer: Any) -> tuple[nn.Linear, KeyedOptimizerWrapper]:
    layer = nn.Linear(2, 1)
    return layer, KeyedOptimizerWrapper(dict(layer.named_parameters()), optimizer)


def step(layer: nn.Linear, optimizer: KeyedOptimizerWrapper) -> None:
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_checkpoint_from_before_the_first_step_empties_the_state(tmp_path):
    layer, adam = dense_layer(lambda params: torch.optim.Adam(params, lr=0.1))
    save_checkpoint(tmp_path / "fresh", layer, adam)
    step(layer, adam)
    assert len(adam.state[layer.weight]) == 3
    save_checkpoint(tmp_path / "one", layer, adam)
    load_checkpoint(tmp_path / "fresh", layer, adam)
    assert len(adam.state[layer.weight]) == 0
    # AdamW keeps what Adam keeps.
    other, adamw = dense_layer(lambda params: torch.optim.AdamW(params, lr=0.2))
    load_checkpoint(tmp_path / "one", other, adamw)
    assert adamw.state[other.weight]["step"] == 1
    assert adamw.param_groups[0]["lr"] == 0.1
    step(other, adamw)
    # Another optimizer does not go on unless it is asked to, not even where there was no state.
    third, sgd = dense_layer(lambda params: torch.optim.SGD(params, lr=0.5))
    with pytest.raises(CheckpointError, match=r"'weight'.* by Adam.* here SGD"):
        load_checkpoint(tmp_path / "fresh", third, sgd)
    load_checkpoint(tmp_path / "fresh", third, sgd, optimizer_state=False)
    assert torch.equal(third.weight, read_state_dict(tmp_path / "fresh")["model"]["weight"])


def test_two_rates_do_not_fit_into_one_group(tmp_path):
    layer = nn.Linear(2, 1)
    groups = lambda params: torch.optim.SGD(  # noqa: E731
        [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(params)]
    )
    save_checkpoint(
        tmp_path / "two", layer, KeyedOptimizerWrapper(dict(layer.named_parameters()), groups)
    )
    other, one_group = dense_layer(lambda params: torch.optim.SGD(params, lr=0.5))
    with pytest.raises(
        CheckpointError,
        match=r"0\.2.*'bias'.*0\.1.*'weight'",
    ):
        load_checkpoint(tmp_path / "two", other, one_group)
    assert one_group.param_groups[0]["lr"] == 0.5


def test_every_optimizer_of_the_cases_is_known():
    assert set(OPTIMIZERS) == {"sgd", "adagrad", "rowwise", "adam", "partial"}


def test_states_of_no_two_optimizers_have_the_same_names_and_shapes():
    """By names and shapes a checkpoint tells a fused optimizer from another one."""
    states = [OptimizerSpec(kind).states for kind in get_args(OptimizerKind)]
    assert len(set(states)) == len(states)
