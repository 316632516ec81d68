"""Table-batched lookups through fbgemm's raw CPU operators.

fbgemm's own Python module around these operators costs 200 us a call and half a second of import.
The operators themselves need a flat buffer and a few integers for each feature, which are computed
here once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tutorec._kernels.adagrad_stalls import updates_in_torch
from tutorec._kernels.lookup_nodes import as_one_buffer
from tutorec._kernels.specs import GroupSpec, UpdateStep
from tutorec._kernels.table_steps import step_tables
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_layout import PooledBatch, column_slices, pick_columns, select_features

__all__ = [
    "FbgemmCpuDenseTables",
    "FbgemmCpuTables",
    "FbgemmTableBatch",
]

# fbgemm's codes of the pooling modes and of the output type.
_SUM = 0
_MEAN = 1
_FP32_OUTPUT = 0


def _stride(columns: int) -> int:
    """Width of a row in the buffer: the next multiple of 4, which the kernels require."""
    return -(-columns // 4) * 4


def _feature_order(spec: GroupSpec) -> list[int]:
    """Features by table, in order of first use: the backward needs those of a table in sequence."""
    features = range(len(spec.feature_tables))
    first = dict(zip(spec.feature_tables[::-1], features[::-1], strict=True))
    return sorted(features, key=lambda feature: first[spec.feature_tables[feature]])


class FbgemmTableBatch(TableBatch):
    """Base of fbgemm's operators: the layout of the buffer, and the order of a batch.

    Features of one table are in sequence, rows are padded to multiples of 4 columns, and rows that
    are not pooled are looked up as bags of one id in one table of all rows.
    """

    _backend = "fbgemm"
    _device_type: str | None = None

    def _place(self) -> tuple[int, int]:
        spec = self.spec
        self._order = _feature_order(spec)
        self._in_order = self._order == list(range(len(self._order)))

        # By first use, as the features are; tables without features come last.
        stored = dict.fromkeys([*spec.feature_tables, *range(len(spec.tables))])
        layout: list[tuple[int, int, int]] = [(0, 0, 0)] * len(spec.tables)
        start = 0
        row = 0
        for table in stored:
            stride = _stride(spec.tables[table].columns)
            layout[table] = (start, row, stride)
            # At least one row: fbgemm distinguishes tables by their first rows.
            rows = max(spec.tables[table].rows, 1)
            start += rows * stride
            row += rows

        self._table_places = layout
        strides = [layout[table][2] for table in spec.feature_tables]
        self._slices = column_slices(self._order, spec.feature_columns, strides)
        self._elements = start
        self._rows = row
        return start, row

    def _check_device_type(self) -> None:
        """Raise ValueError if the tables move to another type of device."""
        device = self._flat.device
        self._device_type = self._device_type or device.type
        if device.type != self._device_type:
            raise ValueError(
                f"tables {self.spec.names} were built with "
                f"{self.kernel} and cannot move to {device}: build them there with "
                f"build_table_batch(..., device={str(device)!r})"
            )

    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        pooled = self._call(*self._arranged(values, offsets, weights))
        if self.spec.pooling == "none":
            return pooled[:, : self.spec.feature_columns[0]]
        return pick_columns(pooled, self._slices) if self._slices else pooled

    def _arranged(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The batch for ``_call``: features in the buffer's order, or each id as its own bag."""
        if self.spec.pooling != "none":
            if weights is not None and weights.dtype != torch.float32:
                weights = weights.float()
            if self._in_order:
                return values, offsets, weights
            return select_features(values, offsets, weights, self._order, len(self._order))

        # The CPU operators can only pool.
        batch = (offsets.numel() - 1) // len(self.spec.feature_tables)
        if self._row_base is not None and batch:
            values = values + self._row_base.repeat_interleave(
                offsets[::batch].diff(), output_size=values.numel()
            )
        bags = torch.arange(values.numel() + 1, dtype=values.dtype, device=values.device)
        return values, bags, None

    def _bind_kernel(self) -> None:
        self._check_device_type()
        rows = [self._table_places[table][1] for table in self.spec.feature_tables]
        self._row_base = torch.tensor(rows, device=self._flat.device) if any(rows) else None

    @abstractmethod
    def _call(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Features in the buffer's order -> pooled, padded columns included."""


class _RawOperators(FbgemmTableBatch):
    """Base of the operators that are called directly: the integers that describe the buffer."""

    def _bind_kernel(self) -> None:
        super()._bind_kernel()
        device = self._flat.device
        layout = [self._table_places[self.spec.feature_tables[feature]] for feature in self._order]
        # Unused tables are stored after the used ones: the first of them ends the last used one.
        last = max(row for _, row, _ in layout)
        end = min((row for _, row, _ in self._table_places if row > last), default=self._rows)
        if self.spec.pooling == "none":
            layout = [(0, 0, layout[0][2])]

        self._cuts = [
            (start, table.rows, stride, table.columns)
            for table, (start, _, stride) in zip(self.spec.tables, self._table_places, strict=True)
        ]
        starts = [start for start, _, _ in layout]
        rows = [row for _, row, _ in layout]
        strides = [stride for _, _, stride in layout]

        self._weights_offsets = torch.tensor(starts, device=device)
        self._row_offsets = torch.tensor(rows, device=device)
        self._placements = torch.zeros(len(layout), dtype=torch.int32, device=device)
        self._geometry = (
            torch.tensor([*accumulate(strides, initial=0)], dtype=torch.int32, device=device),
            sum(strides),
            max(strides),
            torch.tensor([*rows, end], device=device),
            int(math.log2(self._rows) + 1),
        )
        self._pooling_code = _MEAN if self._pooling == "mean" else _SUM


class FbgemmCpuTables(_RawOperators):
    """Fused: backward sums the gradients of equal ids and updates their rows."""

    def _get_name(self) -> str:
        """The fbgemm class with these operators, so that modules print as TorchRec's do."""
        return "SplitTableBatchedEmbeddingBagsCodegen"

    def _call(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        assert self.optimizer is not None, "a fused operator is built with an optimizer"
        if self._flat.dtype != torch.float32 and not self.optimizer.rounds_once:
            return self._updated_in_torch(self._batch(values, offsets, weights))

        limit = self.optimizer.max_gradient
        head = (
            self._flat,
            self._placements,
            self._weights_offsets,
            *self._geometry,
            values,
            offsets,
            self._pooling_code,
            weights,
            None,  # feature_requires_grad: every feature is trained
            limit is not None,  # gradient_clipping
            limit or 0.0,  # max_gradient
            False,  # stochastic_rounding
        )
        ops = torch.ops.fbgemm
        rate = self._learning_rate

        if self.optimizer.kind == "sgd":
            return ops.split_embedding_codegen_lookup_sgd_function_cpu(*head, rate, _FP32_OUTPUT)

        if self.optimizer.kind == "adagrad":
            # Its state has the layout of the rows.
            state = (self._kept[0], self._placements, self._weights_offsets)
            return ops.split_embedding_codegen_lookup_adagrad_function_cpu(
                *head, *state, self.optimizer.eps, rate, _FP32_OUTPUT
            )

        batch = self._batch(values, offsets, weights)
        if self._flat.is_cpu and updates_in_torch(self.optimizer.kind, batch):
            return self._updated_in_torch(batch)

        state = (self._kept[0], self._placements, self._row_offsets)
        # All arguments are passed: one of the operator's default values has the wrong type. After
        # the rate: weight decay and its mode (both ignored on the CPU), maximum norm, output type.
        return ops.split_embedding_codegen_lookup_rowwise_adagrad_function_cpu(
            *head, *state, self.optimizer.eps, rate, 0.0, 0, 0.0, _FP32_OUTPUT
        )

    def _updated_in_torch(self, batch: PooledBatch) -> Tensor:
        # Without gradients there is no backward, and the batch is not counted.
        steps = self.next_steps() if torch.is_grad_enabled() else []
        return _UpdatedInTorch.apply(self._flat, self, batch, steps)  # pyright: ignore[reportReturnType]

    def _batch(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> PooledBatch:
        """A batch in the buffer's order; unpooled rows are bags of one table of all rows."""
        tables: tuple[int, ...] = (0,)
        if self.spec.pooling != "none":
            tables = tuple(self.spec.feature_tables[feature] for feature in self._order)
        return PooledBatch(values, offsets, weights, self._pooling == "mean", tables)

    def _pool(self, batch: PooledBatch) -> Tensor:
        """Pooled rows, padded columns included; no autograd."""
        columns, total, _, rows, _ = self._geometry
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fbgemm.split_embedding_codegen_forward_cpu.default(
                self._flat.detach(),
                self._weights_offsets,
                columns,
                total,
                rows,
                batch.values,
                batch.offsets,
                self._pooling_code,
                batch.weights,
                _FP32_OUTPUT,
            )

    def _step(self, batch: PooledBatch, grad: Tensor, steps: Sequence[UpdateStep]) -> None:
        """Update the rows of a batch once, by the rules in torch."""
        tables = self._tables
        states = self._states
        if self.spec.pooling == "none":
            tables = [self._flat.detach().view(self._rows, -1)]
            states = [tuple(self._kept)]

        grad = steps[0].rule.limited(grad)
        step_tables([table.detach() for table in tables], states, batch, grad, steps[: len(tables)])


class _UpdatedInTorch(torch.autograd.Function):
    """fbgemm's lookup, and torch's update in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        op: FbgemmCpuTables,
        batch: PooledBatch,
        steps: Sequence[UpdateStep],
    ) -> Tensor:
        ctx.op = op
        ctx.batch = batch
        ctx.steps = steps
        return op._pool(batch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.op._step(ctx.batch, grads[0], ctx.steps)
        return None, None, None, None


class FbgemmCpuDenseTables(_RawOperators):
    """Dense: the backward fills the gradient of each table's Parameter."""

    def _get_name(self) -> str:
        """The fbgemm class with this operator, so that modules print as TorchRec's do."""
        return "DenseTableBatchedEmbeddingBagsCodegen"

    def _call(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        flat = as_one_buffer(self._flat, self._cuts, self._tables)
        # On the CPU the operator records its own gradient and registers no autograd kernel, which
        # makes the dispatcher warn at each backward; below the autograd keys it is called directly.
        with torch._C._AutoDispatchBelowAutograd() if flat.is_cpu else nullcontext():
            return torch.ops.fbgemm.dense_embedding_codegen_lookup_function(
                flat,
                self._weights_offsets,
                *self._geometry,
                values,
                offsets,
                self._pooling_code,
                weights,
                None,
            )
