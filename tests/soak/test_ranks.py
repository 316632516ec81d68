"""Ranks for a long time: memory that stays, ranks killed at drawn moments, pools in a row that
leave nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tutorec.errors import RankError
from tutorec.spmd import Ranks

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and uses signals"),
]
MB = 2**20
KILLS, POOLS = 30, 50


def resident(pid: int | str = "self") -> int:
    """Bytes of a process in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_global_of_a_megabyte_that_changes_at_each_run_does_not_add_up():
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec("def step():\n    return len(batch)\n", names)
    with Ranks(2) as world:
        for number in range(320):
            if number == 20:
                before = [resident(pid) for pid in world.pids]
            names["batch"] = bytearray(MB + number)
            assert world.run(names["step"]) == [MB + number] * 2
        grown = [(resident(pid) - size) / MB for pid, size in zip(world.pids, before, strict=True)]
    print(f"300 runs with a global of 1 MB: ranks grew by {grown[0]:.1f} and {grown[1]:.1f} MB")
    assert max(grown) < 20


def test_closures_over_a_megabyte_do_not_add_up():
    def closure(content: bytearray) -> Callable[[], int]:
        return lambda: len(content)

    with Ranks(2) as world:
        for number in range(320):
            if number == 20:
                before = [resident(pid) for pid in world.pids]
            assert world.run(closure(bytearray(MB + number))) == [MB + number] * 2
        grown = [(resident(pid) - size) / MB for pid, size in zip(world.pids, before, strict=True)]
    print(f"300 runs with a closure over 1 MB: ranks grew by {grown[0]:.1f} and {grown[1]:.1f} MB")
    assert max(grown) < 20


def test_thousands_of_runs_need_no_more_memory_and_no_more_descriptors():
    with Ranks(2) as world:

        def state() -> list[tuple[int, int]]:
            return [
                (resident(pid), len(os.listdir(f"/proc/{pid}/fd")))
                for pid in (os.getpid(), *world.pids)
            ]

        for number in range(3_200):
            if number == 200:
                before = state()
            world.run(len, ())
        grown = [
            (size - old, fds - known)
            for (size, fds), (old, known) in zip(state(), before, strict=True)
        ]
    print(
        "3,000 runs: caller and ranks grew by",
        ", ".join(f"{size / MB:.2f} MB" for size, _ in grown),
    )
    assert max(size for size, _ in grown) < 4 * MB
    assert {fds for _, fds in grown} == {0}


def train(steps: int) -> None:
    import torch

    for _ in range(steps):
        dist.all_reduce(torch.ones(1000))


def test_ranks_killed_at_drawn_moments_are_named(still_running):
    drawn, named = random.Random(0), 0
    with Ranks(2, timeout=60) as world:
        for _ in range(KILLS):
            world.run(train, 1)
            pids, victim = world.pids, drawn.randrange(2)
            timer = threading.Timer(
                drawn.uniform(0.0, 0.2), os.kill, (pids[victim], signal.SIGKILL)
            )
            timer.start()
            with pytest.raises(RankError, match=r"rank \d died in 'train' .*SIGKILL") as caught:
                while True:
                    world.run(train, 50)
            timer.join()
            named += caught.value.rank == victim
            assert still_running(pids, 60.0) == []
    print(f"{KILLS} kills: {named} named")
    assert named == KILLS


def test_pools_in_a_row_leave_nothing(tmp_path, monkeypatch, still_running):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def state() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), resident()

    for number in range(POOLS):
        pool = Ranks(2)
        assert pool.run(lambda rank: rank) == [0, 1]
        pids = pool.pids
        if number % 3 == 1:
            with pytest.raises(RankError):
                pool.run(lambda: 1 / 0)
        if number % 3:
            pool.close()
        del pool
        assert still_running(pids, 60.0) == []
        if number == 5:
            before = state()
    descriptors, size = state()
    print(
        f"{POOLS} pools: {(size - before[1]) / MB:.2f} MB more, {descriptors - before[0]} "
        "descriptors more"
    )
    assert descriptors <= before[0]
    assert size - before[1] < 8 * MB
    assert list(tmp_path.iterdir()) == []
