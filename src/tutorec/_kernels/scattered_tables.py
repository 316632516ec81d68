"""Tables in separate memory, looked up or updated in one call.

A collection keeps each table as a parameter of its own, so that it has a name and a place in
``state_dict``. fbgemm's operators take one buffer, and of that only where each table begins: table
t is read at ``buffer + offsets[t]``. So the first table stands for the buffer, and an offset is the
distance in memory from the first table to table t. It may be negative; what lies in between is
never touched. The CPU and the CUDA operators are different functions with the same idea.

Memory can move (``weight.data = ...``, ``load_state_dict(assign=True)``), so addresses are read at
each call; what is derived from them is kept for the next call with the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend
from tutorec._kernels.specs import FBGEMM_KINDS, UpdateStep, fbgemm_cpu_columns
from tutorec._kernels.tbe_layout import PooledBatch

__all__ = ["ScatteredTables", "address_tables"]

# fbgemm's codes of the pooling modes
_SUM = 0
_MEAN = 1
_FP32_OUTPUT = 0
_INT32_BITS = 31
_CUDA_COLUMNS = 2048  # the widest rows that fbgemm's CUDA kernels train
_CUDA_WORD = 16  # bytes that they read at once, from such addresses only
# Elements of the rows that a batch moves in a table, at most. With more, torch's element-wise
# Adagrad is the faster one: measured on one thread, it takes 1.3 times as long as fbgemm's with a
# quarter of these, as long here, and 0.6 to 0.9 times as long with more.
_ELEMENTS_PER_TABLE = 1 << 16
_PLAIN = {Tensor, nn.Parameter}
_DTYPES = {torch.float32, torch.float16}
# Mapped over the tables of every batch, in which a loop would cost more than a small lookup.
_facts = attrgetter("is_cpu", "dtype", "shape")
_is_contiguous = Tensor.is_contiguous


class _TableAlone(NamedTuple):
    """One of the tables, of f features: as ``_Geometry``, with the table at distance 0.

    Attributes:
        first: Its first feature.
        end: The feature after its last.
        starts: Zeros [f].
        columns: Where its features are in a result for all tables [f + 1].
        rows: Its rows, behind a 0 for each feature [f + 1].
        placements: Zeros [f].
    """

    first: int
    end: int
    starts: Tensor
    columns: Tensor
    rows: Tensor
    placements: Tensor


@dataclass(frozen=True)
class _Geometry:
    """The operators' integers for a set of tables, one entry for each feature.

    Attributes:
        starts: Distance from the first table to each feature's table, in elements [F].
        columns: Running sum of the features' widths [F + 1].
        total: Sum of the widths.
        widest: The largest width.
        rows: Running sum of rows, equal for neighbours that share a table [F + 1].
        bits: That count the rows of all tables.
        mixed: Whether tables have different widths.
        grouped: Whether features of one table are neighbours, as the exact updates need.
        placements: Zeros: every table is where the operator runs [F].
    """

    starts: Tensor
    columns: Tensor
    total: int
    widest: int
    rows: Tensor
    bits: int
    mixed: bool
    grouped: bool
    placements: Tensor

    @cached_property
    def alone(self) -> list[_TableAlone]:
        """The operators' integers for each table by itself; features of one are neighbours."""
        rows = self.rows.tolist()
        ends = [feature + 1 for feature, (row, after) in enumerate(pairwise(rows)) if row < after]
        return [
            _TableAlone(
                first,
                end,
                torch.zeros_like(self.starts[first:end]),
                self.columns[first : end + 1],
                self.rows[first : end + 1] - rows[first],
                self.placements[first:end],
            )
            for first, end in pairwise([0, *ends])
        ]


@dataclass(frozen=True)
class ScatteredTables:
    """Tables [R, D] in separate memory, and each feature's table, for one ``address_tables`` call.

    Attributes:
        tables: The tables.
        first: The table of the first feature.
        geometry: Where the others are.

    Example:
        >>> import torch
        >>> tables = [torch.ones(3, 4), torch.full((2, 8), 10.0)]
        >>> scattered = address_tables(tables, feature_tables=(0, 1))
        >>> batch = PooledBatch(
        ...     torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]), None, False, (0, 1)
        ... )
        >>> scattered is None or scattered.pool(batch).sum().item() == 2 * 4 + 10 * 8
        True
    """

    tables: Sequence[Tensor]
    first: Tensor
    geometry: _Geometry

    def pool(self, batch: PooledBatch) -> Tensor:
        """Pooled rows of a batch [B, sum of D] in float32; no autograd."""
        geometry = self.geometry
        mode = _MEAN if batch.mean else _SUM
        ids = self._ids_of(batch)
        weights = _weights_of(batch)

        if self.first.is_cuda:
            from tutorec._kernels import scattered_cuda

            return scattered_cuda.look_up(self.first, geometry, ids, mode, weights)

        # Below the autograd keys: the operator has no derivative of its own, and none is wanted
        # here.
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fbgemm.split_embedding_codegen_forward_cpu.default(
                self.first.detach(),
                geometry.starts,
                geometry.columns,
                geometry.total,
                geometry.rows,
                *ids,
                mode,
                weights,
                _FP32_OUTPUT,
            )

    def step(
        self,
        grad: Tensor,
        batch: PooledBatch,
        states: Sequence[Sequence[Tensor]],
        step: UpdateStep,
    ) -> bool:
        """Move each row of a batch once, by fbgemm; on the CPU by SGD and both Adagrads.

        Args:
            grad: Of the pooled rows [B, sum of D].
            batch: What was looked up.
            states: What the rule keeps of each feature's table, in float32; nothing for SGD.
            step: The optimizer, its rate and its number.

        Returns:
            Whether it was done: not for other rules, nor for rows that are too wide or of 16 bits.
        """
        geometry = self.geometry
        rate = torch.tensor(step.rate)
        if not geometry.grouped or self.first.dtype != torch.float32:
            return False

        mode = _MEAN if batch.mean else _SUM
        ids = self._ids_of(batch)
        weights = _weights_of(batch)
        if self.first.is_cuda:
            from tutorec._kernels import scattered_cuda

            # A number for a whole row is read by itself.
            element_states = (tensor for state in states for tensor in state if tensor.dim() > 1)
            if step.rule.kind not in FBGEMM_KINDS["cuda"] or any(
                tensor.data_ptr() % _CUDA_WORD for tensor in element_states
            ):
                return False
            scattered_cuda.update(self.first, geometry, ids, mode, weights, grad, states, step)
            return True

        if step.rule.kind not in FBGEMM_KINDS["cpu"]:
            return False
        if geometry.widest > fbgemm_cpu_columns(step.rule.kind):
            return False

        if step.rule.kind == "adagrad":
            distinct = min(batch.values.numel(), int(geometry.rows[-1]))
            elements = distinct * geometry.total / len(batch.feature_tables)
            if elements > _ELEMENTS_PER_TABLE * len(geometry.alone):
                return False
            self._step_table_by_table(grad, batch, states, step)
            return True

        arguments = (
            grad.contiguous(),
            self.first.detach().view(-1),
            geometry.placements,
            geometry.starts,
            geometry.columns,
            geometry.widest,
            geometry.rows,
            geometry.bits,
            *ids,
            mode,
            weights,
            False,
        )
        if step.rule.kind == "sgd":
            torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu.default(
                *arguments, rate, _FP32_OUTPUT
            )
            return True

        rows = [state for (state,) in states]
        first = rows[0].data_ptr()
        starts = torch.tensor([(state.data_ptr() - first) // state.itemsize for state in rows])
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu.default(
            *arguments,
            rows[0],
            geometry.placements,
            starts,
            rate,
            step.rule.eps,
            # weight decay and its mode (both ignored on the CPU), maximum norm
            0.0,
            0,
            0.0,
            _FP32_OUTPUT,
        )
        return True

    def _step_table_by_table(
        self,
        grad: Tensor,
        batch: PooledBatch,
        states: Sequence[Sequence[Tensor]],
        step: UpdateStep,
    ) -> None:
        """Element-wise Adagrad on the CPU, a call for each table.

        The operator reads a row's state at the row's own offset, which is another table's memory
        unless the table is alone, at offset 0.
        """
        geometry = self.geometry
        samples = grad.shape[0]
        ids, offsets = self._ids_of(batch)
        weights = _weights_of(batch)
        mode = _MEAN if batch.mean else _SUM
        grad = grad.contiguous()
        rate = torch.tensor(step.rate)

        for alone in geometry.alone:
            table = self.tables[batch.feature_tables[alone.first]]
            (state,) = states[alone.first]
            torch.ops.fbgemm.split_embedding_backward_codegen_adagrad_cpu.default(
                grad,
                table.detach().view(-1),
                alone.placements,
                alone.starts,
                alone.columns,
                table.shape[1],
                alone.rows,
                geometry.bits,
                ids,
                offsets[alone.first * samples : alone.end * samples + 1],
                mode,
                weights,
                False,
                state.view(-1),
                alone.placements,
                alone.starts,
                rate,
                step.rule.eps,
                _FP32_OUTPUT,
            )

    def _ids_of(self, batch: PooledBatch) -> tuple[Tensor, Tensor]:
        """Ids and offsets in one dtype; on a GPU in one that numbers the rows of all tables."""
        values = batch.values
        offsets = batch.offsets
        wide = self.first.is_cuda and self.geometry.bits > _INT32_BITS
        if values.dtype != offsets.dtype or wide:
            values = values.long()
            offsets = offsets.long()
        return values.contiguous(), offsets.contiguous()


def address_tables(
    tables: Sequence[Tensor], feature_tables: Sequence[int]
) -> ScatteredTables | None:
    """The tables as fbgemm's operators can address them, or None where they cannot.

    They can under the fbgemm backend, in eager mode, on the CPU and on one GPU that its wheel
    serves, where all tables are contiguous, of one dtype (float32 or float16), and of widths that
    are multiples of 4.

    Args:
        tables: [R, D] each.
        feature_tables: For each feature the index of its table.
    """
    if (
        not feature_tables
        or torch.compiler.is_compiling()
        or is_tracing()
        or backend().name != "fbgemm"
    ):
        return None
    if not (_PLAIN.issuperset(map(type, tables)) and all(map(_is_contiguous, tables))):
        return None

    try:
        addresses = tuple(map(Tensor.data_ptr, tables))
    except RuntimeError:  # a tensor without memory, such as one under a transform of torch.func
        return None
    device = tables[feature_tables[0]].device
    if device.type != "cpu" and not (
        backend().serves(device.type) and all(table.device == device for table in tables)
    ):
        return None

    geometry = _geometry(tuple(feature_tables), addresses, tuple(map(_facts, tables)), device)
    if geometry is None:
        return None
    return ScatteredTables(tables, tables[feature_tables[0]], geometry)


@lru_cache(maxsize=64)
def _geometry(
    features: tuple[int, ...],
    addresses: tuple[int, ...],
    facts: tuple[tuple[bool, torch.dtype, torch.Size], ...],
    device: torch.device,
) -> _Geometry | None:
    """The operators' integers for tables at these addresses; None where they cannot take them."""
    dtypes = {dtype for _, dtype, _ in facts}
    if (
        len(dtypes) > 1
        or not _DTYPES.issuperset(dtypes)
        or any(on_cpu != (device.type == "cpu") for on_cpu, _, _ in facts)
    ):
        return None

    itemsize = dtypes.pop().itemsize
    shapes = [shape for _, _, shape in facts]
    used = sorted(set(features))
    if any(not shapes[table][0] or shapes[table][1] % 4 for table in used):
        return None
    first = addresses[features[0]]
    if any((addresses[table] - first) % itemsize for table in used):
        return None
    widths = [shapes[table][1] for table in features]
    if device.type == "cuda" and (
        max(widths) > _CUDA_COLUMNS or any(addresses[table] % _CUDA_WORD for table in used)
    ):
        return None

    # Neighbours that look up one table share its rows; that is how the updates see that they belong
    # together.
    differ = [addresses[left] != addresses[right] for left, right in pairwise(features)]
    steps = [shapes[table][0] * other for table, other in zip(features, differ, strict=False)]
    rows = [*accumulate([*steps, shapes[features[-1]][0]], initial=0)]

    return _Geometry(
        starts=torch.tensor(
            [(addresses[table] - first) // itemsize for table in features], device=device
        ),
        columns=torch.tensor([*accumulate(widths, initial=0)], dtype=torch.int32, device=device),
        total=sum(widths),
        widest=max(widths),
        rows=torch.tensor(rows, device=device),
        bits=int(math.log2(rows[-1]) + 1),
        mixed=len(set(widths)) > 1,
        grouped=1 + sum(differ) == len({addresses[table] for table in used}),
        placements=torch.zeros(len(features), dtype=torch.int32, device=device),
    )


def _weights_of(batch: PooledBatch) -> Tensor | None:
    return None if batch.weights is None else batch.weights.float()
