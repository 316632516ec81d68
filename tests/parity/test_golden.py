"""tutorec returns what torchrec returned: stored results in every run, torchrec itself in `make
parity`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parity.compare import differences, run
from policy.tree import assert_none

GOLDEN = json.loads(
    Path(__file__).with_name("golden").joinpath("cases.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_results_equal_torchrecs(backend):
    """One test for all cases: two workers would run them twice."""
    ours = run("tutorec", TUTOREC_BACKEND=backend)
    assert_none(
        [
            each
            for name, case in GOLDEN["cases"].items()
            for each in differences(name, case, ours.get(name))
        ]
    )


def test_golden_results_are_those_of_the_pinned_release():
    assert GOLDEN["versions"]["torchrec"] == "1.8.0"


@pytest.mark.live
def test_golden_results_are_what_torchrec_returns_today():
    pytest.importorskip("torchrec", reason="torchrec is installed by `make parity` only")
    assert_none(differences("torchrec", GOLDEN["cases"], run("torchrec")))


@pytest.mark.parametrize(
    ("theirs", "here"),
    [
        ({"a": 1.0}, {"a": 1.1}),
        ({"a": 1.0}, {"error": "x"}),
        ([1, 2], [1]),
        ("KeyedTensor", "KeyedTensor "),
        ([1.0], None),
    ],
)
def test_comparison_rejects(theirs, here):
    assert len(differences("case", theirs, here)) == 1


def test_comparison_allows_another_order_of_adding():
    assert differences("case", {"a": [1.0, "x"]}, {"a": [1.0 + 1e-7, "x"]}) == []
