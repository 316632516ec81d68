"""Notebooks are tested by pytest and nbmake alone: `pytest --nbmake notebooks` works elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from policy.tree import ROOT


def collected(folder: Path) -> subprocess.CompletedProcess[str]:
    """What pytest finds in a folder's notebooks, with no plug-in but nbmake."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "nbmake.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--nbmake", "--nbmake-timeout=120", "--collect-only", "-q", "notebooks"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {k: v for k, v in environment.items() if k != "PYTEST_ADDOPTS"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_notebooks_are_found_by_pytest_and_nbmake_alone():
    done = collected(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {name for name in names if name in done.stdout} == names


@pytest.mark.parametrize("option", ["timeout = 900"])
def test_an_option_of_another_plug_in_in_pyproject_is_noticed(option: str, tmp_path: Path):
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = text.replace("testpaths =", f"{option}\ntestpaths =")
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    (tmp_path / "notebooks").mkdir()
    shutil.copy(next((ROOT / "notebooks").glob("00_*.ipynb")), tmp_path / "notebooks")
    done = collected(tmp_path)
    assert done.returncode != 0
    assert option.partition(" ")[0] in done.stdout + done.stderr
