"""Ranks that failed or wait: tracebacks, where each rank is, and who waits for whom."""

from __future__ import annotations

import contextlib
import dis
import json
import linecache
import mmap
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from tutorec._text import named_ranks
from tutorec.errors import RankError
from tutorec.spmd.rank import PROGRESS_BYTES

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_FILE_LINE = re.compile(r'^(\s*)File "([^"]+)", line (\d+)(, in .+)?$')
_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-")
_PACKAGES = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
_PICKLES = re.compile(r"[/\\](?:cloudpickle|multiprocess)[/\\]")
# What gloo, NCCL and torch's stores say when the other side has gone; never the cause by itself.
_PEER_LOSS = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Connection refused|Socket closed|Connection was "
    r"likely closed"
    r"|NCCL error|ncclRemoteError|ncclSystemError|connectFullMesh failed|Connect timeout",
    re.IGNORECASE,
)
_NO_TRANSFERS: Mapping[int, str] = {}
_HARNESS = os.path.dirname(os.path.abspath(__file__))
_LIBRARY = os.path.dirname(_HARNESS)
_DISTRIBUTED = os.path.join("torch", "distributed")


def failure_traceback(error: BaseException) -> str:
    """The traceback of an exception on this rank, without the harness's frames."""
    trace = error.__traceback__
    while trace is not None and _is_harness(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.TracebackException(type(error), error, trace, compact=True).format()
    return "".join(lines)


def below_the_pool(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame that is not the pool's own work; None if all of it is."""
    trace = error.__traceback__
    stdlib = sysconfig.get_path("stdlib") + os.sep
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        installed = _PACKAGES.match(path)
        in_stdlib = path.startswith((stdlib, "<frozen")) and not installed
        if not (_is_harness(path) or in_stdlib or (installed and _PICKLES.search(path))):
            break
        trace = trace.tb_next

    return trace


def _is_harness(filename: str) -> bool:
    return os.path.dirname(filename) == _HARNESS


def whereabouts(frame: FrameType | None, in_a_run: bool = True) -> dict[str, Any]:
    """Where a thread is: its stack as text, and the collective that it is inside of, if any.

    Args:
        frame: Of the thread.
        in_a_run: It counts from the function that a pool runs.
    """
    stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
    calls = [
        index
        for index, entry in enumerate(stack)
        if entry.name == "_call" and _is_harness(entry.filename)
    ]
    if frame is None or (in_a_run and not calls):
        return {"busy": False, "stack": "", "collective": None}
    return _standing(list(stack)[calls[-1] + 1 :] if calls else list(stack), _called_wait(frame))


def _standing(frames: list[traceback.FrameSummary], waits: str | None) -> dict[str, Any]:
    frames = [entry for entry in frames if not entry.filename.startswith("<frozen")]
    inside = [
        e
        for e in frames
        if _DISTRIBUTED in e.filename and not e.filename.endswith("c10d_logger.py")
    ]
    collective = inside[0].name if inside else waits
    # torch's own frames below the call say nothing about the caller's code.
    visible = (
        frames if not inside else [e for e in frames if _DISTRIBUTED not in e.filename] + inside[:1]
    )

    return {
        "busy": True,
        "stack": "".join(traceback.format_list(visible)),
        "collective": collective,
    }


def _called_wait(frame: FrameType) -> str | None:
    """``wait`` if the frame calls ``something.wait(...)``: a collective begun earlier."""
    name = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset >= frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = instruction.argval

    return "wait" if name == "wait" else None


def scrub(text: str) -> str:
    """Remove this machine's folders from a traceback, and add the lines of cells.

    Example:
        >>> packages = "/home/me/env/lib/python3.11/site-packages"
        >>> print(scrub(f'  File "{packages}/torch/nn/x.py", line 7, in forward'))
          File "torch/nn/x.py", line 7, in forward
    """
    lines = text.splitlines()
    out = []
    for index, line in enumerate(lines):
        match = _FILE_LINE.match(line)
        if match is None:
            out.append(line.replace("__main__.", ""))
            continue

        indent, path, number, name = match.groups()
        out.append(f"{indent}{_short_name(path)}, line {number}{name or ''}")
        has_source = index + 1 < len(lines) and lines[index + 1].startswith(indent + "  ")
        # A rank cannot read a notebook's cells, the caller can.
        source = "" if has_source else linecache.getline(path, int(number)).strip()
        if source:
            out.append(f"{indent}  {source}")

    return "\n".join(out)


def _short_name(path: str) -> str:
    """A file's name as a reader knows it, or the number of the cell."""
    if _CELL.search(path):
        return _cell_name(path)
    if path.startswith("<"):
        return f'File "{path}"'

    installed = _PACKAGES.match(path)
    if installed:
        short = path[installed.end() :]
    elif path.startswith(_LIBRARY + os.sep):
        short = os.path.join("tutorec", os.path.relpath(path, _LIBRARY))
    elif path.startswith(sysconfig.get_path("stdlib") + os.sep):
        short = os.path.join("python", os.path.relpath(path, sysconfig.get_path("stdlib")))
    elif path.startswith(working_folder() + os.sep):
        short = os.path.relpath(path, working_folder())
    else:
        short = os.path.join(*path.split(os.sep)[-2:])

    return f'File "{short}"'


def working_folder() -> str:
    """The current folder, or the root of the file system when the current one was deleted."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return os.sep


def _cell_name(path: str) -> str:
    """``Cell In[3]`` where the notebook's shell knows the cell, else ``Cell``."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    try:
        label, number = shell.compile.format_code_name(path)  # pyright: ignore[reportOptionalMemberAccess]
    except (AttributeError, TypeError, ValueError):
        return "Cell"

    return f"{label} {number}"


def is_peer_loss(failure: Mapping[str, Any]) -> bool:
    """Whether an exception only says that another rank has gone.

    Example:
        >>> is_peer_loss(
        ...     {"kind": "RuntimeError", "text": "Connection closed by peer [127.0.0.1]:4711"}
        ... )
        True
        >>> is_peer_loss({"kind": "ValueError", "text": "table 'item' has 0 rows"})
        False
    """
    return failure["kind"] not in ("ValueError", "TypeError", "KeyError") and bool(
        _PEER_LOSS.search(failure["text"])
    )


def first_failure(failures: Mapping[int, Mapping[str, Any]]) -> int:
    """The rank to blame: a death before an exception before a lost peer; the earliest first."""

    def order(rank: int) -> tuple[int, float, int]:
        failure = failures[rank]
        same = [
            f["when"]
            for f in failures.values()
            if (f["kind"], f["text"]) == (failure["kind"], failure["text"])
        ]
        severity = 0 if failure["kind"] == "death" else 2 if is_peer_loss(failure) else 1

        return severity, min(same), rank

    return min(failures, key=order)


def raised(rank: int, failure: dict[str, Any], doing: str) -> RankError:
    """An exception of a rank, for the caller."""
    trace = scrub(failure["traceback"])
    text = scrub(f"{failure['kind']}: {failure['text']}" if failure["text"] else failure["kind"])
    between = failure.get("between")
    where = f"between runs ({between}), by a signal handler" if between else doing
    return RankError(f"rank {rank} raised {where}: {text}\n\n{trace}", rank, trace)


def ending(code: int) -> str:
    """Text of how a process ended.

    Example:
        >>> ending(1), ending(-9)
        ('ended with exit code 1', 'was killed by SIGKILL (signal 9)')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "a signal"
    return f"was killed by {name} (signal {-code})"


def death_message(rank: int, code: int | None, doing: str, server_end: str = "") -> str:
    """The message for a rank whose process ended.

    Args:
        rank: The rank.
        code: Its exit code, minus the signal's number.
        doing: The function and the number of the run.
        server_end: How the fork server ended, where it took the rank with it.

    Example:
        >>> print(death_message(1, 3, "'train' (run 2)"))
        rank 1 died in 'train' (run 2): its process ended with exit code 3 and no exception
    """
    if server_end:
        how = (
            f"the fork server, which starts the ranks of this process, {server_end}, and the "
            "kernel ended all ranks with it; a further run starts a new one"
        )
    elif code is not None and code < 0:
        hints = {
            "SIGKILL": "; often the operating system's answer to too little memory",
            "SIGSEGV": "; a crash in compiled code",
            "SIGABRT": "; compiled code gave up, its message is on stderr",
        }
        hint = next((hint for name, hint in hints.items() if name in ending(code)), "")
        how = f"its process {ending(code)}{hint}"
    elif code is None:
        how = "its process still runs but no longer talks to its caller"
    else:
        how = f"its process {ending(code)} and no exception"

    return f"rank {rank} died in {doing}: {how}"


def other_threads() -> dict[str, str]:
    """Where the threads are that the end of this process waits for: a stack for each name."""
    frames = sys._current_frames()
    return {
        thread.name: "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.daemon and thread.ident in frames
    }


def end_message(rank: int, timeout: float, state: Mapping[str, Any] | None) -> str:
    """The message for a rank that was killed because its exit took too long.

    Args:
        rank: The rank.
        timeout: Seconds that were allowed.
        state: Its :func:`whereabouts` with its :func:`other_threads`; None if it did not answer.
    """
    if state is None:
        where = "it is silent (the process is stopped, or compiled code holds Python's lock)"
    elif state["threads"]:
        stacks = (
            f"thread {name!r}, which is here:\n{scrub(stack)}"
            for name, stack in state["threads"].items()
        )
        where = "it waited for its " + "\nand for its ".join(stacks)
    else:
        where = f"it was here:\n{_stack(state)}"

    return (
        f"rank {rank} did not end within {timeout:g} s of close() and was killed, so what it had "
        f"not written is lost: {where}\n"
        "stop its threads and finish such work in a run, before close(), or give Ranks more "
        "seconds (timeout)"
    )


def operations_begun() -> int | None:
    """Operations that the default group began on this rank; None without a counting group."""
    try:
        import torch.distributed as dist

        # The counter is torch's own and may go: it only adds to a message.
        group: Any = dist.group.WORLD
        return None if group is None else int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, ValueError):
        return None


@dataclass(frozen=True)
class Progress:
    """Exchanges of one rank.

    Args:
        begun: How many.
        latest: What the last of them were for, the newest last.
    """

    begun: int
    latest: tuple[str, ...]

    def stage(self, number: int) -> str | None:
        """The purpose of exchange ``number``, from 1; None if it is not recorded."""
        index = number - 1 - (self.begun - len(self.latest))
        return self.latest[index] if 0 <= index < len(self.latest) else None


def read_progress(memory: mmap.mmap) -> dict[int, Progress]:
    """Progress of each rank, by rank."""
    progress = {}
    for rank, start in enumerate(range(0, len(memory), PROGRESS_BYTES)):
        begun, *latest = (
            memory[start : start + PROGRESS_BYTES].decode(errors="replace").strip("\0 ").split("|")
        )
        progress[rank] = Progress(int(begun or 0), tuple(latest))

    return progress


def uneven_exchanges(ranks: Mapping[int, Progress]) -> tuple[str, list[int]]:
    """Text of the difference between ranks, or empty; and who skipped a backward.

    Example:
        >>> went_on = Progress(
        ...     4, ("input sizes", "input ids", "output rows", "output gradients")
        ... )
        >>> skipped = Progress(4, ("input sizes", "input ids", "output rows", "input sizes"))
        >>> uneven_exchanges({0: went_on, 1: skipped})
        ("exchange 4 was 'output gradients' on rank 0 and 'input sizes' on rank 1: ...", [1])
    """
    last = max(progress.begun for progress in ranks.values())
    for number in range(max(1, last - 8), last + 1):
        stages = {
            rank: stage
            for rank, progress in ranks.items()
            if (stage := progress.stage(number)) is not None
        }
        if len(set(stages.values())) > 1:
            where = " and ".join(f"{stage!r} on rank {rank}" for rank, stage in stages.items())
            skipped = [rank for rank, stage in stages.items() if not stage.endswith("gradients")]
            if len(skipped) == len(stages):
                return f"exchange {number} was {where}", []

            who = ", ".join(map(str, skipped))
            return f"exchange {number} was {where}: rank {who} skipped a backward", skipped

    if len({progress.begun for progress in ranks.values()}) > 1:
        counts = (
            f"rank {rank} had begun {progress.begun} exchanges, the last for "
            f"{(progress.latest or ('nothing',))[-1]!r}"
            for rank, progress in ranks.items()
        )
        return ", ".join(counts), []
    return "", []


def uneven_message(rank: int, doing: str, uneven: str) -> str:
    """The message if gloo ended ``rank`` and the ranks had not begun the same exchanges."""
    return (
        f"the ranks were at different exchanges in {doing}: {uneven}; gloo ended rank {rank} "
        "(SIGABRT), which received more than it waited for; every rank must go forward and "
        "backward as often as the others, in the same order (no_grad, a detached loss or "
        "`continue` on one rank skips a backward)"
    )


def stall_message(
    doing: str,
    timeout: float,
    states: Mapping[int, Mapping[str, Any] | None],
    world_size: int,
    transfers: Mapping[int, str] = _NO_TRANSFERS,
) -> tuple[int, str]:
    """The message about ranks that stalled, where, and ranks that only waited.

    Args:
        doing: The function and the number of the run.
        timeout: Seconds that were allowed.
        states: For each rank that did not finish: its :func:`whereabouts`, or None where it did not
            answer.
        world_size: W, ranks in the pool.
        transfers: For each rank with a message under way: how far that has come.

    Returns:
        The rank to blame and the message.
    """
    silent = [rank for rank, state in states.items() if state is None]
    waiting = {
        rank: state for rank, state in states.items() if state is not None and state["collective"]
    }
    late = [rank for rank in transfers if rank not in silent]
    stalled = [rank for rank in states if rank not in {*waiting, *silent, *late}]
    returned = [rank for rank in range(world_size) if rank not in states]
    lines = []
    if silent:
        lines.append(
            f"{named_ranks(silent)} did not finish {doing} within {timeout:g} s and is silent: not "
            "even the thread that answers questions runs (the process is stopped, or compiled "
            "code holds Python's lock)"
        )
    if stalled:
        lines.append(f"{named_ranks(stalled)} stalled: {doing} did not finish within {timeout:g} s")
    if late:
        lines.append(
            f"{doing} did not finish within {timeout:g} s, which count until every value has come: "
            "send and return less, leave it on the ranks with world.keep, or give Ranks more "
            "seconds (timeout)"
        )

    if not lines:
        lines.append(_uneven(doing, timeout, waiting, returned))
    lines += [f"rank {rank}: {transfer}" for rank, transfer in transfers.items()]
    for rank in stalled:
        lines.append(f"rank {rank} is here:\n{_stack(states[rank])}")
    for rank, state in waiting.items():
        count = state.get("collectives")
        begun = f" (operation {count} of its group)" if count is not None else ""
        lines.append(f"rank {rank} only waits, in {state['collective']}{begun}:\n{_stack(state)}")

    if returned and (silent or stalled or late):
        lines.append(f"{named_ranks(returned)} had returned")
    return (silent or stalled or late or list(waiting))[0], "\n".join(lines)


def _uneven(
    doing: str, timeout: float, waiting: Mapping[int, Mapping[str, Any]], returned: Sequence[int]
) -> str:
    """First line when nobody stalls: the ranks did not call the same collectives."""
    where = ", ".join(
        f"rank {rank} waits in {state['collective']}" for rank, state in waiting.items()
    )
    other = (
        f"{named_ranks(returned)} returned without that call"
        if returned
        else "no rank is on its way to join"
    )
    return (
        f"{doing} did not finish within {timeout:g} s: {where}, and {other}; "
        "every rank must call the same collectives in the same order"
    )


def _stack(state: Mapping[str, Any] | None) -> str:
    return scrub(state["stack"]) if state and state["stack"] else "  (outside the function)"


_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_TIMEOUT = re.compile(r"Timed out waiting|Application timeout caused pair closure")


class Watch:
    """This rank's side: answers others, and notes who was late on an uncaught timeout.

    Args:
        store: What the ranks share.
        rank: This rank.
        world_size: W.
        timeout: Seconds that a collective may take.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._store = PrefixStore("tutorec watch", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._raised = ""
        # where a collective of this rank has waited too long
        self._waited: dict[str, Any] | None = None
        self._process = os.getpid()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="tutorec watch", daemon=True)
        self._thread.start()
        self._previous = sys.excepthook
        sys.excepthook = self._uncaught

    def end(self) -> None:
        """At the end of the process: say that this rank has left; a fork of it has not."""
        if self._process != os.getpid():
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left {self._rank}", json.dumps([self._raised, self._waited]))
        self._ended.set()
        self._thread.join(_LOOK_SECONDS)

    def _answer(self) -> None:
        main_thread = threading.main_thread().ident or 0
        answered = 0
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                question = self._store.add("questions", 0)
                if question > answered:
                    frame = sys._current_frames().get(main_thread)
                    state = {
                        **whereabouts(frame, in_a_run=False),
                        "collectives": operations_begun(),
                    }
                    self._store.set(f"{question} {self._rank}", json.dumps(self._waited or state))
                    answered = question
            except RuntimeError:  # The store has ended, and with it the program.
                return

    def _uncaught(
        self, error_type: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._process != os.getpid():
            self._previous(error_type, error, trace)
            return
        text = str(error) if isinstance(error, RuntimeError) else ""
        late = bool(_TIMEOUT.search(text))
        if late or is_peer_loss({"kind": error_type.__name__, "text": text}):
            state = _standing(list(traceback.extract_tb(trace)), "wait")
            self._waited = {**state, "collectives": operations_begun()}
            with contextlib.suppress(RuntimeError):  # of the store
                error.add_note(self._explain(late))
        else:
            self._raised = error_type.__name__

        self._previous(error_type, error, trace)

    def _explain(self, late: bool) -> str:
        """Text of the ranks that stalled, left or wait."""
        states, left = self._ask()
        raised = [
            f"rank {rank} had raised {exception_name}"
            for rank, exception_name in left.items()
            if exception_name
        ]
        if raised:
            return "; ".join(raised)
        if not late:
            who = ", ".join(map(str, left)) or "of another process"
            return (
                f"rank {who} had ended, and rank {self._rank} still waited for it: every rank must "
                "make as many steps as the others"
            )

        states[self._rank] = self._waited
        doing = f"the collective that rank {self._rank} waits in"
        return stall_message(doing, self._timeout, dict(sorted(states.items())), self._world_size)[
            1
        ]

    def _ask(self) -> tuple[dict[int, dict[str, Any] | None], dict[int, str]]:
        """Where the other ranks are, None for a silent one; those that left, and their errors."""
        number = self._store.add("questions", 1)
        states: dict[int, dict[str, Any] | None] = {}
        left: dict[int, str] = {}
        missing = set(range(self._world_size)) - {self._rank}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"{number} {rank}"]):
                    states[rank] = json.loads(self._store.get(f"{number} {rank}"))
                elif self._store.check([f"left {rank}"]):
                    raised, waited = json.loads(self._store.get(f"left {rank}"))
                    if waited is None:
                        left[rank] = raised
                    else:  # Its wait ended, too.
                        states[rank] = waited
            missing -= states.keys() | left.keys()
            time.sleep(0.05)

        return {**states, **dict.fromkeys(missing)}, left
