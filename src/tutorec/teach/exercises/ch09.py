"""Exercises of chapter 09: longest first, greedy with a choice of cuts, a plan by hand."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.hand_plans import judge

__all__ = ["EXERCISES"]

_GOOD = {
    "visitors": ("column_wise", 0, 1),
    "products": ("column_wise", 0, 1),
    "queries": ("column_wise", 2, 3),
    "sellers": ("column_wise", 0, 1),
    "brands": ("column_wise", 2, 3),
    "pages": "row_wise",
    "cities": ("column_wise", 0, 1),
    "weekdays": ("column_wise", 2, 3),
}
_LARGEST_FIRST_IN_TURN = {
    "visitors": "row_wise",
    "products": ("table_wise", 1),
    "queries": ("table_wise", 2),
    "sellers": ("table_wise", 3),
    "brands": ("table_wise", 0),
    "pages": ("table_wise", 1),
    "cities": ("table_wise", 2),
    "weekdays": ("table_wise", 3),
}

Ways = list[list[tuple[float, float]]]


def _greedy(tables: Ways) -> list[float]:
    """Each table in turn takes the option after which the slowest rank is fastest."""
    busy = [0.0, 0.0]
    for options in tables:
        after = [[busy[0] + first, busy[1] + second] for first, second in options]
        busy = min(after, key=max)
    return busy


def _best_alone(tables: Ways) -> list[float]:
    """Each table takes the option that is fastest without the others."""
    chosen = [min(options, key=max) for options in tables]
    return [sum(first for first, _ in chosen), sum(second for _, second in chosen)]


def _least_work(tables: Ways) -> list[float]:
    """Each table takes the option with the least work, where it ends earliest."""
    busy = [0.0, 0.0]
    for options in tables:
        least = min(map(sum, options))
        after = [[busy[0] + one[0], busy[1] + one[1]] for one in options if sum(one) == least]
        busy = min(after, key=max)
    return busy


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="09.1",
        compared="longest first ends at 10 ms, the best plan at 9 ms",
        solution=(10, 9),
        mistakes=(
            Mistake(
                misconception="believes that longest first finds the best plan",
                answer=(9, 9),
                hint="The best is 9, but that is not where longest first ends. Go through it: 5, "
                "then 4, then a 3; "
                "onto which rank does each go?",
            ),
            Mistake(
                misconception="takes the plan of longest first for the best",
                answer=(10, 10),
                hint=(
                    "Longest first does end at 10. Can the five tables be divided into two halves "
                    "of equal time?"
                ),
            ),
            Mistake(
                misconception="counts tables instead of milliseconds",
                answer=(12, 9),
                hint="12 is 5 + 4 + 3: the first three tables on one rank. Longest first looks at "
                "the milliseconds "
                "that a rank already has.",
            ),
        ),
        shape="a pair of milliseconds, (longest first, best)",
    ),
    Exercise(
        id="09.2",
        compared="the milliseconds of both ranks in four cases",
        solution=_greedy,
        cases=(
            ([[(5, 0), (0, 5), (3, 3)]],),
            ([[(4, 0), (0, 4)], [(3, 0), (0, 3)]],),
            ([[(6, 0), (0, 6), (4, 3)], [(1, 0), (0, 1)], [(5, 0), (0, 5), (3, 3)]],),
            ([[(5, 0), (0, 5), (3, 3)], [(4, 0), (0, 4), (3, 3)], [(2, 0), (0, 2)]],),
        ),
        mistakes=(
            Mistake(
                misconception="chooses for each table alone",
                answer=_best_alone,
                hint="It depends on what the ranks already have. Compare the slowest rank after "
                "each option, and "
                "not the options themselves.",
            ),
            Mistake(
                misconception="takes the option with the least work",
                answer=_least_work,
                hint=(
                    "A cut is more work in all, and can still make the slowest rank faster. What "
                    "does greedy compare?"
                ),
            ),
        ),
        shape="a function that returns the milliseconds of both ranks",
    ),
    Exercise(
        id="09.3",
        compared="a plan within 5 % of the planner's",
        solution=_GOOD,
        mistakes=(
            Mistake(
                misconception="keeps the largest table whole",
                answer=_LARGEST_FIRST_IN_TURN | {"visitors": ("table_wise", 0)},
                hint="This does not fit. A rank has room for 63 GiB, and the visitors take 73. "
                "Which cuts make shards "
                "that fit?",
            ),
            Mistake(
                misconception="balances bytes instead of milliseconds",
                answer=_LARGEST_FIRST_IN_TURN,
                hint="It fits, but one rank is busy for much longer than the others. Compare "
                "milliseconds and not "
                "gigabytes: which tables make that rank slow, and can they be cut?",
            ),
            Mistake(
                misconception="gives each table the type that is cheapest for it alone",
                answer=_GOOD | {"brands": ("table_wise", 2), "weekdays": "data_parallel"},
                hint=(
                    "Lookups take almost as long as in the planner's plan. But how many sharding "
                    "types does your plan use, and what does each of them cost in exchanges "
                    "before it has sent a byte?"
                ),
            ),
            Mistake(
                misconception="takes even for fast",
                answer=dict.fromkeys(_GOOD, "row_wise"),
                hint=(
                    "All ranks are equally busy, but for too long. For which of these tables does "
                    "cutting by rows take more time, summed over all ranks, than keeping the "
                    "table whole?"
                ),
            ),
        ),
        shape="a plan that takes at most 5 % more than the planner's",
        measure=judge,
    ),
)
