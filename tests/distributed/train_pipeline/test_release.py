"""What a pipeline keeps of a batch: nothing after its forward, and no work for a profiler that is
not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from distributed.train_pipeline.pipeline_cases import dense_optimizer, here, parallel, samples
from torch.profiler import profile

from tutorec.distributed.train_pipeline import TrainPipelineContext, TrainPipelineSparseDist
from tutorec.distributed.train_pipeline.timeline import Timeline
from tutorec.spmd import Ranks


def held_after_forward(rank: int, world_size: int) -> list[tuple[Any, ...]]:
    """Of each batch what its context holds when its backward begins."""
    contexts: list[TrainPipelineContext] = []

    class Context(TrainPipelineContext):
        def __init__(self, index: int) -> None:
            super().__init__(index=index)
            contexts.append(self)

    model, held = parallel("bags"), []
    pipeline: Any = TrainPipelineSparseDist(
        model, dense_optimizer(model), here(), context_type=Context
    )
    bias = next(each for name, each in model.named_parameters() if name.endswith("over.bias"))

    def note(gradient: Any) -> None:
        ctx = contexts[len(held)]
        held.append(
            (ctx.batch, ctx.arguments, ctx.module_contexts, ctx.input_dist_tensors_requests)
        )

    bias.register_hook(note)
    batches = samples("bags", rank, 3)
    for _ in range(3):
        pipeline.progress(batches)
    return held


def test_a_batch_and_its_ids_are_released_before_its_backward(ranks: Callable[..., Ranks]) -> None:
    assert ranks(2).run(held_after_forward) == [[(None, {}, {}, {})] * 3] * 2


def test_a_stage_stands_in_a_profile_where_there_is_one() -> None:
    timeline = Timeline(rank=1)
    with profile() as measured, timeline.mark("forward", 3):
        pass
    with timeline.mark("backward", 3):
        pass
    assert [each.key for each in measured.key_averages() if each.key.startswith("##")] == [
        "## forward 3 ##"
    ]
    assert [(each.stage, each.batch, each.rank) for each in timeline.intervals] == [
        ("forward", 3, 1),
        ("backward", 3, 1),
    ]


def test_a_stage_that_fails_is_measured_and_its_error_goes_on() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="no"), timeline.mark("load", 0):
        raise ValueError("no")
    assert [each.stage for each in timeline.intervals] == ["load"]
