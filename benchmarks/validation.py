"""What checks of ids and lengths cost: constructing and looking up, with and without them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.harness import Report, Sample, compare, interleave, machine, time_call
from benchmarks.peer import (
    OURS,
    Batch,
    Library,
    Sizes,
    bag_collection,
    finish,
    fresh_batches,
    look_up_in,
    on_one_thread,
)
from benchmarks.runner import Options
from tutorec._validation import validation

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
        sizes = Sizes(_TABLES, _ROWS, _COLUMNS, _POOLING)
        look_up = look_up_in({OURS: bag_collection(Library(OURS), sizes)})
        variants: dict[str, Callable[[int], Sample]] = {}
        for batch_size in _REPEATS:
            for checks in (True, False):
                title = f"B={batch_size} {'checked' if checks else 'unchecked'}"
                variants[title] = _variant(look_up, sizes, batch_size, checks)
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
    look_up: Callable[[str, Batch], Tensor], sizes: Sizes, batch_size: int, checks: bool
) -> Callable[[int], Sample]:
    def sample(number: int) -> Sample:
        [batch] = fresh_batches(sizes, batch_size, number, 1)
        with validation(checks):
            # both variants of a round look up the same rows: neither may find them in the caches
            # when the other did not
            finish(look_up(OURS, batch))
            return time_call(lambda: finish(look_up(OURS, batch)), _REPEATS[batch_size])

    return sample
