"""The roofline: the highest speed of a computation, given its arithmetic intensity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style

__all__ = ["roofline"]


def roofline(
    work: Mapping[str, tuple[float, float, float]],
    *,
    bandwidth: float,
    peak: float,
    claim: str | None = None,
) -> Chart:
    """Measured speeds below a machine's memory and arithmetic limits, on two logarithmic axes.

    Args:
        work: Name to (operations, bytes moved, seconds), as measured.
        bandwidth: Bytes a second that the machine's memory moves, as measured: the slope of the
            roof.
        peak: Operations a second that it computes, as measured: the flat part.
        claim: Title; may use {first}: the name of the first work, {intensity}: its operations per
            byte, {ridge}: those from which on arithmetic is the limit, {of_peak}: the share of the
            peak that it reaches, {of_roof}: the share of what its intensity allows.

    Raises:
        ValueError: There is no work, or a number is not positive.
    """
    numbers = [bandwidth, peak, *(number for entry in work.values() for number in entry)]
    if not work or min(numbers) <= 0:
        raise ValueError(
            f"roofline needs work and positive numbers, got {dict(work)}, {bandwidth=}, {peak=}"
        )

    ridge = peak / bandwidth
    points = {
        name: (operations / moved, operations / seconds)
        for name, (operations, moved, seconds) in work.items()
    }
    fields: dict[str, Any] = {
        "ridge": ridge,
        "intensities": {name: entry[0] for name, entry in points.items()},
    }
    first = next(iter(points))
    intensity, speed = points[first]
    fields |= {
        "first": first,
        "intensity": intensity,
        "of_peak": speed / peak,
        "of_roof": speed / min(peak, bandwidth * intensity),
    }

    with style():
        figure = canvas(3.6)
        axes = figure.add_subplot()
        # Ten on each side of the ridge, for what is written there.
        left = min(ridge / 10, *(entry[0] / 3 for entry in points.values()))
        right = max(ridge * 10, *(entry[0] * 3 for entry in points.values()))
        intensities = np.geomspace(left, right, 200)
        axes.loglog(intensities, np.minimum(peak, bandwidth * intensities) / 1e9, color=INK)
        axes.axvline(ridge, color=INK, linestyle=":", linewidth=1.2)
        axes.annotate(
            f"{ridge:.2g}", (ridge, 0.03), (6, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points",
        )  # fmt: skip
        for limit, offset, side in (("memory", -6, "right"), ("arithmetic", 6, "left")):
            axes.annotate(
                f"{limit} is the limit", (ridge, 0.985), (offset, 0), va="top", ha=side,
                xycoords=("data", "axes fraction"), textcoords="offset points",
            )  # fmt: skip

        for name, (x, y) in points.items():
            axes.loglog([x], [y / 1e9], "o", color=ACCENT, markersize=8)
            fits = x < left * (right / left) ** 0.75  # a name on the right of its point
            axes.annotate(
                name, (x, y / 1e9), (9 if fits else -9, -14), textcoords="offset points",
                ha="left" if fits else "right",
            )  # fmt: skip

        axes.set_xlabel("arithmetic intensity: operations for each byte that is moved")
        axes.set_ylabel("billion operations a second")
        axes.margins(y=0.15)  # room for a name below the lowest point, and limits above the roof
        axes.grid(True)
        default = (
            "{first}: {intensity:.2g} operations a byte, {of_peak:.1%} of what the machine "
            "could compute"
        )
        return finish(figure, claim, default, fields)
