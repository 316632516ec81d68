"""A pipeline trains what the plain loop trains: outputs, weights and optimizer state, bit for bit.

By default a pairwise cover runs: every two values of two parameters meet. `pytest -m full` runs the
whole product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, TypeAlias

import pytest
import torch
from distributed.cases import KINDS, MIXES
from distributed.train_pipeline.pipeline_cases import (
    AS_TENSOR_DICT,
    INPUTS,
    PIPELINES,
    STEPS,
    assert_same,
    dense_optimizer,
    here,
    parallel,
    pipelined,
    plain_loop,
    samples,
    state,
)
from pairwise import pairwise_cover

from tutorec._kernels.backend import use_backend
from tutorec.spmd import Ranks

PLAIN = "plain loop"
# Of a rank: the outputs of all batches, and the state behind the last one.
Trained: TypeAlias = tuple[list[torch.Tensor], dict[str, Any]]
MATRIX = (tuple(PIPELINES), (*KINDS, *MIXES), INPUTS, (1, 2, 4), ("fbgemm", "torch"))


def cases() -> list[Any]:
    chosen = pairwise_cover(MATRIX)
    found = []
    for case in product(*MATRIX):
        marks = [] if case in chosen else [pytest.mark.full]
        marks += [pytest.mark.world4] if case[3] == 4 else []
        found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found


def trained(
    rank: int,
    world_size: int,
    loop: str,
    kind: str,
    what: str,
    backend: str = "auto",
    **options: Any,
) -> Trained:
    """A loop on a model of its own: outputs and state."""
    with use_backend(backend):
        model = parallel(what, kind, **options)
        optimizer = dense_optimizer(model)
        batches = samples(what, rank)
        if loop == PLAIN:
            outputs = plain_loop(model, optimizer, batches)
        else:
            outputs = pipelined(PIPELINES[loop](model, optimizer, here()), batches)
        return [each.cpu() for each in outputs], state(model, optimizer)


def both(rank: int, world_size: int, pipeline: str, **options: Any) -> tuple[Trained, Trained]:
    """The plain loop, then the pipeline."""
    wanted = trained(rank, world_size, PLAIN, **options)
    return wanted, trained(rank, world_size, pipeline, **options)


def assert_parity(of_ranks: Iterable[tuple[Trained, Trained]]) -> None:
    for rank, ((plain, wanted), (outputs, found)) in enumerate(of_ranks):
        assert len(outputs) == STEPS
        for step, (one, other) in enumerate(zip(plain, outputs, strict=True)):
            assert torch.equal(one, other), f"output of batch {step} on rank {rank}"
        assert_same(wanted, found, f"on rank {rank}")


@pytest.mark.parametrize(("pipeline", "kind", "what", "world_size", "backend"), cases())
def test_a_pipeline_trains_what_the_plain_loop_trains(
    ranks: Callable[..., Ranks], pipeline: str, kind: str, what: str, world_size: int, backend: str
) -> None:
    with use_backend("auto") as found:
        if backend != "torch" and found.name != "fbgemm":
            pytest.skip(f"no fbgemm here: {found.reason}")
    pool = ranks(world_size, hosts=2) if world_size == 4 else ranks(world_size)
    assert_parity(pool.run(both, pipeline=pipeline, kind=kind, what=what, backend=backend))


@pytest.fixture(scope="module")
def trained_of_batches(ranks: Callable[..., Ranks]) -> Callable[[str], list[Trained]]:
    """``trained_of_batches(what)``: the plain loop on the batches themselves, of each rank."""

    @functools.cache
    def run(what: str) -> list[Trained]:
        return ranks(2).run(trained, PLAIN, kind="mixed", what=what)

    return run


@pytest.mark.parametrize("loop", [PLAIN, *PIPELINES])
@pytest.mark.parametrize("what", ["weighted bags", "rows", "variable bags", "variable rows"])
def test_a_tensor_dict_of_any_input_trains_what_the_batch_trains_in_the_plain_loop(
    ranks: Callable[..., Ranks],
    trained_of_batches: Callable[[str], list[Trained]],
    what: str,
    loop: str,
) -> None:
    pytest.importorskip("tensordict")
    of_dict = ranks(2).run(trained, loop, kind="mixed", what=AS_TENSOR_DICT + what)
    assert_parity(zip(trained_of_batches(what), of_dict, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tables in files are on the CPU")
@pytest.mark.parametrize(("what", "kind"), [("bags", "row_wise"), ("rows", "table_wise")])
def test_rows_of_cached_tables_are_read_ahead_and_nothing_else_changes(ranks, what, kind):
    cache = {"kernel": "fused_uvm_caching", "cache_load_factor": 0.3}
    found = ranks(2).run(both, pipeline="prefetch", kind=kind, what=what, **cache)
    assert_parity(found)
