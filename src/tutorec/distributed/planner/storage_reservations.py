"""What is left for tables of the memory of a rank, once the rest of the model has its share.

The memory that is meant is that of the compute device: HBM of an accelerator, or host memory where ranks compute on
the CPU.

Corresponds to TorchRec's ``torchrec.distributed.planner.storage_reservations``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tutorec.distributed.planner.input_checks import finite
from tutorec.distributed.planner.interfaces import Constraints, StorageReservation
from tutorec.distributed.planner.model_tables import model_tables, shardable_modules
from tutorec.distributed.planner.options import Storage
from tutorec.distributed.planner.topology import MOST_BYTES, Topology
from tutorec.distributed.sharded_module import ModuleSharder
from tutorec.errors import PlannerError, PlannerErrorType

GIB = 1024**3
ID_BYTES = 8
# Batches of ids that exist at once while batches are prepared ahead: 2, of each 10 copies on its way through the
# exchanges; TorchRec's estimate.
KJT_COPIES = 20
# Bytes that a step keeps for a byte of a dense parameter: itself, two of an optimizer, three of gradients on their way
# through DistributedDataParallel; TorchRec's estimate.
PARAMETER_MULTIPLIER = 6.0


@dataclass(frozen=True)
class _Needs:
    """Bytes that others than tables need on each rank."""

    dense: int
    batches: int


class FixedPercentageStorageReservation(StorageReservation):
    """Keeps a part of every device's memory.

    Args:
        percentage: The part, from 0 to 1.

    Raises:
        PlannerError: It is no such number.

    Example:
        >>> topology = Topology(world_size=1, compute_device="cuda", hbm_cap=1000)
        >>> reserved = FixedPercentageStorageReservation(0.25).reserve(topology, 512, nn.Module(), [])
        >>> reserved.devices[0].storage.hbm, topology.devices[0].storage.hbm
        (750, 1000)

    Source:
        TorchRec's ``FixedPercentageStorageReservation``. There it keeps HBM only, so nothing on the CPU.
    """

    def __init__(self, percentage: float) -> None:
        self._percentage: float = _checked_percentage(percentage)
        self._last_reserved_topology: Topology | None = None

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Constraints | None = None,
    ) -> Topology:
        """The topology less that part; the model makes no difference."""
        reserved = _less(topology, self._percentage, 0)
        self._last_reserved_topology = reserved
        return reserved

    @property
    def last_reserved_topology(self) -> Topology | None:
        """What was reserved last; None before the first time."""
        return self._last_reserved_topology

    def __repr__(self) -> str:
        return f"{type(self).__name__}(percentage={self._percentage})"


class FixedAbsoluteStorageReservation(StorageReservation):
    """Keeps as many bytes of every device's memory; a device that has fewer has none left.

    Args:
        hbm_reserved_bytes: How many; of host memory where ranks compute on the CPU.

    Raises:
        PlannerError: A negative number.

    Example:
        >>> topology = Topology(world_size=1, compute_device="cuda", hbm_cap=1000)
        >>> FixedAbsoluteStorageReservation(300).reserve(topology, 512, nn.Module(), []).devices[0].storage.hbm
        700

    Source:
        TorchRec's ``FixedAbsoluteStorageReservation``.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        finite("hbm_reserved_bytes", hbm_reserved_bytes, "give bytes")
        self._bytes = int(hbm_reserved_bytes)
        self._last_reserved_topology: Topology | None = None

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """The same in units of 2 ** 30 bytes.

        Raises:
            PlannerError: A negative number.
        """
        finite("hbm_reserved_gb", hbm_reserved_gb, "give units of 2 ** 30 bytes")
        return cls(int(hbm_reserved_gb * GIB))

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Constraints | None = None,
    ) -> Topology:
        """The topology less those bytes; the model makes no difference."""
        on_device = topology.compute_device != "cpu"
        storage = []
        for device in topology.devices:
            had = device.storage
            if on_device:
                storage.append(Storage(max(0, had.hbm - self._bytes), had.ddr, had.ssd))
            else:
                storage.append(Storage(had.hbm, max(0, had.ddr - self._bytes), had.ssd))
        reserved = topology.with_storage(storage)
        self._last_reserved_topology = reserved
        return reserved

    @property
    def last_reserved_topology(self) -> Topology | None:
        """What was reserved last; None before the first time."""
        return self._last_reserved_topology

    def __repr__(self) -> str:
        return f"{type(self).__name__}(hbm_reserved_bytes={self._bytes})"


class HeuristicalStorageReservation(StorageReservation):
    """Keeps a part of every device's memory, what the dense parameters need, and what batches of ids need.

    bytes kept = percentage * memory
               + parameter_multiplier * (bytes of parameters that are no tables) + (bytes of buffers)
               + 20 * 8 * (ids of a rank's batch)

    Modules on the meta device count like others.

    Args:
        percentage: The part, from 0 to 1: a margin for what is not foreseen.
        parameter_multiplier: Bytes that a step keeps for a byte of a dense parameter.
        dense_tensor_estimate: Bytes of the dense part, in the place of what is computed.

    Raises:
        PlannerError: A number that cannot be.

    Example:
        >>> topology = Topology(world_size=1, compute_device="cuda", hbm_cap=1000)
        >>> reservation = HeuristicalStorageReservation(percentage=0.1)
        >>> reservation.reserve(topology, 512, nn.Linear(4, 5, bias=False), []).devices[0].storage.hbm
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
        self._percentage: float = _checked_percentage(percentage)
        for what, number in (
            ("parameter_multiplier", parameter_multiplier),
            ("dense_tensor_estimate", dense_tensor_estimate or 0),
        ):
            finite(what, number, "give an amount")
        self._parameter_multiplier = parameter_multiplier
        self._dense_tensor_estimate = dense_tensor_estimate
        self._kjt_copies = KJT_COPIES
        self._needs: _Needs | None = None
        self._on_device = False
        self._last_reserved_topology: Topology | None = None

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[Any]],
        constraints: Constraints | None = None,
    ) -> Topology:
        """The topology less all that.

        Args:
            topology: The machines as they are; not changed.
            batch_size: B of a rank.
            module: The model.
            sharders: Those that would shard it.
            constraints: Of its tables: pooling factors and batch sizes.

        Raises:
            PlannerError: A device has less.
        """
        needs = self._needs_of(module, sharders, batch_size, constraints)
        self._needs, self._on_device = needs, topology.compute_device != "cpu"
        reserved = _less(topology, self._percentage, needs.dense + needs.batches)
        for before, after in zip(topology.devices, reserved.devices, strict=True):
            left = after.storage.hbm if self._on_device else after.storage.ddr
            if left < 0:
                has = before.storage.hbm if self._on_device else before.storage.ddr
                raise self._too_little(before.rank, has, left, batch_size, needs)
        self._last_reserved_topology = reserved
        return reserved

    @property
    def last_reserved_topology(self) -> Topology | None:
        """What was reserved last; None before the first time."""
        return self._last_reserved_topology

    @property
    def dense_storage(self) -> Storage | None:
        """Bytes kept for dense parameters and buffers at the last reservation, of each rank."""
        return None if self._needs is None else _of_device(self._needs.dense, self._on_device)

    @property
    def kjt_storage(self) -> Storage | None:
        """Bytes kept for batches of ids at the last reservation, of each rank."""
        return None if self._needs is None else _of_device(self._needs.batches, self._on_device)

    def _needs_of(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[Any]],
        batch_size: int,
        constraints: Constraints | None,
    ) -> _Needs:
        tables = model_tables(module, sharders, batch_size, constraints)
        batches = math.ceil(sum(table.facts.total_ids for table in tables)) * ID_BYTES * self._kjt_copies
        if self._dense_tensor_estimate is not None:
            return _Needs(int(self._dense_tensor_estimate), batches)
        of_tables = {id(table.tensor) for table in tables}
        # The rows of quantized tables are buffers.
        of_tables |= {id(rows) for _, part, _ in shardable_modules(module, sharders) for rows in part.buffers()}
        parameters = sum(each.nbytes for each in module.parameters() if id(each) not in of_tables)
        buffers = sum(each.nbytes for each in module.buffers() if id(each) not in of_tables)
        return _Needs(round(self._parameter_multiplier * parameters) + buffers, batches)

    def _too_little(self, rank: int, has: int, left: int, batch_size: int, needs: _Needs) -> PlannerError:
        """The error for a device with less memory than is to be kept of it, and what would do."""
        memory = "HBM" if self._on_device else "host memory"
        margin = has - _after_margin(has, self._percentage)
        ways = self._ways_out(has, batch_size, needs, memory)
        return PlannerError(
            f"nothing is left for tables on rank {rank}: of {has:,} bytes of {memory}, {margin:,} are kept as a margin "
            f"(percentage={self._percentage}), {needs.dense:,} for dense parameters and {needs.batches:,} for batches "
            f"(batch_size={batch_size}), which is {-left:,} too many; tables aside, what "
            f"would do: {', or '.join(ways)}",
            PlannerErrorType.INSUFFICIENT_STORAGE,
        )

    def _ways_out(self, has: int, batch_size: int, needs: _Needs, memory: str) -> list[str]:
        """What would leave a device with at least nothing, each by itself; computed as a reservation is."""
        needed = needs.dense + needs.batches
        ways = []
        if self._percentage < 1:
            # A little more where the division was rounded down.
            exact = math.ceil(needed / (1 - self._percentage))
            enough = next(
                (n for n in (exact, exact + exact // 10**9 + 1) if self._fits(n, self._percentage, needed)), None
            )
            ways += [] if enough is None or enough > MOST_BYTES else [f"{enough:,} bytes of {memory}"]
        if 0 < needed <= has:
            part = math.floor((1 - needed / has) * 1000) / 1000
            ways += [f"percentage={part}"] if self._fits(has, part, needed) else []
        room = _after_margin(has, self._percentage) - needs.dense
        # The bytes of batches are rounded up to whole ids.
        fitting = (room - ID_BYTES * self._kjt_copies) * batch_size // needs.batches if needs.batches else 0
        if 0 < fitting < batch_size:
            ways.append(f"batch_size={fitting}")
        return [*ways, "dense_tensor_estimate=..., where the dense part is known to be smaller"]

    @staticmethod
    def _fits(memory: int, percentage: float, needed: int) -> bool:
        return _after_margin(memory, percentage) >= needed

    def __repr__(self) -> str:
        return f"{type(self).__name__}(percentage={self._percentage})"


class InferenceStorageReservation(HeuristicalStorageReservation):
    """Keeps what a model that only answers needs: a part of every device's memory, its dense part, one batch.

    bytes kept = percentage * memory
               + (bytes of parameters and buffers that are no tables)
               + 8 * (ids of a rank's batch)

    Args:
        percentage: The part, from 0 to 1: a margin for what is not foreseen.
        dense_tensor_estimate: Bytes of the dense part, in the place of what is computed.

    Raises:
        PlannerError: A number that cannot be.

    Example:
        >>> topology = Topology(world_size=1, compute_device="cuda", hbm_cap=1000)
        >>> reservation = InferenceStorageReservation(percentage=0.1)
        >>> reservation.reserve(topology, 512, nn.Linear(4, 5, bias=False), []).devices[0].storage.hbm
        820

    Source:
        TorchRec's ``InferenceStorageReservation``.
    """

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        super().__init__(percentage, parameter_multiplier=1.0, dense_tensor_estimate=dense_tensor_estimate)
        self._kjt_copies = 1


def _after_margin(memory: int, percentage: float) -> int:
    """Bytes of a memory less a part of it."""
    return int((1 - percentage) * memory)


def _checked_percentage(percentage: float) -> float:
    finite("percentage", percentage, "give a part of the memory, as 0.15 for 15 percent", most=1)
    return percentage


def _of_device(amount: int, on_device: bool) -> Storage:
    return Storage(hbm=amount, ddr=0) if on_device else Storage(hbm=0, ddr=amount)


def _less(topology: Topology, percentage: float, amount: int) -> Topology:
    """The topology less a part of each device's memory and so many bytes more; below 0 where there is less."""
    on_device = topology.compute_device != "cpu"
    storage = []
    for device in topology.devices:
        had = device.storage
        memory = had.hbm if on_device else had.ddr
        left = _after_margin(memory, percentage) - amount
        storage.append(Storage(left, had.ddr, had.ssd) if on_device else Storage(had.hbm, left, had.ssd))
    return topology.with_storage(storage)
