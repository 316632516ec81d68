"""A slow network: messages keep their content, arrive when they are due, and are recorded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.teach.network import Message, in_flight, slow_network, waits

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
    with slow_network({"ids": 0.0}, list(messages)) as longer:
        comm.all_to_all(sent, each, each, group, "ids").wait()
    assert [m.number for m in longer] == [0, 1, 2] and longer[:2] == messages
    return arrived, messages, asked_later, comm.all_to_all is direct


def test_messages_arrive_when_they_are_due_and_are_recorded(ranks):
    for rank, (arrived, messages, taken_before, restored) in enumerate(ranks(2).run(exchange)):
        assert arrived == [[rank, 10 + rank]] * 3
        assert [(m.stage, m.number) for m in messages] == [("ids", 0), ("ids", 1)]
        assert all(m.taken >= m.due == m.sent + SECONDS and m.asked >= m.sent for m in messages)
        assert taken_before == [False, False] and restored
        assert [(i.stage, i.batch, i.end) for i in in_flight(messages, "ids")] == [
            ("ids in flight", m.number, m.due) for m in messages
        ]
        assert [(i.start, i.end) for i in waits(messages, rank)] == [
            (m.asked, m.taken) for m in messages
        ]


def test_what_is_left_of_a_delay_is_told_from_other_waits():
    early, late = Message("ids", 0, 1.0, 3.0, 2.5, 3.5), Message("ids", 1, 1.0, 3.0, 4.0, 5.0)
    direct = Message("rows", 0, 1.0, 1.0, 4.0, 5.0)
    assert [m.left for m in (early, late, direct)] == [0.5, 0.0, 0.0]
    assert [i.stage for i in waits([early, late, direct])] == ["wait", "wait", "other wait"]


def test_a_world_of_one_sends_nothing():
    nobody: Any = None
    with slow_network({"ids": SECONDS}) as messages:
        assert comm.all_to_all(torch.arange(2), [2], [2], nobody, "ids").wait().tolist() == [0, 1]
    assert messages == []
