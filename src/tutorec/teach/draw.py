"""Figures of recorded or measured data: ``chart = draw.bars(...)``, ``draw.show(chart, alt=...)``.

A figure's title is a claim filled from its own data; `chart.claim` and `chart.facts` hold it for
the chapter's checks.
"""

from tutorec.teach.batches import (
    here,
    jagged,
    partial_sums,
    stages,
    swim_lanes,
    table_batching,
    updates,
    views,
)
from tutorec.teach.canvas import ACCENT, Chart, show
from tutorec.teach.charts import (
    bars,
    curves,
    dots,
    hosts,
    levels,
    lines,
    parts,
    rank_frequency,
    ratios,
    roofline,
    traffic,
)
from tutorec.teach.diagram import Diagram
from tutorec.teach.mechanisms import (
    all_to_all,
    byte_row,
    collisions,
    dlrm,
    funnel,
    lookup,
    ranks,
    towers,
    training_step,
)
from tutorec.teach.plans import (
    cuts,
    divisions,
    host_sums,
    one_bag,
    one_table,
    placing,
    resharding,
    wrapped,
)
from tutorec.teach.rows import RemappedBatch, remapping, stored, tiers
from tutorec.teach.timelines import Operation, gantt, streams, timeline

__all__ = [
    "ACCENT",
    "Chart",
    "Diagram",
    "Operation",
    "RemappedBatch",
    "all_to_all",
    "bars",
    "byte_row",
    "collisions",
    "curves",
    "cuts",
    "divisions",
    "dlrm",
    "dots",
    "funnel",
    "gantt",
    "here",
    "host_sums",
    "hosts",
    "jagged",
    "levels",
    "lines",
    "lookup",
    "one_bag",
    "one_table",
    "partial_sums",
    "parts",
    "placing",
    "rank_frequency",
    "ranks",
    "ratios",
    "remapping",
    "resharding",
    "roofline",
    "show",
    "stages",
    "stored",
    "streams",
    "swim_lanes",
    "table_batching",
    "tiers",
    "timeline",
    "towers",
    "traffic",
    "training_step",
    "updates",
    "views",
    "wrapped",
]
