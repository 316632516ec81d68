"""Run what a reader wrote on ranks, for exercises on distributed code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tutorec.errors import RankError
from tutorec.spmd.pool import Ranks
from tutorec.teach.grading import is_untouched


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


def per_rank(
    size: int,
    inputs: Callable[[int], tuple[Any, ...]],
    counted: Mapping[str, int] | None = None,
) -> Callable[[Any], Any]:
    """The measure of an exercise whose answer is a function that runs on every rank.

    Args:
        size: W, the number of ranks.
        inputs: Called on each rank with its number; returns the arguments of the answer.
        counted: Functions of `torch.distributed`, each with the position of the argument that it
            sends. With them, the measure is a pair for each rank: result, and bytes sent.

    Example:
        >>> measure = per_rank(2, lambda rank: (10 * rank, 1))
        >>> measure(lambda tens, ones: tens + ones)
        [1, 11]
    """

    def measure(answer: Any) -> Any:
        def run(rank: int) -> Any:
            arguments = inputs(rank)
            with _sent_bytes(counted or {}) as sent:
                return answer(*arguments), sum(sent)

        outcomes = on_ranks(size, run)
        results = [result for result, _ in outcomes]
        return results if is_untouched(results) or not counted else outcomes

    return measure


@contextmanager
def _sent_bytes(counted: Mapping[str, int]) -> Iterator[list[int]]:
    """The bytes of each tensor that this rank sends by one of these functions."""
    sent: list[int] = []
    originals = {name: getattr(dist, name) for name in counted}

    def counting(name: str) -> Callable[..., Any]:
        def send(*args: Any, **kwargs: Any) -> Any:
            sent.append(args[counted[name]].nbytes)
            return originals[name](*args, **kwargs)

        return send

    for name in counted:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
