"""What a pipeline does to a batch: one method for each stage, each for any batch in flight.

::

    load                next(iterator), and the copy to the device                     host, copy stream
    prepare             preprocessing, arguments of sharded modules, checks            this rank alone
    start_input_dist    how many ids go where                                          first round in flight
    wait_input_dist     the ids themselves                                             second round in flight
    prefetch            rows of cached tables come from their files                    threads of the caches
    look_up             rows are looked up and travel back                             in flight
    forward, evaluate   what is left of the model's forward                            takes what has arrived
    backward            gradients; fused tables are updated
    optimizer_step      the dense parts are updated

A pipeline is an order of these, and for each how many batches it runs ahead of the one that is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from tutorec.distributed.collectives.kjt import RanksWithoutBatch
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from tutorec.distributed.train_pipeline.rewrite import RewrittenModel
from tutorec.distributed.train_pipeline.runtime_forwards import look_up
from tutorec.distributed.train_pipeline.streams import SideStream, to_device

__all__ = ["ENDED", "FAILED", "READY", "UNFIT", "Stages"]

# What a rank says of a batch: the trace of the forward does not fit it, it failed, there is none, it is there.
UNFIT, FAILED, ENDED, READY = -3, -2, -1, 0


class Stages:
    """The stages of one model.

    Args:
        model: Answers a batch with ``(losses, output)``.
        optimizer: Steps what backward does not update.
        device: Where batches go.
        call: What is called with a batch; the model by default.

    Attributes:
        rewritten: The model's sharded modules that start early; None while it is detached.
        iterator: Where batches come from; None when it has ended.
        in_forward: The batch that the model is run with at this moment.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        call: Callable[[Any], Any] | None = None,
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self.custom_call = call
        self.rewritten: RewrittenModel | None = None
        self.iterator: Iterator[Any] | None = None
        self.in_forward: TrainPipelineContext | None = None
        self._copies, self._sends = SideStream(device), SideStream(device)

    def call(self, batch: Any) -> Any:
        """``(losses, output)`` of a batch."""
        return (self.custom_call or self.model)(batch)

    def load(self, ctx: TrainPipelineContext) -> None:
        """Start copying the next batch to the device; the context is empty after the last one."""
        try:
            batch = next(self.iterator) if self.iterator is not None else None
        except StopIteration:
            batch = None
        if batch is None:
            self.iterator = None
            return
        with self._copies.ahead():
            ctx.batch = to_device(batch, self.device)

    def prepare(self, ctx: TrainPipelineContext) -> None:
        """Everything about a batch that needs no other rank and no trained parameter."""
        if ctx.batch is not None and self.rewritten is not None:
            with self._sends.ahead():
                self._copies.hand_over(ctx.batch)
                self.rewritten.prepare(ctx)

    def start_input_dist(self, ctx: TrainPipelineContext) -> None:
        """Issue the first round of every sharded module; without a batch, tell the other ranks so."""
        if self.rewritten is not None:
            state = self.state_of(ctx)
            with self._sends.ahead():
                for path, module in self.rewritten.early.modules.items():
                    if state != READY and isinstance(module, ShardedEmbeddingModule):
                        ctx.input_dist_splits_requests[path] = module.send_status(state)
                    elif state == READY and path in ctx.module_contexts:
                        args, kwargs = ctx.arguments[path]
                        sizes = module.input_dist(ctx.module_contexts[path], *args, **kwargs)
                        ctx.input_dist_splits_requests[path] = sizes

    def wait_input_dist(self, ctx: TrainPipelineContext) -> None:
        """Wait for the sizes and issue the second round, unless a rank has no batch."""
        try:
            with self._sends.ahead():
                for path, sizes in ctx.input_dist_splits_requests.items():
                    ctx.input_dist_tensors_requests[path] = sizes.wait()
        except RanksWithoutBatch as absent:
            ctx.states = [READY if status is None else status for status in absent.statuses]
        if self.state_of(ctx) != READY or (ctx.states is not None and min(ctx.states) < READY):
            ctx.input_dist_tensors_requests = {}
        ctx.input_dist_splits_requests = {}

    def state_of(self, ctx: TrainPipelineContext) -> int:
        """What this rank says of a batch."""
        if ctx.error is None:
            return READY if ctx.batch is not None else ENDED
        has_no_trace = self.rewritten is not None and not self.rewritten.is_proven
        return UNFIT if has_no_trace and ctx.batch is not None else FAILED

    def prefetch(self, ctx: TrainPipelineContext) -> None:
        """Have the caches read the rows of a batch whose ids have arrived; returns at once."""
        if self.rewritten is not None:
            for path, arriving in ctx.input_dist_tensors_requests.items():
                read_ahead = getattr(self.rewritten.early.modules.get(path), "prefetch", None)
                if read_ahead is not None:
                    read_ahead(arriving.wait())

    def look_up(self, ctx: TrainPipelineContext, but: Collection[str] = ()) -> None:
        """Look rows up with the present tables and send them, ``but`` modules at these paths."""
        if self.rewritten is not None:
            self._take_over(ctx)
            for path, module in self.rewritten.early.modules.items():
                if path not in but:
                    look_up(path, module, ctx)

    def forward(self, ctx: TrainPipelineContext) -> None:
        """Forget the last gradients and run the model."""
        if self.model.training:
            self.optimizer.zero_grad()
        self.evaluate(ctx)

    def evaluate(self, ctx: TrainPipelineContext) -> None:
        """Run the model, whose sharded modules use what was started, and release the batch."""
        self._take_over(ctx)
        self.in_forward = ctx
        try:
            ctx.losses, ctx.output = self.call(ctx.batch)
        finally:
            self.in_forward = None
        ctx.batch, ctx.arguments, ctx.module_contexts = None, {}, {}

    def backward(self, ctx: TrainPipelineContext) -> None:
        """The gradient of the sum of the losses; nothing for a model in evaluation."""
        if self.model.training:
            (ctx.losses.sum(dim=0) if ctx.losses.dim() else ctx.losses).backward()
        ctx.losses = None

    def optimizer_step(self, ctx: TrainPipelineContext) -> None:
        """Update the dense parts."""
        if self.model.training:
            self.optimizer.step()

    def _take_over(self, ctx: TrainPipelineContext) -> None:
        """The current stream waits for the copy of a batch, and for what of it has arrived."""
        self._copies.hand_over(ctx.batch)
        self._sends.hand_over(list(ctx.input_dist_tensors_requests.values()), list(ctx.module_contexts.values()))
