"""The colours and the look of every figure: those of plans, of simulations and of the book.

A rank has one colour everywhere. Text and lines are in one grey that reads on a light and on a dark
page.
"""

from __future__ import annotations

from typing import Any

#: Text and lines.
INK = "#757575"
#: For data that belong to no rank.
ACCENT = "#6b7686"
#: For exchanges, where data belong to phases and not to ranks.
EXCHANGE = "#7f62c2"
RANK_COLORS = (
    "#3676c3",
    "#b9591d",
    "#278458",
    "#c14984",
    "#1c808e",
    "#986c29",
    "#c0504a",
    "#717b1b",
)

#: For ``matplotlib.rc_context``, so that nothing global is changed.
STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 12.0,
    "axes.titlesize": 12.0,
    "axes.labelsize": 12.0,
    "xtick.labelsize": 11.0,
    "ytick.labelsize": 11.0,
    "legend.fontsize": 11.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "hatch.linewidth": 1.0,
}


def rank_color(rank: int) -> str:
    """The colour of a rank.

    Example:
        >>> rank_color(0) == rank_color(8)
        True
    """
    return RANK_COLORS[rank % len(RANK_COLORS)]
