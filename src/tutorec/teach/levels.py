"""The numbers of one row on the levels of its grid: where each is read back in a few bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style

__all__ = ["levels"]

_SHOWN = 16  # levels of a panel


@style()
def levels(
    row: torch.Tensor, grids: Mapping[str, tuple[float, float, int]], *, claim: str
) -> Chart:
    """A panel for each grid: numbers above, levels below, a line from each to its level.

    A grid with more than 16 levels is shown where 16 of them hold most of the row's numbers.

    Args:
        row: Numbers [D].
        grids: Title to (scale, bias, number of levels); level q is at bias + scale * q.
        claim: Title; may use {ratio}, of the last scale by the first.
    """
    scales = [scale for scale, _, _ in grids.values()]
    figure = canvas(0.9 + 1.25 * len(grids))
    panels = figure.subplots(len(grids), 1, squeeze=False)[:, 0]
    for axes, (name, (scale, bias, count)) in zip(panels, grids.items(), strict=True):
        codes = ((row - bias) / scale).round().clamp(0, count - 1).long()
        # numbers on the 16 levels from each one on; the best of these windows is shown
        held = codes.bincount(minlength=count).unfold(0, min(_SHOWN, count), 1).sum(1)
        first = int(held.argmax())
        window = range(first, min(first + _SHOWN, count))

        for number, code in zip(row.tolist(), codes.tolist(), strict=True):
            if code in window:
                axes.plot([number, bias + scale * code], [1, 0], color=ACCENT, linewidth=0.9)
                axes.plot([number], [1], "o", color=ACCENT, markersize=4)

        positions = [bias + scale * code for code in window]
        axes.plot(positions, [0] * len(positions), "|", color=INK, markersize=12)
        axes.set_xticks(positions, [str(code) for code in window])
        axes.set_yticks([1, 0], ["weights", "levels"])
        axes.set(ylim=(-0.35, 1.3), xlim=(positions[0] - 0.7 * scale, positions[-1] + 0.7 * scale))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        title = f"{name}: codes {window[0]} to {window[-1]} of {count}, {scale:.5f} apart"
        axes.set_title(title, loc="left")
    return finish(figure, claim, ratio=scales[-1] / scales[0])
