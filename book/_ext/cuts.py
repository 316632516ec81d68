"""What the seven cuts of one table cost, with sliders: the directive ``{cuts}``.

The page shows the library's numbers for `START`, as a table with bars. Where scripts run,
_static/cuts.js puts sliders above the table and computes its lines anew with the same formulas. An
empty ``<div class="cuts"></div>`` in a notebook becomes the same table there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tutorec.distributed.plan import ShardingType
from tutorec.distributed.plan.sizes import cut_arrays, slice_width
from tutorec.distributed.planner.constants import HARDWARE
from tutorec.distributed.planner.cost import WORK, fixed_cost, shard_perf
from tutorec.distributed.planner.options import TableProfile
from tutorec.distributed.planner.topology import Topology

CUTS = {
    "data-parallel": ShardingType.DATA_PARALLEL,
    "table-wise": ShardingType.TABLE_WISE,
    "column-wise": ShardingType.COLUMN_WISE,
    "table-column-wise": ShardingType.TABLE_COLUMN_WISE,
    "row-wise": ShardingType.ROW_WISE,
    "table-row-wise": ShardingType.TABLE_ROW_WISE,
    "grid": ShardingType.GRID_SHARD,
}
LEAST_COLUMNS = 32  # of a slice
HEADER = ("cut", "bytes, all ranks", "exchanges", "time, busiest rank", "weights, fullest rank")


@dataclass(frozen=True)
class Case:
    """What the sliders say."""

    machine: str = "H100"
    ranks: int = 64
    hosts: int = 8
    batch: int = 4096
    bag: int = 10
    rows: int = 10_000_000
    columns: int = 128

    @property
    def facts(self) -> TableProfile:
        samples = float(self.batch)
        return TableProfile(
            "",
            "table",
            self.rows,
            self.columns,
            features=("f",),
            samples=(samples,),
            ids=(samples * self.bag,),
        )

    @property
    def topology(self) -> Topology:
        speeds = vars(HARDWARE[self.machine])
        kept = (
            "hbm_mem_bw",
            "ddr_mem_bw",
            "intra_host_bw",
            "inter_host_bw",
            "latency_ms",
            "row_ms",
            "bwd_compute_multiplier",
        )
        return Topology.hosts(
            self.hosts,
            self.ranks // self.hosts,
            speeds["device"],
            **{name: speeds[name] for name in kept},
        )


@dataclass(frozen=True)
class Cost:
    """A cut in one step: bytes of all ranks, and of these between hosts; time and bytes of weights of a rank."""  # noqa: E501

    cut: str
    bytes: float
    across: float
    exchanges: int
    ms: float
    mean: float
    held: float


START = Case()


def ranks_of(kind: ShardingType, count: int, case: Case) -> np.ndarray:
    """The rank of each piece: in turn, over all ranks, those of a host, or the hosts."""
    pieces, local = np.arange(count), case.ranks // case.hosts
    if kind is ShardingType.GRID_SHARD:
        return pieces // local % case.hosts * local + pieces % local
    return pieces % (local if kind is ShardingType.TABLE_COLUMN_WISE else case.ranks)


def cost(cut: str, case: Case) -> Cost:
    """What the library says of a cut."""
    kind, facts, machine = CUTS[cut], case.facts, case.topology
    width = slice_width(case.columns, LEAST_COLUMNS)
    sizes = cut_arrays(
        kind, (case.rows, case.columns), case.ranks, case.ranks // case.hosts, width
    )[0]
    ranks = ranks_of(kind, len(sizes), case)
    ms = np.bincount(
        ranks, shard_perf(facts, kind, "fused", sizes, machine).sum(axis=1), case.ranks
    )
    held = np.bincount(ranks, 4.0 * sizes.prod(axis=1), case.ranks)
    works = [WORK[kind](facts, (rows, columns), machine) for rows, columns in sizes.tolist()]
    legs = [leg for work in works for leg in (*work.ids_in, *work.rows_home, *work.gradients_back)]
    inside, across = sum(leg.inside for leg in legs), sum(leg.across for leg in legs)
    fixed = fixed_cost(machine, kind.value, pooled=True)
    exchanges = round(fixed / machine.latency_ms)
    return Cost(
        cut,
        inside + across,
        across,
        exchanges,
        ms.max() + fixed,
        ms.sum() / case.ranks + fixed,
        held.max(),
    )


def size(value: float) -> str:
    """Bytes in words, three digits."""
    power = min(int(np.log10(max(value, 1)) // 3), 5)
    return f"{value / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"


def page(case: Case = START) -> str:
    """The table, and for the script what it shows."""
    costs = [cost(cut, case) for cut in CUTS]
    columns = (
        ("bytes", "across", size),
        ("exchanges", "exchanges", str),
        ("ms", "mean", "{:.3g} ms".format),
        ("held", "held", size),
    )

    def cell(line: Cost, name: str, part: str, text: Any) -> str:
        values = [getattr(each, name) for each in costs]
        value, least = (
            getattr(line, name),
            ' class="least"' if getattr(line, name) == min(values) else "",
        )
        bar = f'<span class="bar" style="width:{100 * value / max(values):.4g}%">'
        inner = f'<i style="width:{100 * getattr(line, part) / (value or 1):.4g}%"></i></span>'
        return f"<td><span{least}>{text(value)}</span>{bar}{inner}</td>"

    head = "".join(f'<th scope="col">{words}</th>' for words in HEADER)
    rows = "".join(
        f'<tr><th scope="row">{line.cut}</th>{"".join(cell(line, *column) for column in columns)}</tr>'  # noqa: E501
        for line in costs
    )
    caption = (
        f"one table of {case.rows:,} rows x {case.columns} columns, {case.batch:,} samples a rank "
        f"with {case.bag} ids each, on {case.ranks} {case.machine} in {case.hosts} hosts"
    )
    note = f"<p>The page starts with {caption}.</p>"
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    table = f'<table class="no-scroll" aria-label="Costs of the seven cuts">{body}</table>'
    return f'<div class="cuts">{table}{note}</div>'


class Cuts(SphinxDirective):
    """The table with its sliders."""

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", page(), format="html")]


def load(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Load the script where a page has the table."""
    if doctree is not None and any(
        'class="cuts"' in raw.astext() for raw in doctree.findall(nodes.raw)
    ):
        app.add_js_file("cuts.js", defer="defer")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("cuts", Cuts)
    app.connect("html-page-context", load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
