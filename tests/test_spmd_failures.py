"""Ranks that fail: every fault is injected in real processes, ends all ranks in time and names the
rank.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutorec.errors import RankError, RankTimeoutError
from tutorec.spmd import Ranks
from tutorec.spmd import pool as spmd_pool
from tutorec.spmd import start as spmd_start
from tutorec.spmd.pool import WorkerPool

Places = dict[int, dict[str, Any] | None]
PATIENCE = 60.0  # of waits that end when what they wait for has happened
LINUX = sys.platform == "linux"
linux_only = pytest.mark.skipif(not LINUX, reason="uses Linux signals or /proc")


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    """Two ranks; a test that breaks them leaves new ones to the next."""
    with Ranks(2, timeout=PATIENCE) as pool:
        yield pool


@pytest.fixture
def failure(still_running) -> Callable[..., RankError]:
    """The error of a run, after which none of the ranks that ran it may be left."""

    def run(pool: Ranks, fn, *args) -> RankError:
        pool.run(len, ())
        pids = pool.pids
        with pytest.raises(RankError) as caught:
            pool.run(fn, *args)
        assert still_running(pids, PATIENCE) == []
        return caught.value

    return run


@pytest.fixture
def stall(still_running, monkeypatch) -> Callable[..., RankError]:
    """``stall(world, fn, settled)``: the error of a run that is given 1.5 s, once ``settled`` holds
    for its ranks.

    On a busy machine a rank may still be on its way when the time is over: ranks are asked again
    until their places, by rank, are those that the test is about.
    """
    asked = WorkerPool._ask

    def run(
        pool: Ranks,
        fn,
        settled: Callable[[Places], bool],
        seconds: float = 1.5,
        before: Callable[[], None] = lambda: None,
    ) -> RankError:
        end = time.monotonic() + PATIENCE

        def ask(workers: WorkerPool, ranks: list[int]) -> Places:
            while not settled(places := asked(workers, ranks)) and time.monotonic() < end:
                time.sleep(0.05)
            return places

        pool.run(len, ())  # The ranks' first run may take its time.
        pids, workers = pool.pids, pool._pools[-1]
        before()
        monkeypatch.setattr(WorkerPool, "_ask", ask)
        monkeypatch.setattr(workers, "options", replace(workers.options, timeout=seconds))
        with pytest.raises(RankError) as caught:
            pool.run(fn)
        assert still_running(pids, PATIENCE) == []
        return caught.value

    return run


def waits(place: dict[str, Any] | None) -> bool:
    return bool(place and place["collective"])


def stands_in(place: dict[str, Any] | None, line: str) -> bool:
    return bool(place and line in place["stack"])


def test_a_raised_exception_names_the_rank_and_shows_its_traceback(world, failure):
    def lookup(rows):
        raise ValueError(f"table 'item' has {rows} rows")

    def step(rank):
        if rank == 1:
            lookup(0)
        dist.barrier()

    error = failure(world, step)
    assert error.rank == 1
    assert "rank 1 raised in" in str(error)
    assert "step' (run 2): ValueError: table 'item' has 0 rows" in str(error)
    assert "in lookup\n" in error.child_traceback
    assert "spmd/worker" not in error.child_traceback
    assert str(error).endswith("ValueError: table 'item' has 0 rows")


def test_the_same_exception_on_all_ranks_is_reported_for_the_lowest(world, failure, monkeypatch):
    monkeypatch.setattr(spmd_pool, "SAME_MOMENT_SECONDS", PATIENCE)

    def step(rank):
        time.time = lambda: 100.0 - rank
        raise ValueError("no such table")

    assert failure(world, step).rank == 0


def test_of_two_exceptions_the_earlier_is_reported(world, failure, monkeypatch):
    monkeypatch.setattr(spmd_pool, "SAME_MOMENT_SECONDS", PATIENCE)

    def step(rank):
        time.time = lambda: 100.0 - rank
        raise ValueError(f"from {rank}")

    error = failure(world, step)
    assert (error.rank, "ValueError: from 1" in str(error)) == (1, True)


def test_an_exception_without_a_message_that_can_be_shown_is_named_all_the_same(world, failure):
    class Odd(Exception):
        def __str__(self) -> str:
            raise LookupError

    def step(rank):
        if rank == 1:
            raise Odd

    error = failure(world, step)
    assert error.rank == 1
    assert "Odd: its message cannot be shown, because __str__ raised LookupError" in str(error)


def test_chained_exceptions_are_shown_whole(world, failure):
    def step(rank):
        try:
            {}["user"]
        except KeyError as error:
            raise LookupError("no feature") from error

    text = failure(world, step).child_traceback
    assert (
        text.index("KeyError: 'user'")
        < text.index("direct cause")
        < text.index("LookupError: no feature")
    )


def test_tracebacks_hold_no_folder_of_this_machine(world, failure):
    def step():
        return torch.nn.Linear(2, 2)(torch.ones(3))

    text = str(failure(world, step))
    assert 'File "torch/nn/' in text
    for folder in (sys.prefix, str(Path.home()), str(Path(__file__).parents[1]), "site-packages"):
        assert folder not in text


@pytest.mark.parametrize("leave", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_exceptions_that_would_end_a_program_are_failures_of_the_rank(world, leave, failure):
    def step(rank):
        if rank == 1:
            raise leave
        dist.barrier()

    assert failure(world, step).rank == 1


def test_a_rank_that_exits_is_named_and_not_the_one_that_noticed(world, failure):
    def step(rank):
        if rank == 1:
            os._exit(3)
        dist.barrier()

    error = failure(world, step)
    assert error.rank == 1
    assert "rank 1 died in" in str(error)
    assert "step' (run 2): its process ended with exit code 3 and no exception" in str(error)


@linux_only
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_rank_killed_by_a_signal_is_named_with_the_signal(world, name, failure):
    def step(rank):
        if rank == 0:
            os.kill(os.getpid(), getattr(signal, name))
        dist.all_reduce(torch.ones(1))

    error = failure(world, step)
    assert error.rank == 0
    assert "rank 0 died in " in str(error)
    assert f"its process was killed by {name} (signal {int(getattr(signal, name))})" in str(error)


def test_a_lost_peer_is_no_cause_even_when_it_is_reported_first(world, failure, monkeypatch):
    monkeypatch.setattr(spmd_pool, "AFTERMATH_SECONDS", PATIENCE)

    def step(rank):
        if rank == 0:
            raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4711")
        time.sleep(0.3)
        os._exit(7)

    error = failure(world, step)
    assert (error.rank, "exit code 7" in str(error)) == (1, True)


def test_a_lost_peer_is_reported_when_there_is_no_other_cause(world, failure):
    def step(rank):
        if rank == 0:
            raise RuntimeError("Connection closed by peer")
        time.sleep(5)

    assert "RuntimeError: Connection closed by peer" in str(failure(world, step))


def test_a_stalled_rank_is_named_with_its_place_and_who_waits_for_it(world, stall):
    def read_next_batch():
        time.sleep(60)

    def step(rank):
        if rank == 1:
            read_next_batch()
        dist.all_reduce(torch.ones(1))

    error = stall(
        world, step, lambda places: waits(places[0]) and stands_in(places[1], "in read_next_batch")
    )
    assert isinstance(error, RankTimeoutError)
    assert isinstance(error, TimeoutError)
    assert error.rank == 1
    message = str(error)
    assert message.startswith("rank 1 stalled: ")
    assert "did not finish within 1.5 s" in message
    assert "in read_next_batch\n    time.sleep(60)" in message
    assert "rank 0 only waits, in all_reduce (operation 1 of its group)" in message


def test_a_rank_that_waits_for_work_begun_earlier_is_not_blamed(world, stall):
    def step(rank):
        if rank == 1:
            time.sleep(60)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        work.wait()

    error = stall(
        world, step, lambda places: waits(places[0]) and stands_in(places[1], "time.sleep(60)")
    )
    assert error.rank == 1
    assert "rank 0 only waits, in wait" in str(error)


def test_all_stalled_ranks_are_named(world, stall):
    error = stall(world, lambda: time.sleep(60), lambda places: all(places.values()))
    assert str(error).startswith("ranks 0, 1 stalled: ")


def test_uneven_collectives_say_who_waits_and_who_has_returned(world, stall):
    def step(rank):
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            dist.all_reduce(torch.ones(1))

    # rank 1 returns within these
    error = stall(world, step, lambda places: waits(places[0]), seconds=6)
    assert isinstance(error, RankTimeoutError)
    assert error.rank == 0
    assert "rank 0 waits in all_reduce, and rank 1 returned without that call" in str(error)
    assert "every rank must call the same collectives in the same order" in str(error)
    assert "(operation 2 of its group)" in str(error)


def test_different_collectives_name_both_waiting_ranks(world, stall):
    def step(rank):
        if rank == 0:
            dist.recv(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)

    error = stall(world, step, lambda places: all(map(waits, places.values())))
    assert "rank 0 waits in recv, rank 1 waits in recv, and no rank is on its way" in str(error)


@linux_only
def test_a_stopped_rank_is_silent_and_named(world, stall):
    def step(rank):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    error = stall(world, step, lambda places: waits(places[0]) and places[1] is None)
    assert isinstance(error, RankTimeoutError)
    assert error.rank == 1
    assert "rank 1 did not finish" in str(error)
    assert "is silent" in str(error)
    assert "rank 0 only waits, in barrier" in str(error)


@linux_only
def test_a_rank_that_holds_the_interpreter_lock_is_silent_and_named(world, stall):
    def step(rank):
        if rank == 0:
            ctypes.PyDLL(None).sleep(60)
        dist.barrier()

    assert stall(world, step, lambda places: places[0] is None and waits(places[1])).rank == 0


@linux_only
def test_a_rank_stopped_between_runs_cannot_hang_a_large_send():
    with Ranks(2, timeout=10) as pool:
        pool.run(len, ())
        os.kill(pool.pids[1], signal.SIGSTOP)
        with pytest.raises(RankError, match="rank 1"):
            pool.run(torch.numel, torch.zeros(4_000_000))


@linux_only
def test_a_rank_that_died_between_runs_is_named(world):
    world.run(len, ())
    os.kill(world.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 died in 'len'.*SIGKILL"):
        world.run(len, ())
    assert world.run(len, ()) == [0, 0]


def test_a_value_that_cannot_be_pickled_names_its_type_and_says_keep(world, failure):
    def step():
        return {"model": [1, (x for x in ())]}

    message = str(failure(world, step))
    assert (
        "the rank returned a dict, which cannot be pickled: TypeError: cannot pickle 'generator' "
        "object"
    ) in message
    assert "return world.keep(obj), and pass the handle to a later run" in message


def test_an_argument_or_global_that_cannot_be_pickled_does_the_ranks_no_harm(world):
    world.run(len, ())
    before = world.pids
    with pytest.raises(TypeError, match="generator"):
        world.run(len, (x for x in ()))
    namespace = {"stream": (x for x in ()), "__name__": "__main__"}
    exec("def step():\n    return next(stream)\n", namespace)
    with pytest.raises(TypeError, match="'stream', a generator, cannot be sent"):
        world.run(namespace["step"])
    assert world.pids == before


def test_new_ranks_start_after_a_failure_and_stale_handles_say_so(world, failure):
    handle = world.run(lambda world: world.keep([1]), world)[0]
    assert world.run(len, handle) == [1, 1]
    failure(world, lambda: 1 / 0)
    assert repr(handle).endswith("ranks ended>")
    assert world.run(lambda rank: rank) == [0, 1]
    with pytest.raises(
        ValueError, match=r"is a handle of ranks that have ended .* run the function that keeps it"
    ):
        world.run(len, handle)
    assert world.run(lambda rank: rank) == [0, 1]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started the tests in the background and
    had it ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_ranks_and_reaches_the_caller(still_running):
    main = threading.main_thread().ident
    assert main is not None, "tests run in a thread with an id"
    with Ranks(2, timeout=60) as world:
        world.run(len, ())
        pids = world.pids
        timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            world.run(time.sleep, 60)
        timer.join()
        assert still_running(pids, PATIENCE) == []
        assert world.run(lambda rank: rank) == [0, 1]


def test_leaving_the_block_by_an_exception_ends_the_ranks(still_running):
    pool = Ranks(2)

    def block():
        with pool:
            pool.run(len, ())
            pids.extend(pool.pids)
            raise LookupError

    pids: list[int] = []
    with pytest.raises(LookupError):
        block()
    assert len(pids) == 2
    assert still_running(pids, PATIENCE) == []


def test_a_pool_that_is_garbage_ends_its_ranks(still_running):
    pool = Ranks(2)
    pool.run(len, ())
    pids = pool.pids
    del pool
    assert still_running(pids, PATIENCE) == []


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="needs fewer than two GPUs")
def test_a_backend_that_cannot_be_had_says_what_would_work():
    with (
        Ranks(2, backend="nccl") as pool,
        pytest.raises(RankError, match=r"2 ranks, [01] GPUs; use 'gloo'.*'auto'"),
    ):
        pool.run(len, ())


def execute(text: str) -> list[str]:
    """The lines that a script prints, which must end by itself."""
    line = [sys.executable, "-c", textwrap.dedent(text)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=5 * PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


HANDLED = """
    import os, signal, sys, threading, time
    from tutorec.errors import RankError
    from tutorec.spmd import Ranks
    world = Ranks(2, timeout=600)
    world.run(len, ())
    pids = world.pids
    def handle(*_):
        print("handler", flush=True)
        {handler}
        print("handled", flush=True)
    signal.signal(signal.SIGUSR1, handle)
    caller = os.getpid()
    def wait(rank):
        if rank == 1:
            os.kill(caller, signal.SIGUSR1)
        time.sleep(600)
    try:
        world.run(wait)
    except BaseException as error:
        print(type(error).__name__, str(error) or error.args)
    print(world)
    print([pid for pid in pids if os.path.exists(f"/proc/{{pid}}/fd")])
    again = Ranks(1)
    print(again.run(len, ()))
    again.close()
"""


@linux_only
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_signal_handler_can_close_the_pool_during_a_run(monkeypatch, method):
    monkeypatch.setenv("TUTOREC_RANKS_START", method)
    *handled, error, world, left, again = execute(HANDLED.format(handler="world.close()"))
    assert handled == ["handler", "handled"]
    assert error.startswith("RankError close() was called during the run of 'wait', by a signal")
    assert (world[:8], world[-6:]) == ("Ranks(2,", "closed")
    assert (left, again) == ("[]", "[0]")


@linux_only
def test_a_signal_handler_can_close_the_pool_and_leave():
    handler = "world.close(); sys.exit(3)"
    *handled, error, _, left, again = execute(HANDLED.format(handler=handler))
    assert handled == ["handler"]
    assert (error, left, again) == ("SystemExit 3", "[]", "[0]")


@linux_only
def test_a_signal_handler_that_asks_the_ranks_during_a_run_is_told_so():
    *handled, error, _, left, again = execute(HANDLED.format(handler="world.run(len, ())"))
    assert handled == ["handler"]
    assert error.startswith(
        "RuntimeError run() of 'len' was called inside another call of the same"
    )
    assert (left, again) == ("[]", "[0]")


@linux_only
def test_a_signal_handler_can_use_and_close_another_pool_during_a_run():
    handler = "other = Ranks(1); print(other.run(len, (1,))); other.close(); sys.exit(4)"
    *handled, error, _, left, again = execute(HANDLED.format(handler=handler))
    assert handled == ["handler", "[1]"]
    assert (error, left, again) == ("SystemExit 4", "[]", "[0]")


class Asking:
    """An argument whose pickling calls the pool."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        return str, (self.call(),)


def test_a_run_inside_the_pickling_of_an_argument_is_refused_and_harms_nothing(world):
    world.run(len, ())
    pids = world.pids
    with pytest.raises(RuntimeError, match=r"run\(\) of 'len'.* inside another") as told:
        world.run(str, Asking(lambda: world.run(len, ())))
    assert [frame.name for frame in told.traceback][-3:] == ["__reduce__", "<lambda>", "run"]
    with Ranks(1, timeout=PATIENCE) as other:
        assert world.run(str, Asking(lambda: other.run(len, (1,)))) == ["[1]", "[1]"]
    assert world.pids == pids


def test_a_close_inside_the_pickling_of_an_argument_ends_the_ranks(still_running):
    world = Ranks(2, timeout=PATIENCE)
    world.run(len, ())
    pids = world.pids
    with pytest.raises(RankError, match=r"close\(\).* during.*'str'"):
        world.run(str, Asking(world.close))
    assert (still_running(pids, PATIENCE), world.closed) == ([], True)
    world.close()
    with pytest.raises(ValueError, match=r"run\(\) after close"):
        world.run(len, ())


def test_a_close_during_the_start_ends_the_ranks(still_running, monkeypatch):
    world, greet, pids = Ranks(2, timeout=PATIENCE), WorkerPool._greet, []

    def close(pool: WorkerPool, sock, key: bytes) -> None:
        pids[:] = pool.pids
        world.close()
        greet(pool, sock, key)

    monkeypatch.setattr(WorkerPool, "_greet", close)
    with pytest.raises(RankError):
        world.run(len, ())
    assert len(pids) == 2
    assert (still_running(pids, PATIENCE), world.pids) == ([], [])


def test_a_close_of_another_thread_waits_for_the_run_and_a_run_for_its_turn():
    world, begun = Ranks(2, timeout=PATIENCE), threading.Event()
    results: list[object] = []

    def values() -> None:
        try:
            results.append(world.run(lambda rank: rank))
        except ValueError as error:
            results.append(str(error))

    world.run(len, ())
    others = [threading.Thread(target=values), threading.Thread(target=world.close)]

    def starts_others() -> str:
        begun.set()
        for thread in others:
            thread.start()
        return "started"

    assert world.run(lambda text: text, Asking(starts_others)) == ["started"] * 2
    for thread in others:
        thread.join(PATIENCE)
    assert (begun.is_set(), [thread.is_alive() for thread in others]) == (True, [False, False])
    assert results in ([[0, 1]], ["run() after close(); make another Ranks(2)"])


def test_a_second_close_inside_the_first_ends_the_ranks_at_once(still_running, monkeypatch):
    def leave():
        import atexit

        atexit.register(time.sleep, 600)

    world = Ranks(2, timeout=600)
    world.run(leave)
    pids, asked = world.pids, spmd_start.Forked.exit_code

    def close_again(process, seconds: float = 0.0):
        monkeypatch.setattr(spmd_start.Forked, "exit_code", asked)
        world.close()
        return asked(process, seconds)

    monkeypatch.setattr(spmd_start.Forked, "exit_code", close_again)
    world.close()
    assert still_running(pids, PATIENCE) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_close_ends_the_ranks_at_once(still_running):
    caller = os.getpid()

    def leave(rank):
        import atexit

        atexit.register(time.sleep, 600)
        if rank == 0:
            atexit.register(os.kill, caller, signal.SIGINT)

    world = Ranks(2, timeout=600)
    world.run(leave)
    pids = world.pids
    with pytest.raises(KeyboardInterrupt) as told:
        world.close()
    assert frames_of_the_pool(told.value) == ["close"]
    assert still_running(pids, PATIENCE) == []


@pytest.mark.parametrize("step", ["_kill", "exit_code"])
def test_interrupts_of_the_clean_up_leave_nothing_open(still_running, monkeypatch, step):
    world = Ranks(2, timeout=PATIENCE)
    world.run(len, ())
    [pool] = world._pools
    channels, pids = [*pool._tasks.values(), *pool._controls.values()], world.pids
    of = WorkerPool if step == "_kill" else spmd_start.Forked
    made, interrupts = getattr(of, step), [KeyboardInterrupt, KeyboardInterrupt]
    pool._end_in_order = list

    def interrupted(*arguments):
        if interrupts:
            raise interrupts.pop()
        return made(*arguments)

    monkeypatch.setattr(of, step, interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.close()
    assert [channel.fileno() for channel in channels] == [-1] * 4
    assert (still_running(pids, PATIENCE), os.path.exists(pool._folder)) == ([], False)


def frames_of_the_pool(error: BaseException) -> list[str]:
    """Functions of the pool that the traceback shows."""
    folder = os.path.dirname(spmd_pool.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in frames if os.path.dirname(frame.filename) == folder]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_shows_the_line_of_the_caller_alone():
    caller = os.getpid()

    def wait():
        os.kill(caller, signal.SIGINT)
        time.sleep(600)

    with Ranks(2, timeout=600) as world, pytest.raises(KeyboardInterrupt) as told:
        world.run(wait)
    assert [frame.name for frame in told.traceback] == [
        "test_an_interrupt_shows_the_line_of_the_caller_alone",
        "run",
    ]


def test_errors_of_the_pool_show_the_line_of_the_caller_alone(world, failure, stall):
    def shown(error: BaseException) -> list[str]:
        assert error.__suppress_context__ or error.__context__ is None
        return frames_of_the_pool(error)

    assert shown(failure(world, lambda: 1 / 0)) == ["run"]
    assert shown(stall(world, lambda: time.sleep(60), lambda places: all(places.values()))) == [
        "run"
    ]
    with pytest.raises(TypeError) as told:
        world.run(len, (x for x in ()))
    assert frames_of_the_pool(told.value) == []


# --- the time of a transfer


def trickle() -> None:
    """Send the caller a part of a large value now and then, without end."""
    frame = sys._getframe()
    while "tasks" not in frame.f_locals:
        assert frame.f_back is not None, "a rank serves tasks"
        frame = frame.f_back
    connection = frame.f_locals["tasks"]
    os.write(connection.fileno(), struct.pack("!i", 2**30))
    while True:
        os.write(connection.fileno(), bytes(1000))
        time.sleep(0.05)


def test_a_value_that_comes_too_slowly_is_given_up_at_the_deadline(world, stall):
    error = stall(
        world, trickle, lambda places: any(stands_in(place, "trickle") for place in places.values())
    )
    assert isinstance(error, RankTimeoutError)
    assert "did not finish within 1.5 s, which count until every value has come" in str(error)
    assert re.search(r"rank [01]: [\d.,]+ [KM]?i?B of 1\.00 GiB of its value had come", str(error))


@linux_only
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_large_argument_for_a_stopped_rank_is_given_up_at_the_deadline(stall, stopped):
    values = torch.zeros(4_000_000)

    with Ranks(2, timeout=PATIENCE) as world:
        world.run(len, ())
        error = stall(
            world,
            functools.partial(torch.numel, values),
            lambda places: True,
            before=lambda: os.kill(world.pids[stopped], signal.SIGSTOP),
        )
    assert isinstance(error, RankTimeoutError)
    assert error.rank == stopped
    assert f"rank {stopped} did not finish" in str(error)
    assert f"rank {1 - stopped} had returned" in str(error)
    assert re.search(rf"rank {stopped}: it had taken [\d.]+ KiB of 15\.3 MiB", str(error))
