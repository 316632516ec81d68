"""An unsharded EmbeddingBagCollection: forward, training step, memory; --vs adds a peer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.harness import (
    Report,
    Sample,
    compare_memory,
    interleave,
    machine,
)
from benchmarks.memory import bytes_of, measurable, peak_during, resident
from benchmarks.peer import (
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
    judged_both,
    libraries,
    look_up_in,
    on_one_thread,
    optimizer_words,
    timed_calls,
)
from benchmarks.runner import Options

NAME = "ebc"
ROUNDS = 30

_TABLES, _ROWS, _TRAIN_ROWS, _COLUMNS, _POOLING, _TRAIN_BATCH = 26, 100_000, 30_000, 64, 10, 256

# case -> samples B, threads, calls per measurement, clock that is judged, what peer / tutorec
# should be
_FORWARD: dict[str, tuple[int, int, int, Literal["cpu", "wall"], float]] = {
    "forward-1": (1, 1, 50, "cpu", 10.0),
    "forward-256": (256, 1, 5, "cpu", 1.5),
    "forward-4096": (4096, 1, 1, "cpu", 1.1),
    "forward-4096-2threads": (4096, 2, 1, "wall", 0.95),
}
# with so few samples the checks are a large part, and the bar is for a run without them
_UNCHECKED = ("forward-1",)
# case -> optimizer, rows of a table, what peer / tutorec should be: against the peer's fused
# collection, and against the same call on the peer's plain collection, whose dense gradient costs
# the more the larger the tables are
_STEP: dict[str, tuple[str, int, float | None, float | None]] = {
    "step-sgd": ("sgd", _TRAIN_ROWS, 1.05, None),
    "step-rowwise_adagrad": ("rowwise_adagrad", _TRAIN_ROWS, 1.05, None),
    "step-sgd-large": ("sgd", _ROWS, None, 10.0),
    "step-rowwise_adagrad-large": ("rowwise_adagrad", _ROWS, None, 10.0),
}
_MEMORY_BAR, _MEMORY_RUNS = 1.10, 3
CASES = (*_FORWARD, *_STEP, "memory")

# A training step, which gives pooled rows, and what gives the tables.
Step = tuple[Callable[[Batch], Tensor], Callable[[], Iterator[Tensor]]]


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
    report = Report(
        name=NAME,
        settings={
            "forward": f"{_TABLES} x {_ROWS} x {_COLUMNS}",
            "step": (
                f"{_TABLES} x {_TRAIN_ROWS} x {_COLUMNS}, B={_TRAIN_BATCH} (large: x {_ROWS} x)"
            ),
            "ids per bag": _POOLING,
            "batches": "fresh for every call",
        },
        context=machine(options.vs),
    )
    forward = [case for case in cases if case in _FORWARD]
    if forward:
        with on_one_thread():  # or on as many as the case says
            _run_forward(report, sides, forward, options)
    for case in _STEP:
        if case in cases:
            with on_one_thread():
                _run_step(report, sides, case, options)
    if "memory" in cases:
        _run_memory(report, sides)
    return report


def _sizes(rows: int) -> Sizes:
    return Sizes(_TABLES, rows, _COLUMNS, _POOLING)


def _run_forward(report: Report, sides: list[Library], cases: list[str], options: Options) -> None:
    sizes = _sizes(_ROWS)
    collections = {side.root: bag_collection(side, sizes) for side in sides}
    look_up = look_up_in(collections)
    for case in cases:
        samples, threads, repeats, clock, bar = _FORWARD[case]
        torch.set_num_threads(threads)
        [one] = fresh_batches(sizes, samples, -1000, 1)
        require_close(case, {root: [look_up(root, one)] for root in collections})
        batches = partial(fresh_batches, sizes, samples, count=repeats)
        variants = timed_calls(case, sides, look_up, batches)
        measured = interleave(variants, options.rounds, warmup=2)
        report.samples |= measured
        if options.vs:
            report.comparisons += judged_both(
                measured, case, options.vs, clock, bar, unchecked_only=case in _UNCHECKED
            )


def _run_step(report: Report, sides: list[Library], case: str, options: Options) -> None:
    optimizer, rows, fused_bar, plain_bar = _STEP[case]
    sizes = _sizes(rows)
    steps = {side.root: in_backward_step(side, optimizer, sizes) for side in sides}
    if options.vs and fused_bar is not None:
        steps[f"{options.vs} fused"] = fused_step(sides[-1], optimizer, sizes)
    batches = partial(fresh_batches, sizes, _TRAIN_BATCH)
    samples = time_steps(case, steps, batches, 2, options.rounds)
    report.samples |= samples
    if options.vs and fused_bar is not None:
        report.comparisons += judged_both(samples, case, f"{options.vs} fused", "cpu", fused_bar)
    if options.vs:
        report.comparisons += judged_both(samples, case, options.vs, "cpu", plain_bar)


def time_steps(
    case: str,
    steps: dict[str, Step],
    batches: Callable[[int, int], list[Batch]],
    calls: int,
    rounds: int,
) -> dict[str, list[Sample]]:
    """Compare what steps make of two batches, then time them in turn.

    Args:
        case: Its name.
        steps: Title -> what trains.
        batches: (number of a round, how many) -> fresh ones.
        calls: Steps in one measurement.
        rounds: Rounds that count.

    Raises:
        ValueError: Pooled rows or tables differ.
    """
    results = {}
    for title, (step, weights) in steps.items():
        results[title] = [step(batch) for batch in batches(-1000, 2)] + list(weights())
    require_close(case, results)
    variants = timed_calls(
        case,
        list(steps),
        lambda title, batch: finish(steps[title][0](batch)),
        lambda number: batches(number, calls),
    )
    return interleave(variants, rounds, warmup=2)


def in_backward_step(library: Library, name: str, sizes: Sizes, device: str = "cpu") -> Step:
    """The library's collection with ``apply_optimizer_in_backward``.

    Args:
        library: Whose.
        name: ``"sgd"`` or ``"rowwise_adagrad"``.
        sizes: The tables.
        device: Where they live.

    Returns:
        A training step, which gives pooled rows, and what gives the tables.
    """
    collection = bag_collection(library, sizes, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fuse_optimizer(library, name, collection)
    return _step_of(library, collection)


def fused_step(library: Library, name: str, sizes: Sizes, device: str = "cpu") -> Step:
    """The peer's collection whose optimizer is fused into its kernel: its fastest road.

    Args:
        library: The peer.
        name: As of `in_backward_step`.
        sizes: The tables.
        device: Where they live.

    Returns:
        As of `in_backward_step`.
    """
    kind, arguments = optimizer_words(library, name)
    made = library.get("modules.fused_embedding_modules.FusedEmbeddingBagCollection")(
        tables=bag_configs(library, sizes),
        optimizer_type=kind,
        optimizer_kwargs=arguments,
        device=torch.device(device),
    )
    return _step_of(library, fill(made))


def _step_of(library: Library, collection: Any) -> Step:
    maker = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
    gradients: dict[torch.Size, Tensor] = {}  # made at the first batch, which is not timed

    def step(batch: Batch) -> Tensor:
        keys, values, lengths = batch
        pooled = collection(maker(keys, values, lengths=lengths)).values()
        if pooled.shape not in gradients:
            gradients[pooled.shape] = torch.linspace(
                -1, 1, pooled.numel(), device=pooled.device
            ).view_as(pooled)
        pooled.backward(gradients[pooled.shape])
        return pooled.detach()

    tables = collection.embedding_bags.values()
    return step, lambda: (table.weight.detach() for table in tables)


def _run_memory(report: Report, sides: list[Library]) -> None:
    """Peak of row-wise Adagrad steps against the weights, each measured in a new process."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return
    weights = float(_TABLES * _TRAIN_ROWS * _COLUMNS * 4)
    roads = [(side.root, False) for side in sides] + [
        (side.root, True) for side in sides if side.root != OURS
    ]
    for root, fused in roads:
        peaks = [
            float(bytes_of(f"{__name__}:step_memory({root!r}, {fused!r}, {_TRAIN_ROWS})"))
            for _ in range(_MEMORY_RUNS)
        ]
        report.comparisons.append(
            compare_memory(
                f"memory: peak of a row-wise Adagrad step, {root}{' fused' * fused} / weights",
                peaks,
                [weights] * len(peaks),
                _MEMORY_BAR if root == OURS else None,
            )
        )


def step_memory(root: str, fused: bool, rows: int) -> int:
    """Peak bytes of three row-wise Adagrad steps, above this process after import and warm-up.

    Args:
        root: the library.
        fused: the peer's fused collection instead of ``apply_optimizer_in_backward``.
        rows: rows of each table.

    Returns:
        Bytes of anonymous memory, weights and optimizer state included.
    """
    torch.set_num_threads(1)
    library, make = Library(root), fused_step if fused else in_backward_step

    def steps(rows: int, count: int) -> Callable[[], None]:
        sizes = _sizes(rows)
        step, _ = make(library, "rowwise_adagrad", sizes)
        batches = fresh_batches(sizes, _TRAIN_BATCH, 0, count)

        def run_them() -> None:
            for batch in batches:
                step(batch)

        return run_them

    steps(100, 2)()
    before = resident()
    return peak_during(steps(rows, 3)) - before


def require_close(case: str, results: dict[str, list[Tensor]], most: float = 1e-4) -> None:
    """Pooled rows, and tables after steps, agree within float32 sums of another order.

    Args:
        case: What was computed.
        results: Library -> its tensors.
        most: The largest difference.

    Raises:
        ValueError: They differ by more.
    """
    (first, ours), *others = results.items()
    for title, theirs in others:
        for a, b in zip(ours, theirs, strict=True):
            distance = float((a - b).abs().max())
            if not distance <= most:
                raise ValueError(
                    f"{case}: {first} and {title} differ by up to {distance:.2g}; nothing was timed"
                )
