"""How operations on CUDA streams follow each other: a schema, computed from their rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tutorec.teach.canvas import INK, Chart, canvas, finish, legend, rank_color, style

__all__ = ["HOST", "Operation", "place", "streams"]

#: The lane of the host thread.
HOST = "host"
_LAUNCH = 0.5  # what the host thread needs to put an operation into a stream
_LETTER = 0.014  # of the width, that a letter in a bar needs
_EVEN: dict[str, Any] = {"facecolor": rank_color(0), "edgecolor": "white"}
_WAIT: dict[str, Any] = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.2}
_ODD: dict[str, Any] = _EVEN | {"alpha": 0.7}


class Operation(NamedTuple):
    """Something that the host thread puts into a stream, or waits for.

    Args:
        name: What it is, and the number of its batch: "forward 0".
        stream: Where it runs; `HOST` for what the host thread itself waits for.
        length: How long it runs, in a unit that has no meaning.
        after: Names of operations of other streams that must have ended before it starts. Those
            that are not in the list ended before the picture begins.
    """

    name: str
    stream: str
    length: float
    after: Collection[str] = ()


def place(operations: Sequence[Operation]) -> dict[str, tuple[float, float]]:
    """When each operation runs, by the three rules of streams.

    The host thread launches operations one after the other. A stream runs its own operations one
    after the other. An operation starts when it is launched and what it waits for has ended.

    Args:
        operations: In the order in which the host thread launches them.

    Returns:
        Name -> start and end.

    Example:
        >>> place([Operation("copy", "b", 4), Operation("use", "a", 2, after=["copy"])])
        {'copy': (0.5, 4.5), 'use': (4.5, 6.5)}
    """
    free = {HOST: 0.0}
    times: dict[str, tuple[float, float]] = {}
    for name, stream, length, after in operations:
        awaited = max((times[other][1] for other in after if other in times), default=0.0)
        if stream == HOST:
            times[name] = free[HOST], max(free[HOST] + length, awaited)
        else:
            free[HOST] += _LAUNCH
            start = max(free[HOST], free.get(stream, 0.0), awaited)
            times[name] = start, start + length
        free[stream] = times[name][1]
    return times


@style()
def streams(operations: Sequence[Operation], *, claim: str) -> Chart:
    """A lane for the host thread and for each stream, as `place` computes them.

    The colour of an even batch is dark, that of an odd batch light.
    Short ticks on the host thread are launches; what it waits for is hollow.

    Args:
        operations: In the order in which the host thread launches them.
        claim: The title.
    """
    times = place(operations)
    lanes = list(dict.fromkeys([HOST, *(operation.stream for operation in operations)]))
    end = max(stop for _, stop in times.values())

    figure = canvas(1.2 + 0.6 * len(lanes))
    axes = figure.add_subplot()
    host = 0.0
    for operation in operations:
        start, stop = times[operation.name]
        lane = lanes.index(operation.stream)
        noun, batch = operation.name.split()
        look = _ODD if int(batch) % 2 else _EVEN
        color = "white"
        if operation.stream == HOST:
            look = _WAIT
            color = INK
            host = stop
        else:
            axes.barh(0, 0.7 * _LAUNCH, left=host, height=0.7, color=INK)
            host += _LAUNCH

        axes.barh(lane, stop - start, left=start, height=0.7, **look)
        if stop - start > _LETTER * end * len(noun):
            middle = (start + stop) / 2
            label = f"{noun}\n{batch}"
            axes.text(middle, lane, label, color=color, ha="center", va="center", size=9)

    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(0, end), ylim=(len(lanes) - 0.5, -0.5))
    axes.set_xticks([])
    axes.set_xlabel("time (a schema, not measured)")
    legend(figure, {"even batch": _EVEN, "odd batch": _ODD})
    return finish(figure, claim, placed=times)
