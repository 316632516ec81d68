"""Programs for TorchRec run as they are: what they rely on, in their own words."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from distributed.cases import batch, collection, serving
from torch import nn

from tutorec.awaitable import LazyNoWait
from tutorec.distributed import comm
from tutorec.distributed.core.cache_params import CacheParams, KeyValueParams
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import (
    BoundsCheckMode,
    ParameterSharding,
    ShardingPlan,
)
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.sharding_plan import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tutorec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineFusedSparseDist,
    TrainPipelineSparseDist,
)
from tutorec.errors import PlannerError
from tutorec.inference.modules import quantize_embeddings
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device
from tutorec.types import DataType

RATE = 0.1


def one_dense_table(
    rank: int, world_size: int
) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A planner that is asked for one kernel, all tables with an optimizer in backward, and one of
    the caller's.
    """
    model = nn.Sequential(collection())
    constraints = {"t1": ParameterConstraints(compute_kernels=["dense"])}
    others = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in ("t0", "t2")}
    planner = EmbeddingShardingPlanner(constraints={**constraints, **others})
    plan = planner.collective_plan(model, [EmbeddingBagCollectionSharder()])
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": RATE})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the optimizer in backward of table 't1' is not used")
        parallel = DistributedModelParallel(
            model, plan=plan, sharders=[EmbeddingBagCollectionSharder()]
        )
    tables = parallel.module[0]
    assert tables.unsharded_module_type is EmbeddingBagCollection
    held = {name for name, _ in tables.named_parameters("tables")}
    replicated = {"tables.embedding_bags.t1.weight"}
    assert set(tables.sharded_parameter_names("tables")) == held - replicated < held
    for prefix, begin in (("", "0"), ("model", "model.0")):
        names = DistributedModelParallel._sharded_parameter_names(parallel, prefix)
        assert sorted(names) == sorted(tables.sharded_parameter_names(begin))
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
    return (
        plan.plan["0"]["t1"].sharding_type,
        {name: p.detach() for name, p in dense.params.items()},
        weights,
    )


def test_a_table_that_is_asked_to_be_dense_is_replicated_and_trained_by_the_caller(ranks):
    model = collection()
    optimizers = [
        RowWiseAdagrad([bag.get_parameter("weight")], lr=RATE, eps=1e-8)
        for bag in model.embedding_bags.values()
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
            torch.testing.assert_close(
                weight, model.get_parameter(name.removeprefix("0.")).detach(), msg=name
            )


def test_neutral_settings_of_torchrec_are_accepted():
    neutral = {
        "output_dtype": DataType.FP32,
        "bounds_check_mode": BoundsCheckMode.IGNORE,
        "enforce_hbm": None,
    }
    spec = optimizer_spec(
        {"learning_rate": 0.5, "stochastic_rounding": False, "prefetch_pipeline": False, **neutral}
    )
    assert spec == optimizer_spec({"learning_rate": 0.5})
    with pytest.raises(
        ValueError,
        match=r"output_dtype=FP16.*not.*DataType\.FP32",
    ):
        optimizer_spec({"output_dtype": DataType.FP16})


def test_an_entry_of_a_plan_takes_all_fields_of_torchrec_and_prints_those_that_are_set():
    entry = ParameterSharding(
        "table_wise", "fused", [0], None, None, True, False, BoundsCheckMode.WARNING, None, None
    )
    assert (entry.enforce_hbm, entry.stochastic_rounding) == (True, False)
    assert repr(entry).endswith(
        "enforce_hbm=True, stochastic_rounding=False, "
        "bounds_check_mode=<BoundsCheckMode.WARNING: 1>)"
    )
    assert "cache_params" not in repr(entry)


@pytest.mark.parametrize("kernel", ["key_value", "dram_virtual_table", "fused_triton"])
def test_a_kernel_that_only_torchrec_has_is_refused_by_its_name(kernel: str):
    planner = EmbeddingShardingPlanner(
        topology=Topology(2, "cpu"),
        constraints={"t1": ParameterConstraints(compute_kernels=[kernel])},
    )
    with pytest.raises(
        PlannerError, match=f"{kernel}.*EmbeddingBagCollectionSharder does not build this kernel"
    ):
        planner.plan(collection(), [EmbeddingBagCollectionSharder()])


def test_callbacks_of_an_awaitable_are_applied_once():
    ready = LazyNoWait(torch.ones(2))
    ready.callbacks.append(lambda value: value + 1)
    ready.callbacks.append(lambda value: value * 3)
    assert torch.equal(ready.wait(), torch.full((2,), 6.0))
    assert torch.equal(ready + 0, torch.full((2,), 6.0))


def small(where: str) -> nn.Module:
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(16, 8, f"t{number}", feature_names=[f"f{number}"]) for number in (0, 1)
    ]
    return nn.Sequential(EmbeddingBagCollection(tables, device=torch.device(where)))


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_a_quantized_model_is_sharded_on_meta_and_loaded_afterwards(kind: str):
    served = quantize_embeddings(small("cpu"), dtype=torch.qint8, inplace=True)
    shell = quantize_embeddings(small("meta"), dtype=torch.qint8, inplace=True)
    words = {
        "table_wise": table_wise(1),
        "row_wise": row_wise(),
        "column_wise": column_wise(ranks=[1, 0]),
    }
    plan = construct_module_sharding_plan(
        shell[0], apply_to_all(shell[0], words[kind]), world_size=2
    )
    sharded = DistributedModelParallel(
        shell,
        device=serving(2),
        env=ShardingEnv.from_local(2, 0),
        plan=ShardingPlan({"0": plan}),
        init_data_parallel=False,
    )
    ids = KeyedJaggedTensor(
        ["f0", "f1"], torch.tensor([1, 15, 3]), lengths=torch.tensor([1, 0, 1, 1])
    ).to(serving(2))
    with pytest.warns(
        UserWarning,
        match=r"tables \['t0', 't1'\]",
    ):
        assert not sharded(ids).values().any()
    sharded.load_state_dict(served.state_dict())
    assert torch.equal(sharded(ids).values(), served.to(serving(2))(ids).values())


def copied(rank: int, world_size: int) -> list[bool]:
    """A quantized model with a dense layer in DDP, and copies of it: what each of them holds."""
    here, meta = device(), torch.device("meta")
    served = quantize_embeddings(small("cpu"), dtype=torch.qint8, inplace=True)
    served.append(nn.Linear(3, 2))
    model = DistributedModelParallel(served)
    ids = KeyedJaggedTensor(
        ["f0", "f1"], torch.tensor([1, 15, 3]), lengths=torch.tensor([1, 0, 1, 1])
    ).to(here)
    twin, moved = model.copy(here), model.copy(meta)
    expected, of_twin = (each.module.get_submodule("0")(ids).values() for each in (model, twin))
    with torch.no_grad():
        for held in [*twin.parameters(), *twin.module.get_submodule("0").buffers()]:
            held.zero_()
    weights = [each.module.get_parameter("1.weight") for each in (model, twin, moved)]
    return [
        torch.equal(of_twin, expected),
        torch.equal(model.module.get_submodule("0")(ids).values(), expected),
        bool(expected.any() and weights[0].any() and not weights[1].any()),
        weights[2].is_meta and not weights[0].is_meta,
        model.device == here and moved.device == meta,
    ]


def test_a_model_that_serves_is_copied_to_another_device(ranks):
    assert ranks(1).run(copied) == [[True] * 5]


def initialized_again(
    rank: int, world_size: int
) -> tuple[dict[str, str], dict[str, list[torch.Tensor]]]:
    """Sharding types of a collection's tables; this rank's rows before and after."""
    torch.manual_seed(10 + rank)
    module = small("cpu")
    plan = construct_module_sharding_plan(
        module[0], {"t0": row_wise(), "t1": data_parallel()}, world_size=world_size
    )
    model = DistributedModelParallel(module, plan=ShardingPlan({"0": plan}))
    sharded: Any = model.module.get_submodule("0")
    rows: dict[str, list[torch.Tensor]] = {"t0": [], "t1": []}
    for _ in range(2):
        for held in sharded.local_shards():
            rows[held.table.name].append(held.rows[0].detach().cpu().clone())
        sharded.reset_parameters()
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        model.copy(device())
    types = {name: entry.sharding_type for name, entry in sharded.module_sharding_plan.items()}
    return types, rows


def test_sharded_rows_are_initialized_again_and_replicas_stay_equal(ranks):
    (types, first), (_, second) = ranks(2).run(initialized_again)
    assert types == {"t0": "row_wise", "t1": "data_parallel"}
    for name in types:
        before, after = first[name]
        assert not torch.equal(before, after) and after.abs().max() <= 0.25  # 1 / sqrt(16 rows)
        assert torch.equal(second[name][1], after) == (name == "t1")


def test_small_signatures_are_torchrecs():
    sharder, weight = EmbeddingBagCollectionSharder(), torch.empty(8, 4)
    assert sharder.storage_usage(weight, "cpu", "fused") == {"ddr": 128}
    assert sharder.storage_usage(weight, "cuda", "fused") == {"hbm": 128}
    assert ShardingEnv(2, 1, None, False).rank == 1
    with pytest.raises(ValueError, match=r"output_dtensor=True.*ShardedTensors"):
        ShardingEnv(2, 1, output_dtensor=True)


class OfNoTables(ModuleSharder[nn.Linear]):
    """What a program says of a module of its own: the base class has the rest."""

    @property
    def module_type(self) -> type[nn.Linear]:
        return nn.Linear

    def shard(self, module, params, env, device=None, module_fqn=None):
        raise NotImplementedError


def test_a_sharder_is_made_from_the_base_class():
    codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
    sharder = OfNoTables(qcomm_codecs_registry=codecs)
    assert sharder.qcomm_codecs_registry is codecs
    assert list(sharder.shardable_parameters(nn.Linear(2, 3))) == ["weight", "bias"]
    assert sharder.sharding_types("cpu") == ["data_parallel"]
    assert isinstance(EmbeddingBagCollectionSharder(), ModuleSharder)


class SlowSharder(EmbeddingBagCollectionSharder):
    @property
    def fused_params(self) -> dict[str, Any]:
        return {"learning_rate": 0.25}


def test_a_sharder_may_override_its_fused_params_and_names_what_it_makes():
    tables = collection()
    plan = construct_module_sharding_plan(
        tables, apply_to_all(tables, table_wise(0)), world_size=1, local_size=1, device_type="cpu"
    )
    parts = SlowSharder().shard(tables, plan, ShardingEnv.from_local(1, 0))
    assert {group["lr"] for group in parts.fused_optimizer.param_groups} == {0.25}
    assert type(parts) is SlowSharder().sharded_module_type


def test_what_a_constraint_says_of_a_table_is_in_its_entry():
    given: dict[str, Any] = {
        "enforce_hbm": False,
        "stochastic_rounding": True,
        "bounds_check_mode": BoundsCheckMode.IGNORE,
        "key_value_params": KeyValueParams(ssd_rocksdb_shards=4),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = EmbeddingShardingPlanner(
            Topology(1, "cpu"), constraints={"t1": ParameterConstraints(**given)}
        ).plan(nn.Sequential(collection()), [EmbeddingBagCollectionSharder()])
    entries: Any = plan.plan["0"]
    assert {name: getattr(entries["t1"], name) for name in given} == given
    assert {getattr(entries["t0"], name) for name in given} == {None}


def test_a_codec_decodes_to_float32_unless_told_otherwise():
    codec = get_qcomm_codecs(QCommsConfig(CommType.FP16, forward_loss_scale=4.0)).forward
    assert codec is not None
    values = torch.tensor([1.0, 0.3])
    torch.testing.assert_close(codec.decode(codec.encode(values)), values, rtol=2**-11, atol=0.0)
    assert codec.decode(codec.encode(values, None), torch.float64).dtype == torch.float64


def test_modules_that_exchange_rows_take_torchrecs_arguments():
    rows = torch.rand(3, 2)
    for exchange, splits in (
        (PooledEmbeddingsAllToAll(None, [2]), {"batch_size_per_rank": [3]}),
        (PooledEmbeddingsReduceScatter(None), {"input_splits": [3]}),
    ):
        assert exchange(local_embs=rows, **splits).wait() is rows


def test_arguments_that_torchrec_has_not_are_given_by_name():
    assert CacheParams(load_factor=0.1, folder="/data").folder == "/data"
    assert hash(CacheParams(load_factor=0.1)) == hash(CacheParams(load_factor=0.1))
    made: list[tuple[Any, tuple[Any, ...]]] = [
        (CacheParams, (None,) * 7),
        (EmbeddingStorageEstimator, (Topology(2, "cpu"), None, True)),
        (TrainPipelineSparseDist, (*(None,) * 10, True)),
        (TrainPipelineFusedSparseDist, (*(None,) * 10, True)),
    ]
    for kind, arguments in made:
        with pytest.raises(TypeError, match="positional arguments"):
            kind(*arguments)


def uneven_rows(rank: int, world_size: int) -> list[bool]:
    torch.manual_seed(0)
    whole = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])]).to(
        device()
    )
    ids = KeyedJaggedTensor(["f"], torch.tensor([0, 9, 3, 7]), lengths=torch.tensor([2, 2])).to(
        device()
    )
    equal = []
    for word in (row_wise(([3, 9], "cpu")), row_wise(num_buckets=5), table_wise(1, "cpu")):
        plan = construct_module_sharding_plan(
            whole, {"t": word}, world_size=world_size, local_size=world_size
        )
        parts = EmbeddingBagCollectionSharder().shard(
            whole, plan, ShardingEnv.from_process_group(comm.default_group())
        )
        equal.append(torch.allclose(parts(ids).values(), whole(ids).values()))
    return equal


def test_plans_with_devices_sizes_and_buckets_are_built(ranks):
    assert ranks(2).run(uneven_rows) == [[True] * 3] * 2
