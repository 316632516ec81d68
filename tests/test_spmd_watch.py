"""Ranks of torchrun that wait for one that does not come: the error's note names it and
its place.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
    import sys, time
    import torch
    import torch.distributed as dist
    from tutorec.spmd import init

    group = init("gloo", timeout=10)
    rank, what = group.rank(), sys.argv[1]

    def read_the_next_day():
        time.sleep(600)

    dist.all_reduce(torch.ones(1))
    if rank == 1 and what == "stalls":
        read_the_next_day()
    if what == "crosses":
        dist.recv(torch.ones(1), 1 - rank)
    if rank == 0:
        dist.all_reduce(torch.ones(1))
"""


def torchrun(folder: Path, what: str) -> tuple[int, str]:
    """Exit code and output of two ranks that do this."""
    path = folder / "a_script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    line = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(path),
        what,
    ]
    done = subprocess.run(
        line,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # torch's prefix
    return done.returncode, re.sub(r"^\[rank\d\]: ", "", done.stdout, flags=re.MULTILINE)


def test_a_stalled_rank_is_named_with_its_line_and_who_waits(tmp_path):
    code, text = torchrun(tmp_path, "stalls")
    assert code != 0
    assert (
        "rank 1 stalled: the collective that rank 0 waits in did not finish within 10 s\nrank 1 is "
        "here:\n"
    ) in text
    assert "in read_the_next_day\n    time.sleep(600)\n" in text
    assert "rank 0 only waits, in all_reduce (operation 2 of its group):\n" in text


def test_a_rank_that_made_fewer_steps_is_named(tmp_path):
    code, text = torchrun(tmp_path, "ends")
    assert code != 0
    assert (
        "rank 1 had ended, and rank 0 still waited for it: every rank must make as many steps as "
        "the others"
    ) in text


def test_ranks_that_wait_for_each_other_are_both_named(tmp_path):
    code, text = torchrun(tmp_path, "crosses")
    assert code != 0
    assert "rank 0 waits in recv, rank 1 waits in recv, and no rank is on its way to join" in text
