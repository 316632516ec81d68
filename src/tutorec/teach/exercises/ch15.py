"""Exercises of chapter 15: the time of a step with two messages, and a pipeline of two stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _two_windows(backward: float, forward: float, rows: float, ids: float) -> float:
    """Ids go on travelling while the rank waits for rows."""
    forward_ends = max(backward, rows) + forward
    return max(forward_ends, ids)


def _both_waits(backward: float, forward: float, rows: float, ids: float) -> float:
    waits = max(0.0, rows - backward) + max(0.0, ids - backward - forward)
    return backward + forward + waits


_Batches = Iterable[Any]
_Send = Callable[[Any], Any]
_Train = Callable[[Any, Any], Any]


def _rows_ahead(batches: _Batches, send: _Send, look_up: _Send, train: _Train) -> Iterator[Any]:
    """Rows of the next batch and ids of the one after it travel while a batch is trained."""
    source = iter(batches)
    batch = next(source, None)
    following = next(source, None)
    rows = look_up(send(batch).wait()) if batch is not None else None
    ids = send(following) if following is not None else None

    while batch is not None and rows is not None:
        rows_here = rows.wait()
        rows = look_up(ids.wait()) if ids is not None else None
        last = next(source, None)
        ids = send(last) if last is not None else None
        yield train(batch, rows_here)
        batch = following
        following = last


def _plain(batches: _Batches, send: _Send, look_up: _Send, train: _Train) -> Iterator[Any]:
    """Nothing travels while a batch is trained."""
    for batch in batches:
        yield train(batch, look_up(send(batch).wait()).wait())


def _ids_ahead(batches: _Batches, send: _Send, look_up: _Send, train: _Train) -> Iterator[Any]:
    """Only ids travel while a batch is trained."""
    source = iter(batches)
    flight = deque((batch, send(batch)) for batch in islice(source, 2))
    while flight:
        batch, ids = flight.popleft()
        rows = look_up(ids.wait())
        flight += ((following, send(following)) for following in islice(source, 1))
        yield train(batch, rows.wait())


def _not_drained(batches: _Batches, send: _Send, look_up: _Send, train: _Train) -> Iterator[Any]:
    """Stops when the batches end, with two of them untrained."""
    flight: deque[list[Any]] = deque()
    for batch in batches:
        flight.append([batch, send(batch)])
        if len(flight) == 2:
            flight[0][1] = look_up(flight[0][1].wait())
        elif len(flight) == 3:
            first, rows = flight.popleft()
            rows = rows.wait()
            flight[0][1] = look_up(flight[0][1].wait())
            yield train(first, rows)


@dataclass
class _Sent:
    """A message of a batch, which knows how many batches were trained while it travelled."""

    batch: int
    kind: str
    trained: list[int]
    travelled: dict[tuple[str, int], int]
    is_here: bool = False

    def __post_init__(self) -> None:
        self.before = len(self.trained)

    def wait(self) -> _Sent:
        """The message itself, once it is here."""
        if not self.is_here:
            self.travelled[self.kind, self.batch] = len(self.trained) - self.before
        self.is_here = True
        return self


def _arrived(value: Any, kind: str, function: str) -> _Sent:
    """What has arrived.

    Raises:
        ValueError: It is something else.
    """
    if not (isinstance(value, _Sent) and value.kind == kind and value.is_here):
        raise ValueError(f"`{function}` needs {kind} that have arrived: call `wait()` first.")
    return value


def _what_it_does(pipeline: Any) -> Any:
    """For 0, 1, 2 and 5 batches: the losses, and trainings during which ids and rows travel."""
    return [_run(pipeline, count) for count in (0, 1, 2, 5)]


def _run(pipeline: Any, count: int) -> Any:
    """What a pipeline does with some batches; of a stub, the dots.

    Raises:
        ValueError: It fails, or uses what has not arrived.
    """
    trained: list[int] = []
    travelled: dict[tuple[str, int], int] = {}

    def send(batch: int) -> _Sent:
        return _Sent(batch, "ids", trained, travelled)

    def look_up(ids: Any) -> _Sent:
        return _Sent(_arrived(ids, "ids", "look_up").batch, "rows", trained, travelled)

    def train(batch: int, rows: Any) -> str:
        if _arrived(rows, "rows", "train").batch != batch:
            raise ValueError(f"batch {batch} is trained with the rows of batch {rows.batch}.")
        trained.append(batch)
        return f"loss of batch {batch}"

    try:
        losses = pipeline(iter(range(count)), send, look_up, train)
        losses = losses if losses is ... else list(losses)
    except Exception as error:
        raise ValueError(f"With {count} batches it raises {error!r}") from error
    if losses is ... or losses == [...]:
        return ...
    ids = [travelled.get(("ids", batch)) for batch in range(2, count)]
    rows = [travelled.get(("rows", batch)) for batch in range(1, count)]
    return [losses, ids, rows]


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="15.1",
        compared="the times of four steps",
        solution=_two_windows,
        cases=(
            (30.0, 10.0, 20.0, 35.0),
            (30.0, 10.0, 40.0, 20.0),
            (30.0, 10.0, 40.0, 60.0),
            (30.0, 10.0, 45.0, 50.0),
        ),
        mistakes=(
            Mistake(
                "asks for both messages when the forward begins",
                lambda backward, forward, rows, ids: forward + max(backward, rows, ids),
                "The rank asks for the ids after the forward. What hides them, besides the "
                "backward?",
            ),
            Mistake(
                "adds the two waits as if each stood alone",
                _both_waits,
                "The ids go on travelling while the rank waits for the rows. How much of their "
                "way is left when the forward ends?",
            ),
        ),
        shape="a function that returns milliseconds",
    ),
    Exercise(
        id="15.2",
        compared="with 0, 1, 2 and 5 batches, all are trained in order, and ids and rows travel "
        "while one batch is trained",
        solution=_rows_ahead,
        measure=_what_it_does,
        mistakes=(
            Mistake(
                "waits for each message at once",
                _plain,
                "Every batch is trained, and nothing travels meanwhile: each message is sent and "
                "awaited in the step of its own batch.",
            ),
            Mistake(
                "sends only ids ahead",
                _ids_ahead,
                "The ids travel while a batch is trained, the rows do not. When can the rows of "
                "the next batch be looked up?",
            ),
            Mistake(
                "stops at the end of the iterator",
                _not_drained,
                "The last two batches are not trained. Which batches are in flight when the "
                "iterator ends?",
            ),
        ),
        shape="a generator of losses that trains all batches in order",
    ),
)
