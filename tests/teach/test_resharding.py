"""The diagram of a table that is saved under one plan and loaded under others."""

from __future__ import annotations

from typing import Any

import tutorec
from tutorec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise
from tutorec.teach import draw


def entry(how: Any, ranks: int, rows: int = 8) -> Any:
    """A table of 16 columns under a plan."""
    table = tutorec.EmbeddingBagConfig(
        name="t", num_embeddings=rows, embedding_dim=16, feature_names=["f"]
    )
    module = tutorec.EmbeddingBagCollection(tables=[table], device="meta")
    return construct_module_sharding_plan(module, {"t": how}, world_size=ranks)["t"]


def test_parts_are_the_overlaps_of_files_and_shards() -> None:
    loaded = {"rows": entry(row_wise(), 4), "columns": entry(column_wise(ranks=[0, 1, 2, 3]), 4)}
    chart = draw.resharding(
        entry(row_wise(), 2),
        loaded,
        claim="{files}: {reads_1} and {reads_2}",
    )
    assert chart.claim == "2: 4 and 8"
    _, rows, columns = ([t.get_text() for t in axes.texts] for axes in chart.figure.axes)
    assert rows.count("128 B") == 4 and columns.count("64 B") == 8


def test_uneven_shards_are_read_from_every_file_that_has_a_part() -> None:
    chart = draw.resharding(
        entry(row_wise(), 2, rows=9), {"three": entry(row_wise(), 3, rows=9)}, claim=""
    )
    assert chart.facts["reads_1"] == 4  # rows 3 to 5 are in both files, 0 to 4 and 5 to 8
