"""`bench mc` on small tables: what it measures and judges."""

from __future__ import annotations

import pytest

from benchmarks import mc
from benchmarks.harness import Bar
from benchmarks.runner import Options


def test_each_size_is_measured_and_remapping_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TABLES": 2, "ROWS": 500, "COLUMNS": 4, "BATCH": 8, "INTERVAL": 4}.items():
        monkeypatch.setattr(mc, name, value)
    report = mc.run(Options(rounds=2))
    judged = [(one.title, one.bar) for one in report.comparisons if one.bar is not None]
    bar = Bar("at most", 1.0)
    assert judged == [
        (f"remap, {size} ids a bag / look up, {size} ids a bag", bar) for size in ("1", "10")
    ]
    assert len(report.comparisons) == 10
    occupied, admitted, evictions = (
        report.notes[2].split()[2],
        report.notes[2].split()[5],
        report.notes[2].split()[-1],
    )
    assert occupied == "100.0" and 50 < float(admitted) < 100 and int(evictions) > 0
    with pytest.raises(ValueError, match="100"):
        mc.run(Options(rounds=1, sizes=("100",)))
