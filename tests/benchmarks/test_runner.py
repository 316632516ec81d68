from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import backends, imports, peer, runner, validation
from benchmarks.harness import Bar, Report, Sample, compare, machine
from benchmarks.runner import Options, main


def _fake(monkeypatch: pytest.MonkeyPatch, ratio: float, seen: list[Options]) -> None:
    class Fake:
        """A benchmark that measures nothing."""

        NAME, ROUNDS = "fake", 40

        @staticmethod
        def run(options: Options) -> Report:
            seen.append(options)
            samples = {
                "slow": [Sample(ratio, ratio)] * options.rounds,
                "fast": [Sample(1.0, 1.0)] * options.rounds,
            }
            return Report(
                "fake",
                {},
                samples,
                [compare(samples, "slow", "fast", bar=Bar("at least", 2.0))],
                machine(),
            )

    monkeypatch.setattr(runner, "benchmarks", lambda: {"fake": Fake})


def test_every_file_is_a_benchmark_with_a_name_and_a_first_line() -> None:
    found = runner.benchmarks()
    assert {
        "import": imports,
        "backends": backends,
        "validation": validation,
    }.items() <= found.items()
    for module in found.values():
        assert module.ROUNDS >= 30 and module.__doc__ and callable(module.run)


def test_a_benchmark_without_a_peer_takes_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["backends", "--vs", "torchrec"])
    assert "bench backends measures tutorec alone and takes no --vs" in capsys.readouterr().err
    folder = Path(runner.__file__).parent
    for module in runner.benchmarks().values():
        uses = "options.vs" in (folder / f"{module.__name__.rpartition('.')[2]}.py").read_text()
        assert uses == (module.NAME not in runner._WITHOUT_PEER), module.NAME


def test_main_prints_writes_json_and_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Options] = []
    _fake(monkeypatch, ratio=3.0, seen=seen)
    assert main(["fake", "--json", str(tmp_path / "out.json"), "--vs", "peer"]) == 0
    assert seen == [Options(rounds=40, vs="peer")]
    assert "3.00 [3.00, 3.00]   at least 2.0: met" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["comparisons"][0]["verdict"] == "met"


def test_main_fails_when_a_bar_is_missed_but_not_when_it_is_undecided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _fake(monkeypatch, ratio=1.5, seen=[])
    assert main(["fake"]) == 1
    assert main(["fake", "--rounds", "29"]) == 0


def test_main_with_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["no-such"])
    assert "import" in capsys.readouterr().err


def test_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for name, module in runner.benchmarks().items():
        assert name in text and module.__doc__.splitlines()[0] in text


def test_a_peer_that_is_not_installed_is_named() -> None:
    with pytest.raises(ValueError, match="--vs no_such_peer: no such package"):
        imports.run(Options(rounds=1, vs="no_such_peer"))


def test_import_benchmark_compares_cold_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts: list[str] = []
    seconds = {"import torch": 1.0, "import tutorec": 1.1, "import peer": 2.2}

    def fake(words: list[str], cwd: str) -> Sample:
        scripts.append(words[-1])
        cpu = seconds.get(words[-1], 3.0 if "from peer" in words[-1] else 1.5)
        return Sample(cpu, cpu)

    monkeypatch.setattr(imports, "time_command", fake)
    monkeypatch.setattr(peer, "find_spec", lambda name: object())
    monkeypatch.setattr(imports, "_output", lambda script: "equal")
    report = imports.run(Options(rounds=2, vs="peer"))
    ratios = {c.title: c.ratio.median for c in report.comparisons if c.clock == "cpu"}
    assert ratios == {
        "import tutorec / import torch": pytest.approx(1.1),
        "tutorec, first forward / import torch": pytest.approx(1.5),
        "import peer / import tutorec": pytest.approx(2.0),
        "peer, first forward / tutorec, first forward": pytest.approx(2.0),
    }
    assert len(scripts) == 5 * 3


def test_import_benchmark_refuses_a_peer_with_another_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "find_spec", lambda name: object())
    monkeypatch.setattr(
        imports, "_output", lambda script: "peer's" if "from peer" in script else "ours"
    )
    with pytest.raises(ValueError, match="tutorec gives ours, peer gives peer's"):
        imports.run(Options(rounds=1, vs="peer"))


@pytest.mark.slow
def test_first_forward_script_runs_as_it_is() -> None:
    assert imports._output(imports._FORWARD.format(root="tutorec")).startswith("['item'] [[")


def test_backends_and_validation_run_on_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (backends, validation):
        monkeypatch.setattr(module, "_ROWS", 50)
        monkeypatch.setattr(module, "_TABLES", 3)
    monkeypatch.setattr(backends, "_BATCH", 8)
    monkeypatch.setattr(validation, "_REPEATS", {1: 1, 4: 1})
    assert len(validation.run(Options(rounds=2)).comparisons) == 4
    if backends.backend().name == "fbgemm":
        assert len(backends.run(Options(rounds=2)).samples) == 4


def test_backends_without_fbgemm_says_why() -> None:
    with backends.use_backend("torch"), pytest.raises(ValueError, match="needs both backends"):
        backends.run(Options(rounds=1))


@pytest.mark.parametrize(
    "words",
    [["import", "--sizes", "tiny"], ["ebc", "--sizes", "tiny"], ["validation", "--cases", "a"]],
)
def test_main_refuses_parts_that_a_benchmark_does_not_have(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"bench {words[0]} has no {words[1]} to choose from" in capsys.readouterr().err


def test_main_hands_on_the_parts_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Options] = []
    monkeypatch.setattr(
        runner.benchmarks()["kjt"],
        "run",
        lambda options: (
            seen.append(options) or Report("kjt", {}, {"a": [Sample(1, 1)]}, [], machine())
        ),
    )
    assert (
        main(["kjt", "--sizes", "tiny,mid", "--cases", "split halves,permute", "--rounds", "1"])
        == 0
    )
    assert seen == [Options(1, None, ("tiny", "mid"), ("split halves", "permute"))]
