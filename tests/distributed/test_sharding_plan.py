"""Plans: written by hand, printed, and the geometry of their shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ShardingPlan,
    ShardingType,
)
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    apply_to_all,
    calculate_shard_sizes_and_offsets,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

PRINTED = """module: 

    param     | sharding type | compute kernel | ranks
------------- | ------------- | -------------- | -----
product_table | table_wise    | fused          | [0]  
user_table    | table_wise    | fused          | [0]  

    param     | shard offsets | shard sizes |   placement  
------------- | ------------- | ----------- | -------------
product_table | [0, 0]        | [4096, 64]  | rank:0/cuda:0
user_table    | [0, 0]        | [4096, 64]  | rank:0/cuda:0"""  # noqa: W291 - the printed form pads its last column


def tutorial_collection(device: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=4096,
                embedding_dim=64,
                name="product_table",
                feature_names=["product"],
            ),
            EmbeddingBagConfig(
                num_embeddings=4096, embedding_dim=64, name="user_table", feature_names=["user"]
            ),
        ],
        device=torch.device(device),
    )


def test_plan_prints_its_two_tables():
    words = {"product_table": table_wise(rank=0), "user_table": table_wise(rank=0)}
    module_plan = construct_module_sharding_plan(
        tutorial_collection("meta"), words, device_type="cuda"
    )
    assert str(ShardingPlan({"": module_plan})) == PRINTED
    on_cpu = construct_module_sharding_plan(tutorial_collection(), words, device_type="cpu")
    assert (
        str(on_cpu).splitlines()[-1] == "user_table    | [0, 0]        | [4096, 64]  | rank:0/cpu"
    )
    two = str(ShardingPlan({"a": module_plan, "b": on_cpu}))
    assert two.count("module: ") == 2
    assert "rank:0/cuda:0\n\nmodule: b\n\n" in two


def test_kernel_of_a_hand_written_plan_is_fused_and_both_spellings_are_accepted():
    ebc = tutorial_collection()
    plan = construct_module_sharding_plan(
        ebc,
        {
            "product_table": table_wise(1, compute_kernel="batched_dense"),
            "user_table": table_wise(0),
        },
        world_size=2,
    )
    assert {name: sharding.compute_kernel for name, sharding in plan.items()} == {
        "product_table": "dense",
        "user_table": "fused",
    }
    assert plan["product_table"].ranks == [1]
    assert EmbeddingComputeKernel("batched_fused") is EmbeddingComputeKernel.FUSED
    with pytest.raises(ValueError, match=r"'quick' is unknown.*dense, fused"):
        table_wise(0, compute_kernel="quick")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"product_table": 0},
            (
                r"missing \['user_table'\], unknown \[\]; its tables are \['product_table', "
                r"'user_table'"
            ),
        ),
        ({"product_table": 0, "user_table": 0, "x": 0}, r"missing \[\], unknown \['x'\]"),
        (
            {"product_table": 0, "user_table": 2},
            r"table_wise\(rank=2\) for table 'user_table': the world has 2 ranks, 0",
        ),
        ({"product_table": 0, "user_table": -1}, r"table_wise\(rank=-1\)"),
    ],
)
def test_words_that_do_not_fit_the_module_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        construct_module_sharding_plan(
            tutorial_collection(),
            {name: table_wise(rank) for name, rank in words.items()},
            world_size=2,
        )


def test_module_without_a_sharder_is_refused():
    with pytest.raises(
        ValueError,
        match=r"no.*Linear:.*EmbeddingBagCollection, EmbeddingCollection, Fused",
    ):
        construct_module_sharding_plan(nn.Linear(2, 2), {})


def test_collections_of_rows_that_are_not_pooled_are_planned_alike():
    table = EmbeddingConfig(num_embeddings=5, embedding_dim=4, name="t", feature_names=["f"])
    rows = EmbeddingCollection([table], device=torch.device("meta"))
    plan = construct_module_sharding_plan(
        rows, apply_to_all(rows, row_wise()), world_size=2, device_type="cpu"
    )
    assert [shard.shard_sizes for shard in plan["t"].shards()] == [[3, 4], [2, 4]]


def test_sharding_types_have_torchrecs_values():
    assert [kind.value for kind in ShardingType] == [
        "data_parallel",
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ]


def documents_collection() -> EmbeddingBagCollection:
    """Two large and two small tables, on the meta device, as *Exploring TorchRec sharding* has
    them.
    """
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                rows, 64, f"{size}_table_{index}", feature_names=[f"{size}_table_feature_{index}"]
            )
            for size, rows in (("large", 4096), ("small", 1024))
            for index in range(2)
        ],
        device=torch.device("meta"),
    )


def documents_plan(
    word: ParameterShardingGenerator, world_size: int = 2, local_size: int | None = None
) -> EmbeddingModuleShardingPlan:
    ebc = documents_collection()
    return construct_module_sharding_plan(
        ebc,
        apply_to_all(ebc, word),
        world_size=world_size,
        local_size=local_size,
        device_type="cuda",
    )


def shard(offsets: str, sizes: str, place: str) -> str:
    return f"ShardMetadata(shard_offsets={offsets}, shard_sizes={sizes}, placement={place})"


def printed(sharding_type: str, ranks: str, *shards: str, kernel: str = "fused") -> str:
    spec = f"EnumerableShardingSpec(shards=[{', '.join(shards)}])" if shards else "None"
    return (
        f"ParameterSharding(sharding_type='{sharding_type}', compute_kernel='{kernel}', "
        f"ranks={ranks}, sharding_spec={spec})"
    )


def test_table_wise_plan_is_the_documents():
    words = {
        f"{size}_table_{index}": table_wise(rank=index)
        for size in ("large", "small")
        for index in range(2)
    }
    plan = construct_module_sharding_plan(
        documents_collection(), words, world_size=2, device_type="cuda"
    )
    assert repr(plan["large_table_1"]) == printed(
        "table_wise", "[1]", shard("[0, 0]", "[4096, 64]", "rank:1/cuda:1")
    )
    assert repr(plan["small_table_0"]) == printed(
        "table_wise", "[0]", shard("[0, 0]", "[1024, 64]", "rank:0/cuda:0")
    )
    assert str(ShardingPlan({"": plan}).plan).startswith(
        "{'': {'large_table_0': ParameterSharding(sharding_type='tab"
    )


def test_row_wise_plan_is_the_documents():
    plan = documents_plan(row_wise())
    for name, half in (("large_table_0", 2048), ("large_table_1", 2048), ("small_table_0", 512)):
        assert repr(plan[name]) == printed(
            "row_wise",
            "[0, 1]",
            shard("[0, 0]", f"[{half}, 64]", "rank:0/cuda:0"),
            shard(f"[{half}, 0]", f"[{half}, 64]", "rank:1/cuda:1"),
        )


@pytest.mark.parametrize(
    "word", [column_wise(ranks=[0, 1]), column_wise(), column_wise(size_per_rank=[32, 32])]
)
def test_column_wise_plan_is_the_documents(word):
    plan = documents_plan(word)
    for name, rows in (("large_table_0", 4096), ("small_table_1", 1024)):
        assert repr(plan[name]) == printed(
            "column_wise",
            "[0, 1]",
            shard("[0, 0]", f"[{rows}, 32]", "rank:0/cuda:0"),
            shard("[0, 32]", f"[{rows}, 32]", "rank:1/cuda:1"),
        )


def test_data_parallel_plan_is_the_documents():
    plan = documents_plan(data_parallel("batched_dense"))
    assert {repr(sharding) for sharding in plan.values()} == {
        printed("data_parallel", "[0, 1]", kernel="dense")
    }
    assert documents_plan(data_parallel())["small_table_0"].compute_kernel == "fused"
    # no table of shards, as in TorchRec
    assert str(plan).endswith("| data_parallel | dense          | [0, 1]\n\n\n")


def test_table_row_wise_plan_lies_on_one_host():
    plan = documents_plan(table_row_wise(host_index=1), world_size=4, local_size=2)
    assert repr(plan["large_table_1"]) == printed(
        "table_row_wise",
        "[2, 3]",
        shard("[0, 0]", "[2048, 64]", "rank:2/cuda:0"),
        shard("[2048, 0]", "[2048, 64]", "rank:3/cuda:1"),
    )


@pytest.mark.parametrize("word", [table_column_wise(host_index=1), table_column_wise(ranks=[2, 3])])
def test_table_column_wise_plan_lies_on_one_host(word):
    plan = documents_plan(word, world_size=4, local_size=2)
    assert repr(plan["small_table_0"]) == printed(
        "table_column_wise",
        "[2, 3]",
        shard("[0, 0]", "[1024, 32]", "rank:2/cuda:0"),
        shard("[0, 32]", "[1024, 32]", "rank:3/cuda:1"),
    )


def test_grid_plan_cuts_columns_over_hosts_and_rows_inside():
    plan = documents_plan(grid_shard(host_indexes=[0, 1]), world_size=4, local_size=2)
    assert repr(plan["large_table_0"]) == printed(
        "grid_shard",
        "[0, 1, 2, 3]",
        shard("[0, 0]", "[2048, 32]", "rank:0/cuda:0"),
        shard("[2048, 0]", "[2048, 32]", "rank:1/cuda:1"),
        shard("[0, 32]", "[2048, 32]", "rank:2/cuda:0"),
        shard("[2048, 32]", "[2048, 32]", "rank:3/cuda:1"),
    )


def test_columns_may_be_of_any_widths_on_any_ranks():
    plan = documents_plan(column_wise(ranks=[1, 0, 1], size_per_rank=[1, 60, 3]))
    shards = plan["small_table_0"].shards()
    assert [(str(s.placement), s.shard_offsets[1], s.shard_sizes[1]) for s in shards] == [
        ("rank:1/cuda:1", 0, 1),
        ("rank:0/cuda:0", 1, 60),
        ("rank:1/cuda:1", 61, 3),
    ]
    assert documents_plan(column_wise(size_per_rank=[0, 64]))["small_table_0"].ranks == [1]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            column_wise(ranks=[0, 1, 2]),
            r"ranks=\[0, 1, 2\]\) for table 'large_table_0': its 64 columns do not divide by 3 ",
        ),
        (
            column_wise(ranks=[0, 1, 2]),
            r"2 of them would do, \[0, 1\], or column_wise\(ranks, size_per_rank=",
        ),
        (column_wise(ranks=[]), "it names no ranks"),
        (column_wise(ranks=[0, 4]), "the world has 4 ranks, 0 to 3; pass world_size="),
        (
            column_wise(size_per_rank=[32, 16]),
            "2 sizes add up to 48, for 2 ranks and a table of 64 columns",
        ),
        (column_wise(ranks=[0], size_per_rank=[32, 32]), "2 sizes add up to 64, for 1 ranks"),
        (column_wise(size_per_rank=[-1, 65]), "at least 0"),
        (
            table_row_wise(2),
            (
                r"table_row_wise\(host_index=2\) for table 'large_table_0': host 2 does not exist; "
                r"the "
                r"2 hosts are 0 to 1"
            ),
        ),
        (table_row_wise(-1), "host -1 does not exist; the 2 hosts"),
        (
            table_column_wise(ranks=[1, 2]),
            r"are on hosts \[0, 1\], 2 ranks per host.*column_wise\(ranks=\[1, 2\]\)",
        ),
        (grid_shard([0, 2]), "host 2 does not exist; the 2 hosts"),
        (grid_shard([]), "it names no hosts"),
        (grid_shard([0, 1, 0]), "its 64 columns do not divide by 3 hosts; 2 of them would do"),
    ],
)
def test_words_that_cannot_be_carried_out_say_what_would_do(word, message):
    with pytest.raises(ValueError, match=message):
        documents_plan(word, world_size=4, local_size=2)


def test_hosts_need_a_world_of_whole_hosts():
    with pytest.raises(ValueError, match=r"3 ranks cannot.*2 ranks"):
        documents_plan(table_row_wise(0), world_size=3, local_size=2)


@pytest.mark.parametrize("given", [{}, {"host_index": 0, "ranks": [0]}])
def test_table_column_wise_wants_a_host_or_ranks(given):
    with pytest.raises(ValueError, match=r"ranks of one.*table_column_wise\(host_index=0\)"):
        table_column_wise(**given)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            lambda: table_wise(None),
            r"for table 't': a rank is an integer from 0 to 1, got None",
        ),
        (
            lambda: table_row_wise("a"),
            r"table_row_wise\(host_index=a\) for table 't': a host is an integer.*got 'a'",
        ),
        (lambda: "row_wise", r"table 't' is given 'row_wise': pass table_wise\(rank=0\)"),
        (lambda: row_wise, r"table 't' is given row_wise, which is not called: pass table_wise"),
        (lambda: table_wise(True), r"for table 't': a rank is an integer from 0 to 1, got True"),
        (
            lambda: column_wise(size_per_rank=[2.0, 2.0]),
            r"lists whole numbers of columns, got \[2\.0, 2\.0\]",
        ),
    ],
)
def test_words_of_the_wrong_kind_are_named(word, message):
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    with pytest.raises(TypeError, match=message):
        construct_module_sharding_plan(ebc, {"t": word()}, world_size=2)


def test_ranks_may_be_numbers_of_numpy():
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    plan = construct_module_sharding_plan(ebc, {"t": table_wise(np.int64(1))}, world_size=2)
    assert plan["t"].ranks == [1]


@pytest.mark.parametrize(
    "words", [None, row_wise(), [row_wise()], row_wise], ids=["none", "word", "list", "function"]
)
def test_words_that_stand_in_no_dict_are_refused_with_one_that_would_do(words):
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    with pytest.raises(
        TypeError,
        match=r": \{'t': row_wise\(\).*apply_to_all\(module, row_wise\(\)\)",
    ):
        construct_module_sharding_plan(ebc, words, world_size=2)


def test_a_word_for_all_tables_is_a_word():
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    with pytest.raises(TypeError, match=r"row_wise.*not.*pass table_wise"):
        apply_to_all(ebc, row_wise)


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"world_size": 0}, "world_size is a number of ranks, at least 1, got 0"),
        ({"world_size": -1}, "world_size is a number of ranks, at least 1, got -1"),
        ({"world_size": 2.0}, r"world_size is a number of ranks, at least 1, got 2\.0"),
        ({"local_size": 0}, "local_size is a number of ranks, at least 1, got 0"),
        ({"device_type": "gpu"}, "device_type 'gpu' is not a device type: 'cpu' or 'cuda'"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(machine, message):
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    with pytest.raises(ValueError, match=message):
        construct_module_sharding_plan(ebc, {"t": row_wise()}, **{"world_size": 2, **machine})


def test_a_device_may_be_one_of_torch():
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
    plan = construct_module_sharding_plan(
        ebc, {"t": table_wise(1)}, world_size=2, device_type=torch.device("cuda", 0)
    )
    assert [str(shard.placement) for shard in plan["t"].shards()] == ["rank:1/cuda:1"]


# --- TorchRec's further arguments


def test_devices_are_written_into_the_plan():
    ebc = tutorial_collection("meta")
    words = {
        "product_table": table_wise(1, "cpu"),
        "user_table": column_wise(ranks=[0, 1], device_types=["cuda", "cpu"]),
    }
    plan = construct_module_sharding_plan(ebc, words, world_size=2, device_type="cuda")
    placed = {
        name: [str(shard.placement) for shard in entry.shards()] for name, entry in plan.items()
    }
    assert placed == {
        "product_table": ["rank:1/cpu"],
        "user_table": ["rank:0/cuda:0", "rank:1/cpu"],
    }


def test_rows_are_cut_where_the_sizes_and_the_buckets_say():
    ebc = tutorial_collection("meta")
    words = {
        "product_table": row_wise(([4000, 9000], ["cuda", "cpu"])),
        "user_table": row_wise(num_buckets=4),
    }
    plan = construct_module_sharding_plan(ebc, words, world_size=3 - 1, device_type="cuda")
    assert [shard.shard_sizes[0] for shard in plan["product_table"].shards()] == [4000, 96]
    assert [str(shard.placement) for shard in plan["product_table"].shards()] == [
        "rank:0/cuda:0",
        "rank:1/cpu",
    ]
    assert [shard.shard_sizes[0] for shard in plan["user_table"].shards()] == [2048, 2048]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (row_wise(([4, 4], "cpu")), r"its 4096 rows are more than the sizes \[4, 4\] hold"),
        (row_wise(num_buckets=3), "num_buckets=3 must divide the 4096 rows"),
        (column_wise(ranks=[0, 1], device_types=["cpu"]), "it names 1 devices for 2 shards"),
    ],
    ids=str,
)
def test_sizes_and_devices_that_do_not_fit_are_refused(word, message):
    ebc = tutorial_collection("meta")
    with pytest.raises(ValueError, match=f"for table 'product_table': {message}"):
        construct_module_sharding_plan(
            ebc, apply_to_all(ebc, word), world_size=2, device_type="cpu"
        )


def test_a_generator_of_the_callers_is_called_with_torchrecs_arguments():
    ebc = tutorial_collection("meta")

    def first_rank(param, local_size, world_size, device_type, sharder):
        return table_wise(0)(param, local_size, world_size, device_type, sharder)

    words = {"product_table": first_rank, "user_table": table_wise(0)}
    plan = construct_module_sharding_plan(ebc, words, world_size=2, local_size=1, device_type="cpu")
    assert plan["product_table"] == plan["user_table"]


@pytest.mark.parametrize(
    "kind", ["data_parallel", "table_wise", "row_wise", "table_row_wise", "column_wise"]
)
def test_sizes_and_offsets_are_those_of_the_plan(kind):
    weight = torch.empty(10, 256, device="meta")
    sizes, offsets = calculate_shard_sizes_and_offsets(weight, 4, 2, kind)
    assert (
        len(sizes)
        == {
            "data_parallel": 4,
            "table_wise": 1,
            "row_wise": 4,
            "table_row_wise": 2,
            "column_wise": 2,
        }[kind]
    )
    covered = sum(rows * columns for rows, columns in sizes)
    assert covered == weight.numel() * (4 if kind == "data_parallel" else 1)
    assert offsets[0] == [0, 0]


def test_memory_and_buckets_cut_rows_unevenly():
    weight = torch.empty(12, 4, device="meta")
    assert calculate_shard_sizes_and_offsets(weight, 2, 2, "row_wise", device_memory_sizes=[1, 3])[
        0
    ] == [
        [3, 4],
        [9, 4],
    ]
    assert calculate_shard_sizes_and_offsets(weight, 2, 2, "row_wise", num_buckets=3)[0] == [
        [8, 4],
        [4, 4],
    ]
