"""Tables over several ranks. Names are imported when they are first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorec.awaitable import Awaitable, NoWait
    from tutorec.distributed.comm import get_local_rank, get_local_size
    from tutorec.distributed.env import ShardingEnv
    from tutorec.distributed.model_parallel import DistributedModelParallel
    from tutorec.distributed.plan import ParameterSharding
    from tutorec.distributed.sharded_module import ModuleSharder, ShardedModule
    from tutorec.distributed.traffic import count_traffic
    from tutorec.distributed.train_pipeline.base import TrainPipelineBase
    from tutorec.distributed.train_pipeline.engine import TrainPipeline
    from tutorec.distributed.train_pipeline.evaluation import EvalPipelineSparseDist
    from tutorec.distributed.train_pipeline.prefetch import PrefetchTrainPipelineSparseDist
    from tutorec.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist

_LAZY = {
    "Awaitable": "tutorec.awaitable",
    "DistributedModelParallel": "tutorec.distributed.model_parallel",
    "EvalPipelineSparseDist": "tutorec.distributed.train_pipeline.evaluation",
    "ModuleSharder": "tutorec.distributed.sharded_module",
    "NoWait": "tutorec.awaitable",
    "ParameterSharding": "tutorec.distributed.plan",
    "PrefetchTrainPipelineSparseDist": "tutorec.distributed.train_pipeline.prefetch",
    "ShardedModule": "tutorec.distributed.sharded_module",
    "ShardingEnv": "tutorec.distributed.env",
    "TrainPipeline": "tutorec.distributed.train_pipeline.engine",
    "TrainPipelineBase": "tutorec.distributed.train_pipeline.base",
    "TrainPipelineSparseDist": "tutorec.distributed.train_pipeline.sparse_dist",
    "count_traffic": "tutorec.distributed.traffic",
    "get_local_rank": "tutorec.distributed.comm",
    "get_local_size": "tutorec.distributed.comm",
}

# Loaded when they are asked for, so that ``import tutorec.distributed as dist; dist.comm_ops`` works as in TorchRec.
_SUBMODULES = (
    "checkpoint",
    "comm",
    "comm_ops",
    "dist_data",
    "embedding",
    "embedding_types",
    "embeddingbag",
    "fbgemm_qcomm_codec",
    "model_parallel",
    "planner",
    "quant_embedding",
    "quant_embeddingbag",
    "shard",
    "sharding_plan",
    "train_pipeline",
    "types",
)

__all__ = [
    "Awaitable",
    "DistributedModelParallel",
    "EvalPipelineSparseDist",
    "ModuleSharder",
    "NoWait",
    "ParameterSharding",
    "PrefetchTrainPipelineSparseDist",
    "ShardedModule",
    "ShardingEnv",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "count_traffic",
    "get_local_rank",
    "get_local_size",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
