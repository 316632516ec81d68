"""`bench quant` on small sizes, beside a peer that is tutorec under another name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import memory, quant
from benchmarks.harness import Bar, Report
from benchmarks.runner import Options

_TWIN = {
    "sparse/jagged_tensor.py": "from tutorec.sparse.jagged_tensor import *",
    "modules/embedding_configs.py": "from tutorec.modules.embedding_configs import *",
    "modules/embedding_modules.py": "from tutorec.modules.embedding_modules import *",
    "quant/embedding_modules.py": "from tutorec.quant.embedding_modules import *",
}


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for path, text in _TWIN.items():
        file = tmp_path / "twin" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    _on_path(monkeypatch, tmp_path)
    return "twin"


def _on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "twin"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_TABLES": 3, "_ROWS": 50}.items():
        monkeypatch.setattr(quant, name, value)
    requests = {
        "int8-1": quant.Case(1, 1, 3, 2.5, False),
        "int8-32-10ids": quant.Case(4, 10, 2, None),
    }
    monkeypatch.setattr(quant, "_REQUESTS", requests)
    monkeypatch.setattr(quant, "CASES", (*requests, "rows", "memory"))


def _bars(report: Report) -> dict[str, Bar | None]:
    return {comparison.title: comparison.bar for comparison in report.comparisons}


@pytest.mark.usefixtures("small")
def test_medians_and_tails_are_judged(twin: str) -> None:
    report = quant.run(Options(rounds=2, vs=twin, cases=("int8-1", "int8-32-10ids")))
    assert _bars(report) == {
        "int8-1: twin / int8-1: tutorec": Bar("at least", 2.5),
        "int8-1: twin, p99 / int8-1: tutorec, p99": Bar("at least", 1.0),
        "int8-1: twin / int8-1: tutorec checked": None,
        "int8-1: twin, p99 / int8-1: tutorec checked, p99": None,
        "int8-32-10ids: twin / int8-32-10ids: tutorec": None,
        "int8-32-10ids: twin, p99 / int8-32-10ids: tutorec, p99": None,
        "int8-32-10ids: twin / int8-32-10ids: tutorec checked": None,
        "int8-32-10ids: twin, p99 / int8-32-10ids: tutorec checked, p99": None,
    }
    assert all(len(rounds) == 2 for rounds in report.samples.values())
    for name in ("int8-1: tutorec", "int8-32-10ids: twin"):
        for middle, late in zip(report.samples[name], report.samples[f"{name}, p99"], strict=True):
            assert 0 < middle.cpu <= late.cpu and 0 < middle.wall <= late.wall


@pytest.mark.usefixtures("small")
def test_it_needs_no_peer() -> None:
    report = quant.run(Options(rounds=1, cases=("int8-1",)))
    assert sorted(report.samples) == sorted(
        f"int8-1: tutorec{c}{p}" for c in ("", " checked") for p in ("", ", p99")
    )
    assert not report.comparisons


@pytest.mark.usefixtures("small")
def test_a_peer_with_other_rows_is_refused(
    twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from tutorec.modules.embedding_configs import *\nimport functools\n"
    text += "EmbeddingBagConfig = functools.partial(EmbeddingBagConfig, pooling=PoolingType.MEAN)\n"
    (tmp_path / "twin/modules/embedding_configs.py").write_text(text)
    _on_path(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="int8-32-10ids: tutorec and twin differ by up to"):
        quant.run(Options(rounds=1, vs=twin, cases=("int8-32-10ids",)))


@pytest.mark.usefixtures("small")
def test_bytes_of_a_row_are_those_of_the_buffer() -> None:
    found = quant.run(Options(rounds=1, cases=("rows",))).comparisons
    assert [(one.ratio.median, one.verdict) for one in found] == [(1.0, "met"), (1.0, "met")]
    assert "80" in found[0].title and "48" in found[1].title


@pytest.mark.usefixtures("small")
def test_memory_is_judged_after_three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(quant, "measurable", lambda: True)
    monkeypatch.setattr(
        quant, "bytes_of", lambda expression: asked.append(expression) or 4 * 50 * 64 * 4
    )
    in_place, kept = quant.run(Options(rounds=1, cases=("memory",))).comparisons
    assert (in_place.ratio.median, in_place.verdict, in_place.clock) == (1.0, "met", "memory")
    assert (kept.ratio.median, kept.verdict) == (pytest.approx(4 / 3), "met")
    assert asked == [
        f"benchmarks.quant:quantize_memory('tutorec', {way})"
        for way in (True, False)
        for _ in range(3)
    ]


def test_memory_says_where_it_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant, "measurable", lambda: False)
    report = quant.run(Options(rounds=1, cases=("memory",)))
    assert report.notes == ["memory is measured on Linux only"] and not report.comparisons


@pytest.mark.skipif(not memory.measurable(), reason="needs /proc/self/clear_refs")
def test_quantizing_in_place_never_holds_two_models() -> None:
    rows, columns, tables = 8_000, 64, 26
    model, table = tables * rows * columns * 4, rows * columns * 4
    in_place = memory.bytes_of(f"benchmarks.quant:quantize_memory('tutorec', True, {rows})")
    kept = memory.bytes_of(f"benchmarks.quant:quantize_memory('tutorec', False, {rows})")
    # What is made on the way of packing some rows does not grow with the table, and is as much as
    # one of these.
    assert 0.9 * model < in_place < model + 4 * table
    assert 1.25 * model < kept < 1.35 * model + 4 * table


def test_the_median_and_the_tail_are_of_single_calls() -> None:
    def work(count: int) -> Tensor:
        return torch.randn(count).sort().values

    middle, late = quant.time_single_calls(work, [1_000] * 95 + [200_000] * 5)
    assert late.cpu > 5 * middle.cpu > 0
