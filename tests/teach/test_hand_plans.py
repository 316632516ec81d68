import pytest

from tutorec.distributed.planner import OptimalPlanner
from tutorec.errors import PlannerError
from tutorec.spmd import device
from tutorec.teach.hand_plans import (
    BUSY_VISITORS,
    DOES_NOT_FIT,
    GOOD,
    TABLES,
    TOO_MANY_TYPES,
    TOO_MUCH,
    UNEVEN,
    collection,
    hand_plan,
    judge,
    shop_plan,
)

SOLUTION = {
    "visitors": ("column_wise", 0, 1),
    "products": ("column_wise", 2, 3),
    "queries": ("column_wise", 2, 3),
    "sellers": ("column_wise", 0, 1),
    "brands": ("column_wise", 2, 3),
    "pages": "row_wise",
    "cities": ("column_wise", 0, 1),
    "weekdays": ("column_wise", 0, 1),
}
LARGEST_FIRST_IN_TURN = {
    "visitors": "row_wise",
    "products": ("table_wise", 1),
    "queries": ("table_wise", 2),
    "sellers": ("table_wise", 3),
    "brands": ("table_wise", 0),
    "pages": ("table_wise", 1),
    "cities": ("table_wise", 2),
    "weekdays": ("table_wise", 3),
}


def test_hand_plan_puts_tables_where_the_words_say():
    plan = hand_plan(SOLUTION).plan[""]
    assert {table: entry.sharding_type for table, entry in plan.items()} == {
        table: word if isinstance(word, str) else word[0] for table, word in SOLUTION.items()
    }
    assert sorted(plan["visitors"].ranks or []) == [0, 1]
    assert set(plan["queries"].ranks or []) == {2, 3}
    assert plan["pages"].ranks == [0, 1, 2, 3]


def test_each_misconception_is_seen_by_its_kind():
    keeps_the_largest_whole = LARGEST_FIRST_IN_TURN | {"visitors": ("table_wise", 0)}
    assert judge(keeps_the_largest_whole) == DOES_NOT_FIT
    assert judge(LARGEST_FIRST_IN_TURN) == UNEVEN
    cheapest_alone = SOLUTION | {"brands": ("table_wise", 2), "weekdays": "data_parallel"}
    assert judge(cheapest_alone) == TOO_MANY_TYPES
    assert judge(dict.fromkeys(TABLES, "row_wise")) == TOO_MUCH
    assert judge(SOLUTION) == GOOD


def test_the_plan_that_the_chapter_prints_is_no_answer():
    printed = SOLUTION | {"visitors": ("column_wise", 2, 3), "products": ("column_wise", 0, 1)}
    assert judge(printed) == UNEVEN


def test_plan_that_is_judged_good_is_near_the_optimum():
    optimum = shop_plan(bags=BUSY_VISITORS, planner=OptimalPlanner, time_limit=20).report
    mine = hand_plan(SOLUTION).report
    assert optimum is not None
    assert mine is not None
    assert optimum.cost <= mine.cost <= 1.06 * optimum.cost


def test_plan_that_does_not_fit_is_the_planners_error():
    with pytest.raises(PlannerError, match="visitors"):
        hand_plan(SOLUTION | {"visitors": ("table_wise", 0)})


def test_part_of_the_rows_is_built():
    tables = collection(TABLES, scale=1e-4, device=device())
    shapes = dict(zip(TABLES, (tuple(rows.shape) for rows in tables.parameters()), strict=True))
    assert shapes["visitors"] == (30_000, 64)
    assert shapes["queries"] == (4_000, 128)
    assert shapes["weekdays"] == (7, 64)
    assert not any(weight.is_meta for weight in tables.parameters())


def test_scale_of_one_changes_no_table():
    rows = {table.name: table.num_embeddings for table in collection().embedding_bag_configs()}
    assert rows == {name: size[0] for name, size in TABLES.items()}
    small = collection({"few": (3, 4)}, scale=0.1).embedding_bag_configs()
    assert small[0].num_embeddings == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"visitors": "row_wise"}, "A plan here is a dict with the tables visitors"),
        ([], "A plan here is a dict"),
        (
            SOLUTION | {"pages": "by rows"},
            "'pages' is 'by rows': an entry is 'row_wise'",
        ),
        (SOLUTION | {"pages": ("row_wise", 1)}, "'pages' is .*row_wise"),
        (SOLUTION | {"pages": ("table_wise", 4)}, "ranks from 0 to 3"),
        (SOLUTION | {"pages": "table_wise"}, "'pages' is 'table_wise': .*'table_wise', 2"),
        (SOLUTION | {"pages": "column_wise"}, "'pages' is 'column_wise': .*'column_wise', 0, 1"),
    ],
)
def test_words_that_are_no_plan_are_named(words, said):
    with pytest.raises(ValueError, match=said):
        judge(words)
