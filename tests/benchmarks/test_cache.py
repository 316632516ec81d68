"""`bench cache` on small tables: what it measures, counts and judges."""

from __future__ import annotations

import re
import sys

import pytest

from benchmarks import cache
from benchmarks.harness import Bar
from benchmarks.runner import Options


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TABLES": 2,
        "ROWS": 2000,
        "BATCH": 16,
        "FEW": 4,
        "WARMUP": 4,
        "STEPS": 2,
        "FEW_STEPS": 1,
    }.items():
        monkeypatch.setattr(cache, name, value)
    for function in (cache._drawn, cache.scattered, cache._most_used_pages):
        function.cache_clear()


def test_each_size_is_measured_and_one_comparison_is_judged() -> None:
    report = cache.run(Options(rounds=2, sizes=("10", "50")))
    judged = [(c.title, c.clock, c.bar) for c in report.comparisons if c.bar is not None]
    expected = [("all rows in memory / 10 % of the rows, lru", "cpu", Bar("at least", 0.6))]
    assert judged == expected
    if sys.platform == "linux":
        title = "plain file, 10 % of the pages in memory / 10 % of the rows in memory, no pages"
        assert (title, "wall") in [(c.title, c.clock) for c in report.comparisons]
    names = ["10 % of the rows, lru", "50 % of the rows, lru", "10 % of the rows, lfu"]
    found = [
        re.fullmatch(
            r"(.+): hit rate (0\.\d+) \(predicted 0\.\d+\), (\d+\.\d) million ids a second; "
            r"a step reads (\d+\.\d) MB of the file and writes (\d+\.\d) MB",
            note,
        )
        for note in report.notes
        if "hit rate" in note
    ]
    assert [each and each[1] for each in found] == names
    assert all(note in str(report) for note in report.notes)
    assert all(len(samples) == 2 for samples in report.samples.values())


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--sizes 7: there are 1, 5, 10, 20, 50"):
        cache.run(Options(rounds=1, sizes=("7",)))


def test_pages_of_the_most_used_rows_are_chosen() -> None:
    pages = cache._most_used_pages(160)  # as many as hold 160 rows of 256 bytes
    assert len(pages) == 10
    assert int(cache.scattered(2000)[0]) // 16 in pages.tolist()
