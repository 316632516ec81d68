import logging
import pickle
from collections.abc import Callable

import pytest
from distributed.planner.hand_made import option, ranks

from tutorec.distributed.planner.options import Shard, ShardingOption
from tutorec.distributed.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from tutorec.distributed.planner.types import Proposer

ALL: list[Callable[[], Proposer]] = [
    GreedyProposer,
    UniformProposer,
    GridSearchProposer,
]


def proposed(proposer: Proposer, options: list[ShardingOption], hbm: int = 100) -> list[list[str]]:
    """What is proposed, in order: table and type of each option."""
    proposer.load(options)
    found = []
    while (proposal := proposer.propose()) is not None:
        found.append([f"{each.name} {each.sharding_type}" for each in proposal])
        proposer.feedback(partitionable=True, storage_constraint=ranks(1, hbm))
    return found


def two_tables() -> list[ShardingOption]:
    return [
        option("a", "row_wise", [3.0, 3.0], [5, 5]),
        option("a", "table_wise", [4.0], [40]),
        option("b", "row_wise", [2.0, 2.0], [3, 3]),
        option("b", "table_wise", [1.0], [20]),
    ]


def test_greedy_moves_the_table_that_takes_the_most_memory() -> None:
    assert proposed(GreedyProposer(), two_tables()) == [
        ["a row_wise", "b table_wise"],
        ["a row_wise", "b row_wise"],
        ["a table_wise", "b row_wise"],
    ]


def test_greedy_without_depth_sorts_by_the_sum_of_shards() -> None:
    # Row-wise, table a takes 6 ms in all, and 4 table-wise.
    assert proposed(GreedyProposer(use_depth=False), two_tables())[0] == [
        "a table_wise",
        "b table_wise",
    ]


def test_greedy_never_moves_a_table_without_memory() -> None:
    free = [option("a", "table_wise", [1.0], [0]), option("a", "row_wise", [2.0], [0])]
    assert proposed(GreedyProposer(), free) == [["a table_wise"]]


def test_greedy_moves_tables_by_ddr_where_there_is_no_hbm() -> None:
    options = [
        option("a", kind, [ms], [held], ddr=True)
        for kind, ms, held in [("table_wise", 1, 9), ("row_wise", 2, 3)]
    ]
    assert proposed(GreedyProposer(), options) == [["a table_wise"], ["a row_wise"]]


def test_greedy_stops_after_threshold_worse_proposals() -> None:
    kinds = ["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"]
    options = [option("a", kind, [float(number)], [9]) for number, kind in enumerate(kinds)]
    proposer = GreedyProposer(threshold=2)
    for _ in range(2):  # a second load begins anew
        proposer.load(options)
        tried = 0
        while proposer.propose() is not None:
            proposer.feedback(partitionable=True, perf_rating=1.0 + tried)
            tried += 1
        # The first is the best, two worse ones are allowed, the third ends it.
        assert tried == 4


def test_uniform_proposes_types_that_every_table_may_have() -> None:
    options = [
        *two_tables(),
        option("a", "column_wise", [1.0, 1.0], [4, 4]),
        option("b", "row_wise", [1.0], [9]),
    ]
    proposer = UniformProposer()
    assert proposed(proposer, options) == [
        ["a row_wise", "b row_wise"],
        ["a table_wise", "b table_wise"],
    ]
    proposer.load(options)
    first = proposer.propose()
    assert first is not None
    # Of the two row-wise options of table b the faster one, with a single shard.
    assert [each.num_shards for each in first] == [2, 1]


def test_grid_search_proposes_every_combination_once() -> None:
    found = proposed(GridSearchProposer(), two_tables())
    assert len(found) == 4
    assert len({tuple(each) for each in found}) == 4
    assert found[0] == ["a row_wise", "b table_wise"]


def test_grid_search_proposes_nothing_where_the_grid_is_too_large(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert proposed(GridSearchProposer(max_proposals=3), two_tables()) == []
    assert "the grid of 4 combinations of 2 tables is not searched: max_proposals=3" in caplog.text


@pytest.mark.parametrize("make", ALL)
def test_a_proposer_that_has_begun_is_copied_and_begins_anew(make: Callable[[], Proposer]) -> None:
    proposer = make()
    before = proposed(proposer, two_tables())
    proposer.load(two_tables())
    sent = pickle.loads(pickle.dumps(proposer))
    assert sent.propose() is None
    assert proposed(sent, two_tables()) == before


@pytest.mark.parametrize("make", ALL)
def test_proposer_loaded_again_begins_anew(make: Callable[[], Proposer]) -> None:
    proposer = make()
    first = proposed(proposer, two_tables())
    assert first
    assert proposed(proposer, two_tables()) == first


@pytest.mark.parametrize("make", ALL)
def test_proposer_of_no_options_proposes_nothing(make: Callable[[], Proposer]) -> None:
    assert proposed(make(), []) == []


@pytest.mark.parametrize("make", ALL)
def test_proposer_names_a_table_without_estimates(make: Callable[[], Proposer]) -> None:
    bare = [option("good", "table_wise", [1.0], [1]), option("item", "table_wise", [1.0], [1])]
    bare[1].shards = [Shard([4, 4], [0, 0])]
    with pytest.raises(ValueError, match=r"table 'item'.*populate_estimates"):
        make().load(bare)
