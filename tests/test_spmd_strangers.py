"""What does not belong to a pool: processes that nobody started, forks of the caller and of a rank,
cleaned folders.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tutorec.errors import RankError
from tutorec.spmd import Ranks
from tutorec.spmd import pool as spmd_pool
from tutorec.spmd.worker import outlives_its_folder, prove

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux signals or /proc")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def execute(text: str, **environment: str) -> str:
    """Run a script to its end and return what it printed."""
    line = [sys.executable, "-W", "error::ResourceWarning", "-c", textwrap.dedent(text)]
    environment = {**os.environ, **environment}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rank_with_another_key_is_found_before_anything_is_exchanged_with_it():
    def step(rank):
        prove(bytes([rank]) * 32)

    with Ranks(2) as world:
        world.run(lambda: prove(b"one key"))
        with pytest.raises(
            RankError,
            match=r"did not start.* rank [01]",
        ):
            world.run(step)


def test_the_codes_of_a_start_are_bound_to_sender_receiver_and_world(ranks):
    def look():
        sent = []
        exchange = dist.all_to_all_single
        dist.all_to_all_single = lambda out, mine: (
            sent.append(bytes(mine.tolist())) or exchange(out, mine)
        )
        try:
            prove(b"one key")
        finally:
            dist.all_to_all_single = exchange
        return [sent[0][start : start + 32] for start in range(0, len(sent[0]), 32)]

    codes = {
        code for world_size in (2, 4) for of_rank in ranks(world_size).run(look) for code in of_rank
    }
    assert len(codes) == 2 * 2 + 4 * 4


@needs_fork
def test_a_function_that_forks_on_a_rank_answers_once(ranks):
    def fork(name):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        return name, os.getpid()

    world = ranks(2)
    world.run(len, ())
    for name in ("first", "second", "third"):
        # not the child, which would also take the rank's next task
        assert world.run(fork, name) == [(name, pid) for pid in world.pids]


def test_an_answer_to_an_earlier_run_is_not_taken_for_this_one():
    def answer_twice():
        frame = sys._getframe()
        while "tasks" not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals["tasks"].send_bytes(pickle.dumps(("value", 1, pickle.dumps("earlier"))))

    with Ranks(1) as world:
        world.run(len, ())
        with pytest.raises(
            RankError,
            match=r"rank 0 raised in 'test_an.*answer_twice' \(run 2\).*answered run 1 a second",
        ):
            world.run(answer_twice)
        assert world.run(len, ()) == [0]


@pytest.mark.slow
@needs_fork
def test_a_fork_of_the_caller_is_refused_and_told_what_to_do():
    text = """
        import os, sys
        from tutorec.spmd import Ranks
        world = Ranks(2)
        world.run(len, ())
        pid = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                world.run(len, ())
            except RuntimeError as error:
                print(str(error).replace(str(pid), "P").replace(str(os.getpid()), "C"))
            with Ranks(2) as own:
                print(own.run(lambda rank: ("child", rank)), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(world.run(lambda rank: rank))
    """
    refused, *values = execute(text).splitlines()
    assert refused.startswith(
        "process P started these ranks, and this is process C, a fork of it: "
    )
    assert refused.endswith("make another Ranks(2) in this process")
    assert values == ["[('child', 0), ('child', 1)]", "[0, 1]"]


@pytest.fixture
def strangers(monkeypatch, tmp_path):
    """Connections to the caller's port that come before those of any rank: silent, junk, a wrong
    key, ended at once.
    """
    folder = tmp_path / ("x" * 120)  # No socket of the file system has so long a name.
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    start, held = spmd_pool.start_rank, []

    def start_rank(boot, environment):
        family, address = boot["address"]
        assert family == "AF_INET"
        for message in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(44), b"\xff" * 1000, None):
            sock = socket.create_connection(tuple(address))
            held.append(sock)
            if message is None:
                sock.close()
            else:
                sock.sendall(message)
        return start(boot, environment)

    monkeypatch.setattr(spmd_pool, "start_rank", start_rank)
    yield
    for sock in held:
        sock.close()


@pytest.mark.usefixtures("strangers")
def test_strangers_at_the_caller_port_change_nothing():
    with Ranks(2) as world:
        assert world.run(lambda rank: rank) == [0, 1]


@pytest.mark.skipif(
    not outlives_its_folder(), reason="needs files that can be opened after they were removed"
)
def test_a_running_pool_needs_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def meet():
        group = dist.new_group([0, 1])
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        return total.item()

    with Ranks(2) as world:
        assert world.run(meet) == [2, 2]
        assert list(tmp_path.iterdir()) == []
        assert world.run(meet) == [2, 2]


def test_where_files_need_their_names_ranks_use_the_folder_and_it_is_removed_at_the_end(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spmd_pool, "outlives_its_folder", lambda: False)
    with Ranks(2) as world:
        assert world.run(lambda rank: rank) == [0, 1]
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


LISTENING = """
    import os, re
    from tutorec.spmd import worker
    join = worker.join_group
    def join_group(*arguments):
        print(os.environ["GLOO_SOCKET_IFNAME"])
        join(*arguments)
    worker.join_group = join_group
    worker.init()
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes |= set(re.findall(r"socket:\\[(\\d+)\\]", os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            pass
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                print(words[1].partition(":")[0])
    print(os.environ.get("GLOO_SOCKET_IFNAME"))
"""


@linux_only
@pytest.mark.slow
def test_a_group_of_one_listens_to_this_machine_alone_and_leaves_the_environment():
    environment = {
        name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LISTENING)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    interface, *addresses, variable = done.stdout.split()
    assert (interface, set(addresses), variable) == ("lo", {"0100007F"}, "None")


@linux_only
@pytest.mark.slow
def test_a_group_of_one_that_is_killed_leaves_no_file(tmp_path):
    text = """
        import os, signal
        from tutorec.spmd import init
        init()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    line = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(
        line, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.iterdir()) == []


CALLER = """
    import ctypes, os, sys, threading, time
    from tutorec.spmd import Ranks
    world = Ranks(2)
    if sys.argv[1] == "forks":  # spawned by a thread that ends: the kernel cannot be asked
        thread = threading.Thread(target=world.run, args=(len, ()))
        thread.start()
        thread.join()
    pids = [*world.run(os.getpid), *{pid for pid in world.run(os.getppid) if pid != os.getpid()}]
    child = 0
    if sys.argv[1] == "forks":
        child = os.fork()
        if child == 0:
            time.sleep(600)
    print(child, *pids, flush=True)
    def wait(holds_the_lock):
        print("waits", flush=True)
        (ctypes.PyDLL(None).sleep if holds_the_lock else time.sleep)(600)
    world.run(wait, sys.argv[1] == "locks")
"""


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("case", ["locks", "forks"])
def test_ranks_end_with_their_caller_whatever_they_do_and_whoever_else_lives(
    tmp_path, still_running, method, case
):
    environment = {**os.environ, "TUTOREC_RANKS_START": method, "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-c", textwrap.dedent(CALLER), case]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None, "stdout was asked for"
        child, *pids = map(int, caller.stdout.readline().split())
        assert [caller.stdout.readline() for _ in range(2)] == ["waits\n"] * 2
        caller.kill()
    try:
        assert len(pids) >= 2
        assert still_running(pids, 60.0) == []
        assert list(Path(tmp_path).iterdir()) == []
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_ranks_outlive_the_thread_that_started_them(monkeypatch):
    monkeypatch.setenv("TUTOREC_RANKS_START", "spawn")
    with Ranks(1) as world:
        pids: list[int] = []
        thread = threading.Thread(target=lambda: pids.extend(world.run(os.getpid)))
        thread.start()
        thread.join()
        assert world.run(os.getpid) == pids


def test_a_folder_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Ranks(1) as world:
        world.run(len, ())
        shutil.rmtree(tmp_path)
        assert world.run(len, ()) == [0]
