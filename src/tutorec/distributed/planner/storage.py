"""How many bytes a piece of a table takes on the rank that holds it.

Rows are stored as wide as the kernel stores them, and row-wise Adagrad keeps 4 bytes for each row of each piece: what
is counted here is what a sharded module allocates, to the byte. Buffers come on top: the ids that arrive, the rows that
are given, gradients where a kernel leaves some.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tutorec._kernels.backend import backend
from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.cost import WORK
from tutorec.distributed.planner.kernels import kernel_model
from tutorec.distributed.planner.options import Ints
from tutorec.distributed.planner.table_facts import TableFacts
from tutorec.distributed.planner.topology import Topology

_FLOAT = 4  # bytes of a number that is computed with, and of a row's state
_ID = 8  # bytes of an id or a length in memory


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of each piece, ``[P]``.

    Args:
        weights: Its rows.
        state: The optimizer's.
        gradients: Those of whole tables.
        input: Ids, lengths and weights of a batch.
        output: Rows of a batch.
    """

    weights: Ints
    state: Ints
    gradients: Ints
    input: Ints
    output: Ints

    @property
    def buffers(self) -> Ints:
        """What a step needs beside rows and state, ``[P]``."""
        return self.gradients + self.input + self.output


def stored_bytes(
    facts: TableFacts, sharding_type: ShardingType, compute_kernel: str, sizes: Ints, topology: Topology
) -> StoredBytes:
    """What each piece takes, part by part.

    Args:
        facts: The table.
        sharding_type: How it is cut.
        compute_kernel: `EmbeddingComputeKernel` value.
        sizes: ``[P, 2]`` rows and columns of the pieces.
        topology: The machines.

    Raises:
        PlannerError: Nothing is known of the kernel.

    Example:
        >>> facts = TableFacts("", "item", 1000, 32, features=("f",), samples=(10.0,), ids=(20.0,))
        >>> found = stored_bytes(facts, ShardingType.TABLE_WISE, "fused", np.array([[1000, 32]]), Topology(2, "cuda"))
        >>> found.weights.tolist(), found.state.tolist(), found.input.tolist(), found.output.tolist()
        ([128000], [0], [480], [2560])
    """
    kernel, work = kernel_model(compute_kernel), WORK[sharding_type](facts, sizes, topology)
    keeps_state = kernel.updates and facts.optimizer is not None and facts.optimizer.kind == "rowwise_adagrad"
    rows, columns = _rows_and_columns(facts, sizes, keeps_state, topology)
    weights = rows * columns * facts.element_bytes
    none = np.zeros_like(rows)
    summed = 2 * _FLOAT * work.table.astype(np.int64)  # my gradient of the table, and that of all ranks
    return StoredBytes(
        weights=weights,
        state=_FLOAT * rows if keeps_state else none,
        gradients=summed + (none if kernel.updates else _FLOAT * sizes[:, 0] * sizes[:, 1]),
        input=np.ceil(work.updates * (_ID + (_FLOAT if facts.weighted else 0)) + _ID * work.lists).astype(np.int64),
        output=np.ceil(_FLOAT * np.maximum(work.outputs, work.gradients) * sizes[:, 1]).astype(np.int64),
    )


def piece_storage(
    facts: TableFacts,
    sharding_type: ShardingType,
    compute_kernel: str,
    sizes: Ints,
    topology: Topology,
    inference: bool = False,
) -> Ints:
    """Bytes that each piece takes on its rank, ``[P, 3]``: HBM, DDR, SSD.

    Args:
        facts: The table.
        sharding_type: How it is cut.
        compute_kernel: `EmbeddingComputeKernel` value.
        sizes: ``[P, 2]`` rows and columns of the pieces.
        topology: The machines.
        inference: Whether rows are all that is kept.

    Raises:
        PlannerError: Nothing is known of the kernel.
    """
    found, kernel = stored_bytes(facts, sharding_type, compute_kernel, sizes, topology), kernel_model(compute_kernel)
    if inference:
        return kernel.memory(topology, found.weights)
    memory = kernel.memory(topology, found.weights + found.state)
    memory[:, 1 if topology.compute_device == "cpu" else 0] += found.buffers
    return memory


def _rows_and_columns(facts: TableFacts, sizes: Ints, keeps_state: bool, topology: Topology) -> tuple[Ints, Ints]:
    """Rows and columns of each piece as they are stored.

    fbgemm's operators, which run on the CPU, want widths that are multiples of 4 and at least one row; row-wise Adagrad
    on other widths runs in torch, which stores a table as it is (`_kernels.tbe.build_table_batch`).
    """
    rows, columns = sizes[:, 0], sizes[:, 1]
    if topology.compute_device != "cpu" or backend().name != "fbgemm":
        return rows, columns
    padded = -(-columns // 4) * 4
    if not keeps_state:
        return np.maximum(rows, 1), padded
    as_it_is = padded != columns
    return np.where(as_it_is, rows, np.maximum(rows, 1)), columns
