"""Which stored rows make the rows of a compressed table, drawn from the compression's parts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from tutorec.modules.compressions import Compression, Part
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
    how: Compression | Sequence[Part],
    ids: Sequence[int],
    *,
    sign: str = "+",
    claim: str,
) -> Chart:
    """The table that a model sees, what is stored for it, and the rows of two ids in both.

    A part with fewer columns than the table is followed by the matrix that widens it.

    Args:
        table: R rows and D columns, small enough to draw every row.
        how: The compression, or parts that a chapter has made itself; an id that a part has no row
            for is not drawn.
        ids: One or two; the first is in the accent colour, the second in ink.
        sign: The sign between two parts.
        claim: Title; may use {whole} and {stored}, numbers in the table and in its parts.
    """
    parts = how.parts(table) if isinstance(how, Compression) else list(how)
    columns = table.embedding_dim
    shapes = [(part.table.num_embeddings, part.table.embedding_dim) for part in parts]
    widest = max(width for _, width in shapes)
    side_by_side = isinstance(how, Compression) and len(parts) > 1 and how.width(table) > widest
    heights = sum(rows for rows, _ in shapes) * _LINE + _BETWEEN * (len(parts) - 1)
    lines = max(table.num_embeddings * _LINE, heights)

    colors = dict(zip(ids, (ACCENT, INK), strict=False))
    diagram = Diagram(lines=lines + 1.8)
    owners = {row: [color] for row, color in colors.items()}
    whole = _grid(diagram, _LEFT, 1.4, table.name, (table.num_embeddings, columns), owners)
    for row in ids:
        diagram.text(_LEFT - 0.8, 2 + _LINE * row, str(row), align="right")

    left = whole.right[0] + _LABELS
    top = 1.4
    count = 0
    for position, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        if position:
            diagram.text(left + columns * _CELL / 2, top - 1.7, sign, align="center", bold=True)
        uses = _uses(part, ids)
        owners = {row: [colors[one] for one in dict(pairs)] for row, pairs in uses.items()}
        name = part.table.name.removeprefix(f"{table.name}_")
        grid = _grid(diagram, left, top, name, shape, owners)
        count += shape[0] * shape[1]

        for row, pairs in uses.items():
            texts = dict.fromkeys(text for _, text in pairs)
            label = " = ".join(texts if [*texts] == [str(row)] else [*texts, str(row)])
            y = top + _LINE * row + 0.6
            diagram.text(left - 0.8, y, label, align="right")
            for one in dict(pairs):
                start = whole.right[0], 2 + _LINE * one
                diagram.arrow(start, (left - 1.4 - 0.85 * len(label), y), rank=colors[one])

        if shape[1] < columns and not side_by_side:
            sign_x = grid.right[0] + max(2.5, len(name) + 8 - grid.width)
            diagram.text(sign_x, top + 0.6, "x", align="center", bold=True)
            _grid(diagram, sign_x + 2.5, top, "matrix", (shape[1], columns), {})
            count += shape[1] * columns
        top += shape[0] * _LINE + _BETWEEN
    return diagram.chart(claim, whole=table.num_embeddings * columns, stored=count)


def _uses(part: Part, ids: Sequence[int]) -> Mapping[int, list[tuple[int, str]]]:
    """Row of a part -> the ids that use it, each with how the row is computed."""
    uses: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for one in ids:
        for mapping in part.maps:
            row = one if mapping.rows is None else int(mapping.rows(torch.tensor([one])))
            if 0 <= row < part.table.num_embeddings:
                uses[row].append((one, _computed(one, mapping.suffix, len(part.maps) > 1)))
    return uses


def _computed(one: int, suffix: str, several: bool) -> str:
    """How an id becomes a row, by the feature's suffix: ``7 // 4``, ``hash(7)``, ``hash2(7)``."""
    operator, operand = re.fullmatch(r"(\W*)(.*)", suffix).groups()  # type: ignore[union-attr]
    if operator.startswith("#"):
        seed = int(operand.partition("%")[0] or 0)
        return f"hash{seed + 1 if several else ''}({one})"
    return f"{one} {operator} {operand}" if suffix else str(one)


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
