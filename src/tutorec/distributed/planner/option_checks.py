"""Whether what parts of a planner hand to one another can be used: options, their estimates, and ratings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tutorec.distributed.planner.input_checks import bad_input
from tutorec.distributed.planner.options import Floats, Ints, ShardingOption


def check_one_each(what: str, options: Sequence[ShardingOption]) -> None:
    """Check that there is one option for each table.

    Args:
        what: Where they come from, for the message.
        options: The options.

    Raises:
        PlannerError: A table has two.
    """
    seen: dict[str, ShardingOption] = {}
    for option in options:
        if option.fqn in seen:
            raise bad_input(
                f"{what} has table {option.name!r} twice, as {seen[option.fqn].sharding_type} and as "
                f"{option.sharding_type}: take one option for each table"
            )
        seen[option.fqn] = option


def check_estimates(option: Any, time: Floats, memory: Ints) -> None:
    """Check that an option's estimates are amounts.

    Args:
        option: Whose.
        time: ``[P]`` ms of its shards.
        memory: ``[P, ...]`` bytes.

    Raises:
        PlannerError: A time or a number of bytes is negative, or a time is not finite.
    """
    wrong = np.flatnonzero(~(np.isfinite(time) & (time >= 0)))
    if len(wrong):
        raise bad_input(
            f"table {option.name!r} as {option.sharding_type}: shard {wrong[0]} is estimated to take "
            f"{time[wrong[0]]} ms: an estimator writes finite times from 0"
        )
    if len(memory) and memory.min() < 0:
        wrong = np.flatnonzero((memory < 0).any(axis=1))
        raise bad_input(
            f"table {option.name!r} as {option.sharding_type}: shard {wrong[0]} is estimated to take "
            f"{int(memory.min()):,} bytes: an estimator writes bytes from 0"
        )


def placed_ranks(option: ShardingOption, world_size: int) -> Ints:
    """Where the shards of a placed option lie, ``[P]``.

    Args:
        option: Which.
        world_size: W.

    Raises:
        PlannerError: A shard is not placed, or lies outside of the world.
    """
    ranks = option.pieces().ranks
    if ranks is None or (ranks < 0).any():
        raise bad_input(
            f"table {option.name!r} as {option.sharding_type} has not been placed: call a partitioner's partition() "
            f"first, which gives each of its {option.num_shards} shards a rank"
        )
    if len(ranks) and ranks.max() >= world_size:
        raise bad_input(
            f"table {option.name!r} as {option.sharding_type} has a shard on rank {ranks.max()}, and the topology has "
            f"ranks 0 to {world_size - 1}: place it on the topology that the plan is for"
        )
    return ranks
