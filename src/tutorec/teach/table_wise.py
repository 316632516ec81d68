"""A model whose tables are spread over the ranks one by one, for chapters about something else."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd.rank import device


def table_wise_model(model: nn.Module, learning_rate: float) -> DistributedModelParallel:
    """The model on all ranks: table k of a collection is whole on rank k modulo W.

    Call it on every rank. Backward updates the tables by SGD.

    Args:
        model: Collections are its direct children.
        learning_rate: Of the tables.
    """
    ranks = dist.get_world_size()
    plans = {}
    for path, module in model.named_children():
        if isinstance(module, EmbeddingBagCollection):
            names = [config.name for config in module.embedding_bag_configs()]
            ways = {name: table_wise(rank=k % ranks) for k, name in enumerate(names)}
            plans[path] = construct_module_sharding_plan(module, ways)

    fused = {"optimizer": "exact_sgd", "learning_rate": learning_rate}
    sharders: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder(fused)]
    return DistributedModelParallel(
        model, device=device(), plan=ShardingPlan(plans), sharders=sharders
    )
