"""The pipeline for evaluation, which runs forwards only."""

from __future__ import annotations

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = ["EvalPipelineSparseDist"]


class EvalPipelineSparseDist(TrainPipeline[In, Out]):
    """Sends the ids of batch n + 1 while batch n runs through the model; nothing is trained.

    ::

        step                 0      1      2      3

        start_input_dist     1      2      3      4
        evaluate             0      1      2      3
        wait_input_dist      1      2      3      4
        load, prepare        2      3      4      5

    The caller sets the evaluation mode and turns gradients off: ``model.eval()`` and
    ``torch.no_grad()``.

    Args:
        model: See `TrainPipeline`.
        optimizer: TorchRec's; has no effect.
        device: Device of the batches.
        apply_jit: See `Options`.
        pipeline_postproc: See `Options`.

    Source:
        TorchRec's ``EvalPipelineSparseDist``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
    ) -> None:
        schedule = (
            Stage(Stages.start_input_dist, 1),
            Stage(Stages.evaluate, 0),
            Stage(Stages.wait_input_dist, 1),
            Stage(Stages.load, 2),
            Stage(Stages.prepare, 2),
        )
        options = Options(True, apply_jit, TrainPipelineContext, pipeline_postproc)
        super().__init__(model, optimizer, device, schedule, options)
