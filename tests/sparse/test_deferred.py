from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from strategies import DrawnBatch, jagged_batches

from tutorec.sparse import deferred
from tutorec.sparse.deferred import raise_deferred_id_errors
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    deferred._under_way.clear()
    yield
    assert not deferred._under_way, "a test left a check behind"


def batch(*ids: int) -> KeyedJaggedTensor:
    """Features ``item`` with 2 and 1 ids, ``user`` with 0 and 2."""
    return KeyedJaggedTensor(
        ["item", "user"], torch.tensor(ids), lengths=torch.tensor([2, 1, 0, 2])
    )


def defer(features: KeyedJaggedTensor, tables: list[tuple[str, str, int]]) -> None:
    ids, offsets, samples = features.values(), features.offsets(), features.stride_per_key()
    deferred.check_ids_on_device(ids, offsets, features.keys(), samples, tables)


TABLES = [("item", "items", 9), ("user", "users", 6), ("item", "few_items", 8)]
BAD = [(7, 8, 9, 4, 5), (7, -1, 3, 4, 5), (7, 7, 3, 4, 6), (0, 0, 7, 9, -9), (100, 8, 9, 4, 5)]


def error_of_both(ids: KeyedJaggedTensor, tables: list[tuple[str, str, int]]) -> tuple[str, str]:
    texts = []
    for check in (check_ids, lambda *given: (defer(*given), raise_deferred_id_errors())):
        try:
            check(ids, tables)
            texts.append("")
        except ValueError as error:
            texts.append(str(error))
    return texts[0], texts[1]


@pytest.mark.parametrize("ids", BAD)
def test_a_deferred_check_says_what_the_immediate_one_says(ids: tuple[int, ...]) -> None:
    for tables in (TABLES[:2], TABLES[1:]):
        now, later = error_of_both(batch(*ids), tables)
        assert later == now


def test_bounds_of_many_collections_stay_on_the_device() -> None:
    """To copy them there again would wait for it, at every step."""
    deferred._bounds_of.cache_clear()
    for _ in range(2):
        for rows in range(9, 59):
            defer(batch(0, 0, 0, 0, 0), [("item", "items", rows)])
    raise_deferred_id_errors()
    assert deferred._bounds_of.cache_info().misses == 50


@given(jagged_batches(rows=12))
def test_a_deferred_check_finds_the_first_bad_id_and_no_good_one(drawn: DrawnBatch) -> None:
    tables = [(key, f"t_{key}", 8) for key in drawn.keys[:2]]
    bad = [
        (key, sample, number)
        for key in drawn.keys[:2]
        for sample, bag in enumerate(drawn.ids[key])
        for number in bag
        if number >= 8
    ]
    defer(drawn.kjt(), tables)
    if not bad:
        raise_deferred_id_errors()
        return
    key, sample, number = bad[0]
    outside = sum(1 for other, _, _ in bad if other == key)
    total = sum(len(bag) for bag in drawn.ids[key])
    with pytest.raises(
        ValueError,
        match=f"feature '{key}', sample {sample}, holds id {number}; {outside} of .* {total} ",
    ):
        raise_deferred_id_errors()


def test_wrong_ids_are_looked_up_as_0_and_no_other_id_changes() -> None:
    ids = batch(7, 8, 9, -4, 5)
    offsets, samples = ids.offsets(), ids.stride_per_key()
    safe = deferred.check_ids_on_device(ids.values(), offsets, ids.keys(), samples, TABLES)
    assert safe.tolist() == [7, 0, 0, 0, 5] and safe.dtype == torch.int64
    assert ids.values().tolist() == [7, 8, 9, -4, 5]
    with pytest.raises(ValueError, match=r"'few_items'.*8 rows.*sample 0.*id 8; 2"):
        raise_deferred_id_errors()


def test_ids_that_were_changed_before_the_flag_is_read_are_told_of_without_a_number() -> None:
    ids = batch(7, 8, 9, 4, 5)
    defer(ids, TABLES[:2])
    ids.values().zero_()
    with pytest.raises(ValueError, match=r"not.*tables \['items', 'users'\]"):
        raise_deferred_id_errors()


def test_nothing_is_raised_before_it_is_asked_for() -> None:
    defer(batch(7, 8, 9, 4, 5), TABLES[:2])
    defer(batch(0, 0, 0, 0, 0), TABLES)
    with pytest.raises(ValueError, match=r"table 'items'.*9 rows.*sample 1.*id 9"):
        raise_deferred_id_errors()
    raise_deferred_id_errors()


def test_samples_of_a_variable_batch_are_counted_within_their_feature() -> None:
    ids = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([1, 2, 30]),
        lengths=torch.tensor([1, 0, 0, 2]),
        stride_per_key_per_rank=[[1], [3]],
    )
    now, later = error_of_both(ids, [("a", "t", 5), ("b", "u", 9)])
    assert later == now
    assert "feature 'b', sample 2, holds id 30; 1 of the feature's 2 ids" in now


def test_an_empty_batch_starts_no_check() -> None:
    defer(
        KeyedJaggedTensor(["item"], torch.tensor([]).long(), lengths=torch.tensor([0, 0])),
        TABLES[:1],
    )
    assert not deferred._under_way


class Behind:
    """A device's event: not reached at first, then reached; or of a device that has failed."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)

    def query(self) -> bool:
        if not self.answers:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.answers.pop(0)

    def synchronize(self) -> None:
        if not self.answers:
            raise RuntimeError("CUDA error: device-side assert triggered")


def test_a_later_check_does_not_wait_for_one_that_has_not_run() -> None:
    defer(batch(7, 8, 9, 4, 5), TABLES[:2])
    deferred._under_way[0]._arrived = Behind(False, True, True)
    raise_deferred_id_errors(block=False)
    assert len(deferred._under_way) == 1
    with pytest.raises(ValueError, match="holds id 9"):
        raise_deferred_id_errors(block=False)


def test_what_was_found_is_told_after_the_device_has_failed() -> None:
    for wait in (True, False):
        defer(batch(7, 8, 9, 4, 5), TABLES[:2])
        deferred._under_way[0]._arrived = Behind()
        with pytest.raises(ValueError, match="holds id 9"):
            raise_deferred_id_errors(wait)


def test_the_oldest_check_is_waited_for_when_many_are_under_way() -> None:
    for _ in range(deferred._MOST + 1):
        defer(batch(0, 0, 0, 0, 0), TABLES)
        deferred._under_way[-1]._arrived = Behind(False, False, False)
    raise_deferred_id_errors(block=False)
    assert len(deferred._under_way) == deferred._MOST
    raise_deferred_id_errors()
