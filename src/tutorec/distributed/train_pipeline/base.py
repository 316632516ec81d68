"""The simplest pipeline: the plain loop, with the next batch copied ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = ["TrainPipelineBase"]


class TrainPipelineBase(TrainPipeline[In, Out]):
    """Copies batch n + 1 to the device while batch n trains; needs no sharded module.

    ::

        step                 0      1      2      3

        forward              0      1      2      3
        backward             0      1      2      3
        load                 1      2      3      4
        optimizer_step       0      1      2      3

    Args:
        model: Returns ``(losses, output)`` for a batch.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        custom_model_fwd: Called with a batch instead of the model.

    Source:
        TorchRec's ``TrainPipelineBase``, which has to be ``reset()`` before it takes another
        iterator.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        schedule = (
            Stage(Stages.forward, 0),
            Stage(Stages.backward, 0),
            Stage(Stages.load, 1),
            Stage(Stages.optimizer_step, 0),
        )
        super().__init__(
            model, optimizer, device, schedule, Options(custom_model_fwd=custom_model_fwd)
        )
