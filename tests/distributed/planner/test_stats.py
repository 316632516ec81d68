"""Statistics go to a log that is silent unless somebody listens."""

from __future__ import annotations

import logging

from distributed.planner.planned_cases import SHOP, inputs_of, planned, report_of

from tutorec._text import ms_text
from tutorec.distributed.planner.problem import place_options, rank_time
from tutorec.distributed.planner.stats import EmbeddingStats, NoopEmbeddingStats
from tutorec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from tutorec.distributed.planner.topology import Topology

LOGGER = "tutorec.distributed"


def log(stats, debug=True):
    plan = planned(inputs_of(SHOP, Topology.hosts(2, 2, "cuda")))
    report = report_of(plan)
    stats.log(
        sharding_plan=plan,
        topology=report.inputs.topology,
        batch_size=512,
        storage_reservation=FixedPercentageStorageReservation(0.1),
        num_proposals=3,
        num_plans=2,
        run_time=0.5,
        best_plan=place_options(report.problem, report.placement),
        debug=debug,
    )
    return report


def test_statistics_print_nothing_unasked(capfd, caplog):
    log(EmbeddingStats())
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_statistics_tell_of_ranks_and_tables(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        report = log(EmbeddingStats())
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "5 tables on 4 ranks, batch size 512, 0.50 s, 3 proposals, 2 of them placed" in text
    assert "FixedPercentageStorageReservation(percentage=0.1)" in text
    for rank, ms in enumerate(rank_time(report.problem, report.placement).tolist()):
        row = next(line for line in text.splitlines() if line.split()[:1] == [str(rank)])
        assert ms_text(ms) in row
    assert all(any(line.startswith(name) for line in text.splitlines()) for name in SHOP)


def test_short_statistics_leave_tables_out(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        log(EmbeddingStats(), debug=False)
    assert not any("otherwise" in record.getMessage() for record in caplog.records)


def test_no_statistics_are_none(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        log(NoopEmbeddingStats())
    assert not caplog.records
