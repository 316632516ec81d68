"""Sharders restricted to one sharding type and one compute kernel, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharders import BaseEmbeddingSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder


class _OfOneType(BaseEmbeddingSharder[Any]):
    """A sharder of one sharding type and one kernel.

    Args:
        sharding_type: A value of `ShardingType`.
        kernel_type: A value of `EmbeddingComputeKernel`.
        fused_params: Options of the optimizer in backward.
        qcomm_codecs_registry: Data types in which results are sent.
    """

    __test__ = False

    def __init__(
        self,
        sharding_type: str,
        kernel_type: str,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._sharding_type = sharding_type
        self._kernel_type = kernel_type

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The single sharding type."""
        return [self._sharding_type]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The single kernel."""
        return [self._kernel_type]


class TestEBCSharder(_OfOneType, EmbeddingBagCollectionSharder):
    """Sharder of `EmbeddingBagCollection` with one sharding type and one kernel.

    Example:
        >>> from tutorec.distributed.test_utils.emb_sharder import TestEBCSharder
        >>> sharder = TestEBCSharder("table_wise", "fused", {"learning_rate": 0.1})
        >>> sharder.sharding_types("cpu"), sharder.compute_kernels("table_wise", "cpu")
        (['table_wise'], ['fused'])
    """
