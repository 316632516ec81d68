"""Which optimizer trains a table: the one that was named, in every world and under every plan; and
who comes too late for what backward has updated is told so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from distributed.cases import KINDS, collection, group, on_rank, word
from torch import Tensor, nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner import EmbeddingShardingPlanner
from tutorec.distributed.planner.types import ParameterConstraints
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.models.training import combined_optimizer
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.clipping import GradientClipping, GradientClippingOptimizer
from tutorec.optim.in_backward import follow_steps
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks

RATE = 0.01
Pools = Callable[..., Ranks]


class Model(nn.Module):
    """One table, pooled or not, and a dense layer without bias whose weights are 1: the gradient of
    the sum of its outputs is 1 for each number that was looked up.
    """

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        facts: Any = {"num_embeddings": 6, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}
        self.tables = (
            EmbeddingBagCollection([EmbeddingBagConfig(**facts)])
            if pooled
            else EmbeddingCollection([EmbeddingConfig(**facts)])
        )
        self.top = nn.Linear(4, 1, bias=False)
        nn.init.ones_(self.top.weight)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found: Any = self.tables(features)["f"]
        return self.top(found if isinstance(found, Tensor) else found.values())


BATCH = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


def built(
    kernel: str = "fused", kind: str = "row_wise", pooled: bool = True, **fused_params: Any
) -> DistributedModelParallel:
    """The model over the ranks of the pool; ``fused_params`` are SGD's."""
    torch.manual_seed(0)
    model, env = Model(pooled), ShardingEnv.from_process_group(group())
    sharder = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(
        {"learning_rate": RATE, **fused_params}
    )
    plan = construct_module_sharding_plan(
        model.tables, {"t": word(kind, 0, env.world_size, env.local_size, kernel)}, sharder
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fused_params=.* are not used")
        return DistributedModelParallel(
            model, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
        )


def optimizer_of(model: nn.Module) -> CombinedOptimizer:
    return combined_optimizer(model, lambda params: torch.optim.SGD(params, lr=RATE))


def row(model: DistributedModelParallel) -> list[Tensor]:
    """This rank's piece of the table, copied."""
    return [rows.detach().clone() for name, rows in model.named_parameters() if ".t." in name]


def moved(model: DistributedModelParallel, before: Sequence[Tensor]) -> float:
    """By how much the number of this rank that moved most has moved."""
    pairs = zip(row(model), before, strict=True)
    return max((float((now - then).abs().max()) for now, then in pairs if now.numel()), default=0.0)


def message_of(call: Callable[[], Any]) -> str:
    """Class and text of the error, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# --- the optimizer of a table


def rules_of(model: DistributedModelParallel) -> set[str]:
    """The rules by which backward updates this rank's tables."""
    kernels: Any = [fused for _, fused in model.fused_optimizer.optimizers]
    return {fused.operator.optimizer.kind for fused in kernels}


def default_of(kind: str, rank: int) -> tuple[list[str], set[str], set[float]]:
    """What is said where nobody has named an optimizer, and what trains the tables then."""
    tables, env = collection(), ShardingEnv.from_process_group(group())
    sharder = EmbeddingBagCollectionSharder()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if kind == "the planner's":
            model = DistributedModelParallel(nn.Sequential(tables))
        else:
            words = {
                f"t{i}": word(kind, i, env.world_size, env.local_size, "fused") for i in range(3)
            }
            plan = construct_module_sharding_plan(tables, words, local_size=env.local_size)
            model = DistributedModelParallel(
                nn.Sequential(tables), plan=ShardingPlan({"0": plan}), sharders=[sharder]
            )
    rules = rules_of(model)
    rates = {group["lr"] for group in model.fused_optimizer.param_groups}
    kernels = {each.compute_kernel for each in model.plan.plan["0"].values()}
    assert kernels == {"fused"}, kernels
    assert not [*in_backward_optimizer_filter(model.named_parameters())]
    return [str(each.message) for each in said if each.filename == __file__], rules, rates


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.world4)])
@pytest.mark.parametrize("kind", ["the planner's", *KINDS])
def test_where_nobody_names_one_sgd_trains_in_every_world_and_it_is_said_once(
    ranks: Pools, kind: str, world_size: int
) -> None:
    answers = ranks(world_size).run(default_of, kind)
    for rank, (said, rules, rates) in enumerate(answers):
        assert rules <= {"sgd"}
        assert rates <= {0.01}
        assert len(said) == (rank == 0), said
    assert {"sgd"} == set().union(*(rules for _, rules, _ in answers))
    [message] = answers[0][0]
    assert message.startswith(
        "no optimizer is named for tables 't0', 't1', 't2': SGD with a learning rate of 0.01"
    )
    assert "apply_optimizer_in_backward(" in message
    assert "EmbeddingBagCollectionSharder({'optimizer': " in message


def named_in(way: str, rank: int) -> tuple[list[str], set[str]]:
    tables, sharder = collection(), EmbeddingBagCollectionSharder()
    if way == "in backward":
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    else:
        sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad"})
    replicated = ParameterConstraints(sharding_types=["data_parallel"])
    planner = EmbeddingShardingPlanner(constraints={"t1": replicated})
    plan = planner.collective_plan(nn.Sequential(tables), [sharder])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = DistributedModelParallel(nn.Sequential(tables), plan=plan, sharders=[sharder])
    return [str(each.message) for each in said if each.filename == __file__], rules_of(model)


@pytest.mark.parametrize("way", ["in backward", "in fused_params"])
def test_a_named_optimizer_trains_copies_too_and_nothing_is_said(ranks: Pools, way: str) -> None:
    for said, rules in ranks(2).run(named_in, way):
        assert said == []
        assert rules == {"rowwise_adagrad"}


def unused(way: str, rank: int) -> list[str]:
    tables, env = collection(), ShardingEnv.from_process_group(group())
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "adam", "learning_rate": 0.1} if way == "fused_params" else None
    )
    if way == "in backward":
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    words = {
        "t0": row_wise(),
        "t1": row_wise(compute_kernel="dense"),
        "t2": table_wise(0, compute_kernel="dense"),
    }
    plan = construct_module_sharding_plan(tables, words, local_size=env.local_size)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sharder.shard(tables, plan, env)
    return [str(each.message) for each in said if each.filename == __file__]


@pytest.mark.parametrize(
    ("way", "begin"),
    [
        ("fused_params", "fused_params={'optimizer': 'adam', 'learning_rate': 0.1} are not used"),
        ("in backward", "the optimizer in backward of tables 't1', 't2' is not used"),
    ],
)
def test_what_a_dense_table_does_not_use_is_said_by_table(
    ranks: Pools, way: str, begin: str
) -> None:
    [message], silent = ranks(2).run(unused, way)
    assert message.startswith(begin)
    assert "tables 't1', 't2'" in message
    assert "in_backward_optimizer_filter(model.named_parameters()) yields them" in message
    assert silent == []


def dense_in_backward(rank: int) -> str:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return message_of(lambda: DistributedModelParallel(model))


def test_a_dense_parameter_whose_optimizer_would_see_one_rank_is_refused(ranks: Pools) -> None:
    for message in ranks(2).run(dense_in_backward):
        assert message.startswith(
            "ValueError: dense parameter 'top.weight' and 0 more have an optimizer in backward"
        )


def left_out(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        DistributedModelParallel(
            Model(),
            plan=ShardingPlan({}),
            sharders=[EmbeddingBagCollectionSharder({"learning_rate": RATE})],
        )
    return [str(each.message) for each in said if each.filename == __file__]


def test_a_collection_that_the_plan_leaves_out_is_said_not_to_use_its_optimizer(
    ranks: Pools,
) -> None:
    [message], silent = ranks(2).run(left_out)
    assert message.startswith("the plan does not name 'tables': every rank keeps a copy, for which")
    assert silent == []


# --- what works on gradients between backward() and step()


def late(habit: str, kind: str, pooled: bool, rank: int) -> str:
    """The error of one habit."""
    model = built(kind=kind, pooled=pooled)
    assert any(rows.numel() for rows in row(model))
    optimizer = optimizer_of(model)
    dense: Any = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=RATE),
    )
    loss = lambda: model(on_rank(BATCH)).sum()  # noqa: E731
    if habit.startswith("scaler"):
        stepped = {
            "scaler, combined": optimizer,
            "scaler, dense alone": dense,
            "scaler, torch": dense._optimizer,
        }[habit]
        scaler = torch.amp.GradScaler(model.device.type, init_scale=1024.0)
        scaler.scale(loss()).backward()
        return message_of(lambda: scaler.step(stepped))
    if habit == "passes":
        optimizer.zero_grad()
        loss().backward()
        return message_of(lambda: loss().backward())
    if habit == "passes of a torch optimizer":
        torch_optimizer = dense._optimizer
        loss().backward()
        loss().backward()
        return message_of(torch_optimizer.step)
    if habit == "around":
        around = lambda: GradientClippingOptimizer(  # noqa: E731
            optimizer, GradientClipping.NORM, max_gradient=1.0
        )
        return message_of(around)
    loss().backward()
    clip = getattr(nn.utils, habit)
    return message_of(lambda: clip(model.parameters(), 1.0))


@pytest.mark.parametrize(
    ("kind", "pooled"), [("row_wise", True), ("data_parallel", True), ("column_wise", False)]
)
@pytest.mark.parametrize(
    ("habit", "words"),
    [
        ("scaler, combined", "ValueError: GradScaler comes too late for"),
        ("scaler, dense alone", "ValueError: GradScaler comes too late for"),
        ("scaler, torch", "ValueError: GradScaler comes too late for"),
        ("passes", "RuntimeError: 2 backward passes reach"),
        ("passes of a torch optimizer", "RuntimeError: 2 backward passes reach"),
        ("around", "ValueError: GradientClippingOptimizer comes too late for"),
        ("clip_grad_norm_", "ValueError: clip_grad_norm_ comes too late for"),
        ("clip_grad_value_", "ValueError: clip_grad_value_ comes too late for"),
    ],
)
def test_who_comes_too_late_for_a_fused_table_is_refused_at_once(
    ranks: Pools, habit: str, words: str, kind: str, pooled: bool
) -> None:
    name = "embedding_bags.t.weight" if pooled else "embeddings.t.weight"
    for message in ranks(2).run(late, habit, kind, pooled):
        assert message.startswith(words), message
        assert f"{name}'" in message
        assert "compute_kernel='dense'" in message


def remedies(habit: str, rank: int) -> float:
    """The remedy of each error, tried: by how much the rows move in one step."""
    fused = habit in ("clipping in backward", "a step for each pass")
    model = built(
        "fused" if fused else "dense",
        **({"gradient_clipping": True, "max_gradient": 1.0} if habit.startswith("clip") else {}),
    )
    optimizer, before = optimizer_of(model), row(model)
    scaled = 1000.0 if habit.startswith("clip") else 1.0
    loss = lambda: model(on_rank(BATCH)).sum() * scaled  # noqa: E731
    optimizer.zero_grad()
    if habit == "scaler":
        scaler = torch.amp.GradScaler(model.device.type, init_scale=1024.0)
        scaler.scale(loss()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    elif habit in ("micro-batches", "a step for each pass"):
        for _ in range(4):
            (loss() / 4).backward()
            if fused:
                model.fused_optimizer.step()
        optimizer.step()
    else:
        loss().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
    return moved(model, before)


@pytest.mark.parametrize(
    "habit",
    ["scaler", "micro-batches", "a step for each pass", "clipping in backward", "clip by value"],
)
def test_each_remedy_moves_the_rows_by_rate_times_gradient(ranks: Pools, habit: str) -> None:
    """Each rank's batch gives a row the gradient 1, and ranks average; a kernel clips the gradient
    of each sample, of which the row has one on each rank.
    """
    terms = 2 if habit == "clipping in backward" else 1
    steps = ranks(2).run(remedies, habit)
    assert max(steps) == pytest.approx(RATE * terms, rel=1e-4)


def usual_loops(loop: str, rank: int) -> float:
    """Loops in which no pass comes too late."""
    model = built()
    before = row(model)
    fused = model.fused_optimizer
    dense = torch.optim.SGD(model.module.get_submodule("top").parameters(), lr=0.0)
    for _ in range(20):
        if loop == "two lookups, one pass":
            both = model(on_rank(BATCH)).sum() + model(on_rank(BATCH)).sum()
            (both / 2).backward()
        else:
            loss = model(on_rank(BATCH)).sum()
            dense.zero_grad()
            loss.backward()
        if loop == "evaluation between":
            model(on_rank(BATCH)).sum()
        if loop != "no step at all":
            dense.step()
        if loop == "both step":
            fused.step()
    return moved(model, before)


@pytest.mark.parametrize(
    "loop", ["no step at all", "both step", "evaluation between", "two lookups, one pass"]
)
def test_loops_of_one_pass_a_step_are_left_alone(ranks: Pools, loop: str) -> None:
    assert max(ranks(2).run(usual_loops, loop)) == pytest.approx(20 * RATE, rel=1e-4)


def given_to_torch(kind: str, rank: int) -> list[str]:
    model = built(kind=kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        adam = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            adam.zero_grad()
            model(on_rank(BATCH)).sum().backward()
            adam.step()
    return [str(each.message) for each in said if each.filename == __file__]


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_a_torch_optimizer_says_once_that_it_moves_nothing_of_a_fused_table(
    ranks: Pools, kind: str
) -> None:
    for said in ranks(2).run(given_to_torch, kind):
        [message] = said
        assert message.startswith("Adam moves nothing of parameter 'embedding_bags.t.weight'")
        assert "in_backward_optimizer_filter(model.named_parameters())" in message


def test_a_sharded_collection_needs_no_model_around_it_to_be_told_of() -> None:
    tables = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "t", feature_names=["f"])])
    sharder = EmbeddingBagCollectionSharder({"learning_rate": RATE})
    plan = construct_module_sharding_plan(tables, {"t": table_wise(0)}, sharder, 1, 1)
    sharded = sharder.shard(tables, plan, ShardingEnv.from_local(1, 0))
    with pytest.warns(UserWarning, match=r"SGD.*nothing.*parameter 'embedding_bags\.t"):
        torch.optim.SGD(sharded.parameters(), lr=0.1).step()


class WithItsOwn(nn.Linear):
    """A model whose optimizer in backward is of a class of its caller's."""

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        kept = {"bias": self.bias}
        return CombinedOptimizer(
            [KeyedOptimizerWrapper(kept, lambda params: torch.optim.SGD(params, lr=1.0))]
        )


def test_a_model_with_an_optimizer_in_backward_of_its_own_takes_steps() -> None:
    model = WithItsOwn(1, 1)
    follow_steps(model)
    model(torch.ones(1, 1)).sum().backward()
    before = model.weight.detach().clone()
    torch.optim.SGD([model.weight], lr=1.0).step()
    assert torch.equal(model.weight, before - 1)


def test_an_unsharded_table_with_an_optimizer_in_backward_is_told_of_as_well() -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": RATE})
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    model(BATCH).sum().backward()
    with pytest.warns(UserWarning, match=r"nothing.*shape \[6, 4\]"):
        adam.step()
    adam.step()
