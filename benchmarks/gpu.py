"""On GPUs: lookup, fused step, int8 lookup, sharded step on all of them; --vs adds a peer.

The tables and batches are those of ``bench ebc``, ``quant`` and ``sharded``, larger. Wall time is
judged, each call by itself from the construction of its batch until the device has finished.
Batches lie on the device before the clock starts. A lookup is bound by memory: in each of its
rounds the device also copies as many bytes as the lookup reads and writes, and the ratio of the two
times is the share of the memory bandwidth that the lookup reaches.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import ebc, quant
from benchmarks.harness import Report, compare, interleave, machine
from benchmarks.peer import (
    OURS,
    Batch,
    Library,
    Sizes,
    bag_collection,
    chosen,
    finish,
    fresh_batches,
    judged_both,
    libraries,
    look_up_in,
    time_each,
    timed_calls,
)
from benchmarks.runner import Options
from benchmarks.sharded import take_slowest
from benchmarks.sharded_rank import Case, measure
from tutorec.spmd.pool import Ranks

NAME = "gpu"
ROUNDS = 30

ROWS, SAMPLES, CALLS = 500_000, 4096, 10
SHARDED_SIZES = Sizes(rows=ROWS)
_STEPS = {"step-sgd": "sgd", "step-rowwise_adagrad": "rowwise_adagrad"}
_SHARDED = {f"sharded-{kind}": kind for kind in ("table_wise", "row_wise", "column_wise")}
CASES = ("forward", *_STEPS, "int8", *_SHARDED)
# What peer / tutorec should be in every case: at least as fast.
_BAR = 1.0
_TIMEOUT = 1800.0

Lookup = Callable[[str, Batch], Tensor]


def run(options: Options) -> Report:
    """Measure on the first GPU, then on all of them.

    Args:
        options: rounds, the peer, which ``--cases``.

    Returns:
        CPU and wall seconds, shares of the device's bandwidth; with a peer the ratios with their
        bars.

    Raises:
        ValueError: there is no GPU, the peer is not installed, an unknown case, or the libraries'
            results differ.
    """
    device = options.device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"bench {NAME} needs a CUDA device, and torch {torch.__version__} finds none here"
        )
    sides = libraries(options.vs)
    cases = chosen(CASES, options.cases, "--cases")
    world = torch.cuda.device_count() if device == "cuda" else 2
    context = machine(options.vs)
    report = Report(
        name=NAME,
        settings={
            "device": device,
            **({"gpus": ", ".join(gpus()["gpus"])} if device == "cuda" else {}),
            "tables": f"{SHARDED_SIZES.tables} x {ROWS} x {SHARDED_SIZES.columns}",
            "B": SAMPLES,
            "ids per bag": SHARDED_SIZES.pooling,
            "ranks of a sharded step": world,
            "batches": "fresh for every call, on the device",
        },
        context={**context, "hardware": {**context["hardware"], **gpus()}},
    )
    if "forward" in cases:
        _run_forward(report, sides, options, device)
    for case in (case for case in _STEPS if case in cases):
        _run_step(report, sides, case, options, device)
    if "int8" in cases:
        _run_int8(report, sides, options, device)
    _run_sharded(report, [case for case in cases if case in _SHARDED], options, world, device)
    return report


def gpus() -> dict[str, Any]:
    """Names of the GPUs, version of their driver, and of the CUDA that torch was built for."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[
            0
        ]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {"gpus": names, "driver": driver, "cuda": torch.version.cuda}


def _run_forward(report: Report, sides: list[Library], options: Options, device: str) -> None:
    collections = {side.root: bag_collection(side, SHARDED_SIZES, device) for side in sides}
    width = next(iter(collections[OURS].embedding_bags.values())).weight.shape[1]

    def batches(number: int, count: int) -> list[Batch]:
        return fresh_batches(SHARDED_SIZES, SAMPLES, number, count, device)

    _run_lookup(report, sides, "forward", look_up_in(collections), batches, 4 * width, options)


def _run_int8(report: Report, sides: list[Library], options: Options, device: str) -> None:
    collections = {side.root: quant.quantized(side, ROWS, device=device) for side in sides}
    weight = collections[OURS].embedding_bags["t0"].weight

    def batches(number: int, count: int) -> list[Batch]:
        case = quant.Case(SAMPLES, SHARDED_SIZES.pooling, count, None)
        return quant.fresh_requests(case, ROWS, number, device)

    bytes_of_row = weight.shape[1] * weight.itemsize
    _run_lookup(report, sides, "int8", look_up_in(collections), batches, bytes_of_row, options)


def _run_lookup(
    report: Report,
    sides: list[Library],
    case: str,
    look_up: Lookup,
    batches: Callable[[int, int], list[Batch]],
    bytes_of_row: int,
    options: Options,
) -> None:
    """Time lookups in turn with a copy of as many bytes."""
    [one] = batches(-1000, 1)
    results = {side.root: [look_up(side.root, one)] for side in sides}
    # A peer may round a number that lies between two codes to the other one: two steps of INT8.
    ebc.require_close(case, results, most=1e-4 if case == "forward" else 2 / 255)
    moved = _bytes_moved(one, results[OURS][0], bytes_of_row)
    source, target = torch.zeros(2, moved // 2, dtype=torch.uint8, device=one[1].device)

    copy = f"{case}: copy of as many bytes"
    variants = timed_calls(
        case,
        sides,
        lambda root, batch: finish(look_up(root, batch)),
        lambda number: batches(number, CALLS),
    )
    variants[copy] = lambda number: time_each(lambda _: finish(target.copy_(source)), range(CALLS))
    samples = interleave(variants, options.rounds, warmup=2)
    report.samples |= samples
    if options.vs:
        report.comparisons += judged_both(samples, case, options.vs, "wall", _BAR)
    for side in sides:
        title = f"{case}: share of the copy's bandwidth, {side.root}"
        share = compare(samples, copy, f"{case}: {side.root}", "wall", title=title)
        report.comparisons.append(share)
        copied, looked_up = (moved / median / 1e9 for median in share.medians or ())
        report.notes.append(
            f"{case}: {side.root} reads and writes {looked_up:,.1f} GB/s of ids, rows and results, "
            f"a copy on the device {copied:,.1f} GB/s; {moved:,} bytes each"
        )


def _bytes_moved(batch: Batch, pooled: Tensor, bytes_of_row: int) -> int:
    """Bytes that a lookup cannot do without: ids and lengths, a row for each id, the results."""
    _, values, lengths = batch
    read = values.numel() * (values.itemsize + bytes_of_row) + lengths.numel() * lengths.itemsize
    return read + pooled.numel() * pooled.itemsize


def _run_step(
    report: Report, sides: list[Library], case: str, options: Options, device: str
) -> None:
    """Ours beside the peer's collection whose optimizer is fused into its kernel."""
    steps = {OURS: ebc.in_backward_step(sides[0], _STEPS[case], SHARDED_SIZES, device)}
    if options.vs:
        fused = ebc.fused_step(sides[-1], _STEPS[case], SHARDED_SIZES, device)
        steps[f"{options.vs} fused"] = fused
    batches = partial(fresh_batches, SHARDED_SIZES, SAMPLES, device=device)
    samples = ebc.time_steps(case, steps, batches, CALLS, options.rounds)
    report.samples |= samples
    if options.vs:
        report.comparisons += judged_both(samples, case, f"{options.vs} fused", "wall", _BAR)


def _run_sharded(
    report: Report, names: list[str], options: Options, world: int, device: str
) -> None:
    """Row-wise Adagrad steps with a rank on every GPU."""
    if not names:
        return
    roots = [side.root for side in libraries(options.vs)]
    # "auto" would measure the CPU where the ranks cannot have a GPU each.
    backend = "nccl" if device == "cuda" else "gloo"
    with Ranks(world, backend=backend, timeout=_TIMEOUT) as ranks:
        for name in names:
            case = Case(name, "step", _SHARDED[name], samples=SAMPLES, repeats=CALLS)
            results = ranks.run(measure, case, SHARDED_SIZES, roots, options.rounds)
            take_slowest(report, case, results, roots)
            if options.vs:
                report.comparisons += judged_both(report.samples, name, options.vs, "wall", _BAR)
