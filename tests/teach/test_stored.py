"""A figure of chapter 16: which stored rows a compressed table's rows are made of."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import Rectangle

from tutorec.modules.compressions import QR, Block, Compression, Hash, IdMap, Part
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.sparse.hashing import mixing_hash
from tutorec.teach import draw
from tutorec.teach.canvas import ACCENT, INK

TABLE = EmbeddingBagConfig(12, 4, "item")
MIXED = [
    Part(EmbeddingBagConfig(3, 4, "popular")),
    Part(EmbeddingBagConfig(9, 1, "rest"), (IdMap("-3", lambda ids: ids - 3),)),
]


def texts(chart: draw.Chart) -> list[str]:
    return [text.get_text() for text in chart.figure.axes[0].texts]


def marked(chart: draw.Chart) -> list[tuple[float, float, str]]:
    """Left edge, row (or what is above it) and colour of every filled cell."""
    cells = [box for box in chart.figure.axes[0].patches if isinstance(box, Rectangle)]
    return [
        (round(box.get_x(), 1), round(box.get_y(), 1), to_hex(box.get_facecolor()))
        for box in cells
        if to_rgba(box.get_facecolor())[3]
    ]


def test_the_rows_of_an_id_are_marked_where_the_compression_looks_them_up():
    chart = draw.stored(TABLE, QR(4), [7, 3], sign="x", claim="{stored} of {whole}")
    assert chart.claim == "28 of 48"
    assert {"7 // 4 = 1", "3 // 4 = 0", "7 % 4 = 3 % 4 = 3", "x"} <= set(texts(chart))
    cells = marked(chart)
    table, parts = cells[:8], cells[8:]
    assert {(y, color) for _, y, color in table} == {(5.0, INK), (9.8, ACCENT)}  # rows 3 and 7
    assert {y for _, y, _ in parts[:8]} == {1.4, 2.6}  # both quotients
    shared = parts[8:]
    assert len({y for _, y, _ in shared}) == 1
    assert [color for *_, color in shared] == [ACCENT, ACCENT, INK, INK]
    hashed = texts(draw.stored(TABLE, Hash(5), [7], claim=""))
    row = int(mixing_hash(torch.tensor([7]), 5))
    assert f"hash(7) = {row}" in hashed
    rows = [int(mixing_hash(torch.tensor([7]), 5, seed=seed)) for seed in (0, 1)]
    assert rows[0] != rows[1]
    assert {f"hash{k}(7) = {row}" for k, row in enumerate(rows, 1)} <= set(
        texts(draw.stored(TABLE, Hash(5, 2), [7], claim=""))
    )


@pytest.mark.parametrize(
    ("how", "numbers", "matrices"),
    [
        (QR(4), 7 * 4, 0),
        (QR(4, "concatenate"), 7 * 2, 0),
        (Hash(5, 2), 5 * 4, 0),
        (Block(2), 12 * 2 + 2 * 4, 1),
        (Block(4), 48, 0),
        (MIXED, 3 * 4 + 9 * 1 + 4, 1),
    ],
)
def test_numbers_are_those_of_parts_and_matrices(
    how: Compression | list[Part], numbers: int, matrices: int
):
    chart = draw.stored(TABLE, how, [7], claim="")
    assert chart.facts["stored"] == numbers
    assert chart.facts["whole"] == 48
    assert sum(text.startswith("matrix") for text in texts(chart)) == matrices


def test_an_id_without_a_row_in_a_part_is_not_drawn_there():
    chart = draw.stored(TABLE, MIXED, [2, 7], claim="")
    assert {"2", "7 - 3 = 4"} <= set(texts(chart))
    # 4 columns of both ids in the table, of 2 in the first part; 1 of 7 in the second
    assert len(marked(chart)) == 4 + 4 + 4 + 1
