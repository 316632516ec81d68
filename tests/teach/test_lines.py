import pytest

from tutorec._kernels.packed_layout import row_layout
from tutorec.teach import draw
from tutorec.types import DataType


@pytest.mark.parametrize(
    ("kind", "alignment", "missed"),
    [
        # The second line of every int8 row is prefetched only where rows begin 65 to 72 bytes
        # apart.
        (DataType.INT8, 4, 0),
        (DataType.INT8, 8, 0),
        (DataType.INT8, 16, 1),
        # An int4 row of 36 bytes crosses into a second line from half of its places; at 64 from
        # none.
        (DataType.INT4, 4, 0.5),
        (DataType.INT4, 16, 0.5),
        (DataType.INT4, 64, 0),
        (DataType.FP32, 16, 0),
    ],
)
def test_lines_that_are_not_prefetched_are_counted(kind, alignment, missed):
    chart = draw.lines({"rows": row_layout(64, kind, alignment)})
    assert chart.facts["missed"] == {"rows": missed}


def test_the_title_names_the_layouts_that_are_prefetched_whole():
    rows = {"near": row_layout(64, DataType.INT8, 4), "far": row_layout(64, DataType.INT8, 16)}
    assert draw.lines(rows, claim="whole: {whole}").claim == "whole: near"
    assert draw.lines({"far": rows["far"]}, claim="{whole}").claim == "none"


def test_bars_hold_all_bytes_of_the_rows_and_their_padding():
    axes = draw.lines({"far": row_layout(64, DataType.INT8, 16)}).figure.axes[0]
    widths = [bar.get_width() for bar in axes.patches]
    assert sum(widths) == 5 * 80
    assert [width for width in widths if width == 12] == [12] * 5, "the padding of each row"


def test_numbers_on_a_pattern_stand_on_the_background_of_the_page():
    picture = draw.show(draw.lines({"far": row_layout(64, DataType.INT8, 16)}))
    assert "fill: var(--pst-color-background" in picture.svg
