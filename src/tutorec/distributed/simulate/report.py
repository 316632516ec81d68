"""How a simulated step is told: text, HTML, a figure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tutorec.distributed.simulate.ids import Floats
from tutorec.distributed.text_table import TextTable, bytes_text, ms_text, ranks_text, several

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tutorec.distributed.simulate.simulation import Simulation

# A grey that reads on white and on a dark page; phases in the order of time, exchanges in hues of their own.
_INK = "#7a7a7a"
_COLORS = {"ids": "#3b7cc9", "lookup": "#2b9060", "rows": "#6b7686", "gradients": "#cf6420", "update": "#a3742c"}
_HOT_ROWS = 5


def headline(step: Simulation) -> str:
    """The step in a sentence.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> from tutorec.distributed.simulate.loads import Load
        >>> from tutorec.distributed.simulate.simulation import simulate
        >>> headline(simulate({}, Topology(2, "cpu"), [], Load(3)))
        'a step of 0 tables on 2 ranks takes 0 ms'
    """
    hosts = step.world_size // step.local_size
    where = several(step.world_size, "rank") + (f", {hosts:,} hosts of {step.local_size}" if hosts > 1 else "")
    words = f"a step of {several(len(step.tables), 'table')} on {where} takes {ms_text(step.step_ms)} ms"
    if step.step_ms > 0:
        times = {phase: float(ms.max()) for phase, ms in step.phases.items()}
        phase = max(times, key=times.__getitem__)
        words += f"; {times[phase] / step.step_ms:.0%} of it is {phase}"
    return words


def text(step: Simulation) -> str:
    """The step as tables: of each rank, of each exchange, the hot rows."""
    parts = [headline(step), str(_by_rank(step)), str(_by_stage(step))]
    if step.hot_rows:
        parts.append(str(_hot(step)))
    return "\n\n".join([*parts, _waiting(step)])


def html(step: Simulation) -> str:
    """As the text, with tables as tables."""
    tables = [_by_rank(step).html("of each rank"), _by_stage(step).html("exchanges, all ranks together")]
    tables += [_hot(step).html("rows that come most often")] if step.hot_rows else []
    return f"<p>{headline(step)}</p>{''.join(tables)}<p>{_waiting(step)}</p>"


def _by_rank(step: Simulation) -> TextTable:
    count = "{:,.0f}".format
    lines: list[tuple[str, Floats, Any]] = [
        ("samples", step.samples, count),
        ("rows looked up", step.work.lookups, count),
        ("distinct rows of them", step.work.distinct, count),
        ("bytes read by lookups", step.work.read_bytes, bytes_text),
        ("bytes sent inside the host", step.sent(crossing=False), bytes_text),
        ("bytes got inside the host", step.received(crossing=False), bytes_text),
    ]
    if step.world_size > step.local_size:
        lines += [
            ("bytes sent to other hosts", step.sent(crossing=True), bytes_text),
            ("bytes got from other hosts", step.received(crossing=True), bytes_text),
            ("bytes that leave a host", step.host_sent(), bytes_text),
        ]
    lines += [(f"ms, {phase}", times, ms_text) for phase, times in step.phases.items()]
    lines.append(("ms, all of them", step.rank_ms, ms_text))
    rows = []
    for what, values, text in lines:
        mean, most = float(values.mean()), float(values.max())
        who = "host" if len(values) < step.world_size else "rank"
        where = f"{who} {int(values.argmax())}" if most > mean * 1.0001 else "all alike"
        rows.append([what, text(mean), text(most), where, f"{most / mean:.2f}" if mean else "-"])
    return TextTable(["of each rank", "mean", "most", "where", "most / mean"], rows, right=[1, 2, 4])


def _by_stage(step: Simulation) -> TextTable:
    rows = [
        [
            stage,
            str(issued),
            bytes_text(step.total(stage, crossing=False)),
            bytes_text(step.total(stage, crossing=True)),
        ]
        for stage, issued in step.issues().items()
    ]
    rows.append(
        [
            "all",
            str(len(step.exchanges)),
            bytes_text(step.total(crossing=False)),
            bytes_text(step.total(crossing=True)),
        ]
    )
    return TextTable(["exchange", "issued", "inside hosts", "across"], rows, right=[1, 2, 3])


def _hot(step: Simulation) -> TextTable:
    rows = []
    for hot in step.hot_rows[:_HOT_ROWS]:
        where = "every rank" if len(hot.ranks) == step.world_size else ranks_text(hot.ranks)
        rows.append(
            [hot.table, f"{hot.row:,}", f"{hot.reads:,.0f}", f"{hot.of_table:.1%}", where, f"{hot.of_rank:.1%}"]
        )
    head = ["hot row of", "row", "ids a step", "of its table", "on rank", "of its lookups"]
    return TextTable(head, rows, right=[1, 2, 3, 5])


def _waiting(step: Simulation) -> str:
    """How much of the ranks' time is waiting, and for whom."""
    if step.step_ms == 0:
        return "nothing is looked up and nothing is sent"
    idle = 1 - float(step.rank_ms.mean()) / step.step_ms
    spent = sorted(step.step_parts.items(), key=lambda part: -part[1])
    text = "the step is " + ", ".join(f"{ms / step.step_ms:.0%} {part}" for part, ms in spent if ms > 0)
    text += f"; ranks wait {idle:.0%} of the step for the slowest"
    slow = step.stragglers()
    if slow:
        text += f"; {several(len(slow), 'rank')} more than a tenth behind: rank {slow[0].rank}, {slow[0].reason}"
    return text


def figure(step: Simulation) -> Figure:
    """Milliseconds of each rank by phase, and the bytes on its two links."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look: dict[Any, Any] = {f"{part}.facecolor": "none" for part in ("figure", "axes", "savefig")}
    look |= {key: _INK for key in "text.color axes.labelcolor axes.edgecolor xtick.color ytick.color".split()}
    look |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 11.0}
    with matplotlib.rc_context(look):
        drawn = Figure(figsize=(7.0, 5.0), layout="constrained")
        FigureCanvasAgg(drawn)
        above, below = drawn.subplots(2, 1, sharex=True)
        _stack(above, step.phases, _COLORS)
        above.set_ylabel("ms")
        unit, name = _unit(max(float(step.sent().max()), float(step.received().max())))
        links = {
            "sent inside the host": step.sent(crossing=False) / unit,
            "sent to other hosts": step.sent(crossing=True) / unit,
        }
        _stack(below, links, {"sent inside the host": "#1f8c9c", "sent to other hosts": "#c34f88"})
        below.set_ylabel(name)
        below.set_xlabel("rank")
        drawn.suptitle("\n".join(textwrap.wrap(headline(step), 85)), x=0.012, ha="left", fontsize=11)
    return drawn


def _stack(axes: Any, parts: Mapping[str, Floats], colors: Mapping[str, str]) -> None:
    """Parts of each rank on top of one another: steps, which are one shape however many ranks there are."""
    base = np.zeros(len(next(iter(parts.values()))))
    edges = np.arange(len(base) + 1) - 0.5
    for label, values in parts.items():
        axes.stairs(base + values, edges, baseline=base, fill=True, color=colors[label], label=label)
        base = base + values
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _unit(most: float) -> tuple[float, str]:
    """What one tick of an axis of bytes stands for."""
    steps = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
    return next((step for step in steps if most >= step[0]), (1.0, "bytes"))
