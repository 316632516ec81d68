"""Tables, batches and the global-batch reference of sharded collections whose rows are not pooled.

The reference is that of `cases`: fused semantics, one update per step with the mean over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from distributed.cases import (
    FEATURES,
    ROWS,
    Piece,
    Reference,
    coefficients,
    group,
    on_rank,
    optimizer_words,
    pieces_held,
    seed_of,
    word,
)
from torch import Tensor

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

KEYS = ["f0", "f1@t0", "f1@t1", "f2", "f3"]
Rows = dict[str, JaggedTensor]


def tables() -> list[EmbeddingConfig]:
    """Three widths; a table of two features, a feature of two tables, and one width that is no
    multiple of 4.
    """
    return [
        EmbeddingConfig(num_embeddings=11, embedding_dim=8, name="t0", feature_names=["f0", "f1"]),
        EmbeddingConfig(num_embeddings=7, embedding_dim=4, name="t1", feature_names=["f1", "f2"]),
        EmbeddingConfig(num_embeddings=9, embedding_dim=6, name="t2", feature_names=["f3"]),
    ]


def collection(need_indices: bool = False) -> EmbeddingCollection:
    torch.manual_seed(7)
    return EmbeddingCollection(tables(), need_indices=need_indices)


def shard(
    ec: EmbeddingCollection,
    optimizer: str = "exact_sgd",
    kernel: str = "fused",
    kind: str = "table_wise",
    codecs: Any = None,
    dedup: bool = False,
    **fused_params: float,
) -> ShardedEmbeddingCollection:
    """The collection over the ranks of the pool, each table cut by one type of sharding, or by one
    after the other.
    """
    env = ShardingEnv.from_process_group(group())
    words = {
        config.name: word(kind, index, env.world_size, env.local_size, kernel)
        for index, config in enumerate(ec.embedding_configs())
    }
    params = {**optimizer_words(optimizer), **fused_params}
    plan = construct_module_sharding_plan(ec, words, local_size=env.local_size)
    return EmbeddingCollectionSharder(params, codecs, dedup).shard(ec, plan, env)


def lists(seed: int, samples: int) -> KeyedJaggedTensor:
    """Features with different numbers of lists, and which of them each sample means."""
    draw = torch.Generator().manual_seed(seed)
    strides = [int(torch.randint(1, 4, (), generator=draw)) if samples else 0 for _ in FEATURES]
    lengths = torch.randint(0, 4, (sum(strides),), generator=draw)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
    means = [torch.randint(0, max(stride, 1), (samples,), generator=draw) for stride in strides]
    made = KeyedJaggedTensor(
        list(FEATURES),
        values,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(list(FEATURES), torch.stack(means)),
    )
    return on_rank(made)


def loss(rows: Rows, seed: int) -> Tensor:
    """A sum whose gradient differs everywhere."""
    return torch.stack(
        [
            (one.values() * coefficients(one.values(), seed + i)).sum()
            for i, (_, one) in enumerate(sorted(rows.items()))
        ]
    ).sum()


def plain(rows: Rows) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
    """Values, lengths and weights of each result."""
    return {
        key: (one.values().detach(), one.lengths(), one.weights_or_none())
        for key, one in rows.items()
    }


@dataclass
class RowsReference(Reference):
    """The unsharded tables, trained on the batches of all ranks; ``ebc`` is the collection."""

    ebc: Any

    def weights(self) -> dict[str, Tensor]:
        return {name: table.get_parameter("weight") for name, table in self.ebc.embeddings.items()}

    def configs(self) -> list[Any]:
        return list(self.ebc.embedding_configs())

    def rows_step(self, batches: list[KeyedJaggedTensor], step: int) -> list[dict[str, Any]]:
        """One step on the global batch; returns each rank's results."""
        found = [self.ebc(each) for each in batches]
        total = torch.stack(
            [loss(rows, seed_of(rank, step)) for rank, rows in enumerate(found)]
        ).sum()
        weights = self.weights()
        gradients = torch.autograd.grad(
            total, list(weights.values()), allow_unused=True, materialize_grads=True
        )
        self.update(dict(zip(weights, gradients, strict=True)), self.rows_of(batches))
        return [plain(rows) for rows in found]


def held(sharded: ShardedEmbeddingCollection) -> dict[str, list[Piece]]:
    """Table -> this rank's pieces."""
    return pieces_held(sharded, "embeddings")
