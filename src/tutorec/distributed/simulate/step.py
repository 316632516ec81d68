"""The result of a simulation by rank, link and phase, as numbers, text or figure."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tutorec._style import ACCENT, EXCHANGE, STYLE
from tutorec._text import TextTable, byte_unit, bytes_text, ms_text, ranks_text, several
from tutorec.distributed.simulate.exchanges import Exchange, bytes_on_links
from tutorec.distributed.simulate.ids import Floats
from tutorec.distributed.simulate.work import RankWork, SimulatedTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = ("ids", "lookup", "rows", "gradients", "update")
PARTS = ("memory", "inside hosts", "across hosts", "latency")
# A grey that is legible on white and on dark pages; phases in time order, exchanges in their own
# hues.
# Colour and pattern of a phase: no rank has these colours. Exchanges have one, work in memory
# another.
_LOOKS = {
    "ids": (EXCHANGE, ""),
    "lookup": (ACCENT, ""),
    "rows": (EXCHANGE, "///"),
    "gradients": (EXCHANGE, "..."),
    "update": (ACCENT, "\\\\\\"),
    "sent inside the host": (ACCENT, ""),
    "sent to other hosts": (EXCHANGE, ""),
}
_HOT_ROWS = 5


@dataclass(frozen=True)
class HotRow:
    """A frequently read row.

    Args:
        table: Its table.
        row: Its index.
        reads: Number of lookups by all ranks in a step.
        table_share: Its share of the table's ids.
        ranks: The ranks that hold it: several for column shards, all for a replicated table.
        rank_share: Its share of the lookups of the first of these ranks; for a replicated table, of
            all ranks.
    """

    table: str
    row: int
    reads: float
    table_share: float
    ranks: tuple[int, ...]
    rank_share: float


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the mean.

    Args:
        rank: The rank.
        ms: Its own time, without waiting.
        behind: Its time above the mean, as a fraction of the mean.
        phase: The phase in which it loses most.
        reason: An explanation.
    """

    rank: int
    ms: float
    behind: float
    phase: str
    reason: str


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated step, by rank, link and phase. Arrays have W elements unless stated otherwise.

    Args:
        world_size: W.
        local_size: L, ranks per host.
        tables: The tables as placed by the plan.
        samples: B of each rank, the maximum over features.
        work: Rows that ranks look up and update.
        exchanges: The exchanges.
        components: Phase -> component -> ms of each rank: phases in time order, components as in
            `step_parts`.
        hot_rows: The most frequent rows, most frequent first.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> from tutorec.distributed.simulate import Load, simulate
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> item = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> plan = {"item": table_wise_sharding((8, 4), rank=1, device_type="cpu")}
        >>> step = simulate(
        ...     plan, Topology(2, "cpu"), [item], Load(batch_size=3, pooling_factor=2)
        ... )
        >>> (
        ...     step.work.lookups.tolist(),
        ...     step.matrix("output rows").tolist(),
        ... )  # 3 samples of 4 columns, 4 bytes each
        ([0.0, 12.0], [[0.0, 0.0], [48.0, 0.0]])
    """

    world_size: int
    local_size: int
    tables: Sequence[SimulatedTable]
    samples: Floats
    work: RankWork
    exchanges: Sequence[Exchange]
    components: Mapping[str, Mapping[str, Floats]]
    hot_rows: Sequence[HotRow] = field(default_factory=tuple)

    # --- time

    @cached_property
    def phases(self) -> dict[str, Floats]:
        """Phase -> milliseconds of each rank, in time order."""
        return {
            phase: np.sum(list(components.values()), axis=0)
            for phase, components in self.components.items()
        }

    @cached_property
    def rank_ms(self) -> Floats:
        """Milliseconds of computation and communication of each rank, without waiting."""
        return np.sum(list(self.phases.values()), axis=0)

    @cached_property
    def step_ms(self) -> float:
        """Milliseconds of the step, its critical path: the sum over phases of the slowest rank."""
        return float(sum(times.max() for times in self.phases.values()))

    @cached_property
    def step_parts(self) -> dict[str, float]:
        """Components of the step's milliseconds, for the slowest rank of each phase.

        They are ``memory`` (lookups and updates), ``inside hosts`` and ``across hosts`` (exchanges,
        counted on the slower link), and ``latency``.
        """
        slowest = {phase: int(times.argmax()) for phase, times in self.phases.items()}
        return {
            component: sum(
                float(self.components[phase][component][rank]) for phase, rank in slowest.items()
            )
            for component in PARTS
        }

    def stragglers(self, behind: float = 0.1) -> list[Straggler]:
        """Ranks whose own time exceeds the mean by a fraction, the slowest first.

        Args:
            behind: The fraction; 0.1 is ten percent.

        Raises:
            ValueError: ``behind`` is negative.
        """
        if behind < 0:
            raise ValueError(
                f"stragglers(behind={behind}): give a fraction of the mean, at least 0, e.g. 0.1"
            )

        mean = float(self.rank_ms.mean())
        slowest = np.argsort(-self.rank_ms, kind="stable").tolist()
        return [
            self._straggler(rank, mean)
            for rank in slowest
            if self.rank_ms[rank] > mean * (1 + behind)
        ]

    def _straggler(self, rank: int, mean: float) -> Straggler:
        loses = {phase: float(times[rank] - times.mean()) for phase, times in self.phases.items()}
        phase = max(loses, key=loses.__getitem__)
        lookups = self.work.lookups
        reason = f"{loses[phase]:.3g} ms more than the mean for {phase}"
        if lookups[rank] > lookups.mean():
            reason += f"; {lookups[rank] / lookups.mean():.2f} times the mean of rows looked up"

        for hot in self.hot_rows:
            if rank in hot.ranks and hot.rank_share > 0.1 and len(hot.ranks) < self.world_size:
                reason += (
                    f", {100 * hot.rank_share:.0f} % of them row {hot.row} of table {hot.table!r}"
                )
                break

        ms = float(self.rank_ms[rank])
        return Straggler(rank, ms, ms / mean - 1, phase, reason)

    # --- as text, HTML and figure

    def __str__(self) -> str:
        return "\n\n".join([_headline(self), *map(str, _tables(self).values()), _waiting(self)])

    def _repr_html_(self) -> str:
        """The text, with HTML tables."""
        tables = "".join(table.html(caption) for caption, table in _tables(self).items())
        return f"<p>{_headline(self)}</p>{tables}<p>{_waiting(self)}</p>"

    def plot(self) -> Figure:
        """Plot the milliseconds of each rank by phase, and the bytes on its two links."""
        return _figure(self)

    # --- bytes; arguments as in `traffic.Traffic`

    def sent(self, stage: str | None = None, *, crossing: bool | None = None) -> Floats:
        """Bytes that each rank sends.

        Args:
            stage: Count this stage only; None for all.
            crossing: True for bytes between hosts, False for bytes inside a host, None for both.
        """
        return self._by_rank("sent", stage, crossing)

    def received(self, stage: str | None = None, *, crossing: bool | None = None) -> Floats:
        """Bytes that each rank receives; arguments as in `sent`."""
        return self._by_rank("received", stage, crossing)

    def host_sent(self, stage: str | None = None) -> Floats:
        """Bytes that leave each host, one number per host."""
        return self.sent(stage, crossing=True).reshape(-1, self.local_size).sum(axis=1)

    def total(self, stage: str | None = None, *, crossing: bool | None = None) -> float:
        """Bytes that all ranks send; arguments as in `sent`."""
        return float(self.sent(stage, crossing=crossing).sum())

    def by_stage(self, *, crossing: bool | None = None) -> dict[str, float]:
        """Bytes sent in each stage; ``crossing`` as in `sent`."""
        return {stage: self.total(stage, crossing=crossing) for stage in self.issues()}

    def issues(self) -> dict[str, int]:
        """Number of exchanges of each stage."""
        return dict(Counter(exchange.stage for exchange in self.exchanges))

    def matrix(self, stage: str | None = None) -> Floats:
        """Bytes from each rank to each, ``[W, W]``.

        Raises:
            ValueError: There are more than 512 ranks.
        """
        return sum(
            (exchange.matrix() for exchange in self._of(stage)),
            np.zeros((self.world_size, self.world_size)),
        )

    def _of(self, stage: str | None) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if stage in (None, exchange.stage)]

    def _by_rank(self, side: str, stage: str | None, crossing: bool | None) -> Floats:
        both = sum(
            (getattr(exchange, side) for exchange in self._of(stage)),
            np.zeros((2, self.world_size)),
        )
        return bytes_on_links(both, crossing)


def _headline(step: Simulation) -> str:
    """Summary of the step in a sentence."""
    hosts = step.world_size // step.local_size
    where = several(step.world_size, "rank") + (
        f", {hosts:,} hosts of {step.local_size}" if hosts > 1 else ""
    )
    text = (
        f"a step of {several(len(step.tables), 'table')} on {where} takes "
        f"{ms_text(step.step_ms)} ms"
    )
    if step.step_ms > 0:
        times = {phase: float(ms.max()) for phase, ms in step.phases.items()}
        phase = max(times, key=times.__getitem__)
        text += f"; {100 * times[phase] / step.step_ms:.0f} % of it is {phase}"

    return text


def _tables(step: Simulation) -> dict[str, TextTable]:
    """Caption -> table: ranks, exchanges and hot rows."""
    tables = {"of each rank": _by_rank(step), "exchanges, all ranks together": _by_stage(step)}
    return tables | ({"rows that come most often": _hot(step)} if step.hot_rows else {})


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
    for quantity, values, text in lines:
        mean = float(values.mean())
        most = float(values.max())
        who = "host" if len(values) < step.world_size else "rank"
        where = f"{who} {int(values.argmax())}" if most > mean * 1.0001 else "all alike"
        rows.append(
            [quantity, text(mean), text(most), where, f"{most / mean:.2f}" if mean else "-"]
        )

    return TextTable(
        ["of each rank", "mean", "most", "where", "most / mean"], rows, right=[1, 2, 4]
    )


def _by_stage(step: Simulation) -> TextTable:
    stages = [(stage, stage, issued) for stage, issued in step.issues().items()]
    rows = [
        [
            title,
            str(issued),
            *(bytes_text(step.total(stage, crossing=crossing)) for crossing in (False, True)),
        ]
        for title, stage, issued in [*stages, ("all", None, len(step.exchanges))]
    ]
    return TextTable(["exchange", "issued", "inside hosts", "across"], rows, right=[1, 2, 3])


def _hot(step: Simulation) -> TextTable:
    rows = []
    for hot in step.hot_rows[:_HOT_ROWS]:
        where = "every rank" if len(hot.ranks) == step.world_size else ranks_text(hot.ranks)
        rows.append(
            [
                hot.table,
                f"{hot.row:,}",
                f"{hot.reads:,.0f}",
                f"{100 * hot.table_share:.1f} %",
                where,
                f"{100 * hot.rank_share:.1f} %",
            ]
        )

    head = ["hot row of", "row", "ids a step", "of its table", "on rank", "of its lookups"]
    return TextTable(head, rows, right=[1, 2, 3, 5])


def _waiting(step: Simulation) -> str:
    """The fraction of time that ranks wait, and the ranks they wait for."""
    if step.step_ms == 0:
        return "nothing is looked up and nothing is sent"

    idle = 1 - float(step.rank_ms.mean()) / step.step_ms
    spent = sorted(step.step_parts.items(), key=lambda component: -component[1])
    text = "the step is " + ", ".join(
        f"{100 * ms / step.step_ms:.0f} % {component}" for component, ms in spent if ms > 0
    )
    text += f"; ranks wait {100 * idle:.0f} % of the step for the slowest"
    slow = step.stragglers()
    if slow:
        text += (
            f"; {several(len(slow), 'rank')} more than a tenth behind: rank {slow[0].rank}, "
            f"{slow[0].reason}"
        )

    return text


def _figure(step: Simulation) -> Figure:
    """Figure of the milliseconds of each rank by phase, and the bytes on its two links."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {**STYLE, "font.size": 11.0, "axes.labelsize": 11.0}
    with matplotlib.rc_context(style):
        drawn = Figure(figsize=(7.0, 5.0), layout="constrained")
        FigureCanvasAgg(drawn)
        above, below = drawn.subplots(2, 1, sharex=True)
        _stack(above, step.phases)
        above.set_ylabel("ms")
        unit, name = byte_unit(max(float(step.sent().max()), float(step.received().max())))
        links = {
            "sent inside the host": step.sent(crossing=False) / unit,
            "sent to other hosts": step.sent(crossing=True) / unit,
        }
        _stack(below, links)
        below.set_ylabel(name)
        below.set_xlabel("rank")
        drawn.suptitle(
            "\n".join(textwrap.wrap(_headline(step), 85)), x=0.012, ha="left", fontsize=11
        )

    return drawn


def _stack(axes: Any, quantities: Mapping[str, Floats]) -> None:
    """Stacked step plot over ranks, which is one shape for any number of ranks."""
    base = np.zeros(len(next(iter(quantities.values()))))
    edges = np.arange(len(base) + 1) - 0.5
    for label, values in quantities.items():
        color, hatch = _LOOKS[label]
        axes.stairs(
            base + values,
            edges,
            baseline=base,
            fill=True,
            facecolor=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.0,
            label=label,
        )
        base = base + values

    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
