"""The figure of chapter 17: what a batch moves between slots and the file."""

from __future__ import annotations

import pytest

from tutorec._kernels.caches.row_cache import RowCache
from tutorec.teach import draw
from tutorec.teach.tiers import CachedBatch


def two_batches() -> tuple[CachedBatch, CachedBatch]:
    cache = RowCache([10], [2], "lru", admitted=1)
    return CachedBatch.of(cache, [7, 7, 9]), CachedBatch.of(cache, [9, 3])


def test_a_batch_is_noted_as_it_moved():
    first, second = two_batches()
    assert (first.held, first.hits, set(first.read.values()), first.written) == ({}, 1, {7, 9}, {})
    assert set(second.held.values()) == {7, 9}
    assert second.hits == 1
    assert list(second.read.values()) == [3] and list(second.written.values()) == [7]
    assert second.read.keys() == second.written.keys()
    assert set(second.held_after.values()) == {3, 9}


def test_the_figure_counts_all_batches():
    cache = RowCache([10], [2], "lru", admitted=1)
    chart = draw.tiers(cache, {"first": [7, 7, 9], "second": [9, 3]})
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


def test_batches_without_titles_are_numbered_and_the_cache_is_used() -> None:
    cache = RowCache([10], [2], "lru", admitted=1)
    chart = draw.tiers(cache, [[7], [7, 9]])
    assert [axes.get_title(loc="left") for axes in chart.figure.axes] == ["batch 1", "batch 2"]
    assert (chart.facts["hits"], chart.facts["read"]) == (1, 2)
    assert cache.counts.hits == 1 and cache.counts.lookups == 3


def test_a_figure_of_no_batch_or_of_two_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="0 batches of 1 tables"):
        draw.tiers(RowCache([10], [2], "lru"), [])
    with pytest.raises(ValueError, match="1 batches of 2 tables"):
        draw.tiers(RowCache([10, 10], [2, 2], "lru"), [[1]])


def test_the_chapters_second_batch_evicts_the_row_that_was_unused_for_longest() -> None:
    cache = RowCache([16], [4], "lru", admitted=1)
    cache.replay([[11]])
    one, two = (CachedBatch.of(cache, ids) for ids in ([7, 2, 7, 9], [7, 2, 5, 7]))
    assert (one.hits, len(one.read), len(one.written)) == (1, 3, 0)
    assert (two.hits, len(two.read), len(two.written)) == (3, 1, 1)
    assert {*two.written.values()} == {11}
