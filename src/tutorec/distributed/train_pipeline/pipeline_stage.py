"""Stages of `StagedTrainPipeline`, for a training loop that calls the model itself.

With `SparseDataDistUtil` a batch passes its stages while earlier batches are trained. The loop
calls the model with the batch that `StagedTrainPipeline` returns, and a hook on the model continues
with the batches behind it::

    progress        sends the sizes of batch n + 1, and returns batch n
    model(batch n)  uses the ids that have arrived
      the hook      waits for the sizes and sends the ids of batch n + 1: in flight during backward
    backward, optimizer step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tutorec.distributed.train_pipeline.pipeline_context import In, TrainPipelineContext
from tutorec.distributed.train_pipeline.rewrite import RewrittenModel
from tutorec.distributed.train_pipeline.stages import UNFIT, Stages
from tutorec.distributed.train_pipeline.streams import SideStream

__all__ = ["PipelineStage", "RunnableType", "SparseDataDistUtil", "StageOut", "on_stream"]

StageOut = TypeVar("StageOut")
RunnableType = Callable[..., Any]


@dataclass
class PipelineStage:
    """A function that runs on each batch before the model is called with it.

    Args:
        name: Its name, in traces and messages.
        runnable: Batch -> input of the next stage, or of the loop.
        stream: The CUDA stream of its kernels; None on the CPU.
        fill_callback: Called after the stage while the pipeline fills, when there is no forward.
        data_exhausted_callback: Called when the stage has no batch to run.

    Source:
        TorchRec's ``torchrec.distributed.train_pipeline.pipeline_stage.PipelineStage``.
    """

    name: str
    runnable: RunnableType
    stream: torch.Stream | None
    fill_callback: Callable[[], None] | None = None
    data_exhausted_callback: Callable[[], None] | None = None


class _GivenStream(SideStream):
    """A stream that the caller has made, or None on the CPU."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream


class _Sending(Stages):
    """The stages that send ids, on the caller's stream; the caller loads and trains."""

    def __init__(self, model: nn.Module, stream: Any) -> None:
        device = torch.device("cpu") if stream is None else stream.device
        super().__init__(model, cast(Any, None), device)
        self._copies = self._sends = self.stream = _GivenStream(stream)


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Run the block's kernels on a CUDA stream; None has no effect."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class SparseDataDistUtil(Generic[In]):
    """Stages that send ids, prefetch cached rows or look rows up ahead of a batch's forward.

    Batches pass each stage in order, and the model is called with them in that order; a call with a
    batch that has passed no stage is an ordinary one. Ranks must have the same number of batches.

    Args:
        model: A model with sharded modules; the loop calls it once per batch.
        data_dist_stream: The stream on which ids are sent; None on the CPU, as are the other
            streams there.
        apply_jit: Compile the parts without sharded modules by TorchScript.
        prefetch_stream: That of the stage `prefetch`.
        pipeline_postproc: Whether preprocessing modules without parameters run ahead, too.
        embedding_lookup_stream: That of the stage `start_embedding_lookup`, with which rows miss
            one update, as with `TrainPipelineSemiSync`.

    Raises:
        ValueError: Both a prefetch stream and a lookup stream are given.

    Example:
        >>> from tutorec.distributed.train_pipeline.staged import StagedTrainPipeline
        >>> model = nn.Linear(1, 1)
        >>> pipeline = StagedTrainPipeline(
        ...     [SparseDataDistUtil(model, None).start_sparse_data_dist_stage()]
        ... )
        >>> batches, sizes = iter([torch.ones(2, 1), torch.ones(1, 1)]), []
        >>> while (batch := pipeline.progress(batches)) is not None:
        ...     sizes.append(len(model(batch)))
        >>> sizes
        [2, 1]

    Source:
        TorchRec's ``torchrec.distributed.train_pipeline.pipeline_stage.SparseDataDistUtil``.
    """

    def __init__(
        self,
        model: nn.Module,
        data_dist_stream: torch.Stream | None,
        apply_jit: bool = False,
        prefetch_stream: torch.Stream | None = None,
        pipeline_postproc: bool = False,
        embedding_lookup_stream: torch.Stream | None = None,
    ) -> None:
        if prefetch_stream is not None and embedding_lookup_stream is not None:
            raise ValueError(
                "prefetch_stream and embedding_lookup_stream are both given: give one of them, "
                "since a lookup that runs ahead needs no prefetch"
            )

        self.model = model
        self.apply_jit = apply_jit
        self.data_dist_stream = data_dist_stream
        self.prefetch_stream = prefetch_stream
        self.embedding_lookup_stream = embedding_lookup_stream
        self._preprocess = pipeline_postproc
        self._stages = _Sending(model, data_dist_stream)
        self._lookups = _GivenStream(embedding_lookup_stream)

        self._flight: deque[TrainPipelineContext] = deque()
        self._next_index = 0
        self._hooks: list[RemovableHandle] = []

    @property
    def initialized(self) -> bool:
        """Whether the model's sharded modules use results that were started early."""
        return self._stages.rewritten is not None

    def explain(self) -> str:
        """Which sharded modules are started early, and why others are not; one line each."""
        rewritten = self._stages.rewritten
        return "no batch has been started yet" if rewritten is None else rewritten.explain()

    # --- stages

    def start_sparse_data_dist(self, batch: In) -> In:
        """Send the sizes of a batch."""
        if not self.initialized:
            self._attach()

        ctx = TrainPipelineContext(index=self._next_index, batch=batch)
        self._next_index += 1
        self._stages.in_forward = None
        self._prepare(ctx)
        self._stages.start_input_dist(ctx)
        self._flight.append(ctx)
        return batch

    def _prepare(self, ctx: TrainPipelineContext) -> None:
        """Prepare a batch; the first one shows which modules can be started early."""
        stages = self._stages
        is_first = stages.rewritten is not None and not stages.rewritten.is_proven
        try:
            stages.prepare(ctx)
        except Exception as error:
            ctx.error = error

        if is_first and max(stages.states_of_ranks(ctx)) == UNFIT:
            stages.settle(ctx)

        if ctx.error is not None:
            raise ctx.error

    def wait_sparse_data_dist(self) -> None:
        """Wait for the sizes and send the ids."""
        for ctx in self._flight:
            if ctx.input_dist_splits_requests:
                self._stages.wait_input_dist(ctx)

    def prefetch(self, batch: In) -> In:
        """Start reading the rows of a batch whose ids have been sent into the caches."""
        self._next("prefetch", self._stages.prefetch)
        return batch

    def load_prefetch(self) -> None:
        """Do nothing; TorchRec's. Prefetched rows are stored with their batch."""

    def start_embedding_lookup(self, batch: In) -> In:
        """Look the rows of a batch up, and send them back."""
        self._next("start_embedding_lookup", self._stages.look_up)
        return batch

    def wait_sdd_fill_callback(self) -> None:
        """Send the ids of a batch that passes the stage while the pipeline fills."""
        self.wait_sparse_data_dist()

    def data_exhausted_callback(self) -> None:
        """Do nothing; TorchRec's."""

    def start_sparse_data_dist_stage(
        self, name: str = "start_sparse_data_dist", runnable: RunnableType | None = None
    ) -> PipelineStage:
        """The stage that sends ids."""
        return PipelineStage(
            name,
            runnable or self.start_sparse_data_dist,
            self.data_dist_stream,
            self.wait_sdd_fill_callback,
            self.data_exhausted_callback,
        )

    def start_embedding_lookup_stage(
        self, name: str = "start_embedding_lookup", runnable: RunnableType | None = None
    ) -> PipelineStage:
        """The stage that looks rows up."""
        return PipelineStage(
            name, runnable or self.start_embedding_lookup, self.embedding_lookup_stream
        )

    def _next(self, stage: str, run: Callable[[TrainPipelineContext], None]) -> None:
        """Run a stage for the first batch in flight that has not passed it."""
        for ctx in self._flight:
            if stage not in ctx.done:
                ctx.done.add(stage)
                run(ctx)
                return

    # --- the model

    def detach(self) -> nn.Module:
        """Restore the model. Batches in flight are kept until the next one is started."""
        self.wait_sparse_data_dist()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

        if self._stages.rewritten is not None:
            self._stages.rewritten.restore()
        self._stages.rewritten = None
        return self.model

    def _attach(self) -> None:
        stages = self._stages
        stages.rewritten = RewrittenModel(
            self.model, stages.call, lambda: stages.in_forward, self._preprocess, self.apply_jit
        )
        self._hooks += [
            self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.model.register_forward_hook(self._after_forward),
        ]

    def _before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ctx = self._stages.in_forward = self._called_with([*args, *kwargs.values()])
        if ctx is not None:
            self._stages.stream.hand_over(
                ctx.batch,
                list(ctx.input_dist_tensors_requests.values()),
                list(ctx.module_contexts.values()),
            )
            self._lookups.hand_over(list(ctx.embedding_a2a_requests.values()))

    def _called_with(self, values: list[Any]) -> TrainPipelineContext | None:
        """Return the batch in flight with which the model is called; drop those before it."""
        for position, ctx in enumerate(self._flight):
            if any(ctx.batch is value for value in values):
                for _ in range(position):
                    self._flight.popleft()
                return ctx

        # A loop may call the model with parts of its batch; compare classes to recognize it.
        is_call_with_parts = self._flight and all(
            type(value) is not type(self._flight[0].batch) for value in values
        )
        return self._flight[0] if is_call_with_parts else None

    def _after_forward(self, *_: Any) -> None:
        if self._stages.in_forward is not None:
            self._flight.popleft()
            self._stages.in_forward = None
            self.wait_sparse_data_dist()
