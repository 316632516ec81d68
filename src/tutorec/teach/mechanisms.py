"""Diagrams of single mechanisms: a lookup, two models, a row, an all-to-all, a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import Tensor, nn

from tutorec.models.two_tower import TwoTower
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.teach.canvas import ACCENT, Chart
from tutorec.teach.diagram import WIDTH, Diagram, Node

_CELL = 6.5


def lookup(table: Tensor, ids: Sequence[int], pooled: Tensor, *, claim: str) -> Chart:
    """A bag of ids selects rows of a table, and the rows become one.

    Args:
        table: Rows [R, D], with R at most 12 and D at most 4.
        ids: The bag.
        pooled: What the layer made of the bag, [D].
        claim: The title; ``{ids}`` and ``{rows}`` are numbers of this lookup.
    """
    rows, columns = table.shape
    diagram = Diagram(lines=1.2 * rows + 2)
    middle = 1.2 + 0.6 * rows
    left = 16.0
    right = WIDTH - columns * _CELL - 1

    def strip(x: float, y: float, row: Tensor, rank: str | None, title: str = "") -> Node:
        cells = [f"{number:.2f}" for number in row.tolist()]
        return diagram.strip(x, y, cells, rank=rank, title=title, cell=_CELL)

    bag = diagram.strip(1, middle - 0.6, ids, rank=ACCENT, title="bag")
    diagram.text(left, 0.6, f"table [{rows}, {columns}]")
    for number, row in enumerate(table):
        y = 1.2 + 1.2 * number
        diagram.text(left - 0.8, y + 0.6, str(number), align="right")
        node = strip(left, y, row, ACCENT if number in ids else None)
        if number in ids:
            diagram.arrow(bag.right, (left - 2.6, y + 0.6))
            diagram.arrow(node.right, (right - 0.4, middle))
    strip(right, middle - 0.6, pooled, ACCENT, f"pooled [{columns}]")
    return diagram.chart(claim, ids=len(ids), rows=rows)


def dlrm(
    tables: Sequence[EmbeddingBagConfig], numbers: nn.Module, score: nn.Module, *, claim: str
) -> Chart:
    """A DLRM with its own sizes: numbers and pooled rows, dot products, layers, a score.

    Args:
        tables: They have one width.
        numbers: The linear layers that turn the numbers of a sample into a vector.
        score: The linear layers that turn dot products and this vector into a score.
        claim: The title; ``{vectors}`` and ``{pairs}`` are numbers of the model.
    """
    features = [(feature, table) for table in tables for feature in table.feature_names]
    dim = tables[0].embedding_dim
    vectors = len(features) + 1
    pairs = vectors * (vectors - 1) // 2
    names = [f"{_sizes(numbers)[0]} numbers", *(f"{feature} ids" for feature, _ in features)]
    boxes = [f"layers {_arrows(numbers)}"]
    for feature, table in features:
        table_text = f"{table.name}\n{table.num_embeddings:,} x {dim}"
        boxes.append(table_text if feature == table.feature_names[0] else f"the same\n{table.name}")

    diagram = Diagram(lines=3.2 * vectors + 0.6)
    middle = 1.6 * vectors
    dots = diagram.box(
        42, middle - 2, f"{pairs} dot products,\nand the\nfirst vector", width=15, lines=4
    )
    over = diagram.box(58.5, middle - 2, "layers\n" + _arrows(score), width=17, lines=4)
    diagram.arrow(dots.right, over.left)
    diagram.arrow(over.right, (WIDTH, middle))
    diagram.text(WIDTH, middle - 2.8, "score", align="right")

    for position, (name, box) in enumerate(zip(names, boxes, strict=True)):
        y = 0.4 + 3.2 * position
        node = diagram.box(18, y, box, width=16, lines=2.4)
        diagram.text(0, y + 1.2, name)
        diagram.arrow((15.6, y + 1.2), node.left)
        diagram.text(35, y + (0.6 if 2 * position < vectors else 1.9), f"[{dim}]")
        diagram.arrow(node.right, (42, middle - 1.5 + 3 * position / max(1, vectors - 1)))
    return diagram.chart(claim, vectors=vectors, pairs=pairs)


def ranks(
    notebook: int, pids: Sequence[int], *, puts_in: Sequence[float], holds: Sequence[float]
) -> Chart:
    """A notebook and two ranks: a function goes there, results come back, tensors go between them.

    Args:
        notebook: Number of the notebook's process.
        pids: Numbers of the ranks' processes.
        puts_in: What each rank puts into an all-reduce.
        holds: What each rank holds after it.
    """
    diagram = Diagram(lines=10.6)
    diagram.box(27, 0.6, f"notebook: process {notebook}", width=24, lines=1.8)
    for rank, pid in enumerate(pids):
        text = f"rank {rank}: process {pid}\nputs in {puts_in[rank]:g}, holds {holds[rank]:g}"
        diagram.box(4 + 44 * rank, 5, text, rank=rank, width=26, lines=2.6)
        x = 11 + 56 * rank
        diagram.arrow((30 + 18 * rank, 2.4), (x, 5), rank=rank)
        diagram.arrow((x + 6 - 12 * rank, 5), (34 + 10 * rank, 2.4), rank=rank)
    diagram.text(12, 3.2, "function", align="right")
    diagram.text(66, 3.2, "function")
    diagram.text(39, 3.7, "what it returns", align="center")

    diagram.arrow((30, 5.8), (48, 5.8), rank=0)
    diagram.arrow((48, 6.8), (30, 6.8), rank=1)
    diagram.text(39, 8.4, "process group:\nall-reduce", align="center")
    return diagram.chart(
        "the notebook gets what both return; the ranks exchange tensors without it"
    )


def funnel(counts: Mapping[str, int], steps: Sequence[str]) -> Chart:
    """What a recommender narrows down, from all products to a page; a schema, not measured.

    Args:
        counts: What there is -> how many, from left to right.
        steps: The names of the arrows between them.
    """
    diagram = Diagram(lines=4.4)
    width = 11.5
    gap = (WIDTH - 1 - width) / (len(counts) - 1)
    nodes = [
        diagram.box(0.5 + gap * position, 0.8, f"{name}\n{count:,}", width=width, lines=3.2)
        for position, (name, count) in enumerate(counts.items())
    ]
    for (left, right), step in zip(pairwise(nodes), steps, strict=True):
        diagram.arrow(left.right, right.left)
        diagram.text((left.right[0] + right.x) / 2, 1.4, step, align="center")
    return diagram.chart(f"From all products to a page, in {len(steps)} steps")


def collisions(hashed_to: Sequence[int], rows: int) -> Chart:
    """Products above, rows below, an arrow from each product to its row; shared rows are filled.

    Args:
        hashed_to: The row of product 0, 1, ...
        rows: R, the number of rows.
    """
    diagram = Diagram(lines=6.6)
    diagram.text(0, 1.2, "product")
    diagram.text(0, 5.2, "row")
    fill = [ACCENT if hashed_to.count(row) > 1 else None for row in range(rows)]
    nodes = [diagram.strip(18 + 9 * row, 4.6, [row], rank=fill[row], cell=5) for row in range(rows)]
    for product, row in enumerate(hashed_to):
        node = diagram.strip(10 + 6.8 * product, 0.6, [product], rank=fill[row], cell=5)
        diagram.arrow(node.bottom, nodes[row].top)

    shared = sum(fill[row] is not None for row in hashed_to)
    return diagram.chart(
        "hashed into {rows} rows, {shared} of {products} products share their row",
        rows=rows,
        shared=shared,
        products=len(hashed_to),
    )


def towers(model: TwoTower) -> Chart:
    """Two towers with their own sizes: rows of the features, an MLP each, an inner product."""
    configs = model.embedding_bag_collection.embedding_bag_configs()
    rows = {name: config.num_embeddings for config in configs for name in config.feature_names}
    width = _sizes(model.query_tower)[-1]

    diagram = Diagram(lines=10.6)
    score = diagram.box(66, 3.8, "inner\nproduct", width=11, lines=2.6)
    for top, name, mlp, features in (
        (0.8, "who asks", model.query_tower, model.query_features),
        (7.0, "what is found", model.candidate_tower, model.candidate_features),
    ):
        tower = diagram.box(33, top, f"MLP of {name}\n{_arrows(mlp)}", width=20, lines=2.8)
        first = top + 0.65 - 0.95 * (len(features) - 1)
        for position, feature in enumerate(features):
            text = f"{feature}, {rows[feature]:,} rows"
            node = diagram.box(1, first + 1.9 * position, text, width=25, lines=1.5)
            diagram.arrow(node.right, tower.left)
        diagram.arrow(tower.right, score.left)
        diagram.text(55, top - 0.1 if top < 3 else top + 3, f"vector of {width}")

    return diagram.chart(
        "one vector of {width} for each side; they meet in an inner product", width=width
    )


def byte_row(parts: Mapping[str, int], *, claim: str) -> Chart:
    """The bytes of one stored row, part by part; widths are in proportion, wide enough for labels.

    Args:
        parts: What is stored -> bytes, in their order.
        claim: The title; ``{total}`` is the sum.
    """
    total = sum(parts.values())
    least = 9.0
    free = WIDTH - 2 - least * len(parts)
    diagram = Diagram(lines=4.2)
    x = 1.0
    for name, count in parts.items():
        width = least + free * count / total
        diagram.strip(x, 1.6, [f"{count} B"], rank=ACCENT, title=name, cell=width)
        x += width

    diagram.text(1, 3.5, f"{total} bytes")
    return diagram.chart(claim, total=total)


def all_to_all(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], *, mark: int, claim: str
) -> Chart:
    """What each rank holds before and after an all-to-all; arrows for the messages to one rank.

    Args:
        before: For each of W ranks its W messages; number p is for rank p.
        after: For each rank what it received, in the order of the senders.
        mark: The rank whose messages have arrows.
        claim: The title.
    """
    ranks = range(len(before))
    diagram = Diagram(lines=2.2 * len(ranks) + 1.4)
    sent = 12.0
    arrived = WIDTH - _CELL * len(ranks) - 1
    diagram.text(sent, 0.6, "messages to ranks 0, 1, ...")
    diagram.text(arrived, 0.6, "received from ranks 0, 1, ...")

    for rank in ranks:
        y = 1.4 + 2.2 * rank
        diagram.text(1, y + 0.6, f"rank {rank}")
        start = diagram.strip(sent, y, before[rank], rank=rank, marked={mark}, cell=_CELL)
        marked = ranks if rank == mark else ()
        diagram.strip(arrived, y, after[rank], rank=ranks, marked=marked, cell=_CELL)
        end = 1.55 + 2.2 * mark + 0.9 * rank / max(1, len(ranks) - 1)
        diagram.arrow(start.right, (arrived, end), rank=rank)
    return diagram.chart(claim)


def training_step(
    held: Sequence[Mapping[str, tuple[int, ...]]],
    sent: Sequence[Mapping[str, int]],
    dense: int,
    samples: int,
    *,
    claim: str,
) -> Chart:
    """What two ranks hold and send in one step of tables that are whole on a rank.

    Args:
        held: For each rank its tables, name to shape.
        sent: For each rank its counted bytes: "input ids", "output rows" and "output gradients".
        dense: Numbers in the dense layers, which are on both ranks.
        samples: In the batch of each rank.
        claim: The title; ``{bytes}`` is what both ranks send for the tables.
    """
    diagram = Diagram(lines=16.8)
    lanes = 1, 52
    for rank, x in enumerate(lanes):
        tables = ", ".join(held[rank])
        shapes = ", ".join(f"{rows:,} x {columns}" for rows, columns in held[rank].values())
        diagram.text(x, 0.5, f"rank {rank}: {tables}", bold=True)
        diagram.text(x, 1.5, f"{shapes}; layers: {dense:,}")

        steps = (
            (f"ids of its own\n{samples} samples", "ids", sent[rank]["input ids"]),
            (
                f"look up {tables}\nfor {2 * samples} samples",
                "pooled rows",
                sent[rank]["output rows"],
            ),
            (
                f"layers: scores, loss\nof {samples} samples",
                "their gradients",
                sent[rank]["output gradients"],
            ),
            (f"update rows of\n{tables}", "dense gradients", 4 * dense),
        )
        for position, (text, name, count) in enumerate(steps):
            y = 2.6 + 3.6 * position
            diagram.box(x, y, text, rank=rank, width=25, lines=2.8)
            ends = [lanes[0] + 26, lanes[1] - 1]
            height = y + (2.5 if rank else 1.1)
            diagram.text(39, height - 0.55, f"{name}: {count:,} B", align="center")
            diagram.arrow((ends[rank], height), (ends[1 - rank], height), rank=rank)
    return diagram.chart(claim, bytes=sum(sum(counts.values()) for counts in sent))


def _sizes(mlp: nn.Module) -> list[int]:
    """The widths of an MLP, from what goes in to what comes out."""
    linears = [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
    return [linears[0].in_features, *(layer.out_features for layer in linears)]


def _arrows(mlp: nn.Module) -> str:
    return " > ".join(map(str, _sizes(mlp)))
