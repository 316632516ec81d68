"""Whether what a caller gives is of the right kind: refused where it is given, and not where it is first used."""

from __future__ import annotations

import math
from numbers import Integral, Real

from tutorec.errors import PlannerError, PlannerErrorType


def whole(what: str, number: object, least: int, remedy: str) -> int:
    """A whole number, as an int.

    Args:
        what: Its name, for the message.
        number: What was given.
        least: The smallest that makes sense.
        remedy: What to give instead.

    Raises:
        PlannerError: It is none, or smaller.

    Example:
        >>> whole("batch_size", 512, 1, "give the samples of a rank")
        512
        >>> whole("batch_size", 0.5, 1, "give the samples of a rank")
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: batch_size=0.5 is no whole number from 1: give the samples of a rank
    """
    if not isinstance(number, Integral) or isinstance(number, bool) or number < least:
        raise bad_input(f"{what}={number!r} is no whole number from {least}: {remedy}")
    return int(number)


def finite(what: str, number: object, remedy: str, *, positive: bool = False, most: float = math.inf) -> None:
    """Check that something is a finite number, zero or more.

    Args:
        what: Its name, for the message.
        number: What was given.
        remedy: What to give instead.
        positive: Whether zero is none either.
        most: The largest that makes sense.

    Raises:
        PlannerError: It is none.

    Example:
        >>> finite("percentage", 0.15, "give a part of the memory", most=1)
        >>> finite("percentage", "15 %", "give a part of the memory", most=1)
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: percentage='15 %' is no number from 0 to 1: give a part of the memory
    """
    if isinstance(number, Real) and not isinstance(number, bool):
        value = float(number)
        if value < math.inf and (value > 0 if positive else value >= 0) and value <= most:
            return
    range_of = "positive number" if positive else "number from 0"
    raise bad_input(f"{what}={number!r} is no {range_of}{'' if most == math.inf else f' to {most:g}'}: {remedy}")


def bad_input(message: str) -> PlannerError:
    """The error for input that cannot be."""
    return PlannerError(message, PlannerErrorType.INPUT_VALIDATION)
