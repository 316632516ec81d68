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
    number = _as_float(rate)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{owner}: the learning rate is {rate}, and must be a finite number of at least 0")
    return number


def check_number(number: Any, what: str) -> float:
    """A number of at least 0 as a float; infinity is one.

    Args:
        number: A number, or a tensor of one.
        what: Whose it is and which, for the message.

    Raises:
        ValueError: It is negative or not a number.

    Example:
        >>> check_number("much", "SGD: momentum")
        Traceback (most recent call last):
        ValueError: SGD: momentum='much' must be a number of at least 0
    """
    found = _as_float(number)
    if not found >= 0:
        raise ValueError(f"{what}={number!r} must be a number of at least 0")
    return found


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


def _as_float(number: Any) -> float:
    """Not a number where it is none; text is none, though it may read as one: it would be used as text."""
    if isinstance(number, str | bytes):
        return math.nan
    try:
        return float(number)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


__all__ = ["check_number", "check_rate", "check_rates", "is_rate"]
