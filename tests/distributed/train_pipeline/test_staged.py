"""A loop that calls the model itself, with later batches in their stages, trains what the plain
loop trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed.train_pipeline.pipeline_cases import (
    INPUTS,
    STEPS,
    Sample,
    assert_same,
    dense_optimizer,
    here,
    parallel,
    pipelined,
    plain_loop,
    sample,
    samples,
    state,
)
from torch import Tensor, nn

from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.train_pipeline.pipeline_stage import PipelineStage, SparseDataDistUtil
from tutorec.distributed.train_pipeline.semi_sync import TrainPipelineSemiSync
from tutorec.distributed.train_pipeline.staged import StagedTrainPipeline
from tutorec.spmd import Ranks

BETWEEN = ("", "prefetch", "start_embedding_lookup")


def stream() -> torch.Stream | None:
    return torch.cuda.Stream(here()) if here().type == "cuda" else None


def staged(
    model: nn.Module, between: str = "", **options: Any
) -> tuple[StagedTrainPipeline[Any, Any], Any]:
    """Batches are copied, their ids sent, and where it is asked for their rows read or
    looked up.
    """
    ahead = {"prefetch": "prefetch_stream", "start_embedding_lookup": "embedding_lookup_stream"}
    streams: dict[str, Any] = {ahead[between]: stream()} if between else {}
    sdd: SparseDataDistUtil[Any] = SparseDataDistUtil(model, stream(), **streams)
    stages = [
        PipelineStage("copy", lambda each: each.to(here(), non_blocking=True), stream()),
        sdd.start_sparse_data_dist_stage(),
    ]
    if between == "prefetch":
        stages.append(
            PipelineStage("prefetch", sdd.prefetch, sdd.prefetch_stream, sdd.load_prefetch)
        )
    elif between:
        stages.append(sdd.start_embedding_lookup_stage())
    return StagedTrainPipeline(stages, **options), sdd


def train(
    pipeline: StagedTrainPipeline[Any, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
) -> list[Tensor]:
    return plain_loop(model, optimizer, iter(lambda: pipeline.progress(batches), None))


def both(
    rank: int, world_size: int, what: str, between: str, steps: int = STEPS, **options: Any
) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """What is to be trained, and what a staged pipeline trains: outputs and state."""
    results = []
    for is_staged in (False, True):
        model = parallel(what, **options)
        optimizer, batches = dense_optimizer(model), samples(what, rank, steps)
        if is_staged:
            outputs = train(staged(model, between)[0], model, optimizer, batches)
        elif between == "start_embedding_lookup":
            outputs = pipelined(
                TrainPipelineSemiSync(model, optimizer, here(), start_batch=0), batches
            )
        else:
            outputs = plain_loop(model, optimizer, (each.to(here()) for each in batches))
        results.append(([each.cpu() for each in outputs], state(model, optimizer)))
    return results


def assert_parity(of_ranks: list[Any], steps: int = STEPS) -> None:
    for rank, ((wanted, wanted_state), (outputs, end)) in enumerate(of_ranks):
        assert len(outputs) == len(wanted) == steps
        assert all(map(torch.equal, wanted, outputs)), f"on rank {rank}"
        assert_same(wanted_state, end, f"on rank {rank}")


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("what", INPUTS)
def test_a_loop_over_stages_trains_what_the_pipelines_train(
    ranks: Callable[..., Ranks], what: str, between: str
) -> None:
    assert_parity(ranks(2).run(both, what=what, between=between))


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_fewer_batches_than_stages_are_all_trained(
    ranks: Callable[..., Ranks], steps: int, between: str
) -> None:
    assert_parity(ranks(2).run(both, what="bags", between=between, steps=steps), steps)


def test_rows_of_tables_in_files_are_read_ahead(ranks: Callable[..., Ranks]) -> None:
    of_ranks = ranks(2).run(
        both, what="bags", between="prefetch", kernel="fused_uvm_caching", cache_load_factor=0.5
    )
    assert_parity(of_ranks)


def events(rank: int, world_size: int) -> list[str]:
    model = parallel("bags")
    optimizer, log = dense_optimizer(model), []
    pipeline, _ = staged(model)
    [module] = [each for each in model.modules() if isinstance(each, ShardedModule)]
    send, backward = module.input_dist, torch.Tensor.backward

    class Logged:
        def __init__(self, value: Any, what: str) -> None:
            self.value, self.what = value, what

        def wait(self) -> Any:
            log.append(self.what)
            return (
                Logged(self.value.wait(), "ids used")
                if self.what == "ids sent"
                else self.value.wait()
            )

    def logged(*args: Any, **kwargs: Any) -> Any:
        log.append("sizes sent")
        return Logged(send(*args, **kwargs), "ids sent")

    module.input_dist = logged  # pyright: ignore[reportAttributeAccessIssue]
    batches = samples("bags", rank, 3)
    while (each := pipeline.progress(batches)) is not None:
        log.append("forward")
        optimizer.zero_grad()
        loss, _ = model(each)
        log.append("backward")
        backward(loss)
        optimizer.step()
    return log


def test_ids_of_the_next_batch_travel_during_the_backward(ranks: Callable[..., Ranks]) -> None:
    step = ["forward", "ids used", "ids sent", "backward"]
    expected = [
        "sizes sent",
        "ids sent",
        "sizes sent",
        *step,
        "sizes sent",
        *step,
        "forward",
        "ids used",
        "backward",
    ]
    assert ranks(2).run(events) == [expected, expected]


def flushed(rank: int, world_size: int) -> tuple[list[int], list[tuple[int, int]], bool]:
    """Asked to flush after three of seven batches: which were trained, how many were read and
    trained at its end.
    """
    model = parallel("bags")
    optimizer, read, trained, ends = dense_optimizer(model), [], [], []

    def batches() -> Iterator[Sample]:
        for step in range(7):
            read.append(step)
            yield sample("bags", rank, step % STEPS)

    pipeline, _ = staged(model, on_flush_end=lambda: ends.append((len(read), len(trained))))
    source, outputs = batches(), []
    while (each := pipeline.progress(source)) is not None:
        outputs += plain_loop(model, optimizer, iter([each]))
        trained.append(len(trained))
        if len(trained) == 3:
            pipeline.set_flush(True)
    other = parallel("bags")
    wanted = plain_loop(other, dense_optimizer(other), (each.to(here()) for each in batches()))
    return trained, ends, all(map(torch.equal, outputs, wanted)) and len(outputs) == len(wanted)


def test_a_flush_ends_when_every_batch_that_was_read_is_trained(
    ranks: Callable[..., Ranks],
) -> None:
    # Two stages: when batch 2 has been trained, batches 3 and 4 are in flight.
    assert ranks(2).run(flushed) == [(list(range(7)), [(5, 5)], True)] * 2


def detached(rank: int, world_size: int, at: int) -> tuple[bool, bool, bool]:
    """Detached before batch ``at`` is trained: whether other batches are answered as by the model
    alone.
    """
    model, other = parallel("bags"), parallel("bags")
    optimizer, plain = dense_optimizer(model), dense_optimizer(other)
    pipeline, sdd = staged(model)
    batches, outputs, same, initialized = samples("bags", rank), [], True, True
    unrelated = sample("bags", rank, 17).to(here())
    for step in range(STEPS):
        each = pipeline.progress(batches)
        with torch.no_grad():  # another batch while the model is attached
            same &= torch.equal(model(unrelated)[1], other(unrelated)[1])
        if step == at:
            assert sdd.detach() is model
            initialized = sdd.initialized
            same &= not any("forward" in vars(part) for part in model.modules())
        outputs += plain_loop(model, optimizer, iter([each]))
        [wanted] = plain_loop(other, plain, iter([sample("bags", rank, step).to(here())]))
        same &= torch.equal(outputs[-1], wanted)
    return same, initialized, sdd.initialized


@pytest.mark.parametrize("at", [0, 1, STEPS - 1])
def test_a_model_can_be_detached_at_any_batch(ranks: Callable[..., Ranks], at: int) -> None:
    # After the last ids have been sent there is nothing to attach it for.
    assert ranks(2).run(detached, at=at) == [(True, False, at < STEPS - 2)] * 2


def number(value: int) -> PipelineStage:
    return PipelineStage(f"add {value}", lambda each: each + value, None)


class Counted:
    """An iterator that counts how often it is asked."""

    def __init__(self, values: list[int]) -> None:
        self.asked, self._values = 0, iter(values)

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        self.asked += 1
        return next(self._values)


def test_an_iterator_that_has_ended_is_not_asked_again_and_another_one_fills_the_pipeline() -> None:
    pipeline: StagedTrainPipeline[int, int] = StagedTrainPipeline(
        [number(10), number(100), number(1000)]
    )
    first, second = Counted([1, 2]), Counted([3, 4, 5, 6])
    assert [pipeline.progress(first) for _ in range(5)] == [1111, 1112, None, None, None]
    assert first.asked == 3
    assert [pipeline.progress(second) for _ in range(5)] == [1113, 1114, 1115, 1116, None]
    assert [pipeline.progress(iter([])), pipeline.progress(iter([7]))] == [None, 1117]


def test_another_iterator_follows_the_batches_in_flight() -> None:
    pipeline: StagedTrainPipeline[int, int] = StagedTrainPipeline([number(10), number(100)])
    first, second = iter([1, 2, 3]), iter([4, 5])
    results = [pipeline.progress(first)] + [pipeline.progress(second) for _ in range(5)]
    assert results == [111, 112, 113, 114, 115, None]


def test_callbacks_are_called_while_filling_and_when_there_is_no_batch() -> None:
    calls: list[str] = []
    stages = [
        PipelineStage(
            name,
            lambda each: each,
            None,
            lambda n=name: calls.append(f"fill {n}"),
            lambda n=name: calls.append(f"none for {n}"),
        )
        for name in "ab"
    ]
    pipeline: StagedTrainPipeline[int, int] = StagedTrainPipeline(stages)
    batches = iter([1])
    assert pipeline.progress(batches) == 1
    assert calls == ["fill a", "fill b", "none for a", "fill a", "none for a", "none for b"]


def test_an_error_says_in_which_stage_of_which_batch_it_was() -> None:
    def fail(each: int) -> int:
        if each == 2:
            raise ValueError("bad batch")
        return each

    pipeline: StagedTrainPipeline[int, int] = StagedTrainPipeline(
        [number(0), PipelineStage("check", fail, None)]
    )
    batches = iter([0, 1, 2, 3])
    assert pipeline.progress(batches) == 0
    with pytest.raises(ValueError, match="bad batch") as caught:
        pipeline.progress(batches)
    assert caught.value.__notes__ == ["stage 'check' of batch 2 on rank 0"]


def test_stages_are_measured_and_logged(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    pipeline: StagedTrainPipeline[int, int] = StagedTrainPipeline(
        [number(1), number(2)], debug_mode=True
    )
    with caplog.at_level("INFO"):
        assert pipeline.progress(iter([0, 1])) == 3
    ran = [("add 1", 0), ("add 2", 0), ("add 1", 1), ("add 2", 1)]
    assert [(each.stage, each.batch) for each in pipeline.timeline()] == ran
    assert [record.getMessage() for record in caplog.records][:2] == [
        "stage 0, add 1, of batch 0",
        "stage 1, add 2, of batch 0",
    ]
    pipeline.export_chrome_trace(str(tmp_path / "trace.json"))
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_prefetch_and_lookup_are_not_both_given() -> None:
    one: Any = object()
    with pytest.raises(ValueError, match="prefetch_stream and embedding_lookup_stream"):
        SparseDataDistUtil(nn.Linear(1, 1), None, prefetch_stream=one, embedding_lookup_stream=one)


def test_a_model_called_with_parts_of_a_batch_takes_them_in_order() -> None:
    model = nn.Linear(1, 1)
    sdd: SparseDataDistUtil[Any] = SparseDataDistUtil(model, None)
    assert sdd.explain() == "no batch has been started yet"
    pipeline: StagedTrainPipeline[Any, Any] = StagedTrainPipeline(
        [sdd.start_sparse_data_dist_stage()]
    )
    batches, seen = iter([{"x": torch.full((1, 1), float(i))} for i in range(3)]), []
    while (each := pipeline.progress(batches)) is not None:
        seen.append(sdd._flight[0].index)
        model(each["x"])
    assert seen == [0, 1, 2]
    assert not sdd._flight
    assert sdd.explain() == "the model has no sharded modules"
