"""A figure of chapter 16: which stored rows a compressed table's rows are made of."""

from __future__ import annotations

import pytest
import torch
from matplotlib.patches import Rectangle

from tutorec.modules.compressions import QR, Block, Compression, Hash, IdMap, Part
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.sparse.hashing import mixing_hash
from tutorec.teach import draw

TABLE = EmbeddingBagConfig(12, 4, "item")
MIXED = [
    Part(EmbeddingBagConfig(3, 4, "popular")),
    Part(EmbeddingBagConfig(9, 1, "rest"), (IdMap("-3", lambda ids: ids - 3),)),
]


def texts(chart: draw.Chart) -> list[str]:
    return [text.get_text() for text in chart.figure.axes[0].texts]


def boxes(chart: draw.Chart) -> list[tuple[float, float]]:
    """Left edge within the drawing, and row, of every marked part of a row."""
    marked = [box for box in chart.figure.axes[0].patches if isinstance(box, Rectangle)]
    return [(round(box.get_x(), 2), round(box.get_y(), 2)) for box in marked]


def test_the_rows_of_an_id_are_marked_where_the_compression_looks_them_up():
    chart = draw.stored(
        TABLE, QR(4), [7, 3], sign="x", claim="{shared} of {rows} rows, {share:.2f}"
    )
    assert chart.claim == "1 of 7 rows, 0.58"
    assert {"7 // 4 = 1", "3 // 4 = 0", "7 % 4 = 3 % 4 = 3", "x"} <= set(texts(chart))
    assert boxes(chart)[:2] == [(0, 7), (0, 3)]
    (_, quotient_of_7), (_, quotient_of_3), (left, shared), (half, shared_too) = boxes(chart)[2:]
    assert (quotient_of_7, quotient_of_3) == (1, 0)
    assert (shared, half - left) == (shared_too, 2)
    hashed = texts(draw.stored(TABLE, Hash(5), [7]))
    row = int(mixing_hash(torch.tensor([7]), 5))
    assert f"hash(7) = {row}" in hashed
    rows = [int(mixing_hash(torch.tensor([7]), 5, seed=seed)) for seed in (0, 1)]
    assert rows[0] != rows[1]
    assert {f"hash{k}(7) = {row}" for k, row in enumerate(rows, 1)} <= set(
        texts(draw.stored(TABLE, Hash(5, 2), [7]))
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
    chart = draw.stored(TABLE, how, [7])
    assert chart.facts["stored"] == numbers
    assert chart.facts["whole"] == 48
    assert sum(text.startswith("matrix") for text in texts(chart)) == matrices


def test_an_id_without_a_row_in_a_part_is_not_drawn_there():
    chart = draw.stored(TABLE, MIXED, [2, 7])
    assert {"2", "7 - 3 = 4"} <= set(texts(chart))
    assert len(boxes(chart)) == 4


@pytest.mark.parametrize("ids", [[12], [0, 1, 2, 3]])
def test_ids_that_cannot_be_drawn_are_refused(ids: list[int]):
    with pytest.raises(ValueError, match="up to 3 ids from 0 to 11 of table 'item'"):
        draw.stored(TABLE, QR(4), ids)
