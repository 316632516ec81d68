"""What a process knows of the rank that it is, and the handles of objects that stay on the ranks."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tutorec._spmd_device import device

if TYPE_CHECKING:
    import torch

__all__ = ["Kept", "RankWorld", "WorkerContext", "become_rank", "name_of", "rank_side", "restore_world", "take_dropped"]


@dataclass
class WorkerContext:
    """What a rank process knows about itself.

    Args:
        token: Names the pool and its generation; a handle of another one is refused.
        rank: This process's rank.
        world_size: W, ranks in the pool.
        kept: Objects kept by :meth:`RankWorld.keep`, by key.
        run: Number of the run in progress, from 1.
        places: How often each place in the code has called ``keep`` in this run.
        process: This process's id; a fork of it is no rank.
    """

    token: str
    rank: int
    world_size: int
    kept: dict[str, Any] = field(default_factory=dict)
    run: int = 0
    places: dict[str, int] = field(default_factory=dict)
    process: int = field(default_factory=os.getpid)


# The rank that this process is, if it is one; and the generations of pools that this process owns and that still run.
_side: list[WorkerContext] = []
live_tokens: set[str] = set()
# The caller has one handle for each key, and tells the ranks when it is garbage.
_handles: weakref.WeakValueDictionary[tuple[str, str], Kept] = weakref.WeakValueDictionary()
_dropped: dict[str, list[str]] = {}


def become_rank(side: WorkerContext) -> None:
    """Make this process the rank ``side``."""
    _side[:] = [side]


def rank_side() -> WorkerContext | None:
    """The rank that this process is, or None in a caller's process."""
    return _side[0] if _side else None


@dataclass(frozen=True)
class Kept:
    """A handle of an object that lives on the ranks: passed to a later ``run`` it is that object, on each rank its own.

    Handles are made by ``world.keep(obj)`` inside a run. Ranks that keep at the same place of the code make the
    same handle, so that the one that any rank returned stands for the objects of all.

    Args:
        token: The pool's generation.
        key: The run and the place in the code that kept the object.
        kind: Type name of the object, for the printed form.
        where: The run and the place as a reader knows them.
    """

    token: str
    key: str
    kind: str = field(compare=False)
    where: str = field(compare=False)

    def __repr__(self) -> str:
        ended = "" if self.token in live_tokens or rank_side() is not None else ", ranks ended"
        return f"<{self.kind} kept on the ranks by {self.where}{ended}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, str, str]]:
        side = rank_side()
        if self.token not in live_tokens and (side is None or side.token != self.token):
            raise ValueError(
                f"{self!r} is a handle of ranks that have ended (the pool was closed, or a rank failed and all were "
                "restarted), so what it stood for is lost: run the function that keeps it again"
            )
        return _restore_kept, (self.token, self.key, self.kind, self.where)


def _restore_kept(token: str, key: str, kind: str, where: str) -> Any:
    """The kept object itself on a rank of the pool, the handle elsewhere."""
    side = rank_side()
    if side is None or token in live_tokens:
        return _caller_handle(token, key, kind, where)
    if side.token != token:
        raise ValueError(f"the handle of a {kind} kept by {where} belongs to another pool of ranks than this one")
    if key not in side.kept:
        raise ValueError(
            f"rank {side.rank} did not keep the {kind} that another rank kept by {where}: call keep on every rank"
        )
    return side.kept[key]


def _caller_handle(token: str, key: str, kind: str, where: str) -> Kept:
    """The caller's one handle for ``key``; what it stands for is dropped on the ranks when it is garbage."""
    handle = _handles.get((token, key))
    if handle is None:
        handle = _handles[token, key] = Kept(token, key, kind, where)
        weakref.finalize(handle, _drop, token, key).atexit = False
    return handle


def _drop(token: str, key: str) -> None:
    if token in live_tokens:
        _dropped.setdefault(token, []).append(key)


def take_dropped(token: str) -> list[str]:
    """Keys that the pool's ranks may forget; each is handed out once."""
    return _dropped.pop(token, [])


class RankWorld:
    """What the pool's ``world`` is inside a run: this rank's view of it.

    Args:
        side: The rank that this process is.
        hosts: Simulated hosts.
    """

    def __init__(self, side: WorkerContext, hosts: int) -> None:
        self._side = side
        self.rank: int = side.rank
        self.world_size: int = side.world_size
        self.hosts: int = hosts

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}>"

    def keep(self, obj: Any) -> Kept:
        """Keep ``obj`` on this rank and return a handle that later runs resolve to it."""
        side = self._side
        frame = sys._getframe(1)
        # The place, not a mere count: ranks that keep in different order or number still mean the same objects.
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        nth = side.places[place] = side.places.get(place, 0) + 1
        key = f"{side.run}:{place}:{nth}"
        side.kept[key] = obj
        where = f"run {side.run} in {frame.f_code.co_name}, line {frame.f_lineno}" + (
            f", number {nth}" if nth > 1 else ""
        )
        return Kept(side.token, key, type(obj).__name__, where)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return device()

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Refuse: a rank is already inside a run."""
        raise RuntimeError(
            f"run() was called inside rank {self.rank}: call {name_of(fn)}() directly, or start Ranks there"
        )


def restore_world(token: str, hosts: int) -> RankWorld:
    """This rank's view of the pool that was pickled."""
    side = rank_side()
    if side is None or side.token != token:
        raise ValueError("a Ranks object travels to its own ranks only: start another Ranks where it is needed")
    return RankWorld(side, hosts)


def name_of(fn: Any) -> str:
    """A function's name for messages."""
    return getattr(fn, "__qualname__", None) or type(fn).__name__
