from __future__ import annotations

import json
import sys
from collections import Counter

import numpy as np
import pytest

from benchmarks.harness import (
    Bar,
    Comparison,
    Ratio,
    Report,
    Sample,
    compare,
    interleave,
    machine,
    paired_ratio,
    time_call,
    time_command,
)


def _samples(cpu: list[float]) -> list[Sample]:
    return [Sample(cpu=value, wall=10 * value) for value in cpu]


def test_paired_ratio_cancels_what_a_round_shares() -> None:
    drift = np.random.default_rng(0).uniform(1.0, 10.0, 40)
    ratio = paired_ratio(list(3.0 * drift), list(drift))
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (pytest.approx(3.0),) * 3 + (40,)


def test_paired_ratio_is_the_median_of_ratios_not_the_ratio_of_medians() -> None:
    assert paired_ratio([1.0, 10.0, 6.0], [1.0, 1.0, 3.0]).median == 2.0


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        noise = np.exp(0.2 * rng.standard_normal(31))
        ratio = paired_ratio(list(2.0 * noise), [1.0] * 31, seed=seed)
        covered += ratio.low <= 2.0 <= ratio.high
    assert 0.88 <= covered / 200 <= 0.99


def test_bootstrap_interval_narrows_with_rounds_and_repeats_with_its_seed() -> None:
    noise = list(np.exp(0.3 * np.random.default_rng(2).standard_normal(400)))
    few, many = paired_ratio(noise[:20], [1.0] * 20), paired_ratio(noise, [1.0] * 400)
    assert many.high - many.low < few.high - few.low
    assert few == paired_ratio(noise[:20], [1.0] * 20)


def test_paired_ratio_of_unequal_or_impossible_measurements_raises() -> None:
    with pytest.raises(ValueError, match="2 and 1 measurements"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0 measurements"):
        paired_ratio([], [])
    with pytest.raises(ValueError, match="not positive"):
        paired_ratio([1.0, 1.0], [1.0, 0.0])


def test_compare_divides_the_first_by_the_second_on_the_clock_asked_for() -> None:
    samples = {"slow": _samples([4.0, 4.0]), "fast": [Sample(cpu=2.0, wall=1.0)] * 2}
    assert compare(samples, "slow", "fast").ratio.median == 2.0
    assert compare(samples, "slow", "fast").title == "slow / fast"
    assert compare(samples, "fast", "slow", clock="wall").ratio.median == pytest.approx(1 / 40)


@pytest.mark.parametrize(
    ("bar", "ratio", "verdict"),
    [
        (Bar("at least", 1.9), Ratio(1.95, 1.88, 2.0, 30), "met"),
        (Bar("at least", 1.9), Ratio(1.95, 1.86, 2.0, 30), "missed"),
        (Bar("at least", 1.9), Ratio(1.89, 1.88, 2.0, 30), "missed"),
        (Bar("at least", 1.9), Ratio(1.95, 1.94, 2.0, 29), "undecided"),
        (Bar("at most", 1.15), Ratio(1.10, 1.0, 1.17, 30), "met"),
        (Bar("at most", 1.15), Ratio(1.10, 1.0, 1.19, 30), "missed"),
        (Bar("at most", 1.15), Ratio(1.16, 1.0, 1.17, 30), "missed"),
    ],
)
def test_a_bar_needs_median_interval_and_thirty_rounds(
    bar: Bar, ratio: Ratio, verdict: str
) -> None:
    assert bar.judge(ratio) == verdict
    assert Comparison("a / b", "cpu", ratio, bar).verdict == verdict


def test_a_comparison_without_a_bar_says_so() -> None:
    assert Comparison("a / b", "cpu", Ratio(1, 1, 1, 30)).verdict == "no bar"


def test_interleave_runs_every_variant_once_a_round_in_every_order() -> None:
    calls: list[tuple[str, int]] = []

    def variant(name: str):
        def measure(number: int) -> Sample:
            calls.append((name, number))
            return Sample(float(number), 0.0)

        return measure

    samples = interleave({name: variant(name) for name in "abc"}, rounds=60, warmup=2)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [{number for _, number in one} for one in rounds] == [
        {number} for number in range(-2, 60)
    ]
    orders = Counter("".join(name for name, _ in one) for one in rounds)
    assert set(orders) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert [[sample.cpu for sample in found] for found in samples.values()] == [list(range(60))] * 3


def test_interleave_without_rounds_or_variants_raises() -> None:
    with pytest.raises(ValueError, match="rounds=0 and 1 variants"):
        interleave({"a": lambda _: Sample(1, 1)}, rounds=0)
    with pytest.raises(ValueError, match="rounds=3 and 0 variants"):
        interleave({}, rounds=3)


def test_time_call_counts_calls_and_gives_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"cpu": 0.0, "wall": 100.0}
    monkeypatch.setattr("benchmarks.harness._cpu_seconds", lambda: clock["cpu"])
    monkeypatch.setattr("time.perf_counter", lambda: clock["wall"])

    def call() -> None:
        clock["cpu"] += 2.0
        clock["wall"] += 3.0

    assert time_call(call, repeat=4) == Sample(cpu=2.0, wall=3.0)


def test_time_command_counts_the_childs_cpu_time() -> None:
    sample = time_command([sys.executable, "-c", "sum(range(3_000_000))"])
    assert sample.cpu > 0 and sample.wall > 0


def test_time_command_that_fails_shows_stderr() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*no good"):
        time_command(
            [sys.executable, "-c", "import sys; print('no good', file=sys.stderr); sys.exit(3)"]
        )


def _report(bar: Bar) -> Report:
    samples = {"slow": _samples([2.0, 2.2] * 15), "fast": _samples([1.0, 1.1] * 15)}
    return Report(
        "fake",
        {"B": 4},
        samples,
        [compare(samples, "slow", "fast", bar=bar)],
        machine(),
        notes=["a note"],
    )


def test_report_prints_medians_ratios_verdicts_and_notes() -> None:
    text = str(_report(Bar("at least", 1.5)))
    assert "bench fake: python" in text and "B=4" in text and "a note" in text
    assert "slow / fast" in text and "2.00 [2.00, 2.00]" in text and "at least 1.5: met" in text


def test_report_knows_whether_a_bar_was_missed() -> None:
    assert not _report(Bar("at least", 1.5)).missed
    assert _report(Bar("at least", 2.5)).missed


def test_report_as_json_holds_samples_versions_and_hardware() -> None:
    found = json.loads(json.dumps(_report(Bar("at least", 1.5)).to_dict()))
    assert (
        found["benchmark"] == "fake"
        and found["versions"]["torch"]
        and found["hardware"]["cores"] >= 1
    )
    assert (
        found["comparisons"][0]["verdict"] == "met"
        and found["comparisons"][0]["ratio"]["median"] == 2.0
    )
    assert len(found["samples"]["slow"]) == 30 and found["samples"]["slow"][0] == {
        "cpu": 2.0,
        "wall": 20.0,
    }
