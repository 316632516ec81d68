"""Exercises of chapter 15: the time of a step with two messages, and a pipeline of two stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tutorec.teach.grading import Exercise


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


def _run(pipeline: Callable[..., Any], count: int) -> Any:
    """What is trained of some batches, and trainings during which ids and rows travel.

    Raises:
        ValueError: It fails, or uses what has not arrived.
    """
    trained: list[int] = []
    travelled: dict[tuple[str, int], int] = {}

    def send(batch: int) -> _Sent:
        return _Sent(batch, "ids", trained, travelled)

    def look_up(ids: Any) -> _Sent:
        return _Sent(_arrived(ids, "ids", "look_up").batch, "rows", trained, travelled)

    def train(batch: int, rows: Any) -> int:
        if _arrived(rows, "rows", "train").batch != batch:
            raise ValueError(f"batch {batch} is trained with the rows of batch {rows.batch}.")
        trained.append(batch)
        return batch

    try:
        losses = pipeline(iter(range(count)), send, look_up, train)
        losses = losses if losses is ... else list(losses)
    except Exception as error:
        raise ValueError(f"With {count} batches it raises {error!r}") from error
    if losses is ... or losses == [...]:
        return ...
    ids = [travelled.get(("ids", batch)) for batch in range(2, count)]
    rows = [travelled.get(("rows", batch)) for batch in range(1, count)]
    return losses, ids, rows


def _schedule(ids: int, rows: int) -> list[tuple[Sequence[int], list[int], list[int]]]:
    """With 0, 1, 2 and 5 batches, where all ids travel during so many trainings, and all rows."""
    return [
        (range(count), [ids] * max(0, count - 2), [rows] * max(0, count - 1))
        for count in (0, 1, 2, 5)
    ]


EXERCISES = (
    Exercise(
        "15.1",
        compared="the times of four steps",
        right=[40, 50, 60, 55],
        cases=(
            (30.0, 10.0, 20.0, 35.0),
            (30.0, 10.0, 40.0, 20.0),
            (30.0, 10.0, 40.0, 60.0),
            (30.0, 10.0, 45.0, 50.0),
        ),
        mistakes={
            "The rank asks for the ids after the forward. What hides them, besides the backward?": [
                45,
                50,
                70,
                60,
            ],
            "The ids go on travelling while the rank waits for the rows. How much of their "
            "way is left when the forward ends?": [40, 50, 70, 65],
        },
        shape="a function that returns milliseconds",
    ),
    Exercise(
        "15.2",
        compared=(
            "with 0, 1, 2 and 5 batches, all are trained in order, and ids and rows travel "
            "while one batch is trained"
        ),
        right=_schedule(ids=1, rows=1),
        measure=lambda pipeline: [_run(pipeline, count) for count in (0, 1, 2, 5)],
        mistakes={
            "Every batch is trained, and nothing travels meanwhile: each message is sent and "
            "awaited in the step of its own batch.": _schedule(ids=0, rows=0),
            "The ids travel while a batch is trained, the rows do not. When can the rows of "
            "the next batch be looked up?": _schedule(ids=2, rows=0),
            "The last two batches are not trained. Which batches are in flight when the "
            "iterator ends?": [
                ([], [], []),
                ([], [], []),
                ([], [], [None]),
                ([0, 1, 2], [1, 1, None], [1, 1, None, None]),
            ],
        },
        shape="a generator of losses that trains all batches in order",
    ),
)
