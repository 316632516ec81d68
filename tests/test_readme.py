"""The README's quick start is a program that runs and prints what the README says it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "book/_ext"))
from alone import first_cell

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL
    )


def test_quick_start_prints_what_the_readme_shows(tmp_path):
    (code,), (shown,) = blocks("python"), blocks("text")
    script = tmp_path / "quick_start.py"
    script.write_text(code, encoding="utf-8")
    printed = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout
    number = re.compile(r"\d+\.\d+")
    assert number.sub("x", printed) == number.sub("x", shown)
    assert [float(n) for n in number.findall(printed)] == pytest.approx(
        [10.222113, 10.222113], abs=1e-3
    )


def test_the_readme_has_the_first_cell_of_the_notebooks():
    (cell,) = blocks("ipython")
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    assert cell.strip() == first_cell(config)
