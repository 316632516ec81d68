"""`device_cases` on two pretended GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = HERE / "device_cases.py"
NAMES = re.findall(r"^def (case_\w+)", CASES.read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    paths = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TUTOREC_PRETEND_GPUS": "2", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, CASES], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_devices_are_not_mixed(results: dict[str, str], name: str) -> None:
    assert results[name] == "", results[name]
