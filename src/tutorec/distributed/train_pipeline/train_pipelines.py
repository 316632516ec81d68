"""TorchRec's pipelines: each is a schedule of stages, which its docstring shows step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tutorec.distributed.train_pipeline.engine import Options, Stage, TrainPipeline
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.stages import Stages

__all__ = [
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePrefetch",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
]


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


def _is_fused(module: nn.Module) -> bool:
    """Whether backward updates all tables of a module; others must not be read early."""
    return all(hasattr(parameter, "_in_backward_optimizers") for parameter in module.parameters())


def _exchange_gradients(model: nn.Module, stashed: dict[nn.Parameter, torch.Tensor]) -> None:
    """Exchange the gradients of this batch for those of the previous batch."""
    for parameter in model.parameters():
        gradient = parameter.grad
        previous = stashed.pop(parameter, None)
        if gradient is not None:
            stashed[parameter] = gradient.clone()  # a gradient may be a view of a DDP bucket
        parameter.grad = previous


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
