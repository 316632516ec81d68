"""The machines that a plan is made for: number of ranks, hosts, memory and bandwidths.

No device is queried: a laptop can plan for 512 GPUs.

Corresponds to the topology of TorchRec's ``torchrec.distributed.planner.types``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass, fields, replace
from enum import Enum
from operator import add, sub
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import tutorec._calibration as calibration
from tutorec._check import require_finite, require_int, warn_caller
from tutorec.distributed import comm
from tutorec.distributed.core.env import ranks_per_host
from tutorec.distributed.planner import constants
from tutorec.distributed.planner.constants import DEVICES
from tutorec.errors import bad_input

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_T = TypeVar("_T")
MOST_RANKS = 2**17  # the largest number of ranks with a plan in reasonable time
MOST_BYTES = 2**50  # sums over all ranks must fit into 64 bits
_PRESET = re.compile(r"(?:(\d+)x)?([a-z][a-z0-9-]*?)(?:x(\d+))?", re.IGNORECASE)


@dataclass(unsafe_hash=True)
class Perf:
    """Expected milliseconds of a shard in one training step.

    Args:
        fwd_compute: Lookup and pooling.
        fwd_comms: Sending rows to the ranks of their samples.
        bwd_compute: Update of the rows.
        bwd_comms: Sending gradients back.
        input_dist_comms: Sending ids to the shard.
        prefetch_compute: Reading rows into a cache before the lookup.

    Example:
        >>> (Perf(1, 2, 3, 4) + Perf(1, 0, 0, 0)).total
        11.0

    Source:
        TorchRec's ``Perf``. There ``total`` leaves ``input_dist_comms`` out, which a training
        pipeline hides.
    """

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """Total milliseconds of the shard on its rank."""
        return float(sum(astuple(self)))

    def __add__(self, other: Perf) -> Perf:
        return Perf(*map(add, astuple(self), astuple(other)))


PERF_FIELDS = tuple(field.name for field in fields(Perf))


@dataclass(order=True, unsafe_hash=True)
class Storage:
    """Bytes by kind of memory.

    Args:
        hbm: Memory of an accelerator.
        ddr: Memory of the host.
        ssd: Disk.

    Example:
        >>> Storage(hbm=1, ddr=2) + Storage(hbm=1, ddr=0)
        Storage(hbm=2, ddr=2, ssd=0)
    """

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: Storage) -> Storage:
        return Storage(*map(sub, astuple(self), astuple(other)))


@dataclass(unsafe_hash=True)
class DeviceHardware:
    """A rank's device.

    Args:
        rank: The rank.
        storage: Bytes available to tables.
        perf: Milliseconds placed on it.
    """

    rank: int
    storage: Storage
    perf: Perf


class CustomTopologyData:
    """Memory of each device, if devices differ.

    Args:
        data: ``"hbm_cap"``, ``"ddr_cap"`` or ``"ssd_cap"`` -> bytes of each rank.
        world_size: W.

    Raises:
        PlannerError: Another key, or not one number per rank.

    Example:
        >>> Topology(
        ...     2, "cuda", custom_topology_data=CustomTopologyData({"hbm_cap": [8, 16]}, 2)
        ... ).devices[1].storage.hbm
        16

    Source:
        TorchRec's ``CustomTopologyData``.
    """

    supported_fields = ("ddr_cap", "hbm_cap", "ssd_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for key, numbers in data.items():
            if key not in self.supported_fields:
                raise bad_input(
                    f"CustomTopologyData does not support {key!r}: give "
                    f"{', '.join(self.supported_fields)}"
                )
            if len(numbers) != world_size:
                raise bad_input(
                    f"CustomTopologyData has {len(numbers)} numbers of {key} for {world_size} "
                    "ranks: give one per rank"
                )

        self._data = {key: list(numbers) for key, numbers in data.items()}

    def get_data(self, key: str) -> list[int]:
        """Bytes of each rank."""
        return self._data[key]

    def has_data(self, key: str) -> bool:
        """Whether it has data for this kind of memory."""
        return key in self._data


class CollectiveType(Enum):
    """Kinds of collectives."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"


class GeneralizedCommsBandwidth(ABC):
    """Bandwidth between ranks as a function of the ranks and the collective; to be subclassed.

    Source:
        TorchRec's ``GeneralizedCommsBandwidth``.
    """

    @abstractmethod
    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        """Bytes per ms that a rank sends.

        Args:
            local_world_size: Ranks per host.
            world_size: Ranks that take part.
            collective_type: The collective.
        """

    @property
    @abstractmethod
    def intra_host_bw(self) -> float:
        """Bytes per ms inside a host."""

    @property
    @abstractmethod
    def inter_host_bw(self) -> float:
        """Bytes per ms between hosts."""


@dataclass(frozen=True)
class BasicCommsBandwidths(GeneralizedCommsBandwidth):
    """One bandwidth inside a host, one between hosts.

    Example:
        >>> BasicCommsBandwidths(inter_host_bw=1.0, intra_host_bw=9.0).get_bw(
        ...     2, 4, CollectiveType.ALL_TO_ALL
        ... )
        1.0

    Source:
        TorchRec's ``BasicCommsBandwidths``.
    """

    inter_host_bw: float = constants.CROSS_NODE_BANDWIDTH  # type: ignore[misc]
    intra_host_bw: float = constants.INTRA_NODE_BANDWIDTH  # type: ignore[misc]

    def get_bw(
        self, local_world_size: int, world_size: int, collective_type: CollectiveType
    ) -> float:
        """The bandwidth between hosts if several take part; all-reduce uses all ranks of a host."""
        if collective_type is CollectiveType.ALL_REDUCE:
            return self.inter_host_bw * local_world_size
        return self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw

    def __str__(self) -> str:
        return (
            f"BasicCommsBandwidths: inter_host_bw={self.inter_host_bw}, "
            f"intra_host_bw={self.intra_host_bw}"
        )


class Topology:
    """The ranks, their hosts and their memory.

    Default bandwidths are TorchRec's for accelerators (an H100 is three times as fast, see
    `preset`), and those of a laptop for the CPU.

    Args:
        world_size: W, number of ranks.
        compute_device: ``"cpu"``, ``"cuda"`` or ``"mtia"``.
        hbm_cap: Bytes of device memory; 32 GiB by default, 0 on the CPU.
        ddr_cap: Bytes of host memory per rank; 128 GiB by default.
        ssd_cap: Bytes of disk per rank; 2 TiB by default.
        local_world_size: Ranks per host; by default all ranks.
        pod_size: Number of hosts that are connected as fast as the ranks of one host.
        hbm_mem_bw: Bandwidth of device memory, bytes per ms.
        ddr_mem_bw: A rank's share of the bandwidth of host memory, bytes per ms.
        ssd_mem_bw: Bandwidth of a disk, bytes per ms.
        hbm_to_ddr_mem_bw: Bandwidth between a device and its host, bytes per ms.
        intra_host_bw: Bytes per ms that a rank sends inside its host.
        inter_host_bw: Bytes per ms that a rank sends to other hosts.
        bwd_compute_multiplier: Time of an update relative to a lookup.
        custom_topology_data: Memory of each device, if devices differ.
        weighted_feature_bwd_compute_multiplier: Further factor on ``bwd_compute_multiplier`` for
            ids with weights.
        uneven_sharding_perf_multiplier: TorchRec's; stored without effect.
        generalized_comms_bandwidths: Replaces the two bandwidths between ranks.
        latency_ms: Fixed milliseconds of an exchange. Not in TorchRec.
        row_ms: Milliseconds per distinct row of an update, in addition to its bytes; 0 on
            accelerators by default. Not in TorchRec.
        source: Source of the speeds, for reports; by default a preset's. Not in TorchRec.

    Raises:
        PlannerError: A number of ranks, hosts or bytes is invalid, or the device is unknown.

    Example:
        >>> topology = Topology(world_size=4, compute_device="cuda", local_world_size=2)
        >>> topology.num_hosts, topology.devices[3].storage.hbm // 1024**3
        (2, 32)

    Source:
        TorchRec's ``Topology``.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | None = None,
        ddr_cap: int | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float = constants.HBM_MEM_BW,
        ddr_mem_bw: float | None = None,
        ssd_mem_bw: float = constants.SSD_MEM_BW,
        hbm_to_ddr_mem_bw: float = constants.HBM_TO_DDR_MEM_BW,
        intra_host_bw: float | None = None,
        inter_host_bw: float | None = None,
        bwd_compute_multiplier: float | None = None,
        custom_topology_data: CustomTopologyData | None = None,
        weighted_feature_bwd_compute_multiplier: float = constants.WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,  # noqa: E501
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None,
        *,
        latency_ms: float | None = None,
        row_ms: float | None = None,
        source: str | None = None,
    ) -> None:
        self.world_size = require_int("world_size", world_size, 1, MOST_RANKS, error=bad_input)
        self.local_world_size = _ranks_of_a_host(self.world_size, local_world_size, pod_size)
        if compute_device not in DEVICES:
            raise bad_input(
                f"compute_device {compute_device!r} is unknown: use one of {', '.join(DEVICES)}"
            )

        usual = constants.HARDWARE["laptop"] if compute_device == "cpu" else constants.ACCELERATOR
        self.source = source or ("preset laptop" if compute_device == "cpu" else usual.source)
        self.compute_device = compute_device
        self.intra_group_size = (pod_size or 1) * self.local_world_size
        self.hbm_mem_bw = hbm_mem_bw
        self.ddr_mem_bw = _or(ddr_mem_bw, usual.ddr_mem_bw)
        self.ssd_mem_bw = ssd_mem_bw
        self.hbm_to_ddr_mem_bw = hbm_to_ddr_mem_bw
        self.comms_bandwidths: GeneralizedCommsBandwidth = (
            generalized_comms_bandwidths
            or BasicCommsBandwidths(
                inter_host_bw=_or(inter_host_bw, usual.inter_host_bw),
                intra_host_bw=_or(intra_host_bw, usual.intra_host_bw),
            )
        )
        self.bwd_compute_multiplier = _or(bwd_compute_multiplier, usual.bwd_compute_multiplier)
        self.weighted_feature_bwd_compute_multiplier = weighted_feature_bwd_compute_multiplier
        self.uneven_sharding_perf_multiplier = uneven_sharding_perf_multiplier
        self.latency_ms = _or(latency_ms, usual.latency_ms)
        self.row_ms = _or(row_ms, usual.row_ms)
        caps = {
            "hbm_cap": 0 if compute_device == "cpu" else _or(hbm_cap, constants.HBM_CAP),
            "ddr_cap": _or(ddr_cap, constants.DDR_CAP),
            "ssd_cap": _or(ssd_cap, constants.SSD_CAP),
        }
        self.devices = _devices(_storages(self.world_size, caps, custom_topology_data))
        self._check_speeds()

    @classmethod
    def hosts(
        cls, hosts: int, ranks_per_host: int, device: str = "cpu", **arguments: Any
    ) -> Topology:
        """Hosts with equal numbers of ranks.

        Args:
            hosts: Number of hosts.
            ranks_per_host: L.
            device: ``"cpu"`` or ``"cuda"``.
            arguments: Further arguments of the constructor.

        Example:
            >>> Topology.hosts(2, 2).world_size
            4
        """
        return cls(hosts * ranks_per_host, device, local_world_size=ranks_per_host, **arguments)

    @classmethod
    def laptop(cls, world_size: int = 2, hosts: int = 1) -> Topology:
        """Processes on a laptop, one thread each, on simulated hosts.

        Args:
            world_size: W.
            hosts: Number of simulated hosts.

        Raises:
            PlannerError: The hosts do not divide the ranks.

        Example:
            >>> Topology.laptop(2).devices[0].storage.ddr // 1024**3
            8
        """
        if world_size % hosts:
            raise bad_input(f"{world_size} ranks cannot be divided among {hosts} hosts")
        return cls._of("laptop", world_size, world_size // hosts)

    @classmethod
    def measured(
        cls, world_size: int = 2, compute_device: str = "cpu", **arguments: Any
    ) -> Topology:
        """Ranks on this machine, with the speeds measured by ``tutorec calibrate``.

        Without a valid calibration the machine is measured now, which takes some seconds.

        Args:
            world_size: W, all on this host.
            compute_device: ``"cpu"`` or ``"cuda"``.
            arguments: Further arguments of the constructor.

        Raises:
            PlannerError: There is no measurement of this device, or it is called inside ranks
                without any.
        """
        stored = calibration.kept()
        if stored.calibration is None and comm.default_group() is None:
            calibration.measure_in_own_process()
            stored = calibration.kept()

        if stored.calibration is None or compute_device not in stored.calibration.speeds:
            raise bad_input(
                f"there is no measurement of {compute_device} on this machine ({stored.state}): "
                f"run `{calibration.COMMAND}`, outside ranks"
            )

        return cls.calibrated(stored.calibration, world_size, compute_device, **arguments)

    @classmethod
    def calibrated(
        cls,
        measured: calibration.Calibration,
        world_size: int,
        compute_device: str,
        **arguments: Any,
    ) -> Topology:
        """Ranks on one host with given measured speeds; missing speeds are the preset's.

        Args:
            measured: The speeds and the date of the measurement.
            world_size: W, all on this host.
            compute_device: ``"cpu"`` or ``"cuda"``.
            arguments: Further arguments of the constructor.
        """
        source = f"measured on this machine on {measured.date}"
        return cls(
            world_size,
            compute_device,
            source=source,
            **{**measured.speeds[compute_device], **arguments},
        )

    @classmethod
    def preset(cls, name: str) -> Topology:
        """A topology by name: ranks per host, machine, hosts. The defaults are one full host.

        Machines are ``A100-40``, ``A100-80``, ``H100``, ``H200`` and ``laptop``;
        `constants.HARDWARE` has their numbers and sources.

        Args:
            name: For example ``"8xH100x16"``: 16 hosts of 8 H100.

        Raises:
            PlannerError: The machine is unknown, or its hosts have fewer ranks.

        Example:
            >>> big = Topology.preset("8xH100x16")
            >>> big.world_size, big.local_world_size, Topology.preset("H200").world_size
            (128, 8, 8)
        """
        match = _PRESET.fullmatch(name.strip()) if isinstance(name, str) else None
        machines = {machine.lower(): machine for machine in constants.HARDWARE}
        if match is None or match[2].lower() not in machines:
            raise bad_input(
                f"there is no preset {name!r}: write ranks per host, kind and hosts as in "
                f"'8xH100x16'; kinds are {', '.join(constants.HARDWARE)}"
            )

        machine = machines[match[2].lower()]
        most = constants.HARDWARE[machine].ranks_per_host
        ranks = int(match[1]) if match[1] else most
        hosts = int(match[3]) if match[3] else 1
        if ranks > most and machine != "laptop":
            raise bad_input(
                f"preset {name!r} puts {ranks} ranks on a host, and a host of {machine} has "
                f"{most}: write '{most}x{machine}x{-(-ranks * hosts // most)}'"
            )

        return cls._of(machine, hosts * ranks, ranks)

    @classmethod
    def _of(cls, machine_name: str, world_size: int, ranks_per_host: int) -> Topology:
        machine = dict(
            vars(constants.HARDWARE[machine_name]),
            source=f"preset {machine_name}",
            local_world_size=ranks_per_host,
        )
        del machine["ranks_per_host"]
        if machine_name == "laptop" and world_size:  # shared by all ranks
            machine["ddr_cap"] //= world_size

        return cls(world_size, machine.pop("device"), **machine)

    @property
    def num_hosts(self) -> int:
        """Number of hosts, counting a pod as one."""
        return -(-self.world_size // self.intra_group_size)

    @property
    def intra_host_bw(self) -> float:
        """Bytes per ms that a rank sends inside its host."""
        return self.comms_bandwidths.intra_host_bw

    @property
    def inter_host_bw(self) -> float:
        """Bytes per ms that a rank sends to other hosts."""
        return self.comms_bandwidths.inter_host_bw

    def with_storage(self, storage: Sequence[Storage]) -> Topology:
        """The same topology with other memory.

        Args:
            storage: Memory of each rank.

        Raises:
            PlannerError: There is not one storage per rank.
        """
        if len(storage) != self.world_size:
            raise bad_input(
                f"{len(storage)} storages for {self.world_size} ranks: give one per rank"
            )

        changed = copy(self)
        changed.devices = _devices(storage)
        return changed

    def part(self, ranks: Sequence[int], local_world_size: int | None = None) -> Topology:
        """A subset of the ranks as a topology, numbered from 0.

        Args:
            ranks: The ranks, ascending.
            local_world_size: Ranks of the subset per host; by default as on the hosts.

        Raises:
            PlannerError: A rank does not exist.

        Example:
            >>> one_of_two_groups = Topology.hosts(2, 4).part([0, 2, 4, 6])
            >>> one_of_two_groups.world_size, one_of_two_groups.local_world_size
            (4, 2)
        """
        if not ranks or not 0 <= min(ranks) <= max(ranks) < self.world_size:
            raise bad_input(
                f"ranks {list(ranks)} of a topology of {self.world_size}: give ascending ranks "
                "of the topology"
            )

        local_size = local_world_size or ranks_per_host(ranks, self.local_world_size)
        return self.regrouped(
            ranks, local_size, local_world_size or ranks_per_host(ranks, self.intra_group_size)
        )

    def regrouped(
        self, ranks: Sequence[int], local_world_size: int, intra_group_size: int
    ) -> Topology:
        """A topology whose ranks are copies of these, numbered from 0.

        Args:
            ranks: For each new rank, the rank that it copies.
            local_world_size: New ranks per host.
            intra_group_size: New ranks that are connected as inside a host.
        """
        changed = copy(self)
        changed.devices = [
            replace(self.devices[rank], rank=number) for number, rank in enumerate(ranks)
        ]
        changed.world_size = len(ranks)
        changed.local_world_size = local_world_size
        changed.intra_group_size = intra_group_size

        return changed

    def _check_speeds(self) -> None:
        for name in (
            "hbm_mem_bw ddr_mem_bw ssd_mem_bw hbm_to_ddr_mem_bw intra_host_bw inter_host_bw".split()
        ):
            require_finite(name, getattr(self, name), positive=True, error=bad_input)

        times = "latency_ms row_ms bwd_compute_multiplier weighted_feature_bwd_compute_multiplier"
        for name in (*times.split(), "uneven_sharding_perf_multiplier"):
            require_finite(name, getattr(self, name), 0, error=bad_input)

    def __repr__(self) -> str:
        devices = "".join(
            f"\tdevice {index} {device}\n" for index, device in enumerate(self.devices)
        )
        return (
            f"world_size={self.world_size} "
            f"\ncompute_device={self.compute_device}\ndevices=\n{devices}local_world_size={self.local_world_size} "  # noqa: E501
            f"\nintra_group_size={self.intra_group_size} \n"
            f"{self.comms_bandwidths}\n"
        )


def _ranks_of_a_host(world_size: int, local_world_size: int | None, pod_size: int | None) -> int:
    """L; checks that it divides the ranks, and that pods divide the hosts."""
    local_size = require_int(
        "local_world_size", local_world_size or world_size, 1, world_size, error=bad_input
    )
    if world_size % local_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise bad_input(
            f"{world_size} ranks make no hosts of local_world_size={local_size} each: give one "
            f"of {divisors}"
        )

    hosts = world_size // local_size
    if hosts % require_int("pod_size", pod_size or 1, 1, hosts, error=bad_input):
        raise bad_input(
            f"pod_size={pod_size} of {hosts} hosts: give a number of hosts that divides them"
        )

    return local_size


def _storages(
    world_size: int, caps: Mapping[str, int], custom: CustomTopologyData | None
) -> list[Storage]:
    """The memory of each rank."""
    if custom is not None:
        return _custom_storages(world_size, caps, custom)

    for key, cap in caps.items():
        require_finite(key, cap, 0, MOST_BYTES, error=bad_input)
    storage = Storage(*map(int, caps.values()))
    return [replace(storage) for _ in range(world_size)]


def _custom_storages(
    world_size: int, caps: Mapping[str, int], custom: CustomTopologyData
) -> list[Storage]:
    """The memory of each rank if ranks differ."""
    memory = []
    for key, cap in caps.items():
        numbers = custom.get_data(key) if custom.has_data(key) else [cap] * world_size
        if len(numbers) != world_size:
            raise bad_input(
                f"CustomTopologyData has {len(numbers)} numbers of {key} for {world_size} ranks"
            )
        for number in set(numbers):
            require_finite(key, number, 0, MOST_BYTES, error=bad_input)
        memory.append([int(number) for number in numbers])

    return [Storage(*rank_bytes) for rank_bytes in zip(*memory, strict=True)]


def _devices(storages: Sequence[Storage]) -> list[DeviceHardware]:
    """A device for each rank, with nothing placed on it."""
    return [
        DeviceHardware(rank, storage, Perf(0, 0, 0, 0)) for rank, storage in enumerate(storages)
    ]


def device_memory(topology: Any) -> Ints:
    """``[W, 3]``: bytes of each rank, HBM, DDR and SSD; accepts TorchRec's topology, too.

    Example:
        >>> device_memory(Topology(1, "cuda", hbm_cap=8, ddr_cap=4, ssd_cap=2)).tolist()
        [[8, 4, 2]]
    """
    storages = [device.storage for device in topology.devices]
    return np.array(
        [[storage.hbm, storage.ddr, getattr(storage, "ssd", 0)] for storage in storages],
        dtype=np.int64,
    )


def own_memory(topology: Topology) -> int:
    """Index of the memory that ranks compute in: 0 HBM, 1 DDR."""
    return int(topology.compute_device == "cpu")


def _or(value: _T | None, usual: _T) -> _T:
    """The value unless it is None, else the default; 0 is a value."""
    return usual if value is None else value


def this_machine(world_size: int, device: str, local_world_size: int | None) -> Topology:
    """The topology of the running ranks: measured speeds if all are on this host, else a preset.

    It does not measure. An outdated calibration is reported by a warning.

    Args:
        world_size: W.
        device: Device of the ranks' tables.
        local_world_size: Ranks on this host; None if unknown.

    Example:
        >>> this_machine(4, "cpu", 2).source
        'preset laptop'
    """
    usual = Topology(world_size, device, local_world_size=local_world_size)
    if usual.num_hosts > 1:
        return usual

    stored = calibration.kept()
    if stored.calibration is not None and device in stored.calibration.speeds:
        return Topology.calibrated(stored.calibration, world_size, device)

    if stored.problem:
        warn_caller(f"the planner uses the preset's speeds: {stored.state}")

    usual.source = f"{usual.source}; {stored.state}"
    return usual
