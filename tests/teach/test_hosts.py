import pytest
from matplotlib.colors import to_hex

from tutorec.teach import draw
from tutorec.teach.canvas import rank_color

# Two hosts of two ranks: rank 0 sends its neighbour 8 KiB and rank 2 2 KiB; rank 3 sends rank 0 1
# KiB.
SENT = [[0, 8192, 2048, 0], [0, 0, 0, 0], [0, 0, 0, 0], [1024, 0, 0, 0]]
LESS = [[0, 8192, 1024, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_title_says_what_crosses_and_facts_hold_it():
    chart = draw.hosts({"row-wise": SENT}, local_size=2, claim="{most_bytes} cross")
    assert chart.claim == "3.07 kB cross"
    assert chart.facts["crossing"] == {"row-wise": 3072}


def test_panels_are_compared_and_say_what_crosses_in_each():
    chart = draw.hosts(
        {"a": SENT, "b": LESS},
        local_size=2,
        claim="{most_bytes} at most",
    )
    assert chart.claim == "3.07 kB at most"
    assert [axes.get_title() for axes in chart.figure.axes] == [
        "a: 3.07 kB cross",
        "b: 1.02 kB cross",
    ]


def test_other_hosts_let_other_bytes_cross():
    assert draw.hosts({"a": SENT}, local_size=4, claim="").facts["crossing"] == {"a": 0}
    assert draw.hosts({"a": SENT}, local_size=1, claim="").facts["crossing"] == {"a": 11264}


def test_a_field_has_the_colour_of_the_rank_that_sends_and_no_rank_sends_to_itself():
    axes = draw.hosts({"a": SENT}, local_size=2, claim="").figure.axes[0]
    bars = [patch for patch in axes.patches if patch.get_height() == pytest.approx(0.22)]
    assert [to_hex(bar.get_facecolor()) for bar in bars] == [
        rank_color(rank) for rank in range(4) for _ in "abc"
    ]
    assert bars[0].get_width() == pytest.approx(0.9)
