"""``torch.cuda`` and ``torch.accelerator``, by the functions that this library and torch call."""

from __future__ import annotations

import os
from typing import Any

import torch

from pretend_cuda.devices import (
    DeviceContext,
    Devices,
    current_device,
    device_of,
    set_device,
    use_cuda,
)
from pretend_cuda.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    in_stream,
    set_stream,
)


class Properties:
    """What ``torch.cuda.get_device_properties`` tells of each device."""

    name = "pretended GPU"
    major = 9
    minor = 0
    total_memory = 16 << 30
    multi_processor_count = 132

    def __init__(self, device: Any = None) -> None:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(Devices.count)))
        self.uuid = f"pretended GPU {shown.split(',')[device_of(device).index]}"


class Generator(torch.Generator):
    """A generator of a device; its numbers are those of the CPU's."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        where = device_of(device)
        made = super().__new__(cls, device="cpu")
        made.where = where
        return made

    device = property(lambda self: self.where)


def _cuda_functions() -> dict[str, Any]:
    return {
        "is_available": lambda: Devices.count > 0,
        "device_count": lambda: Devices.count,
        "is_initialized": lambda: Devices.owner == os.getpid(),
        "init": use_cuda,
        "current_device": current_device,
        "set_device": set_device,
        "device": DeviceContext,
        "synchronize": lambda device=None: use_cuda(),
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: Properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": Properties,
        "mem_get_info": lambda device=None: (Properties.total_memory, Properties.total_memory),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "stream": in_stream,
        "set_stream": set_stream,
        "is_current_stream_capturing": lambda: False,
    }


def _accelerator_functions() -> dict[str, Any]:
    """Of ``torch.accelerator``, by which an optimizer of torch 2.15 asks whether a graph is being
    captured.
    """
    return {
        "is_available": lambda: Devices.count > 0,
        "device_count": lambda: Devices.count,
        "current_accelerator": lambda check_available=False: (
            torch.device("cuda") if Devices.count else None
        ),
        "current_device_index": current_device,
        "current_stream": current_stream,
        "synchronize": lambda device=None: use_cuda(),
    }


def install() -> None:
    """Replace functions of ``torch.cuda`` and ``torch.accelerator``, and ``torch.Generator``."""
    for name, value in _cuda_functions().items():
        setattr(torch.cuda, name, value)
    for name, value in _accelerator_functions().items():
        setattr(torch.accelerator, name, value)
    torch.Generator = Generator
