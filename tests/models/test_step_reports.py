"""What `train` reports while it runs: the same on every rank, and in time."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_training import STORE, TABLES, _model, _parallel

from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from tutorec.models.step_reports import StepReport
from tutorec.models.training import combined_optimizer, train
from tutorec.spmd import Ranks


def _reported(
    rank: int, world_size: int, together: int, every: int
) -> tuple[list[StepReport], list[float], int]:
    model, optimizer = _parallel(world_size)
    reports: list[StepReport] = []
    batches = STORE.batches(together // world_size, rank, world_size)
    done = train(
        model,
        batches,
        optimizer,
        first_step=10,
        progress=False,
        on_step=reports.append,
        report_every=every,
    )
    return [replace(r, samples_per_second=0.0) for r in reports], done.losses.tolist(), done.samples


def test_ranks_report_the_same_and_what_is_returned(ranks: Callable[..., Ranks]) -> None:
    [(alone, _, _)] = ranks(1).run(_reported, 40, 4)
    (reports, losses, samples), other = ranks(2).run(_reported, 40, 4)
    assert other == (reports, losses, samples)
    # 15 steps: three reports of 4, and one of the last 3
    assert [report.step for report in reports] == [14, 18, 22, 25]
    for index, report in enumerate(reports):
        own = losses[4 * index : 4 * index + 4]
        assert report.loss == pytest.approx(sum(own) / len(own))
        assert report.samples == 40 * len(own)
        assert report.learning_rates == (0.1, 0.01)
        assert report.loss == pytest.approx(alone[index].loss, abs=1e-5)
        assert report.gradient_norm == pytest.approx(alone[index].gradient_norm, rel=1e-3)


def _with_dense_tables(rank: int, world_size: int) -> tuple[float, float]:
    """A report's gradient norm, and that of whole gradients in plain torch."""
    plain = _model()
    sharded = _model()
    collection = sharded.model.sparse_arch.embedding_bag_collection
    cuts = {name: row_wise(compute_kernel="dense") for name in ("t_user", "t_item")}
    plan = construct_module_sharding_plan(collection, cuts, world_size=world_size)
    model = DistributedModelParallel(sharded, plan=ShardingPlan({TABLES: plan}))
    optimizer = combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    found: list[StepReport] = []
    batches = STORE.batches(40 // world_size, rank, world_size)
    train(model, batches, optimizer, steps=1, progress=False, on_step=found.append, report_every=1)
    (whole,) = [*STORE.batches(40)][:1]
    plain(whole)[0].backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    assert found[0].gradient_norm is not None
    return found[0].gradient_norm, float(norm)


def test_the_norm_counts_shards_of_all_ranks_and_replicas_once(
    ranks: Callable[..., Ranks],
) -> None:
    for reported, whole in ranks(2).run(_with_dense_tables):
        assert reported == pytest.approx(whole, rel=1e-4)


def test_where_backward_updates_everything_there_is_no_norm() -> None:
    class Tables(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, batch: Any) -> Any:
            loss = (self.weight * batch.dense_features).mean()
            return loss, (loss.detach(), batch.labels, batch.labels)

    model = Tables()
    found: list[StepReport] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    train(model, STORE.batches(50), optimizer, steps=1, on_step=found.append, report_every=1)
    assert found[0].gradient_norm is None


def test_the_norm_of_sparse_gradients_counts_a_row_once() -> None:
    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Embedding(3, 1, sparse=True)

        def forward(self, batch: Any) -> Any:
            loss = self.rows(torch.tensor([1, 1, 2])).sum()
            return loss, (loss.detach(), batch.labels, batch.labels)

    model = Table()
    found: list[StepReport] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, STORE.batches(50), optimizer, steps=1, progress=False, on_step=found.append)
    assert found[0].gradient_norm == pytest.approx(5**0.5)  # row 1 has 2, row 2 has 1


def _stopped(rank: int, world_size: int) -> tuple[int, float]:
    model, optimizer = _parallel(world_size)
    batches = STORE.batches(20, rank, world_size)
    done = train(
        model,
        batches,
        optimizer,
        progress=False,
        on_step=lambda report: rank == 1 and report.step >= 6,
        report_every=2,
    )
    again = train(model, STORE.batches(20, rank, world_size), optimizer, steps=2, progress=False)
    return done.steps, float(again.losses[1])


def test_a_run_ends_on_all_ranks_where_one_says_so(ranks: Callable[..., Ranks]) -> None:
    first, second = ranks(2).run(_stopped)
    assert first == second
    assert first[0] == 6


def _broken(rank: int, world_size: int) -> str:
    model, optimizer = _parallel(world_size)
    batches = STORE.batches(20, rank, world_size)
    for name, parameter in model.named_parameters():
        if "t_item" in name and rank == world_size - 1:
            with torch.no_grad():
                parameter[3].fill_(float("inf"))
    called: list[int] = []
    try:
        train(
            model,
            batches,
            optimizer,
            steps=6,
            progress=False,
            on_step=lambda report: called.append(report.step),
            report_every=2,
        )
    except FloatingPointError as error:
        return f"{called}: {error}"
    return "nothing was raised"


def test_a_table_that_is_not_finite_is_named_at_the_next_report(
    ranks: Callable[..., Ranks],
) -> None:
    first, second = ranks(2).run(_broken)
    assert first == second
    assert re.match(r"\[\]: the loss of step \d is nan.*: lower the learning rate", first)
    assert "'t_item'" in first


@pytest.mark.parametrize("every", [0, 1.5])
def test_reports_are_of_whole_steps(every: Any) -> None:
    model = _model()
    optimizer = combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match=r"report_every=.* at least 1"):
        train(model, [], optimizer, on_step=lambda report: None, report_every=every)


LOGGED = """
import csv, os, signal, torch
from models.test_training import STORE, _model
from tutorec.models.training import combined_optimizer, train

model = _model()
with open("log.csv", "w", newline="") as file:
    log = csv.writer(file)

    def write(report):
        log.writerow([report.step, report.loss])
        file.flush()
        if report.step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer = combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    train(model, STORE.batches(50), optimizer, on_step=write, report_every=2, progress=False)
"""


def test_what_was_logged_before_a_kill_is_in_the_file(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    script = f"import sys; sys.path.insert(0, {tests!r})\n{LOGGED}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)
    assert done.returncode == -signal.SIGKILL
    steps = [line.split(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert steps == ["2", "4", "6"]
