"""Estimators: they write into options what `cost` and `storage` compute.

Corresponds to TorchRec's ``torchrec.distributed.planner.shard_estimators``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.cost import piece_perf
from tutorec.distributed.planner.interfaces import ShardEstimator
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.storage import piece_storage
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.sharded_module import ModuleSharder

_FORWARD = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])  # of the fields of `Perf`, those that are no backward


class EmbeddingPerfEstimator(ShardEstimator):
    """Milliseconds of every shard in one training step, see `cost`.

    Args:
        topology: The machines.
        constraints: As TorchRec's; what they say of a table stands in its options already.
        is_inference: Whether there is no backward.

    Source:
        TorchRec's ``EmbeddingPerfEstimator``.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
    ) -> None:
        self._topology, self._is_inference = topology, is_inference

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Mapping[str, ModuleSharder[Any]] | None = None
    ) -> None:
        """Fill ``perf`` of every shard."""
        for option in sharding_options:
            kind, sizes = ShardingType(option.sharding_type), option.pieces().sizes
            perf = piece_perf(option.facts, kind, option.compute_kernel, sizes, self._topology)
            option.set_estimates(perf=perf * _FORWARD if self._is_inference else perf)


class EmbeddingStorageEstimator(ShardEstimator):
    """Bytes of every shard: rows, optimizer state, gradients, and what a batch brings and takes; see `storage`.

    Args:
        topology: The machines.
        constraints: As TorchRec's; what they say of a table stands in its options already.
        is_inference: Whether rows are all that is kept; given by name, as TorchRec has two more before it.

    Source:
        TorchRec's ``EmbeddingStorageEstimator``.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        is_inference: bool = False,
    ) -> None:
        self._topology, self._is_inference = topology, is_inference

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: Mapping[str, ModuleSharder[Any]] | None = None
    ) -> None:
        """Fill ``storage`` of every shard."""
        for option in sharding_options:
            kind, sizes = ShardingType(option.sharding_type), option.pieces().sizes
            option.set_estimates(
                storage=piece_storage(
                    option.facts, kind, option.compute_kernel, sizes, self._topology, self._is_inference
                )
            )
