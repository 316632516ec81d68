"""What fails in a pipeline: every rank ends, the message says where, and the batches before have
been trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed.train_pipeline.pipeline_cases import (
    PIPELINES,
    Sample,
    assert_same,
    dense_optimizer,
    here,
    parallel,
    plain_loop,
    sample,
    samples,
    state,
)

from tutorec.awaitable import Awaitable
from tutorec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineBase
from tutorec.errors import RankError
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

BAD = 3  # the batch that fails, on rank 1
EARLY = [name for name in PIPELINES if name != "base"]


class Broken(Sample):
    """A batch that cannot be copied."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        raise OSError("the batch cannot be read")


def spoiled(made: Sample, how: str) -> Sample:
    """A batch that fails: its copy, an id that no table has, a feature that is missing."""
    ids = made.ids
    if how == "copy":
        return Broken(ids, made.labels)
    if how == "id":
        return Sample(
            KeyedJaggedTensor(ids.keys(), ids.values() + 1000, lengths=ids.lengths()), made.labels
        )
    if how == "feature":
        return Sample(ids.permute([0, 1, 2]), made.labels)
    raise LookupError(f"row group {BAD} of the file is damaged")


def with_one_bad(rank: int, how: str, bad: int, first: int = 0) -> Iterator[Sample]:
    for step in range(first, 6):
        made = sample("bags", rank, step)
        yield spoiled(made, how) if rank == 1 and step == bad else made


def failing(rank: int, world_size: int, name: str, how: str, bad: int = BAD) -> dict[str, Any]:
    """Train until something is raised; what was, and what the batches before have left."""
    model = parallel("bags")
    optimizer = dense_optimizer(model)
    pipeline = PIPELINES[name](model, optimizer, here())
    batches, outputs, raised = with_one_bad(rank, how, bad), [], None
    while raised is None:
        try:
            outputs.append(pipeline.progress(batches))
        except Exception as error:
            raised = error
    assert pipeline.batches == []
    before = state(model, optimizer)
    # The pipeline goes on with other batches, on all ranks.
    goes_on = pipeline.progress(samples("bags", rank))
    return {
        "steps": len(outputs),
        "state": before,
        "type": type(raised).__name__,
        "text": "\n".join([str(raised), *getattr(raised, "__notes__", [])]),
        "goes on": goes_on,
    }


def trained(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    model = parallel("bags")
    optimizer = dense_optimizer(model)
    plain_loop(model, optimizer, samples("bags", rank, steps=steps))
    return state(model, optimizer)


FAILURES = {
    "iterator": ("load", "LookupError", "row group 3 of the file is damaged"),
    "copy": ("load", "OSError", "the batch cannot be read"),
    "id": ("prepare", "ValueError", "1,?00"),
    "feature": ("prepare", "KeyError", "f2"),
}


@pytest.mark.parametrize("name", EARLY)
@pytest.mark.parametrize("how", FAILURES)
def test_a_bad_batch_ends_all_ranks_after_the_batches_before_it(ranks, name, how):
    stage, kind, text = FAILURES[how]
    found = ranks(2).run(failing, name=name, how=how)
    wanted = ranks(2).run(trained, steps=BAD)
    where = f"{PIPELINES[name].__name__}: stage {stage!r} of batch {BAD} on rank 1"
    for rank, (one, state_before) in enumerate(zip(found, wanted, strict=True)):
        assert one["steps"] == BAD
        assert_same(state_before, one["state"], f"on rank {rank}, before the bad batch")
        assert where in one["text"]
    assert found[1]["type"] == kind
    assert found[0]["type"] == "AgreementError"
    assert (
        f"batch {BAD} of {PIPELINES[name].__name__} was aborted on every rank: rank 1 raised {kind}"
        in found[0]["text"]
    )
    for one in found:
        assert re.search(text, one["text"])


@pytest.mark.parametrize("how", ["iterator", "id"])
def test_a_bad_first_batch_ends_all_ranks(ranks, how):
    found = ranks(2).run(failing, name="sparse dist", how=how, bad=0)
    assert [one["steps"] for one in found] == [0, 0]
    assert [one["type"] for one in found] == ["AgreementError", FAILURES[how][1]]


def failing_alone(rank: int, world_size: int, how: str) -> tuple[int, str]:
    model = parallel("bags")
    pipeline = TrainPipelineBase(model, dense_optimizer(model), here())
    batches = (
        spoiled(each, how) if step == BAD else each for step, each in enumerate(samples("bags", 0))
    )
    steps = 0
    while True:
        try:
            pipeline.progress(batches)
            steps += 1
        except Exception as error:
            return steps, "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize(
    ("how", "stage"), [("iterator", "load"), ("copy", "load"), ("id", "forward")]
)
def test_a_base_pipeline_names_stage_and_batch_too(ranks, how, stage):
    ((steps, text),) = ranks(1).run(failing_alone, how=how)
    assert steps == BAD
    assert f"TrainPipelineBase: stage {stage!r} of batch {BAD} on rank 0" in text


class Breaks(Exception):
    """What a model, its backward or an optimizer raises."""


def raising_in(rank: int) -> Callable[..., None]:
    """A function that raises on rank 1 when it is called for the bad batch."""
    calls = 0

    def fails(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == BAD + 1:
            raise Breaks(f"call {calls}")

    return fails


TABLE_STAGES = {
    "start_input_dist": "input_dist",
    "wait_input_dist": "input_dist",
    "look_up": "compute_and_output_dist",
    "prefetch": "prefetch",
}


def break_table_stage(tables: Any, stage: str, fails: Callable[[], None]) -> None:
    """Call ``fails`` in a stage of a sharded module, before what the stage does."""
    method = TABLE_STAGES[stage]
    does = getattr(tables, method)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if stage == "wait_input_dist":
            return LateFailure(does(*args, **kwargs), fails)
        fails()
        return does(*args, **kwargs)

    vars(tables)[method] = broken


class LateFailure(Awaitable[Any]):
    """Sizes of a batch; waiting for them may fail."""

    def __init__(self, sizes: Awaitable[Any], fails: Callable[[], None]) -> None:
        super().__init__()
        self._sizes, self._fails = sizes, fails

    def _wait_impl(self) -> Any:
        self._fails()
        return self._sizes.wait()


def breaking(rank: int, world_size: int, name: str, where: str) -> None:
    """Rank 1 fails in a stage that other ranks are in the middle of."""
    model = parallel("bags")
    optimizer = dense_optimizer(model)
    fails = raising_in(rank)
    if where == "forward":
        model.module.over.register_forward_pre_hook(fails)
    elif where == "backward":
        model.module.over.register_full_backward_pre_hook(fails)
    elif where == "step":
        optimizer.register_step_pre_hook(fails)
    else:
        break_table_stage(model.module.tables, where, fails)
    options = {"start_batch": 0} if name == "semi-sync" else {}
    pipeline = PIPELINES[name](model, optimizer, here(), **options)
    batches = samples("bags", rank, steps=8)
    for _ in range(8):
        pipeline.progress(batches)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("sparse dist", "forward"),
        ("fused", "backward"),
        ("prefetch", "step"),
        *((name, stage) for name in EARLY for stage in ("start_input_dist", "wait_input_dist")),
        ("fused", "look_up"),
        ("semi-sync", "look_up"),
        ("prefetch", "prefetch"),
    ],
)
def test_a_rank_that_fails_in_a_step_ends_the_others(ranks, name, where):
    stage = "optimizer_step" if where == "step" else where
    with pytest.raises(RankError) as caught:
        ranks(2).run(breaking, name=name, where=where)
    assert caught.value.rank == 1
    assert f"Breaks: call {BAD + 1}" in str(caught.value)
    assert f"{PIPELINES[name].__name__}: stage {stage!r} of batch {BAD} on rank 1" in str(
        caught.value
    )


def evaluating(rank: int, world_size: int, how: str) -> tuple[int, str]:
    """Evaluate until something is raised; how many batches came before it, and what it says."""
    model = parallel("bags")
    if how == "evaluate":
        break_table_stage(model.module.tables, "look_up", raising_in(rank))
    model.eval()
    pipeline = EvalPipelineSparseDist(model, dense_optimizer(model), here())
    batches, steps = with_one_bad(rank, how, -1 if how == "evaluate" else BAD), 0
    with torch.no_grad():
        while True:
            try:
                pipeline.progress(batches)
                steps += 1
            except Breaks:
                raise
            except Exception as error:
                return steps, "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("how", FAILURES)
def test_a_bad_batch_ends_an_evaluation_on_all_ranks(ranks, how):
    where = f"EvalPipelineSparseDist: stage {FAILURES[how][0]!r} of batch {BAD} on rank 1"
    for steps, text in ranks(2).run(evaluating, how=how):
        assert steps == BAD
        assert where in text
        assert re.search(FAILURES[how][2], text)


def test_a_rank_that_fails_in_an_evaluation_ends_the_others(ranks):
    with pytest.raises(RankError) as caught:
        ranks(2).run(evaluating, how="evaluate")
    assert caught.value.rank == 1
    assert f"EvalPipelineSparseDist: stage 'evaluate' of batch {BAD} on rank 1" in str(caught.value)


def test_a_stop_iteration_of_the_model_is_not_the_end_of_the_batches():
    def forward(batch: torch.Tensor) -> Any:
        raise StopIteration

    model = torch.nn.Linear(1, 1, device=here())
    pipeline = TrainPipelineBase(
        model, torch.optim.SGD(model.parameters(), 0.1), here(), custom_model_fwd=forward
    )
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        pipeline.progress(iter([torch.ones(1)]))
    assert caught.value.__notes__ == ["TrainPipelineBase: stage 'forward' of batch 0 on rank 0"]


ANSWERS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "one loss": (lambda rows: rows.sum(), "custom_model_fwd returned torch.Tensor: "),
    "two losses": (lambda rows: rows.sum().expand(2), "returned torch.Tensor: "),
    "nothing": (lambda rows: None, "returned NoneType: "),
    "names": (lambda rows: {"loss": rows.sum(), "logits": rows}, "returned dict: "),
    "three": (
        lambda rows: (rows.sum(), rows, rows),
        r"returned 3 values, \['torch.Tensor', 'torch.Tensor', 'torch.Tensor'\]: ",
    ),
    "a number": (lambda rows: (rows.sum().item(), rows), "returned losses of type float: "),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_model_with_another_answer_is_told_what_a_pipeline_needs(name: str) -> None:
    answer, form = ANSWERS[name]
    model = torch.nn.Linear(1, 1, device=here())
    pipeline = TrainPipelineBase(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        here(),
        custom_model_fwd=lambda batch: answer(model(batch)),
    )
    with pytest.raises(
        TypeError, match=rf"returns \(losses, output\), and .*{form}return one loss"
    ):
        pipeline.progress(iter([torch.ones(1, 1)]))


def test_the_losses_of_a_model_in_evaluation_are_not_looked_at() -> None:
    model = torch.nn.Linear(1, 1, device=here()).eval()
    pipeline = TrainPipelineBase(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        here(),
        custom_model_fwd=lambda batch: (None, model(batch)),
    )
    assert pipeline.progress(iter([torch.ones(1, 1)])).shape == (1, 1)
