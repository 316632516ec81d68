"""The page of training recipes: each is executed as the page shows it, on one rank and on two, with
both backends, and does what the sentence behind it says.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from policy.tree import ROOT
from torch import Tensor, nn

from tutorec._kernels.backend import backend, use_backend
from tutorec.errors import RankError
from tutorec.models.training import evaluate, train
from tutorec.spmd import Ranks, device

PAGE = (ROOT / "book/recipes.md").read_text(encoding="utf-8")
PROGRAM = "What the recipes assume"
MOST_LINES = 10
MOST_WORDS = 1_600
BACKENDS = ["torch", "fbgemm"] if backend().name == "fbgemm" else ["torch"]

# Texts of the program that a test replaces.
CHANGES = {
    "tables": '"exact_row_wise_adagrad", "learning_rate": 0.1',
    "dense": "torch.optim.Adam(params, lr=0.003)",
}
SGD = {
    "tables": '"exact_sgd", "learning_rate": 0.1',
    "dense": "torch.optim.SGD(params, lr=0.1)",
}

Names = dict[str, Any]
OnPage = Callable[..., list[Any]]


def blocks(heading: str) -> list[str]:
    """The snippets of a recipe."""
    (section,) = re.findall(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", PAGE, re.M | re.S)
    return re.findall(r"```python\n(.*?)```", section, re.S)


def started(**replaced: str) -> Names:
    """The names of the page's program; of a replaced text the old one stands on the page."""
    (code,) = blocks(PROGRAM)
    for name, text in replaced.items():
        assert CHANGES[name] in code, f"the program has no {CHANGES[name]!r}"
        code = code.replace(CHANGES[name], text)
    names: Names = {}
    exec(code, names)
    return names


def follow(heading: str, names: Names, block: int = 0) -> str:
    """Execute a recipe among these names; what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(blocks(heading)[block], names)
    return printed.getvalue()


def weights_of(names: Names) -> dict[str, Tensor]:
    """Copies of the dense parameters and of this rank's shards."""
    return {name: each.detach().clone() for name, each in names["model"].named_parameters()}


def of_tables(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each for name, each in weights.items() if "embedding_bags" in name}


def _with_backend(rank: int, world_size: int, name: str, check: Callable[..., Any]) -> Any:
    with use_backend(name), contextlib.redirect_stderr(io.StringIO()):
        return check()


@pytest.fixture(params=[pytest.param(number, marks=pytest.mark.slow) for number in (1, 2)])
def on_page(request: pytest.FixtureRequest, ranks: Callable[..., Ranks]) -> OnPage:
    """Calls a function on so many ranks with each backend; what all of them return."""

    def call(check: Callable[..., Any]) -> list[Any]:
        world = ranks(request.param)
        return [value for name in BACKENDS for value in world.run(_with_backend, name, check)]

    return call


def test_recipes_are_short():
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= MOST_LINES or block == blocks(PROGRAM)[0], block
    assert len(re.sub(r"```.*?```", "", PAGE, flags=re.S).split()) <= MOST_WORDS


def _of_16_bits() -> tuple[list[Any], Tensor, Tensor]:
    wide, names = started(), started()
    follow("Tables of 16 bits", names)
    facts: list[Any] = [each.dtype for each in of_tables(weights_of(names)).values()]
    for states in names["model"].fused_optimizer.state.values():
        facts += [state.dtype for state in states.values()]
    names["model"].load_state_dict(wide["model"].state_dict())
    losses = [
        train(each["model"], each["batches"](), each["optimizer"]).losses for each in (wide, names)
    ]
    return facts, *losses


def test_tables_of_16_bits_train_like_those_of_32(on_page: OnPage):
    for facts, wide, half in on_page(_of_16_bits):
        assert set(facts) == {torch.bfloat16, torch.float32}
        assert 0 < float((half - wide).abs().max()) < 0.01


def _mixed() -> tuple[str, tuple[float, ...]]:
    names = started()
    printed = follow("One optimizer for the tables, another for the rest", names)
    reports: list[Any] = []
    given = names["model"], names["batches"](), names["optimizer"]
    train(*given, steps=1, on_step=reports.append, report_every=1)
    return printed, reports[0].learning_rates


def test_each_parameter_has_the_optimizer_that_is_printed(on_page: OnPage):
    tables: set[str] = set()
    for printed, rates in on_page(_mixed):
        lines = [line.split() for line in printed.splitlines()]
        names = [name for name, _ in lines]
        assert len(set(names)) == len(names)
        assert all((who == "backward") == ("embedding_bags" in name) for name, who in lines)
        assert [who for _, who in lines].count("Adam") == 6
        assert rates == (1.0, 0.1, 0.003)
        tables |= {name.split(".")[-2] for name, who in lines if who == "backward"}
    assert tables == {"t_user", "t_item"}


def _one_batch_of_four(names: Names) -> dict[str, Tensor]:
    """Weights after the same samples in batches four times as large."""
    size = 1_024 // names["world_size"]
    for batch in names["store"].batches(size, names["rank"], names["world_size"]):
        names["optimizer"].zero_grad()
        names["model"](batch.to(device()))[0].backward()
        names["optimizer"].step()
    return weights_of(names)


def _accumulated(kernel: str) -> list[float]:
    """Of each parameter the largest difference, in parts of the largest move."""
    found = []
    for run in (_one_batch_of_four, None):
        names = started(**SGD)
        if kernel == "dense":
            follow("Gradient accumulation", names, block=1)
        before = weights_of(names)
        if run is None:
            follow("Gradient accumulation", names)
        found.append(weights_of(names) if run is None else run(names))
    one, four = found
    return [
        float((four[name] - one[name]).abs().max() / (one[name] - before[name]).abs().max())
        for name in one
    ]


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_four_micro_batches_move_weights_as_one_batch(on_page: OnPage, kernel: str):
    for ratios in on_page(partial(_accumulated, kernel)):
        assert len(ratios) == 8
        assert max(ratios) < 1e-4


def _accumulated_without_a_step_of_the_tables() -> str:
    names = started()
    code = blocks("Gradient accumulation")[0].splitlines()
    assert "fused_optimizer" in code.pop(3)
    try:
        exec("\n".join(code), names)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_accumulation_that_forgets_the_tables_names_them(on_page: OnPage):
    said = on_page(_accumulated_without_a_step_of_the_tables)
    assert all("4 backward passes" in each for each in said)
    assert all(any(table in each for each in said) for table in ("t_user", "t_item"))


def _moved_by_the_same(count: int) -> Tensor:
    """How far the rows of a batch move in ``count`` micro-batches that are equal, [rows]."""
    names = started(tables='"exact_row_wise_adagrad", "learning_rate": 0.00001, "eps": 1e-16')
    before = weights_of(names)
    batch = next(iter(names["batches"]()))
    names["batches"] = lambda: [batch] * count
    follow("Gradient accumulation", names)
    after = of_tables(weights_of(names))
    moves = [(each - before[name]).norm(dim=1) for name, each in after.items()]
    return torch.cat(moves) if moves else torch.zeros(0)


def _adagrad() -> list[list[float]]:
    one, two, four = (_moved_by_the_same(count) for count in (1, 2, 4))
    rows = one > 0
    return [(many[rows] / one[rows]).tolist() for many in (two, four)]


def test_adagrad_moves_rows_further_in_micro_batches(on_page: OnPage):
    found = on_page(_adagrad)
    for two, four in found:
        assert two == pytest.approx([1 + 2**-0.5] * len(two), rel=0.02)
        assert four == pytest.approx([sum(n**-0.5 for n in (1, 2, 3, 4))] * len(four), rel=0.02)
    assert sum(len(two) for two, _ in found) > 100
    assert "2.8 times" in PAGE and "1.7 times" in PAGE


def _clipped() -> tuple[list[float], list[float]]:
    names = started()
    follow("Clipping", names)
    before: list[float] = []
    after: list[float] = []

    def note(report: Any) -> None:
        before.append(float(names["clipped"].last_total_grad_norm))
        after.append(report.gradient_norm)

    given = names["model"], names["batches"](), names["optimizer"]
    train(*given, steps=4, on_step=note, report_every=1)
    return before, after


def test_dense_gradients_are_clipped_by_their_norm_over_ranks(on_page: OnPage):
    found = on_page(_clipped)
    for before, after in found:
        assert before == pytest.approx(found[0][0], rel=1e-3)
        assert max(before) > 0.05
        assert max(after) <= 0.05 * (1 + 1e-5)


def _clipped_tables() -> tuple[float, float, int]:
    """The largest move of a weight with the page's bound and without one, and how often the most
    frequent id occurs in the batch of all ranks.
    """
    moves = []
    for bound in ("0.00001", "1.0"):
        names = started()
        exec(blocks("Clipping")[1].replace("0.00001", bound), names)
        before = of_tables(weights_of(names))
        train(names["model"], names["batches"](), names["optimizer"], steps=1)
        after = of_tables(weights_of(names))
        moves += [max((float((after[k] - before[k]).abs().max()) for k in after), default=0.0)]
    features = next(iter(names["store"].batches(256))).sparse_features
    ids = {"t_user": ["user"], "t_item": ["item", "clicked"]}
    counts = [torch.cat([features[f].values() for f in group]).bincount() for group in ids.values()]
    return moves[0], moves[1], max(int(each.max()) for each in counts)


def test_numbers_of_pooled_gradients_are_clipped_in_backward(on_page: OnPage):
    found = on_page(_clipped_tables)
    for clipped, _, occurs in found:
        assert clipped <= 0.00001 * occurs * (1 + 1e-3)
    assert max(free for _, free, _ in found) > 2 * max(clipped for clipped, _, _ in found)


def _warmed() -> tuple[list[tuple[float, ...]], bool]:
    names = started()
    rates: list[tuple[float, ...]] = []
    weights: list[dict[str, Tensor]] = []

    def note(report: Any) -> None:
        rates.append(report.learning_rates)
        weights.append(weights_of(names))

    names["train"] = partial(train, on_step=note, report_every=1)
    follow("Warm-up", names)
    slow = started(
        tables='"exact_row_wise_adagrad", "learning_rate": 0.01',
        dense="torch.optim.Adam(params, lr=0.0003)",
    )
    train(slow["model"], slow["batches"](), slow["optimizer"], steps=1)
    same = all(torch.allclose(each, weights[0][name]) for name, each in weights_of(slow).items())
    return rates, same


def test_rates_of_tables_and_dense_layers_rise(on_page: OnPage):
    for rates, same in on_page(_warmed):
        # after_step comes before the report: it sets the rate of the next step
        for step, of_step in enumerate(rates, 2):
            part = min(step / 10, 1.0)
            assert of_step == pytest.approx((0.1 * part, 0.003 * part))
        assert same


def _in_bf16() -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype], list[float]]:
    names = started()
    tables: set[torch.dtype] = set()
    last: set[torch.dtype] = set()
    net = names["model"].module.model
    # tracing calls the hooks with proxies
    for part, seen in ((net.sparse_arch, tables), (net.over_arch, last)):
        part.register_forward_hook(
            lambda _, given, out, seen=seen: (
                seen.add(out.dtype) if isinstance(out, Tensor) else None
            )
        )
    follow("bf16 autocast", names)
    weights = {each.dtype for each in names["model"].parameters()}
    losses = [names["done"].losses]

    code = blocks("bf16 autocast")[0]
    assert ", cache_enabled=False" in code
    for each in (
        code.replace(", cache_enabled=False", ""),
        "done = train(model, batches(), optimizer)",
    ):
        names = started()
        exec(each, names)
        losses.append(names["done"].losses)
    gaps = [float((each - losses[2]).abs().max()) for each in losses[:2]]
    return tables, last, weights, gaps


def test_dense_layers_compute_in_bf16_and_tables_in_float32(on_page: OnPage):
    for tables, last, weights, (gap, cached) in on_page(_in_bf16):
        assert tables == weights == {torch.float32}
        assert last == {torch.bfloat16}
        assert 0 < gap < 0.01 < cached


def _compiled(found: str | None, real: bool) -> tuple[int, str, float]:
    """How many parts are compiled, what is printed, and how far losses are from uncompiled ones."""
    plain = started()
    expected = train(plain["model"], plain["batches"](), plain["optimizer"], steps=4)
    names = started()
    done: list[Any] = []
    names["train"] = lambda *given: done.append(train(*given, steps=4))
    compiled: list[nn.Module] = []
    in_place, which = nn.Module.compile, shutil.which

    def fast(part: nn.Module, **options: Any) -> None:
        assert options == {"mode": "default"}
        compiled.append(part)
        in_place(part, **options) if real else in_place(part, backend="aot_eager")

    nn.Module.compile = fast
    shutil.which = lambda *_: found
    try:
        printed = follow("`torch.compile` of the dense part", names)
    finally:
        nn.Module.compile, shutil.which = in_place, which
    if found:
        torch._dynamo.reset()
    return len(compiled), printed, float((done[0].losses - expected.losses).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_compiled_dense_part_has_the_same_losses(on_page: OnPage, real: bool):
    """The default run leaves out the C++ compiler, which takes a minute."""
    if real and not shutil.which("g++"):
        pytest.skip("no C++ compiler is here")
    for parts, printed, gap in on_page(partial(_compiled, "g++", real)):
        assert (parts, printed) == (3, "")
        assert gap < 1e-4


def test_without_a_compiler_nothing_is_compiled_and_rank_0_says_so(on_page: OnPage):
    found = on_page(partial(_compiled, None, False))
    assert {(parts, gap) for parts, _, gap in found} == {(0, 0.0)}
    assert "no C++ compiler" in found[0][1]


def _sharing_one_gpu() -> tuple[bool, list[float], list[float]]:
    names = started()
    names["train"] = partial(train, steps=6)
    follow("Several ranks on one GPU", names)
    own = started()
    done = train(own["model"], own["batches"](), own["optimizer"], steps=6)
    there = all(each.device == names["shared"] for each in names["model"].parameters())
    there &= names["shared"].type == ("cuda" if torch.cuda.is_available() else "cpu")
    return there, names["done"].losses.tolist(), done.losses.tolist()


def test_ranks_that_share_a_gpu_have_the_same_losses(on_page: OnPage):
    for there, shared, own in on_page(_sharing_one_gpu):
        assert there
        assert shared == pytest.approx(own, abs=1e-4)


def _killed_while_it_logs(rank: int, folder: str) -> None:
    os.chdir(folder)
    names = started()

    def kill(step: int) -> None:
        if step == 13 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    names["train"] = partial(train, after_step=kill)
    follow("A log that survives a kill", names)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_run_leaves_every_report_in_the_file(tmp_path: Path, world_size: int):
    with Ranks(world_size) as world, pytest.raises(RankError):
        world.run(_killed_while_it_logs, str(tmp_path))
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    reports = [json.loads(line) for line in lines]
    assert [report["step"] for report in reports] == [5, 10]
    assert all(math.isfinite(report["loss"]) for report in reports)


def _recorded(heading: str, block: int, module: str) -> tuple[list[Any], list[Any]]:
    """The calls of a stand-in for a package, and what should have been logged."""
    calls: list[Any] = []

    class Recorder:
        def __init__(self, *given: Any) -> None:
            calls.append(given)

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **named: calls.append((name, *given, *named.values()))

    names = started()
    reports: list[Any] = []

    def both(write: Callable[[Any], None], report: Any) -> None:
        reports.append((report.step, report.loss))
        write(report)

    names["train"] = lambda *given, on_step: train(
        *given, on_step=partial(both, on_step), steps=4, report_every=2
    )
    stand_in: Any = Recorder()
    calls.clear()
    if module.endswith("tensorboard"):
        stand_in = SimpleNamespace(SummaryWriter=Recorder)
    there = sys.modules.get(module)
    sys.modules[module] = stand_in
    try:
        follow(heading, names, block)
    finally:
        sys.modules.pop(module)
        if there is not None:
            sys.modules[module] = there
    return calls, reports


@pytest.mark.parametrize(
    ("heading", "block", "module", "first", "each"),
    [
        (
            "TensorBoard",
            0,
            "torch.utils.tensorboard",
            ("runs/first",),
            lambda step, loss: [("add_scalar", "loss", loss, step), ("flush",)],
        ),
        (
            "W&B and MLflow",
            0,
            "wandb",
            ("init", "clicks"),
            lambda step, loss: [("log", {"loss": loss}, step)],
        ),
        (
            "W&B and MLflow",
            1,
            "mlflow",
            None,
            lambda step, loss: [("log_metric", "loss", loss, step)],
        ),
    ],
    ids=["tensorboard", "wandb", "mlflow"],
)
def test_rank_0_logs_each_report(
    on_page: OnPage,
    heading: str,
    block: int,
    module: str,
    first: Any,
    each: Callable[[int, float], list[Any]],
):
    found = on_page(partial(_recorded, heading, block, module))
    reports = found[0][1]
    assert [step for step, _ in reports] == [2, 4]
    expected = [] if first is None else [first]
    for step, loss in reports:
        expected += each(step, loss)
    silent = [calls for calls, _ in found if not calls]
    loud = [calls for calls, _ in found if calls]
    assert loud[0] == expected
    assert len(silent) == len(found) - len(loud) and len(loud) == len(BACKENDS)


def _judged() -> tuple[bool, str]:
    names = started()
    printed = follow("Evaluation in the middle", names)
    plain = started()
    train(plain["model"], plain["batches"](), plain["optimizer"])
    expected = weights_of(plain)
    return all(
        torch.equal(each, expected[name]) for name, each in weights_of(names).items()
    ), printed


def test_evaluation_changes_no_weight(on_page: OnPage):
    found = on_page(_judged)
    assert all(same for same, _ in found)
    printed = [text for _, text in found if text]
    assert len(printed) == len(BACKENDS)
    for text in printed:
        assert re.findall(r"^(\d+) AUC 0\.\d+", text, re.M) == ["10", "20"]


def _stopped(aucs: list[float] | None) -> tuple[list[float], int]:
    names = started()
    if aucs is not None:
        values = iter(aucs)
        names["evaluate"] = lambda *_: SimpleNamespace(auc=next(values))
    names["train"] = partial(train, steps=10)
    follow("Early stopping", names)
    return names["seen"], names["done"].steps


def test_a_run_stops_on_all_ranks_when_the_auc_rises_no_more(on_page: OnPage):
    rising = [0.5, 0.6, 0.61, 0.6, 0.62]
    for seen, steps in on_page(partial(_stopped, [*rising, 0.6, 0.61, 0.62, 0.7])):
        assert seen == [*rising, 0.6, 0.61, 0.62]
        assert steps == len(seen)


def test_ranks_see_the_same_auc(on_page: OnPage):
    found = on_page(partial(_stopped, None))
    half = len(found) // len(BACKENDS)
    assert all(each == found[0] for each in found[:half])
    assert all(len(seen) == steps for seen, steps in found)


def _poisoned() -> str:
    names = started()
    with torch.no_grad():
        for name, weights in names["model"].named_parameters():
            if "t_item" in name:
                weights.fill_(float("nan"))
    try:
        follow("A NaN", names)
    except FloatingPointError as error:
        return str(error)
    return "nothing was raised"


def test_a_table_with_nan_is_named_on_every_rank(on_page: OnPage):
    for said in on_page(_poisoned):
        assert said.startswith("the loss of step 1 is nan")
        assert "'t_item'" in said


def _source_of_a_nan() -> str:
    names = started()
    with torch.no_grad():
        for name, weights in names["model"].named_parameters():
            if "t_item" in name and len(weights):
                weights[0] = float("nan")
    return follow("A NaN", names, block=1)


def test_before_the_first_step_only_the_source_holds_nan(on_page: OnPage):
    found = on_page(_source_of_a_nan)
    lines = [line for printed in found for line in printed.splitlines()]
    assert lines
    assert all("t_item" in line for line in lines)


def _exploding() -> int:
    names = started()
    steps = 0

    def explode(gradient: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return gradient * float("inf") if steps == 3 else gradient

    names["model"].module.model.over_arch.model[1].weight.register_hook(explode)
    done: list[Any] = []
    names["train"] = lambda *given, **named: done.append(train(*given, **named))
    follow("A NaN", names)
    return done[0].steps


def test_a_gradient_that_is_not_finite_ends_the_run(on_page: OnPage):
    assert set(on_page(_exploding)) == {3}


def _averaged() -> tuple[list[bool], str]:
    plain = started()
    path = [weights_of(plain)]
    train(
        plain["model"],
        plain["batches"](),
        plain["optimizer"],
        steps=8,
        after_step=lambda _: path.append(weights_of(plain)),
    )
    names = started()
    names["train"] = partial(train, steps=8)
    follow("EMA", names)
    steps = len(path) - 1
    facts = []
    for name, found in names["ema"].items():
        parts = [0.01 * 0.99 ** (steps - n) * path[n][name].double() for n in range(1, steps + 1)]
        expected = 0.99**steps * path[0][name].double() + sum(parts)
        facts.append(torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-7))
    trained = weights_of(names)
    before = evaluate(names["model"], names["batches"]("test"))
    follow("EMA", names, block=1)
    facts.append(names["metrics"] != before)
    facts += [torch.equal(each, trained[name]) for name, each in weights_of(names).items()]
    return facts, refusal_of_a_copy(names["model"])


def refusal_of_a_copy(model: nn.Module) -> str:
    try:
        torch.optim.swa_utils.AveragedModel(model)
    except TypeError as error:
        return str(error)
    return "it was copied"


def test_the_average_is_that_of_the_formula_and_swaps_without_a_trace(on_page: OnPage):
    for facts, refusal in on_page(_averaged):
        assert len(facts) == 17 and all(facts)
        assert "neither copied nor pickled" in refusal
