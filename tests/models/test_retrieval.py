"""Search is exact whatever the blocks, and recall is that of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutorec.datasets.random import shop
from tutorec.datasets.utils import Batch
from tutorec.models.retrieval import CandidateIndex, build_index, recall_at
from tutorec.models.two_tower import TwoTower
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd import Ranks

STORE = shop(users=30, items=25, rows=300, test_rows=200)


@given(st.integers(1, 60), st.integers(0, 5), st.integers(1, 70), st.integers(0, 1000), st.data())
def test_blocks_of_any_size_find_what_scoring_all_finds(
    count: int, queries: int, block: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, count))
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randperm(1000, generator=draw)[:count] - 500
    vectors = torch.randn(count, 3, generator=draw, dtype=torch.float64)
    asked = torch.randn(queries, 3, generator=draw, dtype=torch.float64)
    found, scores = CandidateIndex(ids, vectors).retrieve(asked, k, block)
    in_order = (asked @ vectors.t()).sort(dim=1, descending=True)
    torch.testing.assert_close(scores, in_order.values[:, :k])
    assert torch.equal(found, ids[in_order.indices[:, :k]])


def _towers(candidates: tuple[str, ...] = ("item",)) -> TwoTower:
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(30, 4, "t_user", feature_names=["user"]),
        EmbeddingBagConfig(25, 4, "t_item", feature_names=["item", "clicked"]),
    ]
    return TwoTower(EmbeddingBagCollection(tables), ["user"], list(candidates), [3])


def _index(ids: Tensor, batch_size: int) -> CandidateIndex:
    return build_index(_towers(), ids, batch_size)


@pytest.mark.parametrize("batch_size", [2, 3, 100])
def test_ranks_build_the_index_of_one_process_in_the_order_of_the_ids(
    ranks: Callable[..., Ranks], batch_size: int
) -> None:
    ids = torch.randperm(25)[:17]
    alone = _index(ids, 100)
    for index in ranks(2).run(_index, ids, batch_size):
        assert torch.equal(index.ids, ids)
        torch.testing.assert_close(index.vectors, alone.vectors)


def test_an_index_of_several_features_is_refused() -> None:
    with pytest.raises(ValueError, match=r"candidates have \['item', 'clicked'\]"):
        build_index(_towers(("item", "clicked")), torch.arange(3))


def _recall(rank: int, world_size: int) -> dict[int, float]:
    # every row is answered with its user's number and the four after it
    def found(batch: Batch) -> Tensor:
        return (batch.sparse_features["user"].values().unsqueeze(1) + torch.arange(5)) % 25

    return recall_at([1, 5], STORE.batches(32, rank, world_size), found, "item")


def test_recall_is_over_the_clicks_of_all_ranks(ranks: Callable[..., Ranks]) -> None:
    rows = STORE.rows(0, 300)
    away = (rows.item - rows.user) % 25
    expected = {1: (away < 1).mean(), 5: (away < 5).mean()}
    for found in (*ranks(1).run(_recall), *ranks(2).run(_recall)):
        assert found == pytest.approx(expected)
    assert 0 < expected[1] < expected[5] < 1


def test_recall_without_clicks_or_with_too_few_items_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no clicks"):
        recall_at([1], [], lambda batch: torch.zeros(0, 1), "item")
    few = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=r"recall at 3 of 50 samples: \[50, 2\] items"):
        recall_at([1, 3], STORE.batches(50), lambda batch: few.expand(50, -1), "item")
