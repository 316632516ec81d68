import numpy as np
import pytest

from tutorec.teach import draw

# Latency stays while the lookup is shared.
SHARED = {"8 ranks": {"lookup": 4.0, "latency": 1.0}, "64 ranks": {"lookup": 0.5, "latency": 1.0}}


def test_a_bar_is_as_long_as_its_parts_together():
    axes = draw.parts({"a": SHARED}, unit="ms", claim="").figure.axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([4.0, 1.0, 0.5, 1.0])
    assert [text.get_text() for text in axes.texts] == ["5 ms", "1.5 ms"]


def test_a_second_panel_has_the_same_scale():
    other = {"8 ranks": {"lookup": 1.0, "latency": 1.0}}
    chart = draw.parts({"a": SHARED, "b": other}, unit="ms", claim="")
    left, right = (axes.get_xlim() for axes in chart.figure.axes)
    assert left == right


def test_a_bound_is_a_line_across_the_bars_of_every_panel():
    chart = draw.parts(
        {"a": SHARED, "b": SHARED}, unit="ms", claim="", marked={"no less than": 1.2}
    )
    for axes in chart.figure.axes:
        drawn = [np.unique(line.get_xdata()).tolist() for line in axes.lines]
        assert drawn and all(values == [1.2] for values in drawn)
    names = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert names == ["lookup", "latency", "no less than"]


def test_exchanges_have_one_colour_and_other_parts_another():
    bars = {"8 ranks": {"ids": 1.0, "lookup": 4.0, "update": 2.0, "rows": 3.0}}
    chart = draw.parts({"a": bars}, unit="ms", claim="", exchanges=("ids", "rows"))
    ids, lookup, update, rows = (p.get_facecolor() for p in chart.figure.axes[0].patches)
    assert ids == rows != lookup == update
