"""Tables that lie apart, looked up in one call.

A collection keeps each table as a parameter of its own, so that it has a name and a place in ``state_dict``. fbgemm's
CPU operators want all tables in one buffer, but they ask no more of it than where each table begins: table t is read at
``buffer + offsets[t]``. So the first table stands for the buffer, and an offset is the distance in memory from the
first table to table t. It may be negative, and whatever lies in between is never touched.

Memory can move (``weight.data = ...``, ``load_state_dict(assign=True)``), so addresses are read at each call; what is
derived from them is kept for the next call with the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend

__all__ = ["SeparateTables", "find_tables", "one_call_pays"]

_SUM, _MEAN = 0, 1  # fbgemm's codes of the pooling modes
_FP32_OUTPUT = 0
_PLAIN = {Tensor, nn.Parameter}
_DTYPES = {torch.float32, torch.float16}
# Mapped over the tables of every batch, in which a loop would cost more than a small lookup.
Facts = tuple[bool, torch.dtype, torch.Size]
_facts = attrgetter("is_cpu", "dtype", "shape")
_is_contiguous = Tensor.is_contiguous
Batch = tuple[Tensor, Tensor, Tensor | None, bool]  # ids [N], offsets [F*B+1], weights [N] or None, mean or else sum
# The CPU lookup runs on one thread, a call per table on all of them. Calling, waking the threads and waiting for them
# costs about what the lookup of so many ids of 64 columns does (30 us and 20 ns, 2 cores).
_IDS_PER_CALL = 1500


@dataclass(frozen=True)
class _Geometry:
    """What the operators are told about a set of tables, one entry for each feature.

    Attributes:
        starts: Distance from the first table to each feature's table, in elements [F].
        columns: Running sum of the features' widths [F + 1].
        total: Sum of the widths.
        widest: The largest width.
        rows: Running sum of rows, equal for neighbours that share a table [F + 1].
        bits: That count the rows of all tables.
        grouped: Whether features of one table are neighbours, as the exact updates need.
        placements: Zeros: every table is in host memory [F].
    """

    starts: Tensor
    columns: Tensor
    total: int
    widest: int
    rows: Tensor
    bits: int
    grouped: bool
    placements: Tensor


# What was asked last of tables that begin at an address, and the answer.
_last: dict[int, tuple[tuple[tuple[int, ...], list[int], list[Facts]], _Geometry | None]] = {}
_MOST_REMEMBERED = 64


@dataclass(frozen=True)
class SeparateTables:
    """Tables [R, D] that lie apart, and the table of each feature; ``find_tables`` makes it, for one call.

    Attributes:
        first: The table of the first feature.
        geometry: Where the others are.

    Example:
        >>> import torch
        >>> tables = [torch.ones(3, 4), torch.full((2, 8), 10.0)]
        >>> found = find_tables(tables, feature_tables=(0, 1))
        >>> ids, offsets = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3])
        >>> found is None or found.pool(ids, offsets, None, mean=False).sum().item() == 2 * 4 + 10 * 8
        True
    """

    first: Tensor
    geometry: _Geometry

    def pool(self, values: Tensor, offsets: Tensor, weights: Tensor | None, mean: bool) -> Tensor:
        """Ids [N], offsets [F*B+1] (feature-major), weights [N] or None -> [B, sum of D] in float32; no autograd."""
        here, weights = self.geometry, None if weights is None else weights.float()
        values, offsets = _one_dtype(values, offsets)
        # Below the autograd keys: the operator has no derivative of its own, and none is wanted here.
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.fbgemm.split_embedding_codegen_forward_cpu.default(
                self.first.detach(),
                *(here.starts, here.columns, here.total, here.rows, values, offsets),
                *(_MEAN if mean else _SUM, weights, _FP32_OUTPUT),
            )

    @torch.no_grad()
    def step_sgd(self, grad: Tensor, batch: Batch, rate: float) -> None:
        """Move each row of a batch by ``-rate`` times its summed gradient; ``grad`` is [B, sum of D]."""
        torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu.default(
            *self._arguments(grad, batch), torch.tensor(rate), _FP32_OUTPUT
        )

    @torch.no_grad()
    def step_rowwise_adagrad(
        self, grad: Tensor, batch: Batch, states: Sequence[Tensor], rate: float, eps: float
    ) -> None:
        """The same with row-wise Adagrad; ``states`` are [R] or [R, 1] in float32, one for each feature."""
        first = states[0].data_ptr()
        starts = torch.tensor([(state.data_ptr() - first) // state.itemsize for state in states])
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu.default(
            *self._arguments(grad, batch),
            *(states[0].view(-1), self.geometry.placements, starts, torch.tensor(rate), eps),
            *(0.0, 0, 0.0, _FP32_OUTPUT),  # weight decay and its mode (both ignored on the CPU), maximum norm
        )

    def _arguments(self, grad: Tensor, batch: Batch) -> tuple[object, ...]:
        """What the updates have in common."""
        values, offsets, weights, mean = batch
        values, offsets = _one_dtype(values, offsets)
        weights, here = None if weights is None else weights.float(), self.geometry
        return (
            *(grad.contiguous(), self.first.detach().view(-1), here.placements, here.starts, here.columns),
            *(here.widest, here.rows, here.bits, values, offsets, _MEAN if mean else _SUM, weights, False),
        )


def find_tables(tables: Sequence[Tensor], feature_tables: Sequence[int]) -> SeparateTables | None:
    """The tables as fbgemm's operators can address them, or None where they cannot.

    They can on the CPU under the fbgemm backend, in eager mode, where all tables are contiguous, of one dtype (float32
    or float16), and of widths that are multiples of 4.

    Args:
        tables: [R, D] each.
        feature_tables: For each feature the index of its table.
    """
    if not feature_tables or torch.compiler.is_compiling() or is_tracing() or backend().name != "fbgemm":
        return None
    if not (_PLAIN.issuperset(map(type, tables)) and all(map(_is_contiguous, tables))):
        return None
    try:
        places = list(map(Tensor.data_ptr, tables))
    except RuntimeError:  # a tensor without memory, such as one under a transform of torch.func
        return None
    asked = (tuple(feature_tables), places, list(map(_facts, tables)))
    known, geometry = _last.get(places[0], (None, None))
    if asked != known:  # comparing lists costs a tenth of hashing them
        geometry = _geometry(*asked)
        if len(_last) >= _MOST_REMEMBERED:
            _last.clear()
        _last[places[0]] = asked, geometry
    return None if geometry is None else SeparateTables(tables[feature_tables[0]], geometry)


def one_call_pays(features: int, ids: int) -> bool:
    """Whether one call for all features is faster than one parallel call for each.

    Args:
        features: F.
        ids: N, of all features.

    Example:
        >>> import torch
        >>> threads = torch.get_num_threads()
        >>> torch.set_num_threads(1)
        >>> one_call_pays(26, 1_000_000)
        True
        >>> torch.set_num_threads(2)
        >>> one_call_pays(26, 1_000_000), one_call_pays(26, 260)
        (False, True)
        >>> torch.set_num_threads(threads)
    """
    threads = torch.get_num_threads()
    return ids * (threads - 1) <= features * threads * _IDS_PER_CALL


def _geometry(features: tuple[int, ...], places: list[int], facts: list[Facts]) -> _Geometry | None:
    """The operators' integers for tables at these addresses; None where they cannot take them."""
    dtypes = {dtype for _, dtype, _ in facts}
    if len(dtypes) > 1 or not _DTYPES.issuperset(dtypes) or not all(on_cpu for on_cpu, _, _ in facts):
        return None
    itemsize, shapes = dtypes.pop().itemsize, [shape for _, _, shape in facts]
    used = sorted(set(features))
    if any(not shapes[table][0] or shapes[table][1] % 4 for table in used):
        return None
    first = places[features[0]]
    if any((places[table] - first) % itemsize for table in used):
        return None
    widths = [shapes[table][1] for table in features]
    # Neighbours that look up one table share its rows; that is how the updates see that they belong together.
    steps = [shapes[one][0] if places[one] != places[two] else 0 for one, two in pairwise(features)]
    rows = [*accumulate([*steps, shapes[features[-1]][0]], initial=0)]
    changes = 1 + sum(places[one] != places[two] for one, two in pairwise(features))
    return _Geometry(
        starts=torch.tensor([(places[table] - first) // itemsize for table in features]),
        columns=torch.tensor([*accumulate(widths, initial=0)], dtype=torch.int32),
        total=sum(widths),
        widest=max(widths),
        rows=torch.tensor(rows),
        bits=int(math.log2(rows[-1]) + 1),
        grouped=changes == len({places[table] for table in used}),
        placements=torch.zeros(len(features), dtype=torch.int32),
    )


def _one_dtype(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The operators take ids and offsets both as int32 or both as int64."""
    if values.dtype != offsets.dtype:
        if values.dtype == torch.int32:
            values = values.long()
        else:
            offsets = offsets.long()
    return values.contiguous(), offsets.contiguous()
