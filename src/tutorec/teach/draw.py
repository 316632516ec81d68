"""Figures of recorded or measured data: ``chart = draw.bars(...)``, ``draw.show(chart, alt=...)``.

A figure's title is a claim filled from its own data; `chart.claim` and `chart.facts` hold it for
the chapter's checks.
"""

from tutorec.teach.batched import table_batching, updates
from tutorec.teach.canvas import ACCENT, INK, RANK_COLORS, Chart, rank_color, show
from tutorec.teach.charts import bars, curves, rank_frequency
from tutorec.teach.cuts import cuts, one_table, resharding
from tutorec.teach.diagram import Diagram
from tutorec.teach.divisions import divisions
from tutorec.teach.dots import dots
from tutorec.teach.gantt import gantt, timeline
from tutorec.teach.host_sums import host_sums
from tutorec.teach.hosts import hosts, traffic
from tutorec.teach.levels import levels
from tutorec.teach.lines import lines
from tutorec.teach.maps import here, jagged, views
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
from tutorec.teach.one_bag import one_bag
from tutorec.teach.parts import parts
from tutorec.teach.placing import placing
from tutorec.teach.ratios import ratios
from tutorec.teach.remapping import RemappedBatch, remapping
from tutorec.teach.roofline import roofline
from tutorec.teach.stored import stored
from tutorec.teach.streams import Operation, streams
from tutorec.teach.swim_lanes import partial_sums, stages, swim_lanes
from tutorec.teach.tiers import tiers
from tutorec.teach.wrapping import wrapped

__all__ = [
    "ACCENT",
    "INK",
    "RANK_COLORS",
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
    "rank_color",
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
