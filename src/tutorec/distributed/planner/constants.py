"""Hardware constants: memory, bandwidths and times, each with its unit and source.

Bandwidths are in bytes per millisecond, memory in bytes, times in milliseconds. Data sheets use
powers of ten and TorchRec powers of two; the constants follow their source.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutorec.distributed.plan.sizes import MIN_CW_DIM as MIN_CW_DIM

GIB = 1024**3
DEVICES = ("cpu", "cuda", "mtia")  # that a topology supports
_GB_PER_S = 10**9 / 1000  # as in data sheets, in bytes per millisecond

# Defaults of a topology of accelerators: TorchRec's ``planner.constants``, so that plans compare.
HBM_CAP = 32 * GIB
DDR_CAP = 128 * GIB
SSD_CAP = 2 * 1024 * GIB
HBM_MEM_BW = 897 * GIB / 1000
DDR_MEM_BW = 51 * GIB / 1000
SSD_MEM_BW = 100 * 1024**2 / 1000
HBM_TO_DDR_MEM_BW = 32 * GIB / 1000
INTRA_NODE_BANDWIDTH = 600 * GIB / 1000
CROSS_NODE_BANDWIDTH = 12.5 * GIB / 1000

BATCH_SIZE = 512  # samples per rank; TorchRec's
POOLING_FACTOR = 1.0  # ids per bag; TorchRec's
NUM_POOLINGS = 1.0  # bags per sample; TorchRec's
BWD_COMPUTE_MULTIPLIER = 2.0  # rows are read and written; TorchRec's
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER = 1.0  # TorchRec's

# Minimum bytes read per row: 32 elements, one per thread; as TorchRec assumes.
ROW_READ_BYTES = 128
# For a table with a dense gradient [R, D]: bytes moved in addition to a fused update, as a multiple
# of the gradient. It is zeroed and added to; then an optimizer reads it, and reads and writes the
# rows.
DENSE_GRADIENT_PASSES = 5.0
# A dense kernel does the same lookups in separate steps: half as fast; TorchRec's
# ``kernel_bw_lookup``.
DENSE_BANDWIDTH = 0.5

# Latency of a small exchange between devices in ms, an order of magnitude that data sheets do not
# give. NCCL's tests show 6 us for a small sum over two H100 of a host
# (github.com/NVIDIA/nccl/issues/1259); launch overhead in Python is added.
DEVICE_LATENCY_MS = 0.02


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine: the resources of one rank; by default of an accelerator, as in TorchRec.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        ranks_per_host: Devices per host.
        hbm_cap: Device memory.
        ddr_cap: A rank's share of host memory.
        hbm_mem_bw: Bandwidth of device memory.
        ddr_mem_bw: A rank's share of the bandwidth of host memory.
        hbm_to_ddr_mem_bw: Bandwidth between the two, one way.
        intra_host_bw: Bandwidth from a device to others of its host, one way.
        inter_host_bw: Bandwidth from a device to other hosts, one way.
        latency_ms: Latency of an exchange.
        row_ms: Time per distinct row of an update, in addition to its bytes.
        bwd_compute_multiplier: Time of backward relative to forward.
        source: Source of the numbers.

    Example:
        >>> HARDWARE["H100"].hbm_cap // 10**9, HARDWARE["H100"].ranks_per_host
        (80, 8)
    """

    device: str = "cuda"
    ranks_per_host: int = 8
    hbm_cap: int = HBM_CAP
    ddr_cap: int = DDR_CAP
    hbm_mem_bw: float = HBM_MEM_BW
    ddr_mem_bw: float = DDR_MEM_BW
    hbm_to_ddr_mem_bw: float = HBM_TO_DDR_MEM_BW
    intra_host_bw: float = INTRA_NODE_BANDWIDTH
    inter_host_bw: float = CROSS_NODE_BANDWIDTH
    latency_ms: float = DEVICE_LATENCY_MS
    row_ms: float = 0.0
    bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER
    source: str = "TorchRec's planner.constants"


def _dgx(
    hbm: float, hbm_bw: float, ddr_bw: float, pcie: float, nvlink: float, nic: float, source: str
) -> Hardware:
    """A host of 8 devices with 2 TB of memory; units are GB and GB/s, one way, per device."""
    return Hardware(
        hbm_cap=int(hbm * 10**9),
        ddr_cap=2 * 10**12 // 8,
        hbm_mem_bw=hbm_bw * _GB_PER_S,
        ddr_mem_bw=ddr_bw * _GB_PER_S,
        hbm_to_ddr_mem_bw=pcie * _GB_PER_S,
        intra_host_bw=nvlink * _GB_PER_S,
        inter_host_bw=nic * _GB_PER_S,
        source=source,
    )


ACCELERATOR = Hardware()  # of a topology of accelerators

HARDWARE: dict[str, Hardware] = {
    "A100-40": _dgx(
        40, 1555, 51.2, 32, 300, 25, "NVIDIA A100 (SXM, 40 GB) and DGX A100 data sheets: HBM2 "
                                     "1,555 GB/s, NVLink 600 "
        "GB/s both ways together, PCIe 4.0 x16, 8 x 200 Gb/s, 2 x 8 channels of DDR4-3200"
    ),
    "A100-80": _dgx(
        80, 2039, 51.2, 32, 300, 25, "NVIDIA A100 (SXM, 80 GB) and DGX A100 data sheets: HBM2e "
                                     "2,039 GB/s, NVLink 600 "
        "GB/s both ways together, PCIe 4.0 x16, 8 x 200 Gb/s, 2 x 8 channels of DDR4-3200"
    ),
    "H100": _dgx(
        80, 3350, 76.8, 64, 450, 50, "NVIDIA H100 (SXM) and DGX H100 data sheets: HBM3 3.35 TB/s, "
                                     "NVLink 900 GB/s both "
        "ways together, PCIe 5.0 x16, 8 x 400 Gb/s, 2 x 8 channels of DDR5-4800"
    ),
    "H200": _dgx(
        141, 4800, 76.8, 64, 450, 50, "NVIDIA H200 (SXM) and DGX H200 data sheets: HBM3e 4.8 TB/s, "
                                      "NVLink 900 GB/s "
        "both ways together, PCIe 5.0 x16, 8 x 400 Gb/s, 2 x 8 channels of DDR5-4800"
    ),
    # As measured before ``tutorec calibrate`` existed: two processes of one thread each, gloo on
    # the loopback device, fused row-wise Adagrad, on two virtual cores of an AMD EPYC 7003. Use
    # ``tutorec calibrate`` for other machines.
    "laptop": Hardware(
        device="cpu",
        ranks_per_host=2,
        hbm_cap=0,
        ddr_cap=16 * GIB,  # shared by all ranks; not measured
        ddr_mem_bw=4.8 * GIB / 1000,  # rows and bags of a lookup, one thread
        intra_host_bw=0.9 * GIB / 1000,  # sent by one process
        inter_host_bw=0.9 * GIB / 1000,
        latency_ms=0.4,  # of an exchange, including Python overhead
        row_ms=230e-6,  # additional time per distinct row of an update
        bwd_compute_multiplier=2.5,  # bytes of an update relative to a lookup
        source="measured on two virtual cores of an AMD EPYC 7003",
    ),
}  # fmt: skip
