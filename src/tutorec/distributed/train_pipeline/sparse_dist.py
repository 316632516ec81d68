"""`TrainPipelineSparseDist`: the ids of the next batch are sent while one trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = ["TrainPipelineSparseDist"]


class TrainPipelineSparseDist(TrainPipeline[In, Out]):
    """Sends the ids of batch n + 1 while batch n is trained.

    ::

        step                 0      1      2      3

        start_input_dist     1      2      3      4      sizes: in flight during the forward
        forward              0      1      2      3
        wait_input_dist      1      2      3      4      ids: in flight during the backward
        backward             0      1      2      3
        load, prepare        2      3      4      5
        optimizer_step       0      1      2      3

    At most two batches are in memory.

    Args:
        model: See `TrainPipeline`.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        execute_all_batches: See `Options`; so are ``apply_jit``, ``context_type``,
            ``pipeline_postproc`` and ``custom_model_fwd``.
        dmp_collection_sync_interval_batches: ``sync_interval`` of `Options`.
        enqueue_batch_after_forward: TorchRec's; here batches are always loaded after the forward.

    Source:
        TorchRec's ``TrainPipelineSparseDist``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
    ) -> None:
        schedule = (
            Stage(Stages.start_input_dist, 1),
            Stage(Stages.forward, 0),
            Stage(Stages.wait_input_dist, 1),
            Stage(Stages.backward, 0),
            Stage(Stages.load, 2),
            Stage(Stages.prepare, 2),
            Stage(Stages.optimizer_step, 0),
        )
        options = Options(
            execute_all_batches,
            apply_jit,
            context_type,
            pipeline_postproc,
            custom_model_fwd,
            dmp_collection_sync_interval_batches,
        )
        super().__init__(model, optimizer, device, schedule, options)
