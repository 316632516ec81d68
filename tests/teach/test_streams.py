"""The schema of streams: what starts when, and what the picture shows."""

from __future__ import annotations

from tutorec.teach import draw
from tutorec.teach.timelines import place

OPERATIONS = [
    draw.Operation("sizes 1", "sends", 2),
    draw.Operation("forward 0", "computes", 4),
    draw.Operation("read 1", "host", 0, after=["sizes 1"]),
    draw.Operation("ids 1", "sends", 5),
    draw.Operation("forward 1", "computes", 4, after=["ids 1", "ids 0"]),
]


def test_a_stream_runs_its_operations_in_order_and_waits_where_it_must():
    times = place(OPERATIONS)
    assert times["sizes 1"] == (0.5, 2.5)
    assert times["forward 0"] == (1.0, 5.0)
    assert times["read 1"] == (1.0, 2.5), "the host waits for the sizes"
    assert times["ids 1"] == (3.0, 8.0)
    assert times["forward 1"] == (8.0, 12.0), "the stream waits for the ids"


def test_the_picture_has_a_lane_for_the_host_and_each_stream():
    chart = draw.streams(OPERATIONS, claim="a schema")
    [axes] = chart.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["host", "sends", "computes"]
    assert chart.facts["placed"]["forward 1"][1] == 12.0
    assert "not measured" in axes.get_xlabel()
