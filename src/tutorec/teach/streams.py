"""How operations on CUDA streams follow each other: a schema, computed from their rules."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from matplotlib.patches import Patch

from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, style

__all__ = ["HOST", "Operation", "place", "streams"]

#: The lane of the host thread.
HOST = "host"
_LAUNCH = 0.5  # what the host thread needs to put an operation into a stream
_SHADES = (1.0, 0.7)  # of even and of odd batches
_LETTER = 0.014  # of the width, that a letter in a bar needs


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
    host = 0.0
    free: dict[str, float] = {}
    times: dict[str, tuple[float, float]] = {}

    for operation in operations:
        awaited = max((times[name][1] for name in operation.after if name in times), default=0.0)
        if operation.stream == HOST:
            times[operation.name] = (host, max(host + operation.length, awaited))
            host = times[operation.name][1]
        else:
            host += _LAUNCH
            start = max(host, free.get(operation.stream, 0.0), awaited)
            times[operation.name] = (start, start + operation.length)
            free[operation.stream] = start + operation.length
    return times


def streams(operations: Sequence[Operation], *, claim: str) -> Chart:
    """A lane for the host thread and for each stream, as `place` computes them.

    The colour of an even batch is dark, that of an odd batch light.
    Short ticks on the host thread are launches; what it waits for is hollow.

    Args:
        operations: In the order in which the host thread launches them.
        claim: The title; may use {end}, when the last operation ends.
    """
    times = place(operations)
    lanes = [
        HOST,
        *dict.fromkeys(operation.stream for operation in operations if operation.stream != HOST),
    ]
    end = max(stop for _, stop in times.values())

    with style():
        figure = canvas(1.2 + 0.6 * len(lanes))
        axes = figure.add_subplot()
        host = 0.0
        for operation in operations:
            start, stop = times[operation.name]
            lane = lanes.index(operation.stream)
            if operation.stream == HOST:
                axes.barh(lane, stop - start, left=start, height=0.7, fc="none", ec=INK, lw=1.2)
                host = stop
            else:
                axes.barh(0, 0.7 * _LAUNCH, left=host, height=0.7, color=INK)
                shade = _SHADES[int(operation.name[-1]) % 2]
                look = {"facecolor": rank_color(0), "edgecolor": "white", "alpha": shade}
                axes.barh(lane, stop - start, left=start, height=0.7, **look)
                host += _LAUNCH
            if stop - start > _LETTER * end * len(operation.name.split()[0]):
                color = INK if operation.stream == HOST else "white"
                label = operation.name.replace(" ", "\n")
                middle = (start + stop) / 2
                axes.text(middle, lane, label, color=color, ha="center", va="center", fontsize=9)

        axes.set_yticks(range(len(lanes)), lanes)
        axes.set_ylim(len(lanes) - 0.5, -0.5)
        axes.set_xlim(0, end)
        axes.set_xticks([])
        axes.set_xlabel("time (a schema, not measured)")
        keys = [
            Patch(label=label, facecolor=rank_color(0), alpha=shade, linewidth=0)
            for label, shade in zip(("even batch", "odd batch"), _SHADES, strict=True)
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=2)
        return finish(figure, claim, claim, {"end": end, "placed": times})
