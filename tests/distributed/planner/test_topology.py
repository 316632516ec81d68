"""Machines: TorchRec's numbers by default, presets by name, hosts that cannot be refused with what
can.
"""

from __future__ import annotations

import copy

import pytest

from tutorec.distributed.planner.constants import HARDWARE
from tutorec.distributed.planner.topology import (
    BasicCommsBandwidths,
    CollectiveType,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
    Storage,
    Topology,
)
from tutorec.errors import PlannerError, PlannerErrorType

GIB = 1024**3


def test_defaults_on_an_accelerator_are_those_of_torchrec():
    topology = Topology(world_size=2, compute_device="cuda")
    assert [device.storage for device in topology.devices] == [
        Storage(32 * GIB, 128 * GIB, 2048 * GIB)
    ] * 2
    assert topology.hbm_mem_bw == 897 * GIB / 1000
    assert (topology.intra_host_bw, topology.inter_host_bw) == (600 * GIB / 1000, 12.5 * GIB / 1000)
    assert (topology.local_world_size, topology.intra_group_size, topology.num_hosts) == (2, 2, 1)


def test_topology_prints_as_torchrec_does():
    perf = (
        "Perf(fwd_compute=0, fwd_comms=0, bwd_compute=0, bwd_comms=0, input_dist_comms=0.0, "
        "prefetch_compute=0.0)"
    )
    assert repr(Topology(1, "cuda")) == (
        "world_size=1 \ncompute_device=cuda\ndevices=\n\tdevice 0 DeviceHardware(rank=0, "
        f"storage=Storage(hbm=34359738368, ddr=137438953472, ssd=2199023255552), perf={perf})\n"
        "local_world_size=1 \nintra_group_size=1 \n"
        "BasicCommsBandwidths: inter_host_bw=13421772.8, intra_host_bw=644245094.4\n"
    )


def test_cpu_has_no_device_memory_and_the_speeds_of_a_laptop():
    topology = Topology(2, "cpu", hbm_cap=GIB)
    assert topology.devices[0].storage.hbm == 0
    laptop = HARDWARE["laptop"]
    assert (topology.ddr_mem_bw, topology.intra_host_bw) == (
        laptop.ddr_mem_bw,
        laptop.intra_host_bw,
    )
    assert Topology(2, "cpu", ddr_mem_bw=7.0, latency_ms=0.0).ddr_mem_bw == 7.0
    assert Topology(2, "cpu", latency_ms=0.0).latency_ms == 0.0


def test_memory_of_each_device_may_differ():
    data = CustomTopologyData({"hbm_cap": [GIB, 2 * GIB], "ddr_cap": [3, 4]}, world_size=2)
    storage = [device.storage for device in Topology(2, "cuda", custom_topology_data=data).devices]
    assert [(each.hbm, each.ddr) for each in storage] == [(GIB, 3), (2 * GIB, 4)]


def test_pods_join_hosts():
    topology = Topology(16, "cuda", local_world_size=4, pod_size=2)
    assert (topology.intra_group_size, topology.num_hosts) == (8, 2)


def test_bandwidths_of_ones_own_take_the_place_of_the_two():
    class Slow(GeneralizedCommsBandwidth):
        @property
        def intra_host_bw(self) -> float:
            return 5.0

        @property
        def inter_host_bw(self) -> float:
            return 3.0

        def get_bw(
            self, local_world_size: int, world_size: int, collective_type: CollectiveType
        ) -> float:
            return 2.0

    topology = Topology(2, "cuda", generalized_comms_bandwidths=Slow(), intra_host_bw=9.0)
    assert (topology.intra_host_bw, topology.inter_host_bw) == (5.0, 3.0)
    basic = BasicCommsBandwidths(inter_host_bw=1.0, intra_host_bw=9.0)
    assert basic.get_bw(4, 4, CollectiveType.REDUCE_SCATTER) == 9.0
    assert basic.get_bw(4, 8, CollectiveType.ALL_REDUCE) == 4.0


def test_hosts_are_made_of_equally_many_ranks():
    topology = Topology.hosts(2, 4, device="cuda", hbm_cap=7)
    assert (topology.world_size, topology.local_world_size, topology.num_hosts) == (8, 4, 2)
    assert topology.devices[7].storage.hbm == 7


@pytest.mark.parametrize(
    ("name", "world_size", "per_host", "memory"),
    [
        ("8xH100x16", 128, 8, 80 * 10**9),
        ("8xA100-80", 8, 8, 80 * 10**9),
        ("a100-40", 8, 8, 40 * 10**9),
        ("4xh200X2", 8, 4, 141 * 10**9),
        ("4xlaptop", 4, 4, 0),
        ("2xlaptopx2", 4, 2, 0),
        ("laptop", 2, 2, 0),
    ],
)
def test_presets_say_ranks_kind_and_hosts(name, world_size, per_host, memory):
    topology = Topology.preset(name)
    assert (topology.world_size, topology.local_world_size) == (world_size, per_host)
    assert topology.devices[0].storage.hbm == memory


def test_presets_carry_the_numbers_of_their_source():
    topology = Topology.preset("8xH100")
    assert topology.hbm_mem_bw == 3.35e9  # 3.35 TB/s in bytes per ms
    assert topology.inter_host_bw == 50e6  # 400 Gb/s
    assert all("data sheet" in each.source or each.device == "cpu" for each in HARDWARE.values())


def test_ranks_of_a_laptop_share_its_memory():
    assert Topology.laptop(4, hosts=2).devices[0].storage.ddr == 4 * GIB
    assert Topology.preset("2xlaptopx2").devices[0].storage.ddr == 4 * GIB


def test_other_memory_leaves_the_topology_as_it_was():
    whole = Topology(2, "cuda")
    less = whole.with_storage([Storage(1, 2), Storage(3, 4)])
    assert [device.storage.hbm for device in less.devices] == [1, 3]
    assert whole.devices[0].storage.hbm == 32 * GIB
    assert less.hbm_mem_bw == whole.hbm_mem_bw
    assert copy.deepcopy(whole).devices == whole.devices


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Topology(0, "cuda"), "world_size=0 must be a whole number, 1 to"),
        (lambda: Topology(2.5, "cuda"), "world_size=2.5"),  # type: ignore[arg-type]
        (lambda: Topology(2, "tpu"), "'tpu' is unknown: use one of cpu, cuda, mtia"),
        (
            lambda: Topology(6, "cuda", local_world_size=4),
            r"6 ranks .*local_world_size=4 .*\[1, 2, 3, 6\]",
        ),
        (
            lambda: Topology(2, "cuda", local_world_size=4),
            "local_world_size=4 must be a whole number, 1 to 2",
        ),
        (lambda: Topology(4, "cuda", local_world_size=-2), "local_world_size=-2 must"),
        (
            lambda: Topology(4, "cuda", local_world_size=2, pod_size=3),
            "pod_size=3 must be a whole number, 1 to 2",
        ),
        (lambda: Topology(2, "cuda", hbm_cap=-1), "hbm_cap=-1 must be a finite number, 0 to"),
        (lambda: Topology(2, "cuda", ddr_cap=-5), "ddr_cap=-5 must be"),
        (
            lambda: Topology(2, "cuda", hbm_mem_bw=0),
            "hbm_mem_bw=0 must be a positive finite number",
        ),
        (lambda: Topology(2, "cuda", inter_host_bw=float("inf")), "inter_host_bw=inf"),
        (lambda: Topology(2, "cuda", latency_ms=-1.0), "latency_ms=-1.0"),
        (lambda: Topology.hosts(0, 2), "world_size=0 must"),
        (lambda: Topology.laptop(3, hosts=2), "3 ranks cannot be divided among 2 hosts"),
        (lambda: Topology.preset("8xB300"), "'8xB300'.*A100-40, A100-80, H100, H200, laptop"),
        (lambda: Topology.preset("H100x0"), "world_size=0 must"),
        (lambda: Topology.preset("16xH100"), "a host of H100 has 8: write '8xH100x2'"),
        (lambda: Topology.preset(""), "there is no preset ''"),
        (lambda: Topology(2, "cuda").with_storage([Storage(1, 1)]), "1 storages for 2 ranks"),
        (lambda: CustomTopologyData({"hbm": [1]}, 1), "does not support 'hbm': give ddr_cap"),
        (lambda: CustomTopologyData({"hbm_cap": [1]}, 2), "1 numbers of hbm_cap for 2 ranks"),
    ],
)
def test_machines_that_cannot_be_are_refused_with_what_can(make, words):
    with pytest.raises(PlannerError, match=words) as caught:
        make()
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION


def test_the_preset_that_is_proposed_exists():
    assert Topology.preset("8xH100x2").world_size == 16


def test_speed_of_zero_is_refused_where_it_is_said_by_hand():
    with pytest.raises(PlannerError, match=r"ddr_mem_bw=0\.0"):
        Topology(2, "cpu", ddr_mem_bw=0.0)
