"""Storage reservations: the memory of a rank that the rest of the model needs.

The memory is that of the compute device: HBM of an accelerator, or host memory for ranks on the
CPU.

Corresponds to TorchRec's ``torchrec.distributed.planner.storage_reservations``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tutorec._check import require_finite
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.planner.enumerators import model_tables, shardable_modules
from tutorec.distributed.planner.options import Constraints
from tutorec.distributed.planner.topology import (
    Ints,
    Storage,
    Topology,
    device_memory,
    own_memory,
)
from tutorec.distributed.planner.types import StorageReservation
from tutorec.errors import PlannerError, PlannerErrorType, bad_input

GIB = 1024**3
ID_BYTES = 8
# Batches of ids in memory at once when batches are prepared ahead: 2, with 10 copies each in the
# exchanges; TorchRec's estimate.
KJT_COPIES = 20
# Bytes per byte of a dense parameter: the parameter, two of an optimizer, three of gradients in
# DistributedDataParallel; TorchRec's estimate.
PARAMETER_MULTIPLIER = 6.0


class _Reservation(StorageReservation):
    """Reduces the memory of every compute device, and stores the topology that it returned last."""

    last_reserved_topology: Topology | None = None
    """The last topology with its memory reduced; None before the first call."""

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Constraints | None = None,
    ) -> Topology:
        """The topology with the memory that is left for tables; the model has no effect."""
        name = ("hbm", "ddr")[own_memory(topology)]
        had = [device.storage for device in topology.devices]
        reserved = topology.with_storage(
            [replace(storage, **{name: self._left(getattr(storage, name))}) for storage in had]
        )
        self.last_reserved_topology = reserved

        return reserved

    @abstractmethod
    def _left(self, memory: int) -> int:
        """Bytes of a memory that are left for tables."""


class FixedPercentageStorageReservation(_Reservation):
    """Reserves a fraction of every device's memory.

    Args:
        percentage: The fraction, from 0 to 1.

    Raises:
        PlannerError: It is not a number from 0 to 1.

    Example:
        >>> topology = Topology(world_size=1, compute_device="cuda", hbm_cap=1000)
        >>> reserved = FixedPercentageStorageReservation(0.25).reserve(
        ...     topology, 512, nn.Module(), []
        ... )
        >>> reserved.devices[0].storage.hbm, topology.devices[0].storage.hbm
        (750, 1000)

    Source:
        TorchRec's ``FixedPercentageStorageReservation``. There it keeps HBM only, so nothing on the
        CPU.
    """

    def __init__(self, percentage: float) -> None:
        self._percentage = require_finite("percentage", percentage, 0, 1, error=bad_input)

    def _left(self, memory: int) -> int:
        return int((1 - self._percentage) * memory)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(percentage={self._percentage})"


class FixedAbsoluteStorageReservation(_Reservation):
    """Reserves a number of bytes of every device's memory.

    Args:
        hbm_reserved_bytes: The bytes; of host memory for ranks on the CPU.

    Raises:
        PlannerError: A negative number.

    Example:
        >>> topology = Topology(world_size=1, compute_device="cuda", hbm_cap=1000)
        >>> FixedAbsoluteStorageReservation(300).reserve(
        ...     topology, 512, nn.Module(), []
        ... ).devices[0].storage.hbm
        700

    Source:
        TorchRec's ``FixedAbsoluteStorageReservation``.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        self._bytes = int(
            require_finite("hbm_reserved_bytes", hbm_reserved_bytes, 0, error=bad_input)
        )

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """The same in units of 2 ** 30 bytes."""
        return cls(int(hbm_reserved_gb * GIB))

    def _left(self, memory: int) -> int:
        return max(0, memory - self._bytes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(hbm_reserved_bytes={self._bytes})"


class HeuristicalStorageReservation(FixedPercentageStorageReservation):
    """Reserves a fraction of memory, the dense parameters, and batches of ids.

    ::

        bytes kept = percentage * memory
                   + parameter_multiplier * (bytes of dense parameters) + (bytes of buffers)
                   + 20 * 8 * (ids of a rank's batch)

    Modules on the meta device count like others.

    Args:
        percentage: The fraction, from 0 to 1, as a safety margin.
        parameter_multiplier: Reserved bytes per byte of a dense parameter.
        dense_tensor_estimate: Bytes of the dense layers; replaces the computed number.

    Raises:
        PlannerError: A number is out of range.

    Example:
        >>> topology = Topology(world_size=1, compute_device="cuda", hbm_cap=1000)
        >>> reservation = HeuristicalStorageReservation(percentage=0.1)
        >>> reservation.reserve(topology, 512, nn.Linear(4, 5, bias=False), []).devices[
        ...     0
        ... ].storage.hbm
        420

    Source:
        TorchRec's ``HeuristicalStorageReservation``.
    """

    def __init__(
        self,
        percentage: float,
        parameter_multiplier: float = PARAMETER_MULTIPLIER,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        super().__init__(percentage)
        self._parameter_multiplier = require_finite(
            "parameter_multiplier", parameter_multiplier, 0, error=bad_input
        )
        require_finite("dense_tensor_estimate", dense_tensor_estimate or 0, 0, error=bad_input)
        self._dense_tensor_estimate = dense_tensor_estimate
        self._needed = 0
        self.dense_storage: Storage | None = None
        """Bytes kept for dense parameters and buffers at the last reservation, of each rank."""
        self.kjt_storage: Storage | None = None
        """Bytes kept for batches of ids at the last reservation, of each rank."""

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Constraints | None = None,
    ) -> Topology:
        """The topology without those bytes.

        Args:
            topology: The machines; not changed.
            batch_size: B per rank.
            module: The model.
            sharders: The sharders of the model.
            constraints: Constraints of its tables: pooling factors and batch sizes.

        Raises:
            PlannerError: A device has less memory than is reserved.
        """
        dense, batches = self._needs(module, sharders, batch_size, constraints)
        memory = own_memory(topology)
        self.dense_storage = Storage(0, dense) if memory else Storage(dense, 0)
        self.kjt_storage = Storage(0, batches) if memory else Storage(batches, 0)
        self._needed = dense + batches
        reserved = super().reserve(topology, batch_size, module, sharders, constraints)
        left = device_memory(reserved)[:, memory]
        if left.min() < 0:
            raise self._nothing_left(topology, left, dense, batches, batch_size)
        return reserved

    def _nothing_left(
        self, topology: Topology, left: Ints, dense: int, batches: int, batch_size: int
    ) -> PlannerError:
        """The error for a rank with less memory than is reserved."""
        memory = own_memory(topology)
        rank = int((left < 0).argmax())
        total = int(device_memory(topology)[rank, memory])
        return PlannerError(
            f"nothing is left for tables on rank {rank}: of {total:,} bytes of "
            f"{('HBM', 'host memory')[memory]}, "
            f"{total - super()._left(total):,} are kept as a margin "
            f"(percentage={self._percentage}), {dense:,} for dense parameters and "
            f"{batches:,} for batches (batch_size={batch_size}), which is {-int(left[rank]):,} too "
            "many: give the topology more memory, a smaller percentage or batch_size, or "
            "dense_tensor_estimate=... if the dense part is known to be smaller",
            PlannerErrorType.INSUFFICIENT_STORAGE,
        )

    def _left(self, memory: int) -> int:
        return super()._left(memory) - self._needed

    def _needs(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        batch_size: int,
        constraints: Constraints | None,
    ) -> tuple[int, int]:
        """Bytes that the dense layers and the batches need on each rank."""
        tables = model_tables(module, sharders, batch_size, constraints)
        ids = math.ceil(sum(table.profile.total_ids for table in tables))
        batches = ids * ID_BYTES * KJT_COPIES
        if self._dense_tensor_estimate is not None:
            return int(self._dense_tensor_estimate), batches

        table_tensors = {id(table.option.tensor) for table in tables}
        # The rows of quantized tables are buffers.
        for _, collection, _ in shardable_modules(module, sharders):
            table_tensors.update(id(rows) for rows in collection.buffers())

        parameters = sum(
            parameter.nbytes
            for parameter in module.parameters()
            if id(parameter) not in table_tensors
        )
        buffers = sum(
            buffer.nbytes for buffer in module.buffers() if id(buffer) not in table_tensors
        )
        return round(self._parameter_multiplier * parameters) + buffers, batches
