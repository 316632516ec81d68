"""Batches read on a thread: order, end, errors, and one batch ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutorec.distributed.train_pipeline import TrainPipelineBase
from tutorec.distributed.train_pipeline.data_loading import DataLoadingThread
from tutorec.spmd import device


@pytest.fixture
def started() -> Iterator[Callable[[Iterator[Any]], DataLoadingThread[Any]]]:
    threads: list[DataLoadingThread[Any]] = []

    def start(batches: Iterator[Any]) -> DataLoadingThread[Any]:
        threads.append(DataLoadingThread(device(), batches, to_device_non_blocking=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.stop()
        thread.join(60)
        assert not thread.is_alive()


Start = Callable[[Iterator[Any]], DataLoadingThread[Any]]


def test_batches_come_in_order_and_then_none_or_the_end(started: Start) -> None:
    thread = started(iter([torch.tensor(i) for i in range(5)]))
    taken = [thread.get_next_batch() for _ in range(7)]
    assert [None if each is None else int(each) for each in taken] == [0, 1, 2, 3, 4, None, None]
    with pytest.raises(StopIteration):
        thread.get_next_batch(none_throws=True)


def test_a_thread_that_was_not_started_says_so_instead_of_waiting() -> None:
    thread = DataLoadingThread(device(), iter([1]), to_device_non_blocking=False)
    with pytest.raises(RuntimeError, match=r"not.*: call start\(\)"):
        thread.get_next_batch()


FORKED = """
import os, threading
from tutorec.distributed.train_pipeline.data_loading import DataLoadingThread
from tutorec.spmd import device
go = threading.Event()
def batches():
    go.wait()
    yield 1
thread = DataLoadingThread(device(), batches(), to_device_non_blocking=False)
thread.start()
child = os.fork()
if child == 0:
    try:
        thread.get_next_batch()
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
go.set()
print(thread.get_next_batch(), thread.get_next_batch(), child)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_is_told_that_the_thread_is_not_in_it() -> None:
    line = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    said, values = done.stdout.splitlines()
    one, end, child = values.split()
    assert (one, end) == ("1", "None")
    assert said.startswith(f"DataLoadingThread does not run in process {child}, so no batch")


def test_the_next_batch_is_read_before_it_is_asked_for_and_no_further_one(started: Start) -> None:
    read = [threading.Event() for _ in range(3)]

    def batches() -> Iterator[Tensor]:
        for event in read:
            event.set()
            yield torch.zeros(1)

    thread = started(batches())
    assert read[0].wait(60)
    assert not read[1].is_set()
    thread.get_next_batch()
    assert read[1].wait(60)
    assert not read[2].is_set()


def test_an_error_is_raised_where_its_batch_is_asked_for_and_ends_the_thread(
    started: Start,
) -> None:
    def batches() -> Iterator[Tensor]:
        yield torch.zeros(1)
        raise OSError("no more files")

    thread = started(batches())
    assert thread.get_next_batch() is not None
    with pytest.raises(OSError, match="no more files"):
        thread.get_next_batch()
    assert thread.get_next_batch() is None


def test_who_waits_for_a_batch_is_released_when_the_thread_is_stopped(started: Start) -> None:
    goes_on, reading = threading.Event(), threading.Event()

    def batches() -> Iterator[Tensor]:
        reading.set()
        goes_on.wait(60)
        yield torch.zeros(1)

    thread = started(batches())
    assert reading.wait(60)
    thread.stop()
    assert thread.get_next_batch() is None
    goes_on.set()


def test_a_pipeline_is_fed_by_the_thread(started: Start) -> None:
    read_on: list[str] = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for number in range(4):
            read_on.append(threading.current_thread().name)
            yield {"x": torch.full((1, 2), float(number))}

    model = nn.Linear(2, 1, device=device())
    pipeline = TrainPipelineBase(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        device(),
        custom_model_fwd=lambda batch: (model(batch["x"]).sum(), int(batch["x"][0, 0])),
    )
    ahead = iter(started(batches()).get_next_batch, None)
    assert [pipeline.progress(ahead) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(StopIteration):
        pipeline.progress(ahead)
    assert read_on == ["DataLoadingThread"] * 4
