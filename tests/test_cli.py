"""The command line: which commands there are, and how they end."""

import pkgutil
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tutorec import cli


def test_module_runs_the_doctor_and_exits_with_its_verdict():
    command = [sys.executable, "-m", "tutorec", "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == (1 if "something broken" in ran.stdout.splitlines()[0] else 0)
    assert ran.stdout.startswith("tutorec 0.")
    assert ran.stderr == ""


def test_the_command_is_installed_and_is_the_module():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    named = tomllib.loads(text)["project"]["scripts"]
    assert list(named) == ["tutorec"]
    assert pkgutil.resolve_name(named["tutorec"]) is cli.main
    (script,) = entry_points(group="console_scripts", name="tutorec")
    assert script.load() is cli.main


@pytest.mark.parametrize("command", ["doctor", "plan", "calibrate", "migrate"])
def test_help_of_a_command_names_it_as_it_is_typed(
    command: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: tutorec {command}")
    assert "python -m" not in told


def test_module_and_command_have_one_usage():
    command = [sys.executable, "-m", "tutorec", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("usage: tutorec [-h] command")


@pytest.mark.parametrize("words", [[], ["plan"], ["doctor", "--quietly"]])
def test_unknown_words_end_with_usage(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: tutorec" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "doctor" in told and "calibrate" in told
