"""Programs for TorchRec run as they are: what they rely on, in their own words."""

from __future__ import annotations

import warnings

import torch
from distributed.cases import batch, collection
from torch import nn

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad

RATE = 0.1


def one_dense_table(rank: int, world_size: int) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A planner that is asked for one kernel, all tables with an optimizer in backward, and one of the caller's."""
    model = nn.Sequential(collection())
    constraints = {"t1": ParameterConstraints(compute_kernels=["dense"])}
    others = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in ("t0", "t2")}
    planner = EmbeddingShardingPlanner(constraints={**constraints, **others})
    plan = planner.collective_plan(model, [EmbeddingBagCollectionSharder()])
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": RATE})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "table 't1' has the compute kernel 'dense'")
        parallel = DistributedModelParallel(model, plan=plan, sharders=[EmbeddingBagCollectionSharder()])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(parallel.module.named_parameters())),
        lambda params: RowWiseAdagrad(params, lr=RATE, eps=1e-8),
    )
    optimizer = CombinedOptimizer([("dense", dense), ("fused", parallel.fused_optimizer)])
    for step in range(3):
        optimizer.zero_grad()
        parallel(batch(10 * step + rank, 4)).values().square().sum().backward()
        optimizer.step()
    weights = {name: value.detach().clone() for name, value in parallel.module.named_parameters()}
    return plan.plan["0"]["t1"].sharding_type, {name: p.detach() for name, p in dense.params.items()}, weights


def test_a_table_that_is_asked_to_be_dense_is_replicated_and_trained_by_the_caller(ranks):
    model = collection()
    optimizers = [
        RowWiseAdagrad([bag.get_parameter("weight")], lr=RATE, eps=1e-8) for bag in model.embedding_bags.values()
    ]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [model(batch(10 * step + rank, 4)).values().square().sum() for rank in range(2)]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for kind, by_caller, weights in ranks(2).run(one_dense_table):
        assert kind == "data_parallel"
        assert [*by_caller] == ["0.embedding_bags.t1.weight"]
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name.removeprefix("0.")).detach(), msg=name)
