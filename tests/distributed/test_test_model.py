from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.test_utils.emb_sharder import TestEBCSharder
from tutorec.distributed.test_utils.test_model import ModelInput, TestSparseNN
from tutorec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.optim.keyed import KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

TABLES = [
    EmbeddingBagConfig(20 + i, 4 * i + 4, f"t{i}", feature_names=[f"f{i}", f"g{i}"])
    for i in range(2)
]
WEIGHTED = [EmbeddingBagConfig(30, 8, "w", feature_names=["h"])]


def _jagged(batch: ModelInput) -> list[KeyedJaggedTensor]:
    assert batch.idlist_features is not None and batch.idscore_features is not None
    return [batch.idlist_features, batch.idscore_features]


@pytest.mark.parametrize("variable", [False, True])
def test_the_ranks_batches_are_parts_of_the_batch_of_all(variable: bool) -> None:
    whole, parts = ModelInput.generate(
        4, 3, 5, TABLES, WEIGHTED, variable_batch_size=variable, random_seed=1
    )
    assert torch.equal(torch.cat([part.float_features for part in parts]), whole.float_features)
    assert torch.equal(torch.cat([part.label for part in parts]), whole.label)
    for of_whole, *of_parts in zip(_jagged(whole), *map(_jagged, parts), strict=True):
        assert [of_part.stride() for of_part in of_parts] == ([4, 3, 2] if variable else [4, 4, 4])
        for key in of_whole.keys():
            bags = of_whole[key]
            assert torch.equal(torch.cat([part[key].values() for part in of_parts]), bags.values())
            lengths = bags.lengths().view(3, 4)
            for rank, part in enumerate(of_parts):
                assert torch.equal(part[key].lengths(), lengths[rank, : part.stride()])
                assert not lengths[rank, part.stride() :].any()
    assert _jagged(whole)[1].weights().shape == _jagged(whole)[1].values().shape


def test_batches_have_the_types_that_are_named() -> None:
    given = {"indices_dtype": torch.int32, "lengths_dtype": torch.int32, "random_seed": 1}
    long, _ = ModelInput.generate(4, 2, 5, TABLES, WEIGHTED, random_seed=1)
    whole, parts = ModelInput.generate(4, 2, 5, TABLES, WEIGHTED, **given)
    from_offsets, _ = ModelInput.generate(
        4, 2, 5, TABLES, WEIGHTED, use_offsets=True, offsets_dtype=torch.int32, random_seed=1
    )
    for batch in (whole, *parts):
        for jagged in _jagged(batch):
            assert (jagged.values().dtype, jagged.lengths().dtype) == (torch.int32, torch.int32)
    for expected, narrow, other in zip(*map(_jagged, (long, whole, from_offsets)), strict=True):
        assert torch.equal(narrow.values(), expected.values().int())
        assert torch.equal(narrow.lengths(), expected.lengths().int())
        assert torch.equal(other.offsets(), expected.offsets().int())
        assert (other.values().dtype, other.offsets().dtype) == (torch.int64, torch.int32)


def test_lengths_and_ids_stay_below_their_limits() -> None:
    limits = [1, 2, 3, 4]
    whole, _ = ModelInput.generate(
        64, 2, 5, TABLES, WEIGHTED, tables_pooling=[3, 6], max_feature_lengths=limits
    )
    plain = _jagged(whole)[0]
    for key, limit, rows in zip(plain.keys(), limits, [20, 20, 21, 21], strict=True):
        assert 1 <= int(plain[key].lengths().min()) <= int(plain[key].lengths().max()) <= limit
        assert int(plain[key].values().max()) < rows
    zeros, _ = ModelInput.generate(4, 2, 5, TABLES, [], randomize_indices=False)
    assert (
        zeros.idscore_features is None and not zeros.label.any() and not zeros.float_features.any()
    )
    assert zeros.idlist_features is not None and not zeros.idlist_features.values().any()


def test_a_mean_length_for_too_few_tables_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tables_pooling.*1 numbers.*2 tables"):
        ModelInput.generate(4, 1, 5, TABLES, [], tables_pooling=[3])


def test_the_model_is_its_parts_in_plain_torch() -> None:
    [batch] = ModelInput.generate(6, 1, 10, TABLES, WEIGHTED, random_seed=2)[1]
    model = TestSparseNN(
        TABLES, weighted_tables=WEIGHTED, submodule_kwargs={"dense_arch_hidden_sizes": [7]}
    )
    pooled = [
        model.sparse.ebc(_jagged(batch)[0]).values(),
        model.sparse.weighted_ebc(_jagged(batch)[1]).values(),
    ]
    columns = torch.cat([model.dense(batch.float_features), *pooled], dim=1)
    expected = model.over.dhn_arch(columns).mean(1).sigmoid() + 1
    loss, prediction = model(batch)
    torch.testing.assert_close(prediction, expected)
    torch.testing.assert_close(
        loss, nn.functional.binary_cross_entropy_with_logits(expected, batch.label)
    )
    assert torch.equal(model.eval()(batch), prediction)


def test_a_copy_has_weights_of_its_own() -> None:
    model = TestSparseNN(TABLES)
    copied = model.copy(device())
    assert type(copied) is TestSparseNN
    before = model.dense.linear.weight.detach().clone()
    with torch.no_grad():
        copied.dense.linear.weight.zero_()
    assert before.any() and torch.equal(model.dense.linear.weight, before)


def test_samples_that_the_features_lack_have_empty_bags() -> None:
    batch = ModelInput.generate(4, 2, 10, TABLES, WEIGHTED, variable_batch_size=True)[1][1]
    pooled = TestSparseNN(TABLES, weighted_tables=WEIGHTED).sparse_forward(batch).values()
    assert pooled.shape == (4, 32) and pooled[:3].any(dim=1).all() and not pooled[3].any()


def test_what_is_not_supported_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="zch_kwargs is not supported"):
        TestSparseNN(TABLES, zch_kwargs={})


def _train(rank: int, world_size: int, kind: str, kernel: str) -> list[Tensor]:
    """Losses of three steps through the pipeline, every table sharded in one way."""
    torch.manual_seed(3)
    model = TestSparseNN(TABLES, weighted_tables=WEIGHTED)
    sharder = TestEBCSharder(kind, kernel, {"learning_rate": 0.5})
    topology = Topology(world_size, device().type)
    names = [table.name for table in [*TABLES, *WEIGHTED]]
    constraints = {name: ParameterConstraints(min_partition=4) for name in names}
    plan = EmbeddingShardingPlanner(topology, constraints=constraints).collective_plan(
        model, [sharder]
    )
    assert {entry.sharding_type for module in plan.plan.values() for entry in module.values()} == {
        kind
    }
    sharded = DistributedModelParallel(
        model.to(device()), device=device(), plan=plan, sharders=[sharder]
    )
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.5),
    )
    batches = iter(
        [
            ModelInput.generate(4, world_size, 10, TABLES, WEIGHTED, random_seed=s)[1][rank]
            for s in range(3)
        ]
    )
    pipeline = TrainPipelineSparseDist(sharded, optimizer, device())
    return [pipeline.progress(batches)[1].detach().cpu() for _ in range(3)]


def test_the_model_trains_alike_under_every_sharder(ranks) -> None:
    world = ranks(2)
    expected = world.run(_train, kind="table_wise", kernel="fused")
    assert not torch.allclose(expected[0][0], expected[1][0])
    for kind in ("row_wise", "column_wise", "data_parallel"):
        torch.testing.assert_close(world.run(_train, kind=kind, kernel="fused"), expected)
