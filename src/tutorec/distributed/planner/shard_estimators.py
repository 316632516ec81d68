"""Estimators, which write the time (`cost`) and memory of each shard into its option.

Rows are counted with the width in which the kernel stores them, and so is optimizer state; row-wise
Adagrad, for example, stores 4 bytes per row of each shard. The result equals what a sharded module
allocates, to the byte. Buffers are added: received ids, returned rows, and gradients of dense
kernels.

Corresponds to TorchRec's ``torchrec.distributed.planner.shard_estimators``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from tutorec._kernels.specs import OptimizerSpec
from tutorec._kernels.tbe_build import runs_in_fbgemm
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner.cost import (
    KernelModel,
    Size,
    for_each_size,
    kernel_model,
    on_device,
    shard_perf,
    work_counter,
)
from tutorec.distributed.planner.options import Constraints, ShardingOption, TableProfile
from tutorec.distributed.planner.topology import MOST_BYTES, Ints, Topology
from tutorec.distributed.planner.types import ShardEstimator
from tutorec.errors import PlannerError, PlannerErrorType

# 1 for the fields of `Perf` that belong to forward
_FORWARD = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 1.0])
_FLOAT = 4  # bytes of an element in computation, and of a row's state
_ID = 8  # bytes of an id or a length in memory
# Bytes that a cache stores per row of the table, and additionally per cached row.
_ROW_INDEX = 8
_SLOT_INDEX = 24


class _Estimator(ShardEstimator):
    """Writes one estimate of every option, for a topology."""

    def __init__(self, topology: Topology, is_inference: bool) -> None:
        self._topology = topology
        self._is_inference = is_inference

    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: Mapping[str, ModuleSharder[Any]] | None = None,
    ) -> None:
        """Write the estimate of every shard."""
        for option in sharding_options:
            option.set_estimates(**self._estimates(option, option.shard_arrays().sizes))

    @abstractmethod
    def _estimates(self, option: ShardingOption, sizes: Ints) -> dict[str, Any]:
        """The estimate of an option with shards of these sizes."""


class EmbeddingPerfEstimator(_Estimator):
    """Writes the milliseconds of every shard in one training step, see `cost`.

    Args:
        topology: The machines.
        constraints: TorchRec's; options already contain their constraints.
        is_inference: Whether there is no backward.

    Source:
        TorchRec's ``EmbeddingPerfEstimator``.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Constraints | None = None,
        is_inference: bool = False,
    ) -> None:
        super().__init__(topology, is_inference)

    def _estimates(self, option: ShardingOption, sizes: Ints) -> dict[str, Any]:
        sharding_type = ShardingType(option.sharding_type)
        perf = shard_perf(
            option.profile, sharding_type, option.compute_kernel, sizes, self._topology
        )
        return {"perf": perf * _FORWARD if self._is_inference else perf}


class EmbeddingStorageEstimator(_Estimator):
    """Writes the bytes of every shard: rows, optimizer state, gradients and buffers.

    Args:
        topology: The machines.
        constraints: TorchRec's; options already contain their constraints.
        is_inference: Whether only rows are stored. Keyword only, since TorchRec has two more
            arguments before it.

    Source:
        TorchRec's ``EmbeddingStorageEstimator``.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Constraints | None = None,
        *,
        is_inference: bool = False,
    ) -> None:
        super().__init__(topology, is_inference)

    def _estimates(self, option: ShardingOption, sizes: Ints) -> dict[str, Any]:
        sharding_type = ShardingType(option.sharding_type)
        storage = shard_storage(
            option.profile,
            sharding_type,
            option.compute_kernel,
            sizes,
            self._topology,
            self._is_inference,
        )
        return {"storage": storage}


class StoredBytes(NamedTuple):
    """Bytes of each shard, ``[P]``.

    Args:
        weights: Its rows.
        state: Optimizer state.
        gradients: Dense gradients.
        input: Ids, lengths and weights of a batch.
        output: Rows of a batch.
        mapping: The mapping of raw ids to its rows.
        cache: Cached rows of a table in a file, with their state and an index.
        spare: Spare rows behind the table in its file, one for each cached row.
    """

    weights: Ints
    state: Ints
    gradients: Ints
    input: Ints
    output: Ints
    mapping: Ints
    cache: Ints
    spare: Ints


def stored_bytes(
    table: TableProfile,
    sharding_type: ShardingType,
    compute_kernel: str,
    sizes: Ints,
    topology: Topology,
) -> StoredBytes:
    """The bytes of each shard, by component.

    Args:
        table: The table.
        sharding_type: Its sharding type.
        compute_kernel: `EmbeddingComputeKernel` value.
        sizes: ``[P, 2]`` rows and columns of the shards.
        topology: The machines.

    Raises:
        PlannerError: The kernel has no model, or a shard takes more bytes than any rank can have.

    Example:
        >>> table = TableProfile(
        ...     "", "item", 1000, 32, features=("f",), samples=(10.0,), ids=(20.0,)
        ... )
        >>> found = stored_bytes(
        ...     table,
        ...     ShardingType.TABLE_WISE,
        ...     "fused",
        ...     np.array([[1000, 32]]),
        ...     Topology(2, "cuda"),
        ... )
        >>> (
        ...     found.weights.tolist(),
        ...     found.state.tolist(),
        ...     found.input.tolist(),
        ...     found.output.tolist(),
        ... )
        ([128000], [0], [480], [2560])
    """
    kernel = kernel_model(compute_kernel)
    lines = for_each_size(
        sizes,
        lambda size: _stored(table, sharding_type, kernel, size, topology),
        len(StoredBytes._fields),
        np.int64,
    )
    return StoredBytes(*lines.T)


def shard_storage(
    table: TableProfile,
    sharding_type: ShardingType,
    compute_kernel: str,
    sizes: Ints,
    topology: Topology,
    inference: bool = False,
) -> Ints:
    """Bytes that each shard takes on its rank, ``[P, 3]``: HBM, DDR, SSD.

    Args:
        table: The table.
        sharding_type: Its sharding type.
        compute_kernel: `EmbeddingComputeKernel` value.
        sizes: ``[P, 2]`` rows and columns of the shards.
        topology: The machines.
        inference: Whether only rows are stored.

    Raises:
        PlannerError: The kernel has no model, or a shard takes more bytes than any rank can have.
    """
    stored = stored_bytes(table, sharding_type, compute_kernel, sizes, topology)
    rows = stored.weights if inference else stored.weights + stored.state + stored.spare
    buffers = stored.mapping if inference else np.sum(stored[2:-1], axis=0)
    return kernel_model(compute_kernel).memory(topology, rows) + on_device(topology, buffers)


def _stored(
    table: TableProfile,
    sharding_type: ShardingType,
    kernel: KernelModel,
    size: Size,
    topology: Topology,
) -> tuple[int, ...]:
    """The components of a shard, in the order of the fields of `StoredBytes`.

    Raises:
        PlannerError: They exceed the memory of any rank, so that sums over ranks would exceed 64
            bits.
    """
    work = work_counter(kernel, sharding_type)(table, size, topology)
    optimizer = table.optimizer if kernel.updates and not kernel.serves else None
    # Of trained rows only those in float32 are padded.
    padded = not kernel.serves and table.element_bytes == _FLOAT
    rows, columns = _as_stored(size, optimizer, topology) if padded else size

    # this rank's gradient of the table, and the sum over ranks
    summed_gradient = 2 * _FLOAT * int(work.table)
    dense_gradient = 0 if kernel.updates else _FLOAT * size[0] * size[1]
    ids = max(work.updates, work.lookups if kernel.serves else 0.0)
    id_bytes = _ID + (_FLOAT if table.weighted else 0)
    cache_bytes = (0, 0)
    if table.cached:
        cache_bytes = _cache_bytes(table, optimizer, rows, columns, topology)

    components = (
        rows * table.row_bytes(columns),
        _state_bytes(optimizer, rows, columns),
        summed_gradient + dense_gradient,
        ceil(ids * id_bytes + _ID * work.lists),
        ceil(_FLOAT * max(work.outputs, work.gradients) * size[1]),
        size[0] * table.mapping_row_bytes,
        *cache_bytes,
    )
    if sum(components) > MOST_BYTES:
        raise _too_large(table, sharding_type, (rows, columns), sum(components))
    return components


def _too_large(
    table: TableProfile, sharding_type: ShardingType, size: Size, shard_bytes: int
) -> PlannerError:
    """The error for a shard that takes more memory than any rank has."""
    rows, columns = size
    return PlannerError(
        f"table {table.name!r}, {sharding_type.value}: a shard of {rows:,} x {columns:,} takes "
        f"{shard_bytes:.3g} bytes on its rank with {sum(table.ids):.3g} ids and "
        f"{sum(table.samples):.3g} bags of a batch, and no rank has {MOST_BYTES:.3g}: look at "
        "num_embeddings, embedding_dim, batch_size and pooling_factors",
        PlannerErrorType.INSUFFICIENT_STORAGE,
    )


def _state_bytes(optimizer: OptimizerSpec | None, rows: int, columns: int) -> int:
    """Bytes of optimizer state of a shard; a step count is one element."""
    if optimizer is None:
        return 0
    numbers = sum(rows if state.rowwise else rows * columns for state in optimizer.states)
    return _FLOAT * (numbers + int(optimizer.counts_steps))


def _cache_bytes(
    table: TableProfile,
    optimizer: OptimizerSpec | None,
    rows: int,
    columns: int,
    topology: Topology,
) -> tuple[int, int]:
    """Bytes of a cache in memory, and of the spare rows behind the table in its file.

    In memory are the cached rows with their state; per row of the table its slot; per slot its row
    and last use. On CUDA the slower memory has no spare rows.
    """
    slots = max(1, ceil(table.cached * rows))
    index = _ROW_INDEX * rows + _SLOT_INDEX * slots
    in_slots = slots * table.row_bytes(columns) + _state_bytes(optimizer, slots, columns)

    return in_slots + index, in_slots if topology.compute_device == "cpu" else 0


def _as_stored(size: Size, optimizer: OptimizerSpec | None, topology: Topology) -> Size:
    """Rows and columns of a shard as stored.

    fbgemm's operators require widths that are multiples of 4 and at least one row; torch stores
    tables unpadded.
    """
    rows, columns = size
    if rows > 0 and columns % 4 == 0:
        return size
    if not runs_in_fbgemm(optimizer, [columns], topology.compute_device):
        return size

    return max(rows, 1), -(-columns // 4) * 4
