"""Mappings of raw ids to rows against a dictionary, for drawn streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from modules.mc_oracle import Oracle

from tutorec.fx import symbolic_trace
from tutorec.modules import mc_index
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from tutorec.modules.mc_report import CollisionReport, TableCollisions
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

CPU = torch.device("cpu")
POLICIES: dict[str, Callable[..., MCHEvictionPolicy]] = {
    "lfu": lambda decay, admits: LFU_EvictionPolicy(admits),
    "lru": LRU_EvictionPolicy,
    "distance": DistanceLFU_EvictionPolicy,
}
# What each filter lets pass, and the same in plain Python.
FILTERS: dict[str, tuple[Any, Callable[[int, list[int]], bool]]] = {
    "none": (None, lambda count, counts: True),
    "average": (average_threshold_filter, lambda count, counts: count * len(counts) > sum(counts)),
    "dynamic": (
        lambda counts: dynamic_threshold_filter(counts, 0.5),
        lambda count, counts: 2 * count * len(counts) > sum(counts),
    ),
    "certain": (
        lambda counts: probabilistic_threshold_filter(counts, 1.0),
        lambda count, counts: True,
    ),
}


def lists(ids: list[int], dtype: torch.dtype = torch.int64) -> dict[str, JaggedTensor]:
    return {"t": JaggedTensor(torch.tensor(ids, dtype=dtype), lengths=torch.tensor([len(ids)]))}


def drawn_stream(batches: int, ids: int, seed: int) -> list[list[int]]:
    """Ids of which few are frequent; which ones changes from batch to batch. Large, and some are
    negative.
    """
    draw = torch.Generator().manual_seed(seed)
    stream = []
    for batch in range(batches):
        size = int(torch.randint(0, 2 * ids, (), generator=draw))
        popularity = (torch.rand(size, generator=draw) ** 3 * 60).long() + 2 * batch
        stream.append(((popularity - 20) * 1_000_003**2).tolist())
    return stream


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    ("policy", "decay"), [("lfu", 1.0), ("lru", 1.0), ("distance", 1.0), ("distance", 2.5)]
)
def test_mapping_equals_a_dictionary_in_train_and_eval_mode(
    policy: str, decay: float, interval: int, filter_name: str
):
    admits, in_python = FILTERS[filter_name]
    rows = 17
    module = MCHManagedCollisionModule(rows, CPU, POLICIES[policy](decay, admits), interval)
    oracle = Oracle(rows, policy, interval, decay, in_python)
    lookups = collisions = 0
    for number, ids in enumerate(drawn_stream(40, 20, seed=len(policy) + interval)):
        module.train(number % 5 != 3)
        expected_evictions = oracle.train(ids) if module.training else []
        remapped = module(lists(ids))["t"].values().tolist()
        evicted = module.evict()
        assert remapped == oracle.remap(ids)
        assert ([] if evicted is None else sorted(evicted.tolist())) == expected_evictions
        assert int(module.open_slots()) == sum(slot.id is None for slot in oracle.slots)
        lookups += len(ids)
        collisions += remapped.count(rows - 1)
    report = module.report("t")
    assert (report.lookups, report.collisions, report.evictions) == (
        lookups,
        collisions,
        oracle.evictions,
    )
    assert oracle.evictions > 0 and 0 < collisions < lookups
    assert report.occupied == rows - int(module.open_slots())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_shard_maps_to_its_own_range_of_rows(dtype: torch.dtype):
    whole = MCHManagedCollisionModule(
        12, CPU, LFU_EvictionPolicy(), 1, input_hash_size=100, name="t"
    )
    shard = whole.rebuild_with_output_id_range((6, 12), [0, 6, 12])
    oracle = Oracle(6, "lfu", 1)
    for ids in [[1, 2, 2], [3, 3, 9, 9, 8, 7], [1, 1, 1, 2, 2, 50]]:
        oracle.train(ids)
        rows = shard(lists(ids, dtype))["t"].values()
        assert rows.dtype is dtype
        assert rows.tolist() == [6 + row for row in oracle.remap(ids)]
    assert (shard.output_size(), shard.input_size(), shard.buckets()) == (6, 100, 2)


def test_state_is_loaded_and_goes_on_as_before():
    stream = drawn_stream(12, 20, seed=1)
    module = MCHManagedCollisionModule(9, CPU, DistanceLFU_EvictionPolicy(), 2)
    for ids in stream[:6]:
        module(lists(ids))
    assert set(module.state_dict()) == {
        "_output_segments_tensor",
        "_current_iter_tensor",
        "_mch_sorted_raw_ids",
        "_mch_remapped_ids_mapping",
        "_mch_counts",
        "_mch_last_access_iter",
    }
    copied = MCHManagedCollisionModule(9, CPU, DistanceLFU_EvictionPolicy(), 2)
    copied.load_state_dict(module.state_dict())
    for ids in stream[6:]:
        assert (
            copied(lists(ids))["t"].values().tolist() == module(lists(ids))["t"].values().tolist()
        )


def test_state_of_other_segments_is_refused():
    policy = LFU_EvictionPolicy()
    stored = MCHManagedCollisionModule(8, CPU, policy, 1, output_segments=[0, 4, 8]).state_dict()
    part = {key: value[:4] if key.startswith("_mch") else value for key, value in stored.items()}
    MCHManagedCollisionModule(4, CPU, policy, 1, output_global_offset=4).load_state_dict(part)
    with pytest.raises(ValueError, match=r"rows 2 to 6 cannot.*\[0, 4, 8\]"):
        MCHManagedCollisionModule(4, CPU, policy, 1, output_global_offset=2).load_state_dict(part)


def test_a_copy_and_rows_written_by_hand_are_looked_up():
    module = MCHManagedCollisionModule(5, CPU, LFU_EvictionPolicy(), 1).eval()
    module._mch_sorted_raw_ids[:2] = torch.tensor([40, 50])
    assert module(lists([50, 40, 41]))["t"].values().tolist() == [1, 0, 4]
    copied = copy.deepcopy(module)
    copied._mch_sorted_raw_ids[1] = 41
    assert copied(lists([50, 40, 41]))["t"].values().tolist() == [4, 0, 1]
    assert module(lists([50, 40, 41]))["t"].values().tolist() == [1, 0, 4]


def test_hash_function_runs_first():
    module = MCHManagedCollisionModule(
        5, CPU, LFU_EvictionPolicy(), 1, 10, lambda ids, size: ids % size
    )
    module(lists([13, 23, 4]))
    assert module._mch_sorted_raw_ids[:2].tolist() == [3, 4]
    one, other = module.eval()(lists([33, 44]))["t"].values().tolist()
    assert len({one, other, 4}) == 3


def test_a_policy_of_ones_own_has_metadata_of_its_own():
    class First(LFU_EvictionPolicy):
        """Ids that came first keep their rows."""

        def eviction_scores(self, current_iter, metadata):
            return (metadata["counts"] > 0).long() * torch.iinfo(torch.int64).max

    module = MCHManagedCollisionModule(3, CPU, First(), 1)
    module(lists([5, 6]))
    rows = module(lists([7, 7, 7, 5, 6]))["t"].values().tolist()
    assert rows[:3] == [2, 2, 2] and sorted(rows[3:]) == [0, 1]
    with pytest.raises(NotImplementedError, match="MCHEvictionPolicy has no eviction_scores"):
        MCHManagedCollisionModule(3, CPU, MCHEvictionPolicy([]), 1)(lists([1]))


def two_tables() -> tuple[list[EmbeddingBagConfig], dict[str, Any]]:
    tables = [
        EmbeddingBagConfig(7, 4, "item_table", feature_names=["item", "seen"]),
        EmbeddingBagConfig(5, 4, "user_table", feature_names=["user"]),
    ]
    modules = {
        table.name: MCHManagedCollisionModule(table.num_embeddings, CPU, LRU_EvictionPolicy(), 2)
        for table in tables
    }
    return tables, modules


@pytest.mark.parametrize("keys", [["item", "seen", "user"], ["user", "other", "item", "seen"]])
def test_collection_remaps_each_table_by_its_own_mapping(keys: list[str]):
    tables, modules = two_tables()
    collection = ManagedCollisionCollection(
        {name: modules[name] for name in ("user_table", "item_table")}, tables
    )
    oracles = {table.name: Oracle(table.num_embeddings, "lru", 2) for table in tables}
    draw = torch.Generator().manual_seed(3)
    for _ in range(8):
        lengths = torch.randint(0, 4, (len(keys) * 3,), generator=draw)
        values = torch.randint(0, 9, (int(lengths.sum()),), generator=draw) * 10**15
        weights = torch.rand(values.shape, generator=draw)
        batch = KeyedJaggedTensor(keys, values, weights, lengths)
        rows = collection(batch)
        assert rows.keys() == ["item", "seen", "user"]
        for table in tables:
            raw = {name: batch[name].values().tolist() for name in table.feature_names}
            oracles[table.name].train([each for ids in raw.values() for each in ids])
            for name, ids in raw.items():
                assert rows[name].values().tolist() == oracles[table.name].remap(ids)
                assert torch.equal(rows[name].lengths(), batch[name].lengths())
                assert torch.equal(rows[name].weights(), batch[name].weights())
    assert {name: int(count) for name, count in collection.open_slots().items()} == {
        name: sum(slot.id is None for slot in oracle.slots) for name, oracle in oracles.items()
    }
    assert set(collection.evict()) == {"item_table", "user_table"}
    assert collection.table_to_number_buckets() == {"item_table": 1, "user_table": 1}
    lines = str(collection.report()).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["item_table", "user_table"]


def test_a_report_has_the_shares_and_the_evictions_of_each_table():
    tables = [
        TableCollisions("item", 1000, 750, 400, 100, 12),
        TableCollisions("user", 8, 2, 0, 0, 0),
    ]
    rows = [line.split() for line in str(CollisionReport.of(tables)).splitlines()[2:]]
    assert rows == [
        ["item", "1,000", "75.0", "%", "400", "75.0", "%", "100", "12"],
        ["user", "8", "25.0", "%", "0", "100.0", "%", "0", "0"],
    ]


def test_collection_keeps_inverse_indices():
    tables, modules = two_tables()
    collection = ManagedCollisionCollection(modules, tables)
    inverse = (["user", "item", "seen"], torch.tensor([[0, 1], [1, 0], [0, 0]]))
    batch = KeyedJaggedTensor(
        ["user", "item", "seen"],
        torch.tensor([9, 8, 7, 6, 5]),
        lengths=torch.tensor([1, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [2], [1]],
        inverse_indices=inverse,
    )
    rows = collection(batch)
    assert rows.keys() == ["item", "seen", "user"]
    assert rows.stride_per_key() == [2, 1, 2]
    assert rows.inverse_indices()[0] == inverse[0]


def test_collection_refuses_tables_and_mappings_that_do_not_fit():
    tables, modules = two_tables()
    with pytest.raises(
        ValueError,
        match=r"tables \['item_table', 'user_table'\].*modules \['item_table'\]",
    ):
        ManagedCollisionCollection({"item_table": modules["item_table"]}, tables)
    wrong = {**modules, "user_table": modules["item_table"]}
    with pytest.raises(
        ValueError,
        match=r"table 'user_table'.*5 rows.*7",
    ):
        ManagedCollisionCollection(wrong, tables)
    shared = [tables[0], EmbeddingBagConfig(5, 4, "user_table", feature_names=["user", "item"])]
    with pytest.raises(ValueError, match=r"feature 'item'.*tables 'item_table'.*'user_table'"):
        ManagedCollisionCollection(modules, shared)
    with pytest.raises(KeyError, match=r"features \['seen', 'user'\].*\['item'\]"):
        ManagedCollisionCollection(modules, tables)(
            KeyedJaggedTensor(["item"], torch.tensor([1]), lengths=torch.ones(1).int())
        )


def test_module_without_rows_or_interval_is_refused():
    with pytest.raises(ValueError, match=r"zch_size=0, eviction_interval=1; both.*0"):
        MCHManagedCollisionModule(0, CPU, LFU_EvictionPolicy(), 1)
    with pytest.raises(ValueError, match=r"1025 output segments.*1024"):
        MCHManagedCollisionModule(
            2000, CPU, LFU_EvictionPolicy(), 1, output_segments=[*range(1026)]
        )
    with pytest.warns(UserWarning, match=r"mch_size.*mch_hash_func.*no effect"):
        MCHManagedCollisionModule(3, CPU, LFU_EvictionPolicy(), 1, mch_size=4)


def test_probability_of_an_id_grows_with_its_count():
    counts = torch.tensor([1, 10, 100]).repeat(4000)
    admitted, drawn = probabilistic_threshold_filter(counts, 0.02)
    shares = admitted.view(-1, 3).double().mean(0)
    torch.testing.assert_close(
        shares, 1 - 0.98 ** torch.tensor([1.0, 10, 100]).double(), rtol=0, atol=0.03
    )
    assert drawn.shape == counts.shape


class Called(MCHManagedCollisionModule):
    """Of another class, so that a collection calls it instead of looking all tables up at once."""


def hashed(ids: torch.Tensor, size: int) -> torch.Tensor:
    return ids % size


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_looked_up_at_once_equal_modules_that_are_called(dtype: torch.dtype):
    tables, _ = two_tables()
    together, called = (
        ManagedCollisionCollection(
            {
                one.name: kind(
                    one.num_embeddings,
                    CPU,
                    LFU_EvictionPolicy(),
                    2,
                    9,
                    hashed,
                )
                for one in tables
            },
            tables,
        )
        for kind in (MCHManagedCollisionModule, Called)
    )
    draw = torch.Generator().manual_seed(4)
    for number in range(9):
        if number == 5:
            together, before = copy.deepcopy(together), together
            assert (
                before._remapper._joint_lookup is not None
                and together._remapper._joint_lookup is None
            )
        together.train(number % 3 != 1)
        called.train(number % 3 != 1)
        lengths = torch.randint(0, 4, (9,), generator=draw)
        values = torch.randint(0, 40, (int(lengths.sum()),), generator=draw).to(dtype)
        batch = KeyedJaggedTensor(["item", "seen", "user"], values, lengths=lengths)
        one, other = together(batch).values(), called(batch).values()
        assert torch.equal(one, other) and one.dtype is dtype
    assert str(together.report()) == str(called.report())
    assert all(
        torch.equal(value, called.state_dict()[key]) for key, value in together.state_dict().items()
    )


def test_ids_are_found_when_every_batch_replaces_all_of_them():
    module = MCHManagedCollisionModule(9, CPU, LRU_EvictionPolicy(), 1)
    for number in range(20):
        ids = [number * 8 + each - 40 for each in range(8)]
        assert sorted(module(lists(ids))["t"].values().tolist()) == [*range(8)]
        assert module(lists([ids[0] - 1, ids[0]]))["t"].values()[0] in range(9)


@pytest.mark.parametrize("filled", [0, 5])
def test_index_and_sorted_search_find_the_same_rows(filled: int, monkeypatch: pytest.MonkeyPatch):
    """Also the largest id, which has no row in either."""
    ids = [-1, -(2**63), 0, 2**63 - 1, 7, 2**62]
    rows = []
    for indexed in (True, False):
        monkeypatch.setattr(mc_index, "has_index", lambda _, indexed=indexed: indexed)
        module = MCHManagedCollisionModule(6, CPU, LFU_EvictionPolicy(), 1).eval()
        module._mch_sorted_raw_ids[:filled] = torch.tensor(sorted(ids[:3] + ids[4:]))[:filled]
        rows.append(module(lists(ids))["t"].values().tolist())
    assert all(each == rows[0] for each in rows)
    assert rows[0][3] == 5


def test_a_traced_mapping_is_scripted_and_finds_the_same_rows():
    module = MCHManagedCollisionModule(5, CPU, LFU_EvictionPolicy(), 1)
    module(lists([40, 40, 7, 9, -3]))
    ids = lists([7, 2**63 - 1, 40, 8, -3], torch.int64)
    expected = module.eval()(ids)["t"].values()
    traced = torch.fx.symbolic_trace(module)
    for one in (traced, torch.jit.script(traced)):
        assert torch.equal(one(ids)["t"].values(), expected)


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, symbolic_trace])
def test_a_traced_collection_finds_the_same_rows(trace: Callable[..., torch.fx.GraphModule]):
    tables, _ = two_tables()
    collection = ManagedCollisionCollection(
        {
            one.name: MCHManagedCollisionModule(one.num_embeddings, CPU, LFU_EvictionPolicy(), 1)
            for one in tables
        },
        tables,
    )
    values, lengths = torch.arange(9) // 2, torch.tensor([2, 3, 0, 2, 1, 1])
    collection(KeyedJaggedTensor(["user", "item", "seen"], values, lengths=lengths))
    traced = trace(collection.eval())
    for weights in (None, torch.rand(9)):
        batch = KeyedJaggedTensor(["user", "item", "seen"], values, weights, lengths)
        found, expected = traced(batch), collection(batch)
        assert found.keys() == expected.keys()
        assert torch.equal(found.values(), expected.values())
        assert torch.equal(found.lengths(), expected.lengths())
        if weights is not None:
            assert torch.equal(found.weights(), expected.weights())


def test_a_loaded_state_with_an_id_twice_is_refused():
    module = MCHManagedCollisionModule(6, CPU, LFU_EvictionPolicy(), 1, name="item")
    module(lists([7, 8, 9]))
    state = module.state_dict()
    state["_mch_sorted_raw_ids"] = state["_mch_sorted_raw_ids"].clone()
    state["_mch_sorted_raw_ids"][1] = 7
    with pytest.raises(ValueError, match=r"item.* id 7 more than one row"):
        module.load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("JaggedTensor", r"from_jt_dict\(\{name of the feature: features\}\)"),
        ("dict", r"from_jt_dict\(features\)"),
        ("Tensor", r"\(keys, values, lengths=lengths\)"),
        ("NoneType", r"\(keys, values, lengths=lengths\)"),
    ],
)
def test_what_is_not_a_batch_is_refused_with_the_way_to_build_one(kind: str, remedy: str) -> None:
    jagged = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    given = {"JaggedTensor": jagged, "dict": {"item": jagged}, "Tensor": jagged.values()}.get(kind)
    tables, modules = two_tables()
    for takes in (ManagedCollisionCollection(modules, tables), EmbeddingBagCollection(tables)):
        with pytest.raises(
            TypeError,
            match=rf"takes a KeyedJaggedTensor, got {kind}; build one: Keyed\w+.?{remedy}$",
        ):
            takes(given)
