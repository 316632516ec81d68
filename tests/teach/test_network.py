"""A slow network: messages keep their content, arrive when they are due, and are recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach.network import Message, RecordedSteps, record_steps, slow_network

SECONDS = 0.02


def exchange(rank, world_size):
    direct, group = comm.all_to_all, dist.group.WORLD
    assert group is not None, "the pool has made it"
    sent = torch.arange(world_size) + 10 * rank
    each = [1] * world_size
    with slow_network({"ids": SECONDS, "rows": 0.0}) as messages:
        promises = [
            comm.all_to_all(sent, each, each, group, stage) for stage in ("ids", "ids", "other")
        ]
        asked_later = [bool(message.taken) for message in messages]
        arrived = [promise.wait().tolist() for promise in promises]
    return arrived, messages, asked_later, comm.all_to_all is direct


def test_messages_arrive_when_they_are_due_and_are_recorded(ranks):
    for rank, (arrived, messages, taken_before, restored) in enumerate(ranks(2).run(exchange)):
        assert arrived == [[rank, 10 + rank]] * 3
        assert [(m.stage, m.number) for m in messages] == [("ids", 0), ("ids", 1)]
        assert all(m.taken >= m.due == m.sent + SECONDS and m.asked >= m.sent for m in messages)
        assert taken_before == [False, False] and restored


def test_a_world_of_one_sends_nothing():
    nobody: Any = None
    with slow_network({"ids": SECONDS}) as messages:
        assert comm.all_to_all(torch.arange(2), [2], [2], nobody, "ids").wait().tolist() == [0, 1]
    assert messages == []


def three_steps(rank, world_size):
    """Ids are sent a step ahead, rows in the step of their batch."""
    group = dist.group.WORLD
    assert group is not None, "the pool has made it"
    counts = [1] * world_size

    def send(stage: str) -> Any:
        return comm.all_to_all(torch.arange(world_size), counts, counts, group, stage)

    def steps() -> Any:
        arriving = send("input ids")
        for loss in range(8):
            following = send("input ids")
            arriving.wait()
            send("output rows").wait()
            arriving = following
            yield torch.tensor(float(loss))

    return record_steps(steps().__next__, {"input ids": 0.001})


def test_recorded_steps_have_losses_and_say_which_messages_are_sent_ahead(ranks):
    for rank, steps in enumerate(ranks(2).run(three_steps)):
        assert steps.losses == [*range(8)] and len(steps.spans) == 8 and steps.rank == rank
        assert steps.ahead("output rows") == 0
        assert steps.ahead("input ids") == 1


def recorded() -> RecordedSteps:
    """Ten steps: each takes 1 s, of which 0.25 s are a wait; steps 4 and 5 take 0.5 s."""
    lengths = [0.5 if step in (4, 5) else 1.0 for step in range(10)]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    messages = [
        Message("input ids", n, start, start + 0.125, start + 0.125, start + 0.375)
        for n, (start, _) in enumerate(spans)
    ]
    stages = [Interval("forward", n, start, end) for n, (start, end) in enumerate(spans)]
    return RecordedSteps([0.0] * 10, spans, messages, stages)


def test_times_and_the_drawn_intervals_are_those_of_the_fastest_two_steps():
    steps = recorded()
    assert steps.step_ms() == 500 and steps.waiting_ms() == 250
    assert steps.window_ms("input ids") == 125
    drawn = steps.intervals()
    assert {each.batch for each in drawn} == {4, 5}
    waits = [each.end - each.start for each in drawn if each.stage == "wait"]
    assert sum(waits) == pytest.approx(2 * steps.waiting_ms() / 1e3)
    assert [each.stage for each in drawn if each.batch == 4] == [
        "forward",
        "wait",
        "input ids on their way",
    ]
