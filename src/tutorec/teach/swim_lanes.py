"""One batch on two ranks: ids, pooled rows and gradients table-wise, partial sums row-wise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutorec.teach.canvas import Chart
from tutorec.teach.diagram import Diagram, Node

__all__ = ["partial_sums", "swim_lanes"]

_LANES, _RIGHT, _CELL = (13, 47), 17, 2.5
_STAGES = (
    ("batch", 2.5),
    ("input_dist", 5.7),
    ("lookup", 9.9),
    ("output_dist", 14.4),
    ("backward", 20.2),
)
_THERE = "{ids} bytes of lengths and ids cross, and {rows:,} bytes of pooled rows come back"
_THERE_AND_BACK = "Gradients go back to the tables: {gradients:,} bytes, and no ids"
_Nodes = Sequence[Node]
_Points = Sequence[tuple[float, float]]


def swim_lanes(
    batches: Sequence[Any],
    holder: Mapping[str, int],
    dim: int,
    sent: Mapping[str, Sequence[int]],
    *,
    mark: int,
    claim: str = "",
) -> Chart:
    """The path of one batch on two ranks: forward, and backward where its bytes are given.

    Args:
        batches: KeyedJaggedTensor of each rank, with the same features and B samples each.
        holder: Feature -> the rank that holds its table; one feature for each rank.
        dim: Columns of each table.
        sent: Counted bytes that each rank sends to the other: "ids", "rows", "sizes" where they
            shall be named and, for backward, "gradients".
        mark: An id whose cells get a thick frame.
        claim: The title; ``{ids}``, ``{rows}``, ``{sizes}`` and ``{gradients}`` are the bytes of
            both ranks. By default it says which bytes cross.
    """
    feature = {rank: key for key, rank in holder.items()}
    lists = [_lists(batch) for batch in batches]
    of_table = [lists[0][feature[r]] + lists[1][feature[r]] for r in (0, 1)]
    samples = batches[0].stride()
    backward = "gradients" in sent
    diagram = Diagram(lines=25 if backward else 19)
    _titles(diagram, _STAGES if backward else _STAGES[:-1])
    _sizes(diagram, sent)

    def arrows(name: str, rank: int, starts: _Nodes, ends: _Points, colors: Sequence[int]) -> None:
        for r in (0, 1):
            text = f"{sent[name][rank]:,} B" if r != rank else ""
            diagram.arrow(starts[r].bottom, ends[r], text, rank=colors[r], right=rank == 0)

    every = [
        _bags(diagram, x, 7.9, of_table[r], r, mark, f"{feature[r]} ids of {2 * samples} samples")
        for r, x in enumerate(_LANES)
    ]
    output = [
        [_pooled(diagram, x, 17.4, half, samples, half, feature[half]) for half in (0, 1)]
        for x in _LANES
    ]
    for rank, x in enumerate(_LANES):
        diagram.text(x, 0.4, f"rank {rank}: holds {feature[rank]}_table", bold=True)
        senders = [
            _bags(
                diagram, x + _RIGHT * r, 1.9, lists[rank][feature[r]], r, mark, f"{feature[r]} ids"
            )
            for r in (0, 1)
        ]
        pooled = [
            _pooled(diagram, x, 12, half, samples, rank, f"[{samples}, {dim}] for rank {half}")
            for half in (0, 1)
        ]
        arrows("ids", rank, senders, [_from_rank(node, rank) for node in every], (0, 1))
        diagram.arrow(
            every[rank].bottom, (every[rank].bottom[0], 10.9), "read rows, add them up", rank=rank
        )
        arrows(
            "rows",
            rank,
            pooled,
            [_above_title(output[half][rank]) for half in (0, 1)],
            (rank, rank),
        )
        if backward:
            updated = _updated(of_table[rank], feature[rank])
            diagram.box(x, 22.2, updated, rank=rank, width=26, lines=2.4)
            arrows("gradients", rank, output[rank], _boxes(rank), (0, 1))
    claim = claim or (_THERE_AND_BACK if backward else _THERE)
    return diagram.chart(claim, **{name: sum(counts) for name, counts in sent.items()})


def partial_sums(
    bags: Sequence[Sequence[Sequence[int]]],
    rows: int,
    partial: Sequence[Sequence[Sequence[float]]],
    sums: Sequence[Sequence[float]],
    *,
    mark: int,
    claim: str,
) -> Chart:
    """Bags over a table that is cut by rows, on two ranks: ids divided, parts added up, reduce-scatter.

    Args:
        bags: For each rank the ids of its bags, two or three.
        rows: Rows of the table; rank 0 has half of them, rounded up.
        partial: For each rank its partial sums, for the bags of rank 0 and for those of rank 1.
        sums: For each rank the sums of its bags.
        mark: An id whose cells get a thick frame.
        claim: The title; ``{split}`` counts the bags with ids on both ranks, ``{bags}`` all bags.
    """  # noqa: E501
    diagram = Diagram(lines=23.2)
    _titles(
        diagram,
        (
            ("bags", 2.5),
            ("all-to-all", 5.2),
            ("read, add up", 10.6),
            ("reduce-", 15.4),
            ("scatter", 16.3),
        ),
    )
    height = -(-rows // 2)
    split = sum(len({one // height for one in bag}) > 1 for own in bags for bag in own)
    every = [bag for own in bags for bag in own]
    for rank, x in enumerate(_LANES):
        first = rank * height
        last = min(first + height, rows) - 1
        diagram.text(x, 0.4, f"rank {rank}: rows {first} to {last}", bold=True)
        owners = [[one // height for one in bag] for bag in bags[rank]]
        start = _bags(diagram, x, 1.9, bags[rank], owners, mark)
        mine = [[one for one in bag if one // height == rank] for bag in every]
        here = _bags(diagram, x, 7.9, mine, rank, mark, "its ids of all bags")
        diagram.arrow((x + 3, start.bottom[1]), (x + 3, 6.7))
        diagram.arrow(
            (start.right[0] - 3, start.bottom[1]),
            (_LANES[1 - rank] + (10 if rank == 0 else 14), 6.7),
        )
        diagram.arrow(here.bottom, (here.bottom[0], 11.6), rank=rank)
        for half in (0, 1):
            left = x + 15 * half
            cells = [f"{one:g}" for one in partial[rank][half]]
            node = diagram.strip(left, 12.8, cells, rank=rank, title=f"for rank {half}", cell=5)
            end = node.bottom[0] if half == rank else _LANES[half] + (5 if rank == 0 else 9)
            diagram.arrow(node.bottom, (end, 17.4), rank=rank)
        for source in (0, 1):
            diagram.strip(
                x,
                17.6 + 1.3 * source,
                [f"{one:g}" for one in partial[source][rank]],
                rank=source,
                cell=5,
            )
            diagram.text(x + 5 * len(sums[rank]) + 1, 18.2 + 1.3 * source, f"from rank {source}")
        diagram.strip(x, 20.8, [f"{one:g}" for one in sums[rank]], cell=5)
        diagram.text(x + 5 * len(sums[rank]) + 1, 21.4, "sums of its bags")
    return diagram.chart(claim, split=split, bags=len(every))


def _lists(batch: Any) -> dict[str, list[list[int]]]:
    """Feature -> the ids of each sample."""
    return {
        key: [ids.tolist() for ids in jagged.to_dense()] for key, jagged in batch.to_dict().items()
    }


def _titles(diagram: Diagram, stages: Sequence[tuple[str, float]]) -> None:
    for stage, y in stages:
        diagram.text(0, y, stage, bold=True)


def _sizes(diagram: Diagram, sent: Mapping[str, Sequence[int]]) -> None:
    """The bytes of the exchange before that of ids, where they were counted."""
    if "sizes" in sent:
        diagram.text(0, 6.8, f"sizes: {sent['sizes'][0]} B")


def _updated(bags: Sequence[Sequence[int]], feature: str) -> str:
    """The rows that some bags read, each once, as text."""
    rows = ", ".join(str(row) for row in sorted({row for bag in bags for row in bag}))
    return f"update rows {rows}\nof {feature}_table"


def _bags(
    diagram: Diagram,
    x: float,
    y: float,
    bags: Sequence[Sequence[int]],
    ranks: int | Sequence[Sequence[int]],
    mark: int,
    title: str = "",
) -> Node:
    """Bags with a gap between them; an empty one is an empty cell.

    Ids have the colour of one rank, or each that of the rank that holds its row.
    """
    diagram.text(x, y - 0.6, title)
    start = x
    for place, bag in enumerate(bags):
        marked = [position for position, one in enumerate(bag) if one == mark]
        rank = ranks if isinstance(ranks, int) else ranks[place]
        node = diagram.strip(
            start, y, bag or [" "], rank=rank if bag else None, marked=marked, cell=_CELL
        )
        start += node.width + 0.8
    return Node(x, y, start - 0.8 - x, 1.2)


def _pooled(
    diagram: Diagram, x: float, y: float, half: int, samples: int, rank: int, title: str
) -> Node:
    """The pooled rows of one rank's samples, one cell each, in one half of a lane."""
    cells = [f"bag {i}" for i in range(samples)]
    return diagram.strip(x + (_RIGHT - 3) * half, y, cells, rank=rank, title=title, cell=6)


def _from_rank(node: Node, rank: int) -> tuple[float, float]:
    """Where ids of a rank arrive: over the left part of the lists for rank 0, else the right."""
    return node.x + node.width * (0.2, 0.8)[rank], node.y - 1.2


def _boxes(rank: int) -> _Points:
    """Where gradients of a rank arrive at the boxes of both ranks."""
    return [(left + 26 * (0.2, 0.8)[rank], 22.2) for left in _LANES]


def _above_title(node: Node) -> tuple[float, float]:
    return node.top[0], node.y - 1.2
