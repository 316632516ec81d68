"""Checks of values that people type: whole numbers, finite numbers, one of several names.

What is allowed, and may not be what was meant, is a warning at the caller's line.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any

_PASSED_OVER = "tutorec.", "torch."


def is_int(value: Any, least: int | None = None) -> bool:
    """Whether a value is a whole number, not a bool, and at least ``least``."""
    return (
        isinstance(value, Integral)
        and not isinstance(value, bool)
        and (least is None or int(value) >= least)
    )


def require_int(
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    error: Callable[[str], ValueError] = ValueError,
) -> int:
    """The value as an int; ``error`` makes the exception for any other value.

    Raises:
        ValueError: It is not a whole number, or is not between ``least`` and ``most``.

    Example:
        >>> from tutorec._check import require_int
        >>> require_int("epochs", 1.5, least=1)
        Traceback (most recent call last):
        ValueError: epochs=1.5 must be a whole number, at least 1
    """
    if not is_int(value, least) or (most is not None and value > most):
        raise error(f"{name}={value!r} must be a whole number{_limits(least, most)}")
    return int(value)


def require_finite(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    positive: bool = False,
    error: Callable[[str], ValueError] = ValueError,
) -> float:
    """The value as a float; ``error`` makes the exception for any other value.

    Raises:
        ValueError: It is not a finite number, is not between ``least`` and ``most``, or is not
            positive.
    """
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    outside = (least is not None and number < least) or (most is not None and number > most)

    if not math.isfinite(number) or outside or (positive and number <= 0):
        raise error(
            f"{name}={value!r} must be a {'positive ' * positive}finite "
            f"number{_limits(least, most)}"
        )
    return number


def require_one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that a value is one of several.

    Raises:
        ValueError: It is another one.
    """
    if value not in choices:
        raise ValueError(
            f"{name}={value!r} must be one of "
            f"{', '.join(map(repr, choices))}{did_you_mean(value, choices)}"
        )


def did_you_mean(value: Any, choices: Iterable[Any]) -> str:
    """The end of a message, ``; did you mean 'item'?``, if one of the choices is close."""
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside tutorec and torch from which it was called.

    Python's filter shows a message once for each such line.
    """
    level = 1
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_PASSED_OVER):
        level += 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _limits(least: float | None, most: float | None) -> str:
    return (
        (", at least {}" if most is None else ", {} to {}").format(least, most)
        if least is not None
        else ""
    )
