import html
import re

import numpy as np
import pytest
import torch

from tutorec._style import EXCHANGE
from tutorec.teach import draw
from tutorec.teach.canvas import INK, RANK_COLORS, rank_color
from tutorec.teach.trace import Event, Trace
from tutorec.teach.units import number, seconds, size

EVENTS = [
    Event(0, "compute", start=10.0, end=10.1),
    Event(0, "wait", start=10.1, end=10.2),
    Event(1, "compute", start=10.0, end=10.2),
]


class Kjt:
    """The two methods of a KeyedJaggedTensor that a figure needs."""

    def keys(self):
        return ["product", "user"]

    def __getitem__(self, key):
        return {"product": Lists([1, 2, 1], [5]), "user": Lists([2, 3], [])}[key]


class Lists:
    def __init__(self, *lists):
        self.lists = [torch.tensor(one, dtype=torch.long) for one in lists]

    def to_dense(self):
        return self.lists


def charts():
    return {
        "bars": draw.bars({"loop": 1.2, "kernel": 0.003}, unit="s"),
        "rank_frequency": draw.rank_frequency(torch.tensor([7, 7, 7, 1]), what="product"),
        "curves": draw.curves({"model": [0.5, 0.7]}, quantity="AUC", claim="the AUC grows"),
        "timeline": draw.timeline(Trace(-1, EVENTS), claim="rank 0 waits"),
        "traffic": draw.traffic([[0, 3072], [1024, 0]]),
        "jagged": draw.jagged(Kjt(), claim="{ids} ids in {features} features of {samples} samples"),
        "here": draw.here("wire"),
    }


CLAIMS = {
    "bars": "loop: 1.2 s, 400 times kernel",
    "rank_frequency": "the most frequent 1 % of products make up 75 % of 4 occurrences",
    "curves": "the AUC grows",
    "timeline": "rank 0 waits",
    "traffic": "rank 0 sends 75 % of 4 KiB",
    "jagged": "6 ids in 2 features of 2 samples",
    "here": "You are here: wire, station 3 of 8 on a batch's path",
}


@pytest.mark.parametrize("name", CLAIMS)
def test_title_is_a_claim_computed_from_the_data(name):
    chart = charts()[name]
    assert chart.claim == CLAIMS[name]
    assert chart.figure.get_suptitle().replace("\n", " ") == chart.claim


@pytest.mark.parametrize("name", CLAIMS)
def test_show_renders_a_transparent_png_whose_alt_text_states_the_claim(name):
    picture = draw.show(charts()[name], alt="Bars.")
    png, metadata = picture._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert picture.alt == metadata["alt"] == f"{CLAIMS[name]}. Bars."
    assert picture.alt in repr(picture)
    assert metadata["width"] == 700


@pytest.mark.parametrize("name", CLAIMS)
def test_a_page_gets_letters_in_its_own_ink_and_the_claim_as_caption(name):
    chart = charts()[name]
    drawn = html.unescape(draw.show(chart, alt="Bars.")._repr_html_())
    capital = CLAIMS[name][:1].upper() + CLAIMS[name][1:]
    assert drawn.endswith(f"<figcaption>{capital}</figcaption></figure>")
    assert f'role="img" aria-label="{CLAIMS[name]}. Bars."' in drawn
    assert (
        "<text" in drawn
        and "currentColor" in drawn
        and INK not in drawn
        and "metadata" not in drawn
    )
    # once, and not in the drawing
    assert CLAIMS[name] not in drawn.split(">", 2)[2].split("<figcaption>")[0]
    # still the title of the PNG
    assert chart.figure.get_suptitle().replace("\n", " ") == chart.claim


def test_a_caption_that_opens_with_a_name_from_the_code_keeps_it():
    chart = draw.bars({"a": 1.0}, unit="s", claim="item_table is read once")
    assert "<figcaption>item_table is read once<" in draw.show(chart)._repr_html_()


def test_hatches_have_the_colour_of_the_page():
    chart = draw.parts({"": {"a": {"x": 1.0, "y": 2.0, "hatched": 3.0}}}, unit="s", claim="")
    assert "fill: var(--pst-color-background" in draw.show(chart).svg


def test_large_numbers_stand_on_the_axis_in_full():
    axes = draw.bars({"a": 3e6, "b": 20.0}, unit="rows").figure.axes[0]
    assert axes.get_xticklabels()[1].get_text() == "1,000,000"


def test_ids_of_two_figures_on_a_page_differ():
    one, other = (
        set(re.findall(r'\bid="([^"]+)"', draw.show(charts()[name]).svg))
        for name in ("bars", "curves")
    )
    assert one and other and not one & other
    clips = re.findall(r"url\(#([^)]+)\)", draw.show(charts()["bars"]).svg)
    assert set(clips) <= one


@pytest.mark.parametrize("name", [name for name in CLAIMS if name not in ("jagged", "here")])
def test_every_axis_of_a_chart_is_named(name):
    for axes in charts()[name].figure.axes:
        names = axes.get_xlabel() or [label.get_text() for label in axes.get_xticklabels()]
        assert names


def test_claim_template_is_filled_from_the_facts():
    chart = draw.bars(
        {"a": 4.0, "b": 2.0}, unit="rows", claim="{largest} has {ratio:.1f}x the rows of {smallest}"
    )
    assert chart.claim == "a has 2.0x the rows of b"
    assert chart.facts["ratio"] == 2.0


def test_measured_points_have_the_colour_of_their_prediction_and_a_tick_each():
    said, found = {"a, predicted": [0.0, 5.0], "b, predicted": [1.0, 2.0]}, [1.5, 2.5]
    both = {
        k: v for key, line in said.items() for k, v in ((key, line), (f"{key[0]}, measured", found))
    }
    (axes,) = draw.curves(both, quantity="ms", steps=[0, 20], claim="").figure.axes
    first, first_points, second, second_points = axes.get_lines()
    assert list(first_points.get_ydata()) == found and first_points.get_linestyle() == "None"
    assert (
        first.get_color()
        == first_points.get_color()
        != second.get_color()
        == second_points.get_color()
    )
    assert list(axes.get_xticks()) == [0, 20]


def test_colour_is_rank_on_every_figure():
    chart = draw.bars({"rank 0": 1.0, "rank 1": 2.0}, unit="B", ranks=[0, 1])
    from matplotlib.colors import to_hex

    assert [to_hex(bar.get_facecolor()) for bar in chart.figure.axes[0].patches] == list(
        RANK_COLORS[:2]
    )
    assert rank_color(8) == RANK_COLORS[0]


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("color", [INK, *RANK_COLORS, draw.ACCENT, EXCHANGE])
def test_colours_stand_out_on_light_and_dark_pages(color):
    # pages give letters in INK their own colour; it stays where a PNG is shown
    assert contrast(color, "#14181e") >= (3.8 if color == INK else 3.0)
    # as ink on a white page, and below the white letters in a cell
    assert contrast(color, "#ffffff") >= 4.5


def test_units_read_as_said():
    assert [number(0.5), number(1234.5), number(12), number(99.96)] == ["0.5", "1,234", "12", "100"]
    assert [seconds(0), seconds(61.5), seconds(2e-7)] == ["0 ns", "61.5 s", "200 ns"]
    assert [size(0), size(1536), size(-2048)] == ["0 B", "1.5 KiB", "-2 KiB"]


def test_two_timelines_share_one_scale():
    chart = draw.timeline(
        {"first": Trace(-1, EVENTS), "second": Trace(-1, EVENTS[:2])},
        claim="two",
    )
    first, second = chart.figure.axes
    assert first.get_xlim() == second.get_xlim()


def test_marks_say_which_share_of_the_occurrences_the_most_frequent_ids_have():
    ids = torch.tensor([5] * 6 + [3] * 3 + [1])
    chart = draw.rank_frequency(
        ids, what="id", marks=(10, 20, 100), rows=10, claim="{marked[20]:.0%}"
    )
    assert chart.facts["marked"] == pytest.approx({10: 0.6, 20: 0.9, 100: 1.0})
    [axes] = chart.figure.axes
    lines = {float(np.asarray(line.get_xdata())[0]) for line in axes.lines}
    assert lines == {1.0, 2.0, 10.0}
    assert [text.get_text().strip() for text in axes.texts] == [
        "10 %: 60 %",
        "20 %: 90 %",
        "100 %: 100 %",
    ]
    assert chart.claim == "90 %"
    of_those_seen = draw.rank_frequency(ids, what="id", marks=(50,)).facts["marked"]
    assert of_those_seen == pytest.approx({50: 0.9})
