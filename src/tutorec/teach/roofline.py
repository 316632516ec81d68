"""The roofline: the highest speed of a computation, given its arithmetic intensity."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style

__all__ = ["roofline"]


@style()
def roofline(
    work: Mapping[str, tuple[float, float, float]], *, bandwidth: float, peak: float, claim: str
) -> Chart:
    """Measured speeds below a machine's memory and arithmetic limits, on two logarithmic axes.

    Args:
        work: Name to (operations, bytes moved, seconds), as measured.
        bandwidth: Bytes a second that the machine's memory moves, as measured: the slope of the
            roof.
        peak: Operations a second that it computes, as measured: the flat part.
        claim: Title; may use, of the first work, {intensity}: its operations per byte, and
            {of_roof}: the share of what its intensity allows.
    """
    ridge = peak / bandwidth
    points = {
        name: (operations / moved, operations / seconds)
        for name, (operations, moved, seconds) in work.items()
    }
    # Ten on each side of the ridge, for what is written there.
    left = min(ridge / 10, *(x / 3 for x, _ in points.values()))
    right = max(ridge * 10, *(x * 3 for x, _ in points.values()))
    intensities = np.geomspace(left, right, 200)

    figure = canvas(3.6)
    axes = figure.add_subplot()
    axes.loglog(intensities, np.minimum(peak, bandwidth * intensities) / 1e9, color=INK)
    axes.axvline(ridge, color=INK, linestyle=":", linewidth=1.2)
    at_ridge = axes.get_xaxis_transform()
    axes.text(ridge, 0.03, f"  {ridge:.2g}", transform=at_ridge)
    axes.text(ridge, 0.98, "memory is the limit ", va="top", ha="right", transform=at_ridge)
    axes.text(ridge, 0.98, " arithmetic is the limit", va="top", transform=at_ridge)
    for name, (x, y) in points.items():
        axes.plot([x], [y / 1e9], "o", color=ACCENT, markersize=8)
        fits = x < left * (right / left) ** 0.75  # a name on the right of its point
        offset, side = (9, "left") if fits else (-9, "right")
        axes.annotate(name, (x, y / 1e9), (offset, -14), textcoords="offset points", ha=side)

    axes.set_xlabel("arithmetic intensity: operations for each byte that is moved")
    axes.set_ylabel("billion operations a second")
    axes.margins(y=0.15)  # room for a name below the lowest point, and limits above the roof
    axes.grid(True)
    intensity, speed = next(iter(points.values()))
    roof = min(peak, bandwidth * intensity)
    return finish(figure, claim, intensity=intensity, of_roof=speed / roof)
