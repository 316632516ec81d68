"""What each rank, each batch or each stream did, and when: bars over measured time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach.canvas import INK, Chart, canvas, finish, legend, rank_color, style
from tutorec.teach.network import Message, RecordedSteps
from tutorec.teach.trace import Trace
from tutorec.teach.units import number

__all__ = ["gantt", "timeline"]

_WAITING = "wait"  # the stage in which a rank only waits
_TRAVELS = " on their way"  # how the name of a message under way ends
_LETTER = 0.0145  # of the width, that a letter in a bar needs
_HOLLOW = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.2}
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")
_SHADES = {"forward": 0.7, "backward": 1.0}  # other stages are gray
_GRAY = {"facecolor": INK, "alpha": 0.6, "linewidth": 0}
_DASHES = ("-", "--", ":")


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
            return _HOLLOW | {"edgecolor": color}
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
    other stages in gray. "wait" is cut out of the bar that it
    interrupts and drawn hollow. A stage whose name ends in " on their way" is a line below the
    bars: a message that travels while the rank does something else. The title adds up the waits.

    Args:
        records: Title -> the steps, of which ``intervals()`` are drawn.
        window: A kind of message; an arrow goes from where the first one of a panel is sent to
            where the rank waits for it, if the rank does something else between the two.
    """
    panels = [record.intervals() for record in records.values()]
    lengths = [1e3 * (max(one.end for one in panel) - _begin(panel)) for panel in panels]
    every = [interval for panel in panels for interval in panel]
    travels = list(dict.fromkeys(one.stage for one in every if one.stage.endswith(_TRAVELS)))
    batches = [sorted({interval.batch for interval in panel}) for panel in panels]
    messages = [[m for m in record.messages if m.stage == window] for record in records.values()]

    figure = canvas(1.3 + 0.36 * sum(map(len, batches)) + 0.4 * len(panels))
    names = [[f"batch {batch}" for batch in numbers] for numbers in batches]
    grid = _panels(figure, [*records], names)
    grid[-1].set_xlim(0, max(lengths))
    grid[-1].set_xlabel("ms")
    clauses = []
    for axes, title, panel, length, sent in zip(
        grid, records, panels, lengths, messages, strict=True
    ):
        _draw(axes, panel, max(lengths), travels)
        _draw_window(axes, panel, length, sent)
        waited = 1e3 * sum(one.end - one.start for one in panel if one.stage == _WAITING)
        clauses.append(f"{title} waits {number(waited, 2)} of {number(length, 2)} ms")

    color = rank_color(every[0].rank)
    looks = {
        **{name: {"color": color, "alpha": shade, "lw": 0} for name, shade in _SHADES.items()},
        "other stages": _GRAY,
        "the rank waits": _HOLLOW,
    }
    keys: list[Any] = [Patch(label=name, **look) for name, look in looks.items()]
    keys += [
        Line2D([], [], color=INK, ls=dash, label=name)
        for dash, name in zip(_DASHES, travels, strict=False)
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=3)
    return finish(figure, ", ".join(clauses))


def _begin(intervals: Sequence[Interval]) -> float:
    return min(interval.start for interval in intervals)


def _draw(axes: Any, intervals: Sequence[Interval], longest: float, travels: list[str]) -> None:
    """The bars of one record."""
    begin = _begin(intervals)
    batches = sorted({interval.batch for interval in intervals})
    waits = sorted(interval for interval in intervals if interval.stage == _WAITING)

    for interval in intervals:
        line = batches.index(interval.batch)
        stage = interval.stage
        start = 1e3 * (interval.start - begin)
        end = 1e3 * (interval.end - begin)
        if stage in travels:
            dash = _DASHES[travels.index(stage)]
            axes.plot([start, end], [line + 0.42] * 2, dash, color=INK)
            continue
        if stage == _WAITING:
            axes.barh(line, end - start, left=start, height=0.56, **_HOLLOW)
            continue

        # the parts of a stage in which the rank does not wait
        edges = [start]
        for wait in waits:
            if interval.start <= wait.start and wait.end <= interval.end:
                edges += [1e3 * (wait.start - begin), 1e3 * (wait.end - begin)]
        spans = list(zip(edges[::2], [*edges, end][1::2], strict=True))
        look = _GRAY
        if stage in _SHADES:
            look = {"color": rank_color(interval.rank), "alpha": _SHADES[stage], "lw": 0}
        for left, right in spans:
            axes.barh(line, right - left, left=left, height=0.56, **look)
        left, right = max(spans, key=lambda span: span[1] - span[0])
        if right - left > _LETTER * len(stage) * longest:
            axes.text((left + right) / 2, line, stage, color="white", ha="center", va="center")


def _draw_window(
    axes: Any, intervals: Sequence[Interval], length: float, messages: Sequence[Message]
) -> None:
    """From where the first of some messages is sent to where the rank waits for it."""
    begin = _begin(intervals)
    batches = sorted({interval.batch for interval in intervals})
    for message in messages:
        start = 1e3 * (message.sent - begin)
        stop = 1e3 * (message.asked - begin)
        is_shown = start >= 0 and stop <= length and message.number in batches
        if is_shown and stop - start > _LETTER * len("window") * length:
            line = batches.index(message.number)
            arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (stop, line), (start, line), arrowprops=arrow)
            axes.text((start + stop) / 2, line - 0.06, "window", ha="center", va="bottom")
            return
