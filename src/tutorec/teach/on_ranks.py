"""Run what a reader wrote on ranks, for exercises on distributed code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tutorec.errors import RankError
from tutorec.spmd.pool import Ranks
from tutorec.teach.grading import is_untouched

__all__ = ["on_ranks", "tensors_on_ranks"]


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


def tensors_on_ranks(size: int, function: Callable[..., Any], what: str) -> list[Any]:
    """As `on_ranks`, of a function that returns a tensor; of a stub that returns `...`, these.

    Args:
        size: W, the number of ranks.
        function: Called on each rank.
        what: What is in the tensor, for the message: "rows".

    Raises:
        ValueError: It fails on a rank, or returns something else on one.

    Example:
        >>> import torch
        >>> tensors_on_ranks(2, lambda rank: torch.tensor(rank), "ranks")
        [tensor(0), tensor(1)]
    """
    results = on_ranks(size, function)
    if is_untouched(results):
        return results

    for rank, value in enumerate(results):
        if not isinstance(value, Tensor):
            type_name = type(value).__name__
            raise ValueError(f"On rank {rank} it returns {type_name}, not a tensor of {what}.")
    return results
