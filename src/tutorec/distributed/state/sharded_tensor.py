"""Import of torch's `ShardedTensor`, which has a private path.

The import loads ``torch.distributed.nn.functional``, whose functions have the default argument
``group=group.WORLD``. Loaded after ``init_process_group``, they keep the default group alive:
``destroy_process_group`` cannot stop its threads, and about one process in a few dozen aborts when
Python ends ("terminate called without an active exception"). This module therefore replaces the
default by None, which has the same meaning.
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
            None if isinstance(value, dist.ProcessGroup) else value
            for value in function.__defaults__ or ()
        )


_release_default_group()
