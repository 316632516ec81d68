"""Plans as files: what is loaded is what was saved, a file is whole or absent, and what is damaged
is named.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.tables import SharderSupport, check_plan_covers, place_table
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import (
    TableShard,
    column_wise_shards,
    data_parallel_shards,
    grid_shards,
    parameter_sharding,
    row_wise_shards,
    table_wise_sharding,
    table_wise_shards,
)
from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

PIECES: dict[ShardingType, list[TableShard]] = {
    ShardingType.DATA_PARALLEL: data_parallel_shards(8, 4, 4),
    ShardingType.TABLE_WISE: table_wise_shards(8, 4, 1),
    ShardingType.COLUMN_WISE: column_wise_shards(8, [1, 3], [2, 2]),
    ShardingType.ROW_WISE: row_wise_shards(8, 4, range(3)),
    ShardingType.TABLE_ROW_WISE: row_wise_shards(8, 4, [2, 3]),
    ShardingType.TABLE_COLUMN_WISE: column_wise_shards(8, [2, 2], [0, 1]),
    ShardingType.GRID_SHARD: grid_shards(8, [2, 2], [1, 0], 2),
}


def every_type(device_type: str = "cpu") -> EmbeddingModuleShardingPlan:
    return EmbeddingModuleShardingPlan(
        {
            kind.value: parameter_sharding(kind, shards, device_type, 2)
            for kind, shards in PIECES.items()
        }
    )


def collection(**changes: Any) -> EmbeddingBagCollection:
    """A table of each type's name; changes are {name: (rows, columns)}."""
    shapes = {kind.value: (8, 4) for kind in PIECES} | changes
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(shape[0], shape[1], name, feature_names=[f"f_{name}"])
            for name, shape in shapes.items()
            if shape
        ],
        device=torch.device("meta"),
    )


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_type_is_loaded_as_it_was_saved(tmp_path, device_type):
    plan = ShardingPlan({"": every_type(device_type), "tower.sparse": every_type(device_type)})
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert repr(loaded.plan) == repr(plan.plan)
    assert loaded.fingerprint() == plan.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    loaded.save(str(tmp_path / "again.json"))
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


@given(
    rows=st.integers(1, 10**12),
    columns=st.integers(1, 512),
    rank=st.integers(0, 4096),
    kernel=st.sampled_from(EmbeddingComputeKernel),
    name=st.text(min_size=1),
)
def test_any_entry_survives_the_document(rows, columns, rank, kernel, name):
    entry = table_wise_sharding((rows, columns), rank, "cpu", compute_kernel=kernel)
    plan = ShardingPlan({name: EmbeddingModuleShardingPlan({name: entry})})
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_an_entry_of_which_nothing_is_known_survives_the_document():
    plan = ShardingPlan(
        {"": EmbeddingModuleShardingPlan(t=ParameterSharding("data_parallel", "batched_dense"))}
    )
    loaded = ShardingPlan.from_json(plan.to_json())
    assert loaded == plan
    assert loaded.plan[""]["t"].table_shape() is None


def test_fingerprint_is_of_tables_and_not_of_places():
    here = ShardingPlan({"": EmbeddingModuleShardingPlan(t=table_wise_sharding((8, 4), 0, "cpu"))})
    there = ShardingPlan(
        {
            "": EmbeddingModuleShardingPlan(
                t=parameter_sharding(ShardingType.ROW_WISE, PIECES[ShardingType.ROW_WISE], "cuda")
            )
        }
    )
    assert here.fingerprint() == there.fingerprint()
    for other in (
        ShardingPlan({"": EmbeddingModuleShardingPlan(t=table_wise_sharding((8, 5), 0, "cpu"))}),
        ShardingPlan({"": EmbeddingModuleShardingPlan(t=table_wise_sharding((9, 4), 0, "cpu"))}),
        ShardingPlan({"": EmbeddingModuleShardingPlan(u=table_wise_sharding((8, 4), 0, "cpu"))}),
        ShardingPlan(
            {"sparse": EmbeddingModuleShardingPlan(t=table_wise_sharding((8, 4), 0, "cpu"))}
        ),
    ):
        assert other.fingerprint() != here.fingerprint()


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    ShardingPlan().save(path)
    before = path.read_text()

    def full_disk(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        ShardingPlan({"": every_type()}).save(path)
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_missing_file_or_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        ShardingPlan.load(tmp_path / "absent.json")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ShardingPlan().save(tmp_path / "nowhere" / "plan.json")


def document() -> dict[str, Any]:
    return json.loads(ShardingPlan({"": every_type()}).to_json())


def changed(*path: Any, value: Any = None) -> str:
    """The document with one value replaced, or with one key dropped where no value is given."""
    whole = document()
    holder = whole
    for step in path[:-1]:
        holder = holder[step]
    if value is None:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return json.dumps(whole)


ROW = ("modules", "", "row_wise")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a whole JSON document: Expecting value: line 1.* save the plan again"),
        (ShardingPlan({"": every_type()}).to_json()[:-200], "is not a whole JSON document"),
        ("[" * 100_000, "is not a whole JSON document: maximum recursion depth"),
        ("[]", 'is JSON, but not a sharding plan: it lacks "format": "tutorec sharding plan"'),
        (changed("format", value="x"), "but not a sharding plan"),
        (changed("version", value=2), "of version 2, and this tutorec reads version 1"),
        (changed("modules"), "is damaged: the document lacks 'modules'"),
        (changed("modules", value=[]), r"'modules' of the document is \[\], not dict"),
        (changed("modules", "", value=[]), r"'tables' of module '' is \[\], not dict"),
        (
            changed(*ROW, value=3),
            "is damaged: module '', table 'row_wise' is 3, not an entry of a plan",
        ),
        (changed(*ROW, "rows"), "module '', table 'row_wise' lacks 'rows'"),
        (
            changed(*ROW, "rows", value="8"),
            "'rows' of module '', table 'row_wise' is '8', not int or null",
        ),
        (
            changed(*ROW, "rows", value=True),
            "'rows' of module '', table 'row_wise' is True, not int",
        ),
        (
            changed(*ROW, "rows", value=9),
            r"damaged: its fingerprint is \w+, and its tables.*'row_wise': \(9, 4\)",
        ),
        (changed(*ROW), r"damaged: its fingerprint is \w+, and its tables"),
        (changed("fingerprint"), "its fingerprint is None"),
        (
            changed(*ROW, "ranks", value=[0, "1"]),
            r"'ranks' of module '', table 'row_wise' is \[0, '1'\], not whole num",
        ),
        (
            changed(*ROW, "shards", 1, value=7),
            "shard 1 of module '', table 'row_wise' is 7, not a shard",
        ),
        (
            changed(*ROW, "shards", 1, "offsets", value=[0]),
            r"'offsets' of shard 1 of .* is \[0\], not 2 whole numbers",
        ),
        (changed(*ROW, "shards", 1, "sizes", value=[0, -4]), r"is \[0, -4\], not 2 whole numbers"),
        (
            changed(*ROW, "shards", 0, "placement", value="rank:x/cpu"),
            "a shard of table 'row_wise' cannot be placed: ",
        ),
        (
            changed(*ROW, "shards", 0, "placement", value="here"),
            "'row_wise' cannot be placed: 'here/cpu' names no rank",
        ),
        (
            changed(*ROW, "shards", 0, "placement", value="rank:0/abacus:0"),
            "of table 'row_wise' cannot be placed: ",
        ),
        (
            changed(*ROW, "shards", value=[]),
            "a shard of table 'row_wise' cannot be placed: Empty shard list",
        ),
        (
            changed(*ROW, "sharding_type", value="sliced"),
            "table 'row_wise' has the unknown ShardingType 'sliced': data_p",
        ),
        (
            changed(*ROW, "compute_kernel", value="quick"),
            "has the unknown EmbeddingComputeKernel 'quick': dense, fused",
        ),
    ],
)
def test_a_damaged_file_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        ShardingPlan.load(path)
    assert str(caught.value).startswith(str(path))


def test_bytes_that_are_no_text_are_refused_with_the_files_name(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not a whole JSON document") as caught:
        ShardingPlan.load(path)
    assert str(caught.value).startswith(str(path))


def test_models_of_the_same_tables_pass():
    plan = ShardingPlan({"sparse": every_type()})
    model = nn.Module()
    model.sparse = collection()
    plan.check_fingerprint(model)
    sequences = EmbeddingCollection(
        [EmbeddingConfig(8, 4, "t", feature_names=["f"])], device=torch.device("meta")
    )
    entry = table_wise_sharding((8, 4), 0, "cpu")
    ShardingPlan({"": EmbeddingModuleShardingPlan(t=entry)}).check_fingerprint(sequences)
    bags = nn.ModuleDict({"t": nn.EmbeddingBag(8, 4)})
    ShardingPlan({"": EmbeddingModuleShardingPlan(t=entry)}).check_fingerprint(nn.Sequential(bags))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"row_wise": (9, 4)},
            (
                r"plan\.json is for other tables: table 'row_wise' is 8 x 4 in the plan and 9 x 4 "
                r"in "
                r"the m"
            ),
        ),
        (
            {"data_parallel": (8, 5)},
            "table 'data_parallel' is 8 x 4 in the plan and 8 x 5 in the model",
        ),
        (
            {"grid_shard": None},
            "module '' has no table 'grid_shard'; plan this model",
        ),
        ({"more": (8, 4)}, "the plan has no table 'more' of module ''"),
    ],
)
def test_models_of_other_tables_are_refused(tmp_path, changes, message):
    ShardingPlan({"": every_type()}).save(tmp_path / "plan.json")
    plan = ShardingPlan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=message):
        plan.check_fingerprint(collection(**changes))


def place(entry: ParameterSharding, rows: int, columns: int) -> Any:
    config = EmbeddingBagConfig(rows, columns, "t", feature_names=["f"])
    rules = SharderSupport(4, False, list(ShardingType), list(EmbeddingComputeKernel), None, 2)
    return place_table(config, ["f"], torch.empty(rows, columns, device="meta"), entry, rules)


def stored(tmp_path: Path, entry: ParameterSharding) -> ParameterSharding:
    path = tmp_path / "plan.json"
    ShardingPlan({"": EmbeddingModuleShardingPlan(t=entry)}).save(path)
    return ShardingPlan.load(path).plan[""]["t"]


@pytest.mark.parametrize(
    "kind", [kind for kind in ShardingType if kind is not ShardingType.ROW_WISE]
)
def test_a_plan_for_other_tables_is_refused_where_it_is_applied(tmp_path, kind):
    entry = stored(tmp_path, parameter_sharding(kind, PIECES[kind], "cpu", 2))
    assert place(entry, 8, 4).sharding_type is kind
    message = (
        r"plan\.json: the plan was made for a table 't' of 8 x 4 rows and columns, and this "
        r"one has 9 x 4"
    )
    with pytest.raises(ValueError, match=message):
        place(entry, 9, 4)


def test_a_plan_that_cannot_be_carried_out_is_refused_with_its_file(tmp_path):
    entry = stored(
        tmp_path, parameter_sharding(ShardingType.ROW_WISE, PIECES[ShardingType.ROW_WISE], "cpu", 2)
    )
    with pytest.raises(ValueError, match=r"plan\.json: table 't'.*row_wise.* range of rows"):
        place(entry, 8, 4)
    with pytest.raises(ValueError, match=r"plan\.json.*nothing.*table 'u'.*\['t'\]"):
        check_plan_covers(["t", "u"], {"t": entry})
    with pytest.raises(ValueError, match=r"plan\.json: .*table 't'.* does not have"):
        check_plan_covers([], {"t": entry})
    with pytest.raises(ValueError, match=r"table 't'.*8 x 4"):
        place(table_wise_sharding((8, 4), 0, "cpu"), 8, 5)


def test_a_stored_plan_shards_its_own_tables_and_no_others(tmp_path):
    tables = [
        EmbeddingBagConfig(8, 4, "small", feature_names=["f"]),
        EmbeddingBagConfig(6, 4, "large", feature_names=["g"]),
    ]
    entries = EmbeddingModuleShardingPlan(
        small=parameter_sharding(ShardingType.DATA_PARALLEL, data_parallel_shards(8, 4, 1), "cpu"),
        large=parameter_sharding(ShardingType.ROW_WISE, row_wise_shards(6, 4, [0]), "cpu"),
    )
    ShardingPlan({"": entries}).save(tmp_path / "plan.json")
    plan = ShardingPlan.load(tmp_path / "plan.json").plan[""]
    sharder, env = EmbeddingBagCollectionSharder(), ShardingEnv.from_local(1, 0)
    batch = KeyedJaggedTensor(["f", "g"], torch.tensor([7, 5]), lengths=torch.tensor([1, 1])).to(
        device()
    )
    ebc = EmbeddingBagCollection(tables).to(device())
    sharded = sharder.shard(ebc, plan, env)
    with torch.no_grad():
        assert torch.equal(sharded(batch).wait().values(), ebc(batch).values())
    # A replicated table has no shards to compare with: its rows and columns are kept beside.
    grown = [replace(tables[0], num_embeddings=9), tables[1]]
    with pytest.raises(ValueError, match=r"plan\.json.*table 'small'.*8 x 4.*9 x 4"):
        sharder.shard(EmbeddingBagCollection(grown), plan, env)
