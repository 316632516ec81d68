"""The solutions of chapter 15's exercises, against the library that they are about."""

from __future__ import annotations

import torch
from torch import nn

from tutorec.distributed.train_pipeline import TrainPipelineSemiSync
from tutorec.spmd import device
from tutorec.teach import check


def test_batches_in_flight_during_the_backward_are_those_of_the_schedule():
    model = nn.Linear(2, 1)
    pipeline = TrainPipelineSemiSync(model, torch.optim.SGD(model.parameters(), lr=0.1), device())
    order = [(stage.run.__name__, stage.ahead) for stage in pipeline._schedule]
    before_backward = order[: order.index(("backward", 0))]
    ahead = {
        name: ahead for name, ahead in before_backward if name in ("wait_input_dist", "look_up")
    }
    assert check.find("15.2").solution == (7 + ahead["wait_input_dist"], 7 + ahead["look_up"])


def test_a_step_takes_as_long_as_the_longest_of_what_runs_at_the_same_time():
    exercise = check.find("15.1")
    assert exercise.cases is not None
    assert [exercise.solution(*case) for case in exercise.cases] == [12.0, 12.0, 24.0]  # type: ignore[operator]
