"""What each rank, each batch or each stream did, and when."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach.canvas import INK, PAPER, Chart, canvas, finish, legend, rank_color, style
from tutorec.teach.network import RecordedSteps
from tutorec.teach.trace import Trace
from tutorec.teach.units import number

_WAITING = "wait"  # the stage in which a rank only waits
_TRAVELS = " on their way"  # how the name of a message under way ends
_LETTER = 0.0145  # of the width, that a letter in a bar needs
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")


def _panels(figure: Any, titles: Sequence[str], names: Sequence[Sequence[str]]) -> list[Any]:
    """Axes below each other on one scale, each with its title and the names of its lines."""
    heights = [len(lines) for lines in names]
    grid = figure.subplots(len(titles), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, title, lines in zip(grid, titles, names, strict=True):
        axes.set_title(title, loc="left")
        axes.set_yticks(range(len(lines)), lines)
        axes.set_ylim(len(lines) - 0.4, -0.5)
    return list(grid)


@style()
def timeline(record: Trace | Mapping[str, Trace], *, claim: str) -> Chart:
    """When each rank was in which stage, from measured timestamps.

    A bar has the colour of its rank; stages differ by pattern, and "wait" is hollow.

    Args:
        record: A merged trace, or several by name, drawn below each other on one scale, each from
            its first event. Events without a duration are left out.
        claim: The title.
    """
    traces = {"": record} if isinstance(record, Trace) else record
    spans = [trace.spans() for trace in traces.values()]
    stages = dict.fromkeys(event.stage for events in spans for event in events)
    busy = [stage for stage in stages if stage != _WAITING]

    def look(stage: str, color: str) -> dict[str, Any]:
        if stage == _WAITING:
            return {"facecolor": "none", "edgecolor": color, "linewidth": 1.2}
        hatch = _HATCHES[busy.index(stage) % len(_HATCHES)]
        return {"facecolor": color, "edgecolor": "white", "hatch": hatch, "linewidth": 0}

    ranks = [sorted({event.rank for event in events}) for events in spans]
    figure = canvas(1.3 + 0.55 * sum(map(len, ranks)) + 0.35 * (len(ranks) - 1))
    names = [[f"rank {rank}" for rank in panel] for panel in ranks]
    grid = _panels(figure, [*traces], names)
    for axes, events, lines in zip(grid, spans, ranks, strict=True):
        begin = min(event.start for event in events)
        for event in events:
            start = 1e3 * (event.start - begin)
            length = 1e3 * (event.end - event.start)
            bar = look(event.stage, rank_color(event.rank))
            axes.barh(lines.index(event.rank), length, left=start, height=0.6, **bar)

    grid[-1].set_xlabel("ms since the first event")
    legend(figure, {stage: look(stage, INK) for stage in stages})
    return finish(figure, claim)


@style()
def gantt(records: Mapping[str, RecordedSteps], *, window: str | None = None) -> Chart:
    """Two steps of each record in a panel of its own, on one scale of time; a line for each batch.

    A bar is a stage of a batch: forward and backward in the colour of the rank, light and dark,
    other stages in gray. "wait" is hollow, in front of the bar that it interrupts. A stage whose
    name ends in " on their way" is a line below the bars: a message that travels while the rank
    does something else. The title adds up the waits.

    Args:
        records: Title -> the steps, of which ``intervals()`` are drawn.
        window: A kind of message; an arrow goes from where the first one of a panel is sent to
            where the rank waits for it, if the rank does something else between the two.
    """
    panels = [_in_ms(record.intervals()) for record in records.values()]
    every = [interval for panel in panels for interval in panel]
    longest = max(interval.end for interval in every)
    travels = dict.fromkeys(one.stage for one in every if one.stage.endswith(_TRAVELS))
    dashes = dict(zip(travels, ("-", "--", ":"), strict=False))
    color = rank_color(next(iter(records.values())).rank)
    looks: dict[str, Any] = {
        "forward": {"color": color, "alpha": 0.7, "lw": 0},
        "backward": {"color": color, "lw": 0},
        "other stages": {"color": INK, "alpha": 0.6, "lw": 0},
        "the rank waits": {"facecolor": PAPER, "edgecolor": INK, "linewidth": 1.2, "zorder": 2},
    }

    batches = [sorted({interval.batch for interval in panel}) for panel in panels]
    figure = canvas(1.3 + 0.36 * sum(map(len, batches)) + 0.4 * len(panels))
    names = [[f"batch {batch}" for batch in numbers] for numbers in batches]
    grid = _panels(figure, [*records], names)
    grid[-1].set_xlim(0, longest)
    grid[-1].set_xlabel("ms")
    clauses = []
    for axes, title, panel, lines in zip(grid, records, panels, batches, strict=True):
        waits = [one for one in panel if one.stage == _WAITING]
        for interval in panel:
            line = lines.index(interval.batch)
            if interval.stage in dashes:
                ends = [interval.start, interval.end]
                axes.plot(ends, [line + 0.42] * 2, dashes[interval.stage], color=INK)
                continue
            name = "the rank waits" if interval.stage == _WAITING else interval.stage
            look = looks.get(name, looks["other stages"])
            length = interval.end - interval.start
            axes.barh(line, length, left=interval.start, height=0.56, **look)
            if interval.stage != _WAITING:
                _write_stage(axes, line, interval, waits, longest)

        if window is not None:
            _draw_window(axes, panel, window, lines)
        waited = sum(one.end - one.start for one in waits)
        length = max(interval.end for interval in panel)
        clauses.append(f"{title} waits {number(waited, 2)} of {number(length, 2)} ms")

    keys: list[Any] = [Patch(label=name, **look) for name, look in looks.items()]
    keys += [Line2D([], [], color=INK, ls=dash, label=name) for name, dash in dashes.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return finish(figure, ", ".join(clauses))


def _in_ms(intervals: Sequence[Interval]) -> list[Interval]:
    """The intervals in milliseconds from where the first of them starts."""
    begin = min(interval.start for interval in intervals)
    return [
        one._replace(start=1e3 * (one.start - begin), end=1e3 * (one.end - begin))
        for one in intervals
    ]


def _write_stage(
    axes: Any, line: int, interval: Interval, waits: Sequence[Interval], longest: float
) -> None:
    """The name of a stage in the longest part of its bar without a wait, where there is room."""
    edges = [interval.start, interval.end]
    for wait in waits:
        if interval.start <= wait.start and wait.end <= interval.end:
            edges += [wait.start, wait.end]
    edges.sort()
    spans = zip(edges[::2], edges[1::2], strict=True)
    left, right = max(spans, key=lambda span: span[1] - span[0])
    if right - left > _LETTER * len(interval.stage) * longest:
        middle = (left + right) / 2
        axes.text(middle, line, interval.stage, color="white", ha="center", va="center")


def _draw_window(axes: Any, panel: Sequence[Interval], kind: str, batches: Sequence[int]) -> None:
    """From where the first message of a kind is sent to where the rank waits for it."""
    room = _LETTER * len("window") * max(interval.end for interval in panel)
    for line, batch in enumerate(batches):
        of_batch = [interval for interval in panel if interval.batch == batch]
        sent = min((one.start for one in of_batch if one.stage == kind + _TRAVELS), default=0.0)
        waits = [one.start for one in of_batch if one.stage == _WAITING and one.start >= sent]
        asked = min(waits, default=0.0)
        if sent > 0 and asked - sent > room:
            arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (asked, line), (sent, line), arrowprops=arrow)
            axes.text((sent + asked) / 2, line - 0.06, "window", ha="center", va="bottom")
            return


#: The lane of the host thread.
HOST = "host"
_LAUNCH = 0.5  # what the host thread needs to put an operation into a stream
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
