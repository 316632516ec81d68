"""Sharding type -> the class that builds it: the one place where a new type is entered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import ShardingType
from tutorec.distributed.sharding.base import PooledEmbeddingSharding
from tutorec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from tutorec.distributed.tables import PlacedTable

POOLED_SHARDINGS: dict[ShardingType, Callable[[Sequence[PlacedTable], ShardingEnv], PooledEmbeddingSharding]] = {
    ShardingType.TABLE_WISE: TwPooledEmbeddingSharding,
}
