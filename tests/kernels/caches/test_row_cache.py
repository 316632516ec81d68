"""Which rows have a slot: by the literature's rules, counted, and never against a lookup that
waits.
"""

import pytest
import torch

from tutorec._kernels.caches.row_cache import CacheAlgorithm, CacheCounts, RowCache


def use(cache: RowCache, *ids: int, train: bool = False) -> None:
    _, _, in_file = cache.place(torch.tensor(ids, dtype=torch.int64))
    if train:
        cache.change(in_file)


def in_slots(cache: RowCache) -> set[int]:
    return {row for _, own in cache.in_slots() for row in own.rows.tolist()}


@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_rows_leave_in_the_order_of_the_algorithm(algorithm: CacheAlgorithm) -> None:
    cache = RowCache([10], [3], algorithm, admitted=1)
    for ids in ([1, 1, 1], [2, 2], [3], [2], [1], [4]):
        use(cache, *ids)
    assert in_slots(cache) == {1, 2, 4}
    use(cache, 5)
    assert in_slots(cache) == ({1, 2, 5} if algorithm == "lfu" else {1, 4, 5})


def test_lfu_keeps_rows_that_were_used_more_often() -> None:
    cache = RowCache([10], [2], "lfu", admitted=1)
    for ids in ([1, 2], [1, 2], [3], [3, 4]):
        use(cache, *ids)
    # of the three that two batches used, the last one; 4 was used by one
    assert in_slots(cache) in ({1, 3}, {2, 3})


def test_free_slots_are_filled_by_every_batch_and_taken_ones_by_few() -> None:
    cache = RowCache([1000, 10], [3, 10], "lru", admitted=0)
    use(cache, 1, 2)
    use(cache, 3, 4, 4)
    assert len(in_slots(cache)) == 3 and {1, 2} < in_slots(cache)
    use(cache, 5, 1003, 1003)  # the second table has free slots still
    assert len(in_slots(cache)) == 4 and cache.find(torch.tensor([1003])) >= 1013
    always = RowCache([1000], [3], "lru", admitted=0.25)
    moved = 0
    for batch in range(400):
        moved += len(always.place(torch.tensor([batch]))[1])
    assert 50 < moved < 150  # a quarter of 400, of a fixed seed


@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_rows_of_a_lookup_that_waits_stay_in_their_places(algorithm: CacheAlgorithm) -> None:
    cache = RowCache([10], [2], algorithm, admitted=1)
    use(cache, 1, 2)
    places = cache.place(torch.tensor([1, 3]))[0]  # 3 takes the slot of 2
    pinned = cache.pin()
    for ids in ([4, 5, 6], [2, 7], [7]):
        use(cache, *ids)
    assert torch.equal(cache.find(torch.tensor([1, 3])), places) and in_slots(cache) == {1, 3}
    pinned.release()
    use(cache, 8, 9)
    assert in_slots(cache) == {8, 9} if algorithm == "lru" else in_slots(cache) & {8, 9}


def test_a_row_that_waits_in_the_file_gets_no_slot() -> None:
    cache = RowCache([10], [1], "lru", admitted=1)
    use(cache, 1, 2)
    waiting = next(row for row in (1, 2) if row not in in_slots(cache))
    pinned = cache.pin()
    use(cache, 9)
    use(cache, waiting)
    assert cache.find(torch.tensor([waiting])).tolist() == [waiting]
    pinned.release()
    use(cache, waiting)
    assert in_slots(cache) == {waiting}


def test_counts_are_of_ids_looked_up_and_rows_in_the_file() -> None:
    cache = RowCache([10], [2], "lru", admitted=1)
    use(cache, 1, 1, 2, train=True)  # both get slots
    assert (
        cache.counts == CacheCounts(lookups=3, read=2, written=0)
        and cache.counts.hit_rate == 1 - 2 / 3
    )
    # 3 and 4 are read, and updated in the file: both slots are in use
    use(cache, 1, 2, 3, 3, 4, train=True)
    assert cache.counts == CacheCounts(lookups=8, read=4, written=2)
    use(cache, 5, 5)  # takes a slot, whose row is written back
    assert cache.counts == CacheCounts(lookups=10, read=5, written=3)
    # the other one; row 5 has not changed
    assert [own.rows.numel() for _, own in cache.take_changed()] == [1]
    assert cache.counts.written == 4 and not [*cache.take_changed()]


def test_a_batch_that_does_not_fit_reads_each_of_its_rows_once() -> None:
    cache = RowCache([10], [1], "lru", admitted=1)
    for _ in range(2):
        use(cache, 1, 2, 3, 3, train=True)
    # One of the three has the slot after the first batch; in the second the two others are read.
    assert cache.counts == CacheCounts(lookups=8, read=3 + 2, written=2 + 2)


def test_a_table_without_rows_has_a_slot_and_does_no_harm() -> None:
    cache = RowCache([0, 3], [1, 1], "lru")
    use(cache, 1, 2, train=True)
    assert len(in_slots(cache)) == 1 and cache.bases == [0, 1, 5]


LOG = [[1, 1, 2], [1, 2, 3], [3, 4], [3, 3, 1], [5]]


def test_a_replayed_log_is_what_one_batch_after_another_does() -> None:
    replayed, by_hand = (RowCache([10], [2], "lru", admitted=1) for _ in range(2))
    counts = replayed.replay([torch.tensor(ids) for ids in LOG])
    for ids in LOG:
        use(by_hand, *ids, train=True)
    assert counts == by_hand.counts
    assert counts.hits == counts.lookups - counts.read
    assert in_slots(replayed) == in_slots(by_hand)


def test_settling_batches_are_not_counted() -> None:
    whole, settled, first = (RowCache([10], [2], "lru", admitted=1) for _ in range(3))
    counts = settled.replay(LOG, settle=2)
    assert counts == whole.replay(LOG).since(first.replay(LOG[:2]))
    assert counts.lookups == 2 + 3 + 1
    assert RowCache([10], [2], "lru").replay(LOG, settle=9) == CacheCounts()


def test_rates_are_of_so_many_batches_each_and_the_rest_is_left_out() -> None:
    rates = RowCache([10], [2], "lru", admitted=1).replay(LOG, settle=1, every=2)
    cache = RowCache([10], [2], "lru", admitted=1)
    cache.replay(LOG[:1])
    assert rates == [cache.replay(LOG[1:3]).hit_rate, cache.replay(LOG[3:5]).hit_rate]
    assert len(RowCache([10], [2], "lru").replay(LOG, every=2)) == 2


@pytest.mark.parametrize("wrong", [10, 11, 20, -1])
def test_an_id_that_is_not_a_row_is_refused(wrong: int) -> None:
    cache = RowCache([10, 4], [2, 2], "lru")
    cache.replay([[0, 9, 12, 15]])
    with pytest.raises(ValueError, match=rf"id {wrong} .* 0 to 9, 12 to 15"):
        cache.replay([[0, wrong]])


def test_numbers_of_batches_are_checked() -> None:
    cache = RowCache([10], [2], "lru")
    with pytest.raises(ValueError, match="settle"):
        cache.replay(LOG, settle=-1)
    with pytest.raises(ValueError, match="every"):
        cache.replay(LOG, every=0)
