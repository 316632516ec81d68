"""Options of tables: every legal one is listed, nothing else is, and what is not listed has a
reason.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import table_sets
from torch import nn

from tutorec.distributed.core.cache_params import CacheParams, CacheStatistics
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import TableShard, checked_shards, exact_cover, sharding_spec
from tutorec.distributed.plan.plan import ParameterSharding, ShardingType
from tutorec.distributed.planner.cost import KernelModel, register_kernel, registered_kernels
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.options import ParameterConstraints, ShardArrays, ShardingOption
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.planner.types import ShardEstimator
from tutorec.errors import PlannerError, PlannerErrorType
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

ALL_BUT_GRID = {kind.value for kind in ShardingType} - {"grid_shard"}
SHARDERS: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
Constraints = Mapping[str, ParameterConstraints]


class NoEstimate(ShardEstimator):
    """Counts what it is given."""

    def __init__(self) -> None:
        self.seen: list[ShardingOption] = []

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Any = None
    ) -> None:
        self.seen += sharding_options


def bags(**tables: tuple[int, int]) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(rows, columns, name, feature_names=[name])
        for name, (rows, columns) in tables.items()
    ]
    return EmbeddingBagCollection(configs, device=torch.device("meta"))


def sequences(**tables: tuple[int, int]) -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(rows, columns, name, feature_names=[name])
        for name, (rows, columns) in tables.items()
    ]
    return EmbeddingCollection(configs, device=torch.device("meta"))


def listed(
    module: nn.Module,
    topology: Topology,
    constraints: Constraints | None = None,
    sharders: Any = None,
) -> list[ShardingOption]:
    enumerator = EmbeddingEnumerator(topology, 4, constraints, estimator=NoEstimate())
    return enumerator.enumerate(module, SHARDERS if sharders is None else sharders)


def words(option: ShardingOption) -> tuple[str, str]:
    return option.sharding_type, option.compute_kernel


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_types_but_grid_are_listed_on_every_device(device: str):
    options = listed(bags(item=(8, 256)), Topology.hosts(2, 2, device))
    assert {option.sharding_type for option in options} == ALL_BUT_GRID
    assert {
        option.compute_kernel for option in options if option.sharding_type != "data_parallel"
    } == {"fused"}
    assert [words(option) for option in options if option.sharding_type == "data_parallel"] == [
        ("data_parallel", "fused")
    ]


def test_sequences_have_the_same_options():
    options = listed(sequences(item=(8, 256)), Topology.hosts(2, 2))
    assert {option.sharding_type for option in options} == ALL_BUT_GRID
    assert not any(option.is_pooled for option in options)


def test_grid_comes_when_asked_for():
    asked = {"item": ParameterConstraints(sharding_types=["grid_shard"], min_partition=4)}
    [option] = listed(bags(item=(5, 8)), Topology.hosts(2, 2), asked)
    assert option.shard_arrays().sizes.tolist() == [[3, 4], [2, 4], [3, 4], [2, 4]]
    assert option.partition_by == "multi_host"


def test_options_are_listed_without_making_shards():
    for option in listed(bags(item=(8, 256)), Topology.hosts(2, 2)):
        assert isinstance(option._shards, ShardArrays)


def test_tables_of_one_shape_share_their_arrays_and_not_their_ranks():
    first, second = listed(
        bags(a=(8, 4), b=(8, 4)),
        Topology(2, "cpu"),
        dict.fromkeys("ab", ParameterConstraints(sharding_types=["row_wise"])),
    )
    assert np.shares_memory(first.shard_arrays().sizes, second.shard_arrays().sizes)
    first.place([0, 1])
    assert second.shard_arrays().ranks is None


@given(
    data=st.data(),
    tables=table_sets(max_rows=9),
    hosts=st.integers(1, 3),
    local_size=st.integers(1, 3),
)
def test_every_option_can_be_built_by_a_plan(
    data: st.DataObject, tables: list[EmbeddingBagConfig], hosts: int, local_size: int
):
    kinds = st.lists(
        st.sampled_from([kind.value for kind in ShardingType]), min_size=1, unique=True
    )
    constraints = {
        table.name: ParameterConstraints(
            sharding_types=data.draw(kinds), min_partition=data.draw(st.integers(1, 8))
        )
        for table in tables
        if data.draw(st.booleans())
    }
    module = EmbeddingBagCollection(tables, device=torch.device("meta"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a drawn min_partition often has no effect
        options = listed(module, Topology.hosts(hosts, local_size), constraints)
    assert {option.name for option in options} == {table.name for table in tables}
    for option in options:
        allowed = (
            constraints[option.name].sharding_types if option.name in constraints else ALL_BUT_GRID
        )
        assert option.sharding_type in (allowed or ())
        rows, columns = option.tensor.shape
        pieces = placed(option, hosts, local_size)
        if option.sharding_type == "data_parallel":
            assert {(piece.rows, piece.columns) for piece in pieces} == {(rows, columns)}
            continue
        assert exact_cover(pieces, rows, columns)
        entry = ParameterSharding(
            option.sharding_type, option.compute_kernel, None, sharding_spec(pieces, "cpu")
        )
        checked_shards(option.name, (rows, columns), entry, hosts * local_size, local_size)


def placed(option: ShardingOption, hosts: int, local_size: int) -> list[TableShard]:
    """The pieces on ranks that their type allows: the last ones."""
    count = option.num_shards
    last = (hosts - 1) * local_size
    ranks = {
        "device": [hosts * local_size - 1] * count,
        "host": list(range(last, last + local_size)) if count == local_size else [last] * count,
        "uniform": list(range(count)),
        "multi_host": [last + index % local_size for index in range(count)],
    }[option.partition_by]
    if option.sharding_type == "table_column_wise":
        ranks = [last] * count
    lines = zip(
        ranks,
        option.shard_arrays().offsets.tolist(),
        option.shard_arrays().sizes.tolist(),
        strict=True,
    )
    return [TableShard(rank, *offset, *size) for rank, offset, size in lines]


# --- which kernel


def test_replicated_tables_are_fused_where_the_sharder_names_an_optimizer():
    only_copies = {"item": ParameterConstraints(sharding_types=["data_parallel"])}
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.02})
    [option] = listed(bags(item=(8, 4)), Topology(2, "cpu"), only_copies, [sharder])
    assert option.compute_kernel == "fused"
    assert option.profile.optimizer is not None
    assert option.profile.optimizer.learning_rate == 0.02


def test_replicated_tables_are_fused_where_the_table_names_an_optimizer():
    module = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item", feature_names=["item"])])
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    only_copies = {"item": ParameterConstraints(sharding_types=["data_parallel"])}
    [option] = listed(module, Topology(2, "cpu"), only_copies)
    assert option.compute_kernel == "fused"
    assert option.profile.optimizer is not None
    assert option.profile.optimizer.learning_rate == 0.5


@pytest.mark.parametrize("asked", ["dense", "batched_dense"])
@pytest.mark.parametrize("types", [None, sorted(ALL_BUT_GRID)])
def test_kernel_dense_alone_means_replicated_and_with_types_these(
    asked: str, types: list[str] | None
):
    constraint = ParameterConstraints(sharding_types=types, compute_kernels=[asked])
    options = listed(bags(item=(8, 4)), Topology(2, "cpu"), {"item": constraint})
    assert {option.compute_kernel for option in options} == {"dense"}
    assert {option.sharding_type for option in options} == set(types or ["data_parallel"])


def test_kernel_that_is_registered_later_is_listed():
    class PackedSharder(EmbeddingBagCollectionSharder):
        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return ["fused", "quant_uvm"]

    module, topology = bags(item=(8, 4)), Topology(2, "cuda")
    enumerator = EmbeddingEnumerator(topology, estimator=NoEstimate())
    assert {
        option.compute_kernel for option in enumerator.enumerate(module, [PackedSharder()])
    } == {"fused"}
    assert any("no cost model is registered" in refusal.reason for refusal in enumerator.refusals)
    try:
        register_kernel("quant_uvm", KernelModel(devices=("cuda",)))
        options = enumerator.enumerate(module, [PackedSharder()])
    finally:
        from tutorec.distributed.planner import cost

        cost._kernels.pop("quant_uvm", None)
    assert {option.compute_kernel for option in options} == {"fused", "quant_uvm"}
    assert "quant_uvm" not in registered_kernels()


# --- how wide slices are


@pytest.mark.parametrize(
    ("columns", "min_partition", "widths"),
    [
        (64, 32, [32, 32]),
        (64, 16, [16] * 4),
        (256, None, [128, 128]),
        (192, 50, [64] * 3),
        (12, 3, [4] * 3),
    ],
)
def test_columns_are_cut_as_narrow_as_allowed(
    columns: int, min_partition: int | None, widths: list[int]
):
    words = ParameterConstraints(sharding_types=["column_wise"], min_partition=min_partition)
    [option] = listed(bags(item=(8, columns)), Topology(2, "cpu"), {"item": words})
    assert option.shard_arrays().sizes[:, 1].tolist() == widths


def test_column_wise_table_that_stays_whole_is_a_warning_that_says_what_would_cut_it():
    only_columns = dict.fromkeys("ab", ParameterConstraints(sharding_types=["column_wise"]))
    with pytest.warns(
        UserWarning, match=r"table 'a', 'b':.*not split 64 columns.*min_partition=32.*2"
    ):
        options = listed(bags(a=(8, 64), b=(4, 64)), Topology(2, "cpu"), only_columns)
    assert [option.num_shards for option in options] == [1, 1]
    only_columns = {"a": ParameterConstraints(sharding_types=["column_wise"], min_partition=32)}
    assert listed(bags(a=(8, 64)), Topology(2, "cpu"), only_columns)[0].num_shards == 2


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (
            {"min_partition": 32, "sharding_types": ["row_wise"]},
            "min_partition=32 has no effect: no remaining",
        ),
        (
            {"min_partition": 33},
            "min_partition=33 has no effect: 64 columns have no equal slices of 33 to 63",
        ),
        ({"stochastic_rounding": True}, "stochastic_rounding has no effect"),
        ({"use_virtual_table": True}, "use_virtual_table has no effect"),
        ({"output_dtype": "fp16"}, "output_dtype has no effect"),
        ({"colocate": "pair"}, "colocate='pair' has no effect: no other table has that value"),
    ],
)
def test_constraint_without_effect_is_a_warning_with_the_table(
    constraint: dict[str, Any], message: str
):
    with pytest.warns(UserWarning, match=f"table 'item': {message}"):
        listed(bags(item=(8, 64)), Topology(2, "cpu"), {"item": ParameterConstraints(**constraint)})


def test_warning_points_at_the_caller_of_enumerate():
    with pytest.warns(UserWarning, match="min_partition") as caught:
        EmbeddingEnumerator(
            Topology(2, "cpu"),
            constraints={"item": ParameterConstraints(min_partition=33)},
            estimator=NoEstimate(),
        ).enumerate(bags(item=(8, 64)), SHARDERS)
    assert caught[0].filename == __file__


# --- pins


def test_pinned_table_loses_what_needs_more_ranks():
    pinned = {"item": ParameterConstraints(pin=[2, 3, 0])}
    options = listed(bags(item=(8, 256)), Topology.hosts(2, 2), pinned)
    assert {option.sharding_type for option in options} == ALL_BUT_GRID - {
        "row_wise",
        "data_parallel",
    }
    pinned = {"item": ParameterConstraints(pin=[1, 2])}
    enumerator = EmbeddingEnumerator(
        Topology.hosts(2, 2), constraints=pinned, estimator=NoEstimate()
    )
    options = enumerator.enumerate(bags(item=(8, 256)), SHARDERS)
    assert {option.sharding_type for option in options} == {
        "table_wise",
        "column_wise",
        "table_column_wise",
    }
    reasons = {
        refusal.sharding_type: refusal.reason
        for refusal in enumerator.refusals
        if not refusal.compute_kernel
    }
    assert reasons["row_wise"] == "it takes all 4 ranks, and pin=[1, 2] allows 2"
    assert (
        reasons["table_row_wise"]
        == "it takes all 2 ranks of a host, and pin=[1, 2] holds no whole host"
    )


# --- what is refused


def test_everything_that_is_no_option_is_refused_with_a_reason():
    enumerator = EmbeddingEnumerator(
        Topology(2, "cpu"),
        constraints={"user": ParameterConstraints(sharding_types=["row_wise"])},
        estimator=NoEstimate(),
    )
    options = enumerator.enumerate(bags(item=(8, 64), user=(8, 64)), SHARDERS)
    for name in ("item", "user"):
        taken = {words(option) for option in options if option.name == name}
        refused = {
            (r.sharding_type, r.compute_kernel) for r in enumerator.refusals if r.table == name
        }
        for kind in ShardingType:
            ways = {(kind.value, "fused"), (kind.value, "dense")}
            assert (kind.value, "") in refused or ways == (ways & taken) | (ways & refused)
        assert not taken & refused
    assert any(
        str(refusal).startswith("item: grid_shard: it is taken only")
        for refusal in enumerator.refusals
    )
    texts = [str(refusal) for refusal in enumerator.refusals if refusal.table == "user"]
    assert "user: table_wise: its constraints allow only row_wise" in texts


@pytest.mark.parametrize(
    ("constraint", "removed", "remedy"),
    [
        (
            {"sharding_types": ["row_wise"], "pin": [0]},
            r"row_wise: it takes all 4 ranks, and pin=\[0\] allows 1$",
            "it may be table_wise, column_wise, table_column_wise; without pin it may be row_wise",
        ),
        (
            {"sharding_types": ["table_row_wise"], "pin": [1, 2]},
            r"pin=\[1, 2\] holds no whole host$",
            "without pin it may be table_row_wise",
        ),
        (
            {"compute_kernels": ["quant"]},
            "does not build this kernel",
            "without compute_kernels it may be table_wise",
        ),
    ],
)
def test_contradictory_constraints_say_what_was_removed_and_what_would_do(
    constraint: dict[str, Any], removed: str, remedy: str
):
    with pytest.raises(
        PlannerError, match=f"(?s)constraints of table 'item' leave no way.*{removed}"
    ) as caught:
        listed(
            bags(item=(8, 64)), Topology.hosts(2, 2), {"item": ParameterConstraints(**constraint)}
        )
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"itme": {}}, "table 'itme', which no module has; did you mean 'item'?"),
        ({"zzz": {}}, "table 'zzz', which no module has; the tables are 'item'"),
        (
            {"item": {"sharding_types": ["row_wis"]}},
            "'row_wis', which ShardingType does not have; did you mean 'row_wise'?",
        ),
        (
            {"item": {"sharding_types": "row_wise"}},
            r"sharding_types='row_wise'\) of table 'item' is not a list",
        ),
        (
            {"item": {"compute_kernels": ["fast"]}},
            "'fast', which EmbeddingComputeKernel does not have",
        ),
        (
            {"item": {"min_partition": 0}},
            r"min_partition=0\) of table 'item' is not a number of columns",
        ),
        (
            {"item": {"pooling_factors": [1.0, 2.0]}},
            "lists 2 numbers, and 1 features read the table",
        ),
        ({"item": {"pooling_factors": [-1.0]}}, r"has -1.0, where a number of at least 0"),
        ({"item": {"pooling_factors": [float("nan")]}}, "has nan, where a number"),
        ({"item": {"batch_sizes": [0]}}, "has 0, where a number of at least 1"),
        ({"item": {"num_poolings": []}}, "lists no numbers"),
        ({"item": {"feature_names": ["other"]}}, r"names \['other'\], which do not read it"),
        ({"item": {"pin": [4]}}, "names rank 4; there are ranks 0 to 3"),
        ({"item": {"pin": []}}, "leaves it no rank"),
    ],
)
def test_constraint_that_cannot_be_meant_is_an_error(
    constraints: dict[str, dict[str, Any]], message: str
):
    made = {name: ParameterConstraints(**fields) for name, fields in constraints.items()}
    with pytest.raises(PlannerError, match=message) as caught:
        listed(bags(item=(8, 64)), Topology.hosts(2, 2), made)
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION


@pytest.mark.parametrize("batch_size", [0, -3])
def test_batch_of_no_samples_is_an_error(batch_size: int):
    with pytest.raises(PlannerError, match=f"batch_size={batch_size} must"):
        EmbeddingEnumerator(Topology(1, "cpu"), batch_size).enumerate(bags(item=(8, 4)), SHARDERS)


def test_table_of_another_device_is_left_out_with_a_reason():
    enumerator = EmbeddingEnumerator(
        Topology(1, "cpu"),
        constraints={"item": ParameterConstraints(device_group="cuda")},
        estimator=NoEstimate(),
    )
    options = enumerator.enumerate(bags(item=(8, 4), user=(8, 4)), SHARDERS)
    assert {option.name for option in options} == {"user"}
    assert [refusal.reason for refusal in enumerator.refusals if refusal.table == "item"] == [
        "it is left to a planner for cuda, and this is cpu"
    ]


# --- the model


def test_tables_come_in_the_order_of_the_model():
    inner = nn.Module()
    inner.add_module("bags", bags(a=(8, 4)))
    model = nn.Module()
    model.add_module("inner", inner)
    model.add_module("sequences", sequences(b=(8, 4)))
    model.add_module("dense", nn.Linear(3, 3))
    for exact, order in (
        (False, ["inner.bags.a", "sequences.b"]),
        (True, ["sequences.b", "inner.bags.a"]),
    ):
        enumerator = EmbeddingEnumerator(
            Topology(1, "cpu"), estimator=NoEstimate(), use_exact_enumerate_order=exact
        )
        options = enumerator.enumerate(model, SHARDERS)
        assert list(dict.fromkeys(option.fqn for option in options)) == order
        assert enumerator.last_stored_search_space == options


def test_options_and_their_copies_share_table_and_module():
    module = bags(item=(8, 64))
    for option in listed(module, Topology(2, "cpu")):
        for shared in (option, option.with_shards(option.shard_arrays()), copy.deepcopy(option)):
            assert shared.module[1] is module
            assert shared.tensor is module.embedding_bags["item"].weight


def test_model_without_tables_has_no_options():
    assert listed(nn.Linear(2, 2), Topology(1, "cpu")) == []


def test_collection_without_a_sharder_is_not_looked_at():
    assert (
        listed(bags(item=(8, 4)), Topology(1, "cpu"), sharders=[EmbeddingCollectionSharder()]) == []
    )


def test_sharder_of_any_class_is_asked_by_the_protocol():
    class Shelf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.empty(6, 4))

    class ShelfSharder:
        module_type = Shelf

        def shardable_parameters(self, module: Shelf) -> dict[str, nn.Parameter]:
            return {"shelf": module.rows}

        def sharding_types(self, compute_device_type: str) -> list[str]:
            return ["row_wise"]

        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return ["dense"]

    constraints = {"shelf": ParameterConstraints(pooling_factors=[2.0, 3.0])}
    [option] = listed(Shelf(), Topology(2, "cpu"), constraints, [ShelfSharder()])
    assert words(option) == ("row_wise", "dense")
    assert option.profile.ids == (8.0, 12.0)
    assert option.profile.features == ("shelf[0]", "shelf[1]")


def test_facts_hold_what_the_constraints_say_of_each_feature():
    table = EmbeddingBagConfig(8, 4, "item", feature_names=["now", "seen"])
    module = EmbeddingBagCollection([table], is_weighted=True, device=torch.device("meta"))
    said = ParameterConstraints(
        sharding_types=["table_wise"],
        pooling_factors=[1.0, 20.0],
        num_poolings=[1.0, 2.0],
        batch_sizes=[10, 5],
    )
    [option] = listed(module, Topology(2, "cpu"), {"item": said})
    facts = option.profile
    assert (facts.samples, facts.ids, facts.weighted) == ((10.0, 10.0), (10.0, 200.0), True)
    assert option.input_lengths == [1.0, 20.0]


def test_one_pooling_factor_holds_for_all_features():
    table = EmbeddingBagConfig(8, 4, "item", feature_names=["now", "seen"])
    module = EmbeddingBagCollection([table], device=torch.device("meta"))
    said = {"item": ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[3.0])}
    assert listed(module, Topology(2, "cpu"), said)[0].profile.ids == (12.0, 12.0)


def test_narrow_wire_is_known_from_the_sharder():
    from tutorec.distributed.core.qcomm import CommType, QCommsConfig, get_qcomm_codecs_registry

    registry = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    option = listed(bags(item=(8, 4)), Topology(2, "cpu"), sharders=[sharder])[0]
    assert (option.profile.row_wire_bytes, option.profile.gradient_wire_bytes) == (2, 4)


def test_default_estimators_fill_time_and_storage():
    enumerator = EmbeddingEnumerator(Topology.hosts(2, 2), 4)
    for option in enumerator.enumerate(bags(item=(8, 256)), SHARDERS):
        pieces = option.shard_arrays()
        assert pieces.perf is not None
        assert pieces.storage is not None
        assert (pieces.perf >= 0).all()
        assert pieces.storage[:, 1].min() > 0
        pieces.perf = pieces.storage = None
        enumerator.populate_estimates([option])
        assert option.shard_arrays().perf is not None


def test_same_table_name_in_two_modules_is_two_tables():
    model = nn.Module()
    model.add_module("left", bags(item=(8, 4)))
    model.add_module("right", bags(item=(4, 4)))
    said = {"item": ParameterConstraints(sharding_types=["table_wise"])}
    options = listed(model, Topology(1, "cpu"), said)
    assert [(option.path, option.tensor.shape[0]) for option in options] == [
        ("left", 8),
        ("right", 4),
    ]


def test_optimizer_without_a_fused_form_is_an_error_that_names_the_table():
    module = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item", feature_names=["item"])])
    apply_optimizer_in_backward(torch.optim.RMSprop, module.parameters(), {"lr": 0.5})
    with pytest.raises(ValueError, match=r"'item': RMSprop.* no fused form"):
        listed(module, Topology(2, "cpu"))


# --- tables in files


class HalfMissed(CacheStatistics):
    """A batch has 100 distinct rows, half of which miss a cache of any size."""

    expected_lookups, cacheability = 100, 0.5

    def expected_miss_rate(self, clf: float) -> float:
        return 0.5 if clf else 1.0


def cached_options(**constraint: Any) -> dict[tuple[str, float | None], float]:
    """(Kernel, load factor) of the row-wise options of a table -> milliseconds of its misses."""
    words = ParameterConstraints(sharding_types=["row_wise"], **constraint)
    enumerator = EmbeddingEnumerator(Topology(2, "cpu"), constraints={"item": words})
    options = enumerator.enumerate(bags(item=(1000, 64)), [EmbeddingBagCollectionSharder()])
    return {
        (one.compute_kernel, one.cache_load_factor): one.shards[0].perf.prefetch_compute
        for one in options
    }  # type: ignore[union-attr]


def test_tables_in_files_are_options_where_a_constraint_asks_for_them():
    assert list(cached_options()) == [("fused", None)]
    assert list(cached_options(compute_kernels=["fused_uvm"])) == [("fused_uvm", None)]
    sizes = cached_options(compute_kernels=["fused_uvm_caching"])
    assert {kernel for kernel, _ in sizes} == {"fused_uvm_caching"} and len(sizes) > 3
    # the smaller, the slower
    assert sorted(sizes.values(), reverse=True) == [sizes[one] for one in sorted(sizes)]
    asked = cached_options(cache_params=CacheParams(load_factor=0.3))
    assert set(asked) == {("fused", None), ("fused_uvm", None), ("fused_uvm_caching", 0.3)}


def test_a_sharder_that_builds_tables_in_files_only_gets_them_with_the_cache_of_its_fused_params():
    class InFiles(EmbeddingBagCollectionSharder):
        def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
            return ["fused_uvm_caching"]

    options = EmbeddingEnumerator(Topology(2, "cpu")).enumerate(
        bags(item=(1000, 64)), [InFiles({"cache_load_factor": 0.4})]
    )
    assert {(one.compute_kernel, one.cache_load_factor) for one in options} == {
        ("fused_uvm_caching", 0.4)
    }


def test_misses_are_those_of_the_statistics():
    as_told = cached_options(cache_params=CacheParams(load_factor=0.3, stats=HalfMissed()))
    # each rank reads and writes half of the 50 rows, of 256 bytes
    each = 2 * 25 * 256 / Topology(2, "cpu").ssd_mem_bw
    assert as_told["fused_uvm_caching", 0.3] == pytest.approx(each)
    assert as_told["fused_uvm", None] == pytest.approx(2 * each)
    # Without statistics a batch has the distinct rows of even popularity.
    as_if_even = cached_options(cache_params=CacheParams(load_factor=0.5))
    rows = 1000 * (1 - 0.999**1024)
    assert as_if_even["fused_uvm_caching", 0.5] == pytest.approx(each * rows / 100)
    assert as_if_even["fused_uvm", None] == pytest.approx(2 * each * rows / 100)
