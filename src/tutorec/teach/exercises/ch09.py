"""Exercises of chapter 09: longest first, a planner for two ranks, a plan by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tutorec.sparse.lists import kjt_from_lists
from tutorec.spmd.held import held_bytes
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.hand_plans import TABLES, collection, judge, sharder
from tutorec.teach.on_ranks import on_ranks

__all__ = ["EXERCISES"]

_GOOD = {
    "visitors": ("column_wise", 0, 1),
    "products": ("column_wise", 2, 3),
    "queries": ("column_wise", 2, 3),
    "sellers": ("column_wise", 0, 1),
    "brands": ("column_wise", 2, 3),
    "pages": "row_wise",
    "cities": ("column_wise", 0, 1),
    "weekdays": ("column_wise", 0, 1),
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

Sizes = Mapping[str, tuple[int, int]]
Words = dict[str, Any]

_RANKS = 2
_SLACK = 1.03  # what the fuller rank may hold beyond the mean
_EVEN = "two ranks that hold nearly the same, and no table cut that could stay whole"
_UNEVEN = "a plan with which one rank holds much more than the other"
_CUT = "a plan that cuts a table that could stay whole"
# In one of them a table has to be cut, in the other none.
_SMALL_SHOP = {
    name: (max(7, rows // 10_000), columns) for name, (rows, columns, _) in TABLES.items()
}
_MODELS: tuple[Sizes, ...] = (
    _SMALL_SHOP,
    {"a": (6000, 32), "b": (5000, 32), "c": (4000, 32), "d": (3000, 32)},
)


def _bytes(size: tuple[int, int]) -> int:
    """Of the weights and of one number of state for each row."""
    rows, columns = size
    return 4 * rows * (columns + 1)


def _largest_first(tables: Sizes) -> list[str]:
    return sorted(tables, key=lambda name: -_bytes(tables[name]))


def _by_bytes(tables: Sizes) -> Words:
    """What is larger than a rank may hold is cut, the rest goes to the emptier rank."""
    share = sum(map(_bytes, tables.values())) / _RANKS
    rank_bytes = [0.0] * _RANKS
    plan: Words = {}
    for name in _largest_first(tables):
        size = _bytes(tables[name])
        if size > _SLACK * share:
            plan[name] = "row_wise"
            rank_bytes = [nbytes + size / _RANKS for nbytes in rank_bytes]
        else:
            rank = rank_bytes.index(min(rank_bytes))
            plan[name] = ("table_wise", rank)
            rank_bytes[rank] += size

    return plan


def _all_whole(tables: Sizes) -> Words:
    """Longest first, and nothing is cut."""
    rank_bytes = [0] * _RANKS
    plan: Words = {}
    for name in _largest_first(tables):
        rank = rank_bytes.index(min(rank_bytes))
        plan[name] = ("table_wise", rank)
        rank_bytes[rank] += _bytes(tables[name])
    return plan


def _all_cut(tables: Sizes) -> Words:
    return dict.fromkeys(tables, "row_wise")


def _run_plans(planner: Callable[[Sizes], Any]) -> Any:
    """What the plans of a function come to: `_EVEN`, or the first thing that is wrong with one.

    Raises:
        ValueError: It does not return a plan, or two ranks cannot run what it returns.
    """
    plans = [planner(dict(tables)) for tables in _MODELS]
    if any(plan is None or plan is Ellipsis for plan in plans):
        return ...

    for tables, plan in zip(_MODELS, plans, strict=True):
        _check_words(tables, plan)
    by_rank = _held_on_ranks(tuple(tuple(plan.items()) for plan in plans))
    for number, (tables, plan) in enumerate(zip(_MODELS, plans, strict=True)):
        rank_bytes = [model_bytes[number] for model_bytes in by_rank]
        if _RANKS * max(rank_bytes) > _SLACK * sum(rank_bytes):
            return _UNEVEN
        share = sum(map(_bytes, tables.values())) / _RANKS
        if any(
            entry == "row_wise" and _bytes(tables[name]) <= _SLACK * share
            for name, entry in plan.items()
        ):
            return _CUT

    return _EVEN


def _check_words(tables: Sizes, words: Any) -> None:
    """Refuse what is not a plan of whole tables and of tables that are cut by rows."""
    if not isinstance(words, dict) or set(words) != set(tables):
        raise ValueError(f"Return a dict with an entry for each of {', '.join(tables)}.")

    known = ("row_wise", *(("table_wise", rank) for rank in range(_RANKS)))
    wrong = {name: entry for name, entry in words.items() if entry not in known}
    if wrong:
        name, entry = next(iter(wrong.items()))
        raise ValueError(
            f"{name!r} is {entry!r}: an entry is 'row_wise', ('table_wise', 0) or "
            "('table_wise', 1)."
        )


@functools.cache
def _held_on_ranks(plans: tuple[tuple[tuple[str, Any], ...], ...]) -> list[list[int]]:
    """Bytes that each rank holds of each model, which has been trained for a step."""
    return on_ranks(_RANKS, _held, plans, timeout=60)


def _held(rank: int, plans: Sequence[Sequence[tuple[str, Any]]]) -> list[int]:
    """Bytes of each model on this rank; a step is trained, and its result compared."""
    group = dist.group.WORLD
    assert group is not None, "a rank has its process group"
    model_bytes = []
    for tables, assignment in zip(_MODELS, plans, strict=True):
        torch.manual_seed(0)  # the same weights on both ranks
        module = collection(tables, device="cpu")
        batch = kjt_from_lists({name: [[0, 5], [rank]] for name in tables})
        expected = module(batch).values().detach()

        entries = {
            name: row_wise() if way == "row_wise" else table_wise(rank=way[1])
            for name, way in assignment
        }
        plan = construct_module_sharding_plan(module, entries, world_size=_RANKS)
        env = ShardingEnv.from_process_group(group)
        sharded = sharder().shard(module, plan, env, device())
        pooled = sharded(batch.to(device())).values()
        torch.testing.assert_close(pooled.detach().cpu(), expected)
        pooled.sum().backward()

        model_bytes.append(held_bytes(sharded))
    return model_bytes


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="09.1",
        compared="longest first ends at 10 ms, the best plan at 9 ms",
        solution=(10, 9),
        mistakes=(
            Mistake(
                "believes that longest first finds the best plan",
                (9, 9),
                "The best is 9, but that is not where longest first ends. Go through it: 5, then "
                "4, then a 3; onto which rank does each go?",
            ),
            Mistake(
                "takes the plan of longest first for the best",
                (10, 10),
                "Longest first does end at 10. Can the five tables be divided into two halves of "
                "equal time?",
            ),
            Mistake(
                "counts tables instead of milliseconds",
                (12, 9),
                "12 is 5 + 4 + 3: the first three tables on one rank. Longest first looks at the "
                "milliseconds that a rank already has.",
            ),
        ),
        shape="a pair of milliseconds, (longest first, best)",
    ),
    Exercise(
        id="09.2",
        compared=_EVEN,
        solution=_by_bytes,
        measure=_run_plans,
        mistakes=(
            Mistake(
                "believes that longest first balances whatever there is",
                _all_whole,
                "One rank holds much more than the other. Is there a table that is larger than a "
                "rank may hold?",
            ),
            Mistake(
                "cuts everything, to be even",
                _all_cut,
                "Both ranks hold the same, but you cut tables that could stay whole. Which of "
                "them are larger than a rank may hold?",
            ),
        ),
        shape="a function that returns the plan",
    ),
    Exercise(
        id="09.3",
        compared="a plan within 5 % of the planner's",
        solution=_GOOD,
        mistakes=(
            Mistake(
                "keeps the largest table whole",
                _LARGEST_FIRST_IN_TURN | {"visitors": ("table_wise", 0)},
                "This does not fit. A rank has room for 63 GiB, and the visitors take 73. Which "
                "cuts make shards that fit?",
            ),
            Mistake(
                "balances bytes instead of milliseconds",
                _LARGEST_FIRST_IN_TURN,
                "It fits, but one rank is busy for much longer than the others, with these bags. "
                "Compare milliseconds and not gigabytes: which tables make that rank slow? Can "
                "they be cut, or move?",
            ),
            Mistake(
                "gives each table the type that is cheapest for it alone",
                _GOOD | {"brands": ("table_wise", 2), "weekdays": "data_parallel"},
                "Lookups take almost as long as in the planner's plan. But how many sharding "
                "types does your plan use, and what does each of them cost in exchanges before it "
                "has sent a byte?",
            ),
            Mistake(
                "takes even for fast",
                dict.fromkeys(_GOOD, "row_wise"),
                "All ranks are equally busy, but for too long. For which of these tables does "
                "cutting by rows take more time, summed over all ranks, than keeping the table "
                "whole?",
            ),
        ),
        shape="a plan that takes at most 5 % more than the planner's",
        measure=judge,
    ),
)
