"""One table-wise step can be followed through few files, and CONTRIBUTING says which."""

from __future__ import annotations

import pytest
from policy.step_files import (
    BEGIN,
    END,
    MOST_FILES,
    MOST_OF_ALL,
    REPORT,
    TOTALS_BEGIN,
    TOTALS_END,
    as_text,
    planning_files,
    report,
    stale,
    too_many,
    too_much,
    totals,
    traced,
)
from policy.tree import PACKAGE, SRC, SourceFile, Tree, assert_none


@pytest.fixture(scope="module")
def paths(ranks):
    of_ranks = ranks(2).run(traced, folder=str(SRC / PACKAGE))
    return [path for of_rank in of_ranks for path in of_rank]


@pytest.fixture(scope="module")
def rows(paths):
    return report(paths, Tree.of_repository())


def test_one_step_runs_few_files(rows, paths):
    assert_none(too_many(rows))
    assert_none(too_much(paths, Tree.of_repository()))


def test_the_report_is_of_today(rows):
    assert_none(stale(rows, REPORT.read_text(encoding="utf-8")))


def test_the_trace_sees_every_part_of_a_step(rows):
    files = {path for _, path, _ in rows}
    assert {
        "distributed/embeddingbag.py",
        "distributed/comm.py",
        "distributed/collectives/kjt.py",
    } <= files
    assert {"distributed/collectives/autograd.py", "distributed/collectives/rows.py"} <= files
    assert any(path.startswith("distributed/lookup/") for path in files)
    assert any(path.startswith("distributed/sharding/") for path in files)
    assert not any(
        path.startswith(("sparse/", "_kernels/", "modules/", "optim/")) for path in files
    )


def test_the_trace_sees_every_part_of_a_planning_call():
    files = set(planning_files(str(SRC / PACKAGE)))
    planner = {
        path.removeprefix("distributed/planner/")
        for path in files
        if path.startswith("distributed/planner/")
    }
    assert {
        "planners.py",
        "enumerators.py",
        "shard_estimators.py",
        "cost.py",
        "topology.py",
    } <= planner
    assert "distributed/core/sharders.py" in files


def test_totals_count_each_file_of_every_package_once():
    tree = Tree(
        [
            SourceFile(
                "tutorec.a",
                '"""Doc."""\n\n\ndef f(a):\n    """Doc."""\n    # why\n    return a + 1\n',
            ),
            SourceFile("tutorec.sparse.b", "x = 1\n"),
        ]
    )
    text = totals(["a.py", "sparse/b.py", "a.py"], ["sparse/b.py"], tree)
    assert "| one training step | 2 | 13 |" in text
    assert "| one planning call | 1 | 3 |" in text


def test_step_policy_rejects_many_files_of_all_packages():
    files, tokens = MOST_OF_ALL
    tree = Tree([SourceFile(f"tutorec.x{i}", "x = 1\n") for i in range(files + 1)])
    [said] = too_much([f"x{i}.py" for i in range(files + 1)], tree)
    assert f"({files + 1}, {3 * (files + 1)}) files and tokens, at most ({files}, {tokens})" in said
    assert too_much([f"x{i}.py" for i in range(files)], tree) == []


def test_step_policy_rejects_many_files():
    many = [("moves", f"distributed/collectives/x{i}.py", 1) for i in range(MOST_FILES + 1)]
    [said] = too_many(many)
    assert f"{MOST_FILES + 1} files, at most {MOST_FILES}" in said
    assert too_many(many[1:]) == []


def test_step_policy_rejects_a_stale_report():
    rows = [("moves", "distributed/collectives/kjt.py", 1)]
    assert stale(rows, as_text(rows)) == []
    [said] = stale(rows, as_text(rows).replace("| 1 |", "| 2 |", 1))
    assert said.startswith(
        "CONTRIBUTING.md says something else: run `python tests/policy/step_files.py`"
    )


def test_the_report_stands_between_its_markers_once():
    text = REPORT.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.count(TOTALS_BEGIN) == text.count(TOTALS_END) == 1
