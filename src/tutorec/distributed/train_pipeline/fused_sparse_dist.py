"""`TrainPipelineFusedSparseDist`: rows are looked up early, and sent along with the next ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = ["TrainPipelineFusedSparseDist"]


class TrainPipelineFusedSparseDist(TrainPipeline[In, Out]):
    """`TrainPipelineSparseDist` that looks rows up early and sends them along with the next ids.

    ::

        step                 0      1      2      3

        look_up              0      1      2      3      rows: in flight until the forward uses them
        start_input_dist     1      2      3      4
        forward              0      1      2      3
        wait_input_dist      1      2      3      4
        backward             0      1      2      3
        load, prepare        2      3      4      5
        optimizer_step       0      1      2      3

    Tables are looked up after the whole update of the previous step, so results equal those of the
    plain loop, also for tables that ``optimizer`` updates.

    Args:
        model: See `TrainPipeline`.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        execute_all_batches: See `Options`; so are ``apply_jit``, ``pipeline_postproc`` and
            ``custom_model_fwd``.
        strict: TorchRec's; has no effect.
        emb_lookup_stream: TorchRec's; has no effect, since rows are looked up on the current
            stream.
        embedding_lookup_after_data_dist: Look up after ``start_input_dist``.
        enqueue_batch_after_forward: See `TrainPipelineSparseDist`.

    Source:
        TorchRec's ``TrainPipelineFusedSparseDist``.
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
        strict: bool = False,
        emb_lookup_stream: str = "data_dist",
        embedding_lookup_after_data_dist: bool = False,
        *,
        enqueue_batch_after_forward: bool = False,
    ) -> None:
        first = [Stage(Stages.look_up, 0), Stage(Stages.start_input_dist, 1)]
        schedule = (
            *(reversed(first) if embedding_lookup_after_data_dist else first),
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
            TrainPipelineContext,
            pipeline_postproc,
            custom_model_fwd,
        )
        super().__init__(model, optimizer, device, schedule, options)
