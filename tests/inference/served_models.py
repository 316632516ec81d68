"""Models to serve: whole ones, with tables in float32, quantized, and quantized on two devices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.shard import _shard_modules
from tutorec.models.dlrm import DLRM
from tutorec.models.two_tower import TwoTower
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.whole_model import quantize
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

KEYS = ["item", "clicked", "user", "shop"]
KINDS = ["float", "quantized", "sharded"]
ROWS = 30


def tables(pooling: PoolingType = PoolingType.MEAN) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(ROWS, 8, "item_table", feature_names=["item", "clicked"]),
        EmbeddingBagConfig(ROWS, 8, "user_table", feature_names=["user"], pooling=pooling),
        EmbeddingBagConfig(ROWS, 8, "shop_table", feature_names=["shop"]),
    ]


def of_kind(model: nn.Module, kind: str) -> nn.Module:
    """The model with its tables as they are, quantized, or quantized and sharded."""
    model = model.eval().requires_grad_(False)
    if kind == "float":
        return model
    quantized = quantize(model, torch.int8, per_table={"user_table": torch.quint4x2})
    if kind == "quantized":
        return quantized
    return _shard_modules(
        module=quantized, device=torch.device("cpu"), env=ShardingEnv.from_local(2, 0)
    )


def dlrm(kind: str) -> nn.Module:
    return of_kind(DLRM(EmbeddingBagCollection(tables()), 3, [16, 8], [8, 1]), kind)


def two_tower(kind: str) -> nn.Module:
    return of_kind(
        TwoTower(EmbeddingBagCollection(tables()), ["user"], ["item", "clicked", "shop"], [8]), kind
    )


class Weighted(nn.Module):
    """A collection whose ids carry weights; answers with a KeyedTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(tables(PoolingType.SUM), is_weighted=True)

    def forward(self, features: KeyedJaggedTensor):
        return self.tables(features)


def batch(samples: int, weighted: bool = False, seed: int = 0) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids; the first is never empty, so that there are two ids at least."""
    generator = torch.Generator().manual_seed(seed + samples)
    lengths = torch.randint(0, 4, (len(KEYS) * samples,), generator=generator)
    lengths[:1] = 3
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths)


def inputs(samples: int) -> tuple[Tensor, KeyedJaggedTensor]:
    """What a DLRM takes."""
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(samples)), batch(samples)
