"""The machines that a plan is made for: how many ranks, how they share hosts, what each holds and how fast it is.

Nothing here asks a device: a laptop plans for 512 GPUs.

Corresponds to the topology of TorchRec's ``torchrec.distributed.planner.types``.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeVar

import numpy as np

import tutorec._calibration as calibration
from tutorec._check import require_finite, require_int
from tutorec.distributed import comm
from tutorec.distributed.env import ranks_per_host
from tutorec.distributed.planner import constants
from tutorec.distributed.planner.constants import DEVICES
from tutorec.distributed.planner.options import Ints, Perf, Storage
from tutorec.errors import bad_input

_T = TypeVar("_T")
MOST_RANKS = 2**17  # of which a laptop can still tell where each piece lies
MOST_BYTES = 2**50  # bytes are counted in 64 bits, of all ranks together
_reported: set[str] = set()  # states of the calibration that this process has warned of
_PRESET = re.compile(r"(?:(\d+)x)?([a-z][a-z0-9-]*?)(?:x(\d+))?", re.IGNORECASE)


@dataclass(unsafe_hash=True)
class DeviceHardware:
    """A rank's device.

    Args:
        rank: Whose.
        storage: Bytes that tables may take there.
        perf: Milliseconds that have been placed there.
    """

    rank: int
    storage: Storage
    perf: Perf


class CustomTopologyData:
    """Memory of each device, where devices differ.

    Args:
        data: ``"hbm_cap"``, ``"ddr_cap"`` or ``"ssd_cap"`` -> bytes of each rank.
        world_size: W.

    Raises:
        PlannerError: Another word, or not a number for each rank.

    Example:
        >>> Topology(2, "cuda", custom_topology_data=CustomTopologyData({"hbm_cap": [8, 16]}, 2)).devices[1].storage.hbm
        16

    Source:
        TorchRec's ``CustomTopologyData``.
    """

    supported_fields = ("ddr_cap", "hbm_cap", "ssd_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for key, numbers in data.items():
            if key not in self.supported_fields:
                raise bad_input(f"CustomTopologyData knows nothing of {key!r}: give {', '.join(self.supported_fields)}")
            if len(numbers) != world_size:
                raise bad_input(
                    f"CustomTopologyData has {len(numbers)} numbers of {key} for {world_size} ranks: give one for each"
                )
        self._data = {key: list(numbers) for key, numbers in data.items()}

    def get_data(self, key: str) -> list[int]:
        """Bytes of each rank."""
        return self._data[key]

    def has_data(self, key: str) -> bool:
        """Whether it says something of this kind of memory."""
        return key in self._data


class CollectiveType(Enum):
    """How ranks exchange numbers."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"


class GeneralizedCommsBandwidth(ABC):
    """How fast ranks exchange numbers, where that depends on who takes part and in what; for subclasses.

    Source:
        TorchRec's ``GeneralizedCommsBandwidth``.
    """

    @abstractmethod
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Bytes per ms that a rank sends.

        Args:
            local_world_size: Ranks of a host.
            world_size: Ranks that take part.
            collective_type: In what.
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
        >>> BasicCommsBandwidths(inter_host_bw=1.0, intra_host_bw=9.0).get_bw(2, 4, CollectiveType.ALL_TO_ALL)
        1.0

    Source:
        TorchRec's ``BasicCommsBandwidths``.
    """

    inter_host_bw: float = constants.CROSS_NODE_BANDWIDTH  # type: ignore[misc]
    intra_host_bw: float = constants.INTRA_NODE_BANDWIDTH  # type: ignore[misc]

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """That between hosts where ranks of several take part; of an all-reduce each rank of a host brings its own."""
        if collective_type is CollectiveType.ALL_REDUCE:
            return self.inter_host_bw * local_world_size
        return self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw

    def __str__(self) -> str:
        return f"BasicCommsBandwidths: inter_host_bw={self.inter_host_bw}, intra_host_bw={self.intra_host_bw}"


class Topology:
    """The ranks, their hosts and their memory, as the planner sees them.

    Bandwidths that are not given are TorchRec's on an accelerator (an H100 is three times as fast: see `preset`), and
    on the CPU those of a laptop.

    Args:
        world_size: W, ranks.
        compute_device: ``"cpu"``, ``"cuda"`` or ``"mtia"``.
        hbm_cap: Bytes of a device's memory; 32 GiB by default, and none on the CPU.
        ddr_cap: Bytes of host memory for each rank; 128 GiB by default.
        ssd_cap: Bytes of disk for each rank; 2 TiB by default.
        local_world_size: Ranks per host; by default all are on one.
        pod_size: Hosts that are connected as fast as the ranks of one.
        hbm_mem_bw: Bytes per ms of a device's memory.
        ddr_mem_bw: Bytes per ms of host memory, a rank's share.
        ssd_mem_bw: Bytes per ms of a disk.
        hbm_to_ddr_mem_bw: Bytes per ms between a device and its host.
        intra_host_bw: Bytes per ms that a rank sends inside its host.
        inter_host_bw: Bytes per ms that a rank sends to other hosts.
        bwd_compute_multiplier: Time of an update for the time of a lookup.
        custom_topology_data: Memory of each device, where devices differ.
        weighted_feature_bwd_compute_multiplier: The same of ids with weights, times this.
        uneven_sharding_perf_multiplier: TorchRec's, carried along.
        generalized_comms_bandwidths: In the place of the two bandwidths between ranks.
        latency_ms: Milliseconds that an exchange takes however little is sent. tutorec's own.
        row_ms: Milliseconds that each distinct row takes in an update, beyond the bytes that are moved. None on
            accelerators by default. tutorec's own.
        source: Where the speeds come from, for reports; those that are not given are a preset's. tutorec's own.

    Raises:
        PlannerError: A number of ranks, hosts or bytes that cannot be, or an unknown device.

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
        weighted_feature_bwd_compute_multiplier: float = constants.WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None,
        *,
        latency_ms: float | None = None,
        row_ms: float | None = None,
        source: str | None = None,
    ) -> None:
        self.world_size: int = require_int("world_size", world_size, 1, MOST_RANKS, error=bad_input)
        self.local_world_size: int = _ranks_of_a_host(self.world_size, local_world_size, pod_size)
        if compute_device not in DEVICES:
            raise bad_input(f"compute_device {compute_device!r} is unknown: use one of {', '.join(DEVICES)}")
        usual = constants.HARDWARE["laptop"] if compute_device == "cpu" else constants.ACCELERATOR
        self.source: str = source or ("preset laptop" if compute_device == "cpu" else usual.source)
        self.compute_device: str = compute_device
        self.intra_group_size: int = (pod_size or 1) * self.local_world_size
        self.hbm_mem_bw: float = hbm_mem_bw
        self.ddr_mem_bw: float = _or(ddr_mem_bw, usual.ddr_mem_bw)
        self.ssd_mem_bw: float = ssd_mem_bw
        self.hbm_to_ddr_mem_bw: float = hbm_to_ddr_mem_bw
        self.comms_bandwidths: GeneralizedCommsBandwidth = generalized_comms_bandwidths or BasicCommsBandwidths(
            inter_host_bw=_or(inter_host_bw, usual.inter_host_bw), intra_host_bw=_or(intra_host_bw, usual.intra_host_bw)
        )
        self.bwd_compute_multiplier: float = _or(bwd_compute_multiplier, usual.bwd_compute_multiplier)
        self.weighted_feature_bwd_compute_multiplier: float = weighted_feature_bwd_compute_multiplier
        self.uneven_sharding_perf_multiplier: float = uneven_sharding_perf_multiplier
        self.latency_ms: float = _or(latency_ms, usual.latency_ms)
        self.row_ms: float = _or(row_ms, usual.row_ms)
        caps = {
            "hbm_cap": 0 if compute_device == "cpu" else _or(hbm_cap, constants.HBM_CAP),
            "ddr_cap": _or(ddr_cap, constants.DDR_CAP),
            "ssd_cap": _or(ssd_cap, constants.SSD_CAP),
        }
        self.devices: list[DeviceHardware] = _devices(self.world_size, caps, custom_topology_data)
        self._check_speeds()

    @classmethod
    def hosts(cls, hosts: int, ranks_per_host: int, device: str = "cpu", **words: Any) -> Topology:
        """Hosts of equally many ranks.

        Args:
            hosts: How many.
            ranks_per_host: L.
            device: ``"cpu"`` or ``"cuda"``.
            words: The constructor's other arguments.

        Example:
            >>> Topology.hosts(2, 2).world_size
            4
        """
        return cls(hosts * ranks_per_host, device, local_world_size=ranks_per_host, **words)

    @classmethod
    def laptop(cls, world_size: int = 2, hosts: int = 1) -> Topology:
        """Processes that share a laptop, one thread each, on simulated hosts.

        Args:
            world_size: W.
            hosts: Hosts that are simulated.

        Raises:
            PlannerError: The ranks do not share the hosts evenly.

        Example:
            >>> Topology.laptop(2).devices[0].storage.ddr // 1024**3
            8
        """
        if world_size % hosts:
            raise bad_input(f"{world_size} ranks do not share {hosts} hosts evenly")
        return cls._of("laptop", world_size, world_size // hosts)

    @classmethod
    def measured(cls, world_size: int = 2, compute_device: str = "cpu", **words: Any) -> Topology:
        """Ranks of the machine that this process runs on, as fast as ``tutorec calibrate`` has measured.

        Where nothing is kept that fits the machine it is measured now, which takes some seconds.

        Args:
            world_size: W, all on this host.
            compute_device: ``"cpu"`` or ``"cuda"``.
            words: The constructor's other arguments.

        Raises:
            PlannerError: Nothing is measured of this device, or nothing at all, inside of ranks.
        """
        kept = calibration.kept()
        if kept.calibration is None and comm.default_group() is None:
            calibration.measure_in_own_process()
            kept = calibration.kept()
        if kept.calibration is None or compute_device not in kept.calibration.speeds:
            raise bad_input(
                f"nothing is measured of {compute_device} on this machine ({kept.state}): run "
                f"`{calibration.COMMAND}`, outside of ranks"
            )
        return cls.calibrated(kept.calibration, world_size, compute_device, **words)

    @classmethod
    def calibrated(
        cls, measured: calibration.Calibration, world_size: int, compute_device: str, **words: Any
    ) -> Topology:
        """Ranks of one host with speeds that were measured; what was not measured is the preset's.

        Args:
            measured: The speeds, and the day when they were measured.
            world_size: W, all on this host.
            compute_device: ``"cpu"`` or ``"cuda"``.
            words: The constructor's other arguments.
        """
        source = f"measured on this machine on {measured.date}"
        return cls(world_size, compute_device, source=source, **{**measured.speeds[compute_device], **words})

    @classmethod
    def preset(cls, name: str) -> Topology:
        """Machines by name: ranks per host, kind, hosts. What is left out is a whole host, and one of them.

        Kinds are ``A100-40``, ``A100-80``, ``H100``, ``H200`` and ``laptop``; `constants.HARDWARE` tells their numbers
        and where they come from.

        Args:
            name: For example ``"8xH100x16"``: 16 hosts of 8 H100.

        Raises:
            PlannerError: There is no such kind, or no host of it has so many ranks.

        Example:
            >>> big = Topology.preset("8xH100x16")
            >>> big.world_size, big.local_world_size, Topology.preset("H200").world_size
            (128, 8, 8)
        """
        found = _PRESET.fullmatch(name.strip()) if isinstance(name, str) else None
        kinds = {kind.lower(): kind for kind in constants.HARDWARE}
        if found is None or found[2].lower() not in kinds:
            raise bad_input(
                f"there is no preset {name!r}: write ranks per host, kind and hosts as in '8xH100x16'; kinds are "
                f"{', '.join(constants.HARDWARE)}"
            )
        kind = kinds[found[2].lower()]
        most = constants.HARDWARE[kind].ranks_per_host
        ranks = int(found[1]) if found[1] else most
        hosts = int(found[3]) if found[3] else 1
        if ranks > most and kind != "laptop":
            raise bad_input(
                f"preset {name!r} puts {ranks} ranks on a host, and a host of {kind} has {most}: "
                f"write '{most}x{kind}x{-(-ranks * hosts // most)}'"
            )
        return cls._of(kind, hosts * ranks, ranks)

    @classmethod
    def _of(cls, kind: str, world_size: int, ranks_per_host: int) -> Topology:
        machine = dict(vars(constants.HARDWARE[kind]), source=f"preset {kind}", local_world_size=ranks_per_host)
        del machine["ranks_per_host"]
        if kind == "laptop" and world_size:  # all ranks share it
            machine["ddr_cap"] //= world_size
        return cls(world_size, machine.pop("device"), **machine)

    @property
    def num_hosts(self) -> int:
        """Groups of ranks that are connected as inside a host."""
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
        """The same machines with other memory.

        Args:
            storage: Of each rank.

        Raises:
            PlannerError: There is not one for each rank.
        """
        if len(storage) != self.world_size:
            raise bad_input(f"{len(storage)} storages for {self.world_size} ranks: give one for each")
        changed = copy(self)
        changed.devices = [DeviceHardware(rank, each, Perf(0, 0, 0, 0)) for rank, each in enumerate(storage)]
        return changed

    def part(self, ranks: Sequence[int], local_world_size: int | None = None) -> Topology:
        """Some of the ranks, as a group that shards tables among them; numbered from 0.

        Args:
            ranks: Which, ascending.
            local_world_size: How many of them share a host; by default as the hosts are.

        Raises:
            PlannerError: There is no such rank.

        Example:
            >>> one_of_two_groups = Topology.hosts(2, 4).part([0, 2, 4, 6])
            >>> one_of_two_groups.world_size, one_of_two_groups.local_world_size
            (4, 2)
        """
        if not ranks or not 0 <= min(ranks) <= max(ranks) < self.world_size:
            raise bad_input(
                f"ranks {list(ranks)} of a topology of {self.world_size}: give some of its ranks, from 0 on"
            )
        local_size = local_world_size or ranks_per_host(ranks, self.local_world_size)
        return self.regrouped(ranks, local_size, local_world_size or ranks_per_host(ranks, self.intra_group_size))

    def regrouped(self, ranks: Sequence[int], local_world_size: int, intra_group_size: int) -> Topology:
        """Machines of which each rank is like one of these; numbered from 0.

        Args:
            ranks: For each new rank, the one that it is like.
            local_world_size: New ranks of a host.
            intra_group_size: New ranks that are connected as inside a host.
        """
        changed = copy(self)
        changed.devices = [replace(self.devices[rank], rank=number) for number, rank in enumerate(ranks)]
        changed.world_size, changed.local_world_size = len(ranks), local_world_size
        changed.intra_group_size = intra_group_size
        return changed

    def _check_speeds(self) -> None:
        for name in "hbm_mem_bw ddr_mem_bw ssd_mem_bw hbm_to_ddr_mem_bw intra_host_bw inter_host_bw".split():
            require_finite(name, getattr(self, name), positive=True, error=bad_input)
        times = "latency_ms row_ms bwd_compute_multiplier weighted_feature_bwd_compute_multiplier"
        for name in (*times.split(), "uneven_sharding_perf_multiplier"):
            require_finite(name, getattr(self, name), 0, error=bad_input)

    def __repr__(self) -> str:
        devices = "".join(f"\tdevice {index} {device}\n" for index, device in enumerate(self.devices))
        return (
            f"world_size={self.world_size} \ncompute_device={self.compute_device}\ndevices=\n{devices}"
            f"local_world_size={self.local_world_size} \nintra_group_size={self.intra_group_size} \n"
            f"{self.comms_bandwidths}\n"
        )


def _ranks_of_a_host(world_size: int, local_world_size: int | None, pod_size: int | None) -> int:
    """L, once it divides the ranks, and the pods divide the hosts."""
    local_size = require_int("local_world_size", local_world_size or world_size, 1, world_size, error=bad_input)
    if world_size % local_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise bad_input(
            f"{world_size} ranks make no hosts of local_world_size={local_size} each: give one of {divisors}"
        )
    hosts = world_size // local_size
    if hosts % require_int("pod_size", pod_size or 1, 1, hosts, error=bad_input):
        raise bad_input(f"pod_size={pod_size} of {hosts} hosts: give a number of hosts that divides them")
    return local_size


def _devices(world_size: int, caps: Mapping[str, int], custom: CustomTopologyData | None) -> list[DeviceHardware]:
    """A device for each rank."""
    memory = []
    for key, cap in caps.items():
        of_ranks = custom.get_data(key) if custom is not None and custom.has_data(key) else [cap] * world_size
        if len(of_ranks) != world_size:
            raise bad_input(f"CustomTopologyData has {len(of_ranks)} numbers of {key} for {world_size} ranks")
        for number in set(of_ranks):
            require_finite(key, number, 0, MOST_BYTES, error=bad_input)
        memory.append([int(number) for number in of_ranks])
    storages = (Storage(*of_rank) for of_rank in zip(*memory, strict=True))
    return [DeviceHardware(rank, storage, Perf(0, 0, 0, 0)) for rank, storage in enumerate(storages)]


def memory_of(topology: Any) -> Ints:
    """``[W, 3]``: bytes of each rank, HBM, DDR and SSD; of tutorec's topology or TorchRec's.

    Example:
        >>> memory_of(Topology(1, "cuda", hbm_cap=8, ddr_cap=4, ssd_cap=2)).tolist()
        [[8, 4, 2]]
    """
    storages = [device.storage for device in topology.devices]
    return np.array([[each.hbm, each.ddr, getattr(each, "ssd", 0)] for each in storages], dtype=np.int64)


def own_memory(topology: Topology) -> int:
    """The number of the memory that ranks compute in: 0 HBM, 1 DDR."""
    return int(topology.compute_device == "cpu")


def _or(given: _T | None, usual: _T) -> _T:
    """What is given; a zero is, too."""
    return usual if given is None else given


def this_machine(world_size: int, device: str, local_world_size: int | None) -> Topology:
    """For the ranks that run now: measured speeds where all are on this host and it is calibrated, else the preset's.

    Nothing is measured here. What was measured and no longer fits is a warning, once.

    Args:
        world_size: W.
        device: Of the ranks' tables.
        local_world_size: Ranks of this host; None where that is not known.

    Example:
        >>> this_machine(4, "cpu", 2).source
        'preset laptop'
    """
    usual = Topology(world_size, device, local_world_size=local_world_size)
    if usual.num_hosts > 1:
        return usual
    kept = calibration.kept()
    if kept.calibration is not None and device in kept.calibration.speeds:
        return Topology.calibrated(kept.calibration, world_size, device)
    if kept.problem and kept.state not in _reported:
        _reported.add(kept.state)
        warnings.warn(f"the planner uses the preset's speeds: {kept.state}", UserWarning, stacklevel=2)
    usual.source = f"{usual.source}; {kept.state}"
    return usual
