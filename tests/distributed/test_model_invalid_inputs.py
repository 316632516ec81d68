"""A sharder that is a class: it would shard nothing, and say nothing."""

from __future__ import annotations

import pytest
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel


def test_a_class_in_the_place_of_a_sharder_is_refused() -> None:
    sharders = [EmbeddingBagCollectionSharder]
    with pytest.raises(TypeError, match="class EmbeddingBagCollectionSharder: pass objects"):
        DistributedModelParallel(nn.Linear(1, 1), ShardingEnv.from_local(1, 0), sharders=sharders)  # pyright: ignore
