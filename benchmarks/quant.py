"""Quantized tables: latency, bytes of a row, memory of quantizing; with --vs beside a peer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Bar, Comparison, Report, machine, paired_ratio
from benchmarks.library import (
    OURS,
    Batch,
    Library,
    Sizes,
    bag_collection,
    chosen,
    libraries,
    lookup,
    random_bags,
)
from benchmarks.memory import add_peaks, measurable, peak_during, resident
from benchmarks.rows import TAIL, Row, add_row, against, threads, time_row
from benchmarks.runner import Options

NAME = "quant"
ROUNDS = 30

_TABLES = Sizes(rows=100_000)


@dataclass(frozen=True)
class Case:
    """One size of a request.

    Attributes:
        samples: B.
        pooling: Ids in each bag; one is what the 26 features of Criteo's log have.
        calls: Timed one by one in each round.
        bar: What peer / tutorec should be at the median; None for what is only shown.
        judge_checked: Whether calls with checks are judged by the bar, too; with one sample the
            checks take a large share of the time.
    """

    samples: int
    pooling: int
    calls: int
    bar: float | None
    judge_checked: bool = True


_REQUESTS = {
    "int8-1": Case(1, 1, 500, 2.5, judge_checked=False),
    "int8-32": Case(32, 1, 300, 1.5),
    "int8-512": Case(512, 1, 100, 1.1),
    "int8-1-10ids": Case(1, 10, 500, None),
    "int8-32-10ids": Case(32, 10, 100, None),
    "int8-512-10ids": Case(512, 10, 30, 1.8, judge_checked=False),
}
_TAIL_BAR = 1.0
# With ten ids a bag an answer is hardly more than the kernel: this one is timed alone, too.
_OPERATOR_CASE = "int8-512-10ids"
_OPERATOR_BAR = 0.87
_OPERATOR = "operator alone"
_BYTES_A_ROW = {"qint8": 80, "quint4x2": 48}
_IN_PLACE_BAR = 1.0
_KEPT_BAR = 1.35
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
    settings = {
        "tables": str(options.fit(_TABLES)),
        "threads": 1,
        "requests": "fresh ids and a new KeyedJaggedTensor for every call, each call timed alone",
        "ids per bag": "1, or as the case says",
    }
    report = Report(NAME, settings, context=machine(options.vs))
    with threads():
        requests = [case for case in cases if case in _REQUESTS]
        if requests:
            _run_requests(report, sides, requests, options)
        if "rows" in cases:
            _run_rows(report, sides)
    if "memory" in cases:
        _run_memory(report, sides, options)
    return report


def quantized(library: Library, sizes: Sizes, dtype: str = "qint8", device: str = "cpu") -> Any:
    """A quantized collection, as each library makes it by default; its float tables are given up.

    Args:
        library: Whose.
        sizes: Its tables.
        dtype: Name of a dtype of torch.
        device: Where it is quantized and stays.
    """
    collection = bag_collection(library, sizes, device)
    if library.root != OURS:
        return _from_float(library, collection, dtype)
    quantize = library.get("quant.whole_model.quantize")
    return quantize(collection, getattr(torch, dtype), inplace=True)


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


def fresh_requests(sizes: Sizes, number: int, device: str = "cpu") -> list[Batch]:
    """The requests of a round, the same for every side of it.

    Args:
        sizes: Tables, and size and number of the requests.
        number: Number of the round.
        device: Where the ids are.
    """
    generator = torch.Generator().manual_seed(1_000_000 + number)
    bags = sizes.tables * sizes.samples
    requests = []
    for _ in range(sizes.calls):
        if sizes.pooling == 1:
            values = torch.randint(0, sizes.rows, (bags,), generator=generator)
            lengths = torch.ones(bags, dtype=torch.int64)
        else:
            values, lengths = random_bags(generator, bags, sizes.pooling, sizes.rows)
        requests.append((sizes.keys(), values.to(device), lengths.to(device)))
    return requests


def _run_requests(report: Report, sides: list[Library], cases: list[str], options: Options) -> None:
    tables = options.fit(_TABLES)
    collections = {side.root: quantized(side, tables) for side in sides}
    for name in cases:
        case = _REQUESTS[name]
        sizes = options.fit(
            replace(tables, samples=case.samples, pooling=case.pooling, calls=case.calls)
        )
        calls: dict[str, Callable[[Any], Any]] = {
            side.root: lookup(side, collections[side.root]) for side in sides
        }
        bars = against(options.vs, case.bar)
        tail_bars = against(options.vs, _TAIL_BAR if case.bar else None)
        if name == _OPERATOR_CASE:
            calls[_OPERATOR] = _operator(collections[OURS])
            bars |= against(_OPERATOR, _OPERATOR_BAR)

        row = Row(name, calls, _inputs(sizes), most=1e-5, single=True)
        timed = time_row(row, options.rounds)
        add_row(report, name, timed, bars, judge_checked=case.judge_checked)
        add_row(report, name + TAIL, timed, tail_bars, judge_checked=case.judge_checked)


def _inputs(sizes: Sizes) -> Callable[[str, int], list[Any]]:
    """Requests as lists; for the operator alone ids and the ends of bags."""

    def inputs(side: str, number: int) -> list[Any]:
        requests = fresh_requests(sizes, number)
        if side != _OPERATOR:
            return requests
        pad = torch.nn.functional.pad
        return [(values, pad(lengths.cumsum(0), (1, 0))) for _, values, lengths in requests]

    return inputs


def _operator(collection: Any) -> Callable[[Any], Any]:
    """The operator alone, on ids and offsets that are ready; a collection adds the rest."""
    [(operator, _)] = collection._operators
    return torch.no_grad()(lambda request: operator.forward(*request))


def _run_rows(report: Report, sides: list[Library]) -> None:
    """Bytes of a row, of the buffers that the collections show."""
    for dtype, allowed in _BYTES_A_ROW.items():
        for side in sides:
            collection = bag_collection(side, replace(_TABLES, rows=10))
            weight = _from_float(side, collection, dtype).embedding_bags["t0"].weight
            size = float(weight.shape[1] * weight.itemsize)
            columns = f"a row of {_TABLES.columns} columns in {dtype}"
            report.comparisons.append(
                Comparison(
                    title=f"rows: bytes of {columns}, {side.root} / {allowed}",
                    clock="memory",
                    ratio=paired_ratio([size], [float(allowed)]),
                    bar=Bar("at most", 1.0, rounds=1) if side.root == OURS else None,
                )
            )


def _run_memory(report: Report, sides: list[Library], options: Options) -> None:
    """Peak of quantizing against the float model, each measured in a new process."""
    if not measurable():
        report.notes.append("memory is measured on Linux only")
        return

    sizes = options.fit(_TABLES)
    table = float(sizes.rows * sizes.columns * 4)
    model = sizes.tables * table
    ways = [(OURS, True, _IN_PLACE_BAR), (OURS, False, _KEPT_BAR)]
    ways += [(side.root, False, None) for side in sides if side.root != OURS]
    for root, in_place, bar in ways:
        title = f"memory: peak of quantizing, {root} / float model"
        allowed = model
        if in_place:
            title = f"memory: peak of quantizing in place, {root} / (float model + a table)"
            allowed += table
        call = f"quantize_memory({root!r}, {in_place!r}, {sizes.tables}, {sizes.rows})"
        add_peaks(report, title, f"{__name__}:{call}", allowed, bar, options.memory_runs)


def quantize_memory(root: str, in_place: bool, tables: int, rows: int) -> int:
    """Bytes at the highest point of quantizing a float model, which they include.

    Args:
        root: the library; ours quantizes by ``tutorec.quantize``, another one by its class.
        in_place: whether the float tables are given up on the way.
        tables: T.
        rows: of each table.

    Returns:
        Bytes of anonymous memory, above this process after import and warm-up.
    """
    torch.set_num_threads(1)
    library = Library(root)

    def work(rows: int) -> Callable[[], object]:
        model = nn.Sequential(bag_collection(library, replace(_TABLES, tables=tables, rows=rows)))
        if root != OURS:
            return lambda: _from_float(library, model[0])
        quantize = library.get("quant.whole_model.quantize")
        return lambda: quantize(model, torch.int8, inplace=in_place)

    work(100)()
    before = resident()
    return peak_during(work(rows)) - before
