"""How processes end: a rank of a pool as a script does, a fork without what it lacks, and one whose
model still holds its group after torch's threads have let go of tensors.
"""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from printed import own_lines

from tutorec.distributed.checkpoint import CheckpointManager, latest_checkpoint
from tutorec.errors import RankError
from tutorec.spmd import Ranks
from tutorec.spmd import start as spmd_start

PATIENCE = 60.0  # of waits that end when what they wait for has happened
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux signals or /proc")
METHODS = ["fork", "spawn"] if sys.platform == "linux" else ["spawn"]

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


def execute(text: str) -> tuple[str, str]:
    """Run a script to its end; return what it wrote to stdout and stderr."""
    line = [sys.executable, "-W", "default::RuntimeWarning", "-c", textwrap.dedent(text)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def leave_work(world, folder: str, rank: int):
    """What a script leaves to its end, in six ways; returns the handles of two."""
    import atexit
    import threading
    import time

    def write(name: str) -> Path:
        return Path(f"{folder}/{name}{rank}")

    def late() -> None:
        time.sleep(0.3)
        write("thread").write_text("whole")

    atexit.register(lambda: write("atexit").write_text("whole"))
    threading.Thread(target=late).start()
    kept = write("kept").open("w")
    kept.write("whole")
    of_a_module = torch.__dict__
    of_a_module["log of this test"] = write("global").open("w")
    of_a_module["log of this test"].write("whole")
    of_a_module["archive of this test"] = gzip.open(write("archive"), "wt")  # noqa: SIM115
    of_a_module["archive of this test"].write("whole")
    cycle: list[Any] = [write("cycle").open("wb")]
    cycle[0].write(b"whole")
    cycle.append(cycle)
    return world.keep(kept), world.keep(cycle)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_of_a_closed_pool_end_as_a_script_does(tmp_path, monkeypatch, method):
    monkeypatch.setenv(spmd_start.METHOD_VARIABLE, method)
    with Ranks(2, timeout=PATIENCE) as world:
        handles = world.run(leave_work, world, str(tmp_path))
        assert len(handles) == 2, "held until the end"
    assert len(list(tmp_path.iterdir())) == 12
    for path in tmp_path.iterdir():
        opened = gzip.open if "archive" in path.name else open
        with opened(path, "rt") as file:
            assert file.read() == "whole", path.name


def save_in_the_background(world, folder: str, rank: int):
    from torch import nn

    manager = CheckpointManager(folder, asynchronous=True)
    manager.save(nn.parallel.DistributedDataParallel(nn.Linear(2_000, 2_000)), step=1)
    return world.keep(manager)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_asynchronous_checkpoint_is_complete_when_the_pool_is_closed(tmp_path, world_size):
    with Ranks(world_size, timeout=PATIENCE) as world:
        handles = world.run(save_in_the_background, world, str(tmp_path))
        assert len(handles) == world_size, "held until the end"
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


LEFT = """
    import sys
    from pathlib import Path
    from tutorec.spmd import Ranks, run_ranks
    path = {path!r}
    def leave():
        import atexit
        atexit.register(lambda: print("atexit writes", Path(path).write_text("whole")))
        atexit.register(lambda: [][0])
    def notes():
        return Path(path).read_text() if Path(path).exists() else "nothing"
    if {how!r} == "run_ranks":
        run_ranks(leave, 1)
        print(notes())
    else:
        world = Ranks(1)
        world.run(leave)
    if {how!r} == "garbage":
        del world
        print(notes())
"""


@pytest.mark.parametrize("how", ["run_ranks", "garbage", "program"])
def test_every_way_of_ending_in_order_counts_and_shows_what_atexit_prints(tmp_path, how):
    path = tmp_path / "notes"
    text, errors = execute(LEFT.format(path=str(path), how=how))
    assert path.read_text() == "whole"
    assert own_lines(text).split() == ["atexit", "writes", "5"] + ["whole"] * (how != "program")
    assert "IndexError: list index out of range" in errors


@pytest.fixture
def ended_late(still_running) -> Callable[[Ranks], str]:
    """``ended_late(world)``: what is said when its ranks get 1.5 s for their end."""

    def end(world: Ranks) -> str:
        pids, workers = world.pids, world._pools[-1]
        workers.options = replace(workers.options, timeout=1.5)
        with pytest.warns(RuntimeWarning) as said:
            world.close()
        assert still_running(pids, PATIENCE) == []
        return "\n".join(str(each.message) for each in said)

    return end


def test_a_function_of_atexit_that_stalls_is_ended_and_named(ended_late):
    def leave(rank):
        import atexit
        import time

        def upload_the_log():
            time.sleep(600)

        if rank == 1:
            atexit.register(upload_the_log)

    world = Ranks(2, timeout=PATIENCE)
    world.run(leave)
    said = ended_late(world)
    assert said.startswith("rank 1 did not end within 1.5 s of close() and was killed")
    assert "in upload_the_log\n    time.sleep(600)" in said
    assert "rank 0" not in said


def test_a_thread_that_never_ends_is_named(ended_late):
    def leave():
        import threading
        import time

        def pull_batches():
            while True:
                time.sleep(1)

        threading.Thread(target=pull_batches, name="reader").start()

    world = Ranks(1, timeout=PATIENCE)
    world.run(leave)
    said = ended_late(world)
    assert "rank 0 did not end" in said
    assert "it waited for its thread 'reader', which is here:" in said
    assert "in pull_batches\n    time.sleep(1)" in said


@linux_only
def test_a_rank_that_is_stopped_cannot_hang_close(ended_late):
    world = Ranks(2, timeout=PATIENCE)
    world.run(len, ())
    os.kill(world.pids[0], signal.SIGSTOP)
    said = ended_late(world)
    assert "rank 0 did not end within 1.5 s of close() and was killed" in said
    assert "it is silent" in said


@linux_only
def test_close_names_a_rank_that_died_since_the_last_run(still_running):
    world = Ranks(2, timeout=PATIENCE)
    world.run(len, ())
    os.kill(world.pids[1], signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match=r"rank 1.*close\(\).*run 1:.*SIGKILL"):
        world.close()


def raise_later(kind: type[BaseException]) -> None:
    import signal

    def ring(*_):
        raise kind("the alarm rang")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.5)


@linux_only
@pytest.mark.parametrize("kind", [ValueError, TimeoutError, SystemExit])
@pytest.mark.parametrize("then", ["run", "close"])
def test_an_exception_between_two_runs_is_told(still_running, kind, then):
    world = Ranks(2, timeout=PATIENCE)
    world.run(len, ())
    told = f"rank 0 raised .*{kind.__name__}: the alarm rang(.|\n)*in ring"
    with world:
        world.run(lambda rank: raise_later(kind) if rank == 0 else None)
        assert still_running(world.pids[:1], PATIENCE) == []
        if then == "run":
            with pytest.raises(RankError, match=told) as raised:
                world.run(len, ())
            assert "between runs (after run 2 and before 3)" in str(raised.value)
            assert world.run(len, ()) == [0, 0]
            return
        with pytest.warns(RuntimeWarning, match=told):
            world.close()


FORKED = """
    import os
    import torch
    import torch.distributed as dist
    from tutorec.spmd import init
    init()
    dist.all_reduce(torch.ones(1))
    child = os.fork()
    if child == 0:
        raise SystemExit(4)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_a_process_with_a_group_ends():
    assert execute(FORKED) == ("4\n", "")
