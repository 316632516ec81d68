"""Where ranks come from: scripts without a guard, both ways of starting, torchrun, callers that
disappear.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tutorec.errors import RankError
from tutorec.spmd import Ranks
from tutorec.spmd import start as spmd_start

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux signals or /proc")
METHODS = ["fork", "spawn"] if sys.platform == "linux" else ["spawn"]


def script(folder: Path, text: str) -> Path:
    path = folder / "a_script.py"
    path.write_text(textwrap.dedent(text))
    return path


def execute(*command: object, folder: Path | None = None, **environment: str) -> tuple[str, str]:
    """Run Python to its end; return what it wrote to stdout and stderr."""
    line = [sys.executable, *map(str, command)]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


UNGUARDED = """
    import dataclasses
    import sys

    from tutorec.spmd import Ranks

    print("main runs")

    @dataclasses.dataclass
    class Point:
        x: int

    LIMIT = 5

    def make(rank):
        return Point(rank + LIMIT)

    def check(point):
        return isinstance(point, Point), sys.modules["__main__"].__dict__.get("LIMIT")

    world = Ranks(2)
    points = world.run(make)
    print(points, all(type(p) is Point for p in points))
    print(world.run(check, points[0]))
    print("end")
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_script_without_a_guard_runs_once_and_its_classes_keep_their_identity(tmp_path, method):
    path = script(tmp_path, UNGUARDED)
    text, errors = execute("-W", "error", "-X", "dev", path, TUTOREC_RANKS_START=method)
    assert errors == ""
    assert text.splitlines() == [
        "main runs",
        "[Point(x=5), Point(x=6)] True",
        "[(True, None), (True, None)]",
        "end",
    ]


@pytest.mark.slow
def test_a_module_run_with_m_is_no_different(tmp_path):
    script(tmp_path, UNGUARDED)
    text, _ = execute("-m", "a_script", folder=tmp_path)
    assert text.splitlines()[1] == "[Point(x=5), Point(x=6)] True"


@pytest.mark.parametrize("method", METHODS)
def test_each_way_of_starting_gives_the_same_ranks(monkeypatch, method):
    monkeypatch.setenv("TUTOREC_RANKS_START", method)
    monkeypatch.setenv("A_VARIABLE_OF_A_TEST", "here")

    def look(rank):
        import __main__

        main = sorted(name for name in vars(__main__) if name.startswith(("test", "pytest")))
        return rank, main, os.environ["A_VARIABLE_OF_A_TEST"]

    with Ranks(2) as world:
        assert world.run(look) == [(0, [], "here"), (1, [], "here")]


class OddEntry(str):
    """An entry of ``sys.path`` whose class no rank can import."""

    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize("method", METHODS)
def test_entries_of_the_search_path_that_imports_skip_are_skipped(monkeypatch, tmp_path, method):
    monkeypatch.setenv("TUTOREC_RANKS_START", method)
    odd = [tmp_path, b"/bytes", None, threading.Lock(), torch.zeros(2)]
    monkeypatch.setattr(sys, "path", [*odd, *sys.path, OddEntry("/odd")])

    def look():
        return sys.path[0], sys.path[-1], {type(entry) for entry in sys.path}

    first = next(entry for entry in sys.path if isinstance(entry, str))
    with Ranks(1) as world:
        assert world.run(look) == [(first, "/odd", {str})]
        sys.path.insert(0, "/later")
        sys.path.insert(0, tmp_path / "later")
        assert world.run(look) == [("/later", "/odd", {str})]


@linux_only
def test_a_new_fork_server_starts_with_an_odd_search_path(monkeypatch, tmp_path):
    monkeypatch.setenv("TUTOREC_RANKS_START", "fork")
    monkeypatch.setattr(spmd_start, "_servers", [])
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])
    with Ranks(1) as world:
        assert world.run(os.getppid) != [os.getpid()]


@linux_only
@pytest.mark.parametrize("method", METHODS)
def test_a_removed_folder_and_an_environment_of_odd_bytes_are_no_obstacle(tmp_path, method):
    text = """
        import os
        from tutorec.errors import RankError
        from tutorec.spmd import Ranks
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
        os.environb[b"A_TEST"] = bytes(range(1, 256))
        world = Ranks(1)
        print(world.run(lambda: os.environb[b"A_TEST"] == bytes(range(1, 256))))
        try:
            world.run(lambda: 1 / 0)
        except RankError as error:
            print(str(error).splitlines()[-1])
    """
    found = execute("-c", textwrap.dedent(text), folder=tmp_path, TUTOREC_RANKS_START=method)
    assert found == ("[True]\nZeroDivisionError: division by zero\n", "")


@linux_only
def test_an_environment_larger_than_a_message_to_the_fork_server_is_no_obstacle(monkeypatch):
    for number in range(8):
        monkeypatch.setenv(f"A_LARGE_VARIABLE_{number}", "x" * 100_000)
    with Ranks(1) as world:
        assert world.run(lambda: len(os.environ["A_LARGE_VARIABLE_7"])) == [100_000]


@linux_only
def test_the_pipe_to_a_rank_that_ended_before_it_read_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    # More than the pipe holds: the write fails while the pipe still has bytes to flush.
    boot = {"environment": dict(os.environ), "cwd": os.getcwd(), "sys_path": ["x" * 2**18]}

    rank = spmd_start.Spawned(boot)
    assert rank.exit_code(60.0) == 1
    del rank
    gc.collect()
    assert unraisable == []


def test_numbers_of_numpy_count_as_numbers():
    two: Any = np.int64(2)
    seconds: Any = np.float32(60)
    with Ranks(two, hosts=two, timeout=seconds) as world:
        assert world.run(lambda rank, world_size: (rank, world_size)) == [(0, 2), (1, 2)]


@linux_only
@pytest.mark.parametrize("place", ["_sent", "_wait", "_receive"])
def test_an_interrupt_of_a_conversation_with_the_fork_server_harms_nobody(monkeypatch, place):
    monkeypatch.setenv("TUTOREC_RANKS_START", "fork")
    with Ranks(1) as other:
        (handle,) = other.run(lambda: other.keep([7]))
        servers = other.run(os.getppid)
        step = getattr(spmd_start._ForkServer, place)

        def interrupted(*arguments):
            step(*arguments)
            monkeypatch.setattr(spmd_start._ForkServer, place, step)
            raise KeyboardInterrupt

        for moment in ("start", "close"):
            world = Ranks(1)
            if moment == "close":
                world.run(len, ())
            monkeypatch.setattr(spmd_start._ForkServer, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                world.run(len, ()) if moment == "start" else world.close()
            world.close()
            assert other.run(list, handle) == [[7]]
        with Ranks(1) as world:
            assert world.run(os.getppid) == servers


@linux_only
def test_a_question_inside_a_conversation_with_the_fork_server_gets_its_own_answer(monkeypatch):
    monkeypatch.setenv("TUTOREC_RANKS_START", "fork")
    wait, found = spmd_start._ForkServer._wait, []

    def ask_inside(server, event: int, deadline: float) -> None:
        monkeypatch.setattr(spmd_start._ForkServer, "_wait", wait)
        with Ranks(1) as inner:  # as a signal handler or a finalizer may
            found.extend(inner.run(lambda: "inner"))
        wait(server, event, deadline)

    with Ranks(1) as first:
        first.run(len, ())
        monkeypatch.setattr(spmd_start._ForkServer, "_wait", ask_inside)
        with Ranks(1) as world:
            assert world.run(lambda: "outer") == ["outer"]
    assert found == ["inner"]


def test_an_unknown_way_of_starting_is_refused(monkeypatch):
    monkeypatch.setenv("TUTOREC_RANKS_START", "magic")
    with (
        Ranks(2) as world,
        pytest.raises(ValueError, match="TUTOREC_RANKS_START='magic': use 'spawn'"),
    ):
        world.run(len, ())


@linux_only
def test_the_fork_server_has_one_thread_and_no_cuda(ranks):
    def parents():
        server = os.getppid()
        return server, len(os.listdir(f"/proc/{server}/task"))

    servers = ranks(2).run(parents)
    assert servers[0] == servers[1]
    assert servers[0][0] != os.getpid()
    assert servers[0][1] == 1


@linux_only
def test_a_slow_module_is_imported_once_for_all_later_ranks(monkeypatch):
    monkeypatch.setenv(spmd_start.METHOD_VARIABLE, "fork")
    monkeypatch.setattr(spmd_start, "_servers", [])

    def first():
        before = "torch._dynamo" in sys.modules
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        return before

    def later():
        return "torch._dynamo" in sys.modules, os.getppid()

    with Ranks(1) as world:
        assert world.run(first) == [False]
    server = spmd_start._server()._process.pid
    with Ranks(1) as world:
        # forked still: the server has kept its one thread
        assert world.run(later) == [(True, server)]


@linux_only
@pytest.mark.slow
def test_a_fork_server_that_refuses_or_dies_is_replaced(monkeypatch, still_running):
    # Not the server of the pools that other tests share.
    monkeypatch.setattr(spmd_start, "_servers", [])
    with Ranks(1) as world:
        assert world.run(os.getppid) != [os.getpid()]

    class Refusing:
        def fork(self, boot):
            raise spmd_start._ServerRefused("2 threads")

    with monkeypatch.context() as refusing, Ranks(1) as world:
        refusing.setattr(spmd_start, "_server", Refusing)
        assert world.run(os.getppid) == [os.getpid()]
    with Ranks(1) as world:
        (server,), pids = world.run(os.getppid), world.pids
        os.kill(server, signal.SIGKILL)
        assert still_running([server, *pids], 60.0) == []  # Its ranks end with it.
        told = r"rank 0 died in 'len' \(run 2\): the fork server, .* was killed by SIGKILL"
        with pytest.raises(RankError, match=told) as raised:
            world.run(len, ())
        assert "memory" not in str(raised.value)
        assert world.run(len, ()) == [0]


ORPHANS = """
    import os, sys, time
    from tutorec.spmd import Ranks
    worlds = [Ranks(2), Ranks(1)]
    def work(seconds):
        time.sleep(seconds)
        return os.getpid(), os.getppid()
    pids = sorted({pid for world in worlds for pair in world.run(work, 0) for pid in pair} - {os.getpid()})
    if "stop" in sys.argv[1:]:
        import signal
        os.kill(worlds[0].pids[0], signal.SIGSTOP)
    print(*pids, flush=True)
    worlds[0].run(work, 60)
"""  # noqa: E501


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"), [("fork", "SIGKILL"), ("fork", "SIGTERM"), ("spawn", "SIGKILL")]
)
def test_nothing_outlives_a_caller_that_is_killed(tmp_path, still_running, method, name):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TUTOREC_RANKS_START": method, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, str(script(tmp_path, ORPHANS))],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as caller:
        assert caller.stdout is not None, "stdout was asked for"
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        assert len(still_running(pids)) >= 3
        caller.send_signal(getattr(signal, name))
        caller.wait()
    assert still_running(pids, 60.0) == []
    assert list(temporary.iterdir()) == []


@linux_only
@pytest.mark.slow
def test_not_even_a_stopped_rank_outlives_its_caller(tmp_path, still_running):
    command = [sys.executable, str(script(tmp_path, ORPHANS)), "stop"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as caller:
        assert caller.stdout is not None, "stdout was asked for"
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        caller.kill()
    assert still_running(pids, 60.0) == []


@pytest.mark.slow
def test_no_folder_is_left_behind(tmp_path, monkeypatch):
    text = """
        from tutorec.spmd import Ranks, init
        world = Ranks(2)
        world.run(len, ())
        init()
        other = Ranks(2)
        try:
            other.run(lambda: 1 / 0)
        except RuntimeError:
            print("failed")
    """
    path = script(tmp_path, text)
    (tmp_path / "temporary").mkdir()
    assert execute("-X", "dev", path, TMPDIR=str(tmp_path / "temporary")) == ("failed\n", "")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_long_temporary_folder_is_no_obstacle(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with Ranks(2) as world:
        assert world.run(lambda rank: rank) == [0, 1]


TORCHRUN = """
    import torch
    from tutorec.spmd import init, run_ranks

    BASE = 100

    def total(rank, world_size, x):
        value = torch.tensor([x + rank + BASE])
        torch.distributed.all_reduce(value)
        return rank, world_size, value.item()

    values = run_ranks(total, 4, 1)
    again = run_ranks(lambda rank: rank)
    if init().rank() == 0:
        print(values, again)
"""


@pytest.mark.slow
def test_the_same_function_runs_under_torchrun(tmp_path):
    path = script(tmp_path, TORCHRUN)
    text, _ = execute("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, path)
    assert text == "[(0, 2, 203), (1, 2, 203)] [0, 1]\n"


@pytest.mark.slow
def test_the_same_script_runs_without_torchrun(tmp_path):
    expected = "[(0, 4, 410), (1, 4, 410), (2, 4, 410), (3, 4, 410)] [0, 1]\n"
    assert execute(script(tmp_path, TORCHRUN)) == (expected, "")


@pytest.mark.slow
def test_a_pool_survives_a_fork_of_its_caller():
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    text = """
        import os
        from tutorec.spmd import Ranks
        world = Ranks(2)
        world.run(len, ())
        if os.fork() == 0:
            raise SystemExit
        os.wait()
        print(world.run(lambda rank: rank))
    """
    assert execute("-c", textwrap.dedent(text)) == ("[0, 1]\n", "")
