"""`TrainPipelineSparseDistLite`: the next batch is copied and checked while one trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = ["TrainPipelineSparseDistLite"]


class TrainPipelineSparseDistLite(TrainPipeline[In, Out]):
    """Copies and checks batch n + 1 while batch n trains; its ids are sent in its own step.

    ::

        step                 0      1      2      3

        start_input_dist     0      1      2      3      without overlap
        wait_input_dist      0      1      2      3
        forward              0      1      2      3
        backward             0      1      2      3
        load, prepare        1      2      3      4
        optimizer_step       0      1      2      3

    It needs less memory than `TrainPipelineSparseDist`: no received ids are stored for the batch
    ahead.

    Args:
        model: See `TrainPipeline`.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        apply_jit: See `Options`; so are ``context_type``, ``pipeline_postproc`` and
            ``custom_model_fwd``.

    Source:
        TorchRec's ``TrainPipelineSparseDistLite``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        schedule = (
            Stage(Stages.start_input_dist, 0),
            Stage(Stages.wait_input_dist, 0),
            Stage(Stages.forward, 0),
            Stage(Stages.backward, 0),
            Stage(Stages.load, 1),
            Stage(Stages.prepare, 1),
            Stage(Stages.optimizer_step, 0),
        )
        options = Options(True, apply_jit, context_type, pipeline_postproc, custom_model_fwd)
        super().__init__(model, optimizer, device, schedule, options)
