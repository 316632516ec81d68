"""The pretended devices of this process, and the current one of each thread."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pretend_cuda.streams import Stream


class Devices:
    """The pretended devices of this process."""

    count = 0
    owner: int | None = None  # the process that first used a device: its forks cannot


class ThreadState(threading.local):
    """What each thread has of its own, as with CUDA: the current device, the stream of each."""

    device = 0
    backward = False

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


thread = ThreadState()


def set_count(count: int) -> None:
    """Make it so many GPUs, of which a launcher may show this process some."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:  # an empty list hides all of them
        count = min(count, len([one for one in shown.split(",") if one]))
    Devices.count = count


def use_cuda() -> None:
    """What creates a CUDA context: a fork of a process that has one cannot use CUDA."""
    if Devices.owner is None:
        Devices.owner = os.getpid()
    if Devices.owner != os.getpid():
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, "
            "you must use the 'spawn' start method"
        )


def device_of(given: Any) -> torch.device | None:
    """The device that an argument names, with its index; None where it names none."""
    if given is None:
        return None
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if device.type != "cuda":
        return device
    use_cuda()
    index = thread.device if device.index is None else device.index
    if index >= Devices.count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{index} of {Devices.count} devices"
        )
    return torch.device("cuda", index)


def set_device(device: Any) -> None:
    thread.device = device_of(device).index


def current_device() -> int:
    use_cuda()
    return thread.device


class DeviceContext:
    """``torch.cuda.device(k)``."""

    def __init__(self, device: Any) -> None:
        self.index = device_of(device).index if device is not None else thread.device

    def __enter__(self) -> None:
        self.before, thread.device = thread.device, self.index

    def __exit__(self, *_: Any) -> None:
        thread.device = self.before
