"""The path of a batch: its ids in memory, one lookup of all tables, the ranks and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.teach.canvas import ACCENT, Chart
from tutorec.teach.diagram import WIDTH, Diagram, Node

Jagged = JaggedTensor | KeyedJaggedTensor

#: The path of a batch, from the click log to the served row; `here` fills one station.
_STATIONS = ("log", "KJT", "wire", "row", "bag", "gradient", "update", "int8")


def here(station: str) -> Chart:
    """The path of a batch with the present station filled."""
    diagram = Diagram(lines=3.4)
    step = WIDTH / len(_STATIONS)
    for position, name in enumerate(_STATIONS):
        rank = ACCENT if name == station else None
        node = diagram.strip(step * position + 0.2, 1, [name], rank=rank, cell=step - 2.2)
        if position + 1 < len(_STATIONS):
            diagram.arrow(node.right, (node.right[0] + 2.2, node.right[1]))
    place = _STATIONS.index(station) + 1
    claim = f"You are here: {station}, station {place} of {len(_STATIONS)} on a batch's path"
    return diagram.chart(claim)


def jagged(batch: Any, *, claim: str) -> Chart:
    """A batch by samples (a list of ids per feature) and as it is in memory (feature by feature).

    Args:
        batch: A KeyedJaggedTensor of a few samples.
        claim: Title; may use {samples}, {features} and {ids}.
    """
    lists = {key: [ids.tolist() for ids in batch[key].to_dense()] for key in batch.keys()}
    bags = [ids for rows in lists.values() for ids in rows]
    samples = len(bags) // len(lists)
    lengths = [len(ids) for ids in bags]
    offsets = [0, *accumulate(lengths)]

    left = 12.0
    longest = max(2, *lengths) + 1
    cell = min(7.0, (WIDTH - left) / max(longest * len(lists), sum(lengths) + 1))
    diagram = Diagram(lines=1.6 * samples + 6.6)
    memory = 1.6 * samples + 2.6
    for name, y in {"values": memory, "lengths": memory + 1.4, "offsets": memory + 2.6}.items():
        diagram.text(left - 2, y + 0.6, name, align="right")

    for number, ids in enumerate(bags):
        feature, sample = divmod(number, samples)
        # samples alternate between filled and hollow cells
        rank = None if sample % 2 else ACCENT
        x = left + cell * longest * feature
        y = 1.4 + 1.6 * sample
        diagram.strip(x, y, ids, rank=rank, cell=cell)
        if not ids:
            diagram.text(x, y + 0.6, "(empty)")
        if feature == 0:
            diagram.text(left - 2, y + 0.6, f"sample {sample}", align="right")

        start = left + cell * offsets[number]
        node = diagram.strip(start, memory, ids, rank=rank, cell=cell)
        diagram.text(node.top[0], memory + 2, str(len(ids)), align="center")
        if sample == 0:
            diagram.text(x, 0.6, list(lists)[feature], bold=True)
            diagram.text(start, memory - 0.6, list(lists)[feature], bold=True)
            diagram.box(start, memory - 0.2, "", width=0.01, lines=1.6)

    for offset in sorted(set(offsets)):
        count = offsets.count(offset)
        text = f"{offset} (x{count})" if count > 1 else str(offset)
        diagram.text(left + cell * offset, memory + 3.2, text, align="center")
    return diagram.chart(claim, samples=samples, features=len(lists), ids=sum(lengths))


def views(
    batch: KeyedJaggedTensor,
    results: Mapping[str, Jagged | Sequence[Jagged]],
    *,
    claim: str,
) -> Chart:
    """The ids of a batch and of what operations made of it: views hollow, copies filled.

    A view is drawn below the ids whose memory it uses.

    Args:
        batch: A few ids.
        results: Name of an operation to what it returned, one jagged tensor or several.
        claim: Title; may use {ids} (of the batch), {views} and {copies} (the operations that copy
            no id, and the others).

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([7, 2]), lengths=torch.ones(2).int()
        ... )
        >>> made = {"split": batch.split([1, 1]), "permute": batch.permute([1, 0])}
        >>> views(batch, made, claim="").facts["copies"]
        ['permute']
    """
    left = 24
    diagram = Diagram(lines=2.4 + 2.2 * len(results))
    diagram.text(0, 1.8, "the batch")
    start = left
    for key in batch.keys():
        ids = batch[key].values().tolist()
        start += diagram.strip(start, 1.2, ids, rank=ACCENT, title=key).width

    memory = batch.values().untyped_storage().data_ptr()
    names: dict[str, list[str]] = {"views": [], "copies": []}
    for line, (name, result) in enumerate(results.items(), start=1):
        y = 1.2 + 2.2 * line
        tensors = [result] if isinstance(result, JaggedTensor | KeyedJaggedTensor) else list(result)
        values = [tensor.values() for tensor in tensors]
        copied = [ids for ids in values if ids.untyped_storage().data_ptr() != memory]

        end = left
        for ids in values:
            x = end if copied else left + 3 * int(ids.storage_offset())
            end = x + diagram.strip(x, y, ids.tolist(), rank=ACCENT if copied else None).width

        names["copies" if copied else "views"].append(name)
        size = sum(ids.nbytes for ids in copied)
        shared_by = "view" if len(values) == 1 else f"{len(values)} views"
        diagram.text(0, y + 0.6, name)
        diagram.text(start + 3, y + 0.6, f"copies {size} bytes" if copied else shared_by)
    return diagram.chart(claim, ids=batch.values().numel(), **names)


_COLUMN = 26  # characters for a table
_LABELS = 30  # characters for the name of a strip


def table_batching(batch: KeyedJaggedTensor, table_rows: Sequence[int]) -> Chart:
    """The ids of a batch, looked up table by table, and in one stack of all tables.

    Args:
        batch: One sample of up to three features with up to two ids. Feature f reads table f.
        table_rows: Rows of each table.

    Example:
        >>> from tutorec.sparse.lists import kjt_from_lists
        >>> batch = kjt_from_lists({"a": [[7]], "b": [[3]]})
        >>> table_batching(batch, [10, 20]).claim
        '2 calls for 2 tables, or 1 call for a stack of 30 rows'
    """
    *first_rows, total = accumulate(table_rows, initial=0)
    tables = len(table_rows)
    diagram = Diagram(lines=17.6)
    diagram.text(0, 0.6, f"one call for each table: {tables} calls", bold=True)
    diagram.text(0, 9.4, "table batching: 1 call", bold=True)
    text = f"one stack of {total:,} rows"
    stack = diagram.box(0.3, 14.8, text, width=_COLUMN * tables - 4, lines=2.4)

    for table, (name, bag) in enumerate(batch.to_dict().items()):
        left = 0.3 + _COLUMN * table
        ids = bag.values().tolist()
        strip = diagram.strip(left, 2.6, ids, rank=ACCENT, title=name, cell=5)
        text = f"table {table}\n{table_rows[table]:,} rows"
        diagram.box(left, 5.4, text, width=_COLUMN - 4, lines=2.4)
        diagram.arrow(strip.bottom, (strip.bottom[0], 5.4))

        shifted = [f"{first_rows[table] + row:,}" for row in ids]
        title = f"{name} + {first_rows[table]:,}"
        strip = diagram.strip(left, 12, shifted, rank=ACCENT, title=title, cell=9)
        diagram.arrow(strip.bottom, (strip.bottom[0], stack.y))
    claim = "{tables} calls for {tables} tables, or 1 call for a stack of {rows:,} rows"
    return diagram.chart(claim, tables=tables, rows=total)


def updates(ids: Sequence[int], gradient: Tensor, change: Tensor) -> Chart:
    """What a step writes with a dense gradient, and what an update in backward writes.

    Args:
        ids: The bag of the only sample.
        gradient: Of each row of the table, [R] with R of at most 10.
        change: What backward subtracted from each row [R], where an optimizer runs inside it.

    Example:
        >>> import torch
        >>> gradient = torch.tensor([0.0, 2.0, 1.0])
        >>> updates([1, 2, 1], gradient, gradient).claim
        'a dense step writes 3 rows, an update in backward 2'
    """
    rows = range(len(gradient))
    changed = [ACCENT if number else None for number in change.tolist()]
    diagram = Diagram(lines=14.2)

    def strip(y: float, name: str, cells: Sequence[object], rank: Sequence[str | None]) -> Node:
        diagram.text(0, y + 0.6, name)
        return diagram.strip(_LABELS, y, cells, rank=rank, cell=4.4)

    strip(0.4, "ids of the bag", ids, [ACCENT] * len(ids))
    diagram.text(0, 3.2, "dense gradient", bold=True)
    numbers = [f"{number:.0f}" for number in gradient.tolist()]
    written = strip(4, "backward writes, step reads", numbers, [ACCENT] * len(rows))
    read = strip(6.4, "rows that step writes", rows, [ACCENT] * len(rows))
    diagram.arrow(written.bottom, read.top)

    diagram.text(0, 9.4, "update inside backward", bold=True)
    sums = [f"{number:.0f}" if number else "" for number in change.tolist()]
    added = strip(10.2, "sums of gradients", sums, changed)
    named = [row if changed[row] else "" for row in rows]
    updated = strip(12.6, "rows that backward writes", named, changed)
    diagram.arrow(added.bottom, updated.top)
    claim = "a dense step writes {rows} rows, an update in backward {updated}"
    return diagram.chart(claim, rows=len(rows), updated=len(changed) - changed.count(None))


_LANES = (13, 47)
_RIGHT = 17
_CELL = 2.5
_RANKS = (0, 1)
_THERE = "{ids} bytes of lengths and ids cross, and {rows:,} bytes of pooled rows come back"
_THERE_AND_BACK = "Gradients go back to the tables: {gradients:,} bytes, and no ids"


def swim_lanes(
    batches: Sequence[Any],
    holder: Mapping[str, int],
    dim: int,
    sent: Mapping[str, Sequence[int]],
    *,
    mark: int,
) -> Chart:
    """The path of one batch on two ranks: forward, and backward where its bytes are given.

    Args:
        batches: KeyedJaggedTensor of each rank, with the same features and B samples each.
        holder: Feature -> the rank that holds its table; one feature for each rank.
        dim: Columns of each table.
        sent: Counted bytes that each rank sends to the other: "sizes", "ids", "rows" and, for
            backward, "gradients".
        mark: An id whose cells get a thick frame.
    """
    feature = {rank: key for key, rank in holder.items()}
    lists = [
        {key: [ids.tolist() for ids in batch[key].to_dense()] for key in holder}
        for batch in batches
    ]
    samples = batches[0].stride()
    backward = "gradients" in sent
    names = ["batch", "input_dist", "lookup", "output_dist", "backward"]
    diagram = Diagram(lines=25 if backward else 19)
    for name, y in zip(names[: 4 + backward], (2.5, 5.7, 9.9, 14.4, 20.2), strict=False):
        diagram.text(0, y, name, bold=True)
    diagram.text(0, 6.8, "sizes, then ids")
    diagram.text(0, 15.5, f"[{samples}, {dim}] each")

    def arrow(exchange: str, rank: int, owner: int, start: Node, end: tuple[float, float]) -> None:
        """From a rank to that of an owner, with the bytes of what crosses."""
        text = f"{sent[exchange][rank]:,} B" if owner != rank else ""
        if text and exchange == "ids":
            text = f"{sent['sizes'][rank]} B, then {text}"
        color = rank if exchange == "rows" else owner
        diagram.arrow(start.bottom, end, text, rank=color, right=rank == 0)

    def pooled(x: float, y: float, half: int, rank: int, title: str) -> Node:
        """The pooled rows of one rank's samples, one cell each, in one half of a lane."""
        cells = [f"bag {sample}" for sample in range(samples)]
        return diagram.strip(x + (_RIGHT - 3) * half, y, cells, rank=rank, title=title, cell=6)

    table_bags = [lists[0][feature[rank]] + lists[1][feature[rank]] for rank in _RANKS]
    received = []
    output = []
    for rank, x in enumerate(_LANES):
        title = f"{feature[rank]} ids of {2 * samples} samples"
        received.append(_bags(diagram, x, 7.9, table_bags[rank], rank, mark, title))
        output.append([pooled(x, 17.4, half, half, feature[half]) for half in _RANKS])

    for rank, x in enumerate(_LANES):
        diagram.text(x, 0.4, f"rank {rank}: holds {feature[rank]}_table", bold=True)
        middle, end = received[rank].bottom
        diagram.arrow((middle, end), (middle, 10.9), "read rows, add them up", rank=rank)
        for other in _RANKS:
            key = feature[other]
            bags = lists[rank][key]
            start = _bags(diagram, x + _RIGHT * other, 1.9, bags, other, mark, f"{key} ids")
            arrow("ids", rank, other, start, _from_rank(received[other], rank))
        for other in _RANKS:
            start = pooled(x, 12, other, rank, f"for rank {other}")
            target = output[other][rank]
            arrow("rows", rank, other, start, (target.top[0], target.y - 1.2))
        if backward:
            rows = ", ".join(map(str, sorted({row for bag in table_bags[rank] for row in bag})))
            text = f"update rows {rows}\nof {feature[rank]}_table"
            diagram.box(x, 22.2, text, rank=rank, width=26, lines=2.4)
            for other in _RANKS:
                end = _LANES[other] + 26 * (0.2, 0.8)[rank], 22.2
                arrow("gradients", rank, other, output[rank][other], end)

    claim = _THERE_AND_BACK if backward else _THERE
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
    """Bags over a table cut by rows, on two ranks: ids divided, parts added up, reduce-scatter.

    Args:
        bags: For each rank the ids of its bags, two or three.
        rows: Rows of the table; rank 0 has half of them, rounded up.
        partial: For each rank its partial sums, for the bags of rank 0 and for those of rank 1.
        sums: For each rank the sums of its bags.
        mark: An id whose cells get a thick frame, as do the sums of its bags.
        claim: The title.
    """
    diagram = Diagram(lines=23.2)
    names = ["bags", "all-to-all", "read, add up", "reduce-", "scatter"]
    for name, y in zip(names, (2.5, 5.2, 10.6, 15.4, 16.3), strict=True):
        diagram.text(0, y, name, bold=True)

    height = -(-rows // 2)
    all_bags = [bag for own in bags for bag in own]
    followed = [[position for position, bag in enumerate(own) if mark in bag] for own in bags]
    arrived = []
    for rank, x in enumerate(_LANES):
        own_ids = [[row for row in bag if row // height == rank] for bag in all_bags]
        arrived.append(_bags(diagram, x, 7.9, own_ids, rank, mark, "its ids of all bags"))

    def strip(
        x: float, y: float, numbers: Sequence[float], rank: int | None, half: int, title: str = ""
    ) -> Node:
        cells = [f"{number:g}" for number in numbers]
        thick = followed[half]
        return diagram.strip(x, y, cells, rank=rank, title=title, cell=5, marked=thick)

    for rank, x in enumerate(_LANES):
        last = min((rank + 1) * height, rows) - 1
        diagram.text(x, 0.4, f"rank {rank}: rows {rank * height} to {last}", bold=True)
        owners = [[row // height for row in bag] for bag in bags[rank]]
        start = _bags(diagram, x, 1.9, bags[rank], owners, mark)
        for owner, node in enumerate(arrived):
            diagram.arrow(start.bottom, _from_rank(node, rank), rank=owner)
        middle, end = arrived[rank].bottom
        diagram.arrow((middle, end), (middle, 11.6), rank=rank)

        beside = x + 5 * len(sums[rank]) + 1
        for other in _RANKS:
            title = f"for rank {other}"
            node = strip(x + 15 * other, 12.8, partial[rank][other], rank, other, title)
            diagram.arrow(node.bottom, (_LANES[other] + (2.5, 7.5)[rank], 17.4), rank=rank)
            y = 17.6 + 1.3 * other
            strip(x, y, partial[other][rank], other, rank)
            diagram.text(beside, y + 0.6, f"from rank {other}")
        strip(x, 20.8, sums[rank], None, rank)
        diagram.text(beside, 21.4, "sums of its bags")
    return diagram.chart(claim)


def stages(features: Mapping[str, int], samples: int, *, claim: str) -> Chart:
    """Which rank has which sample of which feature before and after the stages of a forward.

    Args:
        features: Feature -> the rank that holds its table; each rank holds one at least.
        samples: On each rank.
        claim: The title; ``{ranks}`` is counted.
    """
    owners = list(features.values())
    ranks = len(set(owners))
    lines = [rank for rank in range(ranks) for _ in range(samples)]
    diagram = Diagram(lines=3.4 + 1.2 * len(lines))
    diagram.text(0, 1.6, "sample")
    names = ("batch", "after input_dist", "after compute", "after output_dist")
    for number, name in enumerate(names):
        x = 7 + number * (4 + 3.6 * len(owners))
        by_sample = number in (0, 3)
        cell = "ids" if number < 2 else "row"
        diagram.text(x, 0.5, name, bold=True)
        diagram.text(x, 1.6, "my samples" if by_sample else "my features")
        for line, rank in enumerate(lines):
            y = 2.4 + 1.2 * line
            colors = [rank] * len(owners) if by_sample else owners
            diagram.strip(x, y, [cell] * len(owners), rank=colors, cell=3.6)
            diagram.text(2, y + 0.6, str(line))
    return diagram.chart(claim, ranks=ranks)


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
        marked = [position for position, row in enumerate(bag) if row == mark]
        owners = ranks if isinstance(ranks, int) else ranks[number]
        rank = owners if bag else None
        node = diagram.strip(start, y, bag or [" "], rank=rank, marked=marked, cell=_CELL)
        start += node.width + 0.8
    return Node(x, y, start - 0.8 - x, 1.2)


def _from_rank(node: Node, rank: int) -> tuple[float, float]:
    """Where ids of a rank arrive: over the left part of the lists for rank 0, else the right."""
    return node.x + node.width * (0.2, 0.8)[rank], node.y - 1.2
