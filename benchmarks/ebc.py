"""An unsharded EmbeddingBagCollection: forward, training step, memory; --vs adds a peer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Report, compare, machine
from benchmarks.library import (
    OURS,
    Batch,
    Library,
    Sizes,
    bag_collection,
    bag_configs,
    chosen,
    fill,
    finish,
    fresh_batches,
    fuse_optimizer,
    libraries,
    lookup,
    optimizer_class,
)
from benchmarks.memory import add_peaks, measurable, peak_during, resident
from benchmarks.rows import Clock, Row, add_row, against, threads, time_row
from benchmarks.runner import Options

NAME = "ebc"
ROUNDS = 30

_FORWARD_SIZES = Sizes(rows=100_000)
STEP_SIZES = Sizes(rows=30_000)


@dataclass(frozen=True)
class Forward:
    """A forward: B, calls of a measurement, and what peer / tutorec should be on which clock."""

    samples: int
    calls: int
    bar: float
    threads: int = 1
    clock: Clock = "cpu"
    judge_checked: bool = True


@dataclass(frozen=True)
class Step:
    """A training step.

    Args:
        optimizer: Of the tables.
        rows: R.
        fused_bar: What the peer's fused collection over tutorec should be; None: not measured.
        plain_bar: What the same call on the peer's plain collection should be, whose dense gradient
            costs the more the larger the tables are; None: only shown.
    """

    optimizer: str
    rows: int = STEP_SIZES.rows
    fused_bar: float | None = None
    plain_bar: float | None = None


_FORWARD = {
    # with one sample the checks take a large share, and the bar is for a run without them
    "forward-1": Forward(1, 50, 10.0, judge_checked=False),
    "forward-256": Forward(256, 5, 1.5),
    "forward-4096": Forward(4096, 1, 1.1),
    "forward-4096-2threads": Forward(4096, 1, 0.95, threads=2, clock="wall"),
}
_STEP = {
    "step-sgd": Step("sgd", fused_bar=1.05),
    "step-adagrad": Step("adagrad", fused_bar=0.95),
    "step-rowwise_adagrad": Step("rowwise_adagrad", fused_bar=1.05),
    "step-sgd-large": Step("sgd", rows=100_000, plain_bar=10.0),
    "step-rowwise_adagrad-large": Step("rowwise_adagrad", rows=100_000, plain_bar=10.0),
}
_MEMORY_BAR = 1.10
CASES = (*_FORWARD, *_STEP, "memory")

# A training step, which gives pooled rows, and what gives the tables.
Training = tuple[Callable[[Batch], Tensor], Callable[[], Mapping[str, Tensor]]]


def run(options: Options) -> Report:
    """Measure forward and training step, checks on and off.

    Args:
        options: rounds, the peer, and which ``--cases``.

    Returns:
        CPU and wall seconds; with a peer the ratios with their bars.

    Raises:
        ValueError: the peer is not installed, an unknown case, or the libraries' results differ.
    """
    sides = libraries(options.vs)
    cases = chosen(CASES, options.cases, "--cases")
    settings = {
        "forward": str(options.fit(_FORWARD_SIZES)),
        "step": f"{options.fit(STEP_SIZES)}, B={STEP_SIZES.samples} (large: x 100,000 x)",
        "ids per bag": STEP_SIZES.pooling,
        "batches": "fresh for every call",
    }
    report = Report(NAME, settings, context=machine(options.vs))
    forward = [case for case in cases if case in _FORWARD]
    if forward:
        _run_forward(report, sides, forward, options)
    for case in cases:
        if case in _STEP:
            _run_step(report, sides, case, options)
    if "memory" in cases:
        _run_memory(report, sides, options)
    return report


def _run_forward(report: Report, sides: list[Library], cases: list[str], options: Options) -> None:
    tables = options.fit(_FORWARD_SIZES)
    calls = {side.root: lookup(side, bag_collection(side, tables)) for side in sides}
    for name in cases:
        case = _FORWARD[name]
        sizes = options.fit(replace(tables, samples=case.samples, calls=case.calls))
        bars = against(options.vs, case.bar)
        with threads(case.threads):
            timed = time_row(Row(name, calls, batches_of(sizes)), options.rounds)
        add_row(report, name, timed, bars, [case.clock], judge_checked=case.judge_checked)
        report.comparisons.append(
            compare(report.samples, f"{name}: {OURS} checked", f"{name}: {OURS}", case.clock)
        )


def batches_of(sizes: Sizes, device: str = "cpu") -> Callable[[str, int], list[Batch]]:
    """Inputs of a row: the batches of a round."""
    return lambda _, number: fresh_batches(sizes, number, device)


def _run_step(report: Report, sides: list[Library], name: str, options: Options) -> None:
    case = _STEP[name]
    sizes = options.fit(replace(STEP_SIZES, rows=case.rows))
    steps = {side.root: in_backward_step(side, case.optimizer, sizes) for side in sides}
    bars = against(options.vs, case.plain_bar)
    if options.vs and case.fused_bar is not None:
        fused = f"{options.vs} fused"
        steps[fused] = fused_step(sides[-1], case.optimizer, sizes)
        bars |= against(fused, case.fused_bar)

    with threads():
        timed = time_row(step_row(name, steps, sizes), options.rounds)
    add_row(report, name, timed, bars)


def step_row(name: str, steps: Mapping[str, Training], sizes: Sizes, device: str = "cpu") -> Row:
    """A row of training steps, whose tables are compared, too.

    Args:
        name: Of the row.
        steps: Side -> its step.
        sizes: Tables and batches.
        device: Where they are.
    """
    calls = {side: step for side, (step, _) in steps.items()}
    states = {side: tables for side, (_, tables) in steps.items()}
    return Row(name, calls, batches_of(sizes, device), states)


def in_backward_step(library: Library, name: str, sizes: Sizes, device: str = "cpu") -> Training:
    """The library's collection with ``apply_optimizer_in_backward``.

    Args:
        library: Whose.
        name: `sgd`, `adagrad` or `rowwise_adagrad`.
        sizes: The tables.
        device: Where they are.

    Returns:
        A training step, which gives pooled rows, and what gives the tables.
    """
    collection = bag_collection(library, sizes, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuse_optimizer(library, name, collection)
    return _training(library, collection)


def fused_step(library: Library, name: str, sizes: Sizes, device: str = "cpu") -> Training:
    """The peer's collection whose optimizer is fused into its kernel: its fastest way.

    Args:
        library: The peer.
        name: As of `in_backward_step`.
        sizes: The tables.
        device: Where they are.

    Returns:
        As of `in_backward_step`.
    """
    optimizer, arguments = optimizer_class(library, name)
    collection = library.get("modules.fused_embedding_modules.FusedEmbeddingBagCollection")(
        tables=bag_configs(library, sizes),
        optimizer_type=optimizer,
        optimizer_kwargs=arguments,
        device=torch.device(device),
    )
    return _training(library, fill(collection))


def _training(library: Library, collection: Any) -> Training:
    gradients: dict[torch.Size, Tensor] = {}  # filled by the first batch, which is not timed

    def step(batch: Batch) -> Tensor:
        pooled = collection(library.batch(batch)).values()
        if pooled.shape not in gradients:
            values = torch.linspace(-1, 1, pooled.numel(), device=pooled.device)
            gradients[pooled.shape] = values.view_as(pooled)
        pooled.backward(gradients[pooled.shape])
        return finish(pooled.detach())

    def tables() -> dict[str, Tensor]:
        return {name: table.weight.detach() for name, table in collection.embedding_bags.items()}

    return step, tables


def _run_memory(report: Report, sides: list[Library], options: Options) -> None:
    """Peak of row-wise Adagrad steps against the weights, each measured in a new process."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return

    sizes = options.fit(STEP_SIZES)
    weights = float(sizes.tables * sizes.rows * sizes.columns * 4)
    ways = [(side.root, False) for side in sides]
    ways += [(side.root, True) for side in sides if side.root != OURS]
    for root, fused in ways:
        expression = f"{__name__}:step_memory({root!r}, {fused!r}, {sizes.tables}, {sizes.rows})"
        side = f"{root} fused" if fused else root
        title = f"memory: peak of a row-wise Adagrad step, {side} / weights"
        bar = _MEMORY_BAR if root == OURS else None
        add_peaks(report, title, expression, weights, bar, options.memory_runs)


def step_memory(root: str, fused: bool, tables: int, rows: int) -> int:
    """Peak bytes of three row-wise Adagrad steps, above this process after import and warm-up.

    Args:
        root: the library.
        fused: the peer's fused collection instead of ``apply_optimizer_in_backward``.
        tables: T.
        rows: rows of each table.

    Returns:
        Bytes of anonymous memory, weights and optimizer state included.
    """
    torch.set_num_threads(1)
    library = Library(root)
    make = fused_step if fused else in_backward_step

    def steps(rows: int, count: int) -> Callable[[], None]:
        sizes = replace(STEP_SIZES, tables=tables, rows=rows, calls=count)
        step, _ = make(library, "rowwise_adagrad", sizes)
        batches = fresh_batches(sizes, 0)

        def run_steps() -> None:
            for batch in batches:
                step(batch)

        return run_steps

    steps(100, 2)()
    before = resident()
    return peak_during(steps(rows, 3)) - before
