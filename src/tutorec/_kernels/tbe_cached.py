"""Table-batched lookups in tables that lie in a file, by way of the rows that are in memory.

    ids [N]  --slots-->  ids of slots [N]  --an ordinary operator on the slots-->  pooled [B, D]
                 |
        rows that are missing are read from the file; rows that make room for them are written back

Two ordinary operators of one backend do the work. The *far* one holds the tables, in a file; the *near* one holds as
many rows of each table as there are slots, in memory. Rows move between them together with their optimizer state, so
that weights and state are those of an uncached table, bit for bit. A batch that needs more rows of a table than there
are slots is looked up in the file itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.row_cache import CacheCounts, RowCache, Rows
from tutorec._kernels.row_file import CacheSpec
from tutorec._kernels.tbe import GroupSpec, TableBatch, TableSpec

__all__ = ["CachedTableBatch"]


class CachedTableBatch(TableBatch):
    """Fused tables in a file, whose rows in memory are updated there and written back when they make room.

    ``table_weights()`` and ``optimizer_state()`` are the tables in the file: call :meth:`flush` before reading them.
    What is written into them is seen by the next lookup.

    Args:
        spec: Tables, features and pooling.
        optimizer: Applied in backward, to the rows in memory.
        cache: How many rows of each table are in memory.
        implementation: The class of the two operators.
        zeros: Makes the file.
    """

    def __init__(
        self,
        spec: GroupSpec,
        optimizer: OptimizerSpec,
        cache: CacheSpec,
        implementation: type[TableBatch],
        zeros: Callable[[int], Tensor],
    ) -> None:
        slots = [max(1, min(wanted, table.rows)) for wanted, table in zip(cache.rows, spec.tables, strict=True)]
        tables = [TableSpec(table.name, rows, table.columns) for rows, table in zip(slots, spec.tables, strict=True)]
        near_spec = GroupSpec(tuple(tables), spec.feature_tables, spec.pooling, spec.weighted)
        cpu = torch.device("cpu")
        far = implementation(spec, optimizer, cpu, zeros)
        near = implementation(near_spec, optimizer, cpu)
        # In a tuple: they are not modules of this one, whose parameters are the tables in the file.
        self._far_and_near = (far, near)
        super().__init__(spec, optimizer, cpu)
        far._counts = near._counts = self._counts
        self._cache = RowCache([table.rows for table in spec.tables], slots, cache.algorithm)
        self._first_rows = torch.tensor([self._cache.row_bounds[table] for table in spec.feature_tables])
        self._first_slots = torch.tensor([self._cache.slot_bounds[table] for table in spec.feature_tables])
        self._lock = Lock()
        self._reader = ThreadPoolExecutor(1, "tutorec-prefetch")
        self._versions = self._written()

    def _place(self) -> tuple[int, int]:
        far = self._far_and_near[0]
        self._table_places = far._table_places
        return 0, 0

    def _allocate(
        self, elements: int, rows: int, device: torch.device, zeros: Callable[[int], Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        far = self._far_and_near[0]
        return far._flat, far._kept

    @property
    def kernel(self) -> str:
        """Name of the kernel really used, ``cached`` before it."""
        return f"cached {self._far_and_near[1].kernel}"

    @property
    def counts(self) -> CacheCounts:
        """Hits and misses since the beginning; of a batch that did not fit, its rows count as neither."""
        return self._cache.counts

    @torch.no_grad()
    def flush(self) -> None:
        """Write every changed row back to the file, so that tables and state can be read there."""
        with self._lock:
            self._take_what_others_wrote()
            self._write(self._cache.take_changed())

    def prefetch(self, values: Tensor, offsets: Tensor) -> Future[None]:
        """Read the rows of a coming batch, on a thread of its own; the result says when it is done.

        Ids ``[N]`` and offsets ``[F*B+1]`` are those of the forward to come, which gives the same bits without.
        """
        rows = self._rows_of(values, offsets)
        return self._reader.submit(self._prefetch, rows)

    @torch.no_grad()
    def _prefetch(self, rows: Tensor) -> None:
        with self._lock:
            self._bring(rows, counted=False)

    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        for operator in self._far_and_near:
            operator._learning_rate = self._learning_rate
        rows = self._rows_of(values, offsets)
        with torch.no_grad(), self._lock:
            slots = self._bring(rows)
            if slots is None:  # too many rows at once for the slots: those in memory go to the file, where all are read
                distinct = rows.unique()
                self._write(self._cache.take_changed(distinct))
                pending: _InFile | _InMemory = _InFile(self, distinct)
            else:
                local = slots - self._per_id(self._first_slots, offsets, slots.numel())
                values, pending = local.to(values.dtype), _InMemory(self, slots)
        operator = self._far_and_near[0 if slots is None else 1]
        if not torch.is_grad_enabled():
            return operator._lookup(values, offsets, weights)
        return cast(Tensor, _Lookup.apply(self._flat, pending, operator, values, offsets, weights))

    def rows_at(self, table: int, ids: Tensor) -> Tensor:
        """Rows ``[N, D]`` of a table as they are now, wherever they are."""
        with torch.no_grad(), self._lock:
            self._write(self._cache.take_changed((ids + self._cache.row_bounds[table]).unique()))
            return super().rows_at(table, ids)

    def _rows_of(self, values: Tensor, offsets: Tensor) -> Tensor:
        """Rows counted through all tables ``[N]``, of feature-major ids."""
        return values.long() + self._per_id(self._first_rows, offsets, values.numel())

    def _per_id(self, by_feature: Tensor, offsets: Tensor, ids: int) -> Tensor | int:
        """What an id's feature has, ``[N]``; 0 where there is one table."""
        batch = (offsets.numel() - 1) // by_feature.numel()
        if not batch or len(self.spec.tables) == 1:
            return 0
        return by_feature.repeat_interleave(offsets[::batch].diff(), output_size=ids)

    def _bring(self, rows: Tensor, counted: bool = True) -> Tensor | None:
        """Slots ``[N]`` of rows that are in memory from now on; None where there are too few slots."""
        self._take_what_others_wrote()
        for table, written, read in self._cache.place(rows, counted):
            self._write([(table, written)])
            self._read([(table, read)])
        slots = self._cache.find(rows)
        return None if bool((slots < 0).any()) else slots

    def _take_what_others_wrote(self) -> None:
        """Read every row again where the file was written by others since, by ``load_state_dict`` for example."""
        if self._versions != self._written():
            self._read(self._cache.take_all())
            self._versions = self._written()

    def _written(self) -> list[int]:
        """How often torch has written to each buffer."""
        return [buffer._version for buffer in (self._flat, *self._kept)]

    def _write(self, moves: Iterable[tuple[int, Rows]]) -> None:
        """Copy rows and their state from memory to the file."""
        for table, own in moves:
            for far, near, rows, slots in self._tensors(table, own):
                far.index_copy_(0, rows, near.index_select(0, slots))

    def _read(self, moves: Iterable[tuple[int, Rows]]) -> None:
        """Copy rows and their state from the file to memory."""
        for table, own in moves:
            for far, near, rows, slots in self._tensors(table, own):
                near.index_copy_(0, slots, far.index_select(0, rows))

    def _tensors(self, table: int, own: Rows) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Weights and each state of a table: (in the file, in memory, rows, slots)."""
        near = self._far_and_near[1]
        rows, slots = own.rows - self._cache.row_bounds[table], own.slots - self._cache.slot_bounds[table]
        pairs = zip(
            (self._tables[table], *self._states[table]), (near._tables[table], *near._states[table]), strict=True
        )
        # As .data: a lookup that waits for its backward reads other slots, and autograd would count this as a change.
        return [(in_file.data, in_memory.data, rows, slots) for in_file, in_memory in pairs]


class _InMemory:
    """A lookup whose rows stay in their slots until its backward, or until its result is garbage."""

    def __init__(self, tables: CachedTableBatch, slots: Tensor) -> None:
        self._tables, self._slots = tables, slots
        self._held = tables._cache.hold(slots)

    def update(self, backward: Callable[[], None]) -> None:
        with self._tables._lock:
            self._tables._cache.change(self._slots)
        backward()
        self._held.release()


class _InFile:
    """A lookup in the file, of rows of which some are, or come to be, in memory, too."""

    def __init__(self, tables: CachedTableBatch, rows: Tensor) -> None:
        self._tables, self._rows = tables, rows

    def update(self, backward: Callable[[], None]) -> None:
        tables = self._tables
        with torch.no_grad(), tables._lock:
            tables._write(tables._cache.take_changed(self._rows))
            backward()
            tables._read(tables._cache.take_all(self._rows))
            tables._versions = tables._written()


class _Lookup(torch.autograd.Function):
    """A lookup of one of the operators, with a graph of its own: its backward is that of the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        pending: _InMemory | _InFile,
        operator: TableBatch,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        with torch.enable_grad():
            ctx.found = operator._lookup(values, offsets, weights)
        ctx.pending = pending
        return ctx.found.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.pending.update(lambda: torch.autograd.backward(ctx.found, grads))
        return None, None, None, None, None, None
