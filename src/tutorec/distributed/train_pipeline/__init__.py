"""Train pipelines: later batches are prepared while one trains. Names are imported lazily."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutorec._lazy import lazy_package

if TYPE_CHECKING:
    from tutorec.distributed.train_pipeline.data_loading import DataLoadingThread
    from tutorec.distributed.train_pipeline.engine import TrainPipeline
    from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
    from tutorec.distributed.train_pipeline.tracing import Tracer
    from tutorec.distributed.train_pipeline.train_pipelines import (
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipelineBase,
        TrainPipelineFusedSparseDist,
        TrainPipelinePrefetch,
        TrainPipelineSemiSync,
        TrainPipelineSparseDist,
        TrainPipelineSparseDistLite,
    )

_DEFINED_IN = {
    "DataLoadingThread": ".data_loading",
    "EvalPipelineSparseDist": ".train_pipelines",
    "In": ".pipeline_context",
    "Out": ".pipeline_context",
    "PrefetchTrainPipelineSparseDist": ".train_pipelines",
    "Tracer": ".tracing",
    "TrainPipeline": ".engine",
    "TrainPipelineBase": ".train_pipelines",
    "TrainPipelineContext": ".pipeline_context",
    "TrainPipelineFusedSparseDist": ".train_pipelines",
    "TrainPipelinePrefetch": ".train_pipelines",
    "TrainPipelineSemiSync": ".train_pipelines",
    "TrainPipelineSparseDist": ".train_pipelines",
    "TrainPipelineSparseDistLite": ".train_pipelines",
}

__all__ = [
    "DataLoadingThread",
    "EvalPipelineSparseDist",
    "In",
    "Out",
    "PrefetchTrainPipelineSparseDist",
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
