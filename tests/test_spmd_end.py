"""A process that ends while a model still holds its group gives torch's threads time to let go of
tensors.
"""

from __future__ import annotations

import subprocess
import sys

from printed import own_lines

# Two ranks of one script, forked, each with a group that a global holds; time.sleep tells that it
# was called.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from tutorec.distributed import comm

rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=rank, world_size=2)
held = dist.group.WORLD
arrived = comm.all_to_all(torch.ones(4), [2, 2], [2, 2], held, "test").wait()
assert arrived.tolist() == [1.0] * 4
dist.destroy_process_group()
if sys.argv[2] == "ended":
    del held
time.sleep = lambda seconds: print("waits", flush=True)
if rank == 0:
    os.wait()
"""  # noqa: E501


def said(folder, group: str) -> list[str]:
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), group]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return own_lines(done.stdout).split()


def test_both_ranks_wait_where_the_group_is_held(tmp_path):
    assert said(tmp_path, "held") == ["waits", "waits"]


def test_nobody_waits_where_the_group_has_ended(tmp_path):
    assert said(tmp_path, "ended") == []
