"""Exercises of chapter 09: longest first, a plan by hand, what a bound proves."""

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
        compared="a plan within 5 % of the planner's",
        solution=_GOOD,
        mistakes=(
            Mistake(
                misconception="keeps the largest table whole",
                answer=_LARGEST_FIRST_IN_TURN | {"visitors": ("table_wise", 0)},
                hint="This does not fit. A rank has room for 63 GiB, and the visitors take 73. "
                "Which cuts make pieces "
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
                hint="The ranks are almost as quick as the planner's. But how many types of "
                "sharding does the plan "
                "use, and what does each of them cost before it has sent a byte?",
            ),
            Mistake(
                misconception="takes even for fast",
                answer=dict.fromkeys(_GOOD, "row_wise"),
                hint="The ranks are busy alike, but for too long. Which of these tables does its "
                "cut make more work, "
                "in all ranks together, than it would be whole?",
            ),
        ),
        shape="a plan that takes at most 5 % more than the planner's",
        measure=judge,
    ),
    Exercise(
        id="09.3",
        compared="the most that can be saved is 0.1 of 2.1 ms",
        solution=100 * 0.1 / 2.1,
        tolerance=1e-2,  # 4.8 is right, 5 is not
        mistakes=(
            Mistake(
                misconception="takes the bound for a plan that exists and divides by it",
                answer=100 * 0.1 / 2.0,
                hint="The saving is a part of the time that the plan takes now.",
            ),
            Mistake(
                misconception="believes that a gap is a plan waiting to be found",
                answer=100.0,
                hint="A bound limits what can be saved: no plan takes less than 2.0 ms.",
            ),
            Mistake(
                misconception="believes that a plan above the bound proves nothing",
                answer=0.0,
                hint=(
                    "Perhaps nothing can be saved, but that is not proven. What is the most that "
                    "the bound leaves?"
                ),
            ),
        ),
        shape="a percentage of the plan's time",
    ),
)
