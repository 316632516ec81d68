"""Run the cases of one library in a process of its own, and compare two libraries' results."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CASES = Path(__file__).with_name("cases.py")
RANK_CASES = Path(__file__).with_name("rank_cases.py")
# float32 arithmetic in two orders; steps of an optimizer add up a few of them
TOLERANCE = 1e-5


def run(root: str, script: Path = CASES, **environment: str) -> dict[str, Any]:
    """The results of every case in this library; raises with the process's errors when it fails."""
    done = subprocess.run(
        [sys.executable, str(script), root],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | environment,
    )
    if done.returncode:
        raise RuntimeError(
            f"the cases in {root} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def distance(theirs: Any, ours: Any) -> tuple[int, int, float]:
    """How many floats two results of one form hold, how many are equal, and the largest difference.

    Of numbers above 1 it is the relative difference, so that a sum of squares counts like a weight.
    """
    if isinstance(theirs, dict | list):
        keys = theirs if isinstance(theirs, dict) else range(len(theirs))
        parts = [distance(theirs[key], ours[key]) for key in keys]
        counts, equals, apart = zip(*parts, strict=True) if parts else ((), (), ())
        return sum(counts), sum(equals), max(apart, default=0.0)
    if not isinstance(theirs, float):
        return 0, 0, 0.0
    return 1, int(theirs == ours), abs(theirs - ours) / max(1.0, abs(theirs), abs(ours))


def differences(where: str, theirs: Any, ours: Any) -> list[str]:
    """Where two results differ: structure and text exactly, numbers within the tolerance."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if theirs.keys() != ours.keys():
            return [
                f"{where}: keys {sorted(theirs)}, here {ours if 'error' in ours else sorted(ours)}"
            ]
        return [d for key in theirs for d in differences(f"{where}.{key}", theirs[key], ours[key])]
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            return [f"{where}: {len(theirs)} entries, here {len(ours)}"]
        return [
            d
            for i, pair in enumerate(zip(theirs, ours, strict=True))
            for d in differences(f"{where}[{i}]", *pair)
        ]
    if isinstance(theirs, float) and isinstance(ours, float):
        close = math.isclose(theirs, ours, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return [] if close else [f"{where}: {theirs!r}, here {ours!r}"]
    return [] if theirs == ours else [f"{where}: {theirs!r}, here {ours!r}"]
