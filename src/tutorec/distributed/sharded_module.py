"""The two roles of sharding: sharded modules, and the sharders that make them.

A *sharded module* computes on many ranks what one module computed on one; a *module sharder* turns the one into the
other. A sharded module's forward is three moves, and every sharding type gives its own three:

    input_dist    ids go to the ranks that hold their rows
    compute       rows are looked up and pooled
    output_dist   results go to the ranks of their samples
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
    """A module whose tables lie on several ranks.

    Type parameters: the context of one batch, what arrives before compute, what compute gives, and the result.

    Source:
        TorchRec's ``torchrec.distributed.types.ShardedModule``.
    """

    @abstractmethod
    def create_context(self) -> Ctx:
        """What one batch's moves tell each other; each batch in flight has its own."""

    @abstractmethod
    def input_dist(self, ctx: Ctx, *args: Any, **kwargs: Any) -> Awaitable[Awaitable[CompIn]]:
        """Send ids to the ranks that hold their rows: sizes first, then ids."""

    @abstractmethod
    def compute(self, ctx: Ctx, dist_input: CompIn) -> DistOut:
        """Look rows up; nothing is sent."""

    @abstractmethod
    def output_dist(self, ctx: Ctx, output: DistOut) -> LazyAwaitable[Out]:
        """Send results to the ranks of their samples."""

    def compute_and_output_dist(self, ctx: Ctx, dist_input: CompIn) -> LazyAwaitable[Out]:
        """Both in one call, for a module that overlaps them."""
        return self.output_dist(ctx, self.compute(ctx, dist_input))

    def forward(self, *args: Any, **kwargs: Any) -> LazyAwaitable[Out]:
        """The three moves one after the other; the result waits for itself when it is first used."""
        ctx = self.create_context()
        dist_input = self.input_dist(ctx, *args, **kwargs).wait().wait()
        return self.output_dist(ctx, self.compute(ctx, dist_input))


class KJTList:
    """The batches of one input exchange, one for each sharding; a pipeline keeps them alive on a stream together.

    Args:
        features: They.

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
        """Tell the allocator that ``stream`` reads the batches."""
        for features in self.features:
            features.record_stream(stream)


class ModuleSharder(ABC, Generic[M]):
    """Knows one class of modules: which parameters can be sharded, how, and how to build the sharded module.

    A subclass gives `module_type` and `shard`. Without more, each parameter of its modules is a table that every rank
    copies.

    Args:
        qcomm_codecs_registry: What rows and their gradients travel as, from ``get_qcomm_codecs_registry``; float32 by
            default.

    Source:
        TorchRec's ``torchrec.distributed.types.ModuleSharder``.
    """

    def __init__(self, qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None) -> None:
        self._codecs = qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> Mapping[str, QuantizedCommCodecs] | None:
        """What rows and their gradients travel as, by move; None: float32."""
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
        """The sharded module; ``params`` is the plan of this module."""

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Table name -> weights ``[R, D]``."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """`ShardingType` values that it can build."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """`EmbeddingComputeKernel` values that it can build."""
        return [EmbeddingComputeKernel.DENSE.value]

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table ``[R, D]`` by the memory that they take: ``"ddr"`` on the CPU, else ``"hbm"``."""
        memory = "ddr" if compute_device_type == "cpu" else "hbm"
        return {memory: tensor.numel() * tensor.element_size()}
