"""Draw the picture that opens each part: `python book/_static/part_pictures.py` writes part_N.html.

The numbers are those of the part's page and of the chapters in parentheses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tutorec.teach import draw
from tutorec.teach.canvas import ACCENT, Chart
from tutorec.teach.diagram import Diagram

HERE = Path(__file__).parent


def one_visit() -> Chart:
    """Part I: ids of a visit select rows, and the rows give a score."""
    diagram = Diagram(lines=8.2)
    for x, title in ((1, "click log (01)"), (20, "ids (02)"), (38, "rows of two tables (03)")):
        diagram.text(x, 0.5, title)
    score = diagram.box(68, 3.7, "score", lines=1.4)
    users = diagram.box(38, 1.4, "1 of 500 users", width=20)
    products = diagram.box(38, 4.3, "3 of 200 products", width=20, lines=3.3)
    lines = [("user", [78], users), ("item", [140], products), ("clicked", [190, 167], products)]
    for (name, ids, table), y in zip(lines, (1.4, 4.3, 6.2), strict=True):
        feature = diagram.box(1, y, name, width=11)
        strip = diagram.strip(20, y + 0.1, ids, rank=ACCENT, cell=5)
        diagram.arrow(feature.right, strip.left)
        diagram.arrow(strip.right, (table.x, y + 0.7))
    for table in (users, products):
        diagram.arrow(table.right, score.left)
    return diagram.chart("a visit of chapter 01 reads four rows of two tables")


def two_ranks() -> Chart:
    """Part II: what two ranks exchange in a step."""
    diagram = Diagram(lines=17.2)
    wide = 24.0
    stages = (
        ("own samples", "own samples"),
        ("user_table, 4,096 x 64:\nlook up", "product_table, 4,096 x 64:\nlook up"),
        ("dense layers", "dense layers"),
        ("user_table:\nupdate", "product_table:\nupdate"),
    )
    lanes = [
        [
            diagram.box(x, 1.4 + 4.4 * line, texts[rank], rank=rank, width=wide, lines=2.4)
            for line, texts in enumerate(stages)
        ]
        for rank, x in enumerate((1.0, 53.0))
    ]
    for rank, lane in enumerate(lanes):
        diagram.text(lane[0].top[0], 0.5, f"rank {rank}", align="center", bold=True)
        for line, word in enumerate(("ids", "pooled rows", "gradients")):
            start, own, other = lane[line], lane[line + 1], lanes[1 - rank][line + 1]
            diagram.arrow(start.bottom, own.top, rank=rank)
            inner = start.x + wide - 2 if rank == 0 else start.x + 2
            arrival = other.x + 2 if rank == 0 else other.x + wide - 2
            diagram.arrow((inner, start.bottom[1]), (arrival, other.y), rank=rank)
            if rank == 0:
                diagram.text(39, start.bottom[1] + 0.3, word, align="center")
    return diagram.chart("each step has three exchanges of data: ids, pooled rows and gradients")


def one_plan() -> Chart:
    """Part III: a plan, and what is done with it."""
    diagram = Diagram(lines=10.6)
    tables = diagram.box(8, 0.4, "8 tables, 127 GB", width=22)
    ranks = diagram.box(48, 0.4, "4 GPUs of 80 GB", width=22)
    planner = diagram.box(22, 3.4, "planner: one plan of 297 billion (09, 09b)", width=44)
    diagram.arrow(tables.bottom, (31, planner.y))
    diagram.arrow(ranks.bottom, (49, planner.y))
    uses = (
        "train, save, load\nunder another plan (10)",
        "update the rows\nthat were read (11)",
        "compute the step of\n8 to 4,096 ranks (12, 12b)",
    )
    for x, text in zip((1, 27, 53), uses, strict=True):
        use = diagram.box(x, 7.4, text, width=24, lines=2.6)
        diagram.arrow((23 + 0.6 * x, planner.y + planner.height), use.top)
    return diagram.chart("one plan places all tables; the model is trained under it")


def one_row() -> Chart:
    """Part IV: bytes of a row, and the way of the model to a server."""
    diagram = Diagram(lines=9.4)
    for line, (name, size) in enumerate((("float32", 256), ("int8", 68), ("int4", 36))):
        y = 0.3 + 1.6 * line
        diagram.text(1, y + 0.6, name)
        bar = diagram.strip(11, y, [""], rank=ACCENT, cell=size / 5)
        diagram.text(bar.right[0] + 1, y + 0.6, f"{size} bytes" + (" (13)" if line else ""))
    words = ("quantized model", "traced graph", "one file")
    boxes = [diagram.box(x, 6.4, text) for x, text in zip((1, 24, 43), words, strict=True)]
    boxes.append(diagram.box(58, 5.6, "Python (14)", width=18))
    boxes.append(diagram.box(58, 7.6, "C++ (14)", width=18))
    for start, end in ((0, 1), (1, 2), (2, 3), (2, 4)):
        diagram.arrow(boxes[start].right, boxes[end].left)
    return diagram.chart("a row of 64 columns in bytes, and the file that serves it")


def five_costs() -> Chart:
    """Part V: one cost for each chapter, before and after."""
    diagram = Diagram(lines=10.4)
    costs = (
        ("time (15)", "train batch 1, send ids of batch 2", "both at once"),
        ("bytes (16)", "1,024 rows", "32 + 32 rows"),
        ("memory (17)", "256 MiB in memory", "under 64 MiB, the rest in a file"),
        ("rows (18)", "row of a product that has left", "row of a new product"),
        ("load (19)", "fullest rank: 3.93 x the mean", "1.00 x the mean"),
    )
    for line, (name, before, after) in enumerate(costs):
        y = 0.3 + 2.0 * line
        diagram.text(1, y + 0.7, name)
        first = diagram.box(13, y, before, width=30)
        diagram.arrow(first.right, diagram.box(48, y, after, width=29).left)
    return diagram.chart("each chapter saves one cost")


def side_by_side() -> Chart:
    """Part VI: both libraries on the same inputs and the same script."""
    diagram = Diagram(lines=9.2)
    halves = (
        ("the same inputs", "94 cases, nine questions,\ntimes in pairs"),
        ("the same script", "20 losses, and 20\nafter a restart"),
    )
    for left, (given, compared) in zip((1, 42), halves, strict=True):
        source = diagram.box(left + 6, 0.3, given, width=22)
        result = diagram.box(left + 2, 6.4, compared, width=30, lines=2.4)
        for x, library in ((left, "TorchRec"), (left + 19, "tutorec")):
            run = diagram.box(x, 3.4, library, width=15)
            diagram.arrow(source.bottom, run.top)
            diagram.arrow(run.bottom, (x + 7.5, result.y))
    return diagram.chart("both libraries get the same inputs and run the same script")


PICTURES: tuple[tuple[Callable[[], Chart], str], ...] = (
    (one_visit, "User 78, item 140 and clicked items 190 and 167 become one score"),
    (two_ranks, "Two lanes with arrows that cross between them"),
    (one_plan, "Tables and ranks go into the planner; its plan is used in three ways"),
    (one_row, "256 bytes in float32, 68 in int8, 36 in int4; then a graph, a file, two servers"),
    (five_costs, "Five lines, each with what a cost was before and after"),
    (side_by_side, "TorchRec and tutorec beside each other, twice"),
)


def main() -> None:
    """Write the pictures beside this file."""
    for number, (drawing, alt) in enumerate(PICTURES, start=1):
        page = draw.show(drawing(), alt=alt)._repr_html_()
        (HERE / f"part_{number}.html").write_text(page + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
