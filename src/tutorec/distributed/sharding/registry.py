"""Registry: sharding type -> class that builds it. A new sharding type is entered here, once."""

from __future__ import annotations

from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.sharding.base import PooledEmbeddingSharding
from tutorec.distributed.sharding.dp_sharding import (
    DpPooledEmbeddingSharding,
    DpSequenceEmbeddingSharding,
)
from tutorec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from tutorec.distributed.sharding.sequence_sharding import (
    SequenceEmbeddingSharding,
    SlotSequenceEmbeddingSharding,
)
from tutorec.distributed.sharding.tw_sharding import (
    CwPooledEmbeddingSharding,
    TwCwPooledEmbeddingSharding,
    TwPooledEmbeddingSharding,
)
from tutorec.distributed.sharding.twrw_sharding import (
    GridPooledEmbeddingSharding,
    TwRwPooledEmbeddingSharding,
)

POOLED_SHARDINGS: dict[ShardingType, type[PooledEmbeddingSharding]] = {
    ShardingType.TABLE_WISE: TwPooledEmbeddingSharding,
    ShardingType.COLUMN_WISE: CwPooledEmbeddingSharding,
    ShardingType.TABLE_COLUMN_WISE: TwCwPooledEmbeddingSharding,
    ShardingType.ROW_WISE: RwPooledEmbeddingSharding,
    ShardingType.TABLE_ROW_WISE: TwRwPooledEmbeddingSharding,
    ShardingType.GRID_SHARD: GridPooledEmbeddingSharding,
    ShardingType.DATA_PARALLEL: DpPooledEmbeddingSharding,
}

SEQUENCE_SHARDINGS: dict[ShardingType, type[SequenceEmbeddingSharding]] = {
    **dict.fromkeys(POOLED_SHARDINGS, SlotSequenceEmbeddingSharding),
    ShardingType.DATA_PARALLEL: DpSequenceEmbeddingSharding,
}
