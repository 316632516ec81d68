"""Exercises of chapter 09: longest first, a planner for two ranks, a plan by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from tutorec.teach.grading import Exercise
from tutorec.teach.hand_plans import (
    DOES_NOT_FIT,
    GOOD,
    TABLES,
    TOO_MANY_TYPES,
    TOO_MUCH,
    UNEVEN,
    collection,
    judge,
    sharder,
)
from tutorec.teach.on_ranks import on_ranks

Sizes = Mapping[str, tuple[int, int]]

_SLACK = 1.03  # what the fuller rank may hold beyond the mean
_EVEN = "two ranks that hold nearly the same, and no table cut that could stay whole"
_LOPSIDED = "a plan with which one rank holds much more than the other"
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


def _run_plans(planner: Callable[[Sizes], Any]) -> Any:
    """What the plans of a function come to: `_EVEN`, or the first thing that is wrong with one.

    Raises:
        ValueError: It does not return a plan, or two ranks cannot run what it returns.
    """
    for tables in _MODELS:
        plan = planner(dict(tables))
        if plan is None or plan is ...:
            return ...
        _check_words(tables, plan)
        rank_bytes = on_ranks(2, _held, tables, plan, timeout=60)
        share = _SLACK * sum(rank_bytes) / 2
        if max(rank_bytes) > share:
            return _LOPSIDED
        cut = [name for name, entry in plan.items() if entry == "row_wise"]
        if any(_bytes(tables[name]) <= share for name in cut):
            return _CUT
    return _EVEN


def _check_words(tables: Sizes, words: Any) -> None:
    """Refuse what is not a plan of whole tables and of tables that are cut by rows."""
    if not isinstance(words, dict) or set(words) != set(tables):
        raise ValueError(f"Return a dict with an entry for each of {', '.join(tables)}.")
    for name, entry in words.items():
        if entry not in ("row_wise", ("table_wise", 0), ("table_wise", 1)):
            raise ValueError(
                f"{name!r} is {entry!r}: an entry is 'row_wise', ('table_wise', 0) or "
                "('table_wise', 1)."
            )


def _held(rank: int, tables: Sizes, words: Mapping[str, Any]) -> int:
    """Bytes of a model on this rank; a step is trained, and its result compared."""
    group = dist.group.WORLD
    assert group is not None, "a rank has its process group"
    torch.manual_seed(0)  # the same weights on both ranks
    module = collection(tables, device="cpu")
    batch = kjt_from_lists({name: [[0, 5], [rank]] for name in tables})
    expected = module(batch).values().detach()

    entries = {
        name: row_wise() if way == "row_wise" else table_wise(rank=way[1])
        for name, way in words.items()
    }
    plan = construct_module_sharding_plan(module, entries, world_size=2)
    env = ShardingEnv.from_process_group(group)
    sharded = sharder().shard(module, plan, env, device())
    pooled = sharded(batch.to(device())).values()
    torch.testing.assert_close(pooled.detach().cpu(), expected)
    pooled.sum().backward()
    return held_bytes(sharded)


EXERCISES = (
    Exercise(
        "09.1",
        compared="longest first ends at 10 ms, the best plan at 9 ms",
        right=(10, 9),
        mistakes={
            "The best is 9, but that is not where longest first ends. Go through it: 5, then "
            "4, then a 3; onto which rank does each go?": (9, 9),
            "Longest first does end at 10. Can the five tables be divided into two halves of "
            "equal time?": (10, 10),
            "12 is 5 + 4 + 3: the first three tables on one rank. Longest first looks at the "
            "milliseconds that a rank already has.": (12, 9),
        },
        shape="a pair of milliseconds, (longest first, best)",
    ),
    Exercise(
        "09.2",
        compared=_EVEN,
        right=_EVEN,
        measure=_run_plans,
        mistakes={
            "One rank holds much more than the other. Is there a table that is larger than a "
            "rank may hold?": _LOPSIDED,
            "Both ranks hold the same, but you cut tables that could stay whole. Which of "
            "them are larger than a rank may hold?": _CUT,
        },
        shape="a function that returns the plan",
    ),
    Exercise(
        "09.3",
        compared="a plan within 5 % of the planner's",
        right=GOOD,
        measure=judge,
        mistakes={
            "This does not fit. A rank has room for 63 GiB, and the visitors take 73. Which "
            "cuts make shards that fit?": DOES_NOT_FIT,
            "It fits, but one rank is busy for much longer than the others, with these bags. "
            "Compare milliseconds and not gigabytes: which tables make that rank slow? Can "
            "they be cut, or move?": UNEVEN,
            "Lookups take almost as long as in the planner's plan. But how many sharding "
            "types does your plan use, and what does each of them cost in exchanges before it "
            "has sent a byte?": TOO_MANY_TYPES,
            "All ranks are equally busy, but for too long. For which of these tables does "
            "cutting by rows take more time, summed over all ranks, than keeping the table "
            "whole?": TOO_MUCH,
        },
        shape="a plan that takes at most 5 % more than the planner's",
    ),
)
