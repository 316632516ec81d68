"""Who waits for whom under torchrun: when a collective has waited too long, its rank asks where the others are.

There is no caller that could ask. Each rank has a thread that looks once a second, through the store that torchrun
keeps, whether another one asks, and answers with the place where its main thread stands.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tutorec._spmd_progress import operations_begun
from tutorec._spmd_report import is_peer_loss, stall_message, whereabouts, whereabouts_of_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Watch"]

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_TIMEOUT = re.compile(r"Timed out waiting|Application timeout caused pair closure")


class Watch:
    """This rank's part: it answers others, and adds a note to an uncaught error of a collective that waited too long.

    Args:
        store: What the ranks share.
        rank: This rank.
        world_size: W.
        timeout: Seconds that a collective may take.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout: float) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._store = PrefixStore("tutorec watch", store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._raised = ""
        self._waited: dict[str, Any] | None = None  # where a collective of this rank has waited too long
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="tutorec watch", daemon=True)
        self._thread.start()
        self._previous, sys.excepthook = sys.excepthook, self._uncaught

    def end(self) -> None:
        """At the end of the process: say that this rank has left."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left {self._rank}", json.dumps([self._raised, self._waited]))
        self._ended.set()
        self._thread.join(_LOOK_SECONDS)

    def _answer(self) -> None:
        main_thread, answered = threading.main_thread().ident or 0, 0
        while not self._ended.wait(_LOOK_SECONDS):
            try:
                question = self._store.add("questions", 0)
                if question > answered:
                    frame = sys._current_frames().get(main_thread)
                    place = {**whereabouts(frame, in_a_run=False), "collectives": operations_begun()}
                    self._store.set(f"{question} {self._rank}", json.dumps(self._waited or place))
                    answered = question
            except RuntimeError:  # The store has ended, and with it the program.
                return

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = str(error) if isinstance(error, RuntimeError) else ""
        late = bool(_TIMEOUT.search(text))
        if late or is_peer_loss({"kind": kind.__name__, "text": text}):
            self._waited = {**whereabouts_of_error(trace), "collectives": operations_begun()}
            with contextlib.suppress(RuntimeError):  # of the store
                error.add_note(self._explain(late))
        else:
            self._raised = kind.__name__
        self._previous(kind, error, trace)

    def _explain(self, late: bool) -> str:
        """Who stalled, left or waits, in words."""
        places, left = self._ask()
        raised = [f"rank {rank} had raised {kind}" for rank, kind in left.items() if kind]
        if raised:
            return "; ".join(raised)
        if not late:
            who = ", ".join(map(str, left)) or "of another process"
            return (
                f"rank {who} had ended, and rank {self._rank} still waited for it: every rank must make as many steps "
                "as the others"
            )
        places[self._rank] = self._waited
        doing = f"the collective that rank {self._rank} waits in"
        return stall_message(doing, self._timeout, dict(sorted(places.items())), self._world_size)[1]

    def _ask(self) -> tuple[dict[int, dict[str, Any] | None], dict[int, str]]:
        """Places of the other ranks, None of a silent one; and the ranks that have left, with what they raised."""
        number = self._store.add("questions", 1)
        places: dict[int, dict[str, Any] | None] = {}
        left: dict[int, str] = {}
        missing = set(range(self._world_size)) - {self._rank}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while missing and time.monotonic() < deadline:
            for rank in sorted(missing):
                if self._store.check([f"{number} {rank}"]):
                    places[rank] = json.loads(self._store.get(f"{number} {rank}"))
                elif self._store.check([f"left {rank}"]):
                    raised, waited = json.loads(self._store.get(f"left {rank}"))
                    if waited is None:
                        left[rank] = raised
                    else:  # Its wait ended, too.
                        places[rank] = waited
            missing -= places.keys() | left.keys()
            time.sleep(0.05)
        return {**places, **dict.fromkeys(missing)}, left
