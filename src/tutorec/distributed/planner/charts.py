"""Figure of the memory and time of each rank, for light and dark pages.

A rank has the color that it has on every page of the book. Within a bar, the strong part is memory
work and the light part exchanges. Matplotlib is imported when a figure is made; its global state is
not changed.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from tutorec._style import ACCENT, INK, STYLE, rank_color
from tutorec._text import byte_unit, bytes_text, ms_text, spaced_percents
from tutorec.distributed.planner.report import MEMORIES, PlanReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more ranks, bars become a step plot.
_BARS = 32
_ABOVE: dict[str, Any] = {
    "loc": "lower right",
    "bbox_to_anchor": (1.0, 1.0),
    "ncols": 2,
    "borderpad": 0.0,
}


def plan_figure(report: PlanReport, claim: str | None = None) -> Figure:
    """Two panels with a bar per rank: milliseconds of a step, and bytes of tables with their limit.

    Args:
        report: The planner's report.
        claim: Title; may use {slowest}, {step}, {over} (slowest rank relative to the mean),
            {fullest}, {full} (filled fraction of its memory), {memory}. The default title states
            what the figure shows.

    Raises:
        KeyError: The claim uses another name.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    facts = figure_facts(report)
    wanted = claim or (
        "Rank {slowest} takes {step} ms, {over:.0%} above the mean; rank {fullest} is "
        "{full:.0%} full"
    )
    try:
        title = spaced_percents(wanted.format(**facts))
    except KeyError as error:
        raise KeyError(
            f"claim {wanted!r} asks for {error}; this figure knows {', '.join(sorted(facts))}"
        ) from None
    world = report.problem.world_size
    with matplotlib.rc_context(STYLE):
        few = world <= _BARS
        figure = Figure(figsize=(7.0, 1.6 + 0.34 * world if few else 4.8), layout="constrained")
        FigureCanvasAgg(figure)
        if few:
            time_axes, memory_axes = figure.subplots(1, 2, sharey=True)
            _bars(time_axes, memory_axes, report)
        else:
            time_axes, memory_axes = figure.subplots(2, 1, sharex=True)
            _lines(time_axes, memory_axes, report)
        figure.suptitle("\n".join(textwrap.wrap(title, 70)), x=0.012, ha="left", fontsize=13)
    return figure


def figure_facts(report: PlanReport) -> dict[str, Any]:
    """The values that the title of a figure may use."""
    times, kind = report.rank_parts.sum(axis=1), report.memory
    full = report.rank_memory[:, kind] / np.maximum(report.problem.capacity[:, kind], 1)
    mean = float(times.mean())
    return {
        "slowest": int(times.argmax()),
        "step": ms_text(float(times.max())),
        "over": float(times.max()) / mean - 1 if mean else 0.0,
        "fullest": int(full.argmax()),
        "full": float(full.max()),
        "memory": MEMORIES[kind],
    }


def _units(report: PlanReport) -> tuple[float, str]:
    return byte_unit(float(report.problem.capacity[:, report.memory].max()))


def _bars(time_axes: Axes, memory_axes: Axes, report: PlanReport) -> None:
    ranks = np.arange(report.problem.world_size)
    colors = [rank_color(rank) for rank in ranks.tolist()]
    lookup, exchange = report.rank_parts.T
    time_axes.barh(ranks, lookup, color=colors, height=0.62, label="lookup and update")
    exchanges = time_axes.barh(
        ranks,
        exchange,
        left=lookup,
        color=colors,
        height=0.62,
        hatch="///",
        edgecolor="white",
        linewidth=0.0,
    )
    time_axes.bar_label(exchanges, [*map(ms_text, lookup + exchange)], padding=4, fontsize=10)
    time_axes.set_xlabel("ms of a step (hatched: exchange)")
    time_axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks.tolist()])
    time_axes.invert_yaxis()
    time_axes.margins(x=0.2)

    kind, (scale, unit) = report.memory, _units(report)
    held, room = report.rank_memory[:, kind], report.problem.capacity[:, kind]
    rooms = memory_axes.barh(
        ranks, room / scale, color="none", edgecolor=INK, height=0.62, linewidth=1.2
    )
    memory_axes.barh(ranks, held / scale, color=colors, height=0.62)
    memory_axes.bar_label(rooms, [*map(bytes_text, held)], padding=4, fontsize=10)
    memory_axes.set_xlabel(f"{unit} of {MEMORIES[kind]} (outline: room for tables)")
    memory_axes.margins(x=0.28)


def _lines(time_axes: Axes, memory_axes: Axes, report: PlanReport) -> None:
    """For many ranks: step plots over rank numbers."""
    ranks = np.arange(report.problem.world_size + 1)
    lookup, exchange = report.rank_parts.T
    kind, (scale, unit) = report.memory, _units(report)
    time_axes.stairs(
        lookup + exchange, ranks, color=ACCENT, fill=True, alpha=0.45, label="exchange"
    )
    time_axes.stairs(lookup, ranks, color=ACCENT, fill=True, label="lookup and update")
    time_axes.set_ylabel("ms of a step")
    time_axes.legend(**_ABOVE)
    memory_axes.stairs(
        report.rank_memory[:, kind] / scale, ranks, color=ACCENT, fill=True, label="tables"
    )
    memory_axes.stairs(
        report.problem.capacity[:, kind] / scale,
        ranks,
        baseline=None,
        color=INK,
        linestyle="--",
        label="room for tables",
    )
    memory_axes.set_ylabel(f"{unit} of {MEMORIES[kind]}")
    memory_axes.set_xlabel("rank")
    memory_axes.legend(**_ABOVE)
