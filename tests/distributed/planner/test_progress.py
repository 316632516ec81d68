"""The bar of a plan that takes its time: after two seconds, on a terminal, and nowhere else."""

from __future__ import annotations

import io
import itertools

import pytest

from tutorec.distributed.planner.planners import EmbeddingShardingPlanner, _progress_bar
from tutorec.distributed.planner.topology import Topology
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_itself_after_two_seconds(monkeypatch):
    now, terminal = [0.0], Terminal()
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("sys.stderr", terminal)
    with _progress_bar() as progress:
        now[0] = 1.0
        progress(0.5)
        assert "planning" not in terminal.getvalue()
        now[0] = 3.0
        progress(0.75)
        assert "planning:  75%" in terminal.getvalue()


@pytest.mark.parametrize(("where", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_planner_tells_a_terminal_alone_what_it_does(monkeypatch, where, shown):
    clock, stream = itertools.count(step=3), where()
    # each look at the clock finds three seconds gone
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(clock)))
    monkeypatch.setattr("sys.stderr", stream)
    tables = [
        EmbeddingBagConfig(1000, 16, f"t{index}", feature_names=[f"f{index}"]) for index in range(3)
    ]
    topology = Topology(world_size=2, compute_device="cuda")
    EmbeddingShardingPlanner(topology).plan(EmbeddingBagCollection(tables))
    assert ("planning:" in stream.getvalue()) is shown
