"""Managed collisions: remapping ids beside their lookup, and recording them in training.

26 tables, full, of 64 columns; raw ids spread over 63 bits, of which nine in ten have a row. Judged
is remapping in eval mode against the lookup of the remapped batch: at most its time. In training
mode ids are recorded too, and compete every so many iterations; a measurement is a whole interval,
the competition included. Growing tables, and hash mappings that have an index, are remapped beside
the same lookup, and not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Bar, Report, machine
from benchmarks.library import Sizes, chosen
from benchmarks.rows import Row, add_row, threads, time_row
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

_TABLES = Sizes(rows=100_000)
_CASES = {"1": replace(_TABLES, pooling=1, calls=20), "10": replace(_TABLES, calls=5)}
SIZES = tuple(_CASES)  # ids a bag
_INTERVAL = 50
_EXPONENT = 1.05
_BAR = Bar("at most", 1.0)
_TRAINING = "remap in training"


def run(options: Options) -> Report:
    """Measure on one thread.

    Args:
        options: Rounds, and which ``--sizes``.

    Returns:
        CPU seconds of a call and their ratios.

    Raises:
        ValueError: A size that there is not.
    """
    cases = chosen(SIZES, options.sizes, "--sizes")
    sizes = options.fit(_TABLES)
    settings = {
        "tables": str(sizes),
        "B": sizes.samples,
        "interval": _INTERVAL,
        "threads": 1,
    }
    report = Report(NAME, settings, context=machine())
    with threads():
        tables = [
            EmbeddingBagConfig(sizes.rows, sizes.columns, f"t{index}", feature_names=[key])
            for index, key in enumerate(sizes.keys())
        ]
        collection = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.01})
        cpu = torch.device("cpu")
        mappings = {
            "remap": _full(tables),
            "growing remap": _filled(tables, GrowingManagedCollisionModule),
            "hash remap": _filled(tables, lambda rows: HashZchManagedCollisionModule(rows, cpu, 1)),
        }
        for case in cases:
            row = _row(f"{case} ids a bag", collection, mappings, options.fit(_CASES[case]))
            bars = {side: _BAR if side == "remap" else None for side in row.calls}
            del bars["look up"]
            timed = time_row(row, options.rounds)
            add_row(report, row.name, timed, bars, reference="look up")
    report.notes += str(mappings["remap"].report()).splitlines()[:3]
    return report


def _full(tables: list[EmbeddingBagConfig]) -> ManagedCollisionCollection:
    """Mappings whose rows have the most frequent ids of their table's law."""
    modules = {}
    for table in tables:
        rows = table.num_embeddings
        module = MCHManagedCollisionModule(
            rows, torch.device("cpu"), DistanceLFU_EvictionPolicy(), _INTERVAL, name=table.name
        )
        ids, ranks = _raw_ids(torch.arange(rows - 1)).sort()
        module._mch_sorted_raw_ids[:-1] = ids
        module._metadata()["counts"][:-1] = (rows / (ranks + 1) ** _EXPONENT).ceil().long()
        modules[table.name] = module
    return ManagedCollisionCollection(modules, tables)


def _filled(
    tables: list[EmbeddingBagConfig], make: Callable[[int], ManagedCollisionModule]
) -> ManagedCollisionCollection:
    """Mappings that have seen the most frequent ids of their table's law once."""
    modules = {table.name: make(table.num_embeddings) for table in tables}
    mappings = ManagedCollisionCollection(modules, tables)
    rows = tables[0].num_embeddings
    ids = _raw_ids(torch.arange(rows - 1)).repeat(len(tables))
    keys = [name for table in tables for name in table.feature_names]
    batch = KeyedJaggedTensor(keys, ids, lengths=torch.full((len(tables),), rows - 1))

    mappings(batch)
    mappings.eval()(batch)  # hash mappings then have an index
    return mappings


def _raw_ids(ranks: Tensor) -> Tensor:
    """Ids as they come: spread over 63 bits."""
    return mixing_hash(ranks, 2**63 - 1)


def _draw(sizes: Sizes, number: int) -> KeyedJaggedTensor:
    """A batch; of ten ids about one has no row."""
    draw = torch.Generator().manual_seed(number + 2**40)
    bags = sizes.tables * sizes.samples
    ids = bags * sizes.pooling
    frequent = power_law_ids(ids, sizes.rows, _EXPONENT, draw)
    rare = torch.randint(sizes.rows, 100 * sizes.rows, (ids,), generator=draw)
    ranks = torch.where(torch.rand(ids, generator=draw) < 0.1, rare, frequent)
    lengths = torch.full((bags,), sizes.pooling)
    return KeyedJaggedTensor(sizes.keys(), _raw_ids(ranks), lengths=lengths)


def _row(
    name: str,
    collection: EmbeddingBagCollection,
    mappings: dict[str, ManagedCollisionCollection],
    sizes: Sizes,
) -> Row:
    """Remap, look up, train, with so many ids a bag."""

    def remap(mapping: ManagedCollisionCollection, batch: KeyedJaggedTensor) -> float:
        return float(mapping(batch).values()[-1])

    @torch.no_grad()
    def look_up(batch: KeyedJaggedTensor) -> float:
        return float(collection(batch).values()[-1, -1])

    def step(batch: KeyedJaggedTensor) -> float:
        collection(batch).values().sum().backward()
        return float(next(collection.parameters()).detach()[0, 0])

    def inputs(side: str, number: int) -> list[KeyedJaggedTensor]:
        count = _INTERVAL if side == _TRAINING else sizes.calls
        batches = [_draw(sizes, number * count + index) for index in range(count)]
        mapping = mappings.get(side, mappings["remap"]).eval()
        remapped = [mapping(batch) for batch in batches]
        mapping.train(side == _TRAINING)
        return remapped if side in ("look up", "forward and backward") else batches

    calls: dict[str, Callable[[Any], float]] = {"look up": look_up, "forward and backward": step}
    calls |= {side: partial(remap, mapping) for side, mapping in mappings.items()}
    calls[_TRAINING] = partial(remap, mappings["remap"])
    return Row(name, calls, inputs, most=None, checked=True)
