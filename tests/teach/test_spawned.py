"""Ranks that a notebook spawns: their output, and the rank that is blamed when one fails or none
ends.
"""

from __future__ import annotations

import multiprocessing
import time

import pytest

from tutorec.errors import RankError, RankTimeoutError
from tutorec.teach.spawned import join_ranks

CONTEXT = multiprocessing.get_context("spawn")


# What a rank runs. `exec` reaches a spawned process by its name, a function of this file would not.
BEGIN = "import os, time; from tutorec.teach.spawned import log_output; log_output(folder, rank)\n"
END = BEGIN + "print(f'rank {rank} prints'); os.system(f'echo rank {rank} echoes')"
FAIL = BEGIN + "1 / 0 if rank == 1 else time.sleep(600)"
LOSE = (
    BEGIN + "raise ValueError('bad id') if rank == 1 else RuntimeError('Connection closed by peer')"
)
STALL = BEGIN + "if rank == 1: print('rank 1 begins', flush=True); time.sleep(600)"


def spawned(code, folder):
    ranks = [{"rank": rank, "folder": str(folder)} for rank in range(2)]
    processes = [CONTEXT.Process(target=exec, args=(code, names)) for names in ranks]
    for process in processes:
        process.start()
    return processes


def test_exit_codes_come_back_and_output_is_in_the_files(tmp_path):
    assert join_ranks(spawned(END, tmp_path), tmp_path) == [0, 0]
    for rank in range(2):
        lines = (tmp_path / f"rank{rank}.log").read_text().split("\n")
        assert sorted(lines) == ["", f"rank {rank} echoes", f"rank {rank} prints"]


def test_a_failed_rank_is_named_with_its_traceback_and_the_others_are_ended(tmp_path):
    processes = spawned(FAIL, tmp_path)
    with pytest.raises(
        RankError, match=r"rank 1 failed, exit code 1:\nTraceback[^$]*division by zero"
    ) as caught:
        join_ranks(processes, tmp_path)
    assert caught.value.rank == 1
    assert not any(process.is_alive() for process in processes)


def test_a_rank_that_lost_another_one_is_not_blamed(tmp_path):
    processes = spawned(LOSE, tmp_path)
    for process in processes:
        process.join()
    with pytest.raises(RankError, match="rank 1 failed"):
        join_ranks(processes, tmp_path)


def test_a_rank_that_was_killed_is_named_with_the_signal(tmp_path):
    processes = spawned(STALL, tmp_path)
    processes[1].kill()
    with pytest.raises(RankError, match="rank 1 failed, killed by SIGKILL"):
        join_ranks(processes, tmp_path)


def test_ranks_that_do_not_end_are_named_and_killed(tmp_path):
    processes = spawned(STALL, tmp_path)
    processes[0].join()
    while not (tmp_path / "rank1.log").exists() or not (tmp_path / "rank1.log").read_text():
        time.sleep(0.05)
    with pytest.raises(
        RankTimeoutError,
        match=r"ranks 1 of 2 had not ended after 0 s; rank 1 printed:\nrank 1 begins",
    ):
        join_ranks(processes, tmp_path, timeout=0.0)
    assert not any(process.is_alive() for process in processes)
