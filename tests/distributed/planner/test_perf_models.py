import pytest
from distributed.planner.hand_made import option, ranks

from tutorec.distributed.planner.perf_models import NoopPerfModel


def test_a_plan_is_rated_by_its_slowest_rank() -> None:
    split, whole = (
        option("a", "row_wise", [1.0, 2.0], [30, 10]),
        option("b", "table_wise", [4.0], [5]),
    )
    split.place([0, 1])
    whole.place([1])
    assert NoopPerfModel(ranks(2, hbm=99)).rate([split, whole]) == 6.0


def test_models_add_shards_that_lie_on_one_rank() -> None:
    both = option("a", "column_wise", [1.0, 2.0], [30, 10])
    both.place([1, 1])
    assert NoopPerfModel(ranks(2, hbm=99)).rate([both]) == 3.0


def test_models_refuse_what_is_not_placed_or_lies_elsewhere() -> None:
    split = option("item", "row_wise", [1.0, 2.0], [30, 10])
    with pytest.raises(ValueError, match=r"'item'.* not been placed"):
        NoopPerfModel(ranks(2, hbm=99)).rate([split])
    split.place([0, 4])
    with pytest.raises(ValueError, match=r"table 'item'.*row_wise.*rank 4,.*ranks 0 to 1"):
        NoopPerfModel(ranks(2, hbm=99)).rate([split])
