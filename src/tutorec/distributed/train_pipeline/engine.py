"""The engine of all pipelines: several batches in flight, each some stages ahead of the next.

A schedule is a list of stages, each with the number of batches that it runs ahead. A step runs them
in this order, so all ranks issue their collectives in the same order. An example of two stages, of
which ``load`` runs one batch ahead::

    step             0          1          2          3

    (fill)   load 0
    forward          0          1          2
    load             1          2          end of the iterator

Before a step, every batch in flight first runs the stages that it has missed (*fill*); this does
nothing once the pipeline is full. When the iterator ends, the batches in flight are trained one by
one (*drain*), ``progress`` raises StopIteration, and another iterator can be passed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tutorec._check import require_int
from tutorec.distributed import comm
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.rewrite import RewrittenModel
from tutorec.distributed.train_pipeline.stages import ENDED, READY, UNFIT, Stages, sync_replicas
from tutorec.distributed.train_pipeline.timeline import Interval, Timeline

__all__ = ["Options", "Stage", "TrainPipeline"]

_logger = logging.getLogger("tutorec.distributed")


class Stage(NamedTuple):
    """A stage of a schedule, and its batch, relative to the one that trains in the step."""

    run: Callable[[Stages, TrainPipelineContext], None]
    ahead: int


@dataclass(frozen=True)
class Options:
    """TorchRec's arguments that pipelines share.

    Args:
        execute_all_batches: Whether to train the batches in flight after the iterator has ended. If
            false, all ranks stop as soon as one rank's iterator has ended; a pipeline that loads
            two batches ahead then leaves two untrained.
        apply_jit: Whether to compile the parts without sharded modules with TorchScript.
        context_type: Class of the contexts, called as ``context_type(index=n)`` per batch.
        pipeline_postproc: Whether modules without parameters whose output a sharded module reads
            run ahead, too.
        custom_model_fwd: Called with a batch instead of the model; returns ``(losses, output)``.
        sync_interval: TorchRec's ``dmp_collection_sync_interval_batches``: a `DMPCollection` is
            averaged after the backward of batches 0, n, 2n, ...; None leaves that to the caller.

    Raises:
        ValueError: ``sync_interval`` is not a whole number of at least 1.
    """

    execute_all_batches: bool = True
    apply_jit: bool = False
    context_type: type[TrainPipelineContext] = TrainPipelineContext
    pipeline_postproc: bool = False
    custom_model_fwd: Callable[[Any], Any] | None = None
    sync_interval: int | None = None

    def __post_init__(self) -> None:
        if self.sync_interval is not None:
            require_int("dmp_collection_sync_interval_batches", self.sync_interval, least=1)


class TrainPipeline(Generic[In, Out]):
    """Trains a model, one batch per call of ``progress``, while later batches are prepared.

    Losses, weights and optimizer state equal those of the plain loop bit for bit. Between two
    calls, the model's state is that after the batch whose output was returned. A checkpoint saved
    there continues exactly with `batches`, followed by the iterator.

    A batch that cannot be loaded or prepared (the iterator raises, an id is outside its table)
    raises when its turn comes, on every rank, after the batches before it have been trained. Any
    other error is raised at once. The error has a note with the stage, the number of the batch and
    the rank. If ranks have different numbers of batches, nothing is started early from the first
    batch that a rank lacks, also in later epochs; they train as in a plain loop.

    Args:
        model: Returns ``(losses, output)`` for a batch. torch.fx must be able to trace its forward
            up to the sharded modules; ``explain()`` lists what is started early and what is not.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        schedule: The stages of a step, in order. Stages of one batch run in the order of how far
            ahead they are.
        options: TorchRec's further arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        schedule: Sequence[Stage],
        options: Options,
    ) -> None:
        self._stages = Stages(
            model,
            optimizer,
            torch.device(device),
            options.custom_model_fwd,
            options.sync_interval,
        )
        self._schedule = tuple(schedule)
        self._options = options

        depth = max(stage.ahead for stage in self._schedule)
        per_batch = sorted(self._schedule, key=lambda stage: -stage.ahead)
        # The exchange shows whether the batch will be trained.
        exchange = (Stages.start_input_dist, Stages.wait_input_dist)

        self._fill = [
            (position, stage)
            for position in range(depth)
            for stage in per_batch
            if stage.ahead > position or (stage.ahead == position == 0 and stage.run in exchange)
        ]
        self._starts_early = any(stage.run is Stages.start_input_dist for stage in self._schedule)
        self._timeline = Timeline(dist.get_rank() if comm.default_group() is not None else 0)
        self._attached = False
        self._traced_in_training = model.training
        self._source: Iterator[In] | None = None
        self._is_uneven = False
        self.reset()

    # --- training

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train the next batch, and run the stages of later batches.

        Returns:
            The model's output for the batch.

        Raises:
            StopIteration: All batches have been trained. Another iterator may be passed then.
        """
        if dataloader_iter is not self._source:
            self._take(dataloader_iter)
        if not self._attached or self._traced_in_training is not self._stages.model.training:
            self.attach()
        # Fill: batches in flight run the stages that they have missed.
        for position, stage in self._fill:
            if position >= len(self._flight) or stage not in self._flight[position].passed_stages:
                self._do(stage, position)

        if not self._options.execute_all_batches:
            # Load first, so that the end of the iterator is known before this batch is trained.
            for stage in self._schedule:
                if stage.run in (Stages.load, Stages.prepare):
                    self._do(stage, stage.ahead)

        ctx = self._next_to_train()
        for stage in self._schedule:
            self._do(stage, stage.ahead)
        self._flight.popleft()
        return ctx.output

    def _take(self, iterator: Iterator[In]) -> None:
        """Load from another iterator; batches of the previous one may still be in flight."""
        self._source = iterator
        self._stages.load_from(iterator)
        last = self._flight[-1] if self._flight else None
        if last is not None and self._stages.state_of(last) == ENDED:
            self._next_index = self._flight.pop().index or 0

    def reset(self) -> None:
        """Drop the batches in flight; the next call of ``progress`` starts empty."""
        self._flight: deque[TrainPipelineContext] = deque()
        self._next_index = 0
        self._in_step = not self._is_uneven
        self._states_exchanged = False
        self._source = self._stages.iterator = None

    @property
    def batches(self) -> list[In]:
        """Batches read but not trained; ``chain(pipeline.batches, iterator)`` is what remains."""
        return [ctx.batch for ctx in self._flight if ctx.batch is not None]

    @property
    def contexts(self) -> Sequence[TrainPipelineContext]:
        """Contexts of the batches in flight, in training order."""
        return self._flight

    # --- the model

    # Programs written for TorchRec read these three, for example the DLRM reference.
    @property
    def _model(self) -> nn.Module:
        return self._stages.model

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._stages.optimizer

    @property
    def _device(self) -> torch.device:
        return self._stages.device

    def attach(self, model: nn.Module | None = None, sparse_dist: bool = True) -> None:
        """Make sharded modules use results that were started early; ``progress`` calls it.

        Args:
            model: A new model.
            sparse_dist: If false, sharded modules are not changed and nothing is started early.
        """
        self.detach()
        stages = self._stages
        options = self._options
        stages.model = stages.model if model is None else model
        stages.rewritten = None
        if self._starts_early and sparse_dist:
            stages.rewritten = RewrittenModel(
                stages.model,
                stages.call,
                lambda: stages.in_forward,
                options.pipeline_postproc,
                options.apply_jit,
            )

        self._attached = True
        self._traced_in_training = stages.model.training
        self._states_exchanged = False

    def detach(self) -> nn.Module:
        """Restore the model; batches in flight are kept until it is attached again."""
        if self._stages.rewritten is not None:
            self._stages.rewritten.restore()
        self._attached = False
        return self._stages.model

    def sync_embeddings(
        self,
        model: nn.Module,
        interval_batches: int | None,
        context: TrainPipelineContext | None = None,
    ) -> None:
        """Average a `DMPCollection` if the batch's number is a multiple of ``interval_batches``.

        Nothing happens for other models and for None. Without a context it is averaged at once.
        """
        index = context.index if context is not None else None
        sync_replicas(model, interval_batches, index or 0)

    def explain(self) -> str:
        """Which sharded modules are started early, and why others are not; one line each."""
        if not self._starts_early:
            return f"{type(self).__name__} starts no module early"
        if not self._attached:
            self.attach()
        return (
            self._stages.rewritten.explain()
            if self._stages.rewritten is not None
            else "nothing is started early"
        )

    def timeline(self) -> list[Interval]:
        """The start and end of each stage and batch on this rank, by end time; the last 10,000."""
        return list(self._timeline.intervals)

    # --- one stage of one batch

    def _do(self, stage: Stage, position: int) -> None:
        """Run a stage for a batch in flight, unless it has run or there is no such batch."""
        stages = self._stages
        if (
            position == len(self._flight)
            and stage.run is Stages.load
            and stages.iterator is not None
        ):
            self._flight.append(self._options.context_type(index=self._next_index))
            self._next_index += 1

        if position >= len(self._flight) or stage in self._flight[position].passed_stages:
            return

        ctx = self._flight[position]
        ctx.passed_stages.add(stage)
        if stage.run is Stages.start_input_dist and not self._may_start(ctx):
            return

        name = stage.run.__name__
        number = ctx.index or 0
        try:
            # The exchange of a batch that has failed still runs, since other ranks wait for it.
            if ctx.error is None or stage.run in (Stages.start_input_dist, Stages.wait_input_dist):
                with self._timeline.mark(name, number):
                    _run(stage, stages, ctx)
        except Exception as error:
            error.add_note(
                f"{type(self).__name__}: stage {name!r} of batch {number} on rank "
                f"{self._timeline.rank}"
            )
            # An error of loading is raised when the batch trains, after those before it.
            if stage.run not in (Stages.load, Stages.prepare):
                self.reset()
                raise
            ctx.error = error
            stages.iterator = None

        if stage.run is Stages.wait_input_dist:
            self._compare(ctx)

    def _states(self, ctx: TrainPipelineContext) -> list[int]:
        """The states of a batch on all ranks; only this rank's if they have not been exchanged."""
        return ctx.states if ctx.states is not None else [self._stages.state_of(ctx)]

    def _may_start(self, ctx: TrainPipelineContext) -> bool:
        """Whether ranks issue the first round for a batch; ranks without a batch report it there.

        Before the first batch, ranks exchange states separately, since they must agree on more.
        """
        rewritten = self._stages.rewritten
        if self._in_step and not (
            self._states_exchanged and rewritten is not None and rewritten.sends_status
        ):
            self._states_exchanged = True
            ctx.states = states = self._stages.states_of_ranks(ctx)
            if max(states) == UNFIT:
                self._stages.settle(ctx)
                if ctx.error is None:
                    self._stages.iterator = self._source
                ctx.states = self._stages.states_of_ranks(ctx)

            self._compare(ctx)
            return min(self._states(ctx)) == READY
        return self._in_step

    def _compare(self, ctx: TrainPipelineContext) -> None:
        """Start nothing early from now on: ranks have different batches, or an error is pending."""
        states = self._states(ctx)
        self._in_step = self._in_step and min(states) == max(states)
        if READY in states and ENDED in states and not self._is_uneven:
            self._is_uneven = True
            ended = [rank for rank, state in enumerate(states) if state == ENDED]
            _logger.warning(
                "ranks %s have no batch %d, but others do: nothing is started early from now on",
                ended,
                ctx.index,
            )

    def _next_to_train(self) -> TrainPipelineContext:
        """The first batch in flight.

        Raises:
            StopIteration: All batches are trained.
            Exception: The batch could not be loaded or prepared on some rank.
        """
        stops = not self._options.execute_all_batches and (
            not self._flight or ENDED in self._stages.states_of_ranks(self._flight[-1])
        )
        ctx = self._flight[0] if self._flight else None
        if ctx is not None and not stops and min(self._states(ctx)) < ENDED:
            rewritten = self._stages.rewritten
            ranks_know = ctx.states is not None
            self.reset()
            if ranks_know and rewritten is not None and rewritten.env is not None:
                subject = f"batch {ctx.index} of {type(self).__name__}"
                check_agreement(subject, {}, rewritten.env, ctx.error)

            assert ctx.error is not None, "check_agreement raises where another rank has a problem"
            raise ctx.error
        if ctx is None or stops or ctx.batch is None:
            self.reset()
            raise StopIteration

        return ctx


def _run(stage: Stage, stages: Stages, ctx: TrainPipelineContext) -> None:
    """Run a stage. A StopIteration from a model must not look like the end of the batches."""
    try:
        stage.run(stages, ctx)
    except StopIteration as error:
        raise RuntimeError(f"the stage {stage.run.__name__!r} raised StopIteration") from error
