"""The speeds of this machine as they are kept: written whole, read back, refused where they belong
to another one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tutorec._calibration as calibration
from tutorec._calibration import Calibration, cache_folder, fingerprint, kept

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


def test_a_folder_in_the_place_of_the_file_is_damaged_too(file: Path) -> None:
    file.mkdir(parents=True)
    assert "is damaged" in kept().state


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[list[str]] = []
    run: Callable[..., object] = lambda command, **_: ran.append(command[1:])  # noqa: E731
    monkeypatch.setattr(calibration.subprocess, "run", run)
    calibration.measure_in_own_process()
    assert ran == [["-m", "tutorec", "calibrate"]]


def test_kept_speeds_are_plain_json(file: Path) -> None:
    Calibration("2026-11-22", fingerprint(), SPEEDS).keep()
    assert json.loads(file.read_text())["speeds"] == SPEEDS
