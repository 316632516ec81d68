"""Peak anonymous memory of a call in a process of its own, above what the process held before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import Report, compare_memory

_SELF = Path("/proc/self")


def measurable() -> bool:
    """Whether this system tells a process its peak and lets it reset it: Linux does."""
    return (_SELF / "clear_refs").exists()


def resident() -> int:
    """Bytes of anonymous memory that this process holds now."""
    return _status("RssAnon")


def peak_during(call: Callable[[], object]) -> int:
    """Bytes of anonymous memory at the highest point of a call.

    Pages of files are left out: the system lends them and takes them back. The peak is exact as
    long as their number stays, so that a process should have used its libraries once before.

    Args:
        call: what is measured.

    Returns:
        Bytes that the process held, those from before the call included.
    """
    (_SELF / "clear_refs").write_text("5", encoding="ascii")
    call()
    return _status("VmHWM") - _status("RssFile") - _status("RssShmem")


def bytes_of(expression: str) -> int:
    """Evaluate an expression such as ``"package.module:function('a', 1)"`` in a new interpreter.

    The new interpreter finds modules where this process finds them.

    Raises:
        RuntimeError: the expression fails; the message ends with what it wrote to stderr.
    """
    module, _, call = expression.partition(":")

    script = f"import {module} as m; print(m.{call})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
    )

    if process.returncode:
        raise RuntimeError(f"measuring memory of {expression} failed:\n{process.stderr.strip()}")
    return int(process.stdout.splitlines()[-1])


def add_peaks(
    report: Report, title: str, expression: str, allowed: float, most: float | None, runs: int
) -> None:
    """Add how many times as many bytes an expression gives as are allowed, in new processes.

    Args:
        report: What it is added to.
        title: Of the comparison.
        expression: As of `bytes_of`.
        allowed: Bytes.
        most: What the ratio may be; None for what is only shown.
        runs: How many processes.
    """
    peaks = [float(bytes_of(expression)) for _ in range(runs)]
    report.comparisons.append(compare_memory(title, peaks, [allowed] * runs, most))


def _status(field: str) -> int:
    lines = (_SELF / "status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
