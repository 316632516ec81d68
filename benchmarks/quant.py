"""Quantized tables: latency, bytes of a row, memory of quantizing; with --vs beside a peer."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.ebc import require_close
from benchmarks.harness import (
    Bar,
    Comparison,
    Report,
    Sample,
    compare,
    compare_memory,
    interleave,
    machine,
    paired_ratio,
)
from benchmarks.memory import bytes_of, measurable, peak_during, resident
from benchmarks.peer import (
    OURS,
    Batch,
    Library,
    Sizes,
    bag_collection,
    checked_and_not,
    chosen,
    libraries,
    look_up_in,
    on_one_thread,
)
from benchmarks.runner import Options
from tutorec._validation import validation

NAME = "quant"
ROUNDS = 30

_TABLES, _ROWS, _COLUMNS = 26, 100_000, 64


@dataclass(frozen=True)
class Case:
    """One size of a request.

    Attributes:
        samples: B.
        ids: In each bag; one is what the 26 features of Criteo's log have.
        calls: Timed one by one in each round.
        bar: What peer / tutorec should be at the median; None for what is only shown.
        checked: Whether calls with checks are judged by the bar, too; with one sample the checks
            are a large part.
    """

    samples: int
    ids: int
    calls: int
    bar: float | None
    checked: bool = True


_REQUESTS = {
    "int8-1": Case(1, 1, 500, 2.5, checked=False),
    "int8-32": Case(32, 1, 300, 1.5),
    "int8-512": Case(512, 1, 100, 1.1),
    "int8-1-10ids": Case(1, 10, 500, None),
    "int8-32-10ids": Case(32, 10, 100, None),
    "int8-512-10ids": Case(512, 10, 30, 1.8, checked=False),
}
_TAIL = 99
# With ten ids a bag an answer is hardly more than the kernel: this one is timed alone, too.
_OPERATOR_CASE, _OPERATOR_BAR = "int8-512-10ids", 0.87
_BYTES_A_ROW = {"qint8": 80, "quint4x2": 48}
_IN_PLACE_BAR, _KEPT_BAR, _MEMORY_RUNS = 1.0, 1.35, 3
CASES = (*_REQUESTS, "rows", "memory")


def run(options: Options) -> Report:
    """Measure single calls on fresh ids, on one thread; the bytes of a row; the peak of quantizing.

    Args:
        options: rounds, the peer, and which ``--cases``.

    Returns:
        CPU and wall seconds of the median call and of the slowest in a hundred; with a peer the
        ratios with their bars.

    Raises:
        ValueError: the peer is not installed, an unknown case, or the libraries' results differ.
    """
    sides = libraries(options.vs)
    cases = chosen(CASES, options.cases, "--cases")
    report = Report(
        name=NAME,
        settings={
            "tables": f"{_TABLES} x {_ROWS} x {_COLUMNS}",
            "threads": 1,
            "requests": (
                "fresh ids and a new KeyedJaggedTensor for every call, each call timed by itself"
            ),
            "ids per bag": "1, or as the case says",
        },
        context=machine(options.vs),
    )
    with on_one_thread():
        requests = [case for case in cases if case in _REQUESTS]
        if requests:
            _run_requests(report, sides, requests, options)
        if "rows" in cases:
            _run_rows(report, sides)
    if "memory" in cases:
        _run_memory(report, sides)
    return report


def _float_collection(library: Library, rows: int, device: str = "cpu") -> Any:
    """The same numbers in every library; each device has random numbers of its own."""
    return bag_collection(library, Sizes(_TABLES, rows, _COLUMNS), device)


def quantized(library: Library, rows: int, dtype: str = "qint8", device: str = "cpu") -> Any:
    """A quantized collection, as each library makes it by default; its float tables are given up.

    Args:
        library: Whose.
        rows: R of every table.
        dtype: Name of a dtype of torch.
        device: Where it is quantized and stays.
    """
    collection = _float_collection(library, rows, device)
    if library.root == OURS:
        return library.get("quant.whole_model.quantize")(
            collection, getattr(torch, dtype), inplace=True
        )
    return _from_float(library, collection, dtype)


def _from_float(library: Library, collection: Any, dtype: str = "qint8") -> Any:
    """A quantized collection, made as TorchRec's documents make it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates its observers, which the peer needs
        from torch.ao.quantization import PlaceholderObserver

        collection.qconfig = library.get("modules.embedding_configs.QuantConfig")(
            activation=PlaceholderObserver.with_args(dtype=torch.float),
            weight=PlaceholderObserver.with_args(dtype=getattr(torch, dtype)),
        )
        return library.get("quant.embedding_modules.EmbeddingBagCollection").from_float(collection)


def fresh_requests(case: Case, rows: int, number: int, device: str = "cpu") -> list[Batch]:
    """The requests of a round, the same for every variant of it.

    Args:
        case: Their size and number.
        rows: R of every table.
        number: Number of the round.
        device: Where the ids live.
    """
    generator = torch.Generator().manual_seed(1_000_000 + number)
    keys, lists = [f"f{i}" for i in range(_TABLES)], _TABLES * case.samples
    requests = []
    for _ in range(case.calls):
        if case.ids == 1:
            lengths = torch.ones(lists, dtype=torch.int64)
        else:
            lengths = torch.randint(0, 2 * case.ids + 1, (lists,), generator=generator)
        values = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        requests.append((keys, values.to(device), lengths.to(device)))
    return requests


def _run_requests(report: Report, sides: list[Library], cases: list[str], options: Options) -> None:
    collections = {side.root: quantized(side, _ROWS) for side in sides}
    answer = look_up_in(collections)

    for name in cases:
        case = _REQUESTS[name]
        tails: dict[str, list[Sample]] = {}

        def measure(
            root: str, checks: bool, name: str = name, case: Case = case, tails: Any = tails
        ) -> Any:
            title = f"{name}: {root}" + (" checked" if checks else "")

            def sample(number: int) -> Sample:
                requests = fresh_requests(case, _ROWS, number)
                with validation(checks):
                    median, tail = time_single_calls(
                        lambda request: answer(root, request), requests
                    )
                if number >= 0:
                    tails.setdefault(f"{title}, p{_TAIL}", []).append(tail)
                return median

            return sample

        [one, *_] = fresh_requests(case, _ROWS, -1000)
        require_close(name, {root: [answer(root, one)] for root in collections}, most=1e-5)
        variants = checked_and_not(name, sides, measure)
        if name == _OPERATOR_CASE:
            variants[f"{name}: operator alone"] = _operator_alone(collections[OURS], case)
        report.samples |= interleave(variants, options.rounds, warmup=1) | tails
        if name == _OPERATOR_CASE:
            bar = Bar("at least", _OPERATOR_BAR)
            pair = f"{name}: operator alone", f"{name}: {OURS}"
            report.comparisons.append(compare(report.samples, *pair, "cpu", bar))
        if options.vs:
            report.comparisons += _judged(report.samples, name, options.vs, case)


def _operator_alone(collection: Any, case: Case) -> Callable[[int], Sample]:
    """The operator alone, on ids and offsets that are ready; a collection adds the rest."""
    [(operator, _)] = collection._operators

    def sample(number: int) -> Sample:
        requests = fresh_requests(case, _ROWS, number)
        offsets = [torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) for _, _, lengths in requests]
        fresh = [(values, ends) for (_, values, _), ends in zip(requests, offsets, strict=True)]
        with validation(False), torch.no_grad():
            return time_single_calls(lambda request: operator.forward(*request), fresh)[0]

    return sample


def time_single_calls(call: Callable[[Any], object], fresh: Sequence[Any]) -> tuple[Sample, Sample]:
    """CPU and wall seconds of the median call and of the 99th percentile, each call timed alone.

    Python's cyclic collector rests meanwhile: it would charge one variant for the garbage of
    another.

    Args:
        call: what is measured.
        fresh: one argument for each call; nothing has looked at any of them.

    Returns:
        The median, and the percentile.
    """
    cpu, wall = np.empty(len(fresh)), np.empty(len(fresh))
    gc.disable()
    try:
        for place, one in enumerate(fresh):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            call(one)
            cpu[place], wall[place] = (
                time.process_time() - cpu_start,
                time.perf_counter() - wall_start,
            )
    finally:
        gc.enable()
    low, high = (
        Sample(*(float(np.percentile(times, share)) for times in (cpu, wall)))
        for share in (50, _TAIL)
    )
    return low, high


def _judged(samples: dict[str, list[Sample]], name: str, peer: str, case: Case) -> list[Comparison]:
    comparisons = []
    for side in (OURS, f"{OURS} checked"):
        judge = case.bar is not None and (case.checked or side == OURS)
        for tail, value in (("", case.bar or 0.0), (f", p{_TAIL}", 1.0)):
            judged = Bar("at least", value) if judge else None
            comparisons.append(
                compare(samples, f"{name}: {peer}{tail}", f"{name}: {side}{tail}", "cpu", judged)
            )
    return comparisons


def _run_rows(report: Report, sides: list[Library]) -> None:
    """Bytes of a row, of the buffers that the collections show."""
    for dtype, allowed in _BYTES_A_ROW.items():
        for side in sides:
            weight = (
                _from_float(side, _float_collection(side, 10), dtype).embedding_bags["t0"].weight
            )
            size = float(weight.shape[1] * weight.itemsize)
            report.comparisons.append(
                Comparison(
                    title=(
                        f"rows: bytes of a row of {_COLUMNS} columns in {dtype}, {side.root} / "
                        f"{allowed}"
                    ),
                    clock="memory",
                    ratio=paired_ratio([size], [float(allowed)]),
                    bar=Bar("at most", 1.0, rounds=1) if side.root == OURS else None,
                )
            )


def _run_memory(report: Report, sides: list[Library]) -> None:
    """Peak of quantizing against the float model, each measured in a new process."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return
    table = float(_ROWS * _COLUMNS * 4)
    model = _TABLES * table
    roads = [(OURS, True, model + table, _IN_PLACE_BAR), (OURS, False, model, _KEPT_BAR)]
    for root, in_place, allowed, bar in roads + [
        (side.root, False, model, None) for side in sides if side.root != OURS
    ]:
        peaks = [
            float(bytes_of(f"{__name__}:quantize_memory({root!r}, {in_place!r})"))
            for _ in range(_MEMORY_RUNS)
        ]
        against = "(float model + its largest table)" if in_place else "float model"
        report.comparisons.append(
            compare_memory(
                f"memory: peak of quantizing{' in place' * in_place}, {root} / {against}",
                peaks,
                [allowed] * len(peaks),
                bar,
            )
        )


def quantize_memory(root: str, in_place: bool, rows: int = _ROWS) -> int:
    """Bytes at the highest point of quantizing a float model, which they include.

    Args:
        root: the library; ours quantizes by ``tutorec.quantize``, another one by its class.
        in_place: whether the float tables are given up on the way.
        rows: of each table.

    Returns:
        Bytes of anonymous memory, above this process after import and warm-up.
    """
    torch.set_num_threads(1)
    library = Library(root)

    def work(rows: int) -> Callable[[], object]:
        model = nn.Sequential(_float_collection(library, rows))
        if root != OURS:
            return lambda: _from_float(library, model[0])
        return lambda: library.get("quant.whole_model.quantize")(
            model, torch.int8, inplace=in_place
        )

    work(100)()
    before = resident()
    return peak_during(work(rows)) - before
