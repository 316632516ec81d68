"""The operator of a group of tables: fbgemm's or torch's, in memory or in a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch

from tutorec._kernels.backend import backend
from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.caches.row_file import zeros_in_file
from tutorec._kernels.memory import unwritten_zeros
from tutorec._kernels.specs import (
    FBGEMM_KINDS,
    FirstRows,
    GroupSpec,
    OptimizerSpec,
    fbgemm_cpu_columns,
)
from tutorec._kernels.tbe import TableBatch

__all__ = ["build_table_batch", "runs_in_fbgemm"]

_CUDA_COLUMNS = 2048  # the widest rows that fbgemm's CUDA kernels train


def build_table_batch(
    spec: GroupSpec,
    *,
    optimizer: OptimizerSpec | None,
    device: torch.device,
    weights: FirstRows | None = None,
    cache: CacheSpec | None = None,
    virtual: bool = False,
) -> TableBatch:
    """Build the operator for a group of tables on the backend of this process.

    fbgemm's operators run on the CPU, and on CUDA where its CUDA wheel fits. If fbgemm has no
    kernel for the tables and the optimizer, the plain-torch operator has the same signature, and
    ``kernel`` says so.

    Args:
        spec: Tables, features and pooling.
        optimizer: Applied in the backward; None for dense gradients.
        device: Device of the tables.
        weights: One tensor [R, D] for each table, copied; None, or one on the meta device, draws
            uniform numbers within 1/sqrt(R). Or a function of a table's number and its rows, which
            writes them.
        cache: For tables in slower memory, a file or on CUDA the host's: how many of their rows are
            in faster memory.
        virtual: Whether rows and their state take memory when they are written, on the CPU.

    Returns:
        The operator.

    Raises:
        ValueError: Weights whose number or shape differs from the tables', or no kernel for tables
            in slower memory.

    Example:
        >>> import torch
        >>> from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
        >>> from tutorec._kernels.tbe_build import build_table_batch
        >>> group = GroupSpec((TableSpec("item", rows=3, columns=4),), feature_tables=(0,))
        >>> op = build_table_batch(
        ...     group,
        ...     optimizer=OptimizerSpec("sgd", learning_rate=0.5),
        ...     device=torch.device("cpu"),
        ...     weights=[torch.ones(3, 4)],
        ... )
        >>> op(torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3])).sum().backward()
        >>> op.table_weights()[0][
        ...     :, 0
        ... ].tolist()  # row 2 is in the batch twice: one update with the summed gradient
        [0.5, 1.0, 0.0]
    """
    device = torch.device(device)
    if cache is None:
        zeros = partial(unwritten_zeros, device=device) if virtual else None
        operator = _implementation(spec, optimizer, device)(spec, optimizer, device, zeros)
    else:
        operator = _in_slower_memory(spec, optimizer, device, cache)

    if weights is not None and not callable(weights) and len(weights) != len(spec.tables):
        raise ValueError(f"got {len(weights)} weights for {len(spec.tables)} tables {spec.names}")

    table_weights = operator.table_weights()
    with torch.no_grad():
        for index, (table, rows) in enumerate(zip(spec.tables, table_weights, strict=True)):
            if callable(weights):
                weights(index, rows.detach())
            elif weights is not None and not weights[index].is_meta:
                rows.copy_(weights[index])
            elif table.rows:
                bound = 1 / math.sqrt(table.rows)
                rows.uniform_(-bound, bound)

    return operator


def runs_in_fbgemm(
    optimizer: OptimizerSpec | None,
    columns: Iterable[int],
    device_type: str,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Whether fbgemm runs a group of tables, which stores widths as multiples of 4.

    Rows that are too wide for its kernels are looked up in torch. So are rows of 16 bits, but for
    fused lookups of float16 on the CPU. Where fbgemm's update would round sums to 16 bits, such
    rows are then updated in torch.

    Args:
        optimizer: Applied in the backward; None for dense gradients.
        columns: D of each table.
        device_type: Type of their device, ``"cpu"``, ``"cuda"`` or another.
        dtype: Data type of the rows.

    Example:
        >>> runs_in_fbgemm(OptimizerSpec("adam"), [64], "cpu")  # fbgemm has Adam for CUDA only
        False
    """
    if optimizer is not None and optimizer.kind not in FBGEMM_KINDS.get(device_type, ()):
        return False

    updated_in_torch = dtype == torch.float16 and device_type == "cpu" and optimizer is not None
    if dtype != torch.float32 and not updated_in_torch:
        return False

    columns = list(columns)
    widest = max(columns)
    if device_type == "cuda" and widest > _CUDA_COLUMNS:
        return False
    if optimizer is not None and device_type == "cpu":
        fits = widest <= fbgemm_cpu_columns(optimizer.kind)
        if not fits:
            return False

    # Padding is exact but for rules that would average the squares of a row over its padded width,
    # and for updates in torch, which take rows as wide as they are.
    averages = optimizer is not None and optimizer.averages_squares
    if (averages or updated_in_torch) and any(width % 4 for width in columns):
        return False

    return backend().serves(device_type)


def _in_slower_memory(
    spec: GroupSpec, optimizer: OptimizerSpec | None, device: torch.device, cache: CacheSpec
) -> TableBatch:
    """The operator of tables in a file, or on CUDA in the memory of the host."""
    if optimizer is None or device.type not in ("cpu", "cuda"):
        problem = "with dense gradients: give them a fused optimizer"
        if optimizer is not None:
            problem = f"on {device}: put them on the CPU, or give them the compute kernel 'fused'"
        raise ValueError(f"tables {spec.names} cannot be stored in slower memory {problem}")

    if device.type == "cuda":
        if not _in_fbgemm(spec, optimizer, device):
            reason = backend().reason
            if backend().serves(device.type):
                reason = f"it has none for {optimizer.kind} on such rows"
            raise ValueError(
                f"tables {spec.names} cannot be stored in slower memory on {device}: only the "
                f"kernels of fbgemm's CUDA wheel, fbgemm-gpu, read rows there ({reason}); put the "
                "tables on the CPU, or give them the compute kernel 'fused'"
            )

        from tutorec._kernels.caches import managed_tables

        if not cache.rows:
            return managed_tables.ManagedTableBatch(spec, optimizer, device)
        return managed_tables.ManagedCachingTableBatch(spec, optimizer, device, cache)

    implementation = _implementation(spec, optimizer, device)
    zeros = partial(zeros_in_file, folder=cache.folder, what=f"tables {spec.names}")
    if not cache.rows:
        from tutorec._kernels.caches.row_file import PageRequests

        in_file = implementation(spec, optimizer, device, zeros)
        PageRequests().watch(in_file)
        return in_file

    from tutorec._kernels.caches.cached_tables import CachedTableBatch

    return CachedTableBatch(spec, optimizer, cache, implementation, zeros)


def _in_fbgemm(spec: GroupSpec, optimizer: OptimizerSpec | None, device: torch.device) -> bool:
    columns = [table.columns for table in spec.tables]
    return runs_in_fbgemm(optimizer, columns, device.type, spec.dtype)


def _implementation(
    spec: GroupSpec, optimizer: OptimizerSpec | None, device: torch.device
) -> type[TableBatch]:
    """The class that runs a group: fbgemm's if chosen and it has the kernel, else torch's."""
    # Imported here: all three modules subclass TableBatch, and a process needs one or two of them.
    if not _in_fbgemm(spec, optimizer, device):
        from tutorec._kernels import tbe_torch

        return tbe_torch.TorchTableBatchedEmbeddingBags

    if device.type == "cpu":
        from tutorec._kernels import tbe_fbgemm

        return tbe_fbgemm.FbgemmCpuDenseTables if optimizer is None else tbe_fbgemm.FbgemmCpuTables

    from tutorec._kernels import tbe_cuda

    return tbe_cuda.FbgemmCudaDenseTables if optimizer is None else tbe_cuda.FbgemmCudaTables
