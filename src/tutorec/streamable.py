"""Interface of batches that a pipeline can move to a device and record on a stream."""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Multistreamable(Protocol):
    """An object whose memory may be used on several streams; TorchRec's ``Multistreamable``."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` reads the object's tensors."""
        ...


@runtime_checkable
class Pipelineable(Multistreamable, Protocol):
    """A batch that a pipeline can copy ahead of its use; TorchRec's ``Pipelineable``."""

    def to(self, device: torch.device, non_blocking: bool = False) -> "Pipelineable":
        """A copy of the object on ``device``."""
        ...
