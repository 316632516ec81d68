"""How far a rank has come: its exchanges, in memory that outlives it."""

from __future__ import annotations

import mmap
import os
from collections import deque
from dataclasses import dataclass

_PROGRESS_BYTES = 512  # of each rank
_FILE = "progress"


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
        """What exchange ``number``, from 1, was for; None if not known any more or not yet."""
        index = number - 1 - (self.begun - len(self.latest))
        return self.latest[index] if 0 <= index < len(self.latest) else None


_exchanges = 0
_latest: deque[str] = deque(maxlen=8)
_memory: list[tuple[mmap.mmap, int]] = []


def note(stage: str) -> None:
    """This rank begins an exchange; called before each."""
    global _exchanges
    _exchanges += 1
    _latest.append(stage)
    for memory, start in _memory:
        text = f"{_exchanges}|{'|'.join(_latest)}".encode()
        memory[start : start + _PROGRESS_BYTES] = text[:_PROGRESS_BYTES].ljust(_PROGRESS_BYTES)


def share_progress(folder: str, rank: int, world_size: int) -> mmap.mmap:
    """Memory that a pool's ranks and caller share, through a file that can then be removed.

    Args:
        folder: Of the pool.
        rank: Where this rank writes from now on; the caller says -1 and writes nothing.
        world_size: W, ranks.
    """
    descriptor = os.open(os.path.join(folder, _FILE), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, _PROGRESS_BYTES * world_size)
        memory = mmap.mmap(descriptor, _PROGRESS_BYTES * world_size)
    finally:
        os.close(descriptor)
    _memory[:] = [(memory, _PROGRESS_BYTES * rank)] if rank >= 0 else _memory
    return memory


def read_progress(memory: mmap.mmap) -> dict[int, Progress]:
    """How far each rank has come, by rank."""
    progress = {}
    for rank, start in enumerate(range(0, len(memory), _PROGRESS_BYTES)):
        begun, *latest = (
            memory[start : start + _PROGRESS_BYTES].decode(errors="replace").strip("\0 ").split("|")
        )
        progress[rank] = Progress(int(begun or 0), tuple(latest))
    return progress
