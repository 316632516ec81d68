"""One bag under several plans: where its ids go, what returns, and where the gradient goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tutorec.teach.canvas import Chart
from tutorec.teach.cuts import shard_boxes
from tutorec.teach.diagram import Diagram, Node

__all__ = ["one_bag"]

_BYTES = 4  # of an id, a length, and a float
_PANEL = 40, 16.2  # characters and lines from one panel to the next
_LANES = 1.0, 21.0
# Widths of cells.
_ID = 2.5
_SUM = 4.5


def one_bag(plans: Mapping[str, Any], weight: Tensor, bag: Sequence[int]) -> Chart:
    """A sample of rank 0 under plans for two ranks: ids, sums and gradients, with their bytes.

    An id has the colour of the rank that reads its row; of no rank where several do. The title says
    how many bytes all messages have under each plan, those that stay on rank 0 included.

    Args:
        plans: Name of a plan to its entry for the table, as for `one_table`.
        weight: The table, [rows, columns].
        bag: The ids of the sample.
    """
    diagram = Diagram(lines=_PANEL[1] * -(-len(plans) // 2))
    sent = {}
    for number, (name, entry) in enumerate(plans.items()):
        left = _PANEL[0] * (number % 2)
        top = _PANEL[1] * (number // 2)
        sent[name] = _panel(diagram, left, top, entry, weight, bag)
        diagram.text(left, top + 0.4, f"{name}: {sent[name]} bytes", bold=True)

    counts = ", ".join(f"{count} {name}" for name, count in sent.items())
    return diagram.chart(f"Bytes of one bag: {counts}", sent=sent)


def _panel(
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
            begin = start.x + _ID / 2, begin[1]
            end = begin[0], end[1]
        diagram.arrow(begin, end, text, rank=rank, right=begin[0] <= end[0])

    owners = []
    for row in bag:
        ranks = [box[0] for box in reads if box[1] <= row < box[1] + box[3]]
        owners.append(ranks[0] if len(ranks) == 1 else None)
    lanes = [left + lane for lane in _LANES]
    for rank, lane in enumerate(lanes):
        diagram.text(lane, top + 1.4, f"rank {rank}")
    start = diagram.strip(lanes[0], top + 2, bag, rank=owners, cell=_ID)
    result = diagram.strip(lanes[0], top + 10.6, sums(bag), cell=_SUM)
    diagram.text(lanes[1], top + 11.2, "pooled row on rank 0")

    for rank, first, column, rows, columns in reads:
        lane = lanes[rank]
        ids = [row for row in bag if first <= row < first + rows]
        ids_node = diagram.strip(lane, top + 5.4, ids, rank=rank, cell=_ID)
        cells = sums(ids, slice(column, column + columns))
        sums_node = diagram.strip(lane, top + 7.4, cells, rank=rank, cell=_SUM)
        message(start, ids_node.top, 0 if copied else 1 + len(ids), rank)
        x = lane + _ID / 2
        diagram.arrow((x, ids_node.bottom[1]), (x, sums_node.y), rank=rank)
        end = result.x + 0.8 * result.width, result.y
        message(sums_node, end, 0 if copied else columns, rank)

    for rank, _, _, _, columns in boxes:
        cells = [*(bag if copied else []), *["g"] * columns]
        update = diagram.strip(lanes[rank], top + 13.8, cells, rank=rank, cell=_ID)
        message(result, update.top, len(cells) + copied, rank)
    return sent
