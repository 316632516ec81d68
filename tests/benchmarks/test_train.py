"""`bench train` on a small model, beside a peer that is tutorec under another name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import train
from benchmarks.harness import Bar, Report, Sample
from benchmarks.peer import Sizes
from benchmarks.runner import Options
from benchmarks.sharded_rank import Found
from benchmarks.train_rank import Shape, TrainCase

_TWIN = (
    "sparse.jagged_tensor modules.embedding_configs modules.embedding_modules "
    "optim.rowwise_adagrad optim.keyed optim.apply_optimizer_in_backward optim.optimizers "
    "distributed.types distributed.embeddingbag distributed.model_parallel models.dlrm"
).split()


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package ``twin`` beside tutorec that has its names."""
    for module in _TWIN:
        file = tmp_path / "twin" / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from tutorec.{module} import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "twin"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "twin"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = Sizes(tables=3, rows=20, columns=4, pooling=1)
    monkeypatch.setattr(train, "SHAPE", Shape(tables, 8, 3, (5,), (6, 1), steps=2))


def test_every_case_runs_on_two_ranks_and_the_two_that_decide_have_bars_on_both_clocks(
    twin: Path,
) -> None:
    report = train.run(Options(rounds=2, vs=twin.name))
    judged = {"dlrm": Bar("at least", 1.05), "dlrm-one-interaction": Bar("at least", 1.05)}
    expected = {
        (f"{name}: twin / tutorec", clock): judged.get(name)
        for name in train.CASES
        for clock in ("cpu", "wall")
    }
    assert {(c.title, c.clock): c.bar for c in report.comparisons} == expected
    assert {len(samples) for samples in report.samples.values()} == {2}
    assert len(report.notes) == 2 * len(train.CASES)


def test_a_peer_that_trains_otherwise_is_refused_before_anything_is_timed(twin: Path) -> None:
    text = (
        "from tutorec.models.dlrm import *\nfrom torch import nn\n\n\nclass DLRMTrain(DLRMTrain):\n"
    )
    text += "    def forward(self, batch):\n        loss, parts = super().forward(batch)\n"
    text += "        return 1.1 * loss, parts\n"
    (twin / "models/dlrm.py").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"dlrm: tutorec and twin differ by up to .* on rank [01]; nothing was timed",
    ):
        train.run(Options(rounds=1, vs=twin.name, cases=("dlrm",)))


def test_examples_per_second_are_those_of_all_ranks_by_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "SHAPE", Shape(samples=500))
    report = Report("train", {}, {}, [], {})
    found = [
        Found(0.0, {"x: tutorec": [Sample(cpu, wall)]}) for cpu, wall in ((0.5, 1.0), (0.25, 4.0))
    ]
    train._take(report, TrainCase("x"), found, ["tutorec"], world=2)
    assert report.samples == {"x: tutorec": [Sample(0.5, 4.0)]}
    assert report.notes == ["x: tutorec: 2,000 examples per CPU second, 250 per second (medians)"]


def test_an_unknown_world_is_refused() -> None:
    with pytest.raises(ValueError, match="--world 3: there are 1, 2, 4"):
        train.run(Options(rounds=1, world=3))
