"""Which batch was in which stage, and when: a line for each batch, from measured intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach.canvas import INK, Chart, canvas, finish, rank_color, style
from tutorec.teach.network import RecordedSteps
from tutorec.teach.units import number

__all__ = ["gantt"]

_WAITING = "wait"  # the stage in which a rank only waits
_TRAVELS = " on their way"  # how the name of a message under way ends
_BAR = 0.56  # height, of a line for each batch
_LETTER = 0.0145  # of the width, that a letter in a bar needs
_SHADES = {"forward": 0.7, "backward": 1.0}  # other stages are gray
_GRAY = 0.6
_DASHES = ("-", "--", ":")


def gantt(
    records: Mapping[str, RecordedSteps], *, window: str | None = None, claim: str | None = None
) -> Chart:
    """Two steps of each record in a panel of its own, on one scale of time; a line for each batch.

    A bar is a stage of a batch: forward and backward in the colour of the rank, light and dark,
    other stages in gray. "wait" is cut out of the bar that it
    interrupts and drawn hollow. A stage whose name ends in " on their way" is a line below the
    bars: a message that travels while the rank does something else.

    Args:
        records: Title -> the steps, of which ``intervals()`` are drawn.
        window: A kind of message; an arrow goes from where the first one of a panel is sent to
            where the rank waits for it, if the rank does something else between the two.
        claim: The title; may use {total} (ms shown) and {waited} (ms of all hollow bars) of the
            first panel, {total_2}, {waited_2}, ... of the others. By default it says both of each
            panel.
    """
    panels = {title: record.intervals() for title, record in records.items()}
    fields: dict[str, Any] = {}
    clauses: list[str] = []
    for position, (title, intervals) in enumerate(panels.items(), start=1):
        suffix = f"_{position}" if position > 1 else ""
        waited = sum(
            interval.end - interval.start for interval in intervals if interval.stage == _WAITING
        )
        fields[f"total{suffix}"] = number(1e3 * _length(intervals), 2)
        fields[f"waited{suffix}"] = number(1e3 * waited, 2)
        clauses.append(f"{title} waits {{waited{suffix}}} of {{total{suffix}}} ms")

    longest = max(_length(intervals) for intervals in panels.values())
    batches = [len({interval.batch for interval in intervals}) for intervals in panels.values()]
    all_intervals = [interval for intervals in panels.values() for interval in intervals]
    travels = list(
        dict.fromkeys(
            interval.stage for interval in all_intervals if interval.stage.endswith(_TRAVELS)
        )
    )

    with style():
        figure = canvas(1.3 + 0.36 * sum(batches) + 0.4 * len(panels))
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=batches)
        for axes, (title, intervals) in zip(grid[:, 0], panels.items(), strict=True):
            _panel(axes, intervals, longest, travels)
            axes.set_title(title, loc="left")
            if window is not None:
                _arrow(axes, intervals, records[title], window)
        grid[-1, 0].set_xlim(0, 1e3 * longest)
        grid[-1, 0].set_xlabel("ms")

        color = rank_color(all_intervals[0].rank)
        keys: list[Any] = [
            Patch(label="forward", facecolor=color, alpha=_SHADES["forward"], linewidth=0),
            Patch(label="backward", facecolor=color, linewidth=0),
            Patch(label="other stages", facecolor=INK, alpha=_GRAY, linewidth=0),
            Patch(label="the rank waits", facecolor="none", edgecolor=INK, linewidth=1.2),
        ]
        keys += [
            Line2D([], [], color=INK, linestyle=_DASHES[position % 3], linewidth=2, label=stage)
            for position, stage in enumerate(travels)
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=3)
        return finish(figure, claim, ", ".join(clauses), fields)


def _length(intervals: Sequence[Interval]) -> float:
    """Seconds from the first start to the last end."""
    return max(interval.end for interval in intervals) - min(
        interval.start for interval in intervals
    )


def _panel(
    axes: Any, intervals: Sequence[Interval], longest: float, travels: Sequence[str]
) -> None:
    """The bars of one record."""
    begin = min(interval.start for interval in intervals)
    batches = sorted({interval.batch for interval in intervals})
    waits = sorted(interval for interval in intervals if interval.stage == _WAITING)

    for interval in intervals:
        line = batches.index(interval.batch)
        if interval.stage in travels:
            ends = [1e3 * (interval.start - begin), 1e3 * (interval.end - begin)]
            dash = _DASHES[travels.index(interval.stage) % 3]
            axes.plot(ends, [line + 0.42] * 2, dash, color=INK, linewidth=2)
        elif interval.stage == _WAITING:
            look = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.0}
            _bar(axes, line, interval.start - begin, interval.end - begin, look)
        else:
            is_named = interval.stage in _SHADES
            color = rank_color(interval.rank) if is_named else INK
            look = {"facecolor": color, "alpha": _SHADES.get(interval.stage, _GRAY), "linewidth": 0}
            spans = _without(interval, waits)
            for start, end in spans:
                _bar(axes, line, start - begin, end - begin, look)
            start, end = max(spans, key=lambda part: part[1] - part[0])
            if end - start > _LETTER * len(interval.stage) * longest:
                middle = 1e3 * ((start + end) / 2 - begin)
                axes.text(middle, line, interval.stage, color="white", ha="center", va="center")

    axes.set_yticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    axes.set_ylim(len(batches) - 0.4, -0.5)


def _arrow(axes: Any, intervals: Sequence[Interval], record: RecordedSteps, window: str) -> None:
    """From where a message of the kind is sent to where the rank waits for it."""
    begin = min(interval.start for interval in intervals)
    end = max(interval.end for interval in intervals)
    batches = sorted({interval.batch for interval in intervals})

    for message in record.messages:
        is_shown = message.sent >= begin and message.asked <= end and message.number in batches
        is_long = message.asked - message.sent > _LETTER * len("window") * (end - begin)
        if message.stage == window and is_shown and is_long:
            line = batches.index(message.number)
            start = 1e3 * (message.sent - begin)
            stop = 1e3 * (message.asked - begin)
            arrow = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (stop, line), (start, line), arrowprops=arrow)
            axes.text((start + stop) / 2, line - 0.06, "window", ha="center", va="bottom")
            return


def _without(stage: Interval, waits: Sequence[Interval]) -> list[tuple[float, float]]:
    """The parts of a stage in which the rank does not wait."""
    spans = []
    begin = stage.start
    for wait in waits:
        if stage.start <= wait.start and wait.end <= stage.end:
            spans.append((begin, wait.start))
            begin = wait.end
    return [*spans, (begin, stage.end)]


def _bar(axes: Any, line: int, start: float, end: float, look: Mapping[str, Any]) -> None:
    """A bar from one time to another, in seconds."""
    axes.barh(line, 1e3 * (end - start), left=1e3 * start, height=_BAR, **look)
