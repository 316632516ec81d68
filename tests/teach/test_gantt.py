"""The gantt of chapter 15: a line for each batch, drawn from intervals."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach import draw

SHOWN = [
    Interval("forward", 0, 0.0, 4.0),
    Interval("wait", 0, 1.0, 3.0),
    Interval("ids in flight", 1, 2.0, 9.0),
    Interval("backward", 0, 4.0, 8.0),
    Interval("forward", 1, 8.0, 12.0),
]


def drawn(**changed):
    words = {
        "letters": {"forward": "F", "backward": "B"},
        "between": {"loop": (0.0, 10.0)},
        "alt": "Two batches",
    }
    return draw.gantt(
        {"loop": SHOWN}, claim="{window} ms, {waiting_share:.0%} of it waiting", **words | changed
    )


def test_the_claim_is_computed_from_the_time_shown():
    assert drawn().claim == "10,000 ms, 20 % of it waiting"
    assert drawn(between={"loop": (2.0, 4.0)}).claim == "2,000 ms, 50 % of it waiting"


def test_bars_have_the_measured_lengths_and_waiting_is_cut_out_of_them():
    svg = ET.fromstring(drawn().svg)
    bars = [bar for bar in svg.iter("rect") if bar.get("fill") != "none"]
    widths = [float(str(bar.get("width")).rstrip("%")) for bar in bars]
    # F before and after the wait, B, F until the end of the figure
    assert widths == [8.4, 8.4, 33.6, 16.8]
    (hollow,) = [bar for bar in svg.iter("rect") if bar.get("fill") == "none"]
    assert float(str(hollow.get("width")).rstrip("%")) == 16.8
    (line,) = svg.iter("line")
    assert (line.get("x1"), line.get("x2")) == ("31.80%", "90.60%")


def test_text_and_bars_are_readable_without_the_picture():
    figure = drawn()
    texts = ["".join(text.itertext()) for text in ET.fromstring(figure.svg).iter("text")]
    assert texts[0] == "loop" and {"batch 0", "batch 1", "F", "B"} <= set(texts)
    assert (
        "F: forward; B: backward; thin line: ids in flight; hollow: the rank waits."
        in figure._repr_html_()
    )
    assert re.search(r'role="img" aria-label="10,000 ms.*Two batches"', figure._repr_html_())
    assert "Two batches" in repr(figure)


def test_another_wait_is_striped_and_no_part_of_the_share():
    assert "striped" not in drawn(waiting=("wait", "late")).legend
    other = draw.gantt(
        {"loop": [*SHOWN, Interval("late", 0, 5.0, 6.0)]},
        letters={"forward": "F", "backward": "B"},
        between={"loop": (0.0, 10.0)},
        claim="{waiting_share:.0%}",
        alt="Two batches",
        waiting=("wait", "late"),
        names={"late": "it waits for rows"},
    )
    assert other.claim == "20 %" and other.legend.endswith(
        "hollow: the rank waits; striped: it waits for rows."
    )
    (striped,) = [
        bar for bar in ET.fromstring(other.svg).iter("rect") if bar.get("fill") == "url(#stripes)"
    ]
    assert float(str(striped.get("width")).rstrip("%")) == 8.4


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match=r"'loop' has no interval between 20\.000 and 30\.000 s"):
        drawn(between={"loop": (20.0, 30.0)})


def test_stages_without_a_letter_in_the_picture_are_named_last():
    figure = draw.gantt(
        {"loop": [Interval("load", 0, 0.0, 0.1), *SHOWN]},
        letters={"load": "L", "forward": "F", "backward": "B"},
        between={"loop": (0.0, 10.0)},
        claim="two batches",
        alt="Two batches",
    )
    assert figure.legend.startswith("F: forward; B: backward; too short for a letter: load;")
