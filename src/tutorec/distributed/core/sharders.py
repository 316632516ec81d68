"""Module sharders: they list the tables of a module and build the sharded module from it.

`ModuleSharder` is the interface, which planner and `shard` use. Every sharder of collections has
its own `shard` method, which builds the sharded module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.core.tables import IN_FILE, SUPPORTED_KERNELS
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingType

M = TypeVar("M", bound=nn.Module, contravariant=True)


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


class CollectionSharder(ModuleSharder[M]):
    """A sharder of one class of collections; a subclass names both classes and builds the second.

    Attributes:
        unsharded_class: The class of modules that it shards.
        sharded_class: The class of modules that `shard` returns.
    """

    unsharded_class: ClassVar[type[nn.Module]]
    sharded_class: ClassVar[type[nn.Module]]

    @property
    def module_type(self) -> type[nn.Module]:
        """The class of modules that it shards."""
        return self.unsharded_class

    @property
    def sharded_module_type(self) -> Any:
        """The class of modules that `shard` returns."""
        return self.sharded_class


class BaseEmbeddingSharder(CollectionSharder[M]):
    """Base of the sharders of both collections.

    Args:
        fused_params: Options of the optimizer that runs inside backward: ``optimizer``,
            ``learning_rate``, ``eps``. By default, and with a warning, SGD with a learning rate of
            0.01. An optimizer from ``apply_optimizer_in_backward`` takes precedence.
        qcomm_codecs_registry: Data types in which rows and their gradients are sent, from
            ``get_qcomm_codecs_registry``; float32 by default.

    Raises:
        ValueError: ``fused_params`` has an unknown option or an invalid value.

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.BaseEmbeddingSharder``.
    """

    _tables_path: ClassVar[str]
    _types: ClassVar[Sequence[ShardingType]]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        optimizer_spec(fused_params)
        super().__init__(qcomm_codecs_registry)
        self._fused_params = dict(fused_params) if fused_params is not None else None

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Options of the optimizer inside backward; a subclass may override the property."""
        return self._fused_params

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> weights ``[R, D]``."""
        tables = module.get_submodule(self._tables_path).named_children()
        return {name: table.get_parameter("weight") for name, table in tables}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The supported `ShardingType` values, the same on any device."""
        return [sharding_type.value for sharding_type in self._types]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The supported `EmbeddingComputeKernel` values, the same on any device."""
        replicated = sharding_type == ShardingType.DATA_PARALLEL.value
        return [
            kernel.value for kernel in SUPPORTED_KERNELS if not (replicated and kernel in IN_FILE)
        ]
