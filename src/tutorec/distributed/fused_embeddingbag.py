"""A `FusedEmbeddingBagCollection` over several ranks: an `EmbeddingBagCollection` whose optimizer is its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.plan import EmbeddingComputeKernel, ParameterSharding
from tutorec.distributed.qcomm import QuantizedCommCodecs
from tutorec.distributed.sharders import BaseEmbeddingSharder
from tutorec.modules.fused_embedding_modules import FusedEmbeddingBagCollection


class ShardedFusedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A sharded collection whose optimizer is that of the module.

    Args:
        module: The fused collection; its weights are copied.
        table_name_to_parameter_sharding: The plan of this module.
        env: The ranks.
        device: Where this rank's tables are to live, by default :func:`tutorec.spmd.device`.
        qcomm_codecs_registry: What pooled rows and their gradients travel as; float32 by default.

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
        super().__init__(module, table_name_to_parameter_sharding, env, None, device, qcomm_codecs_registry)


class FusedKernelsOnly(BaseEmbeddingSharder[Any]):
    """A sharder that offers no dense kernel, under which the tables would not be trained."""

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """`EmbeddingComputeKernel` values that it can build, on any device."""
        kernels = super().compute_kernels(sharding_type, compute_device_type)
        return [kernel for kernel in kernels if kernel != EmbeddingComputeKernel.DENSE.value]


class FusedEmbeddingBagCollectionSharder(FusedKernelsOnly, EmbeddingBagCollectionSharder):
    """Shards a `FusedEmbeddingBagCollection`.

    Args:
        fused_params: TorchRec's, and without effect there and here: the optimizer is the module's.
        qcomm_codecs_registry: What pooled rows and their gradients travel as; float32 by default.

    Source:
        TorchRec's ``torchrec.distributed.fused_embeddingbag.FusedEmbeddingBagCollectionSharder``.
    """

    _module_type = FusedEmbeddingBagCollection
    _sharded_type = ShardedFusedEmbeddingBagCollection
    _arguments = ("qcomm_codecs_registry",)
