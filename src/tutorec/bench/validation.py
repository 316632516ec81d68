"""What checks of ids and lengths cost: constructing and looking up, with and without them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tutorec._validation import validation
from tutorec.bench.harness import Report, Sample, compare, interleave, machine, time_call
from tutorec.bench.peer import on_one_thread, random_bags
from tutorec.bench.runner import Options
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

NAME = "validation"
ROUNDS = 30

_TABLES, _ROWS, _COLUMNS, _POOLING = 26, 30_000, 64, 10
_REPEATS = {1: 50, 256: 5, 2048: 2}


def run(options: Options) -> Report:
    """Measure an EmbeddingBagCollection on fresh batches, one thread.

    Args:
        options: rounds.

    Returns:
        CPU and wall seconds for each batch size, and the share of the checks.
    """
    with on_one_thread():
        keys = [f"f{i}" for i in range(_TABLES)]
        tables = [
            EmbeddingBagConfig(_ROWS, _COLUMNS, f"t_{key}", feature_names=[key]) for key in keys
        ]
        collection = EmbeddingBagCollection(tables)
        variants: dict[str, Callable[[int], Sample]] = {}
        for batch_size in _REPEATS:
            for checks in (True, False):
                title = f"B={batch_size} {'checked' if checks else 'unchecked'}"
                variants[title] = _variant(collection, keys, batch_size, checks)
        samples = interleave(variants, options.rounds, warmup=2)
    comparisons = [
        compare(samples, f"B={b} checked", f"B={b} unchecked", clock=clock)
        for b in _REPEATS
        for clock in ("cpu", "wall")
    ]
    shares = [(b, 1 - 1 / c.ratio.median) for b, c in zip(_REPEATS, comparisons[::2], strict=True)]
    return Report(
        name=NAME,
        settings={
            "tables": f"{_TABLES} x {_ROWS} x {_COLUMNS}",
            "ids per bag": _POOLING,
            "threads": 1,
        },
        samples=samples,
        comparisons=comparisons,
        context=machine(),
        notes=[f"checks are {share:.1%} of the CPU time of a batch of {b}" for b, share in shares],
    )


def _variant(
    collection: EmbeddingBagCollection, keys: list[str], batch_size: int, checks: bool
) -> Callable[[int], Sample]:
    def sample(number: int) -> Sample:
        values, lengths = _ids(batch_size, number)
        with validation(checks):
            # both variants of a round look up the same rows: neither may find them in the caches
            # when the other did not
            _look_up(collection, keys, values, lengths)
            return time_call(
                lambda: _look_up(collection, keys, values, lengths), _REPEATS[batch_size]
            )

    return sample


def _ids(batch_size: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + number)
    return random_bags(generator, _TABLES * batch_size, _POOLING, _ROWS)


@torch.no_grad()
def _look_up(
    collection: EmbeddingBagCollection, keys: list[str], values: Tensor, lengths: Tensor
) -> float:
    """A fresh batch from its values and lengths, looked up; the result is read."""
    pooled = collection(KeyedJaggedTensor(keys, values, lengths=lengths))
    return float(pooled.values()[-1, -1])
