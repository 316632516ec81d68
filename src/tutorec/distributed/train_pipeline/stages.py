"""The stages of a pipeline: one method per stage, which can run for any batch in flight.

::

    load                next(iterator), and the copy to the device             copy stream
    prepare             preprocessing, arguments of sharded modules, checks    no communication
    start_input_dist    sizes                                                  first round
    wait_input_dist     ids                                                    second round
    prefetch            read rows of cached tables from their files            threads of the caches
    look_up             look rows up and send them back                        in flight
    forward, evaluate   the rest of the model's forward                        uses what has arrived
    backward            gradients; fused tables are updated
    optimizer_step      replicas of tables are averaged, dense layers are updated

A pipeline defines their order, and for each the number of batches that it runs ahead of the one
that trains. All stages run on the thread that calls ``progress``. What goes on behind them is named
on the right: messages in flight, reads of cached rows and, on a GPU, copies. An iterator that takes
long to make a batch belongs on a thread of its own, see `DataLoadingThread`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.profiler import record_function

from tutorec.distributed import comm
from tutorec.distributed.collectives.kjt import RanksWithoutBatch
from tutorec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from tutorec.distributed.train_pipeline.rewrite import RewrittenModel
from tutorec.distributed.train_pipeline.runtime_forwards import look_up
from tutorec.distributed.train_pipeline.streams import SideStream, to_device
from tutorec.fx.tracer import without_wrappers
from tutorec.sparse.refuse import type_name

__all__ = ["ENDED", "FAILED", "READY", "UNFIT", "Stages", "sync_replicas"]

# State of a batch on a rank.
UNFIT = -3  # the trace of the forward does not fit the first batch
FAILED = -2  # loading or preparing raised an error
ENDED = -1  # the iterator has no such batch
READY = 0


class Stages:
    """The stages of one model.

    Args:
        model: Returns ``(losses, output)`` for a batch.
        optimizer: The optimizer of the parameters that backward does not update.
        device: Device of the batches.
        call: What is called with a batch; the model by default.
        sync_interval: The steps from one average of a `DMPCollection` to the next; None for no
            average.

    Attributes:
        rewritten: The sharded modules that are started early; None while the model is detached.
        iterator: Source of the batches; None after its end.
        in_forward: The batch with which the model is running.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        call: Callable[[Any], Any] | None = None,
        sync_interval: int | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.custom_call = call
        self.sync_interval = sync_interval

        self.rewritten: RewrittenModel | None = None
        self.iterator: Iterator[Any] | None = None
        self.in_forward: TrainPipelineContext | None = None
        self._copies = SideStream(device)
        self._sends = SideStream(device)

    def load_from(self, iterator: Iterator[Any]) -> None:
        """Load from an iterator, whose batches may already be on the device."""
        self.iterator = iterator
        self._copies.follow()

    def call(self, batch: Any) -> Any:
        """``(losses, output)`` of a batch."""
        return (self.custom_call or self.model)(batch)

    def load(self, ctx: TrainPipelineContext) -> None:
        """Start copying the next batch to the device; the context is empty after the last one.

        What the iterator computes on the device runs on the stream of the copies.
        """
        with self._copies.ahead():
            try:
                batch = next(self.iterator) if self.iterator is not None else None
            except StopIteration:
                batch = None

            if batch is None:
                self.iterator = None
                return
            ctx.batch = to_device(batch, self.device)

    def prepare(self, ctx: TrainPipelineContext) -> None:
        """Run the part of a batch's work that needs no other rank and no trained parameter."""
        if ctx.batch is not None and self.rewritten is not None:
            with self._sends.ahead():
                self._copies.hand_over(ctx.batch)
                self.rewritten.prepare(ctx)

    def start_input_dist(self, ctx: TrainPipelineContext) -> None:
        """Issue the first round of every sharded module; without a batch, report that instead."""
        if self.rewritten is not None:
            state = self.state_of(ctx)
            with self._sends.ahead():
                for path, module in self.rewritten.early.modules.items():
                    send_status = getattr(module, "send_status", None)
                    if state != READY and send_status is not None:
                        ctx.input_dist_splits_requests[path] = send_status(state)
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
            # A rank has sent its status instead of sizes, and every rank has received it.
            ctx.states = [READY if status is None else status for status in absent.statuses]

        if self.state_of(ctx) != READY or (ctx.states is not None and min(ctx.states) < READY):
            ctx.input_dist_tensors_requests = {}
        ctx.input_dist_splits_requests = {}

    def state_of(self, ctx: TrainPipelineContext) -> int:
        """State of a batch on this rank."""
        if ctx.error is None:
            return READY if ctx.batch is not None else ENDED
        has_no_trace = self.rewritten is not None and not self.rewritten.is_proven
        return UNFIT if has_no_trace and ctx.batch is not None else FAILED

    def states_of_ranks(self, ctx: TrainPipelineContext) -> list[int]:
        """Exchange the states of a batch between ranks in a separate collective."""
        state = self.state_of(ctx)
        env = self.rewritten.env if self.rewritten is not None else None
        if env is None or env.process_group is None or env.world_size == 1:
            return [state]
        return [
            rank_state
            for (rank_state,) in comm.all_gather_ints([state], env.process_group, "pipeline")
        ]

    def settle(self, ctx: TrainPipelineContext) -> None:
        """Leave in the forward what cannot be started early: no rank could prepare the batch."""
        if self.rewritten is not None:
            with self._sends.ahead():
                ctx.error = self.rewritten.settle(ctx)

    def prefetch(self, ctx: TrainPipelineContext) -> None:
        """Start reading the rows of received ids into the caches; returns at once."""
        if self.rewritten is not None:
            for path, arriving in ctx.input_dist_tensors_requests.items():
                read_ahead = getattr(self.rewritten.early.modules.get(path), "prefetch", None)
                if read_ahead is not None:
                    read_ahead(arriving.wait())

    def look_up(self, ctx: TrainPipelineContext, except_for: Collection[str] = ()) -> None:
        """Look rows up in the present tables and send them, for all modules but some."""
        if self.rewritten is not None:
            self._take_over(ctx)
            for path, module in self.rewritten.early.modules.items():
                if path not in except_for:
                    look_up(path, module, ctx)

    def forward(self, ctx: TrainPipelineContext) -> None:
        """Clear gradients and run the model."""
        if self.model.training:
            self.optimizer.zero_grad()
        self.evaluate(ctx)

    def evaluate(self, ctx: TrainPipelineContext) -> None:
        """Run the model, which uses what was started early, and release the batch."""
        self._take_over(ctx)
        self.in_forward = ctx
        try:
            result = self.call(ctx.batch)
        finally:
            self.in_forward = None

        if not isinstance(result, tuple | list) or len(result) != 2:
            raise TypeError(self._wrong_result(_description(result)))

        ctx.losses, ctx.output = result
        ctx.batch = None
        ctx.arguments = {}
        ctx.written = {}
        ctx.module_contexts = {}

    def backward(self, ctx: TrainPipelineContext) -> None:
        """Compute the gradient of the sum of the losses; nothing for a model in evaluation mode."""
        if self.model.training:
            if not hasattr(type(ctx.losses), "__torch_function__"):
                raise TypeError(self._wrong_result(f"losses of type {type_name(ctx.losses)}"))
            (ctx.losses.sum(dim=0) if ctx.losses.dim() else ctx.losses).backward()
        ctx.losses = None

    def optimizer_step(self, ctx: TrainPipelineContext) -> None:
        """Average the replicas of a `DMPCollection` when it is time, and update dense layers."""
        if self.model.training:
            sync_replicas(self.model, self.sync_interval, ctx.index or 0)
            self.optimizer.step()

    def _wrong_result(self, description: str) -> str:
        """The message for a model whose result is not ``(losses, output)``."""
        name = type(without_wrappers(self.model)).__name__
        if self.custom_call is not None:
            name = "custom_model_fwd"

        return (
            f"a pipeline trains a model that returns (losses, output), and {name} returned "
            f"{description}: return one loss, or a tensor of them, and what progress() is to "
            "return; "
            "custom_model_fwd=lambda batch: ... does so for a model with another result"
        )

    def _take_over(self, ctx: TrainPipelineContext) -> None:
        """Make the current stream wait for the copy of a batch and for its received ids."""
        self._copies.hand_over(ctx.batch)
        self._sends.hand_over(
            list(ctx.input_dist_tensors_requests.values()), list(ctx.module_contexts.values())
        )


def _description(result: Any) -> str:
    """The types of a model's result, for a message."""
    if isinstance(result, tuple | list):
        return f"{len(result)} values, {[type_name(value) for value in result]}"
    return type_name(result)


def sync_replicas(model: nn.Module, interval: int | None, number: int) -> None:
    """Average the replicas of a `DMPCollection` if ``number`` is a multiple of ``interval``."""
    # A model of this class has imported its module; other models do not pay for the import.
    parallel = sys.modules.get("tutorec.distributed.model_parallel")
    if interval is None or parallel is None or not isinstance(model, parallel.DMPCollection):
        return
    if number % interval == 0:
        with record_function("## dmp_collection_sync ##"):
            cast(Any, model).sync()
