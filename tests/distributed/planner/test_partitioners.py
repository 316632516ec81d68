from typing import Any

import numpy as np
import pytest
from distributed.planner.hand_made import option, places, ranks
from hypothesis import given
from hypothesis import strategies as st

from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.partitioners import (
    GreedyPerfPartitioner,
    SortBy,
)
from tutorec.distributed.planner.topology import Perf, Storage
from tutorec.errors import PlannerError, PlannerErrorType

MIB = 2**20


def whole(name: str, ms: float, held: int, **words: Any) -> ShardingOption:
    return option(name, "table_wise", [ms], [held], **words)


def test_greedy_gives_the_largest_table_the_first_rank() -> None:
    plan = [whole("small", 1, 2), whole("large", 1, 8), whole("middle", 1, 4)]
    GreedyPerfPartitioner().partition(plan, ranks(3, hbm=8))
    assert places(plan) == {"large": [0], "middle": [1], "small": [2]}


def test_greedy_sorts_by_time_when_asked() -> None:
    plan = [whole("slow", 9, 2), whole("large", 1, 8)]
    GreedyPerfPartitioner(SortBy.PERF).partition(plan, ranks(2, hbm=8))
    assert places(plan) == {"slow": [0], "large": [1]}


def test_greedy_takes_the_least_loaded_rank_that_has_room() -> None:
    plan = [whole("a", 5, 6), whole("b", 1, 5), whole("c", 1, 4)]
    GreedyPerfPartitioner().partition(plan, ranks(2, hbm=10))
    # Rank 1 has less to do, and room for both; with 8 bytes only rank 0 has no room either, and c
    # does not fit.
    assert places(plan) == {"a": [0], "b": [1], "c": [1]}
    with pytest.raises(PlannerError, match=r"table 'c'.*shard 0.*4 bytes.*HBM.*2.*3 bytes"):
        GreedyPerfPartitioner().partition(plan, ranks(2, hbm=8))


def test_greedy_fills_hosts_evenly() -> None:
    plan = [whole(f"t{number}", 1, 8 - number) for number in range(4)]
    GreedyPerfPartitioner().partition(plan, ranks(4, hbm=20, local_size=2))
    assert places(plan) == {"t0": [0], "t1": [2], "t2": [1], "t3": [3]}


def test_greedy_places_what_is_even_first() -> None:
    plan = [whole("a", 1, 2), option("even", "row_wise", [3, 1], [4, 4])]
    GreedyPerfPartitioner().partition(plan, ranks(2, hbm=10))
    assert places(plan) == {"even": [0, 1], "a": [1]}


def test_greedy_balances_collections_when_asked() -> None:
    one = [whole("alone", 1, 1, path="few")]
    many = [whole(f"t{number}", 1, 9, path="many") for number in range(2)]
    GreedyPerfPartitioner(balance_modules=True).partition([*many, *one], ranks(3, hbm=10))
    assert places(one) == {"alone": [0]}
    GreedyPerfPartitioner().partition([*many, *one], ranks(3, hbm=10))
    assert places(one) == {"alone": [2]}


def test_greedy_places_table_row_wise_on_the_least_loaded_host() -> None:
    plan = [option(f"t{number}", "table_row_wise", [1, 1], [8 - number] * 2) for number in range(4)]
    GreedyPerfPartitioner().partition(plan, ranks(4, hbm=20, local_size=2))
    assert places(plan) == {"t0": [0, 1], "t1": [2, 3], "t2": [0, 1], "t3": [2, 3]}


def test_greedy_places_table_column_wise_within_a_host() -> None:
    plan = [
        option("busy", "table_row_wise", [5, 5], [9, 9]),
        option("cut", "table_column_wise", [1, 1, 1], [2, 2, 2]),
    ]
    GreedyPerfPartitioner().partition(plan, ranks(4, hbm=20, local_size=2))
    assert places(plan) == {"busy": [0, 1], "cut": [2, 3, 2]}


def test_greedy_places_dependent_tables_on_one_host() -> None:
    first = option("x", "table_row_wise", [1, 1], [4, 4], dependency="tower")
    second = option("y", "table_column_wise", [1, 1], [3, 3], dependency="tower")
    plan = [option("busy", "table_row_wise", [5, 5], [9, 9]), first, second]
    GreedyPerfPartitioner().partition(plan, ranks(4, hbm=10, local_size=2))
    assert places(plan) == {"busy": [0, 1], "x": [2, 3], "y": [2, 3]}
    # Alone each would fit on a host of 12 bytes; together they do not.
    with pytest.raises(PlannerError, match=r"table 'y'.*shard 0.*3 bytes.*HBM.*2.*2 bytes"):
        GreedyPerfPartitioner().partition(plan[1:], ranks(4, hbm=6, local_size=2))


def test_greedy_refuses_dependent_tables_that_are_not_on_hosts() -> None:
    with pytest.raises(PlannerError, match=r"tables \['x', 'y'\] depend on one another"):
        GreedyPerfPartitioner().partition(
            [whole("x", 1, 1, dependency="tower"), whole("y", 1, 1, dependency="tower")],
            ranks(2, hbm=10),
        )


def test_greedy_places_a_grid_on_the_least_loaded_hosts() -> None:
    plan = [
        option("busy", "table_row_wise", [5, 5], [20, 20]),
        option("grid", "grid_shard", [1, 1, 1, 1], [2, 2, 2, 2]),
    ]
    GreedyPerfPartitioner().partition(plan, ranks(6, hbm=30, local_size=2))
    assert places(plan) == {"busy": [0, 1], "grid": [2, 3, 4, 5]}


def test_greedy_moves_a_grid_on_until_it_fits() -> None:
    plan = [
        option("full", "table_row_wise", [0, 0], [29, 29]),
        option("grid", "grid_shard", [1, 1, 1, 1], [2, 2, 2, 2]),
    ]
    GreedyPerfPartitioner().partition(plan, ranks(6, hbm=30, local_size=2))
    # Host 0 has nothing to do, and no room: the neighbours are tried next.
    assert places(plan) == {"full": [0, 1], "grid": [2, 3, 4, 5]}


def test_greedy_lets_a_grid_of_more_blocks_than_hosts_go_round() -> None:
    plan = [option("grid", "grid_shard", [1] * 6, [2] * 6)]
    GreedyPerfPartitioner().partition(plan, ranks(4, hbm=30, local_size=2))
    assert places(plan) == {"grid": [0, 1, 2, 3, 0, 1]}
    with pytest.raises(PlannerError, match=r"shard 4.*2 bytes.*HBM,.*rank 0.*1 bytes.*HBM"):
        GreedyPerfPartitioner().partition(plan, ranks(4, hbm=3, local_size=2))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            option("item", "row_wise", [1, 1, 1], [1, 1, 1]),
            r"its 3 shards go one to each of 4 ranks",
        ),
        (
            option("item", "table_row_wise", [1, 1, 1], [1, 1, 1]),
            r"its 3 shards go one to each of 2 ranks",
        ),
        (
            option("item", "grid_shard", [1, 1, 1], [1, 1, 1]),
            r"its 3 shards do not fill whole hosts of 2 ranks",
        ),
        (
            option("item", "row_wise", [1] * 4, [1, 1, 9, 1]),
            r"shard 2 needs 9 bytes of HBM, .* rank 2 has left is 8 bytes",
        ),
        (
            option("item", "table_row_wise", [1] * 2, [1, 9]),
            r"shard 1 needs 9 bytes of HBM, .* rank 1 has left is 8 bytes",
        ),
    ],
)
def test_greedy_refuses_with_table_and_numbers(bad: ShardingOption, message: str) -> None:
    with pytest.raises(
        PlannerError, match=rf"table 'item' as {bad.sharding_type}: .*{message}"
    ) as caught:
        GreedyPerfPartitioner().partition([bad], ranks(4, hbm=8, local_size=2))
    assert caught.value.error_type is PlannerErrorType.PARTITION
    assert [shard.rank for shard in bad.shards] == [None] * bad.num_shards


def test_greedy_refuses_unknown_ways_of_placing() -> None:
    odd = whole("item", 1, 1)
    odd.partition_by = "sideways"
    with pytest.raises(ValueError, match="'sideways' is not a valid PartitionByType"):
        GreedyPerfPartitioner().partition([odd], ranks(2, hbm=8))


def test_greedy_leaves_the_topology_and_a_refused_proposal_alone() -> None:
    plan, topology = [whole("a", 1, 4), whole("b", 1, 4)], ranks(1, hbm=8)
    GreedyPerfPartitioner().partition(plan, topology)
    assert topology.devices[0].storage == Storage(8, 0)
    assert topology.devices[0].perf == Perf(0, 0, 0, 0)
    with pytest.raises(PlannerError, match="table 'b'"):
        GreedyPerfPartitioner().partition(plan, topology, hbm_per_device=7)
    assert places(plan) == {"a": [0], "b": [0]}


def test_greedy_counts_what_ranks_have_to_do_already() -> None:
    topology = ranks(2, hbm=8)
    topology.devices[0].perf = Perf(1.0, 0.0, 0.0, 0.0)
    plan = [whole("a", 1, 4)]
    GreedyPerfPartitioner().partition(plan, topology)
    assert places(plan) == {"a": [1]}


@given(st.data())
def test_every_placement_is_legal_and_fits(data: st.DataObject) -> None:
    local_size, hosts = data.draw(st.sampled_from([1, 2, 3])), data.draw(st.sampled_from([1, 2, 3]))
    world_size = local_size * hosts
    counts = {
        "table_wise": 1,
        "column_wise": 3,
        "row_wise": world_size,
        "data_parallel": world_size,
    }
    counts |= {"table_row_wise": local_size, "table_column_wise": 2, "grid_shard": 2 * local_size}
    plan = []
    for number in range(data.draw(st.integers(1, 6))):
        kind = data.draw(st.sampled_from(sorted(counts)))
        drawn = st.lists(st.integers(0, 30), min_size=counts[kind], max_size=counts[kind])
        plan.append(
            option(f"t{number}", kind, data.draw(drawn), [held * MIB for held in data.draw(drawn)])
        )
    topology = ranks(world_size, hbm=60 * MIB, local_size=local_size)
    partitioner = data.draw(
        st.sampled_from(
            [
                GreedyPerfPartitioner(),
                GreedyPerfPartitioner(SortBy.PERF),
            ]
        )
    )
    try:
        partitioner.partition(plan, topology)
    except PlannerError:
        return
    used = np.zeros(world_size)
    for each in plan:
        np.add.at(used, each.placed_ranks(world_size), each.memory()[:, 0])
    assert used.max() <= 60 * MIB
    for each in plan:
        where = [shard.rank for shard in each.shards if shard.rank is not None]
        assert len(where) == each.num_shards
        hosts_of = [rank // local_size for rank in where]
        if each.partition_by == "uniform":
            assert where == list(range(world_size))
        if each.partition_by == "host":
            assert len(set(hosts_of)) == 1
        if each.sharding_type in ("table_row_wise", "grid_shard"):
            assert [rank % local_size for rank in where] == list(range(local_size)) * (
                len(where) // local_size
            )
            assert hosts_of == [host for host in hosts_of[::local_size] for _ in range(local_size)]
