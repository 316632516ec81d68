"""The torch backend beside fbgemm: a table batch's forward, and its fused training step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.ebc import require_close
from benchmarks.harness import Bar, Report, Sample, compare, interleave, machine, time_call
from benchmarks.peer import on_one_thread, random_bags
from benchmarks.runner import Options
from tutorec._kernels.backend import backend, use_backend
from tutorec._kernels.jagged import lengths_to_offsets
from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.table_specs import GroupSpec, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch

NAME = "backends"
ROUNDS = 30

_TABLES, _ROWS, _COLUMNS, _BATCH, _POOLING = 26, 30_000, 64, 256, 10
_RATE = 0.01
_Ids = tuple[Tensor, Tensor]


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
    with on_one_thread():
        ops = {name: _build(name) for name in ("torch", "fbgemm")}
        _require_equal(ops)
        samples = interleave(_variants(ops), options.rounds, warmup=3)
    bar = Bar("at most", 2.0)
    pairs = [(f"torch {case}", f"fbgemm {case}") for case in ("forward", "step")]
    return Report(
        name=NAME,
        settings={
            "tables": f"{_TABLES} x {_ROWS} x {_COLUMNS}",
            "B": _BATCH,
            "ids per bag": _POOLING,
            "optimizer": "rowwise_adagrad",
            "threads": 1,
        },
        samples=samples,
        comparisons=[
            compare(samples, *pair, clock=clock, bar=bar if clock == "cpu" else None)
            for pair in pairs
            for clock in ("cpu", "wall")
        ],
        context=machine(),
    )


def _build(name: str) -> TableBatch:
    spec = GroupSpec(
        tables=tuple(TableSpec(f"t{i}", _ROWS, _COLUMNS) for i in range(_TABLES)),
        feature_tables=tuple(range(_TABLES)),
    )
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(_ROWS, _COLUMNS, generator=generator) - 0.5 for _ in range(_TABLES)]
    with use_backend(name):
        return build_table_batch(
            spec,
            optimizer=OptimizerSpec("rowwise_adagrad", learning_rate=_RATE),
            device=torch.device("cpu"),
            weights=weights,
        )


def _ids(number: int) -> _Ids:
    """Fresh ids and offsets of a round; the same for every variant of it."""
    generator = torch.Generator().manual_seed(1000 + number)
    ids, lengths = random_bags(generator, _TABLES * _BATCH, _POOLING, _ROWS)
    return ids, lengths_to_offsets(lengths)


def _require_equal(ops: dict[str, TableBatch]) -> None:
    """One step each on the same ids: same outputs, same rows afterwards."""
    outputs = {name: _step(op, _ids(-1000)) for name, op in ops.items()}
    rows = {name: torch.cat(op.table_weights()) for name, op in ops.items()}
    for title, results in (("pooled rows", outputs), ("updated rows", rows)):
        require_close(title, {name: [result] for name, result in results.items()})


@torch.no_grad()
def _forward(op: TableBatch, ids: _Ids) -> Tensor:
    return op(*ids)


def _step(op: TableBatch, ids: _Ids) -> Tensor:
    pooled = op(*ids)
    pooled.sum().backward()
    return pooled.detach()


def _variants(ops: dict[str, TableBatch]) -> dict[str, Callable[[int], Sample]]:
    def measure(
        call: Callable[[TableBatch, _Ids], Tensor], op: TableBatch
    ) -> Callable[[int], Sample]:
        def sample(number: int) -> Sample:
            ids = _ids(number)
            return time_call(lambda: float(call(op, ids)[-1, -1]))

        return sample

    cases = {"forward": _forward, "step": _step}
    return {
        f"{name} {case}": measure(call, op)
        for case, call in cases.items()
        for name, op in ops.items()
    }
