"""The pipeline that looks rows up one update early and sends them during training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = ["TrainPipelineSemiSync"]


class TrainPipelineSemiSync(TrainPipeline[In, Out]):
    """Looks up the rows of batch n + 1 before the backward of batch n: one update stale.

    ::

        step                 0      1      2      3

        start_input_dist     2      3      4      5
        forward              0      1      2      3
        look_up              1      2      3      4      before the update by batch n
        wait_input_dist      2      3      4      5
        backward             0      1      2      3
        load, prepare        3      4      5      6
        optimizer_step       0      1      2      3

    Rows are in flight during the backward. The trained model differs from that of the plain loop:
    the embeddings of a batch lack the latest update, while dense layers are up to date. Rows are
    not stale for modules that cannot be started early, for modules with tables that ``optimizer``
    updates, and for the first batch after a checkpoint is loaded.

    Args:
        model: See `TrainPipeline`.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        execute_all_batches: See `Options`; so are ``apply_jit``, ``pipeline_postproc`` and
            ``custom_model_fwd``.
        start_batch: The batches up to this one are trained as in the plain loop.
        stash_gradients: From ``start_batch`` on, delay dense layers by one update, too: each step
            applies the gradients of the previous batch, and the step of ``start_batch`` applies
            none.
        strict: Raise ValueError if ``optimizer`` updates tables.
        dmp_collection_sync_interval_batches: ``sync_interval`` of `Options`.

    Source:
        TorchRec's ``TrainPipelineSemiSync``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        start_batch: int = 900,
        stash_gradients: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        strict: bool = False,
        dmp_collection_sync_interval_batches: int | None = 1,
    ) -> None:
        stashed: dict[nn.Parameter, torch.Tensor] = {}

        def look_up(stages: Stages, ctx: TrainPipelineContext) -> None:
            if (ctx.index or 0) > start_batch and stages.rewritten is not None:
                updated = [
                    path
                    for path, module in stages.rewritten.early.modules.items()
                    if not _is_fused(module)
                ]
                if strict and updated:
                    raise ValueError(f"strict=True: the optimizer, not backward, updates {updated}")
                stages.look_up(ctx, updated)

        def optimizer_step(stages: Stages, ctx: TrainPipelineContext) -> None:
            if stash_gradients and (ctx.index or 0) >= start_batch:
                _exchange_gradients(stages.model, stashed)
            stages.optimizer_step(ctx)

        schedule = (
            Stage(Stages.start_input_dist, 2),
            Stage(Stages.forward, 0),
            Stage(look_up, 1),
            Stage(Stages.wait_input_dist, 2),
            Stage(Stages.backward, 0),
            Stage(Stages.load, 3),
            Stage(Stages.prepare, 3),
            Stage(optimizer_step, 0),
            Stage(Stages.look_up, 1),  # not stale, for batches before start_batch
        )
        options = Options(
            execute_all_batches,
            apply_jit,
            TrainPipelineContext,
            pipeline_postproc,
            custom_model_fwd,
            dmp_collection_sync_interval_batches,
        )
        super().__init__(model, optimizer, device, schedule, options)
        self._start_batch = start_batch

    def is_semi_sync(self) -> bool:
        """Whether the next batch is looked up one update early."""
        return bool(self.contexts) and (self.contexts[0].index or 0) >= self._start_batch


def _is_fused(module: nn.Module) -> bool:
    """Whether backward updates all tables of a module; others must not be read early."""
    return all(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters())


def _exchange_gradients(model: nn.Module, held: dict[nn.Parameter, torch.Tensor]) -> None:
    """Exchange the gradients of this batch for those of the previous batch."""
    for parameter in model.parameters():
        gradient = parameter.grad
        previous = held.pop(parameter, None)
        if gradient is not None:
            held[parameter] = gradient.clone()  # a gradient may be a view of a DDP bucket
        parameter.grad = previous
