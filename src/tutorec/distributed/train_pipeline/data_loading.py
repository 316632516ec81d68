"""A thread that reads and copies one batch ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Generic

import torch
from torch.profiler import record_function

from tutorec.distributed.train_pipeline.pipeline_context import In
from tutorec.distributed.train_pipeline.streams import on_stream, to_device

__all__ = ["DataLoadingThread"]

_END: Any = object()


class DataLoadingThread(Thread, Generic[In]):
    """Keeps one batch ready: it reads and copies the next one when a batch has been taken.

    A train pipeline loads on the thread that trains. Where reading a batch takes long, this thread
    reads while the pipeline trains::

        thread = DataLoadingThread(
            torch.device("cpu"), batches, to_device_non_blocking=False
        )
        thread.start()
        ahead = iter(thread.get_next_batch, None)
        pipeline.progress(ahead)

    The device is the CPU there, since the pipeline copies batches to its own device itself.

    Args:
        device: Device of the batches.
        dataloader_iter: Source of the batches; nothing else may read it meanwhile.
        to_device_non_blocking: Whether copies are asynchronous.
        memcpy_stream_priority: Priority of the CUDA stream of the copies, if none is given.
        memcpy_stream: The CUDA stream of the copies. The caller makes its own stream wait for it.

    Example:
        >>> thread = DataLoadingThread(
        ...     torch.device("cpu"), iter([torch.zeros(1)]), to_device_non_blocking=False
        ... )
        >>> thread.start()
        >>> thread.get_next_batch(), thread.get_next_batch()
        (tensor([0.]), None)

    Source:
        TorchRec's ``torchrec.distributed.train_pipeline.utils.DataLoadingThread``.
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[In],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.Stream | None = None,
    ) -> None:
        super().__init__(name="DataLoadingThread", daemon=True)
        if memcpy_stream is None and device.type == "cuda":
            memcpy_stream = torch.cuda.Stream(device, priority=memcpy_stream_priority)

        self._device = device
        self._iterator = dataloader_iter
        self._stream = memcpy_stream
        self._non_blocking = to_device_non_blocking
        self._is_stopped = False
        self._free = Semaphore(1)
        self._ready: SimpleQueue[Any] = SimpleQueue()  # a batch, an error, or the end

    def run(self) -> None:
        """Read until the iterator ends or fails, or the thread is stopped."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

        try:
            while self._free.acquire() and not self._is_stopped:
                with record_function("## load_batch ##"):
                    batch: Any = next(self._iterator, _END)
                if batch is _END:
                    break

                with record_function("## copy_batch_to_gpu ##"), on_stream(self._stream):
                    self._ready.put(to_device(batch, self._device, self._non_blocking))
        except Exception as error:
            self._ready.put(_Failure(error))
        self._ready.put(_END)

    def stop(self) -> None:
        """Stop reading; a waiting caller gets None."""
        self._is_stopped = True
        self._free.release()
        self._ready.put(_END)

    def get_next_batch(self, none_throws: bool = False) -> In | None:
        """Return the next batch when it is loaded; at the end None, or StopIteration if requested.

        Raises:
            Exception: An error of the iterator or the copy.
            RuntimeError: The thread does not run: it was not started, or this process is a fork of
                the one that has it.
        """
        runs = self.is_alive()
        if not runs and self._ready.empty():
            raise RuntimeError(
                f"{self.name} does not run in process {os.getpid()}, so no batch will come: call "
                "start(), or in a fork of the process that started it, make another"
            )

        batch = self._ready.get()
        if isinstance(batch, _Failure):
            raise batch.error
        if batch is _END:
            self._ready.put(_END)
            if none_throws:
                raise StopIteration
            return None

        self._free.release()
        return batch


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error
