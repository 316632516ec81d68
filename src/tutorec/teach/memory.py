"""How far the memory of a process rises while something is computed."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tutorec._kernels.memory import return_freed_memory

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass
class Peak:
    """The result; 0 until the measurement has ended.

    Attributes:
        growth: Bytes by which the peak exceeds what was allocated at the beginning.
        way: "system": of the whole process, as the operating system reports; "torch": of tensors
            only.
    """

    growth: int = 0
    way: str = "system"


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Measure by how many bytes the memory of this process rises at most.

    Linux records the peak and can reset it. Elsewhere torch's own allocations are
    counted, which leaves out what other libraries take. What was freed before is given back to the
    system where that is possible (glibc), since memory that a process has kept and uses again shows
    in neither measurement. Small blocks may stay: measure something large.

    Example:
        >>> with peak_memory() as peak:
        ...     total = (
        ...         torch.ones(16, 2**20).sum() + torch.ones(24, 2**20).sum()
        ...     )  # one after the other
        >>> round(peak.growth / 2**20 / 32)  # of 64 MiB and 96 MiB, in steps of 32
        3
    """
    gc.collect()
    return_freed_memory()
    peak = Peak()

    if _forget_peak():
        before = status_bytes("VmRSS")
        yield peak
        peak.growth = max(status_bytes("VmHWM") - before, 0)
        return

    peak.way = "torch"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        yield peak
    allocated = 0
    for event in profile.profiler.kineto_results.events():  # pyright: ignore[reportOptionalMemberAccess]
        if event.name() == "[memory]":
            allocated += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak.growth = max(peak.growth, allocated)


def _forget_peak() -> bool:
    """Reset the high-water mark; False where the system has none or does not reset it."""
    try:
        _CLEAR.write_text("5", encoding="ascii")
        return status_bytes("VmHWM") > 0
    except (OSError, ValueError):
        return False


def status_bytes(name: str) -> int:
    """A line of the process's status in bytes."""
    match = re.search(
        rf"^{name}:\s+(\d+) kB$",
        _STATUS.read_text(encoding="ascii", errors="replace"),
        re.MULTILINE,
    )
    if match is None:
        raise ValueError(f"{_STATUS} has no line {name}")
    return int(match[1]) * 1024
