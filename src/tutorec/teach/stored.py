"""Which stored rows make the rows of a compressed table, drawn from the compression's parts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.patches import Rectangle

from tutorec.modules.compressions import Compression, Part
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style

__all__ = ["stored"]

# Ids are not ranks, so they do not use rank colours.
_LOOKS = ((ACCENT, ""), (INK, ""), (ACCENT, "////"))
_LABELS = 6.5  # columns of room between a table and its parts
_BETWEEN = 2.4  # rows of room between two parts
_SIGN = 1.2  # columns of room for a sign next to a part
_LETTER = 0.24  # columns of room for a letter


def stored(
    table: EmbeddingBagConfig,
    how: Compression | Sequence[Part],
    ids: Sequence[int],
    *,
    sign: str = "+",
    claim: str | None = None,
) -> Chart:
    """The table that a model sees, what is stored for it, and the rows of some ids in both.

    A part with fewer columns than the table is followed by the matrix that widens it.

    Args:
        table: R rows and D columns, small enough to draw every row.
        how: The compression, or parts that a chapter has made itself; an id that a part has no row
            for is not drawn.
        ids: Up to three ids, the first of them in the accent colour.
        sign: The sign between two parts.
        claim: Title; may use {whole} and {stored} (numbers), {rows} (stored), {share} (stored by
            whole) and {shared}: stored rows that more than one of the ids uses.

    Raises:
        ValueError: An id is outside the table, or there are more than three.
    """
    rows = table.num_embeddings
    if len(ids) > len(_LOOKS) or not all(0 <= identifier < rows for identifier in ids):
        raise ValueError(
            f"stored draws up to {len(_LOOKS)} ids from 0 to {rows - 1} of table "
            f"{table.name!r}, got {list(ids)}"
        )

    components = how.parts(table) if isinstance(how, Compression) else list(how)
    columns = table.embedding_dim
    used = [_used(component, ids) for component in components]
    shapes = [
        (component.table.num_embeddings, component.table.embedding_dim) for component in components
    ]
    side_by_side = (
        isinstance(how, Compression)
        and len(components) > 1
        and how.width(table) > max(w for _, w in shapes)
    )
    matrices = [0 if width == columns or side_by_side else width for _, width in shapes]
    count = sum(rows * width for rows, width in shapes) + sum(width * columns for width in matrices)
    fields = _facts(rows * columns, count, used) | {"rows": sum(rows for rows, _ in shapes)}
    height = max(rows, sum(rows for rows, _ in shapes) + _BETWEEN * (len(components) - 1))

    with style():
        figure = canvas(1.0 + 0.21 * (height + 1))
        axes = figure.add_subplot()
        marks = {identifier: [(shade, str(identifier))] for shade, identifier in enumerate(ids)}
        whole_shape = table.num_embeddings, columns
        _grid(axes, (0, 0), whole_shape, _title(table.name, "", whole_shape), marks)
        top = 0.0
        left = columns + _LABELS
        right = 0.0

        for position, (component, shape, rows, matrix) in enumerate(
            zip(components, shapes, used, matrices, strict=True)
        ):
            if position:
                axes.text(
                    left + columns / 2,
                    top - 0.62 * _BETWEEN,
                    sign,
                    ha="center",
                    va="center",
                    fontsize=14,
                )
            title = _title(component.table.name, table.name, shape)
            _grid(axes, (left, top), shape, title, rows)
            _lines(axes, columns, ids, (left, top), rows)
            right = max(right, left + shape[1])
            if matrix:
                beside = left + max(matrix, _LETTER * len(title)) + _SIGN
                right = max(
                    right,
                    _matrix(axes, ((left + matrix + beside) / 2, beside, top), (matrix, columns)),
                )
            top += shape[0] + _BETWEEN

        axes.set(xlim=(-1.2, right + 0.4), ylim=(height + 0.2, -1.1))
        axes.set_axis_off()
        return finish(
            figure, claim, "{rows} stored rows, {stored} numbers instead of {whole}", fields
        )


def _used(part: Part, ids: Sequence[int]) -> Mapping[int, list[tuple[int, str]]]:
    """Row of a part -> which of the ids use it, and how the row is computed."""
    used: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for shade, identifier in enumerate(ids):
        for mapping in part.maps:
            row = (
                identifier
                if mapping.rows is None
                else int(mapping.rows(torch.tensor([identifier])))
            )
            if 0 <= row < part.table.num_embeddings:
                used[row].append((shade, _computed(identifier, mapping.suffix, len(part.maps) > 1)))
    return used


def _facts(
    whole: int, stored: int, used: Sequence[Mapping[int, list[tuple[int, str]]]]
) -> dict[str, Any]:
    """Numbers of the table and of its parts, and stored rows that more than one of the ids uses."""
    shared = sum(
        len({shade for shade, _ in marks}) > 1 for row_marks in used for marks in row_marks.values()
    )
    return {"whole": whole, "stored": stored, "share": stored / whole, "shared": shared}


def _computed(one: int, suffix: str, several: bool) -> str:
    """How an id becomes a row, by the feature's suffix: ``7 // 4``, ``hash(7)``, ``hash2(7)``."""
    operator = re.match(r"\W*", suffix)[0]  # type: ignore[index]
    if operator.startswith("#"):
        seed = suffix[1:].partition("%")[0]
        return f"hash{int(seed) + 1 if several else ''}({one})"
    return f"{one} {operator.strip()} {suffix[len(operator) :]}" if suffix else str(one)


def _title(name: str, of: str, shape: tuple[int, int]) -> str:
    """A part's name without its table's, and its shape."""
    return f"{name.removeprefix(of + '_')} [{shape[0]} x {shape[1]}]"


def _matrix(axes: Any, corner: tuple[float, float, float], shape: tuple[int, int]) -> float:
    """The matrix that widens a part, behind a sign at the first number; returns its right edge."""
    sign, left, top = corner
    axes.text(sign, top + 0.5, "x", ha="center", va="center", fontsize=14)
    _grid(axes, (left, top), shape, _title("matrix", "", shape), {})
    return left + shape[1]


def _grid(
    axes: Any,
    corner: tuple[float, float],
    shape: tuple[int, int],
    title: str,
    marks: Mapping[int, list[tuple[int, str]]],
) -> None:
    """A table cell by cell, its title above; a row that several ids use is divided among them."""
    left, top = corner
    rows, columns = shape
    axes.text(left, top - 0.3, title, ha="left", va="bottom", fontsize=11)

    for row, row_marks in marks.items():
        shades = sorted({shade for shade, _ in row_marks})
        for position, shade in enumerate(shades):
            color, hatch = _LOOKS[shade]
            box = Rectangle(
                (left + columns * position / len(shades), top + row),
                columns / len(shades),
                1,
                facecolor="none" if hatch else color,
                edgecolor=color if hatch else "none",
                hatch=hatch,
                linewidth=0,
            )
            axes.add_patch(box)

    for line in range(rows + 1):
        axes.plot([left, left + columns], [top + line] * 2, color=INK, linewidth=0.6)
    for line in range(columns + 1):
        axes.plot([left + line] * 2, [top, top + rows], color=INK, linewidth=0.6)


def _lines(
    axes: Any,
    columns: int,
    ids: Sequence[int],
    corner: tuple[float, float],
    rows: Mapping[int, list[tuple[int, str]]],
) -> None:
    """Lines from each id's row to the stored rows that it uses, with how they are computed."""
    left, top = corner
    for row, row_marks in rows.items():
        texts = list(dict.fromkeys(text for _, text in row_marks))
        label = " = ".join([*texts, *([] if texts == [str(row)] else [str(row)])])
        axes.text(left - 0.2, top + row + 0.5, label, ha="right", va="center", fontsize=10)
        for shade, _ in row_marks:
            start = columns, ids[shade] + 0.5
            end = left - 0.35 - 0.175 * len(label), top + row + 0.5
            axes.plot([start[0], end[0]], [start[1], end[1]], color=_LOOKS[shade][0], linewidth=1.2)

    for identifier in ids:
        axes.text(-0.2, identifier + 0.5, str(identifier), ha="right", va="center", fontsize=10)
