"""Run what a reader wrote on ranks, for exercises that ask for distributed code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorec.errors import RankError
from tutorec.spmd.pool import Ranks

__all__ = ["on_ranks"]


def on_ranks(size: int, function: Callable[..., Any], *args: Any, timeout: float = 30) -> list[Any]:
    """What a function returns on each of some ranks, in rank order.

    Args:
        size: W, the number of ranks.
        function: Called on each rank; parameters named ``rank`` and ``world_size`` are filled in.
        *args: Its other arguments.
        timeout: Seconds that it may take; exchanges that do not fit together wait that long.

    Raises:
        ValueError: It fails on a rank, or does not end in time.

    Example:
        >>> on_ranks(2, lambda rank: 10 * rank)
        [0, 10]
    """
    try:
        with Ranks(size, timeout=timeout) as world:
            return world.run(function, *args)
    except RankError as error:
        raise ValueError(f"On {size} ranks it ends with: {error}") from error
