"""Table-batched lookups in plain torch: one ``embedding_bag`` for each width, no loop over ids.

Runs wherever torch runs. Tables of one width follow one another and are one matrix [rows, D];
an id becomes a row of that matrix by adding where its table begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from tutorec._kernels.lookup_nodes import Cut, as_one_buffer
from tutorec._kernels.specs import UpdateStep
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_layout import column_slices, pick_columns, select_features
from tutorec._kernels.tbe_update import apply_update, sort_rows

__all__ = ["TorchTableBatchedEmbeddingBags"]


@dataclass
class WidthBlock:
    """The tables of one width and the features that read them.

    Attributes:
        tables: Indices of the tables, in the order of their rows.
        features: Indices of the features that read them, in input order.
        cuts: Position of each table in ``matrix``.
        columns: D.
        matrix: All rows [rows, D], a view of the buffer.
        states: Of these rows, [rows] or [rows, D] each, views of the buffers of state.
        base: First row of each feature's table in ``matrix`` [features]; None where all are 0.
    """

    tables: list[int]
    features: list[int]
    cuts: list[Cut]
    columns: int
    matrix: Tensor
    states: list[Tensor]
    base: Tensor | None


class TorchTableBatchedEmbeddingBags(TableBatch):
    """Fused and dense table-batched lookups in plain torch, on any device."""

    _backend = "torch"

    def _place(self) -> tuple[int, int]:
        tables = self.spec.tables
        table_places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(tables)
        start = row = 0
        for table in sorted(range(len(tables)), key=lambda index: tables[index].columns):
            table_places[table] = (start, row, tables[table].columns)
            start += tables[table].rows * tables[table].columns
            row += tables[table].rows

        self._table_places = table_places
        return start, row

    def _bind_kernel(self) -> None:
        spec = self.spec
        flat = self._flat.detach()
        table_places = self._table_places
        by_width: dict[int, list[int]] = {}
        for table in sorted(range(len(table_places)), key=lambda index: table_places[index][:2]):
            by_width.setdefault(spec.tables[table].columns, []).append(table)
        self._blocks: list[WidthBlock] = []

        for columns, tables in by_width.items():
            features = [index for index, table in enumerate(spec.feature_tables) if table in tables]
            if not features:
                continue

            start, row, _ = table_places[tables[0]]
            rows = sum(spec.tables[table].rows for table in tables)
            cuts = [
                (table_places[table][0] - start, spec.tables[table].rows, columns, columns)
                for table in tables
            ]
            base = [table_places[spec.feature_tables[feature]][1] - row for feature in features]
            matrix = flat[start : start + rows * columns].view(rows, columns)
            shifts = torch.tensor(base, device=flat.device) if any(base) else None
            states = [
                buffer[row : row + rows]
                if state.rowwise
                else buffer[start : start + rows * columns].view(rows, columns)
                for buffer, state in zip(self._kept, self._state_specs, strict=True)
            ]
            self._blocks.append(WidthBlock(tables, features, cuts, columns, matrix, states, shifts))

        order = [feature for block in self._blocks for feature in block.features]
        self._slices = column_slices(order, spec.feature_columns, spec.feature_columns)

    def _lookup(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        total = len(self.spec.feature_tables)
        # Without gradients there is no backward, and the batch is none to be counted.
        steps = self.next_steps() if torch.is_grad_enabled() else []
        outputs = []
        for block in self._blocks:
            batch = values, offsets, weights
            if len(block.features) < total:
                batch = select_features(values, offsets, weights, block.features, total)
            outputs.append(self._lookup_block(block, steps, *batch))

        if len(outputs) == 1:
            return outputs[0]
        return pick_columns(torch.cat(outputs, dim=1), self._slices)

    def _lookup_block(
        self,
        block: WidthBlock,
        steps: Sequence[UpdateStep],
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """Look up the features of one width: [B, features * D], or [N, D] without pooling."""
        features = len(block.features)
        batch = (offsets.numel() - 1) // features
        if block.base is not None and batch:
            counts = offsets[::batch].diff()
            # In int64, whatever the ids are: the rows of all tables together may be more than int32
            # can count.
            ids = ids + block.base.repeat_interleave(counts, output_size=ids.numel())
            offsets = offsets.long()
        if weights is not None and weights.dtype != torch.float32:
            weights = weights.float()

        mode = self._pooling
        if self.optimizer is None:
            tables = [self._tables[table] for table in block.tables]
            flat = as_one_buffer(block.matrix.view(-1), block.cuts, tables)
            rows = _pool(flat.view(block.matrix.shape), ids, offsets, weights, mode)
        else:
            own = [steps[table] for table in block.tables] if steps else []
            update = _BlockUpdate(block, own, mode)
            rows = cast(Tensor, _FusedLookup.apply(self._flat, update, ids, offsets, weights))

        if mode == "none":
            return rows
        return (
            rows.view(features, batch, block.columns)
            .transpose(0, 1)
            .reshape(batch, features * block.columns)
        )


@dataclass(frozen=True)
class _BlockUpdate:
    """What the backward of a forward needs: its rows, and each table's settings at that time."""

    block: WidthBlock
    steps: Sequence[UpdateStep]
    pooling: str

    def apply(self, grad: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        """Sum the gradients of equal rows, and move each row once."""
        grad = self.steps[0].rule.limited(grad)
        bags = None
        if self.pooling != "none":
            lengths = offsets.diff()
            bags = torch.repeat_interleave(lengths, output_size=ids.numel())
            if self.pooling == "mean":
                grad = grad / lengths.clamp(min=1).unsqueeze(1)
        block = self.block
        grad = grad.contiguous()
        rows = block.matrix.shape[0]
        first = self.steps[0]

        if all(step == first for step in self.steps):
            groups = sort_rows(ids, bags, weights, rows)
            apply_update(block.matrix, block.states, grad, groups, first)
            return

        # Some tables were loaded at another step: each is updated by itself.
        for (start, table_rows, stride, _), step in zip(block.cuts, self.steps, strict=True):
            begin = start // stride
            own = ((ids >= begin) & (ids < begin + table_rows)).nonzero().view(-1)
            own_bags = own if bags is None else bags[own]
            groups = sort_rows(ids[own], own_bags, None if weights is None else weights[own], rows)
            apply_update(block.matrix, block.states, grad, groups, step)


class _FusedLookup(torch.autograd.Function):
    """Pool rows; the backward updates each of them once."""

    @staticmethod
    def forward(
        ctx: Any,
        hook: Tensor,
        update: _BlockUpdate,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        # ``hook`` is the buffer: it requires grad, so that autograd records this call, and gets
        # none. The rows are not saved for the backward, which changes them: two forwards may wait
        # for their backwards.
        ctx.update = update
        ctx.save_for_backward(ids, offsets, weights)
        return _pool(update.block.matrix, ids, offsets, weights, update.pooling)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (grad,) = grads
        ids, offsets, weights = ctx.saved_tensors
        if ids.numel():
            ctx.update.apply(grad, ids, offsets, weights)
        return None, None, None, None, None


def _pool(
    matrix: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, mode: str
) -> Tensor:
    """Rows of one matrix pooled over bags [F*B, D], or looked up one by one [N, D]."""
    if matrix.dtype != torch.float32:
        # 16-bit rows are summed in float32: each id becomes a row of its own.
        matrix = F.embedding(ids, matrix).float()
        ids = torch.arange(ids.numel(), dtype=ids.dtype, device=ids.device)

    if mode == "none":
        return F.embedding(ids, matrix)
    return F.embedding_bag(
        ids, matrix, offsets, mode=mode, per_sample_weights=weights, include_last_offset=True
    )
