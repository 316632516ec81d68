"""A pipeline of user-defined stages, for a training loop that calls the model itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, cast

import torch
import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.distributed.train_pipeline.pipeline_context import In
from tutorec.distributed.train_pipeline.pipeline_stage import PipelineStage, StageOut, on_stream
from tutorec.distributed.train_pipeline.timeline import Interval, Timeline

__all__ = ["StagedTrainPipeline"]

_logger = logging.getLogger("tutorec.distributed")


class StagedTrainPipeline(Generic[In, StageOut]):
    """Runs stages on later batches, and returns the next batch that has passed all of them.

    An example of three stages; the loop calls the model with what a step returns::

        step               0      1      2      3

        returned           0      1      2      3
        stage 0            3      4      5      6
        stage 1            2      3      4      5
        stage 2            1      2      3      4

    The first step fills the pipeline: batch 0 passes all stages, batch 1 the first two, batch 2 the
    first. An error of a stage is raised at once, with a note of the stage, the batch and the rank.

    Args:
        pipeline_stages: The stages in order, at least one. A stage that sends ids must be the last,
            or be followed by a prefetch or a lookup.
        debug_mode: Log each stage of each batch.
        compute_stream: The CUDA stream of the loop; by default the current one.
        on_flush_end: Called when a flush has ended: no batch is in flight, and all batches read so
            far are trained.

    Example:
        >>> pipeline = StagedTrainPipeline(
        ...     [PipelineStage("double", lambda batch: 2 * batch, stream=None)]
        ... )
        >>> batches = iter([1, 2])
        >>> [pipeline.progress(batches) for _ in range(3)]
        [2, 4, None]

    Source:
        TorchRec's ``torchrec.distributed.train_pipeline.train_pipelines.StagedTrainPipeline``.
    """

    def __init__(
        self,
        pipeline_stages: Sequence[PipelineStage],
        debug_mode: bool = False,
        compute_stream: torch.Stream | None = None,
        on_flush_end: Callable[[], None] | None = None,
    ) -> None:
        self._pipeline_stages = list(pipeline_stages)
        self._debug_mode = debug_mode
        self.on_flush_end = on_flush_end

        streams = [stage.stream for stage in self._pipeline_stages if stage.stream is not None]
        if compute_stream is None and streams:
            compute_stream = torch.cuda.current_stream(streams[0].device)
        self._compute_stream: Any = compute_stream
        # For each stage, last one first: its batch and the event after it; None without a batch.
        # This name and `_flushing` are those that TorchRec's tests read.
        self._stage_outputs: list[tuple[Any, Any]] = [(None, None)] * self.num_stages
        self._timeline = Timeline(dist.get_rank() if comm.default_group() is not None else 0)
        self._source: Iterator[In] | None = None
        self._is_filled = self._is_exhausted = self._flushing = False
        self._next_index = 0  # index of the batch that is returned next

    @property
    def num_stages(self) -> int:
        """Number of stages, which is the number of batches in flight."""
        return len(self._pipeline_stages)

    def progress(self, dataloader_iter: Iterator[In]) -> StageOut | None:
        """The next batch, after its last stage; None if there is none.

        An iterator that has ended is not called again. A new iterator fills the pipeline again.
        """
        if dataloader_iter is not self._source:
            self._source = dataloader_iter
            self._is_exhausted = False
            self._is_filled = self._is_filled and any(
                batch is not None for batch, _ in self._stage_outputs
            )

        if not self._is_filled:
            self._fill()

        batch, event = self._stage_outputs.pop(0)
        self._stage_outputs.append((None, None))
        if batch is not None:
            self._next_index += 1

        for stage in range(self.num_stages):
            self._run(stage, self.num_stages - 1 - stage)
        if event is not None:
            event.wait(self._compute_stream)
            cast(Any, batch).record_stream(self._compute_stream)

        # The flush ends when no batch is in flight.
        if batch is None and self._flushing:
            self.flush_end()
            return self.progress(dataloader_iter)
        return batch

    def set_flush(self, flush: bool) -> None:
        """Return the batches in flight, call ``on_flush_end``, and only then read on."""
        self._flushing = flush

    def flush_end(self) -> None:
        """End a flush: the next batch fills the pipeline again."""
        self._flushing = self._is_filled = False
        if self.on_flush_end is not None:
            self.on_flush_end()

    def timeline(self) -> list[Interval]:
        """The start and end of each stage and batch on this rank, by end time; the last 10,000."""
        return list(self._timeline.intervals)

    def export_chrome_trace(self, path: str) -> None:
        """Write the timeline for chrome://tracing or Perfetto."""
        self._timeline.export_chrome_trace(path)

    def _fill(self) -> None:
        """Fill the pipeline: batch 0 passes all stages, each later batch one stage less."""
        for position in range(self.num_stages):
            for stage in range(self.num_stages - position):
                self._run(stage, position)
                callback = self._pipeline_stages[stage].fill_callback
                if callback is not None:
                    callback()
        self._is_filled = True

    def _run(self, number: int, place: int) -> None:
        """Run a stage of the batch at a position in flight; the first stage reads it."""
        stage = self._pipeline_stages[number]
        index = self._next_index + place

        try:
            batch, event = (self._read(), None) if number == 0 else self._stage_outputs[place]
            if batch is None:
                self._stage_outputs[place] = (None, None)
                if stage.data_exhausted_callback is not None:
                    stage.data_exhausted_callback()
                return

            if self._debug_mode:
                _logger.info("stage %d, %s, of batch %d", number, stage.name, index)
            with self._timeline.mark(stage.name, index):
                self._stage_outputs[place] = _call(stage, batch, event)
        except Exception as error:
            error.add_note(f"stage {stage.name!r} of batch {index} on rank {self._timeline.rank}")
            raise

    def _read(self) -> In | None:
        if self._is_exhausted or self._flushing or self._source is None:
            return None
        batch = next(self._source, None)
        self._is_exhausted = batch is None
        return batch


def _call(stage: PipelineStage, batch: Any, event: Any) -> tuple[Any, Any]:
    """Run a stage on a batch, after the event of the previous stage; return result and event."""
    stream: Any = stage.stream
    with on_stream(stream):
        if event is not None:
            event.wait(stream)
            batch.record_stream(stream)

        result = stage.runnable(batch)
        if stream is None:
            return result, None

        finished = torch.cuda.Event()
        finished.record(stream)
        return result, finished
