"""tutorec.quantize: every collection of a model, nothing else of it, and never two copies of its
tables.
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from quant.equals import dequantized
from torch import nn
from torch.testing import assert_close

import tutorec
from tutorec.datasets.random import shop
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.test_utils.test_model import TestSparseNN
from tutorec.distributed.utils import CopyableMixin
from tutorec.inference.modules import (
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from tutorec.models.dlrm import DLRM
from tutorec.models.two_tower import TwoTower
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tutorec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from tutorec.quant.packing import unpack_rows
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType


def bags(*names: str, rows: int = 10, columns: int = 8) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(rows, columns, name) for name in names])


def batch(*keys: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        list(keys), torch.tensor([3, 1, 3] * len(keys)), lengths=torch.tensor([2, 0, 1] * len(keys))
    )


class Two(nn.Module):
    """Two collections that share a table's name, one of them twice, and float parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = bags("a", "b")
        self.second = EmbeddingCollection([EmbeddingConfig(10, 8, "a")])
        self.again = self.first
        self.also = nn.ModuleDict({"first": self.first})
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.first(features).values()) + self.second(features)["a"].values().sum()


FEATURES = batch("a", "b")


def test_a_dlrm_scores_as_before_up_to_what_its_formats_allow():
    tables = [
        EmbeddingBagConfig(500, 8, "t_user", feature_names=["user"]),
        EmbeddingBagConfig(3000, 8, "t_item", feature_names=["item"]),
    ]
    model = DLRM(
        EmbeddingBagCollection(tables), 4, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[8, 1]
    )
    sample = next(shop().batches(32))
    expected = model(sample.dense_features, sample.sparse_features)
    quantized = tutorec.quantize(model)
    read = copy.deepcopy(model)
    read.sparse_arch.embedding_bag_collection = dequantized(
        quantized.sparse_arch.embedding_bag_collection
    )
    found = quantized(sample.dense_features, sample.sparse_features)
    assert_close(found, read(sample.dense_features, sample.sparse_features))
    assert_close(found, expected, rtol=0, atol=0.01)
    assert torch.equal(model(sample.dense_features, sample.sparse_features), expected)
    floats = {
        name: part
        for name, part in model.state_dict().items()
        if "embedding_bag_collection" not in name
    }
    for name, part in floats.items():
        assert torch.equal(quantized.state_dict()[name], part)
        assert quantized.state_dict()[name].data_ptr() != part.data_ptr()


def test_two_towers_keep_their_queries():
    ebc = bags("user", "item", rows=50)
    towers = TwoTower(ebc, ["user"], ["item"], [8])
    features = batch("user", "item")
    expected = towers(features)
    for found, before in zip(tutorec.quantize(towers)(features), expected, strict=True):
        assert_close(found, before, rtol=0, atol=0.01)
    users = batch("user")
    assert_close(tutorec.quantize(towers).queries(users), towers.queries(users), rtol=0, atol=0.01)


@pytest.mark.parametrize("inplace", [False, True])
def test_all_collections_are_replaced_and_shared_ones_stay_shared(inplace):
    model = Two()
    expected, over = model(FEATURES), model.over
    quantized = tutorec.quantize(model, inplace=inplace)
    assert (quantized is model) == inplace
    assert (quantized.over is over) == inplace
    assert type(quantized.first) is QuantEmbeddingBagCollection
    assert type(quantized.second) is QuantEmbeddingCollection
    assert quantized.first is quantized.again is quantized.also["first"]
    assert_close(quantized(FEATURES), expected, rtol=0, atol=0.05)
    assert (type(model.first) is EmbeddingBagCollection) == (not inplace)
    if not inplace:
        assert torch.equal(model(FEATURES), expected)


def test_a_collection_by_itself_is_returned_quantized():
    ebc = bags("a", "b")
    weights = {name: table.weight.detach().clone() for name, table in ebc.embedding_bags.items()}
    before = ebc(FEATURES).values()
    assert_close(tutorec.quantize(ebc)(FEATURES).values(), before, rtol=0, atol=0.02)
    assert torch.equal(ebc(FEATURES).values(), before)
    kept = ebc.embedding_bags["a"].weight
    quantized = tutorec.quantize(ebc, inplace=True)
    assert_close(quantized(FEATURES).values(), before, rtol=0, atol=0.02)
    assert torch.equal(kept, weights["a"])
    assert all(part.is_meta for part in ebc.parameters())


def test_formats_are_given_for_all_tables_and_for_some_by_name_or_full_name():
    quantized = tutorec.quantize(
        Two(),
        torch.quint4x2,
        per_table={"a": torch.float16, "second.a": DataType.INT8, "b": torch.quint2x4},
    )
    kinds = {
        f"{path}.{table.name}": table.data_type
        for path, tables in (
            ("first", quantized.first.embedding_bag_configs()),
            ("second", quantized.second.embedding_configs()),
        )
        for table in tables
    }
    assert kinds == {"first.a": DataType.FP16, "first.b": DataType.INT2, "second.a": DataType.INT8}


def test_what_hangs_on_a_collection_stays_on_it():
    model = Two().train()
    seen: list[str] = []
    model.first.register_forward_pre_hook(lambda module, arguments: seen.append("before"))
    model.first.register_forward_hook(
        lambda module, arguments, keywords, result: seen.append("after"), with_kwargs=True
    )
    quantized = tutorec.quantize(model)
    quantized(FEATURES)
    assert seen == ["before", "after"]
    assert quantized.training
    assert quantized.first.training
    assert not quantized.over.weight.requires_grad
    assert model.over.weight.requires_grad
    assert not tutorec.quantize(Two().eval()).first.training


def test_trained_tables_are_quantized_as_they_are():
    model = Two()
    model(FEATURES).sum().backward()
    quantized = tutorec.quantize(model, torch.float32, inplace=False)
    read = unpack_rows(quantized.first.packed_rows("a"), 8, DataType.FP32)
    assert torch.equal(read, model.first.embedding_bags["a"].weight.detach())


def test_a_table_that_the_model_holds_elsewhere_is_not_given_up():
    model = Two()
    model.item = model.first.embedding_bags["a"]
    expected = model.item.weight.detach().clone()
    tutorec.quantize(model, inplace=True)
    assert torch.equal(model.item.weight, expected)


def test_a_table_of_two_collections_is_packed_into_both():
    model = Two()
    model.other = bags("a", "c")
    model.other.embedding_bags["a"] = model.first.embedding_bags["a"]
    tutorec.quantize(model, inplace=True)
    assert torch.equal(model.other.packed_rows("a"), model.first.packed_rows("a"))
    assert model.first.packed_rows("a").count_nonzero()


def test_models_on_the_meta_device_are_quantized_without_numbers():
    model = Two().to("meta")
    quantized = tutorec.quantize(model, inplace=True)
    assert all(part.is_meta for part in quantized.buffers())
    whole = tutorec.quantize(Two())
    quantized.to_empty(device=FEATURES.device()).load_state_dict(whole.state_dict())
    assert torch.equal(quantized(FEATURES), whole(FEATURES))


def bad_model(number: float) -> Two:
    model = Two()
    with torch.no_grad():
        model.second.embeddings["a"].weight[7, 3] = number
    return model


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e6])
def test_a_table_that_cannot_be_packed_leaves_the_model_as_it_was(number):
    model = bad_model(number)
    state = {name: part.clone() for name, part in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"table 'second.a'.*row 7"):
        tutorec.quantize(model, inplace=True)
    assert type(model.first) is EmbeddingBagCollection
    for name, part in model.state_dict().items():
        assert torch.equal(part.nan_to_num(), state[name].nan_to_num())
    assert not any(part.is_meta for part in model.parameters())


def test_rows_that_are_not_finite_are_kept_visible_when_asked():
    quantized = tutorec.quantize(bad_model(float("nan")), on_nonfinite="keep", inplace=True)
    ids = KeyedJaggedTensor(["a"], torch.tensor([6, 7]), lengths=torch.tensor([2]))
    rows = quantized.second(ids)["a"].values()
    assert rows[0].isfinite().all()
    assert rows[1].isnan().all()


class Derived(EmbeddingBagCollection):
    pass


class QuantDerived(QuantEmbeddingBagCollection):
    pass


def test_subclasses_are_quantized_to_the_class_that_is_named():
    model = nn.Sequential(Derived([EmbeddingBagConfig(10, 8, "a")]))
    with pytest.raises(ValueError, match=r"'0' is a Derived, a subclass of EmbeddingBagCollection"):
        tutorec.quantize(model)
    quantized = quantize_embeddings(
        model,
        torch.int8,
        False,
        additional_qconfig_spec_keys=[Derived],
        additional_mapping={Derived: QuantDerived},
    )
    assert type(quantized[0]) is QuantDerived
    with pytest.raises(KeyError, match="Derived"):
        quantize_embeddings(model, torch.int8, False, additional_qconfig_spec_keys=[Derived])


def test_quantize_embeddings_leaves_a_sharded_model_as_it_is_and_warns():
    """As the example of TorchRec does that saves a model after training it on several ranks."""
    model = distributed()
    with pytest.warns(UserWarning, match=r"DistributedModelParallel.* stay as they"):
        assert quantize_embeddings(model, dtype=torch.qint8, inplace=True) is model
    assert not model.training
    with pytest.raises(ValueError, match="spread over devices: load"):
        quantize_embeddings(model, dtype=torch.qint8, inplace=False)


class Copyable(CopyableMixin):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "a")])


def test_a_model_that_can_be_copied_is_not_taken_for_a_sharded_one():
    """The mixin is from the package of the sharded modules, and so is TorchRec's test model."""
    tables = [EmbeddingBagConfig(10, 8, "a", feature_names=["f"])]
    for model in (Copyable(), TestSparseNN(tables=tables)):
        kinds = {type(module) for module in quantize_inference_model(model).modules()}
        assert QuantEmbeddingBagCollection in kinds
        assert EmbeddingBagCollection not in kinds


def test_torchrecs_two_functions_quantize_what_torchrecs_do():
    model = Two().train()
    only_bags = quantize_embeddings(
        model,
        torch.quint4x2,
        inplace=False,
        output_dtype=torch.float16,
        per_table_weight_dtype={"b": torch.int8},
    )
    assert type(only_bags.second) is EmbeddingCollection
    assert [table.data_type for table in only_bags.first.embedding_bag_configs()] == [
        DataType.INT4,
        DataType.INT8,
    ]
    assert only_bags.first.output_dtype() is torch.float16
    assert not only_bags.training
    expected = tutorec.quantize(model, torch.quint4x2)(FEATURES)
    quantized = quantize_inference_model(model, quantization_dtype=torch.quint4x2)
    assert quantized is model
    assert not model.training
    assert torch.equal(model(FEATURES), expected)
    assert len(model.first.tbes) == 1
    assert "first.embedding_bags.a.weight" in model.state_dict()
    assert not any("tbes" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="already quantized"):
        quantize_inference_model(model)
    named = quantize_inference_model(
        Two(), {torch.typename(EmbeddingBagCollection): QuantEmbeddingBagCollection}
    )
    assert type(named.second) is EmbeddingCollection


def sharded() -> nn.Module:
    return shard_quant_model(tutorec.quantize(nn.Sequential(bags("a"))), world_size=2)[0]


def distributed() -> nn.Module:
    """What DistributedModelParallel is, without the processes that its making needs."""
    model = DistributedModelParallel.__new__(DistributedModelParallel)
    nn.Module.__init__(model)
    return model


quantize = tutorec.quantize


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda: quantize(quantize(Two())),
            ValueError,
            r"'first' is already quantized, tables \['a', 'b'\]",
        ),
        (lambda: quantize(quantize(bags("a"))), ValueError, "the model is already quantized"),
        (
            lambda: quantize(sharded()),
            ValueError,
            "'0' is a ShardedQuant.* spread over devices: load",
        ),
        (
            lambda: quantize(distributed()),
            ValueError,
            "the model is a DistributedModelParallel, .*full_state_dict",
        ),
        (
            lambda: quantize(nn.Linear(2, 2)),
            ValueError,
            "Linear has no EmbeddingBagCollection and no EmbeddingColl",
        ),
        (
            lambda: quantize(Two(), "int8"),
            TypeError,
            "table 'first.a': 'int8' is not a number format",
        ),
        (
            lambda: quantize(Two(), torch.uint8),
            ValueError,
            "table 'first.a' cannot be quantized to torch.uint8",
        ),
        (
            lambda: quantize(Two(), per_table={"b": torch.int64}),
            ValueError,
            "'first.b' .* torch.int64: .*; use",
        ),
        (
            lambda: quantize(Two(), per_table={"x": torch.int8}),
            KeyError,
            r"no tables \['x'\]; .*'first.a', 'first.b'",
        ),
        (
            lambda: quantize(Two(), output_dtype=torch.int32),
            ValueError,
            "looked-up rows cannot be torch.int32",
        ),
        (
            lambda: quantize(Two(), on_nonfinite="zero"),
            ValueError,
            "on_nonfinite='zero' must be one of",
        ),
        (lambda: quantize(Two(), row_alignment=3), ValueError, "row alignment 3 is not a multiple"),
    ],
)
def test_what_cannot_be_quantized_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_collections_without_tables_are_no_obstacle():
    model = nn.ModuleList([EmbeddingBagCollection([]), EmbeddingCollection([])])
    quantized = tutorec.quantize(model)
    assert type(quantized[0]) is QuantEmbeddingBagCollection
    assert quantized[1](FEATURES) == {}
    assert tutorec.quant.choose_dtypes(model, 0) == {}


def test_nothing_of_torchs_own_quantization_is_needed():
    """torch announces that it will be taken out."""
    script = (
        "import sys, torch\n"
        "sys.modules.update(dict.fromkeys(['torch.ao.quantization', 'torch.quantization', "
        "'torch.ao.nn']))\n"
        "import tutorec\n"
        "from tutorec.inference.modules import quantize_inference_model\n"
        "tables = [tutorec.EmbeddingBagConfig(10, 8, 'a')]\n"
        "model = torch.nn.Sequential(tutorec.EmbeddingBagCollection(tables))\n"
        "print(tutorec.quant.accuracy_report(model, tutorec.quantize(model)))\n"
        "quantize_inference_model(model)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "INT8" in done.stdout


_PEAK = """
import copy, sys
import torch, tutorec
torch.set_num_threads(1)
from tutorec.teach.memory import peak_memory
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

TABLES, COLUMNS = 6, 64

def model(rows):
    return torch.nn.Sequential(EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, COLUMNS, f"t{index}", feature_names=[f"f{index}"]) for index in range(TABLES)]
    ))

ways = {
    "in place": lambda model: tutorec.quantize(model, inplace=True),
    "kept": lambda model: tutorec.quantize(model),
    "copied": lambda model: tutorec.quantize(copy.deepcopy(model)),
}
quantize = ways[sys.argv[1]]
quantize(model(100))
with peak_memory() as peak:
    model = model(100_000)
    quantize(model)
print(peak.growth / (TABLES * 100_000 * COLUMNS * 4))
"""  # noqa: E501


def measured(script: str, *arguments: str) -> float:
    """The number that a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux alone tells a process its peak"
)
@pytest.mark.parametrize(
    ("way", "least", "most"),
    [("in place", 1.0, 1.0 + 1 / 6), ("kept", 1.25, 1.3), ("copied", 2.2, 2.4)],
)
def test_never_are_there_two_copies_of_the_tables(way, least, most):
    """Peak memory over the float tables: in place one table more, otherwise the packed rows; a copy
    is seen to fail.
    """
    assert least <= measured(_PEAK, way) <= most


_PEAK_AMONG_FREED_BLOCKS = """
import torch, tutorec
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.teach.memory import peak_memory

torch.set_num_threads(1)
torch.ones(7_900_000)  # once such a block is freed, the C library takes the next ones out of its own store
blocks = [torch.ones(1_280_000) for _ in range(40)]
end = torch.ones(1000)
del blocks

def model(rows):
    tables = [EmbeddingBagConfig(rows, 64, f"t{index}", feature_names=[f"f{index}"]) for index in range(3)]
    return torch.nn.Sequential(EmbeddingBagCollection(tables))

tutorec.quantize(model(100), inplace=True)  # loads what is loaded once
model = model(120_000)
with peak_memory() as peak:
    tutorec.quantize(model, inplace=True)
print(peak.growth / (120_000 * 80))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="Linux alone tells a process its peak"
)
def test_float_tables_go_back_to_the_system_also_where_the_c_library_would_keep_them():
    # Packed rows of one table and what packing takes on the way; with float tables that are kept,
    # those of all three.
    assert measured(_PEAK_AMONG_FREED_BLOCKS) < 2.5
