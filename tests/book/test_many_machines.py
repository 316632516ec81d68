"""The page on many machines: its tables come from the planner, and its sentences say what the
tables say.
"""

from __future__ import annotations

import sys

import pytest
from policy.tree import ROOT

sys.path.insert(0, str(ROOT / "book/_ext"))
import machines

from tutorec.distributed.plan.plan import ShardingType

PAGE = " ".join((ROOT / "book/many_machines.md").read_text(encoding="utf-8").split())


@pytest.mark.slow
def test_the_tables_have_a_line_for_each_number_of_gpus():
    for name, first in (("one", "8"), ("replicas", "256")):
        rows = machines.rows(name)
        assert [rows[0][0], rows[-1][0]] == [first, "4,096"]
        assert all(len(row) == len(machines.HEADERS[name]) for row in rows)
        assert all("nan" not in cell for row in rows for cell in row)


@pytest.mark.slow
def test_tables_over_all_ranks_get_slower_with_every_host_and_replicas_do_not():
    steps = [machines.planned(ranks).ms for ranks in machines.RANKS]
    assert steps == sorted(steps)
    many = [ranks for ranks in machines.RANKS if ranks > machines.GROUP]
    groups = {ranks: machines.planned(ranks, machines.GROUP) for ranks in many}
    assert len({round(each.step.step_ms, 6) for each in groups.values()}) == 1
    assert all(each.ms < machines.planned(ranks).ms for ranks, each in groups.items())
    # Of 26 tables on 512 hosts, most hosts hold none.
    largest = machines.planned(4096).step
    cut = [
        table for table in largest.tables if table.sharding_type is not ShardingType.DATA_PARALLEL
    ]
    assert len({int(rank) // 8 for table in cut for rank in table.shards[:, 0]}) <= len(
        machines.CRITEO
    )


@pytest.mark.slow
def test_bytes_of_a_gpu_are_those_of_the_simulated_step():
    step = machines.planned(16).step
    row = machines.rows("one")[1]
    assert row[2:4] == tuple(
        machines.mib(step.total(crossing=crossing) / 16) for crossing in (False, True)
    )


def sentences() -> list[str]:
    one, largest = machines.planned(8).ms, machines.planned(4096).ms
    groups, small, every = (
        machines.planned(4096, machines.GROUP),
        machines.planned(4096, 8),
        machines.EVERY,
    )
    assert groups.sync is not None and small.sync is not None, "both are of replicas"
    rows, count = sum(machines.CRITEO), len(machines.CRITEO)
    mean, less = groups.sync.ms, largest / groups.ms
    return [
        (
            f"{count} of them, {rows / 1e6:.0f} million rows of {machines.COLUMNS} columns, "
            f"{rows * 512 / 1e9:.0f} GB"
        ),
        (
            f"takes {one:.2f} ms; on 512 hosts it takes {largest:.0f} ms, {largest / one:.0f} "
            "times as long."
        ),
        (
            f"Averaging takes {mean:.0f} ms on 4,096 of them, which is {mean / every:.1f} ms for "
            f"each of {every} steps"
        ),
        f"and both together are {groups.ms:.1f} ms, {less:.0f} times less than with one replica.",
        (
            f"groups of 8 take {small.step.step_ms:.2f} ms for a step and {small.sync.ms:,.0f} ms "
            "for the mean."
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_the_numbers_in_the_sentences_are_computed(number):
    assert sentences()[number] in PAGE


def test_the_page_shows_the_files_that_are_tested():
    for name in ("torchrun.sh", "dlrm.slurm", "pytorchjob.yaml"):
        assert f"src/tutorec/examples/launch/{name}" in PAGE
        assert (
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
            in (ROOT / "src/tutorec/examples/launch" / name).read_text()
        )
