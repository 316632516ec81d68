"""The base class `ShardedModule`.

A *sharded module* computes on many ranks what the original module computes on one. Its forward has
three steps, which every sharding type implements::

    input_dist    send ids to the ranks that hold their rows
    compute       look rows up and pool them
    output_dist   send results to the ranks of their samples
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.compiler import is_compiling

from tutorec.awaitable import Awaitable, LazyAwaitable
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

Ctx = TypeVar("Ctx")
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")


class ShardedModule(nn.Module, ABC, Generic[Ctx, CompIn, DistOut, Out]):
    """A module whose tables are sharded over several ranks.

    Type parameters: the context of one batch, the input of ``compute``, the output of ``compute``,
    and the result.

    Source:
        TorchRec's ``torchrec.distributed.types.ShardedModule``.
    """

    @abstractmethod
    def create_context(self) -> Ctx:
        """Return the state shared by the steps of one batch; batches in flight do not share it."""

    @abstractmethod
    def input_dist(self, ctx: Ctx, *args: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Send ids to the ranks that hold their rows: sizes first, then ids."""

    @abstractmethod
    def compute(self, ctx: Ctx, dist_input: CompIn) -> DistOut:
        """Look rows up, without communication."""

    @abstractmethod
    def output_dist(self, ctx: Ctx, output: DistOut) -> LazyAwaitable[Out]:
        """Send results to the ranks of their samples."""

    def compute_and_output_dist(self, ctx: Ctx, dist_input: CompIn) -> LazyAwaitable[Out]:
        """Run both steps in one call; a module that overlaps them overrides it."""
        return self.output_dist(ctx, self.compute(ctx, dist_input))

    def forward(self, *args: Any, **kwargs: Any) -> LazyAwaitable[Out]:
        """Run the three steps; the result is awaited when it is first used.

        ``torch.compile`` leaves the call out of its graphs.
        """
        if is_compiling():
            return _run_outside_of_graphs(self, *args, **kwargs)
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *args, **kwargs).wait().wait()
        return self.output_dist(ctx, self.compute(ctx, dist_input))


def _run_outside_of_graphs(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module in Python, with all that it calls, and wait for its result."""
    result = torch.compiler.disable(module.forward)(*args, **kwargs)
    return result.wait() if isinstance(result, LazyAwaitable) else result


# What `torch.compiler.disable` sets; a call of it here would load the compiler for every user.
_run_outside_of_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]
_run_outside_of_graphs._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a sharded collection sends and receives between its operators: leave fullgraph=False, or "
    "compile the dense layers alone"
)


class KJTList:
    """The received batches of one module, one per sharding.

    Args:
        features: The batches.

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.KJTList``.
    """

    def __init__(self, features: list[KeyedJaggedTensor]) -> None:
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, key: int) -> KeyedJaggedTensor:
        return self.features[key]

    def __setitem__(self, key: int, item: KeyedJaggedTensor) -> None:
        self.features[key] = item

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        return iter(self.features)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the CUDA caching allocator that ``stream`` uses the batches."""
        for features in self.features:
            features.record_stream(stream)
