"""Table-batched lookups in tables that are stored in a file, through a cache in memory.

    ids [N]  --places-->  ids of places [N]  --operator on rows and slots-->  pooled [B, D]
                 |
        now and then: rows used often are copied into slots, rows that make room are copied back

One ordinary operator does the work, whose tables are R rows in a file with slots in memory behind
them. An id becomes its row's place, a slot or the row itself. Rows move together with their
optimizer state, so that weights and state are those of an uncached table, bit for bit. A row
without a slot is used directly in the file, as fbgemm's ``UVM_CACHING`` does with rows for
which its cache has no room.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock, local
from typing import Any, cast

import torch
from torch import Tensor

from tutorec._kernels.caches.row_cache import CacheCounts, CachedRows, CacheSpec, RowCache
from tutorec._kernels.caches.row_file import ask_for_pages, blocks_read, keep_in_memory
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe import TableBatch

__all__ = ["CachedTableBatch"]

_READ_AHEAD = 4  # batches whose reading is remembered: those that a pipeline has in flight
_INT32_ROWS = 2**31  # rows and slots of a group that int32 ids cannot number


class CachedTableBatch(TableBatch):
    """Fused tables in a file: cached rows are updated in memory, and written back on eviction.

    ``table_weights()``, ``table_states()`` and ``optimizer_state()`` are the tables in the file.
    Calling one writes changed rows back, as :meth:`flush` does, so that they are up to date
    until the next backward. What torch writes into them is seen by the next lookup. For tensors
    returned before a backward this holds row by row: a written row has the value in the tensor,
    every other row keeps what it was trained to.

    Args:
        spec: Tables, features and pooling.
        optimizer: Applied in backward, to each row where it is.
        cache: How many slots each table has: at least 1, at most one for each row.
        implementation: The class of the operator.
        zeros: Makes the file.
    """

    def __init__(
        self,
        spec: GroupSpec,
        optimizer: OptimizerSpec,
        cache: CacheSpec,
        implementation: type[TableBatch],
        zeros: Callable[..., Tensor],
    ) -> None:
        rows = [table.rows for table in spec.tables]
        slots: list[int] = []
        tables: list[TableSpec] = []
        for table, cached_rows in zip(spec.tables, cache.rows, strict=True):
            table_slots = max(1, min(cached_rows, table.rows))
            slots.append(table_slots)
            rows_and_slots = table.rows + table_slots
            tables.append(TableSpec(table.name, rows_and_slots, table.columns, table.dtype))
        with_slots = GroupSpec(tuple(tables), spec.feature_tables, spec.pooling, spec.weighted)

        # In a tuple: it is not a module of this one, whose tables are the rows in the file.
        self._operators = (implementation(with_slots, optimizer, torch.device("cpu"), zeros),)
        super().__init__(spec, optimizer, torch.device("cpu"))
        self._operators[0]._counts = self._counts

        self._cache = RowCache(rows, slots, cache.algorithm)
        self._bases = torch.tensor([self._cache.bases[table] for table in spec.feature_tables])
        self._lock = Lock()
        self._readings: dict[Future[None], Tensor] = {}  # ids of batches that are read ahead
        self._start_reader()

        for table, first_slot in enumerate(rows):
            for tensor in self._tensors(table):
                keep_in_memory(tensor[first_slot:])
        # Of each row with a slot what its weights and states in the file were when it was last
        # copied.
        self._fingerprints = [
            [torch.zeros(number, dtype=torch.int32) for _ in self._tensors(table)]
            for table, number in enumerate(slots)
        ]
        self._versions = self._written()
        self._blocks = local()

    def _place(self) -> tuple[int, int]:
        self._table_places = self._operators[0]._table_places
        return 0, 0

    def _allocate(
        self,
        elements: int,
        rows: int,
        device: torch.device,
        zeros: Callable[..., Tensor] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        return self._operators[0]._flat, self._operators[0]._kept

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableBatch:
        self._operators[0]._apply(fn)
        self._flat, self._kept = self._allocate(0, 0, torch.device("cpu"), None)
        self._bind()
        return self

    @property
    def kernel(self) -> str:
        """Name of the kernel really used, ``cached`` before it."""
        return f"cached {self._operators[0].kernel}"

    @property
    def counts(self) -> CacheCounts:
        """Hits and misses since the beginning."""
        return self._cache.counts

    @torch.no_grad()
    def flush(self) -> None:
        """Write every changed row back to the file, so that tables and state can be read there."""
        with self._lock:
            self._take_what_others_wrote()
            for table, changed in self._cache.take_changed():
                if self._waits_for_disk():
                    self._ask_for([(table, changed.rows)])
                self._copy(table, changed.slots, changed.rows)
                self._note_fingerprints(table, changed)

    def table_weights(self) -> list[Tensor]:
        """Live weights of each table, [R, D] each, up to date until the next backward."""
        self.flush()
        return super().table_weights()

    def table_states(self) -> list[tuple[Tensor, ...]]:
        """Live states of each table, [R] or [R, D], up to date until the next backward."""
        self.flush()
        return super().table_states()

    def optimizer_state(self) -> list[dict[str, Tensor]]:
        """Live state of each table by name, up to date until the next backward."""
        self.flush()
        return super().optimizer_state()

    def rows_at(self, table: int, ids: Tensor) -> Tensor:
        """Rows ``[N, D]`` of a table as they are now, wherever they are."""
        with torch.no_grad(), self._lock:
            self._take_what_others_wrote()
            base = self._cache.bases[table]
            return self._operators[0].rows_at(table, self._cache.find(ids + base) - base)

    def prefetch(self, values: Tensor, offsets: Tensor) -> Future[None]:
        """Read a coming batch's rows from disk on the cache's thread; the result can be awaited.

        Nothing else changes: no bit, no place, no count. Ids ``[N]`` and offsets ``[F*B+1]`` are
        those of the forward, which waits for the thread where it has not read all of them yet.
        """
        if self._process != os.getpid():
            self._start_reader()

        reading = self._reader.submit(self._read_ahead, values, offsets)
        self._readings[reading] = values
        for old in [*self._readings][:-_READ_AHEAD]:
            self._readings.pop(old, None)
        return reading

    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        operator = self._operators[0]
        operator._learning_rate = self._learning_rate
        rows, bases = self._rows_of(values, offsets)
        is_read = self._wait_until_read(values)

        with torch.no_grad(), self._lock:
            self._take_what_others_wrote()
            # the file does not fit in memory: better wait for many rows at once
            waits = self._waits_for_disk()
            if waits and not is_read:
                self._ask_for(self._cache.missing(rows))
            row_places, moves, in_file = self._cache.place(rows)
            pending = _Pending(self, in_file)
            if waits or is_read:
                self._ask_for((move.table, move.written.rows) for move in moves)
            for move in moves:
                self._copy(move.table, move.written.slots, move.written.rows)
                self._copy(move.table, move.read.rows, move.read.slots)
                self._note_fingerprints(move.table, move.read)

        if self._cache.bases[-1] < _INT32_ROWS:
            values = (row_places - bases).to(values.dtype)
        else:
            values = row_places - bases
            offsets = offsets.long()

        if torch.is_grad_enabled():
            return cast(
                Tensor, _Lookup.apply(self._flat, pending, operator, values, offsets, weights)
            )
        pooled = operator._lookup(values, offsets, weights)
        pending.pinned.release()
        return pooled

    def _rows_of(self, values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor | int]:
        """Rows of ids ``[N]``, numbered as in ``RowCache``, and their tables' first rows."""
        batch = (offsets.numel() - 1) // len(self.spec.feature_tables)
        if not batch or len(self.spec.tables) == 1:
            return values.long(), 0
        bases = self._bases.repeat_interleave(offsets[::batch].diff(), output_size=values.numel())
        return values + bases, bases

    def _start_reader(self) -> None:
        """Take a thread of this process: a fork of it has none, and never learns what this read."""
        self._readings.clear()
        self._reader = ThreadPoolExecutor(1, "tutorec-prefetch")
        self._process = os.getpid()

    def _wait_until_read(self, values: Tensor) -> bool:
        """Wait for the thread that already reads rows of these ids, so that none is read twice."""
        if self._readings and self._process != os.getpid():
            self._start_reader()

        # a copy: another thread may prefetch meanwhile
        for reading, ids in [*self._readings.items()]:
            if ids is values or ids.equal(values):
                self._readings.pop(reading, None)
                reading.result()
                return True
        return False

    def _read_ahead(self, values: Tensor, offsets: Tensor) -> None:
        """Read a number of each row that has no slot."""
        missing = [*self._cache.missing(self._rows_of(values, offsets)[0])]
        if self._waits_for_disk():
            self._ask_for(missing)
        for table, rows in missing:
            for tensor in self._tensors(table):
                tensor.view(len(tensor), -1)[:, 0].index_select(0, rows)

    def _ask_for(self, missing: Iterable[tuple[int, Tensor]]) -> None:
        """Have the system begin to read rows of tables."""
        for table, rows in missing:
            for tensor in self._tensors(table):
                ask_for_pages(tensor, rows)

    def _waits_for_disk(self) -> bool:
        """Whether this thread has read anything from the disk since it asked this before."""
        before = getattr(self._blocks, "read", 0)
        self._blocks.read = blocks_read()
        return self._blocks.read != before

    def _take_what_others_wrote(self) -> None:
        """Copy rows written to the file by others, as by ``load_state_dict``, into their slots."""
        if self._versions == self._written():
            return

        for table, cached in self._cache.in_slots():
            numbers = cached.slots - self.spec.tables[table].rows
            pairs = zip(self._tensors(table), self._fingerprints[table], strict=True)
            for tensor, fingerprints in pairs:
                is_other = _fingerprint(tensor, cached.rows) != fingerprints[numbers]
                rows = cached.rows[is_other]
                tensor.index_copy_(0, cached.slots[is_other], tensor.index_select(0, rows))
            self._note_fingerprints(table, cached)
        self._versions = self._written()

    def _written(self) -> list[int]:
        """How often torch has written to each buffer."""
        return [buffer._version for buffer in (self._flat, *self._kept)]

    def _copy(self, table: int, sources: Tensor, targets: Tensor) -> None:
        """Copy the weights and states of rows or slots of a table."""
        if sources.numel():
            for tensor in self._tensors(table):
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def _note_fingerprints(self, table: int, cached: CachedRows) -> None:
        """Remember what rows in the file are now, to tell whether others write them."""
        numbers = cached.slots - self.spec.tables[table].rows
        pairs = zip(self._tensors(table), self._fingerprints[table], strict=True)
        for tensor, fingerprints in pairs:
            fingerprints.index_copy_(0, numbers, _fingerprint(tensor, cached.rows))

    def _tensors(self, table: int) -> list[Tensor]:
        """Weights and each state of a table, slots included."""
        operator = self._operators[0]
        # As .data: what is written here is not what others wrote, and no lookup that waits for its
        # backward reads it.
        return [tensor.data for tensor in (operator._tables[table], *operator._states[table])]


class _Pending:
    """A lookup whose rows are not evicted until its backward, or until its result is garbage."""

    def __init__(self, tables: CachedTableBatch, in_file: int) -> None:
        self._tables = tables
        self._in_file = in_file
        self.pinned = tables._cache.pin()

    def update(self, backward: Callable[[], None]) -> None:
        tables = self._tables
        with torch.no_grad(), tables._lock:
            tables._take_what_others_wrote()

        try:
            backward()
        finally:
            with tables._lock:
                tables._cache.change(self._in_file)
                tables._versions = tables._written()
            self.pinned.release()


class _Lookup(torch.autograd.Function):
    """A lookup of the operator, with a graph of its own: its backward is that of the operator."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        pending: _Pending,
        operator: TableBatch,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        with torch.enable_grad():
            ctx.pooled = operator._lookup(values, offsets, weights)
        ctx.pending = pending
        return ctx.pooled.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.pending.update(lambda: torch.autograd.backward(ctx.pooled, grads))
        return None, None, None, None, None, None


def _fingerprint(tensor: Tensor, rows: Tensor) -> Tensor:
    """32 bits of each row ``[N]`` of weights or states, which tell one content from another."""
    bits = tensor.index_select(0, rows)
    bits = bits.view(torch.int32 if bits.itemsize == 4 else torch.int16)
    if bits.dim() == 1:
        return bits
    # The upper half of the sums: in the lower one, changes of sign of two columns cancel out.
    return (bits.long().mul_(_factors(bits.shape[1])).sum(1) >> 32).int()


@cache
def _factors(columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (columns,), generator=draw)
