"""Which stored rows make the rows of a compressed table, drawn from the compression's parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from tutorec.modules.compressions import QR, Block
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.teach.canvas import ACCENT, INK, Chart
from tutorec.teach.diagram import Diagram, Node

__all__ = ["stored"]

_CELL = 4.4
_LINE = 1.2
_LEFT = 3.0  # of the table
_LABELS = 22.0  # room between a table and its parts
_BETWEEN = 2.6  # lines between two parts


def stored(
    table: EmbeddingBagConfig,
    how: QR | Block,
    ids: Sequence[int],
    *,
    sign: str = "+",
    claim: str,
) -> Chart:
    """The table that a model sees, what is stored for it, and the rows of two ids in both.

    A part with fewer columns than the table is followed by the matrix that widens it.

    Args:
        table: R rows and D columns, small enough to draw every row.
        how: The compression.
        ids: One or two; the first is in the accent colour, the second in ink.
        sign: The sign between two parts.
        claim: Title; may use {whole} and {stored}, numbers in the table and in its parts.
    """
    parts = how.parts(table)
    columns = table.embedding_dim
    heights = [part.table.num_embeddings * _LINE + _BETWEEN for part in parts]
    lines = max(table.num_embeddings * _LINE, sum(heights) - _BETWEEN)

    colors = dict(zip(ids, (ACCENT, INK), strict=False))
    diagram = Diagram(lines=lines + 1.8)
    owners = {row: [color] for row, color in colors.items()}
    whole = _grid(diagram, _LEFT, 1.4, table.name, (table.num_embeddings, columns), owners)
    for row in ids:
        diagram.text(_LEFT - 0.8, 2 + _LINE * row, str(row), align="right")

    left = whole.right[0] + _LABELS
    top = 1.4
    count = 0
    for part, height in zip(parts, heights, strict=True):
        if part is not parts[0]:
            diagram.text(left + columns * _CELL / 2, top - 1.7, sign, align="center", bold=True)
        [id_map] = part.maps
        readers: dict[int, list[int]] = {}
        for one in ids:
            row = one if id_map.rows is None else int(id_map.rows(torch.tensor([one])))
            readers.setdefault(row, []).append(one)

        shape = part.table.num_embeddings, part.table.embedding_dim
        owners = {row: [colors[one] for one in row_ids] for row, row_ids in readers.items()}
        name = part.table.name.removeprefix(f"{table.name}_")
        grid = _grid(diagram, left, top, name, shape, owners)
        count += shape[0] * shape[1]

        for row, row_ids in readers.items():
            # how each id becomes the row, such as 7 // 4 = 1
            computed = [re.sub(r"(\W+)", r" \1 ", f"{one}{id_map.suffix}") for one in row_ids]
            label = " = ".join([*(computed if id_map.suffix else []), str(row)])
            y = top + _LINE * row + 0.6
            diagram.text(left - 0.8, y, label, align="right")
            for one in row_ids:
                start = whole.right[0], 2 + _LINE * one
                diagram.arrow(start, (left - 1.4 - 0.85 * len(label), y), rank=colors[one])

        if shape[1] < columns:
            sign_x = grid.right[0] + max(2.5, len(name) + 8 - grid.width)
            diagram.text(sign_x, top + 0.6, "x", align="center", bold=True)
            _grid(diagram, sign_x + 2.5, top, "matrix", (shape[1], columns), {})
            count += shape[1] * columns
        top += height
    return diagram.chart(claim, whole=table.num_embeddings * columns, stored=count)


def _grid(
    diagram: Diagram,
    x: float,
    y: float,
    name: str,
    shape: tuple[int, int],
    owners: Mapping[int, Sequence[str]],
) -> Node:
    """A table cell by cell; a row that several ids use is divided among their colours."""
    rows, columns = shape
    diagram.text(x, y - 0.7, f"{name} [{rows} x {columns}]")
    for row in range(rows):
        colors = owners.get(row, [None])
        fill = [colors[len(colors) * column // columns] for column in range(columns)]
        diagram.strip(x, y + _LINE * row, [""] * columns, rank=fill, cell=_CELL)
    return Node(x, y, columns * _CELL, rows * _LINE)
