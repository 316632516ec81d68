"""`bench planner` on its smallest models, beside a peer that is tutorec under another name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import planner
from benchmarks.harness import Report
from benchmarks.peer import Library
from benchmarks.planner_peer import Draw, Model, draw_tables
from benchmarks.runner import Options
from tutorec.distributed.planner.problem import broken_rules, cost
from tutorec.distributed.planner.search import search

_TWIN = {
    f"{path}.py": f"from tutorec.{path.replace('/', '.')} import *\n{more}\n"
    for path, more in {
        "modules/embedding_configs": "",
        "modules/embedding_modules": "",
        "distributed/embeddingbag": "",
        "distributed/planner/types": "",
        "distributed/planner/planners": "",
        "distributed/planner/enumerators": "",
        "distributed/planner/storage_reservations": "",
    }.items()
}


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package beside tutorec that has its names."""
    for path, text in _TWIN.items():
        file = tmp_path / "twin" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "twin"]:
        monkeypatch.delitem(sys.modules, name)
    return "twin"


def _run(peer: str | None, cases: tuple[str, ...]) -> Report:
    return planner.run(Options(rounds=1, vs=peer, cases=cases, sizes=("10x8",)))


def test_a_run_beside_a_peer_compares_plans_and_times(twin: str) -> None:
    report = _run(twin, ("seeds",))
    titles = [comparison.title for comparison in report.comparisons]
    assert [title for title in titles if "its estimates" in title and "/ twin" in title]
    assert [title for title in titles if "simulated" in title]
    judged = [comparison for comparison in report.comparisons if comparison.bar is not None]
    assert judged and all(comparison.verdict in ("met", "missed") for comparison in judged)
    assert not report.notes


def test_growth_gives_seconds_and_the_distance_from_the_bound() -> None:
    report = _run(None, ("growth",))
    assert list(report.samples) == ["growth, 10 tables x 8 ranks"]
    [comparison] = report.comparisons
    assert 1.0 <= comparison.ratio.median <= 1.5
    assert str(report)


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--sizes 3x5: there are 10x2, 10x8"):
        planner.run(Options(rounds=1, sizes=("3x5",)))


def test_the_seeds_are_twelve_models_of_10_to_100_tables_on_2_to_128_ranks() -> None:
    assert len(planner.DRAWS) == len({draw.seed for draw in planner.DRAWS}) == 12
    assert {10, 100} <= {draw.tables for draw in planner.DRAWS}
    assert {2, 128} <= {draw.world_size for draw in planner.DRAWS}
    assert draw_tables(planner.DRAWS[3]) == draw_tables(planner.DRAWS[3])


def test_a_model_as_numbers_is_planned_to_fit() -> None:
    problem = Model(Library("tutorec"), Draw(5, 12, 4, 2, 0.6)).problem()
    placement = search(problem)
    assert placement is not None
    assert broken_rules(problem, placement) == []
    assert cost(problem, placement) > 0
