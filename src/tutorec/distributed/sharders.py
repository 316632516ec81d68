"""What the sharders of collections have in common: each names a class of collections and its sharded form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.distributed.lookup.grouped import SUPPORTED_KERNELS
from tutorec.distributed.plan import ParameterSharding, ShardingType
from tutorec.distributed.qcomm import QuantizedCommCodecs
from tutorec.distributed.sharded_module import M, ModuleSharder
from tutorec.distributed.tables import IN_FILE


class CollectionSharder(ModuleSharder[M]):
    """Shards one class of collections."""

    _module_type: ClassVar[type[nn.Module]]
    _sharded_type: ClassVar[Callable[..., Any]]
    _arguments: ClassVar[Sequence[str]]  # attributes of the sharder that its sharded form is given

    @property
    def module_type(self) -> type[nn.Module]:
        """The class of modules that it shards."""
        return self._module_type

    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """The sharded module; every rank calls it. ``module_fqn`` is TorchRec's and has no effect."""
        arguments = {name: getattr(self, name) for name in self._arguments}
        return type(self)._sharded_type(module, params, env, device=device, **arguments)


class BaseEmbeddingSharder(CollectionSharder[M]):
    """What the sharders of both collections have in common; a subclass names its module and builds the sharded one.

    Args:
        fused_params: The optimizer that runs inside backward: ``optimizer``, ``learning_rate``, ``eps``. SGD with a
            rate of 0.01 by default.
        qcomm_codecs_registry: What rows and their gradients travel as, from ``get_qcomm_codecs_registry``; float32 by
            default.

    Raises:
        ValueError: ``fused_params`` make no sense.

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.BaseEmbeddingSharder``.
    """

    _arguments = ("fused_params", "qcomm_codecs_registry")
    _tables_path: ClassVar[str]
    _types: ClassVar[Sequence[ShardingType]]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        optimizer_spec(fused_params)
        super().__init__(qcomm_codecs_registry)
        self.fused_params: dict[str, Any] | None = dict(fused_params) if fused_params is not None else None

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> weights ``[R, D]``."""
        tables = module.get_submodule(self._tables_path).named_children()
        return {name: table.get_parameter("weight") for name, table in tables}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """`ShardingType` values that it can build, on any device."""
        return [sharding_type.value for sharding_type in self._types]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """`EmbeddingComputeKernel` values that it can build, on any device."""
        replicated = sharding_type == ShardingType.DATA_PARALLEL.value
        return [kernel.value for kernel in SUPPORTED_KERNELS if not (replicated and kernel in IN_FILE)]
