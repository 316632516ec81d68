"""Tables in host memory that a GPU looks up, and the cache of their rows on the GPU.

It is fbgemm's module with the rows in other memory. ``MANAGED``: the GPU reads and updates rows in
the memory of the host. ``MANAGED_CACHING``: rows of a batch are copied into a cache in the memory
of the GPU, updated there, and written back when they make room. Row-wise state is in the memory of
the GPU, other state in the memory of the rows.

On machines without a GPU the tests run it in CPU memory, with formulas and a cache of their own in
place of fbgemm's kernels; ``make gpu`` runs it as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.specs import GroupSpec, OptimizerSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_cuda import FbgemmCudaTables, RowMemory

__all__ = ["ManagedCachingTableBatch", "ManagedTableBatch"]

_UNKNOWN = -1  # a number of writes that no tensor has


class ManagedTableBatch(FbgemmCudaTables):
    """Fused tables in the memory of the host, read and updated there by the GPU."""

    def _place_on(self, device: torch.device) -> RowMemory:
        return RowMemory("MANAGED", "CUDA", "uvm")

    @property
    def kernel(self) -> str:
        """Name of the kernel really used, ``managed`` before it."""
        return f"managed {super().kernel}"

    def _buffers_of(self, module: Any) -> list[str]:
        buffers = ["weights_uvm"]
        for number, state in enumerate(self._state_specs, start=1):
            memory = "dev" if state.rowwise else "uvm"
            buffers.append(f"momentum{number}_{memory}")

        return buffers


class ManagedCachingTableBatch(ManagedTableBatch):
    """Fused tables in the memory of the host, and a cache of their rows in that of the GPU.

    ``table_weights()`` are the tables in the memory of the host. The call writes changed rows back,
    as :meth:`flush` does, so that they are up to date until the next backward. What is written into
    them until then is seen by the next lookup.

    A backward finds the rows of its lookup in the cache, so that there may be no other lookup
    between the two.

    Args:
        spec: Tables, features and pooling.
        optimizer: Applied in backward, to each row where it is.
        device: The GPU.
        cache: How many rows of each table the cache has room for; it holds as many of all of them
            together.

    Raises:
        ValueError: Rows were written from outside which may have been updated in the cache since
            ``table_weights()``. Or tables have made different numbers of steps.
        RuntimeError: A backward comes after the next lookup.
    """

    _cache: CacheSpec

    def __init__(
        self, spec: GroupSpec, optimizer: OptimizerSpec, device: torch.device, cache: CacheSpec
    ) -> None:
        # Before the module is one: its buffers are built first.
        object.__setattr__(self, "_cache", cache)
        super().__init__(spec, optimizer, device)

    def _place_on(self, device: torch.device) -> RowMemory:
        return RowMemory("MANAGED_CACHING", "CUDA", "uvm")

    @property
    def kernel(self) -> str:
        """Name of the kernel really used, ``cached`` before it."""
        return super().kernel.replace("managed", "cached")

    def _cache_arguments(self, fbgemm: Any, rows: int) -> dict[str, Any]:
        cache = self._cache
        slots = sum(
            min(cached_rows, table.rows)
            for cached_rows, table in zip(cache.rows, self.spec.tables, strict=True)
        )
        return {
            "cache_algorithm": fbgemm.CacheAlgorithm[cache.algorithm.upper()],
            "cache_load_factor": max(slots, 1) / rows,
            "cache_reserved_memory": cache.reserved_memory,
            "cache_precision": fbgemm.SparseType.FP32,
            "prefetch_pipeline": cache.prefetch_pipeline,
        }

    def _build(self, device: torch.device) -> Any:
        # Of a new cache: which write to the tables it has seen, whether its rows may differ from
        # theirs, the number of its lookups, and the batches that were prefetched and not looked up.
        self._seen = _UNKNOWN
        self._is_ahead = False
        self._number = 0
        self._prefetched: deque[Tensor] = deque()
        module = super()._build(device)

        # Called below, in backward: torch warns of hooks of modules none of whose inputs has a
        # gradient.
        module._backward_pre_hooks.clear()

        return module

    def _bind_kernel(self) -> None:
        super()._bind_kernel()
        # As .data, which counts writes by itself: what the kernels write is not what others wrote.
        self._fbgemm.weights_uvm = self._flat.data

    def flush(self) -> None:
        """Write every changed row back to host memory, so that tables can be read there."""
        self._take_what_others_wrote()
        self._fbgemm.flush()
        self._is_ahead = False

    def table_weights(self) -> list[Tensor]:
        """Live weights of each table, [R, D] each, up to date until the next backward."""
        self.flush()
        return super().table_weights()

    def rows_at(self, table: int, ids: Tensor) -> Tensor:
        """Rows ``[N, D]`` of a table as they are now."""
        self.flush()
        return super().rows_at(table, ids)

    def prefetch(self, values: Tensor, offsets: Tensor) -> None:
        """Prefetch a coming batch's rows into the cache, in order, if ``prefetch_pipeline``."""
        if not self._cache.prefetch_pipeline:
            return

        self._take_what_others_wrote()
        if values.dtype != offsets.dtype:
            values = values.long()
            offsets = offsets.long()

        self._prefetched.append(values)
        values, offsets, _ = self._arranged(values, offsets, None)
        self._fbgemm.prefetch(self._with_room(values), self._with_room(offsets))

    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        self._take_what_others_wrote()

        # fbgemm gives a lookup the cache locations of the batch that was prefetched first, whatever
        # its ids are.
        if self._prefetched and not _same(self._prefetched.popleft(), values):
            self._forget_prefetched()

        self._number += 1
        if torch.is_grad_enabled():
            self._check_counts()

        pooled = super()._lookup(values, offsets, weights)
        if not torch.is_grad_enabled():
            if self._cache.prefetch_pipeline:  # it is backward that lets go of rows
                self._forget_prefetched()

            return pooled

        return cast(Tensor, _InOrder.apply(pooled, self, self._number))

    def prepare_backward(self) -> None:
        """Find the rows of the last lookup again, as later batches may have been prefetched."""
        self._is_ahead = True
        if self._cache.prefetch_pipeline:
            self._fbgemm._update_cache_counter_and_locations(self._fbgemm, ())

    def _check_counts(self) -> None:
        """Refuse tables at different steps: each step needs its own call, which would move rows."""
        if len(set(self._counts.tolist())) > 1:
            raise ValueError(
                f"tables {self.spec.names} have made {self._counts.tolist()} steps, and those of "
                "one cache on the GPU are updated together: give them the compute kernel "
                "'fused_uvm'"
            )

    def _take_what_others_wrote(self) -> None:
        """Drop cached rows if others, such as ``load_state_dict``, wrote to the tables."""
        if self._flat._version == self._seen:
            return

        if self._is_ahead:
            raise ValueError(
                f"rows of tables {self.spec.names} were written from outside after a backward, and "
                f"the cache on {self._flat.device} may hold newer ones: call flush() before the "
                "rows are written"
            )

        self._fbgemm.reset_cache_states()
        self._forget_prefetched()
        self._number += 1
        self._seen = self._flat._version

    def _forget_prefetched(self) -> None:
        """Let the next lookup fetch its own rows; unpins rows of prefetched batches."""
        module = self._fbgemm
        self._prefetched.clear()
        module.timesteps_prefetched.clear()
        module.lxu_cache_locations_list.clear()
        module.lxu_cache_locking_counter.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableBatch:
        self.flush()
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        return super().__getstate__()


class _InOrder(torch.autograd.Function):
    """A result as it is, whose backward comes before the next lookup."""

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, tables: ManagedCachingTableBatch, number: int) -> Tensor:
        ctx.tables = tables
        ctx.number = number
        return pooled.view_as(pooled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.tables._number != ctx.number:
            raise RuntimeError(
                f"tables {ctx.tables.spec.names} were looked up or written again before this "
                "backward, and their cache may have moved the rows that it updates: run backward "
                "before the next forward, or give the tables the compute kernel 'fused_uvm'"
            )

        ctx.tables.prepare_backward()
        return grads[0], None, None


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors share memory, whatever their numbers."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.dtype == second.dtype
    )
