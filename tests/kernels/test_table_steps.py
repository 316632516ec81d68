"""The update without the lookup equals that of the fused lookup, on both backends."""

from __future__ import annotations

from itertools import product
from typing import Any, cast, get_args

import pytest
import torch
from pairwise import pairwise_cover
from torch import Tensor
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.specs import (
    GroupSpec,
    OptimizerKind,
    OptimizerSpec,
    PoolingKind,
    TableSpec,
    kernel_pooling,
)
from tutorec._kernels.table_steps import step_tables, touched_rows
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch
from tutorec._kernels.tbe_layout import PooledBatch

CPU = torch.device("cpu")


def operator(
    columns: tuple[int, ...], rule: OptimizerSpec, pooling: PoolingKind, weighted: bool
) -> TableBatch:
    """Table 0 is read by two features, the others by one each."""
    tables = tuple(TableSpec(f"t{i}", 9 + i, width) for i, width in enumerate(columns))
    features = (0, *range(len(columns)))
    draw = torch.Generator().manual_seed(4)
    weights = [torch.rand(table.rows, table.columns, generator=draw) for table in tables]
    return build_table_batch(
        GroupSpec(tables, features, pooling, weighted), optimizer=rule, device=CPU, weights=weights
    )


def batch(features: int, samples: int, weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(samples)
    lengths = torch.randint(0, 4, (features * samples,), generator=draw)
    values = torch.randint(0, 7, (int(lengths.sum()),), generator=draw)
    weights = torch.rand(values.numel(), generator=draw) if weighted else None
    return values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), weights


def states(op: TableBatch) -> list[Tensor]:
    return [state for of_table in op.table_states() for state in of_table]


MATRIX = (
    ["auto", "torch"],
    get_args(OptimizerKind),
    [(8, 8), (4, 8), (6, 3)],  # one width, two widths, no multiple of 4
    ["sum", "mean", "sqrtn", "weighted", "weighted mean"],
    [0, 5, 200],
)


def cases() -> list[Any]:
    """Each two values of two parameters meet by default; `pytest -m full` runs the product."""
    cover = pairwise_cover(MATRIX)
    return [
        pytest.param(*case, marks=() if case in cover else pytest.mark.full)
        for case in product(*MATRIX)
    ]


@pytest.mark.parametrize(("backend", "kind", "columns", "pooling", "samples"), cases())
def test_the_step_equals_the_backward_of_a_fused_lookup(
    backend: str,
    kind: OptimizerKind,
    columns: tuple[int, ...],
    pooling: str,
    samples: int,
):
    weighted = pooling.startswith("weighted")
    kept = cast(PoolingKind, {"weighted": "sum", "weighted mean": "mean"}.get(pooling, pooling))
    rule = OptimizerSpec(kind, 0.1, eps=1e-3)
    with use_backend(backend):
        fused, stepped = (operator(columns, rule, kept, weighted) for _ in range(2))
        values, offsets, weights = batch(len(columns) + 1, samples, weighted)
        pooled = fused(values, offsets, weights)
        grad = torch.linspace(-1, 1, max(pooled.numel(), 1))[: pooled.numel()].view(pooled.shape)
        pooled.backward(grad)
        own = bag_weights(kept, offsets, weights, values.numel())
        mean = kernel_pooling(kept, weighted) == "mean"
        seen = PooledBatch(values, offsets, own, mean, fused.spec.feature_tables)
        rows = [t.detach() for t in stepped.table_weights()]
        step_tables(rows, stepped.table_states(), seen, grad, stepped.next_steps())
    for one, other in zip(fused.table_weights(), stepped.table_weights(), strict=True):
        assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)
    for one, other in zip(states(fused), states(stepped), strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_a_table_is_what_autograd_finds(mean: bool, weighted: bool):
    values, offsets, weights = batch(2, 6, weighted and not mean)
    table, grad = torch.rand(9, 4, requires_grad=True), torch.rand(6, 8)
    seen = PooledBatch(values, offsets, weights, mean, (0, 0))
    [found] = touched_rows(seen, grad, columns=[4])
    pooled = torch.nn.functional.embedding_bag(
        values,
        table,
        offsets,
        mode="mean" if mean else "sum",
        per_sample_weights=weights,
        include_last_offset=True,
    )
    (expected,) = torch.autograd.grad(
        pooled, table, grad.view(6, 2, 4).transpose(0, 1).reshape(12, 4)
    )
    of_ids = found.grad[found.bags]
    if found.weights is not None:
        of_ids = of_ids * found.weights.unsqueeze(1)
    assert_close(torch.zeros(9, 4).index_add_(0, found.ids, of_ids), expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", get_args(OptimizerKind))
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_the_same_step_gives_the_same_bits(backend: str, kind: OptimizerKind, threads: int):
    rule, found, before = OptimizerSpec(kind, 0.1), [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with use_backend(backend):
            for _ in range(4):
                op = operator((8, 16), rule, "sum", weighted=False)
                values, offsets, _ = batch(3, 3000, weighted=False)  # of few rows: all repeat
                grad = torch.linspace(-1, 1, 3000 * 32).view(3000, 32).sin()
                seen = PooledBatch(values, offsets, None, False, op.spec.feature_tables)
                rows = [t.detach() for t in op.table_weights()]
                step_tables(rows, op.table_states(), seen, grad, op.next_steps())
                found.append([table.detach().clone() for table in op.table_weights()] + states(op))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
