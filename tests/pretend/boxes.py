"""Run a program on a pretended GPU box."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def on_box(gpus: int, arguments: Sequence[str | Path]) -> str:
    """What ``python ARGUMENTS`` prints on a machine with so many pretended GPUs.

    Raises:
        AssertionError: It failed; the message is what it printed.
    """
    outer = os.environ.get("PYTHONPATH", "")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / "site"), str(ROOT / "src"), outer]))
    environment["TUTOREC_PRETEND_GPUS"] = str(gpus)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"on {gpus} pretended GPUs:\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def pytest_on_box(gpus: int, *arguments: str | Path) -> str:
    """The same for ``pytest ARGUMENTS``."""
    return on_box(gpus, ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments])
