"""Exercises of chapter 08: traffic between hosts, a two-step reduction, a cut for each table."""

from __future__ import annotations

from tutorec.teach.grading import Exercise, Mistake

__all__ = ["EXERCISES"]


def _way_home(source: int, home: int, local_size: int) -> list[int]:
    """First to the neighbour that has the number of the sample's rank, then to that rank."""
    between = source // local_size * local_size + home % local_size
    return list(dict.fromkeys((source, between, home)))


def _straight(source: int, home: int, local_size: int) -> list[int]:
    return list(dict.fromkeys((source, home)))


def _across_first(source: int, home: int, local_size: int) -> list[int]:
    between = home // local_size * local_size + source % local_size
    return list(dict.fromkeys((source, between, home)))


def _by_first_rank(source: int, home: int, local_size: int) -> list[int]:
    return list(dict.fromkeys((source, source // local_size * local_size, home)))


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="08.1",
        compared="56 of the 63 other ranks",
        solution=100 * 56 / 63,
        tolerance=1e-3,
        mistakes=(
            Mistake(
                misconception="takes the share of hosts that are elsewhere",
                answer=100 * 7 / 8,
                hint=(
                    "7 of 8 counts a rank among those that it sends to. What a rank keeps is not "
                    "sent."
                ),
            ),
            Mistake(
                misconception="keeps the share of two hosts",
                answer=100 * 2 / 3,
                hint=(
                    "That is the share of four ranks on two hosts. How many other ranks are there "
                    "now, and where?"
                ),
            ),
            Mistake(
                misconception="gives what stays inside",
                answer=100 * 7 / 63,
                hint="Seven of the other ranks are neighbours: this is what does not cross.",
            ),
        ),
        shape="a percentage between 0 and 100",
    ),
    Exercise(
        id="08.2",
        compared="the ranks that a part of a bag's sum passes, on hosts of 2, 2, 2, 4 and 1",
        solution=_way_home,
        mistakes=(
            Mistake(
                misconception="sends parts straight home",
                answer=_straight,
                hint=(
                    "That is row-wise: partial sums cross before anything was added. To which "
                    "rank of its own host does a partial sum go first?"
                ),
            ),
            Mistake(
                misconception="crosses first and adds there",
                answer=_across_first,
                hint=(
                    "Here every partial sum crosses to the other host before anything is added. "
                    "Where would adding first save bytes?"
                ),
            ),
            Mistake(
                misconception="lets one rank of each host do all the adding",
                answer=_by_first_rank,
                hint=(
                    "Then one rank of each host would add everything. The rank that adds has the "
                    "same local rank as the rank of the sample."
                ),
            ),
        ),
        cases=((0, 3, 2), (1, 3, 2), (0, 1, 2), (1, 6, 4), (0, 3, 1)),
        shape="a function of (source, home, local_size) that returns a list of ranks",
    ),
    Exercise(
        id="08.3",
        compared="what fits and takes the least time on the wires, for four tables",
        solution={
            "sellers": "table_wise",
            "visitors": "table_column_wise",
            "products": "table_row_wise",
            "pairs": "grid_shard",
        },
        mistakes=(
            Mistake(
                misconception="cuts the table that needs no cut",
                answer={
                    "sellers": "table_row_wise",
                    "visitors": "table_column_wise",
                    "products": "table_row_wise",
                    "pairs": "grid_shard",
                },
                hint="Three are right. The sellers fit on one rank: what do their pooled rows cost "
                "inside the "
                "host when the table is cut, and when it is not?",
            ),
            Mistake(
                misconception="cuts by rows over all ranks what one host cannot hold",
                answer={
                    "sellers": "table_wise",
                    "visitors": "table_column_wise",
                    "products": "table_row_wise",
                    "pairs": "row_wise",
                },
                hint="Three are right. Row-wise holds the pairs, and sends 64 partial sums for "
                "every row. Which cut "
                "has the room of several hosts and still adds inside each of them?",
            ),
            Mistake(
                misconception="splits rows whatever the bags hold",
                answer={
                    "sellers": "table_wise",
                    "visitors": "table_row_wise",
                    "products": "table_row_wise",
                    "pairs": "grid_shard",
                },
                hint="Three are right. A visitor's bag has one id. What does it cost to send that "
                "id to eight slices, "
                "and what to bring eight partial sums together?",
            ),
            Mistake(
                misconception="forgets what a host can hold",
                answer={
                    "sellers": "table_wise",
                    "visitors": "table_column_wise",
                    "products": "table_row_wise",
                    "pairs": "table_row_wise",
                },
                hint=(
                    "Three are right. How many GB are free on the ranks of one host, and how many "
                    "do the pairs need?"
                ),
            ),
            Mistake(
                misconception="cuts long bags by columns",
                answer={
                    "sellers": "table_wise",
                    "visitors": "table_column_wise",
                    "products": "table_column_wise",
                    "pairs": "grid_shard",
                },
                hint=(
                    "Three are right. Table-column-wise sends every id of a bag to each slice, "
                    "500 ids to 8 slices."
                ),
            ),
        ),
        shape="a dict from table to the name of a sharding type, such as 'row_wise'",
    ),
)
