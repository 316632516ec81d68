"""TorchRec's import path ``torchrec.distributed.train_pipeline.utils``."""

from tutorec.distributed.train_pipeline.data_loading import DataLoadingThread
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.runtime_forwards import PipelinedForward, PipelinedPostproc
from tutorec.distributed.train_pipeline.streams import to_device as get_h2d_func
from tutorec.distributed.train_pipeline.tracing import Tracer

__all__ = [
    "DataLoadingThread",
    "In",
    "Out",
    "PipelinedForward",
    "PipelinedPostproc",
    "Tracer",
    "TrainPipelineContext",
    "get_h2d_func",
]
