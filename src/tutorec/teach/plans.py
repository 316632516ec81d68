"""Which rank has which part of a table, and what a plan makes ranks send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from tutorec.balance import LoadBalanceManager
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.teach.canvas import INK, Chart, canvas, finish, legend, rank_color, rectangle, style
from tutorec.teach.diagram import WIDTH, Diagram, Node
from tutorec.teach.units import decimal_size

_BYTES = 4  # of a weight, an id or a length
_GAP = 0.35  # between tables, in widths of the widest
_COPY = 1.06  # from a copy to the one next to it, in widths of the table
_TABLE_LINES = 9  # of text that a whole table has room for
_APART = 0.06  # between two shards, of the size of a table

#: Rank, first row, first column, rows, columns.
Box = tuple[int, int, int, int, int]


def shard_boxes(entry: Any) -> list[Box]:
    """Where each shard of a table is; a copy is the whole table.

    Args:
        entry: With `shards()`, `table_shape()` and `ranks`.
    """
    if entry.shards():
        return [
            (shard.placement.rank(), *shard.shard_offsets, *shard.shard_sizes)
            for shard in entry.shards()
        ]
    return [(rank, 0, 0, *entry.table_shape()) for rank in entry.ranks]


@style()
def cuts(plans: Mapping[str, Mapping[str, Any]], *, claim: str) -> Chart:
    """Two plans in a row: a box for each shard, with height by rows and width by columns.

    A shard has the colour of its rank and, where there is room, its offsets.

    Args:
        plans: Name to the plan of one module: table name -> entry with `shards()` and
            `table_shape()`.
        claim: The title.
    """
    lines = -(-len(plans) // 2)
    figure = canvas(0.8 + 2.5 * lines)
    panels = [*figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False).flat]
    shapes = [entry.table_shape() for plan in plans.values() for entry in plan.values()]
    most_rows = max(rows for rows, _ in shapes)
    widest = max(columns for _, columns in shapes)
    ranks = set()
    for axes in panels:
        axes.axis("off")
    for axes, (name, plan) in zip(panels, plans.items(), strict=False):
        axes.set_title(name)
        left = 0.0
        for table, entry in plan.items():
            all_rows, all_columns = entry.table_shape()
            label = f"{table.replace('_', '_' + chr(10), 1)}\n{all_rows} x {all_columns}"
            axes.text(left, all_rows + 0.04 * most_rows, label, fontsize=9, va="top")
            for rank, row, column, rows, columns in shard_boxes(entry):
                turned = 90 if columns <= 0.9 * widest else 0
                has_room = rows >= most_rows * (0.4 if turned else 0.2)
                text = f"[{row}, {column}]" if has_room else ""
                look = {"color": rank_color(rank), "edge": "white", "width": 1.0}
                box = left + column, row, columns, rows
                rectangle(axes, box, text, **look, size=8, rotation=turned)
                ranks.add(rank)
            left += all_columns + _GAP * widest
            axes.set(xlim=(0, left), ylim=(1.5 * most_rows, 0))

    legend(figure, {f"rank {rank}": {"color": rank_color(rank)} for rank in sorted(ranks)})
    return finish(figure, claim)


@style()
def one_table(plans: Mapping[str, Any], *, mark: int, claim: str) -> Chart:
    """One table under several plans, a large panel for each, and the row of an id.

    Rows go down, columns across. A shard has its rank and, where there is room, what is cut. Copies
    are next to each other, each as large as the whole table.

    Args:
        plans: Name of a plan to its entry for the table, with `shards()`, `table_shape()` and
            `ranks`.
        mark: The id whose row has a thick line, near the top where it is small.
        claim: Title; may use the names of the plans, for the ranks that read the row, such as ``0``
            or ``0 and 1``.
    """
    lines = -(-len(plans) // 2)
    figure = canvas(2.5 * lines)
    # widths of the panels, in tables
    widths = [
        1.0 if entry.shards() else 1 + _COPY * (len(entry.ranks) - 1) for entry in plans.values()
    ]
    ratios = [max(widths[side::2], default=1.0) for side in (0, 1)]
    grid = figure.add_gridspec(lines, 2, width_ratios=ratios)
    readers = {}

    for number, (name, entry) in enumerate(plans.items()):
        share = widths[number] / ratios[number % 2]
        place = grid[divmod(number, 2)]
        if share < 1:
            place = place.subgridspec(1, 2, width_ratios=[share, 1 - share])[0]
        axes = figure.add_subplot(place)

        boxes = shard_boxes(entry)
        columns = entry.table_shape()[1]
        copies = not entry.shards()
        reading = [str(rank) for rank, row, _, high, _ in boxes if row <= mark < row + high]
        readers[name] = " and ".join(reading)
        for position, box in enumerate(boxes):
            shift = _COPY * columns * position if copies else 0
            _shard(axes, box, shift, mark, entry.table_shape())

        axes.set_title(f"{name}: row {mark} on rank {readers[name]}", fontsize=10, loc="left")
        ticks = sorted({edge for box in boxes for edge in (box[2], box[2] + box[4])})
        axes.set_xticks([] if copies else ticks)
        axes.set_yticks(sorted({edge for box in boxes for edge in (box[1], box[1] + box[3])}))
        axes.set_xlabel(f"{len(boxes)} copies of {columns} columns" if copies else "column")
        axes.set_ylabel("row")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.autoscale_view()
        axes.invert_yaxis()
        axes.set_xlim(0, columns * widths[number])
    return finish(figure, claim, **readers)


def _shard(axes: Any, box: Box, shift: float, mark: int, shape: tuple[int, int]) -> None:
    """A shard in the colour of its rank, what it holds written in it, and the line of a row."""
    rank, row, column, high, wide = box
    rows, columns = shape
    gap = "\n" if wide < columns else " "  # narrow shards have narrow lines
    row_text = f"\nrows{gap}{row:,} to {row + high - 1:,}" if high < rows else ""
    column_text = f"\ncolumns{gap}{column} to {column + wide - 1}" if wide < columns else ""
    text = f"rank {rank}" + (row_text + column_text or "\nwhole")
    if high * _TABLE_LINES < (text.count("\n") + 1) * rows:
        text = f"rank {rank}"

    left = column + shift
    look = {"color": rank_color(rank), "edge": "white", "width": 2}
    rectangle(axes, (left, row, wide, high), text, **look, size=8.5)
    if row <= mark < row + high:
        ends = [left + 0.02 * wide, left + 0.98 * wide]  # the row of a shard ends with the shard
        axes.plot(ends, [mark] * 2, color=INK, linewidth=5, solid_capstyle="butt", zorder=3)


@style()
def resharding(saved: Any, loaded: Mapping[str, Any], *, claim: str) -> Chart:
    """The shards of a table, each part in the colour of the rank whose file has it.

    Args:
        saved: The table in the plan under which it was written: an entry with `shards()` and
            `table_shape()`.
        loaded: Title to the table in a plan under which it is read.
        claim: Title; may use {files}, and by position of a plan {reads_1}, {reads_2}, ...: the
            parts that are read.
    """
    files = shard_boxes(saved)
    panels = {f"saved by {len(files)} ranks": saved, **loaded}
    figure = canvas(3.4)
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True)
    reads = {}
    for position, (axes, (name, entry)) in enumerate(zip(grid, panels.items(), strict=True)):
        boxes = shard_boxes(entry)
        reads[f"reads_{position}"] = sum(_parts(axes, box, files, entry) for box in boxes)
        axes.set_title(name)
        axes.axis("off")

    grid[0].autoscale_view()
    grid[0].invert_yaxis()
    keys = {f"from rank {rank}'s file": {"color": rank_color(rank)} for rank, *_ in files}
    legend(figure, keys, len(keys))
    return finish(figure, claim, files=len(files), **reads)


def _parts(axes: Any, shard: Box, files: list[Box], entry: Any) -> int:
    """Draw one shard, and return the number of parts that it is read in."""
    rank, top, left, rows, columns = shard
    all_rows, all_columns = entry.table_shape()
    # away from the shard before it
    right = _APART * all_columns * round(left / columns)
    down = _APART * all_rows * round(top / rows)
    parts = 0
    for file, row, column, height, width in files:
        first = max(top, row)
        start = max(left, column)
        high = min(top + rows, row + height) - first
        wide = min(left + columns, column + width) - start
        if high > 0 and wide > 0:
            turned = 90 if wide < all_columns / 2 else 0
            text = decimal_size(_BYTES * high * wide)
            box = start + right, first + down, wide, high
            rectangle(axes, box, text, color=rank_color(file), width=0, size=9, rotation=turned)
            parts += 1

    x = left + right
    y = top + down
    rectangle(axes, (x, y, columns, rows), width=1.2)
    look = {"va": "center", "size": 8}
    if columns < 0.9 * all_columns:
        below = y + rows + 0.06 * all_rows
        axes.text(x + columns / 2, below, f"rank {rank}", ha="center", **look)
    else:
        beside = x + 1.03 * columns
        axes.text(beside, y + rows / 2, f"rank {rank}", rotation=270, **look)
    return parts


_BAG_PANEL = 40, 16.2  # characters and lines from one panel to the next
_BAG_LANES = 1.0, 21.0
# Widths of cells.
_ID_CELL = 2.5
_SUM_CELL = 4.5


def one_bag(plans: Mapping[str, Any], weight: Tensor, bag: Sequence[int]) -> Chart:
    """A sample of rank 0 under plans for two ranks: ids, sums and gradients, with their bytes.

    An id has the colour of the rank that reads its row; of no rank where several do. The title says
    how many bytes all messages have under each plan, those that stay on rank 0 included.

    Args:
        plans: Name of a plan to its entry for the table, as for `one_table`.
        weight: The table, [rows, columns].
        bag: The ids of the sample.
    """
    diagram = Diagram(lines=_BAG_PANEL[1] * -(-len(plans) // 2))
    sent = {}
    for number, (name, entry) in enumerate(plans.items()):
        left = _BAG_PANEL[0] * (number % 2)
        top = _BAG_PANEL[1] * (number // 2)
        sent[name] = _bag_panel(diagram, left, top, entry, weight, bag)
        diagram.text(left, top + 0.4, f"{name}: {sent[name]} bytes", bold=True)

    counts = ", ".join(f"{count} {name}" for name, count in sent.items())
    return diagram.chart(f"Bytes of one bag: {counts}", sent=sent)


def _bag_panel(
    diagram: Diagram, left: float, top: float, entry: Any, weight: Tensor, bag: Sequence[int]
) -> int:
    """Draw one plan; return the bytes of its messages."""
    copied = not entry.shards()
    boxes = shard_boxes(entry)
    reads = boxes[:1] if copied else boxes
    sent = 0

    def sums(ids: Sequence[int], columns: slice = slice(None)) -> list[str]:
        return [f"{number:g}" for number in weight[list(ids), columns].sum(0).tolist()]

    def message(start: Node, end: tuple[float, float], numbers: int, rank: int) -> None:
        """An arrow between rank 0 and a rank, with its bytes; none has no text."""
        nonlocal sent
        sent += _BYTES * numbers
        text = f"{_BYTES * numbers} B" if numbers else ""
        begin = start.bottom
        if rank == 0:  # straight down
            begin = start.x + _ID_CELL / 2, begin[1]
            end = begin[0], end[1]
        diagram.arrow(begin, end, text, rank=rank, right=begin[0] <= end[0])

    owners = []
    for row in bag:
        ranks = [box[0] for box in reads if box[1] <= row < box[1] + box[3]]
        owners.append(ranks[0] if len(ranks) == 1 else None)
    lanes = [left + lane for lane in _BAG_LANES]
    for rank, lane in enumerate(lanes):
        diagram.text(lane, top + 1.4, f"rank {rank}")
    start = diagram.strip(lanes[0], top + 2, bag, rank=owners, cell=_ID_CELL)
    result = diagram.strip(lanes[0], top + 10.6, sums(bag), cell=_SUM_CELL)
    diagram.text(lanes[1], top + 11.2, "pooled row on rank 0")

    for rank, first, column, rows, columns in reads:
        lane = lanes[rank]
        ids = [row for row in bag if first <= row < first + rows]
        ids_node = diagram.strip(lane, top + 5.4, ids, rank=rank, cell=_ID_CELL)
        cells = sums(ids, slice(column, column + columns))
        sums_node = diagram.strip(lane, top + 7.4, cells, rank=rank, cell=_SUM_CELL)
        message(start, ids_node.top, 0 if copied else 1 + len(ids), rank)
        x = lane + _ID_CELL / 2
        diagram.arrow((x, ids_node.bottom[1]), (x, sums_node.y), rank=rank)
        end = result.x + 0.8 * result.width, result.y
        message(sums_node, end, 0 if copied else columns, rank)

    for rank, _, _, _, columns in boxes:
        cells = [*(bag if copied else []), *["g"] * columns]
        update = diagram.strip(lanes[rank], top + 13.8, cells, rank=rank, cell=_ID_CELL)
        message(result, update.top, len(cells) + copied, rank)
    return sent


_HOST_LANE = 19.5
_BAG_CELL = 4.0


def host_sums(rows: Sequence[Sequence[int]], inside: int, across: int, *, claim: str) -> Chart:
    """Two hosts of two ranks; a table is on the first host, cut by rows: add inside it, then cross.

    Args:
        rows: For both ranks of the first host how many rows of one bag of each of the four ranks it
            holds.
        inside: Bytes that a rank of the first host sends to its neighbour in a step.
        across: Bytes that it sends to the rank with its number on the other host.
        claim: The title.
    """
    diagram = Diagram(lines=17)
    diagram.text(2 * _HOST_LANE, 3.2, "no rows of this table")
    diagram.text(2 * _HOST_LANE, 7.4, f"inside the host:\n{inside:,} B each way")
    diagram.text(2 * _HOST_LANE + 6, 11.2, f"across: {across:,} B each")

    sums = [f"{first} + {second}" for first, second in zip(*rows, strict=True)]
    middles = []
    for rank in (0, 1):
        title = f"for rank {rank}, for rank {rank + 2}"
        cells = [sums[rank], sums[rank + 2]]
        middles.append(
            diagram.strip(_HOST_LANE * rank, 9.4, cells, rank=rank, cell=2 * _BAG_CELL, title=title)
        )

    for rank in (0, 1):
        x = _HOST_LANE * rank
        diagram.strip(x, 2.6, rows[rank], rank=rank, cell=_BAG_CELL, title="rows added, for rank")
        for other in range(4):
            start = x + _BAG_CELL * (other + 0.5)
            diagram.text(start, 4.4, str(other), align="center")
            end = middles[other % 2].x + 2 * _BAG_CELL * (other // 2 + 0.3 + 0.4 * rank)
            diagram.arrow((start, 4.9), (end, 8.1), rank=rank)

    for rank in range(4):
        diagram.text(_HOST_LANE * rank, 0.5, f"rank {rank}, host {rank // 2}", bold=True)
        owner = rank % 2
        cells = [rows[0][rank] + rows[1][rank]]
        node = diagram.strip(
            _HOST_LANE * rank, 14.6, cells, rank=owner, cell=_BAG_CELL, title="its bag, all rows"
        )
        start = middles[owner].x + _BAG_CELL * (1 if rank < 2 else 3), 10.6
        diagram.arrow(start, (node.top[0], 13.2), rank=owner)
    return diagram.chart(claim)


def wrapped(model: nn.Module, plan: ShardingPlan, *, claim: str) -> Chart:
    """A model after `DistributedModelParallel`: replicas of dense layers, and shards of tables.

    Args:
        model: The unsharded model. Parameters outside of the plan's module are dense, in float32.
        plan: Of one module with one or two tables; each rank has a shard of rows of each table.
        claim: The title; ``{dense}`` and ``{held}`` are the bytes that rank 0 has of dense layers
            and of tables.
    """
    [(path, tables)] = plan.plan.items()
    dense = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(f"{path}."))
    dense_bytes = decimal_size(4 * dense)
    boxes = {name: shard_boxes(entry) for name, entry in tables.items()}
    ranks = range(len(next(iter(boxes.values()))))

    diagram = Diagram(lines=5.6 * len(ranks) + 0.6)
    diagram.text(1, 0.6, "DistributedDataParallel", bold=True)
    diagram.text(28, 0.6, "sharded modules", bold=True)
    replicas = []
    for rank in ranks:
        y = 1.6 + 5.6 * rank
        replica = f"rank {rank}: dense layers\n{dense:,} numbers\n{dense_bytes}, a replica"
        replicas.append(diagram.box(1, y, replica, rank=rank, width=25, lines=3.4))
        for column, (name, shards) in enumerate(boxes.items()):
            _, first, _, rows, columns = shards[rank]
            size = decimal_size(4 * rows * columns)
            shard = f"rank {rank}: {name}\nrows {first:,} to {first + rows - 1:,}\n{size}"
            diagram.box(28 + 25 * column, y, shard, rank=rank, width=24, lines=3.4)
    for upper, lower in pairwise(replicas):
        diagram.arrow(upper.bottom, lower.top)
        diagram.arrow(lower.top, upper.bottom)
        diagram.text(15, (upper.bottom[1] + lower.y) / 2, "gradients: mean")

    held = sum(4 * rows * columns for [(*_, rows, columns), *_] in boxes.values())
    return diagram.chart(claim, dense=dense_bytes, held=decimal_size(held))


_STRIPS = 8.0  # left edge of the rows, in characters
_WIDEST = 5.0  # a cell
_RANK_LINES = 1.6


def divisions(cases: Mapping[str, LoadBalanceManager], *, claim: str) -> Chart:
    """Small divisions below each other, a line of rows for each rank.

    A cell is a row: feature and id in the first row of a feature, the id in the others. A row that
    the rank does not count has a thick frame, a row that is nobody's is empty.

    Args:
        cases: Name -> division, of a few dozen rows at most.
        claim: The title; ``{fewest}`` and ``{most}`` are the rows of all features in the smallest
            and the largest case.
    """
    heights = [2.4 + _RANK_LINES * len(case.groups) for case in cases.values()]
    diagram = Diagram(lines=sum(heights))
    top = 0.6
    for (name, case), height in zip(cases.items(), heights, strict=True):
        diagram.text(0, top, f"{name}: rows {case.embeddings_per_feat}", bold=True)
        _case(diagram, case, top + 1)
        top += height

    totals = [sum(case.embeddings_per_feat) for case in cases.values()]
    return diagram.chart(claim, fewest=min(totals), most=max(totals))


def _case(diagram: Diagram, case: LoadBalanceManager, top: float) -> None:
    """The rows of each rank, and how many it counts."""
    rows: list[list[str]] = []
    notes = []
    for rank in range(len(case.groups)):
        counted = case.get_num_embeddings_on_rank(rank)
        blocks = case.get_owned_rows(rank)
        cells = [""] * max(counted, *(block.offset + block.rows for block in blocks))
        for block in blocks:
            for row in range(block.rows):
                feature = f"{block.feature}:" if row == 0 else ""
                cells[block.offset + row] = f"{feature}{block.first + row}"
        rows.append(cells)
        empty = [f", lists feature {block.feature}" for block in blocks if block.rows < 1]
        notes.append(f"counts {counted}{''.join(empty)}")

    # so that the longest line has room for its text
    room = WIDTH - _STRIPS - max(map(len, notes)) - 1
    width = min(_WIDEST, room / max(map(len, rows)))
    for rank, cells in enumerate(rows):
        y = top + _RANK_LINES * rank
        counted = case.get_num_embeddings_on_rank(rank)
        missed = [row for row in range(counted, len(cells)) if cells[row]]
        owners = [rank if text else None for text in cells]
        diagram.text(0, y + 0.6, f"rank {rank}")
        node = diagram.strip(_STRIPS, y, cells, rank=owners, cell=width, marked=missed)
        diagram.text(node.right[0] + 1, y + 0.6, notes[rank])


_BARS = 27.0  # left edge of the bars
_SUM_ROOM = 7.0  # room for the sum on their right
_PLAN_LINES = 3.4


def placing(plans: Sequence[Mapping[str, int]], ms: Mapping[str, float], *, claim: str) -> Chart:
    """Plans for two ranks below each other, a bar for each rank, as long as the rank is busy.

    Next to a plan is what was done since the plan before it: which tables were placed, moved or
    taken off. Those that were placed or moved are framed.

    Args:
        plans: Table -> rank, plan by plan; a first plan without tables is not drawn.
        ms: Table -> its milliseconds.
        claim: The title.
    """
    before, *drawn = plans if not plans[0] else [None, *plans]
    busy = [
        [sum(ms[table] for table, owner in plan.items() if owner == rank) for rank in (0, 1)]
        for plan in drawn
    ]
    scale = (WIDTH - _BARS - _SUM_ROOM) / max(map(max, busy))
    diagram = Diagram(lines=_PLAN_LINES * len(drawn) + 0.2)

    for number, plan in enumerate(drawn):
        top = 0.4 + _PLAN_LINES * number
        diagram.text(0, top + 1.3, _changes(before, plan))
        for rank in (0, 1):
            y = top + 1.3 * rank
            x = _BARS
            diagram.text(_BARS - 1, y + 0.6, f"rank {rank}", align="right")
            for table in (table for table, owner in plan.items() if owner == rank):
                is_new = before is not None and before.get(table) != rank
                marked = {0} if is_new else ()
                cells = [f"{table} {ms[table]:g}"]
                node = diagram.strip(x, y, cells, rank=rank, marked=marked, cell=scale * ms[table])
                x = node.right[0]
            diagram.text(x + 0.8, y + 0.6, f"{busy[number][rank]:g} ms")
        before = plan
    return diagram.chart(claim)


def _changes(before: Mapping[str, int] | None, plan: Mapping[str, int]) -> str:
    """What leads from one plan to the next, on a line each."""
    if before is None:
        return "the plan before"

    placed = plan.keys() - before.keys()
    moved = [table for table in plan if before.get(table, plan[table]) != plan[table]]
    changes = {"put": placed, "move": moved, "take off": before.keys() - plan.keys()}
    lines = [f"{verb} {', '.join(sorted(tables))}" for verb, tables in changes.items() if tables]
    return "\n".join(lines) or "as it was"
