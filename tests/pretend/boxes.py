"""Run a program on a pretended GPU box."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from printed import own_lines

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

_servers: list[subprocess.Popen[str]] = []


def environment_of(gpus: int) -> dict[str, str]:
    """The environment of a process on such a machine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    paths = [str(HERE / "site"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    numbers = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    path = os.pathsep.join(filter(None, paths))
    return {
        **kept,
        **numbers,
        "PYTHONPATH": path,
        "TUTOREC_PRETEND_GPUS": str(gpus),
        "MPLBACKEND": "Agg",
    }


def on_box(gpus: int, arguments: Sequence[str | Path]) -> str:
    """What ``python ARGUMENTS`` prints on a machine with so many pretended GPUs; a notebook's cells
    are run in order.

    It runs in a fork of an interpreter that has imported torch: see ``box_server.py``.

    Raises:
        AssertionError: It failed; the message is what it printed.
    """
    if not _servers:
        command = [sys.executable, HERE / "box_server.py"]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _servers.append(subprocess.Popen(command, env=environment_of(0), **options))
    server = _servers[0]
    assert server.stdin is not None and server.stdout is not None, "pipes were asked for"
    request = {
        "arguments": [*map(str, arguments)],
        "environment": environment_of(gpus),
        "cwd": str(ROOT),
    }
    try:
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = json.loads(server.stdout.readline())
    except BaseException:  # what it runs would answer the next request
        end_server()
        raise
    return _printed(gpus, answer["code"], answer["out"], answer["error"])


@atexit.register
def end_server() -> None:
    """End the interpreter whose forks run the programs."""
    for server in _servers:
        server.kill()
        server.communicate()
    _servers.clear()


def in_an_interpreter(gpus: int, arguments: Sequence[str | Path]) -> str:
    """The same as :func:`on_box` by a fresh interpreter, as a reader starts it."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment_of(gpus), capture_output=True, text=True, check=False
    )
    return _printed(gpus, done.returncode, done.stdout, done.stderr)


def _printed(gpus: int, code: int, out: str, error: str) -> str:
    assert code == 0, f"on {gpus} pretended GPUs:\n{out[-6000:]}\n{error[-6000:]}"
    return own_lines(out)


def pytest_on_box(gpus: int, *arguments: str | Path) -> str:
    """What ``pytest ARGUMENTS`` prints there."""
    return on_box(
        gpus, ["-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *arguments]
    )
