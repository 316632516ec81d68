"""Managed collisions: remapping ids beside their lookup, and recording them in training.

26 tables, full, of 64 columns; raw ids spread over 63 bits, of which nine in ten have a row. Judged
is remapping in eval mode against the lookup of the remapped batch: at most its time. In training
mode ids are recorded too, and compete every so many iterations; a measurement is a whole interval,
the competition included. Growing tables, and hash mappings that have an index, are remapped beside
the same lookup, and not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Report, Sample, compare, interleave, machine, time_call
from benchmarks.peer import chosen, on_one_thread
from benchmarks.runner import Options
from tutorec.datasets.ids import power_law_ids
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.growing import GrowingManagedCollisionModule
from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule
from tutorec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.sparse.hashing import mixing_hash
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

NAME = "mc"
ROUNDS = 30
SIZES = ("1", "10")  # ids a bag

TABLES, ROWS, COLUMNS, BATCH, INTERVAL, EXPONENT = 26, 100_000, 64, 256, 50, 1.05
_OTHERS: dict[str, Callable[[], ManagedCollisionModule]] = {
    "growing": lambda: GrowingManagedCollisionModule(ROWS),
    "hash": lambda: HashZchManagedCollisionModule(ROWS, torch.device("cpu"), 1),
}
_CALLS = {"1": 20, "10": 5}
_BAR = Bar("at most", 1.0)


def run(options: Options) -> Report:
    """Measure on one thread.

    Args:
        options: Rounds, and which ``--sizes``.

    Returns:
        CPU seconds of a call and their ratios.

    Raises:
        ValueError: A size that there is not.
    """
    sizes = chosen(SIZES, options.sizes, "--sizes")
    settings: dict[str, Any] = {
        "tables": f"{TABLES} x {ROWS:,} x {COLUMNS}",
        "B": BATCH,
        "interval": INTERVAL,
        "threads": 1,
    }
    report = Report(NAME, settings, context=machine())
    with on_one_thread():
        tables = [
            EmbeddingBagConfig(ROWS, COLUMNS, f"t{each}", feature_names=[f"f{each}"])
            for each in range(TABLES)
        ]
        collection, mappings = EmbeddingBagCollection(tables), filled_mappings(tables)
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.01})
        others = {kind: _filled(tables, make) for kind, make in _OTHERS.items()}
        for size in sizes:
            _measure(report, collection, mappings, others, size, options.rounds)
    report.notes += str(mappings.report()).splitlines()[:3]
    return report


def filled_mappings(tables: list[EmbeddingBagConfig]) -> ManagedCollisionCollection:
    """Mappings whose rows have the most frequent ids of their table's law.

    Args:
        tables: What each table is.
    """
    modules = {}
    for table in tables:
        module = MCHManagedCollisionModule(
            ROWS, torch.device("cpu"), DistanceLFU_EvictionPolicy(), INTERVAL, name=table.name
        )
        module._mch_sorted_raw_ids[:-1], ranks = _raw_ids(torch.arange(ROWS - 1)).sort()
        module._metadata()["counts"][:-1] = (ROWS / (ranks + 1) ** EXPONENT).ceil().long()
        modules[table.name] = module
    return ManagedCollisionCollection(modules, tables)


def _filled(
    tables: list[EmbeddingBagConfig], make: Callable[[], ManagedCollisionModule]
) -> ManagedCollisionCollection:
    """Mappings that have seen the most frequent ids of their table's law once."""
    mappings = ManagedCollisionCollection({table.name: make() for table in tables}, tables)
    ids = _raw_ids(torch.arange(ROWS - 1)).repeat(len(tables))
    keys = [name for table in tables for name in table.feature_names]
    batch = KeyedJaggedTensor(keys, ids, lengths=torch.full((len(tables),), ROWS - 1))
    mappings(batch)
    mappings.eval()(batch)  # hash mappings then have an index
    return mappings


def _raw_ids(ranks: Tensor) -> Tensor:
    """Ids as they come: spread over 63 bits."""
    return mixing_hash(ranks, 2**63 - 1)


def _draw(number: int, size: str) -> KeyedJaggedTensor:
    """A batch; of ten ids about one has no row."""
    draw = torch.Generator().manual_seed(number + 2**40)
    ids, keys = BATCH * TABLES * int(size), [f"f{each}" for each in range(TABLES)]
    frequent = power_law_ids(ids, ROWS, EXPONENT, draw)
    rare = torch.randint(ROWS, 100 * ROWS, (ids,), generator=draw)
    ranks = torch.where(torch.rand(ids, generator=draw) < 0.1, rare, frequent)
    return KeyedJaggedTensor(
        keys, _raw_ids(ranks), lengths=torch.full((BATCH * TABLES,), int(size))
    )


def _measure(
    report: Report,
    collection: EmbeddingBagCollection,
    mappings: ManagedCollisionCollection,
    others: dict[str, ManagedCollisionCollection],
    size: str,
    rounds: int,
) -> None:
    """Remap, look up, train, with so many ids a bag."""
    calls = _CALLS[size]

    def sample(
        number: int,
        count: int,
        call: Callable[[KeyedJaggedTensor], float] | None = None,
        by: ManagedCollisionCollection = mappings,
        training: bool = False,
    ) -> Sample:
        batches = [_draw(number * count + each, size) for each in range(count)]
        remapped = [by.eval()(one) for one in batches]
        by.train(training)
        given = iter(remapped if call else batches)
        run = call or (lambda batch: float(by(batch).values()[-1]))
        return time_call(lambda: run(next(given)), count)

    def look_up(batch: KeyedJaggedTensor) -> float:
        with torch.no_grad():
            return float(collection(batch).values()[-1, -1])

    def step(batch: KeyedJaggedTensor) -> float:
        collection(batch).values().sum().backward()
        return float(next(collection.parameters()).detach()[0, 0])

    names = [
        f"{what}, {size} ids a bag"
        for what in ("remap", "look up", "remap in training", "forward and backward")
    ]
    variants: dict[str, Callable[[int], Sample]] = {
        names[0]: partial(sample, count=calls),
        names[1]: partial(sample, count=calls, call=look_up),
        names[2]: partial(sample, count=INTERVAL, training=True),
        names[3]: partial(sample, count=calls, call=step),
    }
    for kind, by in others.items():
        variants[f"{kind} remap, {size} ids a bag"] = partial(sample, count=calls, by=by)
    samples = interleave(variants, rounds)
    report.samples |= samples
    report.comparisons.append(compare(samples, names[0], names[1], bar=_BAR))
    report.comparisons.append(compare(samples, names[2], names[1]))
    report.comparisons.append(compare(samples, names[2], names[3]))
    for kind in others:
        report.comparisons.append(compare(samples, f"{kind} remap, {size} ids a bag", names[1]))
