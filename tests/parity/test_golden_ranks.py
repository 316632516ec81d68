"""On two processes tutorec trains as torchrec does: stored results in every run, torchrec itself in
`make parity`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parity.compare import RANK_CASES, differences, run
from policy.tree import assert_none

from tutorec.distributed.plan.plan import ShardingType

GOLDEN = json.loads(
    Path(__file__).with_name("golden").joinpath("ranks.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_outputs_weights_and_state_of_both_ranks_equal_torchrecs(backend):
    """One test for all cases: two workers would run them twice."""
    ours = run("tutorec", RANK_CASES, TUTOREC_BACKEND=backend)
    assert_none(
        [
            each
            for name, case in GOLDEN["cases"].items()
            for each in differences(name, case, ours.get(name))
        ]
    )


def test_every_sharding_type_is_compared():
    assert {name.split()[0] for name in GOLDEN["cases"]} == {kind.value for kind in ShardingType}


def test_golden_results_are_those_of_the_pinned_release():
    assert GOLDEN["versions"]["torchrec"] == "1.8.0"


@pytest.mark.live
def test_golden_results_of_two_ranks_are_what_torchrec_returns_today():
    pytest.importorskip("torchrec", reason="torchrec is installed by `make parity` only")
    assert_none(differences("torchrec", GOLDEN["cases"], run("torchrec", RANK_CASES)))
