"""torch's `ShardedTensor`, which is private there: the one file that imports it.

Its import brings ``torch.distributed.nn.functional``, whose functions have ``group=group.WORLD`` among their defaults.
Imported after ``init_process_group`` they hold the default group for good: ``destroy_process_group`` cannot end its
threads, and every few dozen processes one of them is still at work while Python ends, which aborts the process
("terminate called without an active exception"). None is a default that means the same and holds nothing.
"""

from __future__ import annotations

import inspect

import torch.distributed as dist
import torch.distributed.nn.functional
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard

__all__ = ["Shard", "ShardedTensor", "ShardedTensorMetadata", "TensorProperties"]


def _release_default_group() -> None:
    for _, function in inspect.getmembers(torch.distributed.nn.functional, inspect.isfunction):
        function.__defaults__ = tuple(
            None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__ or ()
        )


_release_default_group()
