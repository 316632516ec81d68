"""One construction, one batch and one planning call can be followed through few files."""

from __future__ import annotations

import pytest
from policy.tree import SourceFile, Tree, assert_none
from policy.walk import CEILINGS, Walk, all_calls, measured, too_long


@pytest.fixture(scope="module")
def phases(ranks):
    return all_calls(ranks(2))


def test_the_walk_is_short(phases):
    tree = Tree.of_repository()
    assert_none(too_long({phase: measured(calls, tree) for phase, calls in phases.items()}))


@pytest.mark.parametrize(
    ("phase", "stations"),
    [
        ("construction", ["distributed/embedding_base.py", "distributed/core/tables.py"]),
        ("first forward", ["sparse/keyed_jagged.py", "distributed/sharding/base.py"]),
        ("second forward", ["distributed/comm.py", "distributed/lookup/grouped.py"]),
        ("backward", ["distributed/collectives/autograd.py", "distributed/collectives/rows.py"]),
        ("planning call", ["distributed/planner/planners.py", "distributed/planner/cost.py"]),
    ],
)
def test_the_trace_sees_every_phase(phases, phase, stations):
    assert {path for path, _ in phases[phase]} >= set(stations)


def test_a_walk_counts_files_jumps_and_the_functions_that_ran():
    inner = "def f(a):\n    def g(b):\n        return b\n\n    return g\n"
    tree = Tree([SourceFile("tutorec.a", inner), SourceFile("tutorec.b", "def h():\n    pass\n")])
    calls = [("a.py", 1), ("a.py", 2), ("b.py", 1), ("a.py", 1)]
    assert measured(calls, tree) == Walk(files=2, jumps=2, tokens_run=16 + 6)
    assert measured([("a.py", 2)], tree).tokens_run == 8


def test_walk_policy_rejects_a_long_walk():
    walk = CEILINGS["backward"]
    assert too_long({"backward": walk}) == []
    [violation] = too_long({"backward": walk._replace(files=walk.files + 1)})
    assert violation == f"backward: {walk.files + 1} files, at most {walk.files}"
