"""Diagrams show what the objects hold that they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tutorec.models.two_tower import TwoTower
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.mlp import MLP
from tutorec.sparse.lists import kjt_from_lists
from tutorec.teach import draw
from tutorec.teach.canvas import RANK_COLORS

BATCHES = [
    kjt_from_lists({"user": [[2], []], "product": [[7], [7, 2]]}),
    kjt_from_lists({"user": [[2, 3], [4, 1]], "product": [[1, 2, 1], [5]]}),
]
FORWARD = {"sizes": [24, 24], "ids": [20, 24], "rows": [512, 512]}


def texts(chart: draw.Chart) -> list[str]:
    return [text.get_text() for axes in chart.figure.axes for text in axes.texts]


def lanes(**sent: list[int]) -> draw.Chart:
    return draw.swim_lanes(
        BATCHES,
        {"user": 0, "product": 1},
        64,
        FORWARD | sent,
        mark=7,
    )


def test_a_strip_has_a_cell_for_each_value_in_the_colour_of_its_rank():
    from matplotlib.colors import to_hex

    diagram = draw.Diagram(lines=4)
    node = diagram.strip(2, 1, [7, 2, " "], rank=[0, 1, None], marked=[0], title="ids")
    (axes,) = diagram.chart("three cells").figure.axes
    assert [to_hex(cell.get_facecolor(), keep_alpha=True) for cell in axes.patches] == [
        *(f"{color}ff" for color in RANK_COLORS[:2]),
        "#00000000",
    ]
    assert [cell.get_linewidth() for cell in axes.patches] == [2.5, 0.7, 0.7]
    assert (node.left, node.right, node.top[0]) == ((2, 1.6), (11, 1.6), 6.5)


def test_swim_lanes_write_the_ids_of_both_ranks_twice_and_the_bytes_that_cross():
    chart = lanes()
    assert chart.claim.startswith("44 bytes of lengths and ids cross, and 1,024 bytes")
    written: Any = texts(chart)
    ids = [text for text in written if text.isdigit()]
    assert sorted(ids) == sorted(2 * ["2", "7", "7", "2", "2", "3", "4", "1", "1", "2", "1", "5"])
    assert [written.count(text) for text in ("24 B, then 20 B", "24 B, then 24 B", "512 B")] == [
        1,
        1,
        2,
    ]
    assert "backward" not in written


def test_swim_lanes_end_with_the_rows_that_backward_updates():
    written = texts(lanes(gradients=[512, 512]))
    assert [text for text in written if "update" in text] == [
        "update rows 1, 2, 3, 4",
        "update rows 1, 2, 5, 7",
    ]
    assert written.count("512 B") == 4


@pytest.mark.parametrize("text", ["rows", "rows\nof a table"])
def test_a_box_is_as_wide_as_its_longest_line(text):
    assert draw.Diagram(lines=4).box(0, 1, text).width == len(max(text.split("\n"), key=len)) + 2


def test_a_lookup_shows_every_row_once_and_the_pooled_row():
    table = torch.arange(12.0).view(3, 4)
    chart = draw.lookup(table, [0, 2], table[[0, 2]].mean(0), claim="{ids} of {rows} rows")
    written = texts(chart)
    assert chart.claim == "2 of 3 rows"
    assert [text for text in written if "." in text] == [f"{n:.2f}" for n in range(12)] + [
        "4.00",
        "5.00",
        "6.00",
        "7.00",
    ]


def test_a_dlrm_is_drawn_with_its_own_sizes():
    tables = [
        EmbeddingBagConfig(
            num_embeddings=20, embedding_dim=8, name="user_table", feature_names=["user"]
        ),
        EmbeddingBagConfig(
            num_embeddings=3000, embedding_dim=8, name="item_table", feature_names=["item", "seen"]
        ),
    ]
    numbers, score = MLP(5, [4, 8]), nn.Linear(14, 1)
    chart = draw.dlrm(tables, numbers, score, claim="{vectors} vectors, {pairs} pairs")
    assert chart.claim == "4 vectors, 6 pairs"
    written = {"5 numbers", "seen ids", "3,000 x 8", "the same", "layers 5 > 4 > 8", "14 > 1"}
    assert written <= set(texts(chart))


def test_a_funnel_names_what_there_is_and_the_steps_between():
    chart = draw.funnel({"all": 1_000, "page": 10}, ["ranking"])
    drawn = texts(chart)
    for words in ("all", "1,000", "page", "10", "ranking"):
        assert words in drawn


def test_collisions_count_the_products_that_share_a_row():
    chart = draw.collisions([0, 1, 1, 2], rows=4)
    assert chart.facts == {"rows": 4, "shared": 2, "products": 4}


def test_ranks_are_drawn_with_their_processes_and_what_they_hold():
    chart = draw.ranks(11, [22, 33], puts_in=[1, 2], holds=[3.0, 3.0])
    drawn = " ".join(texts(chart))
    for words in ("notebook: process 11", "rank 1: process 33", "puts in 2, holds 3"):
        assert words in drawn


def test_two_towers_are_drawn_with_their_own_sizes():
    tables = [
        EmbeddingBagConfig(20, 4, "user_table", feature_names=["user"]),
        EmbeddingBagConfig(3000, 4, "item_table", feature_names=["item", "seen"]),
    ]
    model = TwoTower(EmbeddingBagCollection(tables), ["user", "seen"], ["item"], [6, 3])
    chart = draw.towers(model)
    assert chart.claim.startswith("one vector of 3")
    drawn = " ".join(texts(chart))
    for words in ("user, 20 rows", "seen, 3,000 rows", "8 > 6 > 3", "4 > 6 > 3"):
        assert words in drawn


def test_a_row_of_bytes_names_each_part_and_the_sum():
    chart = draw.byte_row({"scale": 4, "codes": 64}, claim="{total} bytes")
    assert texts(chart) == ["scale", "4 B", "codes", "64 B", "68 bytes"]


def test_an_all_to_all_writes_each_message_where_it_was_and_where_it_is() -> None:
    before = [[10 * source + rank for rank in range(3)] for source in range(3)]
    after = [list(column) for column in zip(*before, strict=True)]
    written = texts(draw.all_to_all(before, after, mark=1, claim=""))
    assert written.count("21") == written.count("0") == 2


def test_partial_sums_divide_the_ids_of_bags_and_write_both_parts_of_each_sum():
    bags = [[[7, 2, 6], [1]], [[5], [3, 4]]]
    partial = [[[20.0, 10.0], [0.0, 30.0]], [[130.0, 0.0], [50.0, 40.0]]]
    chart = draw.partial_sums(bags, 8, partial, [[150.0, 10.0], [50.0, 70.0]], mark=7, claim="")
    written = texts(chart)
    assert [written.count(text) for text in ("7", "3", "130", "30", "150", "70")] == [
        2,
        2,
        2,
        2,
        1,
        1,
    ]
    assert {"rank 0: rows 0 to 3", "rank 1: rows 4 to 7"} <= set(written)
    odd = draw.partial_sums(bags, 7, partial, [[150.0], [50.0]], mark=7, claim="")
    assert "rank 1: rows 4 to 6" in texts(odd)


def test_the_cells_of_stages_have_the_rank_of_the_sample_or_of_the_feature():
    from matplotlib.colors import to_hex

    chart = draw.stages({"user": 1, "product": 0}, 1, claim="{ranks} ranks")
    assert chart.claim == "2 ranks"
    (axes,) = chart.figure.axes
    colors = [RANK_COLORS.index(to_hex(cell.get_facecolor())) for cell in axes.patches]
    samples, features = [0, 0, 1, 1], [1, 0, 1, 0]
    assert colors == [*samples, *features, *features, *samples]
    assert [texts(chart).count(text) for text in ("ids", "row")] == [8, 8]


def test_a_training_step_writes_what_each_rank_sends():
    held = [{"user_table": (20, 16)}, {"item_table": (10, 16)}]
    sent = [
        {"input ids": 5, "output rows": 6, "output gradients": 7},
        {"input ids": 1, "output rows": 2, "output gradients": 3},
    ]
    chart = draw.training_step(held, sent, 1000, 8, claim="{bytes} bytes")
    assert chart.claim == "24 bytes"
    written = texts(chart)
    assert {
        "ids: 5 B",
        "ids: 1 B",
        "pooled rows: 2 B",
        "their gradients: 7 B",
        "20 x 16; layers: 1,000",
    } <= set(written)
    assert written.count("dense gradients: 4,000 B") == 2


def test_sums_are_added_inside_the_host_before_they_cross():
    chart = draw.host_sums([[12, 3, 9, 20], [8, 5, 11, 17]], 256, 128, claim="")
    written = texts(chart)
    assert {
        "12 + 8",
        "9 + 11",
        "3 + 5",
        "20 + 17",
        "37",
        "inside the host:\n256 B each way",
    } <= set(written)
    assert written.count("20") == 3
