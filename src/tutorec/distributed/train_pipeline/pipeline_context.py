"""What a pipeline remembers of one batch, from the iterator to its last stage."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
    """One batch in flight. A pipeline makes one for each batch: ``context_type(index=n)``.

    Args:
        index: The number of the batch since the pipeline was made or reset, from 0.
        batch: On the pipeline's device; None before it is loaded, after its forward, and where the iterator has ended.
        input_dist_splits_requests: Path of a sharded module -> the first round of its ``input_dist``, in flight.
        input_dist_tensors_requests: Path -> the second round, in flight.
        module_contexts: Path -> what the moves of this batch tell each other in that module.
        postproc_fwd_results: Path of a preprocessing module -> its result, until the forward takes it.
        embedding_a2a_requests: Path -> the result of a lookup that was made before the forward.
        arguments: Path -> what the model passes to that module, computed ahead of the forward.
        done: The stages that the batch has passed.
        error: Why it could not be loaded or prepared on this rank. It is raised when it is this batch's turn.
        states: Of each rank whether it has this batch, where ranks have told each other; see `TrainPipeline`.
        losses: What the forward gave, until the backward takes it.
        output: What ``progress`` returns.

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
    done: set[Hashable] = field(default_factory=set)
    error: Exception | None = None
    states: list[int] | None = None
    losses: Any = None
    output: Any = None


# One kind of context serves all pipelines; TorchRec has one for each.
PrefetchTrainPipelineContext = TrainPipelineContext
EmbeddingTrainPipelineContext = TrainPipelineContext
