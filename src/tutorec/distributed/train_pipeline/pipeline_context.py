"""The state of one batch in a pipeline, from the iterator to its last stage."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from tutorec.awaitable import Awaitable

__all__ = [
    "EmbeddingTrainPipelineContext",
    "In",
    "Out",
    "PrefetchTrainPipelineContext",
    "TrainPipelineContext",
]

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class TrainPipelineContext:
    """One batch in flight. A pipeline makes one per batch: ``context_type(index=n)``.

    Args:
        index: Number of the batch since the pipeline was made or reset, from 0.
        batch: The batch on the pipeline's device; None before it is loaded, after its forward, and
            after the end of the iterator.
        input_dist_splits_requests: Path of a sharded module -> the first round of its
            ``input_dist``, in flight.
        input_dist_tensors_requests: Path -> the second round, in flight.
        module_contexts: Path -> the module's context of this batch.
        postproc_fwd_results: Path of a preprocessing module -> its result, until the forward uses
            it.
        embedding_a2a_requests: Path -> the result of a lookup that was started before the forward.
        arguments: Path -> the module's arguments, computed ahead of the forward.
        written: Path -> the tensors of its arguments, and how often each had been written in place
            by then; for the first batches.
        passed_stages: The stages that the batch has passed.
        error: Why it could not be loaded or prepared on this rank; raised when its turn comes.
        states: Each rank's state of this batch, if the ranks have exchanged them; see
            `TrainPipeline`.
        losses: Result of the forward, until the backward uses it.
        output: Return value of ``progress``.

    Source:
        TorchRec's ``TrainPipelineContext``.
    """

    index: int | None = None
    batch: Any = None
    input_dist_splits_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    input_dist_tensors_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    module_contexts: dict[str, Any] = field(default_factory=dict)
    postproc_fwd_results: dict[str, Any] = field(default_factory=dict)
    embedding_a2a_requests: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    written: dict[str, list[tuple[Tensor, int]]] = field(default_factory=dict)
    passed_stages: set[Hashable] = field(default_factory=set)
    error: Exception | None = None
    states: list[int] | None = None
    losses: Any = None
    output: Any = None


# One class of contexts serves all pipelines; TorchRec has one for each.
PrefetchTrainPipelineContext = TrainPipelineContext
EmbeddingTrainPipelineContext = TrainPipelineContext
