"""Runs programs on a pretended GPU box, each in a fork of this process, which has imported torch
and the library once.

A program finds what it would find in an interpreter of its own: its arguments, folder, environment
and ``__main__``. So do its fork server of ranks and the workers of torchrun: forks of another fork,
made before the program starts. Requests and answers are JSON lines.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

IMPORTED = (
    "IPython.core.interactiveshell matplotlib.pyplot pytest scipy.optimize torch._dynamo "
    "torch.distributed.checkpoint tutorec.spmd.worker tutorec.spmd.start "
    "tutorec.distributed.checkpoint tutorec.distributed.planner.planners "
    "tutorec.distributed.train_pipeline.train_pipelines tutorec.distributed.model_parallel "
    "tutorec.inference.modules tutorec.models.dlrm tutorec.teach.draw"
).split()


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    from tutorec.spmd.start import _share_memory

    _share_memory()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would have one of them"
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Exit code and output of the program."""
    mine, theirs = socket.socketpair()
    server = _forked(lambda: _serve_ranks(theirs), [theirs.fileno()])
    theirs.close()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error, mine:
        program = _forked(
            lambda: _run(request, mine, server), [mine.fileno()], out.fileno(), error.fileno()
        )
        code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        texts = []
        for file in (out, error):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return {"code": code, "out": texts[0], "error": texts[1]}


def _forked(run: Any, keep: list[int], out: int = 2, error: int = 2) -> int:
    """The id of a fork that calls ``run`` and exits as an interpreter does; of the open files it
    has only ``keep``.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(error, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in keep:
                with contextlib.suppress(OSError):
                    os.close(fd)
        run()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        print(end, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# ------------------------------------------------------------------------------------------------
# the ranks' server


def _serve_ranks(connection: socket.socket) -> None:
    """Fork workers of torchrun until a program asks for the fork server of ranks; then become it.

    A request for a worker holds its arguments and environment, and is answered with its pid. A pid
    is answered with the exit code of that worker, null while it runs.
    """
    while True:
        data, fds, *_ = socket.recv_fds(connection, 1 << 20, 2)
        if not data:
            return
        request = json.loads(data)
        if "sys_path" in request:
            break
        answer = _start_worker(request, *fds) if fds else _code_of(request["pid"])
        connection.sendall(json.dumps(answer).encode())
    connection.close()
    os.setsid()
    _become(request["environment"], request["cwd"])
    sys.path[:] = request["sys_path"]
    from tutorec.spmd.start import serve

    serve(fds[0], os.getppid())  # not the caller's pid: the server ends when its parent has ended


def _start_worker(request: dict[str, Any], out: int, error: int) -> int:
    def work() -> None:
        os.setsid()  # torchrun ends the group of its process
        _become(request["environment"], request["cwd"])
        _run_program(request["arguments"])

    pid = _forked(work, [], out, error)
    for fd in (out, error):
        os.close(fd)
    return pid


def _code_of(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


class _Worker:
    """Stands for ``subprocess.Popen`` of a worker of torchrun."""

    def __init__(self, connection: socket.socket, command: Sequence[str], **options: Any) -> None:
        self._connection, self._code = connection, None
        arguments = [word for word in command[1:] if word != "-u"]
        request = {"arguments": arguments, "environment": options["env"], "cwd": os.getcwd()}
        files = [options["stdout"] or 1, options["stderr"] or 2]
        fds = [file if isinstance(file, int) else file.fileno() for file in files]
        socket.send_fds(connection, [json.dumps(request).encode()], fds)
        self.pid = json.loads(connection.recv(64))

    def poll(self) -> int | None:
        if self._code is None:
            self._connection.sendall(json.dumps({"pid": self.pid}).encode())
            self._code = json.loads(self._connection.recv(64))
        return self._code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a worker", timeout)
            time.sleep(0.02)
        return code


class _Server:
    """Stands for ``subprocess.Popen`` of the ranks' server: the first one was forked before the
    program started.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self._connection: socket.socket | None = connection

    def start(self, command: list[str], **options: Any) -> Any:
        from tutorec.spmd.start import _SERVER_CODE

        if self._connection is None or _SERVER_CODE not in command:
            return subprocess.Popen(command, **options)
        boot = {**json.loads(command[-1]), "environment": options["env"], "cwd": os.getcwd()}
        socket.send_fds(self._connection, [json.dumps(boot).encode()], options["pass_fds"])
        self._connection = None
        return self

    def poll(self) -> int | None:
        stat = Path(f"/proc/{self.pid}/stat")  # ended, but not collected by its parent: "Z"
        ended = not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"
        return -signal.SIGKILL if ended else None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        return None


# ------------------------------------------------------------------------------------------------
# the program


def _become(environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules["pretend_cuda"].set_count(int(environment["TUTOREC_PRETEND_GPUS"]))


def _run(request: dict[str, Any], connection: socket.socket, server: int) -> None:
    from tutorec.spmd import start as spmd_start

    known = {"Popen": _Server(connection, server).start}
    names = ("DEVNULL", "PIPE", "TimeoutExpired")
    spmd_start.subprocess = SimpleNamespace(
        **known, **{name: getattr(subprocess, name) for name in names}
    )
    _become(request["environment"], request["cwd"])
    if "torch.distributed.run" in request["arguments"]:
        name = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
        handlers = importlib.import_module(name)
        handlers.Popen = lambda args, **options: _Worker(connection, args, **options)
    _run_program(request["arguments"])


def _run_program(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    elif first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first.endswith(".ipynb"):
        _run_cells(Path(first), *rest)
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def _run_cells(notebook: Path, *replaced: str) -> None:
    """Run a notebook's cells until one fails, with texts of its code replaced: a text, what stands
    for it, and so on. Then compare what they show with the documents, as nbmake does.

    Where texts are replaced, an assertion of a cell that the page leaves out may fail: it is about
    the whole run; and only rows of the documents that no number of the run decides are compared.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    sys.path.insert(1, str(notebook.parents[1] / "book/_ext"))
    import agreement

    os.chdir(notebook.parent)
    sys.argv, sys.path[0] = [""], ""
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) if cell["cell_type"] == "code" else "" for cell in cells]
    for old, new in zip(replaced[::2], replaced[1::2], strict=True):
        assert any(old in text for text in texts), f"no cell of {notebook.name} has {old!r}"
        texts = [text.replace(old, new) for text in texts]
    for number, (cell, text) in enumerate(zip(cells, texts, strict=True)):
        with capture_output() as captured:
            result = shell.run_cell(text)
        print(captured.stdout, end="", flush=True)
        print(captured.stderr, end="", file=sys.stderr, flush=True)
        of_whole_run = replaced and "remove-cell" in cell["metadata"].get("tags", ())
        if not result.success and not (
            of_whole_run and isinstance(result.error_in_exec, AssertionError)
        ):
            sys.exit(f"cell {number} of {notebook.name} failed")
        shown = [{"output_type": "execute_result", "data": o.data} for o in captured.outputs]
        # a shell without a kernel prints the value of a cell, behind a prompt
        text = re.sub(r"^Out\[\d+\]: ", "", captured.stdout, flags=re.MULTILINE)
        text += captured.stderr
        printed = {"output_type": "stream", "name": "stdout", "text": text}
        cell["outputs"] = [printed, *shown]
    problems = agreement.violations(notebook.stem, {"cells": cells})
    if replaced:
        problems = [problem for problem in problems if re.search(r"\((exact|form)\)", problem)]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
