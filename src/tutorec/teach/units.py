"""Numbers as a reader says them: seconds and bytes with three digits and a unit."""

from __future__ import annotations

import math

from tutorec._text import byte_unit


def number(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, thousands separated; tiny ones with an exponent.

    Example:
        >>> number(1234567), number(0.012345), number(2.0), number(0.0000000806)
        ('1,234,567', '0.0123', '2', '8.06e-08')
    """
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value):,}"
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 1e-5:
        return f"{value:.{digits - 1}e}"

    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: float) -> str:
    """A duration in the unit that keeps it readable.

    Example:
        >>> seconds(12.34), seconds(0.0123), seconds(4.5e-6)
        ('12.3 s', '12.3 ms', '4.5 us')
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(value) * factor >= 1:
            return f"{number(value * factor)} {unit}"
    return f"{number(value * 1e9)} ns"


def size(value: float) -> str:
    """A number of bytes in binary units (1 KiB = 1024 B).

    Example:
        >>> size(512), size(4096 * 64 * 4), size(3.5 * 2**40)
        ('512 B', '1 MiB', '3.5 TiB')
    """
    scale, unit = byte_unit(value)
    return f"{number(value / scale)} {unit}"


def decimal_size(value: float) -> str:
    """A number of bytes in decimal units (1 kB = 1000 B), for pages that count in these.

    Example:
        >>> decimal_size(512), decimal_size(17_092), decimal_size(24_000_000)
        ('512 B', '17.1 kB', '24 MB')
    """
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= factor:
            return f"{number(value / factor)} {unit}"
    return f"{number(value)} B"
