"""The figure of chapter 17: what a batch moves between slots and the file."""

from __future__ import annotations

from matplotlib.patches import FancyArrowPatch

from tutorec._kernels.caches.row_cache import RowCache
from tutorec.teach import draw
from tutorec.teach.rows import CachedBatch


def two_batches() -> tuple[CachedBatch, CachedBatch]:
    cache = RowCache([10], [2], "lru", admitted=1)
    return CachedBatch.of(cache, [7, 7, 9]), CachedBatch.of(cache, [9, 3])


def test_a_batch_is_noted_as_it_moved():
    first, second = two_batches()
    assert (first.held, sum(first.hits), set(first.read.values()), first.written) == (
        {},
        1,
        {7, 9},
        {},
    )
    assert set(second.held.values()) == {7, 9}
    assert sum(second.hits) == 1
    assert list(second.read.values()) == [3] and list(second.written.values()) == [7]
    assert second.read.keys() == second.written.keys()
    assert set({**second.held, **second.read}.values()) == {3, 9}


def test_the_figure_counts_all_batches_and_the_cache_is_used() -> None:
    cache = RowCache([10], [2], "lru", admitted=1)
    chart = draw.tiers(cache, [[7, 7, 9], [9, 3]])
    assert chart.claim == "2 of 5 ids hit; 3 rows read, 1 written back"
    (axes,) = chart.figure.axes
    arrows = [patch for patch in axes.patches if isinstance(patch, FancyArrowPatch)]
    assert [arrow.get_linestyle() for arrow in arrows] == ["-", "-", "--", "-"]
    words = [text.get_text() for text in axes.texts]
    assert {"batch 1", "batch 2", "slots before it", "rows in the file"} <= set(words)
    assert cache.counts.hits == 2 and cache.counts.lookups == 5


def test_the_chapters_second_batch_evicts_the_row_that_was_unused_for_longest() -> None:
    cache = RowCache([16], [4], "lru", admitted=1)
    cache.replay([[11]])
    one, two = (CachedBatch.of(cache, ids) for ids in ([7, 2, 7, 9], [7, 2, 5, 7]))
    assert (sum(one.hits), len(one.read), len(one.written)) == (1, 3, 0)
    assert (sum(two.hits), len(two.read), len(two.written)) == (3, 1, 1)
    assert {*two.written.values()} == {11}
