"""The pipeline for tables in a file: it reads the next batch's rows while one trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = ["PrefetchTrainPipelineSparseDist", "TrainPipelinePrefetch"]


class PrefetchTrainPipelineSparseDist(TrainPipeline[In, Out]):
    """Sends the ids of batch n + 2 and prefetches the rows of batch n + 1 while batch n trains.

    ::

        step                 0      1      2      3

        prefetch             1      2      3      4      on the caches' threads, until the step ends
        start_input_dist     2      3      4      5
        forward              0      1      2      3
        wait_input_dist      2      3      4      5
        backward             0      1      2      3
        load, prepare        3      4      5      6
        optimizer_step       0      1      2      3

    Without tables of the kernel ``fused_uvm_caching`` it does what `TrainPipelineSparseDist` does.

    Args:
        model: See `TrainPipeline`.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        execute_all_batches: See `Options`; so are ``apply_jit``, ``pipeline_postproc`` and
            ``custom_model_fwd``.

    Source:
        TorchRec's ``PrefetchTrainPipelineSparseDist``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        schedule = (
            Stage(Stages.prefetch, 1),
            Stage(Stages.start_input_dist, 2),
            Stage(Stages.forward, 0),
            Stage(Stages.wait_input_dist, 2),
            Stage(Stages.backward, 0),
            Stage(Stages.load, 3),
            Stage(Stages.prepare, 3),
            Stage(Stages.optimizer_step, 0),
        )
        options = Options(
            execute_all_batches,
            apply_jit,
            TrainPipelineContext,
            pipeline_postproc,
            custom_model_fwd,
        )
        super().__init__(model, optimizer, device, schedule, options)


TrainPipelinePrefetch = PrefetchTrainPipelineSparseDist  # the name in TorchRec's pull request 2581
