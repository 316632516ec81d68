"""What is started early, what is not and why; and that both train what the plain loop trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from distributed import cases, row_cases
from distributed.cases import batch
from distributed.train_pipeline import pipeline_cases
from distributed.train_pipeline.pipeline_cases import (
    Bags,
    assert_same,
    dense_optimizer,
    distribute,
    here,
    pipelined,
    plain_loop,
    sample,
    state,
)
from torch import Tensor, nn

from tutorec.distributed.train_pipeline import (
    TrainPipelineSparseDist,
)
from tutorec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

STEPS = 4
WIDTH = 30


class Model(nn.Module):
    """A collection of tables under a dense layer; subclasses say how the input comes from the
    batch.
    """

    paths = ("tables",)

    def __init__(self) -> None:
        super().__init__()
        self.tables = cases.collection()
        torch.manual_seed(5)
        self.over = nn.Linear(WIDTH, 1)

    def ids(self, batch: Any) -> Any:
        return batch["ids"]

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.loss(self.over(self.tables(self.ids(batch)).values()))

    def loss(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        loss = logits.square().sum() / 8
        return loss, logits.detach()


class Nested(Model):
    def ids(self, batch: Any) -> Any:
        return batch["more"][1]["ids"]


class Rearranged(Model):
    """Methods of the batch, and a batch that is put together."""

    def ids(self, batch: Any) -> Any:
        first, second = batch["ids"].permute([1, 0, 2, 3]).split([2, 2])
        return KeyedJaggedTensor.concat([second, first])


class Regrouped(Model):
    """Behind the tables the result is taken apart, by code that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(26, 1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        groups = [["f0", "f3"], ["f1@t0", "f2"]]
        parts = KeyedTensor.regroup_as_dict(
            [self.tables(batch["ids"])], groups, ["first", "second"]
        )
        return self.loss(self.over(torch.cat([parts["first"], parts["second"]], dim=1)))


class Shift(nn.Module):
    """A preprocessing module that counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: KeyedJaggedTensor, by: int = 1) -> KeyedJaggedTensor:
        self.calls += 1
        values = (ids.values() + by) % cases.ROWS
        return KeyedJaggedTensor(ids.keys(), values, ids.weights_or_none(), lengths=ids.lengths())


class Preprocessed(Model):
    """Two of them, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Shift(), Shift()

    def ids(self, batch: Any) -> Any:
        return self.second(self.first(batch["ids"]), by=2)


class Weighting(nn.Module):
    """A preprocessing module that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))

    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return ids


class Trained(Model):
    def __init__(self) -> None:
        super().__init__()
        self.before = Weighting()

    def ids(self, batch: Any) -> Any:
        return self.before(batch["ids"])

    def loss(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return super().loss(logits + self.before.offset)


class Two(Model):
    """Bags and rows; the rows' ids are those of the bags."""

    paths = ("tables", "rows")

    def __init__(self) -> None:
        super().__init__()
        self.rows = row_cases.collection()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        rows = self.rows(batch["ids"])
        logits = self.over(self.tables(features=batch["ids"]).values())
        return self.loss(logits + rows["f0"].values().sum() / 100)


class FromDict(Two):
    """The rows' ids are put together from features."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        parts = batch["ids"].to_dict()
        ids = KeyedJaggedTensor.from_jt_dict({key: parts[key] for key in cases.FEATURES})
        rows = self.rows(ids)["f0"].values()
        return self.loss(self.over(self.tables(batch["ids"]).values()) + rows.sum() / 100)


class OneUnfit(Two):
    """The rows' ids ask for weights that no batch has; the bags' ids do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Shift(), Shift()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        ids, other = self.first(batch["ids"]), self.second(batch["more"][1]["ids"])
        weights = other.weights_or_none()
        if weights is not None:
            weights = weights * 2
        other = KeyedJaggedTensor(other.keys(), other.values(), weights, lengths=other.lengths())
        rows = self.rows(other)["f0"].values()
        return self.loss(self.over(self.tables(ids).values()) + rows.sum() / 100)


class Chained(Two):
    """The rows' ids come from what the bags gave."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        pooled = self.tables(batch["ids"]).values()
        ids = batch["ids"]
        moved = KeyedJaggedTensor(
            ids.keys(), ids.values() + (pooled.sum() < -1e9).long(), lengths=ids.lengths()
        )
        return self.loss(self.over(pooled) + self.rows(moved)["f0"].values().sum() / 100)


class Branching(Two):
    """Behind the tables it looks at values; the rows come after that."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        pooled = self.tables(batch["ids"]).values()
        if pooled.sum() > 1e9:
            pooled = pooled * 2
        return self.loss(self.over(pooled) + self.rows(batch["ids"])["f0"].values().sum() / 100)


class Twice(Model):
    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        first, second = (
            self.tables(batch["ids"]).values(),
            self.tables(batch["more"][1]["ids"]).values(),
        )
        return self.loss(self.over(first + 2 * second))


class Typed(Model):
    """What is traced is no dict, what runs is one: another input, without an error."""

    def ids(self, batch: Any) -> Any:
        return batch["ids"] if isinstance(batch, dict) else batch["more"][1]["ids"]


class Unfit(Model):
    """What is traced fails with every batch."""

    def ids(self, batch: Any) -> Any:
        return batch["ids"] if isinstance(batch, dict) else batch.ids


class Random(Model):
    def ids(self, batch: Any) -> Any:
        ids = batch["ids"]
        keep = torch.rand_like(ids.values().float()) < 2
        return KeyedJaggedTensor(ids.keys(), ids.values() * keep, lengths=ids.lengths())


class InPlace(Model):
    def ids(self, batch: Any) -> Any:
        ids = batch["ids"]
        values = ids.values().add_(1).remainder_(cases.ROWS)
        return KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())


class InPlaceFunction(Model):
    def ids(self, batch: Any) -> Any:
        ids = batch["ids"]
        values = torch.clamp_(ids.values(), max=4)
        return KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())


class InPlaceArgument(Model):
    def ids(self, batch: Any) -> Any:
        ids = batch["ids"]
        values = nn.functional.relu(ids.values(), inplace=True)
        return KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())


class Functions(Model):
    """Functions of torch that are written in Python and change nothing."""

    def ids(self, batch: Any) -> Any:
        ids = batch["ids"]
        values = torch.cat(torch.split(nn.functional.relu(ids.values()), 2))
        return KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())


class Output(Model):
    def ids(self, batch: Any) -> Any:
        ids, values = batch["ids"], batch["ids"].values()
        values = torch.remainder(values + 1, cases.ROWS, out=values)
        return KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())


class Opaque(Model):
    def ids(self, batch: Any) -> Any:
        return pipeline_cases.moved_on(batch["ids"])


class OpaqueAside(Model):
    """Its result is not used: nothing in the graph leads from it to the tables."""

    def ids(self, batch: Any) -> Any:
        pipeline_cases.moved_on(batch["ids"])
        return batch["ids"]


class Aside(Model):
    def ids(self, batch: Any) -> Any:
        batch["ids"].values().add_(1).remainder_(cases.ROWS)
        return batch["ids"]


class Hidden(Model):
    """A module writes in place, and its result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.before = MovingOn()

    def ids(self, batch: Any) -> Any:
        self.before(batch["ids"])
        return batch["ids"]


class AsideOfTheRest(Model):
    """What is written in place is nothing that the tables read."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        more = batch["more"][1]["ids"].values().add_(1)
        logits = self.over(self.tables(batch["ids"]).values()).relu_()
        return self.loss(logits + more.sum() / 1000)


class MovingOn(nn.Module):
    def forward(self, ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return pipeline_cases.moved_on(ids)


class OpaqueModule(Model):
    """The same in a module, which runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.before = MovingOn()

    def ids(self, batch: Any) -> Any:
        return self.before(batch["ids"])


class ByMode(Model):
    """Another input in evaluation."""

    def ids(self, batch: Any) -> Any:
        return batch["ids"] if self.training else batch["more"][1]["ids"]


MODELS = {each.__name__: each for each in Model.__subclasses__() + Two.__subclasses__()}
EARLY, IN_FORWARD = "started early", "runs in the forward, since "
SHARED = "its input needs "
EXPLAINED = {
    "Nested": {"tables": EARLY},
    "Rearranged": {"tables": EARLY},
    "Regrouped": {"tables": EARLY},
    "Preprocessed": {
        "tables": EARLY,
        "first": "runs ahead, before a sharded module",
        "second": "runs ahead, before a sharded module",
    },
    "Trained": {"tables": f"{IN_FORWARD}{SHARED}the module 'before', whose parameters are trained"},
    "Two": {"rows": EARLY, "tables": EARLY},
    "FromDict": {"rows": EARLY, "tables": EARLY},
    "OneUnfit": {
        "tables": EARLY,
        "first": "runs ahead, before a sharded module",
        "rows": f"{IN_FORWARD}its input cannot be computed ahead (TypeError: unsupported operand "
        "type(s) for *: 'NoneType' and 'int'); a trace takes `is not None` as true, so hand "
        "weights_or_none() on without asking",
    },
    "Chained": {
        "tables": EARLY,
        "rows": f"{IN_FORWARD}{SHARED}the result of the sharded module 'tables'",
    },
    "Branching": {
        "tables": EARLY,
        "rows": f"{IN_FORWARD}the forward cannot be traced as far as its call (TraceError: "
        "symbolically traced "
        "variables cannot be used as inputs to control flow)",
    },
    "Twice": {"tables": EARLY},
    "Typed": {
        "tables": (
            f"{IN_FORWARD}the forward passes another input than its trace: it depends on "
            "types or settings"
        )
    },
    "Unfit": {
        "tables": f"{IN_FORWARD}its input cannot be computed ahead "
        "(AttributeError: 'dict' object has no attribute 'ids')",
    },
    "Random": {
        "tables": f"{IN_FORWARD}{SHARED}rand_like(), which draws random numbers and would run twice"
    },
    "InPlace": {
        "tables": f"{IN_FORWARD}{SHARED}remainder_(), which writes in place and would run twice"
    },
    "Functions": {"tables": EARLY},
    "InPlaceFunction": {
        "tables": f"{IN_FORWARD}{SHARED}clamp_(), which writes in place and would run twice"
    },
    "InPlaceArgument": {
        "tables": f"{IN_FORWARD}{SHARED}relu(), which writes in place and would run twice"
    },
    "Output": {
        "tables": f"{IN_FORWARD}{SHARED}remainder(), which writes in place and would run twice"
    },
    "Opaque": {
        "tables": f"{IN_FORWARD}{SHARED}moved_on(), which may write in place and would run twice"
    },
    "OpaqueAside": {"tables": f"{IN_FORWARD}the forward writes into its input in place"},
    "Aside": {"tables": f"{IN_FORWARD}the forward writes into its input in place"},
    "Hidden": {"tables": f"{IN_FORWARD}the forward writes into its input in place"},
    "AsideOfTheRest": {"tables": EARLY},
    "OpaqueModule": {"tables": EARLY, "before": "runs ahead, before a sharded module"},
    "ByMode": {"tables": EARLY},
}


def batches(rank: int) -> Iterator[dict[str, Any]]:
    for step in range(STEPS):
        ids, other = batch(100 * step + rank, 3 + rank), batch(100 * step + rank + 50, 3 + rank)
        yield {"ids": ids, "more": (step, {"ids": other})}


def both(rank: int, world_size: int, name: str, preprocess: bool = True) -> dict[str, Any]:
    """The plain loop and the pipeline, on a model of its own each."""
    found: dict[str, Any] = {"results": [], "warnings": []}
    handler = logging.Handler()
    handler.emit = lambda record: found["warnings"].append(record.getMessage())
    logging.getLogger("tutorec.distributed").addHandler(handler)
    for runs_pipeline in (False, True):
        torch.manual_seed(3)
        bare = MODELS[name]()
        model = distribute(bare, {path: getattr(bare, path) for path in MODELS[name].paths})
        optimizer = dense_optimizer(model)
        torch.manual_seed(11)
        if runs_pipeline:
            pipeline = TrainPipelineSparseDist(
                model, optimizer, here(), pipeline_postproc=preprocess
            )
            outputs = pipelined(pipeline, batches(rank))
            found["explained"] = dict(
                line.split(": ", 1) for line in pipeline.explain().splitlines()
            )
            assert pipeline.detach() is model
            assert "forward" not in bare.tables.__dict__
        else:
            outputs = plain_loop(model, optimizer, batches(rank))
        counts = [int(part.calls) for part in bare.modules() if isinstance(part, Shift)]
        found["results"].append((outputs, state(model, optimizer), counts))
    logging.getLogger("tutorec.distributed").removeHandler(handler)
    return found


def assert_parity(found: dict[str, Any]) -> None:
    (plain, wanted, counts), (outputs, got, counted) = found["results"]
    assert len(outputs) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(plain, outputs, strict=True))
    assert counts == counted
    assert_same(wanted, got, "of the plain loop")


@pytest.mark.parametrize("name", EXPLAINED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_inputs_are_traced_and_what_is_not_early_says_why(ranks, name, world_size):
    for found in ranks(world_size).run(both, name=name):
        assert found["explained"] == EXPLAINED[name]
        assert_parity(found)
        late = [path for path, text in EXPLAINED[name].items() if text.startswith(IN_FORWARD)]
        assert len(found["warnings"]) == len(late)
        assert all(path in text for path, text in zip(late, found["warnings"], strict=True))


def test_no_traceback_is_printed_where_a_trace_does_not_fit(ranks, capfd):
    ranks(1).run(both, name="OneUnfit")
    assert "Traceback" not in capfd.readouterr().err


def without_a_feature(made: dict[str, Any]) -> dict[str, Any]:
    return made | {"ids": made["ids"].permute([0, 1, 2])}


def other_type(made: dict[str, Any]) -> dict[str, Any]:
    return made | {"ids": 3}


def bad_first(rank: int, world_size: int, spoil: Callable[..., Any]) -> str:
    """The first batch of rank 1 is bad, and no rank can compute the input of the rows."""
    bare = OneUnfit()
    model = distribute(bare, {path: getattr(bare, path) for path in OneUnfit.paths})
    pipeline = TrainPipelineSparseDist(
        model, dense_optimizer(model), here(), pipeline_postproc=True
    )
    made = [spoil(each) if rank == 1 and each["more"][0] == 0 else each for each in batches(rank)]
    try:
        pipeline.progress(iter(made))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is raised"


@pytest.mark.parametrize(
    ("spoil", "kind"), [(without_a_feature, "KeyError"), (other_type, "AttributeError")]
)
def test_a_bad_batch_is_told_from_an_input_that_no_rank_computes(ranks, spoil, kind):
    found = ranks(2).run(bad_first, spoil=spoil)
    assert found[0].startswith("AgreementError: ")
    assert f"was aborted on every rank: rank 1 raised {kind}" in found[0]
    assert found[1].startswith(kind)


def test_preprocessing_runs_ahead_where_it_is_asked_for_only(ranks):
    (found,) = ranks(1).run(both, name="Preprocessed", preprocess=False)
    reason = (
        f"{IN_FORWARD}{SHARED}the module 'second', which runs ahead only with "
        "pipeline_postproc=True"
    )
    assert found["explained"] == {"tables": reason}
    assert_parity(found)


def by_function(rank: int, world_size: int) -> list[Any]:
    """A function that calls the model with parts of the batch, in place of the model."""

    class Apart(Bags):
        def forward(self, ids: Any, labels: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.over(self.tables(ids).values()).squeeze(1) - labels

    found = []
    for runs_pipeline in (False, True):
        bare = Apart()
        model = distribute(bare, {"tables": bare.tables})
        optimizer = dense_optimizer(model)

        def step(batch: Any, model: Any = model) -> tuple[Tensor, Tensor]:
            loss = model(batch.ids, labels=batch.labels).square()
            return loss, loss.detach()  # one loss for each sample: their sum is trained

        made = (sample("bags", rank, number) for number in range(STEPS))
        if runs_pipeline:
            pipeline = TrainPipelineSparseDist(model, optimizer, here(), custom_model_fwd=step)
            outputs = pipelined(pipeline, made)
            assert pipeline.explain() == "tables: started early"
        else:
            outputs = plain_loop(lambda each: (step(each)[0].sum(), step(each)[1]), optimizer, made)  # type: ignore[arg-type]
        found.append((outputs, state(model, optimizer)))
    return found


def by_mode(rank: int, world_size: int) -> bool:
    """A pipeline that is used for training, then for evaluation."""
    bare = ByMode()
    model = distribute(bare, {"tables": bare.tables})
    optimizer = dense_optimizer(model)
    pipeline = TrainPipelineSparseDist(model, optimizer, here())
    pipelined(pipeline, batches(rank))
    model.eval()
    before = state(model, optimizer)
    with torch.no_grad():
        wanted = [model(each)[1] for each in batches(rank)]
        outputs = pipelined(pipeline, batches(rank))
    assert_same(before, state(model, optimizer), "after an evaluation")
    return pipeline.explain() == "tables: started early" and all(map(torch.equal, wanted, outputs))


def test_a_function_takes_the_place_of_the_model(ranks):
    for plain, early in ranks(2).run(by_function):
        assert len(early[0]) == STEPS
        assert_same(plain[1], early[1], "of the plain loop")


def test_evaluation_traces_the_model_anew(ranks):
    assert ranks(2).run(by_mode) == [True, True]
