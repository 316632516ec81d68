"""A figure of chapter 16: which stored rows a compressed table's rows are made of."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex, to_rgba
from matplotlib.patches import Rectangle

from tutorec.modules.compressions import QR, Block
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.teach import draw
from tutorec.teach.canvas import ACCENT, INK

TABLE = EmbeddingBagConfig(12, 4, "item")


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


@pytest.mark.parametrize(
    ("how", "numbers", "matrices"),
    [
        (QR(4), 7 * 4, 0),
        (Block(2), 12 * 2 + 2 * 4, 1),
        (Block(4), 48, 0),
    ],
)
def test_numbers_are_those_of_parts_and_matrices(how: QR | Block, numbers: int, matrices: int):
    chart = draw.stored(TABLE, how, [7], claim="")
    assert chart.facts["stored"] == numbers
    assert chart.facts["whole"] == 48
    assert sum(text.startswith("matrix") for text in texts(chart)) == matrices
