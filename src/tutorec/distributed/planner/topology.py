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
from dataclasses import dataclass
from enum import Enum
from numbers import Integral
from typing import Any, TypeVar

import tutorec._calibration as calibration
from tutorec.distributed import comm
from tutorec.distributed.env import ranks_per_host
from tutorec.distributed.planner import constants
from tutorec.distributed.planner.constants import DEVICES
from tutorec.distributed.planner.input_checks import bad_input, finite, whole
from tutorec.distributed.planner.options import Perf, Storage

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
        """Bytes of each rank.

        Raises:
            PlannerError: It says nothing of this kind of memory.
        """
        if key not in self._data:
            raise bad_input(f"CustomTopologyData holds {list(self._data)} and no {key!r}: ask has_data({key!r}) first")
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
        id_ms: Milliseconds that an id takes in an update, beyond the bytes that are moved: repeated ids have to be
            found. None on accelerators by default. tutorec's own.
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
        id_ms: float | None = None,
        source: str | None = None,
    ) -> None:
        _check_ranks(world_size, local_world_size, pod_size)
        if compute_device not in DEVICES:
            raise bad_input(f"compute_device {compute_device!r} is unknown: use one of {', '.join(DEVICES)}")
        usual = constants.HARDWARE["laptop"] if compute_device == "cpu" else constants.ACCELERATOR
        self.source: str = source or ("preset laptop" if compute_device == "cpu" else usual.source)
        self.compute_device: str = compute_device
        self.world_size: int = int(world_size)
        self.local_world_size: int = int(local_world_size or world_size)
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
        self.id_ms: float = _or(id_ms, usual.id_ms)
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

        Raises:
            PlannerError: No hosts, or no ranks on them.

        Example:
            >>> Topology.hosts(2, 2).world_size
            4
        """
        hosts = whole("hosts", hosts, 1, "give at least one, as Topology.hosts(2, 2)")
        ranks_per_host = whole("ranks_per_host", ranks_per_host, 1, "give at least one, as Topology.hosts(2, 2)")
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
        world_size = whole("world_size", world_size, 1, "give the number of ranks, as Topology.laptop(2)")
        hosts = whole("hosts", hosts, 1, "give at least one")
        if world_size % hosts:
            raise bad_input(
                f"{world_size} ranks do not share {hosts} hosts evenly: give a number of hosts that divides them"
            )
        return cls._of("laptop", hosts, world_size // hosts)

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
        if ranks < 1 or hosts < 1:
            raise bad_input(
                f"preset {name!r} has {hosts} hosts of {ranks} ranks: write at least one of each, as '8xH100x16'"
            )
        if ranks > most and kind != "laptop":
            raise bad_input(
                f"preset {name!r} puts {ranks} ranks on a host, and a host of {kind} has {most}: "
                f"write '{most}x{kind}x{-(-ranks * hosts // most)}'"
            )
        return cls._of(kind, hosts, ranks)

    @classmethod
    def _of(cls, kind: str, hosts: int, ranks: int) -> Topology:
        own = constants.HARDWARE[kind]
        on_laptop = kind == "laptop"
        return cls.hosts(
            hosts,
            ranks,
            own.device,
            hbm_cap=own.hbm_cap,
            ddr_cap=own.ddr_cap // (hosts * ranks) if on_laptop else own.ddr_cap,
            hbm_mem_bw=own.hbm_mem_bw,
            ddr_mem_bw=own.ddr_mem_bw,
            hbm_to_ddr_mem_bw=own.hbm_to_ddr_mem_bw,
            intra_host_bw=own.intra_host_bw,
            inter_host_bw=own.inter_host_bw,
            bwd_compute_multiplier=own.bwd_compute_multiplier,
            latency_ms=own.latency_ms,
            id_ms=own.id_ms,
            source=f"preset {kind}",
        )

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
        changed.devices = [
            DeviceHardware(device.rank, own, copy(device.perf))
            for device, own in zip(self.devices, storage, strict=True)
        ]
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
        changed = copy(self)
        changed.world_size = len(ranks)
        changed.local_world_size = local_world_size or ranks_per_host(ranks, self.local_world_size)
        changed.intra_group_size = local_world_size or ranks_per_host(ranks, self.intra_group_size)
        changed.devices = [
            DeviceHardware(number, self.devices[rank].storage, copy(self.devices[rank].perf))
            for number, rank in enumerate(ranks)
        ]
        return changed

    def _check_speeds(self) -> None:
        names = "hbm_mem_bw ddr_mem_bw ssd_mem_bw hbm_to_ddr_mem_bw intra_host_bw inter_host_bw".split()
        for name in names:
            finite(name, getattr(self, name), "give bytes per ms, or leave it out", positive=True)
        times = "latency_ms id_ms bwd_compute_multiplier weighted_feature_bwd_compute_multiplier"
        for name in (*times.split(), "uneven_sharding_perf_multiplier"):
            finite(name, getattr(self, name), "give one, or leave it out")

    def __repr__(self) -> str:
        devices = "".join(f"\tdevice {index} {device}\n" for index, device in enumerate(self.devices))
        return (
            f"world_size={self.world_size} \ncompute_device={self.compute_device}\ndevices=\n{devices}"
            f"local_world_size={self.local_world_size} \nintra_group_size={self.intra_group_size} \n"
            f"{self.comms_bandwidths}\n"
        )


def _check_ranks(world_size: int, local_world_size: int | None, pod_size: int | None) -> None:
    whole("world_size", world_size, 1, "give the number of ranks")
    if world_size > MOST_RANKS:
        raise bad_input(f"world_size={world_size:,} is more than the {MOST_RANKS:,} ranks that can be planned for")
    if local_world_size is None:
        local_world_size = world_size
    if not isinstance(local_world_size, Integral) or local_world_size < 0 or local_world_size > world_size:
        raise bad_input(f"local_world_size={local_world_size!r} of {world_size} ranks: give from 1 to {world_size}")
    if local_world_size and world_size % local_world_size:
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise bad_input(
            f"{world_size} ranks make no hosts of local_world_size={local_world_size} each: give one of {divisors}"
        )
    hosts = world_size // (local_world_size or world_size)
    if pod_size is not None and (not isinstance(pod_size, Integral) or pod_size < 1 or hosts % pod_size):
        raise bad_input(f"pod_size={pod_size!r} of {hosts} hosts: give a number of hosts that divides them")


def _devices(world_size: int, caps: Mapping[str, int], custom: CustomTopologyData | None) -> list[DeviceHardware]:
    """A device for each rank."""
    numbers: dict[str, Sequence[int]] = {}
    for key, cap in caps.items():
        given = custom.get_data(key) if custom is not None and custom.has_data(key) else None
        if given is not None and len(given) != world_size:
            raise bad_input(
                f"CustomTopologyData has {len(given)} numbers of {key}, and the topology {world_size} ranks: give one "
                "for each"
            )
        for rank, number in enumerate([cap] if given is None else given):
            of_rank = "" if given is None else f" of rank {rank}"
            finite(f"{key}{of_rank}", number, "give bytes, as 80 * 1024**3", most=MOST_BYTES)
        numbers[key] = [cap] * world_size if given is None else given
    return [
        DeviceHardware(rank, Storage(int(hbm), int(ddr), int(ssd)), Perf(0, 0, 0, 0))
        for rank, (hbm, ddr, ssd) in enumerate(zip(*numbers.values(), strict=True))
    ]


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


def speeds_text(topology: Topology) -> str:
    """The speeds of one rank, in a line."""

    def gib(bandwidth: float) -> str:
        return f"{bandwidth * 1000 / 1024**3:.2f} GiB/s"

    memory = topology.ddr_mem_bw if topology.compute_device == "cpu" else topology.hbm_mem_bw
    copied = "" if topology.compute_device == "cpu" else f", from the host {gib(topology.hbm_to_ddr_mem_bw)}"
    return (
        f"rows of a lookup {gib(memory)}; an update {topology.bwd_compute_multiplier:.2f} times that and "
        f"{topology.id_ms * 1e6:.0f} ns an id; sent {gib(topology.intra_host_bw)}, {topology.latency_ms:.3f} ms an "
        f"exchange{copied}"
    )
