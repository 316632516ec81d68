"""The sequence model: each history alone, its order, and tables over ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.models.sequence import SequenceTower
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks, device

HISTORIES = [[3, 1, 4], [], [1, 5, 9, 2, 6], [5]]


def _tower() -> SequenceTower:
    torch.manual_seed(3)
    table = EmbeddingConfig(10, 8, name="t_item", feature_names=["history", "item"])
    return SequenceTower(EmbeddingCollection([table]), longest=4, layers=2)


def _features(histories: list[list[int]]) -> KeyedJaggedTensor:
    lengths = [len(history) for history in histories] + [1] * len(histories)
    ids = [item for history in histories for item in history] + list(range(len(histories)))
    return KeyedJaggedTensor(["history", "item"], torch.tensor(ids), lengths=torch.tensor(lengths))


def _rows(tower: SequenceTower) -> torch.Tensor:
    """The table [10, 8]."""
    return dict(tower.named_parameters())["embedding_collection.embeddings.t_item.weight"]


def test_a_query_depends_on_its_own_history_and_its_order() -> None:
    tower = _tower()
    queries, candidates = tower(_features(HISTORIES))
    for sample, history in enumerate(HISTORIES):
        alone = tower.queries(_features([history]))
        torch.testing.assert_close(queries[sample], alone[0])
        # the newest four items count, and those before them do not
        torch.testing.assert_close(alone, tower.queries(_features([history[-4:]])))
    assert queries.isfinite().all()
    turned = tower.queries(_features([HISTORIES[0][::-1]]))
    assert (turned - queries[0]).abs().max() > 0.01
    torch.testing.assert_close(candidates, _rows(tower)[:4])


def test_gradients_reach_the_rows_of_the_newest_items_alone() -> None:
    tower = _tower()
    tower.queries(_features([HISTORIES[2]])).sum().backward()
    gradient = _rows(tower).grad
    assert gradient is not None
    touched = gradient.abs().sum(1) > 0
    assert touched.nonzero().squeeze(1).tolist() == [2, 5, 6, 9]


def _sharded(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = DistributedModelParallel(
        _tower(), device=device(), sharders=[EmbeddingCollectionSharder()]
    )
    return tuple(part.detach().cpu() for part in model(_features(HISTORIES).to(device())))


def test_sharded_equals_unsharded(ranks: Callable[..., Ranks]) -> None:
    expected = _tower()(_features(HISTORIES))
    for found in ranks(2).run(_sharded):
        torch.testing.assert_close(found, expected)


def test_a_table_that_lacks_a_feature_is_named() -> None:
    tables = EmbeddingCollection([EmbeddingConfig(10, 8, name="t_item", feature_names=["item"])])
    with pytest.raises(ValueError, match=r"'history'.*'item'.* one width"):
        SequenceTower(tables)
