"""How pipelines are used: iterators, checkpoints, detaching, what is in memory, what stale rows
are.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import pytest
import torch
from distributed.train_pipeline.pipeline_cases import (
    PIPELINES,
    STEPS,
    Bags,
    Sample,
    assert_same,
    dense_optimizer,
    distribute,
    here,
    parallel,
    pipelined,
    plain_loop,
    samples,
    state,
)
from torch import nn

from tutorec.distributed import train_pipeline
from tutorec.distributed.checkpoint import load_checkpoint, save_checkpoint
from tutorec.distributed.comm import all_gather_ints, default_group
from tutorec.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from tutorec.distributed.train_pipeline.engine import Stage, TrainPipeline
from tutorec.errors import RankError

CLASSES = [*PIPELINES.values(), EvalPipelineSparseDist]


def alone(pipeline: type[TrainPipeline[Any, Any]], **options: Any) -> TrainPipeline[Any, Any]:
    """A pipeline of a model without sharded modules."""
    model = nn.Linear(2, 1, device=here())
    return pipeline(model, torch.optim.SGD(model.parameters(), 0.1), here(), **options)


def summed(batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What stands for a model: a loss, and an output."""
    return batch.sum() * torch.ones((), requires_grad=True), 0


# --- figures


def figure(pipeline: type[Any]) -> dict[str, list[int]]:
    """What a docstring's figure says: stage -> the batch of each step."""
    rows = re.findall(
        r"^ {4,8}([a-z_]+(?:, [a-z_]+)*) +(\d.*)$", pipeline.__doc__ or "", re.MULTILINE
    )
    numbers = {
        names: [int(each) for each in re.findall(r"(?<!\S)\d+(?!\S)", cells)[:4]]
        for names, cells in rows
    }
    return {name: of_steps for names, of_steps in numbers.items() for name in names.split(", ")}


@pytest.mark.parametrize("pipeline", CLASSES, ids=lambda each: each.__name__)
def test_figures_show_the_schedule(pipeline):
    shown = figure(pipeline)
    assert shown.pop("step") == [0, 1, 2, 3]
    schedule = alone(pipeline)._schedule
    first: dict[str, Stage] = {}
    for stage in schedule:
        first.setdefault(stage.run.__name__, stage)
    assert list(shown) == list(first)
    assert shown == {
        name: [step + stage.ahead for step in range(4)] for name, stage in first.items()
    }


def recorded(rank: int, world_size: int, name: str) -> list[tuple[str, int]]:
    model = parallel("bags")
    options = {"start_batch": 0} if name == "semi-sync" else {}
    pipeline = PIPELINES[name](model, dense_optimizer(model), here(), **options)
    pipelined(pipeline, samples("bags", rank, steps=8))
    intervals = pipeline.timeline()
    assert all(each.start <= each.end and each.rank == rank for each in intervals)
    return [(each.stage, each.batch) for each in intervals]


@pytest.mark.parametrize("name", PIPELINES)
def test_what_runs_is_what_the_figure_shows(ranks, name):
    shown = figure(PIPELINES[name])
    shown.pop("step")
    for of_rank in ranks(2).run(recorded, name=name):
        ends = [index for index, (stage, _) in enumerate(of_rank) if stage == "forward"]
        # of a pipeline that is full: from the forward of batch 3 to the next
        step = of_rank[ends[3] : ends[4]]
        assert {stage: batch for stage, batch in step if stage in shown and batch <= 7}.items() <= {
            **{stage: of_steps[3] for stage, of_steps in shown.items()},
            **{
                stage: of_steps[3] + 1
                for stage, of_steps in shown.items()
                if is_before_forward(stage, shown)
            },
        }.items()
        assert [stage for stage, _ in step].count("backward") == 1


def is_before_forward(stage: str, shown: dict[str, list[int]]) -> bool:
    return list(shown).index(stage) < list(shown).index("forward")


# --- iterators


def in_a_row(rank: int, world_size: int, name: str) -> list[Any]:
    """Iterators of 0, 1, 2 and 5 batches in a row, in the plain loop and in a pipeline."""
    found = []
    for early in (False, True):
        model = parallel("bags")
        optimizer = dense_optimizer(model)
        pipeline = PIPELINES[name](model, optimizer, here())
        of_iterators = [
            pipelined(pipeline, samples("bags", rank, steps=steps))
            if early
            else plain_loop(model, optimizer, samples("bags", rank, steps=steps))
            for steps in (0, 1, 2, 5, 0, 1)
        ]
        found.append((of_iterators, state(model, optimizer)))
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_each_iterator_is_trained_to_its_end_as_the_plain_loop_does(ranks, name):
    for (plain, wanted), (early, found) in ranks(2).run(in_a_row, name=name):
        assert [len(outputs) for outputs in early] == [0, 1, 2, 5, 0, 1]
        assert all(map(torch.equal, chain(*plain), chain(*early)))
        assert_same(wanted, found, "of the plain loop")


def one_by_one(rank: int, world_size: int) -> list[Any]:
    """An iterator for each batch: nothing can be early, and nothing is lost."""
    found = []
    for early in (False, True):
        model = parallel("bags")
        optimizer = dense_optimizer(model)
        if early:
            pipeline = TrainPipelineSparseDist(model, optimizer, here())
            outputs = [pipeline.progress(iter([each])) for each in samples("bags", rank)]
            trained = [each.batch for each in pipeline.timeline() if each.stage == "forward"]
            assert trained == list(range(STEPS)), "batches are numbered over all iterators"
        else:
            outputs = plain_loop(model, optimizer, samples("bags", rank))
        found.append((outputs, state(model, optimizer)))
    return found


def test_an_iterator_may_hold_one_batch(ranks):
    for plain, early in ranks(2).run(one_by_one):
        assert all(map(torch.equal, plain[0], early[0]))
        assert_same(plain[1], early[1], "of the plain loop")


def uneven(rank: int, world_size: int) -> list[Any]:
    """Rank 1 has a batch more than rank 0; both make the steps that both can make."""
    found = []
    for early in (False, True):
        model = parallel("bags")
        optimizer = dense_optimizer(model)
        batches = samples("bags", rank, steps=3 + rank)
        if early:
            pipeline = TrainPipelineSparseDist(model, optimizer, here())
            outputs = [pipeline.progress(batches) for _ in range(3)]
            left = len(pipeline.batches)
        else:
            outputs = plain_loop(model, optimizer, (next(batches) for _ in range(3)))
            left = rank
        # A collective that was issued for the batch of one rank alone would be matched with this
        # one.
        group = default_group()
        assert group is not None
        found.append(
            (outputs, state(model, optimizer), left, all_gather_ints([7 + rank], group, "test"))
        )
    return found


def test_nothing_is_sent_early_for_a_batch_that_another_rank_lacks(ranks):
    for rank, (plain, early) in enumerate(ranks(2).run(uneven)):
        assert all(map(torch.equal, plain[0], early[0]))
        assert_same(plain[1], early[1], "of the plain loop")
        assert (early[2], early[3]) == (plain[2], plain[3]) == (rank, [[7], [8]])


def uneven_epochs(rank: int, world_size: int, name: str) -> list[Any]:
    """Two epochs; in the first rank 1 has a batch more than rank 0, in the second one less."""
    found = []
    for early in (False, True):
        model = parallel("bags")
        optimizer = dense_optimizer(model)
        epochs = [samples("bags", rank, steps=3 + rank), samples("bags", rank, steps=4 - rank)]
        if early:
            pipeline = PIPELINES[name](model, optimizer, here())
            outputs = [output for batches in epochs for output in pipelined(pipeline, batches)]
        else:
            outputs = [
                output for batches in epochs for output in plain_loop(model, optimizer, batches)
            ]
        found.append((outputs, state(model, optimizer)))
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_ranks_with_different_numbers_of_batches_train_as_the_plain_loop_does(ranks, name):
    """The last batch of rank 1's first epoch is trained together with the first one of rank 0's
    second epoch.
    """
    for plain, early in ranks(2).run(uneven_epochs, name=name):
        assert len(plain[0]) == len(early[0]) == 7
        assert all(map(torch.equal, plain[0], early[0]))
        assert_same(plain[1], early[1], "of the plain loop")


def stopping(rank: int, world_size: int) -> int:
    model = parallel("bags")
    pipeline = TrainPipelineSparseDist(
        model, dense_optimizer(model), here(), execute_all_batches=False
    )
    return len(pipelined(pipeline, samples("bags", rank, steps=4 + 2 * rank)))


def test_all_ranks_stop_with_the_first_one_where_batches_in_flight_are_not_to_be_trained(ranks):
    # rank 0 has 4 batches, and the end is known 2 batches ahead
    assert ranks(2).run(stopping) == [2, 2]


# --- memory


class Tracked:
    """A batch whose end is seen."""

    def __init__(self, number: int) -> None:
        self.values = torch.full((2, 2), float(number))


@pytest.mark.parametrize(
    ("pipeline", "most"), [(TrainPipelineBase, 1), (TrainPipelineSparseDist, 2)]
)
def test_batches_are_not_held_longer_than_they_are_needed(pipeline, most):
    alive: weakref.WeakSet[Tracked] = weakref.WeakSet()
    seen = []

    def batches() -> Iterator[Tracked]:
        for number in range(6):
            made = Tracked(number)
            alive.add(made)
            yield made
            del made

    def forward(batch: Tracked) -> tuple[torch.Tensor, int]:
        seen.append(len(alive))
        return summed(batch.values)

    pipelined(alone(pipeline, custom_model_fwd=forward), batches())
    assert max(seen) == most


# --- the model between steps


def interrupted(rank: int, world_size: int, name: str, folder: str) -> list[Any]:
    """One run, and one that is saved after two steps and goes on with another model."""
    whole = parallel("bags")
    optimizer = dense_optimizer(whole)
    outputs = pipelined(PIPELINES[name](whole, optimizer, here()), samples("bags", rank))

    first = parallel("bags")
    first_optimizer = dense_optimizer(first)
    pipeline = PIPELINES[name](first, first_optimizer, here())
    batches = samples("bags", rank)
    again = [pipeline.progress(batches) for _ in range(2)]
    save_checkpoint(folder, first, keyed(first, first_optimizer), step=2)
    waiting = pipeline.batches

    second = parallel("bags")
    second_optimizer = dense_optimizer(second)
    load_checkpoint(folder, second, keyed(second, second_optimizer))
    again += pipelined(PIPELINES[name](second, second_optimizer, here()), chain(waiting, batches))
    return [outputs, again, state(whole, optimizer), state(second, second_optimizer)]


def keyed(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer

    fused = set(model.fused_optimizer.params)
    params = {name: value for name, value in model.named_parameters() if name not in fused}
    return CombinedOptimizer(
        [model.fused_optimizer, KeyedOptimizer(params, optimizer.state, optimizer.param_groups)]
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_a_checkpoint_between_steps_goes_on_exactly(ranks, tmp_path, name):
    for outputs, again, wanted, found in ranks(2).run(
        interrupted, name=name, folder=str(tmp_path / "saved")
    ):
        assert all(map(torch.equal, outputs, again))
        assert_same(wanted, found, "of the run that was not interrupted")


def detached(rank: int, world_size: int, evaluates: bool) -> list[Any]:
    """Between two steps the model is detached, used, and attached by the next step."""
    model = parallel("bags")
    optimizer = dense_optimizer(model)
    pipeline = TrainPipelineSparseDist(model, optimizer, here())
    batches = samples("bags", rank)
    outputs = [pipeline.progress(batches) for _ in range(2)]
    if evaluates:
        used = pipeline.detach() if rank >= 0 else None
        assert used is model
        assert len(pipeline.batches) == 2
        with torch.no_grad():
            model(next(samples("bags", rank)))
    else:
        with torch.no_grad():  # an attached model may be called, too
            model(next(samples("bags", rank)))
    return [[*outputs, *pipelined(pipeline, batches)], state(model, optimizer)]


def undisturbed(rank: int, world_size: int, kind: str = "table_wise", **options: Any) -> list[Any]:
    model = parallel("bags", kind, **options)
    optimizer = dense_optimizer(model)
    return [plain_loop(model, optimizer, samples("bags", rank)), state(model, optimizer)]


def test_a_model_may_be_used_between_steps(ranks):
    wanted = ranks(2).run(undisturbed)
    for evaluates in (True, False):
        for plain, found in zip(wanted, ranks(2).run(detached, evaluates=evaluates), strict=True):
            assert all(map(torch.equal, plain[0], found[0]))
            assert_same(plain[1], found[1], "of the plain loop")


def evaluated(rank: int, world_size: int) -> list[Any]:
    model = parallel("bags")
    optimizer = dense_optimizer(model)
    model.eval()
    before = state(model, optimizer)
    with torch.no_grad():
        wanted = [model(each)[1] for each in samples("bags", rank)]
        found = pipelined(EvalPipelineSparseDist(model, optimizer, here()), samples("bags", rank))
        trained = pipelined(
            TrainPipelineSparseDist(model, optimizer, here()), samples("bags", rank)
        )
    assert_same(before, state(model, optimizer), "after an evaluation")
    return [wanted, found, trained]


def test_evaluation_gives_what_the_model_gives_and_trains_nothing(ranks):
    for wanted, found, trained in ranks(2).run(evaluated):
        assert len(wanted) == len(found) == len(trained) == STEPS
        assert all(map(torch.equal, wanted, found))
        assert all(map(torch.equal, wanted, trained))


def scripted(rank: int, world_size: int) -> list[Any]:
    model = parallel("bags")
    optimizer = dense_optimizer(model)
    pipeline = TrainPipelineSparseDist(model, optimizer, here(), apply_jit=True)
    batches = samples("bags", rank)
    outputs = [pipeline.progress(batches)]
    assert isinstance(model.module.over, torch.jit.ScriptModule)
    outputs += pipelined(pipeline, batches)
    assert type(pipeline.detach().module.over) is nn.Linear
    return [outputs, state(model, optimizer)]


def test_dense_parts_may_be_scripted(ranks):
    for plain, found in zip(ranks(2).run(undisturbed), ranks(2).run(scripted), strict=True):
        assert all(map(torch.equal, plain[0], found[0]))
        assert_same(plain[1], found[1], "of the plain loop")


# --- stale rows


def stale_by_hand(
    model: Any, optimizer: torch.optim.Optimizer, batches: list[Sample], start: int, stash: bool
) -> list[torch.Tensor]:
    """What SemiSync is: the rows of the next batch are looked up before the update by this one."""
    tables, over = model.module.tables, model.module.over
    outputs, held = [], None
    rows = tables(batches[0].ids)
    for number, each in enumerate(batches):
        optimizer.zero_grad()
        # the forward of the model, DDP's too, with these rows
        model.module.tables = lambda ids, rows=rows: rows
        loss, output = model(each)
        model.module.tables = tables
        outputs.append(output)
        following = batches[number + 1].ids if number + 1 < len(batches) else None
        if following is not None and number >= start:
            rows = tables(following)
        loss.backward()
        if stash and number >= start:
            now = [value.grad.clone() for value in over.parameters()]
            for index, value in enumerate(over.parameters()):
                value.grad = held[index] if held is not None else None
            held = now
        optimizer.step()
        if following is not None and number < start:
            rows = tables(following)
    return outputs


class OpenBags(Bags):
    """`Bags` whose collection may be exchanged for a function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "tables" and not isinstance(value, nn.Module):
            self._modules.pop("tables")
            self.__dict__["tables"] = value
        else:
            self.__dict__.pop(name, None)
            super().__setattr__(name, value)


def stale(rank: int, world_size: int, start: int, stash: bool) -> list[Any]:
    found = []
    for early in (False, True):
        bare = OpenBags()
        model = distribute(bare, {"tables": bare.tables}, "mixed")
        optimizer = dense_optimizer(model)
        batches = list(samples("bags", rank, steps=6))
        if early:
            options = {"start_batch": start, "stash_gradients": stash}
            pipeline = PIPELINES["semi-sync"](model, optimizer, here(), **options)
            outputs = pipelined(pipeline, iter(batches))
        else:
            outputs = stale_by_hand(model, optimizer, batches, start, stash)
        found.append((outputs, state(model, optimizer)))
    return found


@pytest.mark.parametrize(("start", "stash"), [(0, False), (0, True), (3, False)])
def test_semi_sync_is_the_plain_loop_with_rows_of_one_update_before(ranks, start, stash):
    wanted_of = ranks(2).run(undisturbed, kind="mixed")
    for rank, (by_hand, found) in enumerate(ranks(2).run(stale, start=start, stash=stash)):
        assert len(found[0]) == 6
        assert all(map(torch.equal, by_hand[0], found[0]))
        assert_same(by_hand[1], found[1], "of the loop by hand")
        same = [
            torch.equal(one, other)
            for one, other in zip(wanted_of[rank][0], found[0], strict=False)
        ]
        assert same == [step <= start for step in range(STEPS)], (
            "rows are stale from the batch after start_batch on"
        )


def stale_and_saved(rank: int, world_size: int, folder: str) -> list[Any]:
    """By hand and in the pipeline: three stale steps, a checkpoint, three more by another model."""
    found = []
    for early in (False, True):
        outputs: list[torch.Tensor] = []
        left: Iterator[Sample] = samples("bags", rank, steps=6)
        for loads in (False, True):
            bare = OpenBags()
            model = distribute(bare, {"tables": bare.tables}, "mixed")
            optimizer = dense_optimizer(model)
            if loads:
                load_checkpoint(f"{folder}/{early}", model, keyed(model, optimizer))
            if early:
                pipeline = PIPELINES["semi-sync"](model, optimizer, here(), start_batch=0)
                outputs += [pipeline.progress(left) for _ in range(3)]
                left = chain(pipeline.batches, left)
            else:
                outputs += stale_by_hand(
                    model, optimizer, list(islice(left, 3)), start=0, stash=False
                )
            if not loads:
                save_checkpoint(f"{folder}/{early}", model, keyed(model, optimizer), step=3)
        assert next(left, None) is None
        found.append((outputs, state(model, optimizer)))
    return found


def test_semi_sync_goes_on_from_a_checkpoint_with_rows_that_are_up_to_date(ranks, tmp_path):
    for by_hand, found in ranks(2).run(stale_and_saved, folder=str(tmp_path)):
        assert len(found[0]) == 6
        assert all(map(torch.equal, by_hand[0], found[0]))
        assert_same(by_hand[1], found[1], "of the loop by hand")


def kept_fresh(rank: int, world_size: int, strict: bool) -> list[Any]:
    model = parallel("bags", "mixed", kernel="dense")
    optimizer = dense_optimizer(model)
    pipeline = PIPELINES["semi-sync"](model, optimizer, here(), start_batch=0, strict=strict)
    return [pipelined(pipeline, samples("bags", rank)), state(model, optimizer)]


def test_semi_sync_looks_tables_up_after_the_optimizer_that_updates_them(ranks):
    wanted_of = ranks(2).run(undisturbed, kind="mixed", kernel="dense")
    for wanted, found in zip(wanted_of, ranks(2).run(kept_fresh, strict=False), strict=True):
        assert all(map(torch.equal, wanted[0], found[0]))
        assert_same(wanted[1], found[1], "of the plain loop")
    with pytest.raises(RankError, match=r"strict=True.*not.*\['tables'\]"):
        ranks(2).run(kept_fresh, strict=True)


# --- traces


def test_stages_stand_in_a_profile():
    from torch.profiler import ProfilerActivity, profile

    pipeline = alone(TrainPipelineBase, custom_model_fwd=summed)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        pipelined(pipeline, iter([torch.ones(2)] * 2))
    names = {each.key for each in found.key_averages()}
    assert {
        "## load 0 ##",
        "## forward 1 ##",
        "## backward 1 ##",
        "## optimizer_step 0 ##",
    } <= names


@pytest.mark.parametrize("pipeline", CLASSES, ids=lambda each: each.__name__)
def test_programs_written_for_torchrec_read_model_optimizer_and_device(pipeline):
    model = nn.Linear(2, 1, device=here())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = pipeline(model, optimizer, here())
    assert (made._model, made._optimizer, made._device) == (model, optimizer, here())


SHARED = ["model", "optimizer", "device"]
BATCHES = ["execute_all_batches", "apply_jit"]
MODEL = ["pipeline_postproc", "custom_model_fwd"]
REPLICAS, ENQUEUE = "dmp_collection_sync_interval_batches", "enqueue_batch_after_forward"
SEMI_SYNC = ["start_batch", "stash_gradients"]
LOOKUP = ["strict", "emb_lookup_stream", "embedding_lookup_after_data_dist"]
TORCHREC_ARGUMENTS = {
    "TrainPipelineBase": ["custom_model_fwd"],
    "TrainPipelineSparseDist": [*BATCHES, "context_type", *MODEL, REPLICAS, ENQUEUE],
    "TrainPipelineSparseDistLite": ["apply_jit", "context_type", *MODEL],
    "TrainPipelineFusedSparseDist": [*BATCHES, *MODEL, *LOOKUP, ENQUEUE],
    "TrainPipelineSemiSync": [*BATCHES, *SEMI_SYNC, *MODEL, "strict", REPLICAS],
    "PrefetchTrainPipelineSparseDist": [*BATCHES, *MODEL],
    "EvalPipelineSparseDist": ["apply_jit", "pipeline_postproc"],
}


@pytest.mark.parametrize("pipeline", CLASSES, ids=lambda each: each.__name__)
def test_pipelines_take_torchrecs_arguments_in_torchrecs_order(pipeline):
    found = list(inspect.signature(pipeline).parameters)
    assert found == [*SHARED, *TORCHREC_ARGUMENTS[pipeline.__name__]]


def test_names_of_the_package_are_those_of_its_modules():
    from tutorec.distributed.train_pipeline import train_pipelines

    for name in train_pipelines.__all__:
        if hasattr(train_pipeline, name):
            assert getattr(train_pipeline, name) is getattr(train_pipelines, name)
