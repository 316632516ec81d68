"""`bench sharded` on small tables, beside a peer that is tutorec under another name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import sharded
from benchmarks.harness import Bar, Report, Sample
from benchmarks.peer import Sizes
from benchmarks.runner import Options, main
from benchmarks.sharded_rank import Case, Found
from tutorec.distributed import comm
from tutorec.distributed.traffic import Traffic

_TWIN = {
    "sparse/jagged_tensor.py": "from tutorec.sparse.jagged_tensor import *",
    "modules/embedding_configs.py": "from tutorec.modules.embedding_configs import *",
    "modules/embedding_modules.py": "from tutorec.modules.embedding_modules import *",
    "optim/rowwise_adagrad.py": "from tutorec.optim.rowwise_adagrad import *",
    "optim/apply_optimizer_in_backward.py": (
        "from tutorec.optim.apply_optimizer_in_backward import *"
    ),
    "distributed/types.py": "from tutorec.distributed.types import *",
    "distributed/dist_data.py": "from tutorec.distributed.dist_data import *",
    "distributed/embeddingbag.py": "from tutorec.distributed.embeddingbag import *",
    "distributed/sharding_plan.py": "from tutorec.distributed.sharding_plan import *",
}


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package beside tutorec that has its names."""
    for path, text in _TWIN.items():
        file = tmp_path / "twin" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "twin"]:
        monkeypatch.delitem(sys.modules, name)
    return "twin"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "SIZES_OF_TABLES", Sizes(tables=3, rows=20, columns=4, pooling=2))
    monkeypatch.setattr(
        sharded, "MEMORY_SIZES", Sizes(tables=2, rows=100_000, columns=16, pooling=2)
    )
    few = {
        name: Case(**{**vars(case), "samples": min(case.samples, 8)})
        for name, case in sharded._ALL.items()
    }
    monkeypatch.setattr(sharded, "_ALL", few)


def _bars(report: Report) -> dict[str, Bar | None]:
    return {c.title: c.bar for c in report.comparisons if c.clock == "cpu"}


def test_two_ranks_are_compared_with_the_checks_on(twin: str) -> None:
    cases = ("exchange", "forward-table_wise", "step-table_wise", "step-table_wise-sgd")
    report = sharded.run(Options(rounds=2, vs=twin, cases=cases, world=2))
    assert _bars(report) == {
        "exchange: twin / tutorec": Bar("at least", 1.3),
        "forward-table_wise: twin / tutorec": Bar("at least", 1.4),
        "step-table_wise-sgd: twin / tutorec": None,
        "step-table_wise: twin / tutorec": Bar("at least", 1.05),
    }
    assert [c.bar for c in report.comparisons if c.clock == "wall"] == [None] * 4
    assert {len(samples) for samples in report.samples.values()} == {2}
    # 2 of 3 features to rank 1, 3 integers per peer
    assert any(note.startswith("exchange: rank 0 sends input ids 1 x, ") for note in report.notes)
    assert any("input sizes 1 x, 24 bytes" in note for note in report.notes)


def test_one_rank_is_compared_with_the_checks_on_and_off(twin: str) -> None:
    report = sharded.run(
        Options(rounds=1, vs=twin, cases=("exchange", "step-1", "step-row_wise"), world=1)
    )
    bars = _bars(report)
    assert bars["step-1: twin / tutorec"] == Bar("at least", 1.6)
    assert bars["step-1: twin / tutorec checked"] is None
    assert bars.get("step-row_wise: twin / tutorec") is None
    assert not any(title.startswith("exchange") for title in bars)


def test_a_peer_is_not_needed_and_two_ranks_are_the_default() -> None:
    report = sharded.run(Options(rounds=1, cases=("step-table_wise", "step-1")))
    assert report.settings["world"] == 2
    assert list(report.samples) == ["step-table_wise: tutorec"]
    assert not report.comparisons


def test_a_peer_with_other_results_is_refused_and_the_rank_is_named(
    twin: str, tmp_path: Path
) -> None:
    text = "from tutorec.modules.embedding_configs import *\nimport functools\n"
    text += "EmbeddingBagConfig = functools.partial(EmbeddingBagConfig, pooling=PoolingType.MEAN)\n"
    (tmp_path / "twin/modules/embedding_configs.py").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"step-table_wise: tutorec and twin differ by up to .* on rank [01]; nothing",
    ):
        sharded.run(Options(rounds=1, vs=twin, cases=("step-table_wise",)))


def test_the_slowest_rank_counts_and_a_third_round_of_input_is_refused() -> None:
    report = Report("sharded", {}, {}, [], {})
    slow, fast = [Sample(3.0, 1.0), Sample(1.0, 4.0)], [Sample(2.0, 2.0), Sample(2.0, 2.0)]
    traffic = Traffic()
    for stage in ("input sizes", "input ids"):
        traffic.record(comm.Issue(stage, 0, ((1, 8),)))
    found = [Found(0.0, {"x: tutorec": slow}, traffic), Found(0.0, {"x: tutorec": fast}, traffic)]
    sharded.take_slowest(report, Case("x", "step"), found, ["tutorec"])
    assert report.samples == {"x: tutorec": [Sample(3.0, 2.0), Sample(2.0, 4.0)]}
    traffic.record(comm.Issue("input lengths", 0, ((1, 8),)))
    with pytest.raises(ValueError, match="x: 3 rounds of input, 2 are due"):
        sharded.take_slowest(report, Case("x", "step"), found, ["tutorec"])


def test_every_type_with_a_floor_has_its_bar_where_it_cuts_something() -> None:
    floors = {"table_wise": 1.05, "row_wise": 1.15, "column_wise": 1.4, "data_parallel": 3.0}
    for case in sharded._ALL.values():
        if case.kind == "step" and case.samples > 1:
            bar = sharded._bar(case, world=2)
            judged = case.optimizer == "rowwise_adagrad" or case.sharding == "data_parallel"
            assert bar == (floors.get(case.sharding) if judged else None)
    assert sharded._bar(Case("x", "step", "row_wise"), world=1) is None


def test_memory_is_that_of_the_rank_with_the_most_for_its_weights() -> None:
    report = sharded.run(Options(rounds=1, cases=("memory",), world=2))
    [found] = report.comparisons or [None]
    if found is None:
        assert report.notes == ["memory is measured on Linux only"]
        return
    assert found.clock == "memory"
    assert found.bar == Bar("at most", 1.10, rounds=3)
    assert found.medians is not None and found.medians[1] == 100_000 * 16 * 4
    assert 1.0 < found.ratio.median < 3.0


def test_an_unknown_world_is_refused_and_other_benchmarks_take_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="--world 3: there are 1, 2, 4"):
        sharded.run(Options(rounds=1, world=3))
    with pytest.raises(SystemExit):
        main(["validation", "--world", "2"])
    assert "bench validation runs in one process and takes no --world" in capsys.readouterr().err
