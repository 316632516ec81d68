"""Sharded embedding tables. Names are imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutorec._lazy import lazy_package

if TYPE_CHECKING:
    from tutorec.awaitable import Awaitable, NoWait
    from tutorec.distributed.core.env import ShardingEnv, get_local_rank, get_local_size
    from tutorec.distributed.core.sharded_module import ShardedModule
    from tutorec.distributed.core.sharders import ModuleSharder
    from tutorec.distributed.model_parallel import DistributedModelParallel
    from tutorec.distributed.plan.plan import ParameterSharding
    from tutorec.distributed.state.sharded_tensor import ShardedTensor
    from tutorec.distributed.traffic import count_traffic
    from tutorec.distributed.train_pipeline.data_loading import DataLoadingThread
    from tutorec.distributed.train_pipeline.engine import TrainPipeline
    from tutorec.distributed.train_pipeline.train_pipelines import (
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipelineBase,
        TrainPipelineSparseDist,
    )
    from tutorec.distributed.utils import get_unsharded_module_names

_DEFINED_IN = {
    "Awaitable": "tutorec.awaitable",
    "DataLoadingThread": ".train_pipeline.data_loading",
    "DistributedModelParallel": ".model_parallel",
    "EvalPipelineSparseDist": ".train_pipeline.train_pipelines",
    "ModuleSharder": ".core.sharders",
    "NoWait": "tutorec.awaitable",
    "ParameterSharding": ".plan.plan",
    "PrefetchTrainPipelineSparseDist": ".train_pipeline.train_pipelines",
    "ShardedModule": ".core.sharded_module",
    "ShardedTensor": ".state.sharded_tensor",
    "ShardingEnv": ".core.env",
    "TrainPipeline": ".train_pipeline.engine",
    "TrainPipelineBase": ".train_pipeline.train_pipelines",
    "TrainPipelineSparseDist": ".train_pipeline.train_pipelines",
    "count_traffic": ".traffic",
    "get_local_rank": ".core.env",
    "get_local_size": ".core.env",
    "get_unsharded_module_names": ".utils",
}


__all__ = [
    "Awaitable",
    "DataLoadingThread",
    "DistributedModelParallel",
    "EvalPipelineSparseDist",
    "ModuleSharder",
    "NoWait",
    "ParameterSharding",
    "PrefetchTrainPipelineSparseDist",
    "ShardedModule",
    "ShardedTensor",
    "ShardingEnv",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "count_traffic",
    "get_local_rank",
    "get_local_size",
    "get_unsharded_module_names",
]

__getattr__, __dir__ = lazy_package(__name__, _DEFINED_IN)
