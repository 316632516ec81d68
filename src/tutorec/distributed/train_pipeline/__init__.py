"""Train pipelines: later batches are prepared while one trains. Names are imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutorec._lazy import lazy_package

if TYPE_CHECKING:
    from tutorec.distributed.train_pipeline.base import TrainPipelineBase
    from tutorec.distributed.train_pipeline.data_loading import DataLoadingThread
    from tutorec.distributed.train_pipeline.engine import TrainPipeline
    from tutorec.distributed.train_pipeline.evaluation import EvalPipelineSparseDist
    from tutorec.distributed.train_pipeline.fused_sparse_dist import TrainPipelineFusedSparseDist
    from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
    from tutorec.distributed.train_pipeline.pipeline_stage import SparseDataDistUtil, StageOut
    from tutorec.distributed.train_pipeline.prefetch import (
        PrefetchTrainPipelineSparseDist,
        TrainPipelinePrefetch,
    )
    from tutorec.distributed.train_pipeline.semi_sync import TrainPipelineSemiSync
    from tutorec.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
    from tutorec.distributed.train_pipeline.sparse_dist_lite import TrainPipelineSparseDistLite
    from tutorec.distributed.train_pipeline.staged import StagedTrainPipeline
    from tutorec.distributed.train_pipeline.tracing import Tracer

_DEFINED_IN = {
    "DataLoadingThread": ".data_loading",
    "EvalPipelineSparseDist": ".evaluation",
    "In": ".pipeline_context",
    "Out": ".pipeline_context",
    "PrefetchTrainPipelineSparseDist": ".prefetch",
    "SparseDataDistUtil": ".pipeline_stage",
    "StageOut": ".pipeline_stage",
    "StagedTrainPipeline": ".staged",
    "Tracer": ".tracing",
    "TrainPipeline": ".engine",
    "TrainPipelineBase": ".base",
    "TrainPipelineContext": ".pipeline_context",
    "TrainPipelineFusedSparseDist": ".fused_sparse_dist",
    "TrainPipelinePrefetch": ".prefetch",
    "TrainPipelineSemiSync": ".semi_sync",
    "TrainPipelineSparseDist": ".sparse_dist",
    "TrainPipelineSparseDistLite": ".sparse_dist_lite",
}

__all__ = [
    "DataLoadingThread",
    "EvalPipelineSparseDist",
    "In",
    "Out",
    "PrefetchTrainPipelineSparseDist",
    "SparseDataDistUtil",
    "StageOut",
    "StagedTrainPipeline",
    "Tracer",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineContext",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePrefetch",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
]

__getattr__, __dir__ = lazy_package(__name__, _DEFINED_IN)
