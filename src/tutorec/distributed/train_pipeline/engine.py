"""The loop of every pipeline: batches in flight, each some stages ahead of the one behind it.

A schedule is a list of stages, each with the number of batches that it runs ahead. One step does them in this order,
so that every rank issues its collectives in the same order. Two stages, of which ``load`` runs one batch ahead::

    step             0          1          2          3

    (fill)   load 0
    forward          0          1          2
    load             1          2          it has ended

Before a step every batch in flight catches up with the stages that stand further ahead than it does (*fill*; nothing
is left to do once the pipeline is full). When the iterator ends the batches in flight are trained one by one (*drain*),
``progress`` raises StopIteration, and the next iterator starts anew.
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

from tutorec.distributed import comm
from tutorec.distributed.agreement import check_agreement
from tutorec.distributed.train_pipeline.pipeline_context import In, Out, TrainPipelineContext
from tutorec.distributed.train_pipeline.rewrite import RewrittenModel
from tutorec.distributed.train_pipeline.stages import ENDED, READY, UNFIT, Stages
from tutorec.distributed.train_pipeline.timeline import Interval, Timeline

__all__ = ["Options", "Stage", "TrainPipeline"]

_logger = logging.getLogger(__name__)


class Stage(NamedTuple):
    """A stage of a schedule, and its batch, counted from the one that trains in the step."""

    run: Callable[[Stages, TrainPipelineContext], None]
    ahead: int


@dataclass(frozen=True)
class Options:
    """TorchRec's arguments that pipelines share.

    Args:
        execute_all_batches: Train the batches in flight when the iterator has ended. Without, all ranks stop as soon
            as the iterator of one has ended: of the pipelines that load two batches ahead, two are left untrained.
        apply_jit: Compile the parts without sharded modules by TorchScript.
        context_type: Made for each batch, ``context_type(index=n)``.
        pipeline_postproc: Run modules without parameters that stand before a sharded one ahead, too.
        custom_model_fwd: Called with a batch in place of the model; gives ``(losses, output)``.
    """

    execute_all_batches: bool = True
    apply_jit: bool = False
    context_type: type[TrainPipelineContext] = TrainPipelineContext
    pipeline_postproc: bool = False
    custom_model_fwd: Callable[[Any], Any] | None = None


class TrainPipeline(Generic[In, Out]):
    """Trains a model, one batch at each call of ``progress``, with later batches under way.

    Losses, weights and optimizer state are those of the plain loop, bit for bit. Between two calls the model stands
    after the batch whose output was returned: a checkpoint of it continues exactly with `batches`, then the iterator.

    A batch that cannot be loaded or prepared (an iterator that raises, an id that no table has) is reported when it
    is its turn, on every rank, and the batches before it have been trained. Whatever else fails is raised at once. Both
    carry a note: the stage, the number of the batch, the rank. Where ranks have different numbers of batches nothing
    is started early from the first batch on that one rank lacks, in later epochs either: they train as in a plain loop.

    Args:
        model: Answers a batch with ``(losses, output)``. Its forward, as far as it leads to sharded modules, must be
            traceable by torch.fx; ``explain()`` says what is started early and what is not.
        optimizer: Steps what backward does not update.
        device: Where batches go.
        schedule: The stages of a step, in order. Stages of one batch run in the order of how far ahead they are.
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
        self._stages = Stages(model, optimizer, torch.device(device), options.custom_model_fwd)
        self._schedule, self._options = tuple(schedule), options
        depth = max(stage.ahead for stage in self._schedule)
        per_batch = sorted(self._schedule, key=lambda stage: -stage.ahead)
        exchange = (Stages.start_input_dist, Stages.wait_input_dist)  # tells whether the batch is to be trained
        self._fill = [
            (place, stage)
            for place in range(depth)
            for stage in per_batch
            if stage.ahead > place or (stage.ahead == place == 0 and stage.run in exchange)
        ]
        self._starts_early = any(stage.run is Stages.start_input_dist for stage in self._schedule)
        self._timeline = Timeline(dist.get_rank() if comm.default_group() is not None else 0)
        self._attached, self._traced_in_training = False, model.training
        self._source: Iterator[In] | None = None
        self._is_uneven = False
        self.reset()

    # --- training

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train the next batch, and do the stages of later ones that are due.

        Returns:
            The model's output for the batch.

        Raises:
            StopIteration: All batches have been trained. Another iterator may be passed then.
        """
        if dataloader_iter is not self._source:
            self._take(dataloader_iter)
        if not self._attached or self._traced_in_training is not self._stages.model.training:
            self.attach()
        for place, stage in self._fill:
            if place >= len(self._flight) or stage not in self._flight[place].done:
                self._do(stage, place)
        if not self._options.execute_all_batches:
            for stage in self._schedule:  # whether the iterator ends is known before this batch is trained
                if stage.run in (Stages.load, Stages.prepare):
                    self._do(stage, stage.ahead)
        ctx = self._next_to_train()
        for stage in self._schedule:
            self._do(stage, stage.ahead)
        self._flight.popleft()
        return ctx.output

    def _take(self, iterator: Iterator[In]) -> None:
        """Load from another iterator from now on; batches of the last one are still in flight."""
        self._source = self._stages.iterator = iterator
        last = self._flight[-1] if self._flight else None
        if last is not None and self._stages.state_of(last) == ENDED:
            self._next_index = self._flight.pop().index or 0

    def reset(self) -> None:
        """Forget the batches in flight; the next call of ``progress`` starts anew."""
        self._flight: deque[TrainPipelineContext] = deque()
        self._next_index = 0
        self._in_step, self._asked = not self._is_uneven, False
        self._source = self._stages.iterator = None

    @property
    def batches(self) -> list[In]:
        """Batches that were read and not trained: ``chain(pipeline.batches, iterator)`` is left."""
        return [ctx.batch for ctx in self._flight if ctx.batch is not None]

    @property
    def contexts(self) -> Sequence[TrainPipelineContext]:
        """What is remembered of each batch in flight, the next one to be trained first."""
        return self._flight

    # --- the model

    # Programs written for TorchRec read these three, the DLRM reference among them.
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
        """Let the model's sharded modules take what is started early; ``progress`` does it by itself.

        Args:
            model: Another model than before.
            sparse_dist: False: its sharded modules stay as they are, and nothing is started early.
        """
        self.detach()
        stages, options = self._stages, self._options
        stages.model, stages.rewritten = stages.model if model is None else model, None
        if self._starts_early and sparse_dist:
            stages.rewritten = RewrittenModel(
                stages.model,
                stages.call,
                lambda: stages.in_forward,
                options.pipeline_postproc,
                options.apply_jit,
            )
        self._attached, self._traced_in_training, self._asked = True, stages.model.training, False

    def detach(self) -> nn.Module:
        """The model as it was before; batches in flight are kept for when it is attached again."""
        if self._stages.rewritten is not None:
            self._stages.rewritten.restore()
        self._attached = False
        return self._stages.model

    def explain(self) -> str:
        """Which sharded modules are started early, and why the others are not; one line each."""
        if not self._starts_early:
            return f"{type(self).__name__} starts no module early"
        if not self._attached:
            self.attach()
        return self._stages.rewritten.explain() if self._stages.rewritten is not None else "nothing is started early"

    @property
    def _pipelined_modules(self) -> list[nn.Module]:
        """The sharded modules that are started early; TorchRec's tests ask for them by this name."""
        return list(self._stages.rewritten.early.modules.values()) if self._stages.rewritten is not None else []

    @property
    def _pipelined_postprocs(self) -> list[nn.Module]:
        """The modules that run ahead, in front of a sharded one; the name is TorchRec's."""
        return list(self._stages.rewritten.early.preprocessing.values()) if self._stages.rewritten is not None else []

    def timeline(self) -> list[Interval]:
        """When each stage of each batch ran on this rank, by end time; the last 10,000."""
        return list(self._timeline.intervals)

    def export_chrome_trace(self, path: str) -> None:
        """Write the timeline for chrome://tracing or Perfetto."""
        self._timeline.export_chrome_trace(path)

    # --- one stage of one batch

    def _do(self, stage: Stage, place: int) -> None:
        """Run a stage for a batch in flight, unless the batch has passed it or does not exist."""
        stages = self._stages
        if place == len(self._flight) and stage.run is Stages.load and stages.iterator is not None:
            self._flight.append(self._options.context_type(index=self._next_index))
            self._next_index += 1
        if place >= len(self._flight) or stage in self._flight[place].done:
            return
        ctx = self._flight[place]
        ctx.done.add(stage)
        if stage.run is Stages.start_input_dist and not self._may_start(ctx):
            return
        name, number = stage.run.__name__, ctx.index or 0
        try:
            if ctx.error is None or stage.run in (Stages.start_input_dist, Stages.wait_input_dist):
                with self._timeline.mark(name, number):
                    _run(stage, stages, ctx)
        except Exception as error:
            error.add_note(f"{type(self).__name__}: stage {name!r} of batch {number} on rank {self._timeline.rank}")
            if stage.run not in (Stages.load, Stages.prepare):
                self.reset()
                raise
            ctx.error, stages.iterator = error, None
        if stage.run is Stages.wait_input_dist:
            self._compare(ctx)

    def _ask(self, ctx: TrainPipelineContext) -> list[int]:
        """What each rank says of a batch, asked in a collective of its own."""
        state, rewritten = self._stages.state_of(ctx), self._stages.rewritten
        env = rewritten.env if rewritten is not None else None
        if env is None or env.process_group is None or env.world_size == 1:
            return [state]
        return [of_rank for (of_rank,) in comm.all_gather_ints([state], env.process_group, "pipeline")]

    def _states(self, ctx: TrainPipelineContext) -> list[int]:
        """What each rank has said of a batch; this one's state where they have not told each other."""
        return ctx.states if ctx.states is not None else [self._stages.state_of(ctx)]

    def _may_start(self, ctx: TrainPipelineContext) -> bool:
        """Whether ranks issue the first round for a batch, in which those without one say so.

        They ask each other before the first one, where what they have to agree on is more.
        """
        rewritten = self._stages.rewritten
        if self._in_step and not (self._asked and rewritten is not None and rewritten.sends_status):
            self._asked = True
            ctx.states = states = self._ask(ctx)
            if max(states) == UNFIT and ctx.error is not None and rewritten is not None:
                rewritten.reject_all(ctx.error)
                ctx.error, ctx.states, self._stages.iterator = None, None, self._source
            self._compare(ctx)
            return min(self._states(ctx)) == READY
        return self._in_step

    def _compare(self, ctx: TrainPipelineContext) -> None:
        """Start nothing early any more: ranks differ in batches, or a failure is to be raised."""
        states = self._states(ctx)
        self._in_step = self._in_step and min(states) == max(states)
        if READY in states and ENDED in states and not self._is_uneven:
            self._is_uneven = True
            ended = [rank for rank, state in enumerate(states) if state == ENDED]
            _logger.warning(
                "ranks %s have no batch %d, and others have: nothing is started early from now on", ended, ctx.index
            )

    def _next_to_train(self) -> TrainPipelineContext:
        """The first batch in flight, unless all have been trained, or it failed on some rank."""
        stops = not self._options.execute_all_batches and (not self._flight or ENDED in self._ask(self._flight[-1]))
        ctx = self._flight[0] if self._flight else None
        if ctx is not None and not stops and min(self._states(ctx)) < ENDED:
            rewritten, ranks_know = self._stages.rewritten, ctx.states is not None
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
    """Run a stage. A StopIteration out of a model would look as if the batches had ended."""
    try:
        stage.run(stages, ctx)
    except StopIteration as error:
        raise RuntimeError(f"the stage {stage.run.__name__!r} raised StopIteration") from error
