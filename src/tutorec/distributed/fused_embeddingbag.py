"""`FusedEmbeddingBagCollection` sharded over several ranks; the module has its own optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharders import BaseEmbeddingSharder
from tutorec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding
from tutorec.modules.fused_embedding_modules import FusedEmbeddingBagCollection


class ShardedFusedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A sharded `EmbeddingBagCollection` with the optimizer of its `FusedEmbeddingBagCollection`.

    Args:
        module: The fused collection; its weights are copied.
        table_name_to_parameter_sharding: The plan of this module.
        env: The ranks.
        device: Device of this rank's shards; :func:`tutorec.spmd.device` by default.
        qcomm_codecs_registry: Data types in which pooled rows and their gradients are sent; float32
            by default.

    Source:
        TorchRec's ``torchrec.distributed.fused_embeddingbag.ShardedFusedEmbeddingBagCollection``.
    """

    def __init__(
        self,
        module: FusedEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(
            module, table_name_to_parameter_sharding, env, None, device, qcomm_codecs_registry
        )


class FusedKernelsOnly(BaseEmbeddingSharder[Any]):
    """Base of sharders without the dense kernel.

    Under the dense kernel the module's optimizer would not update the tables.
    """

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The supported `EmbeddingComputeKernel` values, the same on any device."""
        kernels = super().compute_kernels(sharding_type, compute_device_type)
        return [kernel for kernel in kernels if kernel != EmbeddingComputeKernel.DENSE.value]


class FusedEmbeddingBagCollectionSharder(FusedKernelsOnly, EmbeddingBagCollectionSharder):
    """Sharder of `FusedEmbeddingBagCollection`.

    Args:
        fused_params: Has no effect, as in TorchRec: the module has its own optimizer.
        qcomm_codecs_registry: Data types in which pooled rows and their gradients are sent; float32
            by default.

    Source:
        TorchRec's ``torchrec.distributed.fused_embeddingbag.FusedEmbeddingBagCollectionSharder``.
    """

    unsharded_class = FusedEmbeddingBagCollection
    sharded_class = ShardedFusedEmbeddingBagCollection

    def shard(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        module: FusedEmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFusedEmbeddingBagCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedFusedEmbeddingBagCollection(
            module, params, env, device, self.qcomm_codecs_registry
        )
