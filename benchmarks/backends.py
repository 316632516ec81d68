"""The torch backend beside fbgemm: a table batch's forward, and its fused training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Report, machine
from benchmarks.library import RATE, Sizes, finish, fresh_batches
from benchmarks.rows import Row, add_row, threads, time_row
from benchmarks.runner import Options
from tutorec._kernels.backend import backend, use_backend
from tutorec._kernels.jagged import lengths_to_offsets
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch

NAME = "backends"
ROUNDS = 30

_SIZES = Sizes(calls=1)
_BAR = Bar("at most", 2.0)


def run(options: Options) -> Report:
    """Measure both backends on the same ids, one thread.

    Args:
        options: rounds.

    Returns:
        CPU and wall seconds of a forward and of a forward with backward and update.

    Raises:
        ValueError: fbgemm cannot be had here, or the backends disagree.
    """
    if backend().name != "fbgemm":
        raise ValueError(
            f"bench {NAME} needs both backends, and fbgemm cannot be had here: {backend().reason}"
        )
    sizes = options.fit(_SIZES)
    settings = {
        "tables": str(sizes),
        "B": sizes.samples,
        "ids per bag": sizes.pooling,
        "threads": 1,
    }
    report = Report(NAME, settings, context=machine())

    with threads():
        tables = {name: _build(name, sizes) for name in ("fbgemm", "torch")}
        for name, operation in {"forward": _forward, "step": _step}.items():
            calls = {side: operation(tables[side]) for side in tables}
            states = {side: _weights(tables[side]) for side in tables}
            row = Row(name, calls, lambda _, number: _ids(sizes, number), states)
            timed = time_row(row, options.rounds)
            bars = {"torch": _BAR}
            add_row(report, name, timed, bars, ["cpu", "wall"], "cpu", reference="fbgemm")
    return report


def _build(name: str, sizes: Sizes) -> TableBatch:
    spec = GroupSpec(
        tables=tuple(TableSpec(key, sizes.rows, sizes.columns) for key in sizes.keys()),
        feature_tables=tuple(range(sizes.tables)),
    )
    generator = torch.Generator().manual_seed(0)
    shape = (sizes.rows, sizes.columns)
    weights = [torch.rand(shape, generator=generator) - 0.5 for _ in spec.tables]

    with use_backend(name):
        return build_table_batch(
            spec,
            optimizer=OptimizerSpec("rowwise_adagrad", learning_rate=RATE),
            device=torch.device("cpu"),
            weights=weights,
        )


def _ids(sizes: Sizes, number: int) -> list[tuple[Tensor, Tensor]]:
    """Fresh ids and offsets of a round; the same for both backends."""
    batches = fresh_batches(sizes, number)
    return [(ids, lengths_to_offsets(lengths)) for _, ids, lengths in batches]


def _weights(tables: TableBatch) -> Callable[[], dict[str, Tensor]]:
    return lambda: {"rows": torch.cat(tables.table_weights())}


def _forward(tables: TableBatch) -> Callable[[Any], Tensor]:
    return torch.no_grad()(lambda batch: finish(tables(*batch)))


def _step(tables: TableBatch) -> Callable[[Any], Tensor]:
    def step(batch: Any) -> Tensor:
        pooled = tables(*batch)
        pooled.sum().backward()
        return finish(pooled.detach())

    return step
