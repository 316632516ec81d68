"""Checks of learning rates and other numbers of optimizers, made where they are used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def check_rate(rate: Any, owner: str) -> float:
    """The learning rate as a float, checked.

    Args:
        rate: A number, or a tensor with one element.
        owner: Its optimizer, for the message.

    Raises:
        ValueError: It is negative, infinite or NaN.

    Example:
        >>> check_rate(0.5, "SGD")
        0.5
        >>> check_rate(-0.5, "SGD")
        Traceback (most recent call last):
        ValueError: SGD: the learning rate is -0.5, and must be a finite number of at least 0
    """
    number = float(rate)
    if not 0.0 <= number < math.inf:
        raise ValueError(
            f"{owner}: the learning rate is {rate}, and must be a finite number of at least 0"
        )
    return number


def check_number(number: float, name: str) -> float:
    """Check that a number is at least 0; infinity is allowed.

    Args:
        number: The number.
        name: Its optimizer and name, for the message.

    Raises:
        ValueError: It is negative or NaN.

    Example:
        >>> check_number(-1.0, "SGD: momentum")
        Traceback (most recent call last):
        ValueError: SGD: momentum=-1.0 must be a number of at least 0
    """
    if not number >= 0:
        raise ValueError(f"{name}={number!r} must be a number of at least 0")
    return float(number)


def check_rates(groups: Iterable[Mapping[str, Any]], owner: str) -> None:
    """``check_rate`` for the rate of every parameter group.

    Raises:
        ValueError: A rate is negative, infinite or NaN; the message names the group.
    """
    for index, group in enumerate(groups):
        check_rate(group.get("lr", 0.0), f"param_groups[{index}] of {owner}")


__all__ = ["check_number", "check_rate", "check_rates"]
