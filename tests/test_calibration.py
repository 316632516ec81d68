"""The speeds of this machine as they are kept: written whole, read back, refused where they belong
to another one.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tutorec._calibration as calibration
from tutorec import cli
from tutorec._calibration import Calibration, cache_folder, fingerprint, kept
from tutorec.errors import BackendError

SPEEDS = {
    "cpu": {"ddr_mem_bw": 5e6, "bwd_compute_multiplier": 0.5, "row_ms": 2e-5, "latency_ms": 0.5}
}


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "calibration.json"
    monkeypatch.setenv("TUTOREC_CALIBRATION", str(path))
    return path


def test_a_calibration_is_read_as_it_was_kept(file: Path) -> None:
    assert kept().state == "not calibrated; run `tutorec calibrate`"
    measured = Calibration("2026-11-22", fingerprint(), SPEEDS)
    assert measured.keep() == file
    assert kept().calibration == measured
    assert kept().state == "measured on this machine on 2026-11-22"
    assert [path.name for path in file.parent.iterdir()] == ["calibration.json"]


def test_a_write_that_fails_leaves_the_file_that_was_there(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Calibration("2026-11-22", fingerprint(), SPEEDS).keep()
    with pytest.raises(TypeError):
        Calibration("2026-11-23", fingerprint(), {"cpu": {"row_ms": object()}}).keep()  # type: ignore[dict-item]
    assert kept().state == "measured on this machine on 2026-11-22"


@pytest.mark.parametrize("fact", ["processor", "cores", "GPUs", "torch", "kernels"])
def test_speeds_of_another_machine_are_not_used_and_the_change_is_named(
    file: Path, fact: str
) -> None:
    now = fingerprint()
    Calibration("2026-11-22", {**now, fact: "other"}, SPEEDS).keep()
    found = kept()
    assert found.calibration is None
    assert found.problem
    assert (
        f"calibrated on 2026-11-22, which no longer fits ({fact} other -> {now[fact]})"
        in found.state
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "no calibration"),
        ('{"date": "2026-11-22", "fingerprint": {}}', "KeyError('speeds')"),
        (
            '{"date": "", "fingerprint": {}, "speeds": {"cpu": {"ddr_mem_bw": 0}}}',
            "'ddr_mem_bw' is 0",
        ),
        ('{"date": "", "fingerprint": {}, "speeds": {"cpu": {"row_ms": "1"}}}', "'row_ms' is '1'"),
        ('{"date": "", "fingerprint": {}, "speeds": {"cpu": {"row_ms": NaN}}}', "'row_ms' is nan"),
        ('{"date": "", "fingerprint": {}, "speeds": {"cpu": {"speed": 1}}}', "'speed' is 1"),
        ('{"date": "", "fingerprint": {}, "speeds": {"cpu": {"row_ms": true}}}', "is True"),
        ('{"date": "today", "fingerprint": {}, "speeds": {}}', "Invalid isoformat string: 'today'"),
        ('{"date": "\\u001b[31m", "fingerprint": {}, "speeds": {}}', r"Invalid isoformat"),
        pytest.param("[" * 200_000, "maximum recursion depth exceeded", id="lists"),
        pytest.param('{"a":' * 200_000, "maximum recursion depth exceeded", id="objects"),
        pytest.param(
            f'{{"date": "", "fingerprint": {{}}, "speeds": {{"cpu": {{"row_ms": {"1" * 400}}}}}}}',
            "int too large to convert to float",
            id="400 digits",
        ),
        pytest.param("1" * 5000, "Exceeds the limit", id="5000 digits"),
        ('{"date": "", "fingerprint": {}, "speeds": {"\\ud800": {"\\u001b": 1}}}', r"'\x1b' is 1"),
        ('{"\x1b[31m', "Invalid control character"),
        pytest.param(" " * 2_000_000, "2,000,000 bytes", id="large"),
    ],
)
def test_a_damaged_file_is_named_and_not_used(file: Path, text: str, words: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    found = kept()
    assert found.calibration is None
    assert found.problem
    assert f"{file} is damaged" in found.state
    assert words in found.state


def test_a_folder_or_pipe_in_the_place_of_the_file_is_damaged_too(file: Path) -> None:
    file.mkdir(parents=True)
    assert "is damaged" in kept().state
    file.rmdir()
    os.mkfifo(file)
    assert "is damaged (not a file: prw" in kept().state


def test_what_a_terminal_would_obey_is_shown_as_an_escape(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Calibration("2026-11-22", {**fingerprint(), "torch": "\x1b[31m2.8\n"}, SPEEDS).keep()
    assert r"torch \x1b[31m2.8\n -> " in kept().state
    monkeypatch.setenv("TUTOREC_CALIBRATION", str(file.with_name("\x1b[31m.json")))
    file.with_name("\x1b[31m.json").write_text("{")
    assert r"\x1b[31m.json is damaged" in kept().state


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without a line in the system's list, as in a container."""

    def nobody(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for name in ("TUTOREC_CALIBRATION", "TUTOREC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_everything_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tutorec._doctor import _examine
    from tutorec.distributed import calibration as measuring
    from tutorec.distributed.planner.topology import Topology
    from tutorec.inference.cpp_loader import build_loader

    def measure() -> None:
        raise AssertionError("nothing is measured that cannot be kept")

    monkeypatch.setattr(measuring, "calibrate", measure)
    monkeypatch.setattr(calibration.subprocess, "run", measure)
    words = "this user has no home folder for the cache: set TUTOREC_CACHE"
    assert kept().state.startswith(f"not calibrated; {words}")
    assert f"the planner's speeds: not calibrated; {words}" in str(_examine())
    for call in (
        Topology.measured,
        build_loader,
        Calibration("2026-11-22", fingerprint(), SPEEDS).keep,
    ):
        with pytest.raises((OSError, BackendError), match=words):
            call()
    assert cli.main(["calibrate"]) == 2
    assert f"tutorec calibrate: {words}" in capsys.readouterr().err
    for variable in ("XDG_CACHE_HOME", "TUTOREC_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert kept().state == "not calibrated; run `tutorec calibrate`"
        assert str(Calibration("2026-11-22", fingerprint(), SPEEDS).keep()).startswith(
            str(tmp_path / variable)
        )
    assert kept().state == "measured on this machine on 2026-11-22"


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_measured(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tutorec.distributed import calibration as measuring

    def measure() -> None:
        raise AssertionError("nothing is measured that cannot be kept")

    monkeypatch.setattr(measuring, "calibrate", measure)
    file.parent.write_text("a file in the place of the folder")
    assert cli.main(["calibrate"]) == 2
    told = capsys.readouterr().err
    assert "set TUTOREC_CACHE to a folder that can be written to" in told
    assert str(file.parent) in told


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {}, "home/.cache/tutorec"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/tutorec"),
        ("darwin", {}, "home/Library/Caches/tutorec"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/tutorec"),
        ("win32", {"LOCALAPPDATA": "local", "TUTOREC_CACHE": "given"}, "given"),
    ],
)
def test_the_cache_lies_where_the_system_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], folder: str
) -> None:
    for name in ("TUTOREC_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))
    assert cache_folder() == Path(folder)


def test_the_doctor_tells_whether_the_machine_is_calibrated(file: Path) -> None:
    from tutorec._doctor import _examine

    assert "the planner's speeds: not calibrated; run `tutorec calibrate`" in str(_examine())
    Calibration("2026-11-22", fingerprint(), SPEEDS).keep()
    assert "the planner's speeds: measured on this machine on 2026-11-22" in str(_examine())


def test_measuring_in_a_process_of_its_own_runs_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setenv("TUTOREC_CACHE", str(tmp_path))
    run: Callable[..., object] = lambda command, **_: ran.append(command[1:])  # noqa: E731
    monkeypatch.setattr(calibration.subprocess, "run", run)
    calibration.measure_in_own_process()
    assert ran == [["-m", "tutorec", "calibrate"]]


def test_kept_speeds_are_plain_json(file: Path) -> None:
    Calibration("2026-11-22", fingerprint(), SPEEDS).keep()
    assert json.loads(file.read_text())["speeds"] == SPEEDS
