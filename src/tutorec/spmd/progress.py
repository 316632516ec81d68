"""How far a rank has come: its exchanges, in memory that outlives it; ``messages.py`` reads it."""

from __future__ import annotations

import mmap
import os
from collections import deque

PROGRESS_BYTES = 512  # of each rank: its number of exchanges and what the last were for, split by |
_FILE = "progress"
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
        memory[start : start + PROGRESS_BYTES] = text[:PROGRESS_BYTES].ljust(PROGRESS_BYTES)


def share_progress(folder: str, rank: int, world_size: int) -> mmap.mmap:
    """Memory that a pool's ranks and caller share, through a file that can then be removed.

    Args:
        folder: Of the pool.
        rank: Where this rank writes from now on; the caller says -1 and writes nothing.
        world_size: W, ranks.
    """
    descriptor = os.open(os.path.join(folder, _FILE), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.truncate(descriptor, PROGRESS_BYTES * world_size)
        memory = mmap.mmap(descriptor, PROGRESS_BYTES * world_size)
    finally:
        os.close(descriptor)

    _memory[:] = [(memory, PROGRESS_BYTES * rank)] if rank >= 0 else _memory
    return memory
