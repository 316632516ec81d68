"""Learning rates that cannot be: told where they are used, however they were set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def check_rate(rate: Any, owner: str) -> float:
    """The rate as a float.

    Args:
        rate: A number, or a tensor of one.
        owner: Whose it is, for the message.

    Raises:
        ValueError: It is negative, infinite or not a number.

    Example:
        >>> check_rate(0.5, "SGD")
        0.5
        >>> check_rate(-0.5, "SGD")
        Traceback (most recent call last):
        ValueError: SGD: the learning rate is -0.5, and must be a finite number of at least 0
    """
    try:
        number = float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{owner}: the learning rate is {rate}, and must be a finite number of at least 0")
    return number


def is_rate(rate: Any) -> bool:
    """Whether a rate is a plain float that will do; asked at each step, where it costs two comparisons."""
    return type(rate) is float and 0.0 <= rate < math.inf


def check_rates(groups: Iterable[Mapping[str, Any]], owner: str) -> None:
    """The same for the rate of every parameter group.

    Raises:
        ValueError: One is negative, infinite or not a number; the message says of which group.
    """
    for index, group in enumerate(groups):
        rate = group.get("lr", 0.0)
        if not is_rate(rate):
            check_rate(rate, f"param_groups[{index}] of {owner}")


__all__ = ["check_rate", "check_rates", "is_rate"]
