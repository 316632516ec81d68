"""The base classes `ShardedModule` and `ModuleSharder`.

A *sharded module* computes on many ranks what the original module computes on one. A *module
sharder* builds the sharded module from the original. The forward of a sharded module has three
steps, which every sharding type implements::

    input_dist    send ids to the ranks that hold their rows
    compute       look rows up and pool them
    output_dist   send results to the ranks of their samples
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from tutorec.awaitable import Awaitable, LazyAwaitable
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.qcomm import QuantizedCommCodecs
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

Ctx = TypeVar("Ctx")
CompIn = TypeVar("CompIn")
DistOut = TypeVar("DistOut")
Out = TypeVar("Out")
M = TypeVar("M", bound=nn.Module, contravariant=True)


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
        """Run the three steps; the result is awaited when it is first used."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *args, **kwargs).wait().wait()
        return self.output_dist(ctx, self.compute(ctx, dist_input))


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


class ModuleSharder(ABC, Generic[M]):
    """Base of sharders: lists the shardable parameters of a module and builds the sharded module.

    A subclass implements `module_type` and `shard`. By default every parameter of the module is a
    table, and its only sharding type is data-parallel.

    Args:
        qcomm_codecs_registry: Data types in which rows and their gradients are sent, from
            ``get_qcomm_codecs_registry``; float32 by default.

    Source:
        TorchRec's ``torchrec.distributed.types.ModuleSharder``.
    """

    def __init__(
        self, qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None
    ) -> None:
        self._codecs = qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> Mapping[str, QuantizedCommCodecs] | None:
        """Data types in which rows and their gradients are sent, per exchange; None for float32."""
        return self._codecs

    @property
    @abstractmethod
    def module_type(self) -> type[nn.Module]:
        """The class of modules that it shards."""

    @abstractmethod
    def shard(
        self,
        module: M,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedModule[Any, Any, Any, Any]:
        """Return the sharded module; ``params`` is the plan of this module."""

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Table name -> weights ``[R, D]``."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The supported `ShardingType` values."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The supported `EmbeddingComputeKernel` values."""
        return [EmbeddingComputeKernel.DENSE.value]

    def storage_usage(
        self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Bytes of a table ``[R, D]`` per kind of memory: ``"ddr"`` on the CPU, else ``"hbm"``."""
        memory = "ddr" if compute_device_type == "cpu" else "hbm"
        return {memory: tensor.numel() * tensor.element_size()}
