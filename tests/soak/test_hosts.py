"""Machines of a run lose their power again and again, in the middle of steps and of saves; the run
always goes on.

``TUTOREC_SOAK_KILLS`` says how many, and ``TUTOREC_SOAK_SECONDS`` for how long at most.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_SECONDS
from distributed.machines import Network, network

from tutorec.distributed.checkpoint.reading import latest_checkpoint, read_info

pytestmark = pytest.mark.soak

KILLS = int(os.environ.get("TUTOREC_SOAK_KILLS", "100"))
SECONDS = float(os.environ.get("TUTOREC_SOAK_SECONDS", "600"))
SMALL = (
    "--rows 2000 --test-rows 500 --users 40 --items 60 --batch-size 100 --no-progress --epochs "
    "100000"
).split()


def saved_steps(folder: Path) -> int:
    """Steps in the latest whole checkpoint, 0 where there is none; one that is dropped meanwhile is
    looked for anew.
    """
    while True:
        try:
            latest = latest_checkpoint(folder)
            return 0 if latest is None else int(read_info(latest).step or 0)
        except (OSError, ValueError):
            continue


def wait_until(holds: Callable[[], Any], log: Path) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"the run did not go on: {log.read_text()[-3000:]}")
        time.sleep(0.05)


def begins(log: Path) -> list[int]:
    """The steps from which the run went on, in order."""
    return [int(step) for step in re.findall(r"goes on from step[- ](\d+), saved", log.read_text())]


def kill_machines(machines: Network, words: list[str], folder: Path, log: Path) -> list[int]:
    """Steps that were in a checkpoint when a machine was killed, one for each kill."""
    draw, end, kills = random.Random(0), time.monotonic() + SECONDS, []
    for machine in (0, 1):
        machines.torchrun(machine, "1:2", 1, words, log)
    latest = 0
    while len(kills) < KILLS and time.monotonic() < end:
        wait_until(lambda latest=latest: saved_steps(folder) > latest, log)
        time.sleep(draw.random() * 0.3)  # in the middle of whatever it does then
        machine, seen, saved = draw.randrange(2), len(begins(log)), saved_steps(folder)
        machines.machines[machine].kill()
        kills.append(saved)
        machines.torchrun(machine, "1:2", 1, words, log)
        wait_until(lambda seen=seen: len(begins(log)) > seen, log)
        # It may begin twice: without the machine, and again with it. Never behind what was saved.
        later = begins(log)[seen:]
        latest = max(later)
        assert min(later) >= saved, (saved, later)
        print(f"kill {len(kills)}: host{machine} at step {saved}, went on from {later}", flush=True)
    return kills


def loss_at(steps: int, *options: str) -> float:
    """What one process says of the model after so many steps."""
    words = [sys.executable, "-m", "tutorec.examples.dlrm", *SMALL, "--steps", str(steps), *options]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return float(re.findall(r"after: .*log loss (\d+\.\d+)", said)[-1])


@pytest.mark.timeout(1500)
def test_a_run_goes_on_however_often_a_machine_dies(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "checkpoints"
    words = [
        "-m",
        "tutorec.examples.dlrm",
        *SMALL,
        "--checkpoints",
        str(folder),
        "--save-every",
        "5",
    ]
    with network(2, tmp_path) as machines:
        kills = kill_machines(machines, words, folder, log)
        for machine in machines.machines:
            machine.kill()
    print(f"{len(kills)} machines were killed, and the run always went on")
    assert kills and kills == sorted(kills)
    steps = saved_steps(folder)
    gone_on = loss_at(steps, "--checkpoints", str(folder))
    shutil.rmtree(folder)
    # The model is that of a run that nobody disturbed, but for the order of additions.
    assert gone_on == pytest.approx(loss_at(steps), rel=0.02)
