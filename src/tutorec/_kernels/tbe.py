"""Table-batched embedding operators: one call looks up every table of a group.

A collection of 26 tables would make 26 small calls; a table-batched operator takes the ids of all
features in one tensor and the rows of all tables in one buffer. ``build_table_batch`` returns such
an operator behind one signature:

    forward(values [N], offsets [F*B+1], weights [N] or None) -> pooled [B, sum of D over features]

What is behind the signature, now and later, and why it fits:

| what | how it fits |
|---|---|
| fused | ``optimizer=OptimizerSpec(...)``: backward updates the rows, by torch or by fbgemm |
| dense | ``optimizer=None``: ``table_weights()`` are Parameters, backward fills their ``.grad`` |
| learning-rate change | ``op.learning_rate = x``: a Python float for each forward, so it is exact |
| optimizer state by name | ``optimizer_state()``: one dict a table, TorchRec's names, live tensors |
| weights in and out | ``table_weights()``: live views [R, D] |
| int-n-bit rows (inference) | a build function more, same ``forward``; ``table_weights()``: packed rows |
| cached rows | ``forward`` maps ids to slots first; ``table_weights()`` flushes, gives whole tables |
| numba kernels | one more subclass with its own fused backward on the same flat buffers |

Semantics, the same on every backend: ids that repeat in a batch are summed before *one* update per
row; rows (and their state) that are not in the batch do not move; the learning rate in force at the
forward is the one applied. Ids are checked before they come here, by the module that owns the
tables.
"""  # noqa: E501

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tutorec._check import require_finite
from tutorec._kernels.lookup_nodes import GradientListener, ReportedLookup, WeightsGradient
from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.specs import (
    GroupSpec,
    OptimizerSpec,
    PoolingKind,
    UpdateStep,
    kernel_pooling,
    memory_of_tables,
)
from tutorec._kernels.tbe_layout import PooledBatch

__all__ = ["TableBatch"]

_TOO_LARGE = (
    "shard it over more ranks, or keep its rows in slower memory with the compute kernel "
    "'fused_uvm_caching': ParameterConstraints(compute_kernels=['fused_uvm_caching'])"
)


class TableBatch(nn.Module, ABC):
    """A table-batched embedding operator: a group's tables in one buffer, looked up in one call.

    Subclasses say how the buffer is laid out (``_place``) and how it is read (``_lookup``). The
    fused ones hold the buffer as a plain tensor, neither parameter nor buffer of the module:
    nothing may average it, broadcast it or give it to a dense optimizer. The dense ones register
    one Parameter for each table, a view of the buffer.

    Use :func:`build_table_batch`. Corresponds to fbgemm's ``SplitTableBatchedEmbeddingBagsCodegen``
    and ``DenseTableBatchedEmbeddingBagsCodegen``.
    """

    _backend: str  # whose kernels run, in ``kernel``
    # per table: first element, first row, elements from row to row
    _table_places: list[tuple[int, int, int]]
    _tables: list[Tensor]
    _states: list[tuple[Tensor, ...]]  # per table, as ``optimizer.states`` names them

    def __init__(
        self,
        spec: GroupSpec,
        optimizer: OptimizerSpec | None,
        device: torch.device,
        zeros: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.optimizer = optimizer
        self._state_specs = () if optimizer is None else optimizer.states
        # The pooling that the kernel runs: sqrtn and the mean of weighted rows reach it as a sum.
        self._pooling: PoolingKind = kernel_pooling(spec.pooling, spec.weighted)
        self.gradient_listener: GradientListener | None = None
        self._rounding_seed = 0
        self._learning_rate = 0.0 if optimizer is None else float(optimizer.learning_rate)

        elements, rows = self._place()
        # A fused op's buffer requires grad only so that autograd records the lookup; it never gets
        # a .grad.
        self._flat: Tensor
        self._kept: list[Tensor]
        self._flat, self._kept = self._allocate(elements, rows, device, zeros)

        # Steps of each table, always on the CPU: the factors that depend on them are computed
        # there.
        counted = len(spec.tables) if optimizer is not None and optimizer.counts_steps else 0
        self._counts = torch.zeros(counted, dtype=torch.float32)
        self._bind()

    # --- what a subclass defines

    @abstractmethod
    def _place(self) -> tuple[int, int]:
        """Lay out the buffer: set ``_table_places``; return its numbers of elements and rows."""

    def _allocate(
        self,
        elements: int,
        rows: int,
        device: torch.device,
        zeros: Callable[..., Tensor] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Zeros for all tables and each state, one number for each element or for each row."""
        states = self._state_specs
        zeros = zeros or partial(torch.zeros, device=device)
        row_states = sum(state.rowwise for state in states)
        element_bytes = self.spec.dtype.itemsize + 4 * (len(states) - row_states)
        needed = [
            (table.name, table.rows, table.columns, element_bytes * stride + 4 * row_states)
            for table, (_, _, stride) in zip(self.spec.tables, self._table_places, strict=True)
        ]

        with memory_of_tables(needed, _TOO_LARGE):
            # In float32 whatever the rows are: a sum in 16 bits soon stops to grow.
            state_buffers = [
                zeros(rows if state.rowwise else elements, dtype=torch.float32) for state in states
            ]
            return zeros(elements, dtype=self.spec.dtype), state_buffers

    def _bind_kernel(self) -> None:
        """Prepare what ``_lookup`` needs from the buffers; called again when they move."""

    @abstractmethod
    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Checked input -> pooled [B, sum of D], or [N, D] without pooling."""

    @property
    def kernel(self) -> str:
        """Name of the kernel really used, for example ``fbgemm.rowwise_adagrad``."""
        return f"{self._backend}.{'dense' if self.optimizer is None else self.optimizer.kind}"

    # --- what a caller uses

    def forward(self, values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Ids [N], offsets [F*B+1], weights [N] or None -> [B, sum of D]; unpooled -> [N, D]."""
        if (offsets.numel() - 1) % len(self.spec.feature_tables) or values.is_floating_point():
            raise ValueError(_describe_bad_input(self.spec, values, offsets))
        if (weights is not None) != self.spec.weighted:
            expected, got = ("weights", "none") if self.spec.weighted else ("no weights", "some")
            raise ValueError(
                f"the group of tables {self.spec.names} takes {expected}, and the batch has {got}"
            )

        if values.dtype != offsets.dtype:  # kernels take both as int32 or both as int64
            values = values.long()
            offsets = offsets.long()
        # What a kernel's sum or mean is not, enters the weights: sqrtn, and the divisor of a
        # weighted mean. That is the bag's length, not the sum of the weights, and fbgemm's backward
        # forgets it.
        if self._pooling != self.spec.pooling:
            weights = bag_weights(self.spec.pooling, offsets, weights, values.numel())
        factors = None if weights is None else weights.detach()
        pooled = self._lookup(values, offsets, factors)

        if not torch.is_grad_enabled():
            return pooled
        if self.gradient_listener is not None:
            batch = PooledBatch(
                values, offsets, factors, self._pooling == "mean", self.spec.feature_tables
            )
            pooled = ReportedLookup.apply(pooled, self, batch)
        if weights is not None and weights.requires_grad:
            pooled = WeightsGradient.apply(pooled, weights, self, values, offsets)
        return cast(Tensor, pooled)

    def flush(self) -> None:
        """Write rows that are stored elsewhere into the tables; here none are."""

    def prefetch(self, values: Tensor, offsets: Tensor) -> Future[None] | None:
        """Bring a coming batch's rows into memory, given its ids and offsets; a no-op here."""

    def table_weights(self) -> list[Tensor]:
        """Live weights of each table, [R, D], in the order of ``spec.tables``."""
        return list(self._tables)

    def optimizer_state(self) -> list[dict[str, Tensor]]:
        """Live state of each table by the names of ``OptimizerSpec.states``, and ``step``."""
        names = [state.name for state in self._state_specs]
        by_name = [dict(zip(names, states, strict=True)) for states in self._states]
        for state, count in zip(by_name, self._counts, strict=False):
            state["step"] = count
        return by_name

    def autograd_leaf(self) -> Tensor:
        """The tensor by which autograd records a fused lookup; its gradient is always None."""
        return self._flat

    def rows_at(self, table: int, ids: Tensor) -> Tensor:
        """Rows of a table as they are now, ``[N, D]``."""
        return self._tables[table].index_select(0, ids)

    def table_states(self) -> list[tuple[Tensor, ...]]:
        """The states of each table, [R] or [R, D], ordered as ``OptimizerSpec.states``."""
        return list(self._states)

    @torch.no_grad()
    def next_steps(self) -> list[UpdateStep]:
        """The update settings of each table for a batch looked up now; counts the batch."""
        rule = self.optimizer
        if rule is None:
            return []
        # Replicas of a table take the same steps, and so round their rows alike.
        self._rounding_seed += rule.stochastic_rounding
        step = UpdateStep(rule, self._learning_rate, seed=self._rounding_seed)
        if not rule.counts_steps:
            return [step] * len(self._tables)
        self._counts += 1
        return [step._replace(number=number) for number in self._counts.tolist()]

    @property
    def learning_rate(self) -> float:
        """Rate that the next forward hands to its update; settable."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = require_finite("learning_rate", value, 0)

    # --- how the views stay in the buffers

    def _bind(self) -> None:
        """Point every view into the buffers, after these moved or were copied or unpickled."""
        self._flat = self._flat.detach().requires_grad_(self.optimizer is not None)
        flat = self._flat.detach()
        tables = range(len(self.spec.tables))
        views = [self._view(flat, table, False) for table in tables]
        self._states = [
            tuple(
                self._view(buffer, table, state.rowwise)
                for buffer, state in zip(self._kept, self._state_specs, strict=True)
            )
            for table in tables
        ]

        if self.optimizer is None:
            for index, view in enumerate(views):
                name = f"weight_{index}"
                parameter = self._parameters.get(name)
                if parameter is None or parameter.device != view.device:
                    self.register_parameter(name, nn.Parameter(view))
                else:
                    parameter.data = view
            views = list[Tensor](self.parameters(recurse=False))

        self._tables = views
        self._bind_kernel()

    def _view(self, buffer: Tensor, table: int, rowwise: bool) -> Tensor:
        """What belongs to one table: [R] of a buffer with one number a row, else [R, D]."""
        rows = self.spec.tables[table].rows
        columns = self.spec.tables[table].columns
        start, row, stride = self._table_places[table]
        if rowwise:
            return buffer[row : row + rows]
        return buffer[start : start + rows * stride].view(rows, stride)[:, :columns]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableBatch:
        """Move the buffers (``.to``, ``.share_memory``); the views follow them."""
        flat = fn(self._flat.detach())
        if flat.dtype != self.spec.dtype:
            raise ValueError(
                f"tables {self.spec.names} cannot become {flat.dtype}: use {self.spec.dtype}"
            )

        self._flat = flat
        before = self._kept
        self._kept = [fn(buffer) for buffer in before]
        for old, new in zip(before, self._kept, strict=True):
            # to_empty gives memory as it comes, and state begins with zeros
            if old.is_meta and not new.is_meta:
                new.zero_()

        gradients = [
            None if own.grad is None else fn(own.grad) for own in self.parameters(recurse=False)
        ]
        self._bind()
        for own, gradient in zip(self.parameters(recurse=False), gradients, strict=True):
            own.grad = gradient
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._bind()


def _describe_bad_input(spec: GroupSpec, values: Tensor, offsets: Tensor) -> str:
    if values.is_floating_point():
        return f"ids of tables {spec.names} are {values.dtype}: pass int32 or int64 ids"
    features = len(spec.feature_tables)
    return (
        f"{offsets.numel()} offsets do not fit {features} features of tables {spec.names}: "
        f"expected features * batch + 1, that is 1 more than a multiple of {features}"
    )
