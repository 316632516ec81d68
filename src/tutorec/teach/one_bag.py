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
_LINES = {"bag": 2.0, "ids": 5.4, "sums": 7.4, "result": 10.6, "gradients": 13.8}


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
    readers = [
        [box[0] for box in reads if box[1] <= identifier < box[1] + box[3]] for identifier in bag
    ]
    owners = [ranks[0] if len(ranks) == 1 else None for ranks in readers]

    y = {name: top + line for name, line in _LINES.items()}
    lanes = [left + lane for lane in _LANES]
    for rank, lane in enumerate(lanes):
        diagram.text(lane, y["bag"] - 0.6, f"rank {rank}")
    start = diagram.strip(lanes[0], y["bag"], bag, rank=owners, cell=_ID)
    result = diagram.strip(lanes[0], y["result"], _sums(weight, bag), cell=_SUM)
    diagram.text(lanes[1], y["result"] + 0.6, "pooled row on rank 0")
    sent = 0

    for rank, first, column, rows, columns in reads:
        ids = [identifier for identifier in bag if first <= identifier < first + rows]
        sums = _sums(weight[:, column : column + columns], ids)
        ids_node = diagram.strip(lanes[rank], y["ids"], ids, rank=rank, cell=_ID)
        sums_node = diagram.strip(lanes[rank], y["sums"], sums, rank=rank, cell=_SUM)
        sent += _message(diagram, start, ids_node.top, 0 if copied else 1 + len(ids), rank)
        x = ids_node.x + _ID / 2
        diagram.arrow((x, ids_node.bottom[1]), (x, sums_node.y), rank=rank)
        end = result.x + 0.8 * result.width, result.y
        sent += _message(diagram, sums_node, end, 0 if copied else columns, rank)

    for rank, _, _, _, columns in boxes:
        cells = [*(bag if copied else []), *["g"] * columns]
        update = diagram.strip(lanes[rank], y["gradients"], cells, rank=rank, cell=_ID)
        sent += _message(diagram, result, update.top, len(cells) + copied, rank)
    return sent


def _sums(weight: Tensor, ids: Sequence[int]) -> list[str]:
    """The sum of some rows, as text."""
    return [f"{number:g}" for number in weight[list(ids)].sum(0).tolist()]


def _message(
    diagram: Diagram, start: Node, end: tuple[float, float], numbers: int, rank: int
) -> int:
    """An arrow between rank 0 and a rank with its bytes, which are returned; none has no text."""
    count = _BYTES * numbers
    text = f"{count} B" if count else ""
    if rank == 0:  # straight down
        x = start.x + _ID / 2
        diagram.arrow((x, start.bottom[1]), (x, end[1]), text, rank=rank)
    else:
        diagram.arrow(start.bottom, end, text, rank=rank, right=start.bottom[0] < end[0])
    return count
