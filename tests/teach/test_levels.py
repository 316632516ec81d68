"""The diagram of a row's numbers on the levels of its grids."""

from __future__ import annotations

import torch

from tutorec.teach import draw


def lines_drawn(chart: draw.Chart) -> list[list[tuple[float, float]]]:
    """For each panel the ends of the lines from a number to its level."""
    return [
        [
            tuple(line.get_xdata())
            for line in axes.lines
            if len(line.get_xdata()) == 2 and line.get_marker() == "None"
        ]  # type: ignore[misc]
        for axes in chart.figure.axes
    ]


def test_each_number_is_joined_to_its_nearest_level() -> None:
    row = torch.tensor([0.0, 0.4, 0.6, 3.0])
    chart = draw.levels(row, {"int2": (1.0, 0.0, 4)}, claim="")
    (found,) = lines_drawn(chart)
    assert [end for _, end in found] == [0.0, 0.0, 1.0, 3.0]


def test_a_fine_grid_is_shown_where_most_numbers_are() -> None:
    row = torch.cat([torch.tensor([0.0, 255.0]), torch.arange(100.0, 110.0)])
    chart = draw.levels(
        row,
        {"int8": (1.0, 0.0, 256), "int4": (17.0, 0.0, 16)},
        claim="{ratio:.0f} times",
    )
    fine, coarse = lines_drawn(chart)
    assert chart.claim == "17 times"
    assert (len(fine), len(coarse)) == (10, 12)
