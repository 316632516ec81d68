"""Charts of measured numbers: bars, rank and frequency, curves, timelines."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tutorec._text import byte_unit
from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, rank_color, style
from tutorec.teach.trace import Event, Trace
from tutorec.teach.units import number, seconds, size

__all__ = ["bars", "curves", "rank_frequency", "timeline"]

_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++")
_DASHES = ("-", "--", ":", "-.")
_HEAD = 0.01  # share of the ids that are called the most frequent
_WAITING = "wait"  # the stage in which a rank only waits
# A prediction and its measured points.
_PAIRS = ((ACCENT, "-", "o"), (INK, "--", "s"), (ACCENT, ":", "^"))


def _value_label(value: float, unit: str) -> str:
    """A bar's number in the unit that the axis names."""
    if unit == "s":
        return seconds(value)
    return size(value) if unit == "B" else number(value)


def _axis_scale(largest: float, unit: str) -> tuple[float, str]:
    """Size and name of the unit of an axis, so that seconds and bytes have readable numbers."""
    if unit == "B":
        return byte_unit(largest)
    if unit != "s":
        return 1.0, unit
    steps = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    return next((step for step in steps if largest >= step[0]), steps[-1])


def bars(
    values: Mapping[str, float],
    *,
    unit: str,
    ranks: Sequence[int] | None = None,
    claim: str | None = None,
    log: bool = False,
) -> Chart:
    """One horizontal bar per entry, with its number.

    Args:
        values: Label to number, drawn from the top.
        unit: Of the numbers; "s" and "B" are scaled in the labels.
        ranks: The rank whose colour each bar has; without it all bars have the neutral colour.
        claim: Title; may use {largest}, {smallest} (labels), {most}, {least} (with unit), {ratio},
            {total}.
        log: Whether the axis is logarithmic.

    Raises:
        ValueError: There is nothing to draw.
    """
    if not values:
        raise ValueError("bars needs at least one value, got none")

    largest = max(values, key=values.__getitem__)
    smallest = min(values, key=values.__getitem__)
    least = values[smallest]
    fields: dict[str, Any] = {
        "largest": largest,
        "smallest": smallest,
        "most": _value_label(values[largest], unit),
        "least": _value_label(least, unit),
        "ratio": values[largest] / least if least else math.inf,
        "total": sum(values.values()),
    }

    with style():
        figure = canvas(1.1 + 0.42 * len(values))
        axes = figure.add_subplot()
        colors = [ACCENT] * len(values) if ranks is None else [rank_color(rank) for rank in ranks]
        scale, axis_unit = _axis_scale(values[largest], unit)
        drawn = axes.barh(
            list(values), [value / scale for value in values.values()], color=colors, height=0.62
        )
        axes.bar_label(drawn, [_value_label(value, unit) for value in values.values()], padding=5)
        axes.invert_yaxis()
        axes.set_xscale("log" if log else "linear")
        axes.margins(x=0.18)

        if not log and values[largest] / scale >= 1e5:
            axes.xaxis.set_major_formatter("{x:,.0f}")  # in place of a lone 1e6
            axes.locator_params(axis="x", nbins=5)
        axes.set_xlabel(f"{axis_unit}, logarithmic" if log else axis_unit)
        return finish(figure, claim, "{largest}: {most}, {ratio:.3g} times {smallest}", fields)


def rank_frequency(
    ids: Any | Mapping[str, Any],
    *,
    claim: str | None = None,
    what: str = "id",
    marks: Sequence[float] = (),
    rows: int | None = None,
) -> Chart:
    """Frequencies of ids in descending order, on two logarithmic axes.

    Args:
        ids: A tensor of ids, or several by name; the claim is about the first.
        claim: Title; may use {top} (the share of ids that counts as the head), {top_share},
            {distinct}, {count}, {most}. With marks {marked} is the share of the occurrences that
            the ids up to each mark have, by its percentage: {marked[5]}.
        what: What is counted ("product").
        marks: Percentages of the ids, the most frequent first. Each gets a vertical line, with the
            percentage of the occurrences that are left of it.
        rows: The number of ids that 100 % are, those that do not occur included; by default those
            that occur.

    Example:
        >>> ids = torch.tensor([7, 7, 7, 1])
        >>> rank_frequency(ids, marks=(1, 50), rows=4).facts["marked"]
        {1: 0.75, 50: 1.0}
    """
    series = ids if isinstance(ids, Mapping) else {"": ids}
    fields: dict[str, Any] = {}

    with style():
        figure = canvas(3.6)
        axes = figure.add_subplot()
        for (label, values), dash in zip(series.items(), itertools.cycle(_DASHES), strict=False):
            counts = (
                torch.as_tensor(values)
                .flatten()
                .unique(return_counts=True)[1]
                .sort(descending=True)
                .values
            )
            if not fields:
                head = max(1, math.ceil(_HEAD * len(counts)))
                fields = {
                    "top": _HEAD,
                    "top_share": (counts[:head].sum() / counts.sum()).item(),
                    "distinct": len(counts),
                    "count": int(counts.sum()),
                    "most": int(counts[0]),
                }
                if marks:
                    fields["marked"] = _mark_shares(axes, counts, marks, rows or len(counts))

            position = np.arange(1, len(counts) + 1)
            axes.loglog(
                position, counts.numpy(), dash, color=ACCENT if dash == "-" else INK, label=label
            )

        axes.set_xlabel(f"{what}s, the most frequent first (position)")
        axes.set_ylabel(f"occurrences of the {what}")
        axes.grid(True)
        if len(series) > 1:
            axes.legend()
        default = (
            f"the most frequent {{top:.0%}} of {what}s make up {{top_share:.0%}} of "
            f"{{count:,}} occurrences"
        )
        return finish(figure, claim, default, fields)


def _mark_shares(
    axes: Any, counts: torch.Tensor, marks: Sequence[float], rows: int
) -> dict[float, float]:
    """Draw a line at each percentage of the ids; return the share of the occurrences left of it."""
    shares: dict[float, float] = {}
    for line, percent in enumerate(marks):
        position = max(1, math.ceil(rows * percent / 100))
        shares[percent] = (counts[:position].sum() / counts.sum()).item()
        axes.axvline(position, color=INK, ls=":", lw=1)
        axes.annotate(
            f"{percent:g} %: {100 * shares[percent]:.0f} %",
            (position, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(4, -12 - 14 * line),
            textcoords="offset points",
            color=INK,
            fontsize=10,
        )
    return shares


def curves(
    series: Mapping[str, Sequence[float]],
    *,
    quantity: str,
    steps: Sequence[float] | None = None,
    step_name: str = "step",
    baseline: float | None = None,
    optimum: float | None = None,
    ranks: Sequence[int] | None = None,
    claim: str | None = None,
) -> Chart:
    """A loss or an AUC over the steps of training, between a baseline and the best possible value.

    Args:
        series: Label to values. One that ends in ", measured" is drawn as points, in the colour of
            the curve before it, which is its prediction; each such pair has a look of its own.
        quantity: Name and unit of the vertical axis ("AUC").
        steps: Where the values were taken; 1, 2, ... without it.
        step_name: Name of the horizontal axis.
        baseline: A line for the naive answer.
        optimum: A line for the best possible answer.
        ranks: The rank whose colour each curve has.
        claim: Title; may use {first}, {last} (of the first curve) and, with both lines, {closed}:
            the smallest share of the gap between them that any curve closed at its end.
    """
    lasts = [float(values[-1]) for values in series.values()]
    first = next(iter(series.values()))
    fields: dict[str, Any] = {"first": float(first[0]), "last": lasts[0], "quantity": quantity}
    default = "{quantity} goes from {first:.3g} to {last:.3g}"
    if baseline is not None and optimum is not None and baseline != optimum:
        fields["closed"] = min((last - baseline) / (optimum - baseline) for last in lasts)
        default = (
            "training closes {closed:.0%} of the gap between the baseline and the best possible"
        )
    measured = [label for label in series if label.endswith(", measured")]

    with style():
        figure = canvas(3.6)
        axes = figure.add_subplot()
        for index, (label, values) in enumerate(series.items()):
            positions = list(steps) if steps is not None else range(1, len(values) + 1)
            color = rank_color(ranks[index]) if ranks is not None else ACCENT
            look = _DASHES[index % 4] if ranks is None else "-"
            if measured:
                color, look, point = _PAIRS[index // 2 % len(_PAIRS)]
                look = point if label in measured else look
                axes.set_xticks(positions)
            axes.plot(positions, list(values), look, color=color, label=label)

        for value, name, dash in ((baseline, "baseline", ":"), (optimum, "best possible", "--")):
            if value is not None:
                axes.axhline(
                    value, color=INK, linestyle=dash, linewidth=1.5, label=f"{name} {value:.3g}"
                )

        axes.set_xlabel(step_name)
        if not measured:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylabel(quantity)
        axes.legend()
        return finish(figure, claim, default, fields)


def timeline(record: Trace | Mapping[str, Trace], *, claim: str | None = None) -> Chart:
    """When each rank was in which stage, from measured timestamps.

    A bar has the colour of its rank; stages differ by pattern, and "wait" is hollow.

    Args:
        record: A merged trace, or several by name, drawn below each other on one scale, each from
            its first event. Events without a duration are left out.
        claim: Title; may use, of the first trace, {total} and {waited} (s, the latter summed over
            ranks), {waiting_share}, {longest}, {slowest_rank}; with two traces {total_2},
            {waited_2}, ... of the second.

    Raises:
        ValueError: A trace holds nothing with a duration.
    """
    traces = record if isinstance(record, Mapping) else {"": record}
    fields: dict[str, Any] = {}
    for position, (name, trace) in enumerate(traces.items()):
        if not trace.spans():
            raise ValueError(f"timeline {name!r} needs events with a duration; none were recorded")
        suffix = f"_{position + 1}" if position else ""
        fields |= {f"{key}{suffix}": value for key, value in _span_facts(trace.spans()).items()}

    stages = list(dict.fromkeys(stage for trace in traces.values() for stage in trace.stages()))
    busy = [stage for stage in stages if stage != _WAITING]
    longest = max(_span_facts(trace.spans())["total"] for trace in traces.values())
    scale, unit = (1e3, "ms") if longest < 2 else (1.0, "s")
    rows = [len({event.rank for event in trace.spans()}) for trace in traces.values()]

    with style():
        figure = canvas(1.3 + 0.55 * sum(rows) + (0.35 * len(rows) if len(rows) > 1 else 0))
        grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, (name, trace) in zip(grid, traces.items(), strict=True):
            _spans(axes, trace.spans(), scale, {stage: _pattern(stage, busy) for stage in stages})
            axes.set_title(name, loc="left")

        grid[-1].set_xlabel(f"{unit} since the first event")
        keys = [Patch(label=stage, **_look(_pattern(stage, busy), INK)) for stage in stages]
        figure.legend(handles=keys, loc="outside lower center", ncols=min(4, len(stages)))
        return finish(figure, claim, "ranks spend {waiting_share:.0%} of the time waiting", fields)


def _span_facts(events: Sequence[Event]) -> dict[str, Any]:
    """What a timeline's claim may say about one trace."""
    begin = min(event.start for event in events)
    end = max(event.end for event in events)
    durations: dict[str, float] = {}
    for event in events:
        durations[event.stage] = durations.get(event.stage, 0.0) + event.end - event.start
    waited = durations.get(_WAITING, 0.0)

    return {
        "total": end - begin,
        "waited": waited,
        "waiting_share": waited / ((end - begin) * len({event.rank for event in events})),
        "longest": max(durations, key=durations.__getitem__),
        "slowest_rank": max(events, key=lambda event: event.end).rank,
    }


def _pattern(stage: str, busy: Sequence[str]) -> str | None:
    """The hatch of a stage; None for waiting, which is drawn hollow."""
    return _HATCHES[busy.index(stage) % len(_HATCHES)] if stage in busy else None


def _look(pattern: str | None, color: str) -> dict[str, Any]:
    """How a bar of this pattern is painted."""
    if pattern is None:
        return {"facecolor": "none", "edgecolor": color, "linewidth": 1.2}
    return {"facecolor": color, "edgecolor": "white", "hatch": pattern, "linewidth": 0.0}


def _spans(
    axes: Any, events: Sequence[Event], scale: float, patterns: Mapping[str, str | None]
) -> None:
    """The bars of one trace, one row per rank."""
    ranks = sorted({event.rank for event in events})
    begin = min(event.start for event in events)
    for event in events:
        left = (event.start - begin) * scale
        width = (event.end - event.start) * scale
        look = _look(patterns[event.stage], rank_color(event.rank))
        axes.barh(ranks.index(event.rank), width, left=left, height=0.6, **look)

    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
