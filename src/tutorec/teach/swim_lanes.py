"""One batch on two ranks: ids, pooled rows and gradients table-wise, partial sums row-wise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tutorec.teach.canvas import Chart
from tutorec.teach.diagram import Diagram, Node

__all__ = ["partial_sums", "stages", "swim_lanes"]

_LANES = (13, 47)
_RIGHT = 17
_CELL = 2.5
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
    table_bags = [lists[0][feature[r]] + lists[1][feature[r]] for r in (0, 1)]
    samples = batches[0].stride()
    backward = "gradients" in sent
    diagram = Diagram(lines=25 if backward else 19)
    _titles(diagram, _STAGES if backward else _STAGES[:-1])
    _notes(diagram, sent, [samples, dim])

    def arrows(name: str, rank: int, starts: _Nodes, ends: _Points, colors: Sequence[int]) -> None:
        for r in (0, 1):
            text = _crossing(sent, name, rank) if r != rank else ""
            diagram.arrow(starts[r].bottom, ends[r], text, rank=colors[r], right=rank == 0)

    received = [
        _bags(diagram, x, 7.9, table_bags[r], r, mark, f"{feature[r]} ids of {2 * samples} samples")
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
            _pooled(diagram, x, 12, half, samples, rank, f"for rank {half}") for half in (0, 1)
        ]
        arrows("ids", rank, senders, [_from_rank(node, rank) for node in received], (0, 1))
        diagram.arrow(
            received[rank].bottom,
            (received[rank].bottom[0], 10.9),
            "read rows, add them up",
            rank=rank,
        )
        arrows(
            "rows",
            rank,
            pooled,
            [_above_title(output[half][rank]) for half in (0, 1)],
            (rank, rank),
        )
        if backward:
            _update(diagram, rank, table_bags[rank], feature[rank])
            arrows("gradients", rank, output[rank], _boxes(rank), (0, 1))

    title = claim or (_THERE_AND_BACK if backward else _THERE)
    return diagram.chart(title, **{name: sum(counts) for name, counts in sent.items()})


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
        mark: An id whose cells get a thick frame, as do the sums of its bags.
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
    split = sum(
        len({identifier // height for identifier in bag}) > 1 for own in bags for bag in own
    )
    all_bags = [bag for own in bags for bag in own]
    followed = [[position for position, bag in enumerate(own) if mark in bag] for own in bags]
    arrived = []
    for rank, x in enumerate(_LANES):
        own_ids = [
            [identifier for identifier in bag if identifier // height == rank] for bag in all_bags
        ]
        arrived.append(_bags(diagram, x, 7.9, own_ids, rank, mark, "its ids of all bags"))

    for rank, x in enumerate(_LANES):
        first = rank * height
        last = min(first + height, rows) - 1
        diagram.text(x, 0.4, f"rank {rank}: rows {first} to {last}", bold=True)
        owners = [[identifier // height for identifier in bag] for bag in bags[rank]]
        start = _bags(diagram, x, 1.9, bags[rank], owners, mark)
        for owner, node in enumerate(arrived):
            diagram.arrow(start.bottom, _from_rank(node, rank), rank=owner)
        bottom = arrived[rank].bottom
        diagram.arrow(bottom, (bottom[0], 11.6), rank=rank)

        for half in (0, 1):
            cells = _texts(partial[rank][half])
            node = diagram.strip(
                x + 15 * half,
                12.8,
                cells,
                rank=rank,
                title=f"for rank {half}",
                cell=5,
                marked=followed[half],
            )
            diagram.arrow(node.bottom, (_LANES[half] + (2.5, 7.5)[rank], 17.4), rank=rank)

        for source in (0, 1):
            cells = _texts(partial[source][rank])
            y = 17.6 + 1.3 * source
            diagram.strip(x, y, cells, rank=source, cell=5, marked=followed[rank])
            diagram.text(x + 5 * len(sums[rank]) + 1, y + 0.6, f"from rank {source}")
        diagram.strip(x, 20.8, _texts(sums[rank]), cell=5, marked=followed[rank])
        diagram.text(x + 5 * len(sums[rank]) + 1, 21.4, "sums of its bags")
    return diagram.chart(claim, split=split, bags=len(all_bags))


def stages(features: Mapping[str, int], samples: int, *, claim: str) -> Chart:
    """Which rank has which sample of which feature before and after the stages of a forward.

    Args:
        features: Feature -> the rank that holds its table; each rank holds one at least.
        samples: On each rank.
        claim: The title; ``{ranks}``, ``{samples}`` of all ranks and ``{features}`` are counted.
    """
    owners = list(features.values())
    ranks = len(set(owners))
    lines = [rank for rank in range(ranks) for _ in range(samples)]
    diagram = Diagram(lines=3.4 + 1.2 * len(lines))
    states = (("batch", "ids"), ("input_dist", "ids"), ("compute", "row"), ("output_dist", "row"))
    for number, (stage, cell) in enumerate(states):
        x = 7 + number * (4 + 3.6 * len(owners))
        by_sample = number in (0, 3)
        diagram.text(x, 0.5, f"after {stage}" if number else stage, bold=True)
        diagram.text(x, 1.6, "my samples" if by_sample else "my features")
        for line, rank in enumerate(lines):
            colors = [rank] * len(owners) if by_sample else owners
            diagram.strip(x, 2.4 + 1.2 * line, [cell] * len(owners), rank=colors, cell=3.6)

    diagram.text(0, 1.6, "sample")
    for line in range(len(lines)):
        diagram.text(2, 3 + 1.2 * line, f"{line}")
    return diagram.chart(claim, ranks=ranks, samples=len(lines), features=len(owners))


def _lists(batch: Any) -> dict[str, list[list[int]]]:
    """Feature -> the ids of each sample."""
    return {
        key: [ids.tolist() for ids in jagged.to_dense()] for key, jagged in batch.to_dict().items()
    }


def _titles(diagram: Diagram, stages: Sequence[tuple[str, float]]) -> None:
    for stage, y in stages:
        diagram.text(0, y, stage, bold=True)


def _notes(diagram: Diagram, sent: Mapping[str, Sequence[int]], pooled: list[int]) -> None:
    """Below their stages: the exchange before that of ids, where it was counted, and a shape."""
    if "sizes" in sent:
        diagram.text(0, 6.8, "sizes, then ids")
    diagram.text(0, 15.5, f"{pooled} each")


def _crossing(sent: Mapping[str, Sequence[int]], name: str, rank: int) -> str:
    """The bytes on an arrow that leaves a rank; those of sizes come before those of ids."""
    text = f"{sent[name][rank]:,} B"
    return f"{sent['sizes'][rank]} B, then {text}" if name == "ids" and "sizes" in sent else text


def _texts(numbers: Sequence[float]) -> list[str]:
    return [f"{number:g}" for number in numbers]


def _update(diagram: Diagram, rank: int, bags: Sequence[Sequence[int]], feature: str) -> None:
    """A box with the rows that some bags read, each once."""
    rows = ", ".join(str(row) for row in sorted({row for bag in bags for row in bag}))
    text = f"update rows {rows}\nof {feature}_table"
    diagram.box(_LANES[rank], 22.2, text, rank=rank, width=26, lines=2.4)


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
    for number, bag in enumerate(bags):
        marked = [position for position, identifier in enumerate(bag) if identifier == mark]
        rank = ranks if isinstance(ranks, int) else ranks[number]
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
