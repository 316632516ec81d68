"""On GPUs: lookup, fused step, int8 lookup, sharded step on all of them; --vs adds a peer.

The tables and batches are those of the benchmarks ``ebc``, ``quant`` and ``sharded``, larger. Wall
time is judged, each call by itself from the construction of its batch until the device has
finished. Batches are on the device before the clock starts. A lookup is bound by memory: in each of
its rounds the device also copies as many bytes as the lookup reads and writes, and the ratio of the
two times is the share of the memory bandwidth that the lookup reaches.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import ebc, quant
from benchmarks.harness import Report, Sample, compare, machine, time_each
from benchmarks.library import (
    OURS,
    Batch,
    Library,
    Sizes,
    bag_collection,
    chosen,
    finish,
    fresh_batches,
    libraries,
    lookup,
)
from benchmarks.rows import TOLERANCE, Row, add_row, against, time_row
from benchmarks.runner import Options
from benchmarks.sharded import add_sharded
from benchmarks.sharded_rank import Case, measure
from tutorec.spmd.pool import Ranks

NAME = "gpu"
ROUNDS = 30

SIZES_ON_GPU = Sizes(rows=500_000, samples=4096, calls=10)
_STEPS = {"step-sgd": "sgd", "step-rowwise_adagrad": "rowwise_adagrad"}
_SHARDED = {f"sharded-{name}": name for name in ("table_wise", "row_wise", "column_wise")}
CASES = ("forward", *_STEPS, "int8", *_SHARDED)
# The largest difference of a lookup's results. A peer may round a number between two codes to the
# other one: two steps of INT8.
_MOST = {"forward": TOLERANCE, "int8": 2 / 255}
# In every case the peer should take at least as long.
_BAR = 1.0
_TIMEOUT = 1800.0


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
    sizes = options.fit(SIZES_ON_GPU)
    world_size = torch.cuda.device_count() if device == "cuda" else 2
    context = machine(options.vs)
    context["hardware"] |= gpus()
    settings = {
        "device": device,
        "tables": str(sizes),
        "B": sizes.samples,
        "ids per bag": sizes.pooling,
        "ranks of a sharded step": world_size,
        "batches": "fresh for every call, on the device",
    }
    report = Report(NAME, settings, context=context)

    for name in cases:
        if name in _MOST:
            _run_lookup(report, sides, name, sizes, options, device)
        elif name in _STEPS:
            _run_step(report, sides, name, sizes, options, device)
    sharded = [name for name in cases if name in _SHARDED]
    if sharded:
        _run_sharded(report, sharded, sizes, options, world_size, device)
    return report


def gpus() -> dict[str, Any]:
    """Names of the GPUs, version of their driver, and of the CUDA that torch was built for."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        driver = output.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = None
    return {"gpus": names, "driver": driver, "cuda": torch.version.cuda}


def _run_lookup(
    report: Report, sides: list[Library], name: str, sizes: Sizes, options: Options, device: str
) -> None:
    """Time lookups in turn with a copy of as many bytes."""
    if name == "int8":
        collections = {side.root: quant.quantized(side, sizes, device=device) for side in sides}
        batches = quant.fresh_requests
    else:
        collections = {side.root: bag_collection(side, sizes, device) for side in sides}
        batches = fresh_batches

    calls = {side.root: lookup(side, collections[side.root]) for side in sides}
    [batch, *_] = batches(sizes, -1000, device)
    weight = collections[OURS].embedding_bags["t0"].weight
    moved = _bytes_moved(batch, calls[OURS](batch), weight)
    copy = f"{name}: copy of as many bytes"
    row = Row(
        name,
        calls,
        lambda _, number: batches(sizes, number, device),
        most=_MOST[name],
        extra={copy: _copy_of(moved // 2, batch[1].device, sizes.calls)},
    )

    add_row(report, name, time_row(row, options.rounds), against(options.vs, _BAR), ["wall"])
    for side in calls:
        title = f"{name}: share of the copy's bandwidth, {side}"
        share = compare(report.samples, copy, f"{name}: {side}", "wall", title=title)
        report.comparisons.append(share)
        copied, looked_up = (moved / median / 1e9 for median in share.medians or ())
        report.notes.append(
            f"{name}: {side} reads and writes {looked_up:,.1f} GB/s of ids, rows and results, "
            f"a copy on the device {copied:,.1f} GB/s; {moved:,} bytes each"
        )


def _copy_of(size: int, device: torch.device, calls: int) -> Callable[[int], Sample]:
    """What times copies of so many bytes, each of which is read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return lambda _: time_each(lambda _: finish(target.copy_(source)), range(calls))


def _bytes_moved(batch: Batch, pooled: Tensor, weight: Tensor) -> int:
    """Bytes that a lookup cannot do without: ids and lengths, a row for each id, the results."""
    _, values, lengths = batch
    row_bytes = weight.shape[1] * weight.itemsize
    return values.nbytes + lengths.nbytes + len(values) * row_bytes + pooled.nbytes


def _run_step(
    report: Report, sides: list[Library], name: str, sizes: Sizes, options: Options, device: str
) -> None:
    """Ours beside the peer's collection whose optimizer is fused into its kernel."""
    steps = {OURS: ebc.in_backward_step(sides[0], _STEPS[name], sizes, device)}
    fused = f"{options.vs} fused" if options.vs else None
    if fused:
        steps[fused] = ebc.fused_step(sides[-1], _STEPS[name], sizes, device)
    timed = time_row(ebc.step_row(name, steps, sizes, device), options.rounds)
    add_row(report, name, timed, against(fused, _BAR), ["wall"])


def _run_sharded(
    report: Report,
    names: list[str],
    sizes: Sizes,
    options: Options,
    world_size: int,
    device: str,
) -> None:
    """Row-wise Adagrad steps with a rank on every GPU."""
    roots = [side.root for side in libraries(options.vs)]

    # "auto" would measure the CPU where the ranks cannot have a GPU each.
    backend = "nccl" if device == "cuda" else "gloo"
    with Ranks(world_size, backend=backend, timeout=_TIMEOUT) as ranks:
        for name in names:
            case = Case(name, "step", _SHARDED[name])
            results = ranks.run(measure, case, sizes, roots, options.rounds)
            add_sharded(report, case, results, against(options.vs, _BAR), ["wall"])
