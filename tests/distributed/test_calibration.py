"""What is trained to measure a machine, the numbers that follow, and which planners use them."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import tutorec._calibration as kept_calibration
from tutorec import EmbeddingBagCollection, EmbeddingBagConfig, cli
from tutorec._calibration import Calibration, fingerprint
from tutorec.distributed import calibration
from tutorec.distributed.calibration import CASES, case_plan, loads, solve
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.geometry import exact_cover
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner import EmbeddingShardingPlanner, Topology
from tutorec.distributed.planner import topology as machines
from tutorec.distributed.planner.cost import exchanges
from tutorec.errors import PlannerError
from tutorec.spmd import Ranks

SPEEDS = {
    "ddr_mem_bw": 4e6,
    "bwd_compute_multiplier": 0.5,
    "row_ms": 3e-5,
    "intra_host_bw": 9e5,
    "latency_ms": 0.25,
}


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    monkeypatch.setenv("TUTOREC_CALIBRATION", str(path))
    return path


def kept(**changed: str) -> None:
    Calibration("2026-11-22", {**fingerprint(), **changed}, {"cpu": SPEEDS}).keep()


def collection() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(num_embeddings=64, embedding_dim=8, name="item", feature_names=["item"])
    ]
    return EmbeddingBagCollection(tables)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_has_the_same_to_do_in_every_case(world_size: int) -> None:
    topology = Topology(world_size, "cpu")
    for number in range(len(CASES)):
        tables, plan, samples = case_plan(number, world_size)
        of_ranks = loads(tables, plan, samples, topology)
        np.testing.assert_allclose(
            of_ranks, np.broadcast_to(of_ranks[0], of_ranks.shape), rtol=1e-9
        )
        for table in tables:
            pieces = plan[table.name].shards(table, world_size)
            assert exact_cover(
                pieces[:: world_size if plan[table.name].sharding == "data_parallel" else 1],
                table.rows,
                table.columns,
            )


def test_a_calibration_is_a_counted_amount_of_work() -> None:
    """What bounds its time: so many steps, ids and bytes of tables, whatever a clock says."""
    tables = [(table, samples) for n in range(len(CASES)) for plan in [case_plan(n, 2)] for table in plan[0]  # noqa: E501
              for samples in [plan[2]]]  # fmt: skip
    assert len(CASES) * (calibration.WARMUP + calibration.ROUNDS) <= 200
    assert sum(4 * table.rows * table.columns for table, _ in tables) <= 200e6
    assert sum(samples * table.pooling for table, samples in tables) <= 250_000


@pytest.mark.parametrize("world_size", [1, 2])
def test_times_that_the_estimate_gives_lead_back_to_its_numbers(world_size: int) -> None:
    topology = Topology(world_size, "cpu", **SPEEDS)
    times = np.zeros((len(CASES), world_size, 2))
    for number in range(len(CASES)):
        tables, plan, samples = case_plan(number, world_size)
        perf = loads(tables, plan, samples, topology)
        times[number] = np.stack(
            [perf[:, [0, 1, 4]].sum(axis=1), perf[:, [2, 3]].sum(axis=1)], axis=1
        )
        for kind in {cut.sharding for cut in plan.values()}:
            rounds = exchanges(topology, ShardingType(kind), pooled=True)
            back = rounds if kind == "data_parallel" else min(rounds, 1)
            times[number] += np.array([rounds - back, back]) * topology.latency_ms
    solved = solve(times, "cpu")
    expected = SPEEDS if world_size > 1 else {name: SPEEDS[name] for name in list(SPEEDS)[:3]}
    assert solved == pytest.approx(expected, rel=1e-6)


def _measure_first_case(rank: int, world_size: int) -> tuple[np.ndarray, float]:
    calibration.CASES, calibration.ROUNDS = CASES[:1], 2
    return calibration._measure("cpu", rank, world_size)


def test_ranks_measure_both_phases_of_a_case() -> None:
    with Ranks(2, backend="gloo", timeout=120) as ranks:
        for seconds, copied in ranks.run(_measure_first_case):
            assert seconds.shape == (1, 2)
            assert (seconds > 0).all()
            assert copied == 0


def test_a_calibration_is_solved_from_what_ranks_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = np.full((len(CASES), 2), 0.002)
    pool = type("Pool", (), {"run": lambda *_: [(seconds, 0.0)] * 2})
    monkeypatch.setattr(calibration, "Ranks", lambda *_, **__: nullcontext(pool()))
    measured = calibration.calibrate(["cpu"])
    assert measured.changes() == ""
    assert set(measured.speeds["cpu"]) == set(SPEEDS)
    assert all(np.isfinite(number) and number >= 0 for number in measured.speeds["cpu"].values())


def test_the_command_keeps_and_tells_what_it_measured(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Calibration("2026-11-22", fingerprint(), {"cpu": SPEEDS})
    monkeypatch.setattr(calibration, "calibrate", lambda: measured)
    assert cli.main(["calibrate"]) == 0
    assert capsys.readouterr().out == (
        "cpu: rows of a lookup 3.73 GiB/s; an update 0.50 times that and 30 ns a row; sent 0.84 "
        f"GiB/s, 0.250 ms an exchange\nkept in {file}; the default planner of "
        "DistributedModelParallel uses it on this machine\n"
    )
    assert kept_calibration.kept().calibration == measured


def _planned(rank: int, world_size: int) -> list[str]:
    """Whose speeds stand in the report of the wrapped model, of a planner's collective plan, and of
    its own plan.
    """
    model = DistributedModelParallel(collection())
    made = EmbeddingShardingPlanner().collective_plan(collection())
    alone = EmbeddingShardingPlanner().plan(collection())
    given = EmbeddingShardingPlanner(Topology(world_size, "cpu")).collective_plan(collection())
    plans = [model.plan, made, alone, given]
    return [
        line
        for plan in plans
        for line in str(plan.explain()).splitlines()
        if line.strip().startswith("speeds")
    ]


@pytest.mark.parametrize("calibrated", [False, True])
def test_default_planners_use_measured_speeds_and_tell_so(file: Path, calibrated: bool) -> None:
    if calibrated:
        kept()
    with Ranks(2, backend="gloo", timeout=120) as ranks:
        first, second = ranks.run(_planned)
    assert first == second
    whose = [line.split(maxsplit=1)[1] for line in first]
    usual = (
        "measured on this machine on 2026-11-22."
        if calibrated
        else "preset laptop; not calibrated; run `tutorec calibrate`."
    )
    assert whose == [usual, usual, "preset laptop.", "preset laptop."]
    assert calibrated or not file.exists()  # nothing is measured unasked


def test_measured_speeds_are_those_of_the_topology(file: Path) -> None:
    kept()
    topology = machines.this_machine(2, "cpu", 2)
    assert (topology.ddr_mem_bw, topology.row_ms, topology.latency_ms) == (4e6, 3e-5, 0.25)
    assert topology.intra_host_bw == 9e5
    assert Topology.measured(4, ddr_cap=7).devices[3].storage.ddr == 7
    assert Topology.measured(4).source == "measured on this machine on 2026-11-22"
    assert machines.this_machine(4, "cpu", 2).source == "preset laptop"  # two hosts
    assert machines.this_machine(2, "cuda", 2).source.startswith("TorchRec's planner.constants; ")


def test_speeds_that_no_longer_fit_are_a_warning_once(file: Path) -> None:
    kept(torch="0.1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            assert "which no longer fits (torch 0.1" in machines.this_machine(2, "cpu", 2).source
    [warning] = caught
    assert re.search(
        r"preset's speeds: calibrated on 2026-11-22, .*\(torch 0\.1 -> ", str(warning.message)
    )


def test_a_measured_topology_measures_where_nothing_is_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_calibration, "measure_in_own_process", kept)
    assert Topology.measured().row_ms == 3e-5


def test_a_measured_topology_of_what_was_not_measured_is_refused(file: Path) -> None:
    kept()
    with pytest.raises(
        PlannerError,
        match=r"no measurement of cuda.*`tutorec calibrate`",
    ):
        Topology.measured(2, "cuda")


def _measured_topology(rank: int, world_size: int) -> str:
    try:
        return Topology.measured().source
    except PlannerError as error:
        return str(error)


def test_ranks_never_measure(file: Path) -> None:
    with Ranks(2, backend="gloo", timeout=120) as ranks:
        messages = ranks.run(_measured_topology)
    assert all("outside ranks" in message for message in messages)
    assert not file.exists()
