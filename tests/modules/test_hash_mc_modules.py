"""Hash mappings against lists and loops: streams, shards, times to live, evaluation, ids without a
row.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernels.implementations import needs_fbgemm
from kernels.slot_table import SlotTable
from torch import Tensor

import tutorec
from tutorec._kernels.backend import use_backend
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.hash_mc_evictions import (
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
    HashZchSingleTtlScorer,
)
from tutorec.modules.hash_mc_metrics import ScalarLogger, ScalarLoggerBackend
from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper
from tutorec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.modules.utils import make_hash_zch_buckets_non_persistent
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

CPU = torch.device("cpu")
POLICIES = {
    "never": (None, None),
    "first": (
        HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
        HashZchEvictionConfig(["f"], single_ttl=2),
    ),
    "oldest": (HashZchEvictionPolicyName.LRU_EVICTION, HashZchEvictionConfig(["f"], single_ttl=2)),
}


@pytest.fixture(params=["torch", pytest.param("fbgemm", marks=needs_fbgemm)], autouse=True)
def _each_backend(request: pytest.FixtureRequest):
    with use_backend(request.param):
        yield


@contextmanager
def hour(number: int) -> Iterator[None]:
    with patch("time.time", return_value=3600.0 * number + 1):
        yield


def mapping(
    rows: int, buckets: int = 1, evicts: str = "never", **settings: Any
) -> HashZchManagedCollisionModule:
    policy, config = POLICIES[evicts]
    given = {"eviction_policy_name": policy, "eviction_config": config, **settings}
    return HashZchManagedCollisionModule(rows, CPU, buckets, **given)


def table(name: str, rows: int, features: list[str], **settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=4, num_embeddings=rows, feature_names=features, **settings
    )


def lists(ids: list[int] | Tensor, weights: Tensor | None = None) -> JaggedTensor:
    values = torch.as_tensor(ids)
    return JaggedTensor(values, weights, lengths=torch.tensor([len(values)]))


def rows_of(module: HashZchManagedCollisionModule, ids: list[int], name: str = "f") -> list[int]:
    return module({name: lists(ids)})[name].values().tolist()


@pytest.mark.parametrize("evicts", ["never", "first", "oldest"])
@pytest.mark.parametrize(("rows", "buckets", "max_probe"), [(40, 1, 7), (48, 4, 40)])
def test_a_stream_gives_the_rows_the_evictions_and_the_report_of_the_oracle(
    evicts: str, rows: int, buckets: int, max_probe: int
):
    oracle = SlotTable(rows, buckets, max_probe, evicts=evicts)
    module, draw = mapping(rows, buckets, evicts, max_probe=max_probe), random.Random(rows)
    lookups = collisions = evictions = 0
    for now in range(1, 16):
        ids = [draw.randrange(2 * now, 2 * now + 50) for _ in range(20)]
        expected, evicted = oracle.learn(ids, [now + 2] * 20, now)
        with hour(now):
            assert rows_of(module, ids) == expected
        gone = module.evict()
        assert (set() if gone is None else {*gone.tolist()}) == evicted
        lookups, evictions = lookups + 20, evictions + len(evicted)
        collisions += sum(oracle.slot(number) is None for number in ids)
    report = module.report("t")
    assert (report.lookups, report.collisions, report.evictions) == (lookups, collisions, evictions)
    assert report.occupied == rows - oracle.ids.count(-1) == rows - int(module.open_slots())
    module.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert rows_of(module, [*range(200)]) == [oracle.answer(number) for number in range(200)]
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("input_hash_size", [0, 90])
@pytest.mark.parametrize(
    "ranges", [[(0, 12), (12, 24)], [(0, 6), (6, 12), (12, 24)], [(0, 6), (6, 24)]]
)
def test_shards_hold_what_the_whole_mapping_holds(
    input_hash_size: int, ranges: list[tuple[int, int]]
):
    whole = mapping(24, 4, "first", max_probe=3, input_hash_size=input_hash_size)
    shards = [whole.rebuild_with_output_id_range(rows) for rows in ranges]
    draw = random.Random(7)
    for now in range(10, 20):
        ids = torch.tensor([draw.randrange(100) for _ in range(16)])
        _, _, offsets = whole.input_mapper(ids)
        expected, found = torch.tensor([0]), torch.full([16], -1)
        with hour(now):
            expected = whole({"f": lists(ids)})["f"].values()
            for (first, end), shard in zip(ranges, shards, strict=True):
                mine = (offsets >= first) & (offsets < end)
                found[mine] = shard({"f": lists(ids[mine])})["f"].values()
        assert torch.equal(found, expected)
        gone = [rows for shard in shards if (rows := shard.evict()) is not None]
        evicted = whole.evict()
        assert [row for rows in gone for row in rows.tolist()] == (
            [] if evicted is None else evicted.tolist()
        )
    for name in (whole.IDENTITY_BUFFER, whole.METADATA_BUFFER):
        assert torch.equal(
            torch.cat([shard.state_dict()[name] for shard in shards]), whole.state_dict()[name]
        )


def test_cutting_a_bucket_names_the_rows_where_buckets_begin():
    with pytest.raises(ValueError, match=r"rows 0 to 9.*not.*\[0, 6, 12, 18, 24\]"):
        mapping(24, 4).rebuild_with_output_id_range((0, 9))


def test_an_id_of_another_ranks_bucket_is_refused():
    shard = mapping(24, 4).rebuild_with_output_id_range((0, 12))
    assert rows_of(shard, [0, 1, 4, 5]) == rows_of(shard, [0, 1, 4, 5])
    with pytest.raises(ValueError, match="no bucket from 0 to 1"):
        rows_of(shard, [0, 2])


def test_an_id_leaves_its_row_when_its_features_time_to_live_is_over():
    config = HashZchEvictionConfig(["short", "long"], per_feature_ttl=[1, 5])
    policy = HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
    module = mapping(4, eviction_policy_name=policy, eviction_config=config)
    collection = ManagedCollisionCollection({"t": module}, [table("t", 4, ["short", "long"])])

    def learn(now: int, short: list[int], long: list[int]) -> list[int]:
        with hour(now):
            ids, lengths = torch.tensor([*short, *long]), torch.tensor([len(short), len(long)])
            return (
                collection(KeyedJaggedTensor(["short", "long"], ids, lengths=lengths))
                .values()
                .tolist()
            )

    first = learn(10, [5, 6], [7, 8])
    assert sorted(first) == [0, 1, 2, 3]
    assert learn(11, [5], [9])[0] == first[0]  # 6 is kept until hour 11: 9 has no row yet
    assert module.evict() is None
    row = learn(12, [9], [])
    assert row == [first[1]]
    assert module.evict().tolist() == row
    assert learn(12, [5], [7, 8]) == [first[0], *first[2:]]


def test_a_feature_with_the_read_only_suffix_changes_nothing():
    module = mapping(8, evicts="first")
    assert module.read_only_suffix == module.readable_suffix == "_readonly"
    assert rows_of(module, [1, 2], "f_readonly") == rows_of(module, [1, 2], "F_READONLY")
    assert int(module.open_slots()) == 8
    known = rows_of(module, [1, 2])
    assert rows_of(module, [1, 2], "f_readonly") == known


@pytest.mark.parametrize("by_feature", [False, True])
def test_a_collection_looks_up_read_only_features_by_name(by_feature: bool):
    module = mapping(8, enable_per_feature_lookups=by_feature)
    collection = ManagedCollisionCollection({"t": module}, [table("t", 8, ["f", "g_readonly"])])
    features = ["f", "g_readonly"]
    collection(KeyedJaggedTensor(features, torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2])))
    assert int(module.open_slots()) == (7 if by_feature else 5)


def test_ids_without_a_row_are_taken_out_with_their_weights():
    module = mapping(16, disable_fallback=True).eval()
    module.train()
    rows = rows_of(module, [3, 4])
    module.eval()
    ids, weights = torch.tensor([9, 3, 8, 4, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    out = module({"f": JaggedTensor(ids, weights, lengths=torch.tensor([1, 0, 3, 1]))})["f"]
    assert out.values().tolist() == [rows[0], rows[1], rows[0]]
    assert out.lengths().tolist() == [0, 0, 2, 1]
    assert out.weights().tolist() == [2.0, 4.0, 5.0]
    kept = mapping(16, disable_fallback=True, no_bag=True)
    kept.load_state_dict(module.state_dict())
    out = kept.eval()({"f": JaggedTensor(ids, lengths=torch.tensor([1, 0, 3, 1]))})["f"]
    assert out.values().tolist() == [0, rows[0], 0, rows[1], rows[0]]
    assert out.lengths().tolist() == [1, 0, 3, 1]
    collection = ManagedCollisionCollection({"t": module}, [table("t", 16, ["a", "b"])])
    batch = KeyedJaggedTensor(["a", "b"], ids, weights, lengths=torch.tensor([1, 1, 2, 1]))
    out = collection(batch)
    assert (out.lengths().tolist(), out.weights().tolist()) == ([0, 1, 1, 1], [2.0, 4.0, 5.0])


def test_ids_that_are_not_opted_in_share_the_reserved_rows():
    module = mapping(20, 2, opt_in_prob=50, percent_reserved_slots=20)
    reserved = module.get_indices_of_reserved_slots_per_bucket()
    assert reserved is not None
    assert reserved.tolist() == [8, 9, 18, 19]
    ids = [*range(12)]
    rows = rows_of(module, [*ids, *ids])
    assert rows[:12] == rows[12:], "an id has one row in a batch"
    identities = module._hash_zch_identities[:, 0].tolist()
    own = [number for number in ids if number in identities]
    assert 0 < len(own) < 12
    assert all((rows[number] in {8, 9, 18, 19}) == (number not in own) for number in ids)
    assert [identities[row] for row in (8, 9, 18, 19)] == [-1] * 4


def test_a_scripted_mapping_gives_the_rows_of_evaluation():
    modules = {
        "t": mapping(24, 4, "first", input_hash_size=70),
        "u": mapping(8, disable_fallback=True),
    }
    configs = [table("t", 24, ["a", "b"]), table("u", 8, ["c"])]
    collection = ManagedCollisionCollection(dict(modules), configs)
    ids, lengths = torch.arange(2, 32), torch.tensor([3, 7, 0, 10, 4, 6])
    collection(KeyedJaggedTensor(["c", "a", "b"], ids, lengths=lengths))
    collection.eval()
    batch = KeyedJaggedTensor(["c", "a", "b"], ids * 2, lengths=lengths)
    expected, found = collection(batch), torch.jit.script(collection)(batch)
    assert found.keys() == expected.keys()
    assert torch.equal(found.values(), expected.values())
    assert torch.equal(found.lengths(), expected.lengths())


def test_a_state_is_loaded_into_training_and_into_inference_and_not_into_other_buckets():
    module = mapping(24, 4, "first")
    rows = rows_of(module, [5, 6, 7])
    again, served = (
        mapping(24, 4, "first"),
        torch.nn.ModuleDict({"t": mapping(24, 4, "first", is_inference=True)}),
    )
    again.load_state_dict(module.state_dict())
    assert rows_of(again, [5, 6, 7]) == rows
    served.load_state_dict({f"t.{name}": value for name, value in module.state_dict().items()})
    assert rows_of(served["t"], [5, 6, 7]) == rows
    assert served["t"]._hash_zch_metadata is None
    with pytest.raises(ValueError, match=r"total_num_buckets=4.*2"):
        mapping(24, 2, "first").load_state_dict(module.state_dict())
    served["t"].reset_inference_mode()
    with pytest.raises(ValueError, match=r"dropped.*SINGLE_TTL_EVICTION"):
        served["t"].reset_training_mode()


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_tables_that_were_first_looked_up_in_inference_mode(made_in_inference_mode: bool):
    tables = [EmbeddingBagConfig(8, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
    with torch.inference_mode(made_in_inference_mode):
        mappings = ManagedCollisionCollection({one.name: mapping(8) for one in tables}, tables)
        model = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables), mappings)
    ids = KeyedJaggedTensor(["f0", "f1"], torch.arange(20), lengths=torch.ones(20).long())
    model.eval()
    with torch.inference_mode():
        for _ in range(3):  # an index is made
            model(ids)
    if not made_in_inference_mode:
        model.train()
        model(ids)[0].values().sum().backward()
        assert model(ids)[0].values().shape == (10, 8)


def test_an_id_that_marks_an_empty_row_is_refused():
    module = mapping(8)
    with pytest.raises(ValueError, match="'f': an id is -1"):
        rows_of(module, [3, -1])
    with tutorec.validation(False):
        rows_of(module, [3, -1])


def test_uses_of_ids_are_counted_until_they_leave():
    module = mapping(1, evicts="first", track_id_freq=True)
    with hour(1):
        rows_of(module, [5, 5, 6])
    counts = module.lookup_runtime_meta(torch.tensor([5, 6]), torch.tensor([0, 0]))
    assert counts.tolist() == [2, 0], "6 shares the row of 5"
    with hour(5):
        rows_of(module, [6])
    assert module.lookup_runtime_meta(torch.tensor([5, 6]), torch.tensor([0, 0])).tolist() == [0, 1]


def test_numbers_of_a_caller_are_kept_with_ids_until_they_leave():
    module = mapping(1, evicts="first", write_runtime_meta_dim=2)
    with hour(1):
        module.remap(
            {"f": lists([5, 6])},
            write_weights=torch.tensor([[1.5, 2.5], [7.0, 7.0]], dtype=torch.float64),
        )
    kept = module.lookup_custom_runtime_meta(torch.tensor([0]))
    assert kept.view(torch.float64).tolist() == [[1.5, 2.5]]
    with hour(5):
        module.remap({"f": lists([6])})
    assert module.lookup_custom_runtime_meta(torch.tensor([0])).tolist() == [[0, 0]]


def test_a_row_that_another_id_has_taken_starts_anew():
    config = table("t", 1, ["f"], init_fn=lambda rows: rows.fill_(0.5))
    tables = EmbeddingBagCollection(tables=[config])
    module = mapping(1, evicts="first")
    model = ManagedCollisionEmbeddingBagCollection(
        tables, ManagedCollisionCollection({"t": module}, [config])
    )
    with torch.no_grad():
        tables.embedding_bags["t"].weight.fill_(9.0)

    def pooled(now: int, number: int) -> list[float]:
        with hour(now):
            batch = KeyedJaggedTensor(["f"], torch.tensor([number]), lengths=torch.tensor([1]))
            return model(batch)[0]["f"].flatten().tolist()

    assert pooled(1, 5) == [9.0] * 4
    assert pooled(2, 6) == [9.0] * 4, "5 has the row until hour 3"
    assert pooled(4, 6) == [0.5] * 4


def test_reports_come_every_so_many_batches_with_their_shares():
    reports = []

    class Kept(ScalarLoggerBackend):
        def report(
            self,
            log_message: str,
            name: str,
            run_type: str,
            step: int,
            rate_metrics: dict[str, float],
        ) -> None:
            reports.append((name, run_type, step, rate_metrics))

    module = mapping(2, evicts="first", name="t", tb_logging_frequency=2)
    assert module._scalar_logger is not None
    module._scalar_logger._backend = Kept()
    for now, ids in [(1, [5, 6]), (1, [5, 7]), (9, [8, 8]), (9, [8, 9])]:
        with hour(now):
            rows_of(module, ids)
    assert [report[:3] for report in reports] == [("t", "train", 2), ("t", "train", 4)]
    expected = {
        "hit_rate": 0.25,
        "insert_rate": 0.5,
        "collision_rate": 0.25,
        "eviction_rate": 0.0,
        "opt_in_rate": 1.0,
    }
    assert reports[0][3] == {**expected, "avg_eviction_age": 0.0, "table_usage_ratio": 1.0}
    assert (reports[1][3]["eviction_rate"], reports[1][3]["avg_eviction_age"]) == (0.5, 8.0)


def test_counts_between_reports_have_the_names_of_torchrec():
    logger = ScalarLogger("t", 5, 2, 0, 1, 0, CPU, False)
    before, after = torch.tensor([[0], [1], [2], [-1], [-1]]), torch.arange(5).view(5, 1)
    ids = torch.arange(5)
    for expected in ((5, 3, 2, 0), (10, 6, 4, 0)):
        logger.update(before, after, ids, ids, ids >= 0, None, None)
        counts = logger._total_cnt, logger._hit_cnt, logger._insert_cnt, logger._collision_cnt
        assert counts == expected
    logger("train", after)
    assert logger._total_cnt == 10, "a report comes every two batches"
    logger("train", after)
    assert (logger._total_cnt, logger._eviction_cnt, logger._opt_in_cnt) == (0, 0, 0)


def test_the_mapper_numbers_ids_inside_their_buckets():
    mapper = TrainInputMapper(10, 3, torch.tensor([4, 2, 3]), torch.tensor([0, 4, 6]), True)
    ids, sizes, offsets = mapper(torch.tensor([3, 4, 11, 13]), torch.tensor([4]))
    assert (ids.tolist(), sizes.tolist(), offsets.tolist()) == (
        [3, 0, 3, 4],
        [4, 2, 3, 2],
        [-4, 0, 2, 0],
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"zch_size": 10, "total_num_buckets": 3},
            "10 rows are not a multiple of total_num_buckets=3",
        ),
        ({"percent_reserved_slots": 100}, "percent_reserved_slots=100 is not from 0"),
        ({"opt_in_prob": 50}, "opt_in_prob=50 with 0 reserved rows"),
        ({"track_id_freq": True, "write_runtime_meta_dim": 1}, "choose one"),
        (
            {
                "eviction_policy_name": HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION,
                "eviction_config": HashZchEvictionConfig(["a", "b"], per_feature_ttl=[1]),
            },
            "1 times to live for the 2 features",
        ),
        (
            {"eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION},
            "LRU_EVICTION needs a HashZchEvictionConfig",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        HashZchManagedCollisionModule(
            **{"zch_size": 8, "device": CPU, "total_num_buckets": 1, **settings}
        )


def test_two_uses_of_the_numbers_of_ids_are_an_assertion_error_too_as_in_torchrec():
    with pytest.raises(AssertionError, match="track_id_freq and write_runtime_meta_dim"):
        HashZchManagedCollisionModule(8, CPU, 1, track_id_freq=True, write_runtime_meta_dim=1)


def test_the_number_of_buckets_is_left_out_of_a_state_on_demand():
    model = torch.nn.ModuleList([HashZchManagedCollisionModule(8, CPU, 2) for _ in range(2)])
    kept = [*model.state_dict()]
    assert make_hash_zch_buckets_non_persistent(model) == 2
    assert [*model.state_dict()] == [name for name in kept if "_hash_zch_bucket" not in name]
    assert make_hash_zch_buckets_non_persistent(model) == 0


def test_a_policy_without_a_time_to_live_says_so_at_the_first_batch():
    with pytest.raises(ValueError, match=r"HashZchEvictionConfig\(single_ttl=hours\)"):
        HashZchSingleTtlScorer(HashZchEvictionConfig(["f"])).gen_score(lists([1]))


@pytest.mark.parametrize("buckets", [1, 4])
def test_an_index_finds_the_rows_that_probing_finds(buckets: int):
    """It is made after as many lookups as there are rows, and anew after a change."""
    sizes = {"a": 40, "b": 24}
    modules = {name: mapping(rows, buckets, max_probe=4) for name, rows in sizes.items()}
    configs = [table(name, rows, [name]) for name, rows in sizes.items()]
    collection, draw = ManagedCollisionCollection(dict(modules), configs), random.Random(2)
    changes: list[Callable[[], object]] = [
        lambda: rows_of(modules["a"].train(), [draw.randrange(500) for _ in range(9)], "a"),
        lambda: collection.train()(batch([draw.randrange(500) for _ in range(20)])),
        lambda: modules["b"].load_state_dict(mapping(24, buckets).state_dict()),
        # twice in its slots, where probing finds the first, and out of reach
        lambda: modules["a"]._hash_zch_identities.fill_(77),
    ]

    def batch(ids: list[int]) -> KeyedJaggedTensor:
        half = len(ids) // 2
        return KeyedJaggedTensor(
            [*sizes], torch.tensor(ids), lengths=torch.tensor([half, len(ids) - half])
        )

    collection(batch([draw.randrange(500) for _ in range(50)]))
    for place, change in enumerate(changes):
        change()
        collection.eval()
        for number in range(4):
            ids = [draw.randrange(500) for _ in range(35)] + [77] * 5
            expected = [*rows_of(modules["a"], ids[:20]), *rows_of(modules["b"], ids[20:])]
            assert collection(batch(ids)).values().tolist() == expected
            # Once made, the lookup of both tables stays, and its indices follow the changes.
            together = collection._remapper._joint_lookup
            assert (together is not None) == (place > 0 or number > 0)


@pytest.mark.parametrize("evicts", ["never", "first", "oldest"])
@pytest.mark.parametrize("settings", [[(24, 1, 0), (7, 1, 0)], [(24, 4, 0), (9, 3, 50), (8, 1, 0)]])
def test_tables_that_are_remapped_in_one_call_get_the_rows_of_each_mapping(
    evicts: str, settings: list[tuple[int, int, int]]
):
    def mappings() -> dict[str, HashZchManagedCollisionModule]:
        return {
            f"t{rows}": mapping(rows, buckets, evicts, max_probe=3, input_hash_size=size)
            for rows, buckets, size in settings
        }

    configs = [table(f"t{rows}", rows, [f"a{rows}", f"b{rows}"]) for rows, _, _ in settings]
    names = [name for config in configs for name in config.feature_names]
    alone, joint = mappings(), mappings()
    collection, draw = ManagedCollisionCollection(dict(joint), configs), random.Random(1)
    for now in range(10, 24):
        lengths = [draw.randrange(6) for _ in names]
        ids = torch.tensor([draw.randrange(3 * now) for _ in range(sum(lengths))])
        if now == 15:  # its tensors are no longer where they were
            collection.load_state_dict(collection.state_dict())
            joint[configs[0].name]._hash_zch_identities.data = joint[
                configs[0].name
            ]._hash_zch_identities.data.clone()
        for module in (*alone.values(), *joint.values()):
            module.train(now % 5 > 0)
        batch = KeyedJaggedTensor(names, ids, lengths=torch.tensor(lengths))
        with hour(now):
            rows = collection(batch)
            parts = zip(configs, batch.split([2] * len(configs)), strict=True)
            given = [
                (config.name, JaggedTensor(part.values(), lengths=part.lengths()))
                for config, part in parts
            ]
            expected = [alone[name]({name: part})[name].values() for name, part in given]
        assert torch.equal(rows.values(), torch.cat(expected))
        assert torch.equal(rows.lengths(), batch.lengths())
        gone = collection.evict()
        for name, module in alone.items():
            evicted, same = module.evict(), gone[name]
            assert (evicted is None) == (same is None)
            assert evicted is None or torch.equal(evicted, same)
            assert module.report(name) == joint[name].report(name)
            assert all(
                torch.equal(value, joint[name].state_dict()[key])
                for key, value in module.state_dict().items()
            )
    first = joint[configs[0].name]
    for module in joint.values():
        module.eval()
    with hour(24):
        while collection._remapper._joint_lookup is None:  # until as many ids as rows were probed
            collection(batch)
    copied = copy.deepcopy(collection)
    assert copied._remapper._joint_lookup is None
    first._hash_zch_identities.data.fill_(5)
    held = copied._managed_collision_modules[configs[0].name].get_parameter("_hash_zch_identities")
    assert torch.equal(held, alone[configs[0].name]._hash_zch_identities)
    with pytest.raises(ValueError, match=f"'t{settings[-1][0]}': an id is -1"):
        collection(
            KeyedJaggedTensor(
                names, torch.tensor([-1]), lengths=torch.tensor([0] * (len(names) - 1) + [1])
            )
        )
