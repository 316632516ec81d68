"""The figure of chapter 17: what a batch moves between slots and the file."""

from __future__ import annotations

from tutorec._kernels.row_cache import RowCache
from tutorec.teach import draw
from tutorec.teach.draw import CachedBatch


def two_batches() -> tuple[CachedBatch, CachedBatch]:
    cache = RowCache([10], [2], "lru", admitted=1)
    return CachedBatch.of(cache, 10, 2, [7, 7, 9]), CachedBatch.of(cache, 10, 2, [9, 3])


def test_a_batch_is_noted_as_it_moved():
    first, second = two_batches()
    assert (first.held, first.hits, set(first.read.values()), first.written) == ({}, 1, {7, 9}, {})
    assert set(second.held.values()) == {7, 9}
    assert second.hits == 1
    assert list(second.read.values()) == [3] and list(second.written.values()) == [7]
    assert second.read.keys() == second.written.keys()
    assert set(second.held_after.values()) == {3, 9}


def test_the_figure_counts_all_batches():
    first, second = two_batches()
    chart = draw.tiers({"first": first, "second": second})
    assert chart.claim == "2 of 5 ids hit; 3 rows read, 1 written back"
    arrows = [
        text
        for axes in chart.figure.axes
        for text in axes.texts
        if getattr(text, "arrow_patch", None)
    ]
    assert len(arrows) == 4
    words = [text.get_text() for text in chart.figure.axes[1].texts]
    assert words[:2] == ["9", "3"]
    assert {"slots before it", "rows in the file", "slots after it"} <= set(words)
    assert [axes.get_title(loc="left") for axes in chart.figure.axes] == ["first", "second"]
