"""What keeps and updates the rows of a shard, as far as time and memory are concerned: a model for each kernel.

A kernel that is added to the library registers its model here, and the planner takes it into account:

    register_kernel("dense", KernelModel(row_bandwidth=lambda topology: topology.ddr_mem_bw / 2, updates=False))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from tutorec.distributed.plan import EmbeddingComputeKernel
from tutorec.distributed.planner.constants import DENSE_BANDWIDTH
from tutorec.distributed.planner.options import Ints
from tutorec.distributed.planner.topology import Topology
from tutorec.errors import PlannerError, PlannerErrorType


def device_bandwidth(topology: Topology) -> float:
    """Bytes per ms of the memory that a rank computes in.

    Example:
        >>> device_bandwidth(Topology(1, "cuda", hbm_mem_bw=5.0)), device_bandwidth(Topology(1, "cpu", ddr_mem_bw=3.0))
        (5.0, 3.0)
    """
    return topology.ddr_mem_bw if topology.compute_device == "cpu" else topology.hbm_mem_bw


def on_device(topology: Topology, stored: Ints) -> Ints:
    """Rows that lie in the memory of the device: bytes ``[P]`` -> ``[P, 3]``, HBM, DDR and SSD.

    Example:
        >>> on_device(Topology(1, "cpu"), np.array([7])).tolist()
        [[0, 7, 0]]
    """
    memory = np.zeros((len(stored), 3), dtype=np.int64)
    memory[:, 1 if topology.compute_device == "cpu" else 0] = stored
    return memory


def in_slower_memory(topology: Topology, stored: Ints) -> Ints:
    """Rows in the next slower memory: bytes ``[P]`` -> ``[P, 3]``, on the CPU SSD, else DDR.

    Example:
        >>> in_slower_memory(Topology(1, "cpu"), np.array([7])).tolist()
        [[0, 0, 7]]
    """
    memory = np.zeros((len(stored), 3), dtype=np.int64)
    memory[:, 2 if topology.compute_device == "cpu" else 1] = stored
    return memory


def slower_bandwidth(topology: Topology) -> float:
    """Bytes per ms at which rows come from the next slower memory, and go back.

    Example:
        >>> slower_bandwidth(Topology(1, "cpu", ssd_mem_bw=2.0))
        2.0
    """
    return topology.ssd_mem_bw if topology.compute_device == "cpu" else topology.hbm_to_ddr_mem_bw


@dataclass(frozen=True)
class KernelModel:
    """What the planner knows of a kernel.

    Args:
        row_bandwidth: Bytes per ms at which rows are looked up and updated on a topology.
        updates: Whether backward updates the rows, and keeps the state that this takes; else it leaves a gradient as
            large as the shard.
        memory: Where rows and state lie: ``(topology, bytes [P]) -> [P, 3]``, HBM, DDR and SSD.
        devices: Where it runs.
        serves: Whether rows are looked up only, for one process that drives all devices: nothing is updated, and ids
            and rows travel between that process and its devices.

    Example:
        >>> registered_kernels()["fused"].updates, registered_kernels()["dense"].updates
        (True, False)
    """

    row_bandwidth: Callable[[Topology], float] = device_bandwidth
    updates: bool = True
    memory: Callable[[Topology, Ints], Ints] = on_device
    devices: tuple[str, ...] = ("cpu", "cuda", "mtia")
    serves: bool = False


_kernels: dict[str, KernelModel] = {}


def register_kernel(value: str, model: KernelModel) -> None:
    """Let the planner consider a kernel, or estimate it in another way.

    Args:
        value: The `EmbeddingComputeKernel` value.
        model: What it costs.

    Raises:
        PlannerError: There is no kernel of that name.
    """
    try:
        member = EmbeddingComputeKernel(value)
    except ValueError:
        names = ", ".join(kernel.value for kernel in EmbeddingComputeKernel)
        raise PlannerError(
            f"compute kernel {value!r} is unknown: register one of {names}", PlannerErrorType.INVALID_COMPUTE_KERNEL
        ) from None
    _kernels[member.value] = model


def registered_kernels(device: str | None = None) -> Mapping[str, KernelModel]:
    """Value -> model of the kernels that the planner may choose; those that run on ``device`` where one is named.

    Example:
        >>> sorted(registered_kernels("cpu"))
        ['dense', 'fused', 'fused_uvm', 'fused_uvm_caching', 'quant']
    """
    return MappingProxyType(
        {value: model for value, model in _kernels.items() if device is None or device in model.devices}
    )


def kernel_model(value: str) -> KernelModel:
    """The model of a kernel, by the name of today or of 2022.

    Raises:
        PlannerError: None has been registered.

    Example:
        >>> kernel_model("batched_fused") is kernel_model("fused")
        True
    """
    model = _kernels.get(value) or _kernels.get(value.removeprefix("batched_"))
    if model is None:
        raise PlannerError(
            f"the planner cannot estimate the compute kernel {value!r}: it knows {', '.join(_kernels)}; "
            "register_kernel(value, KernelModel(...)) adds one",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )
    return model


register_kernel("fused", KernelModel())
register_kernel("fused_uvm", KernelModel(memory=in_slower_memory))
register_kernel("fused_uvm_caching", KernelModel(memory=in_slower_memory))
register_kernel("dense", KernelModel(lambda topology: DENSE_BANDWIDTH * device_bandwidth(topology), updates=False))
register_kernel("quant", KernelModel(devices=("cpu", "cuda"), serves=True))
