"""Batches read on a thread: order, end, errors, and one batch ahead."""

from __future__ import annotations

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
