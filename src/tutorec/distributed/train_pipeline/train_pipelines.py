"""TorchRec's import path ``torchrec.distributed.train_pipeline.train_pipelines``."""

from tutorec.distributed.train_pipeline.base import TrainPipelineBase
from tutorec.distributed.train_pipeline.data_loading import DataLoadingThread
from tutorec.distributed.train_pipeline.engine import TrainPipeline
from tutorec.distributed.train_pipeline.evaluation import EvalPipelineSparseDist
from tutorec.distributed.train_pipeline.fused_sparse_dist import TrainPipelineFusedSparseDist
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.pipeline_stage import PipelineStage, StageOut
from tutorec.distributed.train_pipeline.prefetch import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelinePrefetch,
)
from tutorec.distributed.train_pipeline.semi_sync import TrainPipelineSemiSync
from tutorec.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
from tutorec.distributed.train_pipeline.sparse_dist_lite import TrainPipelineSparseDistLite
from tutorec.distributed.train_pipeline.staged import StagedTrainPipeline

__all__ = [
    "DataLoadingThread",
    "EvalPipelineSparseDist",
    "In",
    "Out",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "StageOut",
    "StagedTrainPipeline",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineContext",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePrefetch",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
]
