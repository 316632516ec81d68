"""Sessions: histories in order, and a truth that is known."""

from __future__ import annotations

import pytest
import torch

from tutorec.datasets.random import Split
from tutorec.datasets.sessions import Sessions


def _histories(
    store: Sessions,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    split: Split = "train",
    start: int = 0,
) -> list[tuple[list[int], int]]:
    found = []
    for batch in store.batches(batch_size, rank, world_size, split, start=start):
        history, item = (batch.sparse_features[name] for name in ("history", "item"))
        found += list(
            zip([part.tolist() for part in history.to_dense()], item.values().tolist(), strict=True)
        )
    return found


def test_ranks_share_the_sessions_of_one_process_in_order() -> None:
    store = Sessions(items=30, rows=90, test_rows=10, longest=5)
    whole = _histories(store, 20)
    by_rank = [_histories(store, 10, rank=rank, world_size=2) for rank in (0, 1)]
    assert len(whole) == 90 and {len(history) for history, _ in whole} == {2, 3, 4, 5}
    assert [by_rank[0][:10], by_rank[1][:10]] == [whole[:10], whole[10:20]]
    assert sorted(by_rank[0] + by_rank[1]) == sorted(whole)
    assert _histories(store, 20, start=40) == whole[40:]


def test_the_next_item_follows_the_last_two_as_often_as_planted() -> None:
    """Counts of the training sessions find the next item nearly as often as the planted
    truth does.
    """
    store = Sessions(items=20, rows=100_000, test_rows=5_000, longest=3)
    counts = torch.zeros(20, 20, 20)
    train = _histories(store, 1000)
    before, last, item = (
        torch.tensor(column) for column in zip(*((h[-2], h[-1], i) for h, i in train), strict=True)
    )
    counts.index_put_((before, last, item), torch.ones(len(item)), accumulate=True)
    best = counts.argmax(2)
    test = _histories(store, 1000, split="test")
    hits = sum(int(best[history[-2], history[-1]]) == item for history, item in test) / len(test)
    assert 0.8 * store.best_recall(1) < hits < store.best_recall(1) + 0.02
    assert store.best_recall(20) == 1.0


@pytest.mark.parametrize(
    "words", [{"items": 4}, {"longest": 1}, {"rows": 0}, {"seed": -1}, {"items": 2.5}]
)
def test_sizes_that_cannot_be_are_refused(words: dict[str, int]) -> None:
    (name,) = words
    with pytest.raises(ValueError, match=f"Sessions: {name}="):
        Sessions(**words)
