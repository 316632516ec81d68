"""The topology of ranks on the machine that this process runs on: with measured speeds where there are any."""

from __future__ import annotations

import warnings

import tutorec._calibration as calibration
from tutorec.distributed.planner.topology import Topology

_reported: set[str] = set()  # once in a process


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
