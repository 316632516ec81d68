"""A model whose tables are on the ranks one by one."""

from __future__ import annotations

from torch import nn

from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd import held_bytes
from tutorec.teach.table_wise import table_wise_model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, feature_names=[name], num_embeddings=rows, embedding_dim=8
            )
            for name, rows in (("a", 10), ("b", 20), ("c", 30))
        ]
        self.tables = EmbeddingBagCollection(configs)
        self.scores = nn.Linear(8, 1, bias=False)


def held(rank, world_size):
    model = table_wise_model(Model(), 0.1)
    return held_bytes(model), [*dict(model.named_parameters())]


def test_table_k_is_on_rank_k_modulo_the_ranks(ranks):
    (on_0, names), (on_1, _) = ranks(2).run(held)
    assert (on_0, on_1) == (4 * 8 * (10 + 30 + 1), 4 * 8 * (20 + 1))
    assert "tables.embedding_bags.a.weight" in names and "scores.weight" in names
