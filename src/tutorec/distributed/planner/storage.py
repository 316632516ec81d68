"""How many bytes a piece of a table takes on the rank that holds it.

Rows are stored as wide as the kernel stores them, and so is what the optimizer keeps of them; row-wise Adagrad, for
one, keeps 4 bytes for each row of each piece. What is counted here is what a sharded module allocates, to the byte.
Buffers come on top: the ids that arrive, the rows that are given, gradients where a kernel leaves some.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.tbe_build import runs_in_fbgemm
from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.cost import Size, distinct_sizes, work_of
from tutorec.distributed.planner.kernels import KernelModel, kernel_model
from tutorec.distributed.planner.options import Ints, TableFacts
from tutorec.distributed.planner.topology import MOST_BYTES, Topology
from tutorec.errors import PlannerError, PlannerErrorType

_FLOAT = 4  # bytes of a number that is computed with, and of a row's state
_ID = 8  # bytes of an id or a length in memory
# Bytes that a cache keeps for each row of the table, and besides for each row in memory.
_ROW_INDEX, _SLOT_INDEX = 8, 24


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of each piece, ``[P]``.

    Args:
        weights: Its rows.
        state: The optimizer's.
        gradients: Those of whole tables.
        input: Ids, lengths and weights of a batch.
        output: Rows of a batch.
        cache: Rows in memory, with their state and an index, of a table in a file.
    """

    weights: Ints
    state: Ints
    gradients: Ints
    input: Ints
    output: Ints
    cache: Ints

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
        PlannerError: Nothing is known of the kernel, or a piece takes more bytes than any rank has.

    Example:
        >>> facts = TableFacts("", "item", 1000, 32, features=("f",), samples=(10.0,), ids=(20.0,))
        >>> found = stored_bytes(facts, ShardingType.TABLE_WISE, "fused", np.array([[1000, 32]]), Topology(2, "cuda"))
        >>> found.weights.tolist(), found.state.tolist(), found.input.tolist(), found.output.tolist()
        ([128000], [0], [480], [2560])
    """
    few, places = distinct_sizes(sizes)
    lines = [_stored(facts, sharding_type, kernel_model(compute_kernel), size, topology) for size in few]
    return StoredBytes(*np.array(lines, dtype=np.int64).reshape(-1, 6)[places].T)


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

    Returns:
        The bytes; not to be written to, since pieces of one size share a line.

    Raises:
        PlannerError: Nothing is known of the kernel, or a piece takes more bytes than any rank has.
    """
    kernel = kernel_model(compute_kernel)
    few, places = distinct_sizes(sizes)
    parts = [_stored(facts, sharding_type, kernel, size, topology) for size in few]
    weights, state, *others = np.array(parts, dtype=np.int64).reshape(-1, 6).T
    memory = kernel.memory(topology, weights if inference else weights + state)
    if not inference:
        memory[:, 1 if topology.compute_device == "cpu" else 0] += sum(others)
    return np.broadcast_to(memory, (len(places), 3)) if len(few) == 1 else memory[places]


def _stored(
    facts: TableFacts, sharding_type: ShardingType, kernel: KernelModel, size: Size, topology: Topology
) -> tuple[int, int, int, int, int, int]:
    """The parts of a piece, as the fields of `StoredBytes`.

    Raises:
        PlannerError: Together they are more than any rank has, and more than 64 bits count over all ranks.
    """
    work = work_of(kernel, sharding_type)(facts, size, topology)
    optimizer = facts.optimizer if kernel.updates and not kernel.serves else None
    rows, columns = size if kernel.serves else _as_stored(size, optimizer, topology)
    summed = 2 * _FLOAT * int(work.table)  # my gradient of the table, and that of all ranks
    own = 0 if kernel.updates else _FLOAT * size[0] * size[1]
    id_bytes = _ID + (_FLOAT if facts.weighted else 0)
    parts = (
        rows * facts.row_bytes(columns),
        _state_bytes(optimizer, rows, columns),
        summed + own,
        ceil(max(work.updates, work.lookups if kernel.serves else 0.0) * id_bytes + _ID * work.lists),
        ceil(_FLOAT * max(work.outputs, work.gradients) * size[1]),
        _cache_bytes(facts, optimizer, rows, columns),
    )
    if sum(parts) > MOST_BYTES:
        raise PlannerError(
            f"table {facts.name!r}, {sharding_type.value}: a piece of {rows:,} x {columns:,} takes {sum(parts):.3g} "
            f"bytes on its rank with {sum(facts.ids):.3g} ids and {sum(facts.samples):.3g} bags of a batch, and "
            f"no rank has {MOST_BYTES:.3g}: look at num_embeddings, embedding_dim, batch_size and pooling_factors",
            PlannerErrorType.INSUFFICIENT_STORAGE,
        )
    return parts


def _state_bytes(optimizer: OptimizerSpec | None, rows: int, columns: int) -> int:
    """What an optimizer keeps of a piece, as it is stored; a number of steps is one number."""
    if optimizer is None:
        return 0
    numbers = sum(rows if state.rowwise else rows * columns for state in optimizer.states)
    return _FLOAT * (numbers + int(optimizer.counts_steps))


def _cache_bytes(facts: TableFacts, optimizer: OptimizerSpec | None, rows: int, columns: int) -> int:
    """Rows in memory and their state; for each row of the table its slot, for each slot its row, its last use ..."""
    if facts.cache is None or not facts.cache.load_factor:
        return 0
    slots = max(1, ceil(facts.cache.load_factor * rows))
    index = _ROW_INDEX * rows + _SLOT_INDEX * slots
    return slots * facts.row_bytes(columns) + _state_bytes(optimizer, slots, columns) + index


def _as_stored(size: Size, optimizer: OptimizerSpec | None, topology: Topology) -> Size:
    """Rows and columns of a piece as they are stored.

    fbgemm's operators want widths that are multiples of 4 and at least one row; torch stores a table as it is.
    """
    rows, columns = size
    if not runs_in_fbgemm(optimizer, [columns], topology.compute_device):
        return size
    return max(rows, 1), -(-columns // 4) * 4
