"""From a quantized model to one over devices: the plan is made, fits, and changes no result."""

from __future__ import annotations

import pytest
import torch
from quant.equals import bags, rows
from torch import nn

from tutorec.distributed.planner.cost import kernel_model
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.topology import Topology
from tutorec.errors import PlannerError
from tutorec.inference.modules import shard_quant_model
from tutorec.inference.scripting import script_model
from tutorec.inference.serving import with_tensor_inputs
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

TABLES = [
    EmbeddingBagConfig(1000 * (i + 1), 64, f"t{i}", feature_names=[f"f{i}"]) for i in range(4)
]


class Model(nn.Module):
    """Bags and rows, and something dense."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = bags(TABLES, torch.int8)[1]
        self.rows = rows([EmbeddingConfig(50, 8, "history", feature_names=["f0"])], torch.quint4x2)[
            1
        ]
        self.dense = nn.Linear(256, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.dense(self.bags(features).values()) + self.rows(features)["f0"].values().sum()


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        [f"f{i}" for i in range(4)], torch.arange(8), lengths=torch.ones(8, dtype=torch.long)
    )


def test_tables_stay_whole_and_results_are_those_of_the_unsharded_model():
    model = Model()
    expected = model(batch())
    sharded, plan = shard_quant_model(model, world_size=3)
    assert sharded is model
    assert set(plan.plan) == {"bags", "rows"}
    entries = {name: entry for of in plan.plan.values() for name, entry in of.items()}
    assert {(entry.sharding_type, entry.compute_kernel) for entry in entries.values()} == {
        ("table_wise", "quant")
    }
    assert {rank for entry in entries.values() for rank in entry.ranks} == {0, 1, 2}
    assert torch.equal(sharded(batch()), expected)
    again, same_plan = shard_quant_model(Model(), world_size=3, sharding_plan=plan)
    assert same_plan is plan
    assert again.bags.devices == [torch.device("cpu")] * 3


def test_a_collection_by_itself_is_returned_sharded():
    _, quantized = bags(TABLES, torch.int8)
    sharded, plan = shard_quant_model(quantized)
    assert type(sharded).__name__ == "ShardedQuantEmbeddingBagCollection"
    assert list(plan.plan) == [""]
    assert torch.equal(sharded(batch()).values(), quantized(batch()).values())


def test_rows_are_cut_where_a_device_has_too_little_memory():
    _, quantized = bags(TABLES, torch.int8)
    with pytest.raises(PlannerError, match="t3"):
        shard_quant_model(quantized, world_size=2, device_memory_size=300_000)
    words = {
        one.name: ParameterConstraints(sharding_types=["table_wise", "row_wise"]) for one in TABLES
    }
    sharded, plan = shard_quant_model(
        quantized, world_size=4, device_memory_size=300_000, constraints=words
    )
    assert plan.plan[""]["t3"].sharding_type == "row_wise"
    assert torch.allclose(sharded(batch()).values(), quantized(batch()).values(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "row_bytes"), [(torch.int8, 80), (torch.quint4x2, 48), (torch.float32, 256)]
)
def test_the_planner_counts_packed_rows_and_no_backward(kind, row_bytes):
    _, quantized = bags(TABLES[:1], kind)
    plan = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=8).plan(quantized)
    option = plan.report.inputs.options[0]
    assert option.compute_kernel == "quant"
    perf = option.shard_arrays().perf
    assert perf[:, 0].sum() > 0
    assert not perf[:, 1:].any()  # devices of one memory: nothing travels, nothing is updated
    ids_and_lengths, rows_given = 8 * (8 + 8), 4 * 8 * 64
    whole = next(each for each in plan.report.inputs.options if each.sharding_type == "table_wise")
    assert whole.shard_arrays().storage.sum() == 1000 * row_bytes + ids_and_lengths + rows_given
    assert kernel_model("quant").serves
    assert "explain" in dir(plan)
    assert "1,000 rows of 64 columns" in str(plan.explain("t0"))


def test_gpus_pay_for_the_way_to_them():
    _, quantized = bags(TABLES[:1], torch.int8)
    options = (
        EmbeddingShardingPlanner(Topology(2, "cuda"), batch_size=8)
        .plan(quantized)
        .report.inputs.options
    )
    perf = next(each for each in options if each.sharding_type == "table_wise").shard_arrays().perf
    assert perf[0, 1] > 0
    assert perf[0, 4] > 0
    assert not perf[:, 2:4].any()


def test_models_without_quantized_tables_and_devices_that_are_not_there_are_named():
    with pytest.raises(ValueError, match=r"not quantized: tutorec\.quantize\(model\)"):
        shard_quant_model(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"'cpu'.*'cuda', not.*'meta'"):
        shard_quant_model(Model(), sharding_device="meta")
    with pytest.raises(ValueError, match=r"world_size=0.*least 1"):
        shard_quant_model(Model(), world_size=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="this process sees 0 GPUs"):
        shard_quant_model(Model(), compute_device="cuda")


def test_a_batch_that_is_built_inside_the_graph_is_traced_like_one_from_outside():
    sharded, _ = shard_quant_model(bags(TABLES, torch.int8)[1], world_size=2)
    plain = with_tensor_inputs(sharded, [batch()])
    scripted = script_model(plain)
    found = scripted(batch().values(), batch().lengths())
    expected = plain(batch().values(), batch().lengths())
    assert torch.equal(values_of(found), values_of(expected))
    assert torch.equal(values_of(expected), sharded(batch()).values())


def values_of(found):
    return found if isinstance(found, torch.Tensor) else found.values()
