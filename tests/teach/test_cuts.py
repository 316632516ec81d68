"""The figure of plans: what lies where, in the colours of ranks."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex

from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.teach import draw
from tutorec.teach.canvas import RANK_COLORS


def plan(word: ParameterShardingGenerator, hosts: int = 1) -> EmbeddingModuleShardingPlan:
    """A table of 8 x 4 and one of 2 x 4, 128 and 32 bytes, on two ranks a host."""
    tables = [
        EmbeddingBagConfig(
            num_embeddings=rows, embedding_dim=4, name=f"t{rows}", feature_names=[f"f{rows}"]
        )
        for rows in (8, 2)
    ]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
    return construct_module_sharding_plan(
        ebc, apply_to_all(ebc, word), world_size=2 * hosts, local_size=2, device_type="cpu"
    )


def drawn(chart: draw.Chart) -> list[list[tuple[str, float, float, float, float]]]:
    """Of each panel: colour, left, top, width, height of its boxes."""
    return [
        [
            (to_hex(box.get_facecolor()), *(round(number, 3) for number in (*box.get_xy(), *size)))
            for box in axes.patches
            for size in [(box.get_width(), box.get_height())]
        ]
        for axes in chart.figure.axes
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (table_wise(1), [(1, 0, 0, 4, 8), (1, 5.4, 0, 4, 2)]),
        (
            row_wise(),
            [
                (0, 0, 0, 4, 4),
                (1, 0, 4, 4, 4),
                (0, 5.4, 0, 4, 1),
                (1, 5.4, 1, 4, 1),
            ],
        ),
        (
            column_wise(),
            [
                (0, 0, 0, 2, 8),
                (1, 2, 0, 2, 8),
                (0, 5.4, 0, 2, 2),
                (1, 7.4, 0, 2, 2),
            ],
        ),
    ],
    ids=repr,
)
def test_pieces_lie_where_the_plan_says_in_the_colour_of_their_rank(word, expected):
    boxes = [(RANK_COLORS[rank], *place) for rank, *place in expected]
    assert drawn(draw.cuts({"a plan": plan(word)}, claim="")) == [boxes, []]


def test_shards_have_their_offsets_and_tables_their_shape():
    panel = draw.cuts({"a plan": plan(row_wise())}, claim="").figure.axes[0]
    assert [text.get_text() for text in panel.texts] == [
        "t8\n8 x 4",
        "[0, 0]",
        "[4, 0]",
        "t2\n2 x 4",
    ]


def test_each_plan_has_a_panel_with_its_name():
    plans = {
        "rows": plan(row_wise()),
        "columns": plan(column_wise()),
        "whole": plan(table_wise(1)),
    }
    chart = draw.cuts(plans, claim="three plans")
    assert [axes.get_title() for axes in chart.figure.axes] == ["rows", "columns", "whole", ""]
    assert chart.claim == "three plans"


def test_a_table_is_as_wide_in_every_panel():
    chart = draw.cuts({"rows": plan(row_wise()), "columns": plan(column_wise())}, claim="")
    assert len({axes.get_xlim() for axes in chart.figure.axes}) == 1


def test_one_table_has_a_panel_for_each_plan_and_copies_stand_apart():
    words = {"rows": row_wise(), "columns": column_wise(), "copies": data_parallel()}
    entries = {name: plan(word)["t8"] for name, word in words.items()}
    chart = draw.one_table(entries, mark=3, claim="row 3: {rows}, {columns}, {copies}")
    assert chart.claim == "row 3: 0, 0 and 1, 0 and 1"
    assert [axes.get_title(loc="left") for axes in chart.figure.axes] == [
        "rows: row 3 on rank 0",
        "columns: row 3 on rank 0 and 1",
        "copies: row 3 on rank 0 and 1",
    ]
    places = [[box[1:] for box in panel] for panel in drawn(chart)]
    assert places == [
        [(0, 0, 4, 4), (0, 4, 4, 4)],
        [(0, 0, 2, 8), (2, 0, 2, 8)],
        [(0, 0, 4, 8), (4.24, 0, 4, 8)],
    ]
    assert [len(axes.lines) for axes in chart.figure.axes] == [1, 2, 2]
    ends = [axes.get_xlim() for axes in chart.figure.axes]
    assert ends == [(0, 4), (0, 4), (0, 8.24)]  # two copies are wider than a table
    written = [[text.get_text() for text in axes.texts] for axes in chart.figure.axes]
    assert written == [
        ["rank 0\nrows 0 to 3", "rank 1\nrows 4 to 7"],
        ["rank 0\ncolumns\n0 to 1", "rank 1\ncolumns\n2 to 3"],
        ["rank 0\nwhole", "rank 1\nwhole"],
    ]


def test_panels_of_one_table_have_one_scale_and_a_quarter_has_room_for_its_rank():
    words = {"whole": table_wise(0), "copies": data_parallel(), "more": row_wise()}
    words["beneath"] = table_wise(1)
    entries = {name: plan(word)["t8"] for name, word in words.items()}
    entries["grid"] = plan(grid_shard([0, 1]), hosts=2)["t8"]
    chart = draw.one_table(entries, mark=3, claim="whole: {whole}")
    whole, copies, _, beneath, grid = chart.figure.axes
    chart.figure.draw_without_rendering()
    wide, narrow = (axes.get_position().width for axes in (copies, beneath))
    assert narrow / wide == pytest.approx(1 / 2.06, rel=0.15)
    assert whole.texts[0].get_text() == "rank 0\nwhole"
    assert [text.get_text() for text in grid.texts] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_one_bag_writes_the_bytes_of_every_message_and_what_each_rank_adds_up():
    words = {"whole": table_wise(1), "rows": row_wise(), "columns": column_wise([0, 1])}
    words["copies"] = data_parallel()
    entries = {name: plan(word)["t8"] for name, word in words.items()}
    weight = torch.tensor([[100.0 * row, 10 * row, row, 0] for row in range(8)])
    chart = draw.one_bag(entries, weight, [7, 2, 6])
    # ids and their length, and twice four columns: to one rank, or in part to both
    assert chart.facts["sent"] == {
        "whole": 16 + 32,
        "rows": 8 + 12 + 64,
        "columns": 32 + 32,
        "copies": 2 * (16 + 16),
    }
    (axes,) = chart.figure.axes
    written = [text.get_text() for text in axes.texts]
    assert [written.count(text) for text in ("1500", "1300", "200", "g")] == [7, 1, 1, 24]
    assert written.count("12 B") == 1 and "rows: 84 bytes" in written
