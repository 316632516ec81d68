"""The figure of a plan: time and memory of each rank."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from tutorec._style import INK, STYLE, rank_color
from tutorec._text import byte_unit, bytes_text, ms_text, spaced_percents
from tutorec.distributed.planner.topology import Floats, Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more ranks the bars of the figure have no labels, and it does not become higher.
_BARS = 32


def plan_figure(
    rank_parts: Floats, used: Ints, room: Ints, memory: str, claim: str | None = None
) -> Figure:
    """Two panels with a bar per rank: milliseconds of a step, and bytes of tables with their limit.

    Args:
        rank_parts: ``[W, 2]`` ms of each rank: memory work, and exchanges.
        used: ``[W]`` bytes of tables on each rank.
        room: ``[W]`` bytes that are available to tables.
        memory: Name of the memory.
        claim: Title; may use {slowest}, {step}, {over} (slowest rank relative to the mean),
            {fullest}, {full} (filled fraction of its memory), {memory}. The default title states
            what the figure shows.

    Raises:
        KeyError: The claim uses another name.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    times = rank_parts.sum(axis=1)
    full = used / np.maximum(room, 1)
    mean = float(times.mean())
    values: dict[str, Any] = {
        "slowest": int(times.argmax()),
        "step": ms_text(float(times.max())),
        "over": float(times.max()) / mean - 1 if mean else 0.0,
        "fullest": int(full.argmax()),
        "full": float(full.max()),
        "memory": memory,
    }
    template = claim or (
        "Rank {slowest} takes {step} ms, {over:.0%} above the mean; rank {fullest} is "
        "{full:.0%} full"
    )
    try:
        title = spaced_percents(template.format(**values))
    except KeyError as error:
        raise KeyError(
            f"claim {template!r} names {error}; this figure has {', '.join(sorted(values))}"
        ) from None

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.0, 1.6 + 0.34 * min(len(times), _BARS)), layout="constrained")
        FigureCanvasAgg(figure)
        time_axes, memory_axes = figure.subplots(1, 2, sharey=True)
        _time_bars(time_axes, rank_parts)
        _memory_bars(memory_axes, used, room, memory)
        figure.suptitle("\n".join(textwrap.wrap(title, 70)), x=0.012, ha="left", fontsize=13)

    return figure


def _time_bars(axes: Axes, rank_parts: Floats) -> None:
    """A bar per rank: milliseconds of memory work, and of exchanges."""
    lookup, exchange = rank_parts.T
    ranks = np.arange(len(lookup))
    bar = _bar_style(len(lookup))
    axes.barh(ranks, lookup, **bar)
    hatched: dict[str, Any] = {"hatch": "///", "edgecolor": "white", "linewidth": 0.0}
    exchanges = axes.barh(ranks, exchange, left=lookup, **bar, **hatched)
    axes.set_xlabel("ms of a step (hatched: exchange)")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    if len(ranks) > _BARS:
        axes.set_ylabel("rank")
        return

    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks.tolist()])
    axes.bar_label(exchanges, [*map(ms_text, lookup + exchange)], padding=4, fontsize=10)


def _memory_bars(axes: Axes, used: Ints, room: Ints, memory: str) -> None:
    """A bar per rank: bytes of tables, and the bytes that are available to them."""
    ranks = np.arange(len(used))
    bar = _bar_style(len(used))
    scale, unit = byte_unit(float(room.max()))
    few = len(ranks) <= _BARS
    outline: dict[str, Any] = {"color": "0.85"}
    if few:
        outline = {"color": "none", "edgecolor": INK, "linewidth": 1.2}
    rooms = axes.barh(ranks, room / scale, **bar | outline)
    axes.barh(ranks, used / scale, **bar)
    axes.set_xlabel(f"{unit} of {memory} ({'outline' if few else 'gray'}: room for tables)")
    axes.margins(x=0.28)
    if few:
        axes.bar_label(rooms, [*map(bytes_text, used)], padding=4, fontsize=10)


def _bar_style(ranks: int) -> dict[str, Any]:
    return {"color": [rank_color(rank) for rank in range(ranks)], "height": 0.62}
