"""A pipeline trains what the plain loop trains: outputs, weights and optimizer state, bit for bit.

By default a pairwise cover runs: every two values of two parameters meet. `pytest -m full` runs the
whole product.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

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

MATRIX = (tuple(PIPELINES), (*KINDS, *MIXES), INPUTS, (1, 2, 4), ("fbgemm", "torch"))


def cases() -> list[Any]:
    chosen = pairwise_cover(MATRIX)
    found = []
    for case in product(*MATRIX):
        marks = [] if case in chosen else [pytest.mark.full]
        marks += [pytest.mark.world4] if case[3] == 4 else []
        found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found


def both(
    rank: int,
    world_size: int,
    pipeline: str,
    kind: str,
    what: str,
    backend: str = "auto",
    **options: Any,
) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
    """The plain loop, then the pipeline, on a model of its own each: outputs and state."""
    found = []
    with use_backend(backend):
        for name in (None, pipeline):
            model = parallel(what, kind, **options)
            optimizer = dense_optimizer(model)
            batches = samples(what, rank)
            if name is None:
                outputs = plain_loop(model, optimizer, batches)
            else:
                outputs = pipelined(PIPELINES[name](model, optimizer, here()), batches)
            found.append(([each.cpu() for each in outputs], state(model, optimizer)))
    return found


def assert_parity(of_ranks: list[Any]) -> None:
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


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("what", ["weighted bags", "rows", "variable bags", "variable rows"])
def test_a_tensor_dict_of_any_input_trains_what_the_batch_trains_in_the_plain_loop(
    ranks: Callable[..., Ranks], what: str, pipeline: str
) -> None:
    pytest.importorskip("tensordict")
    of_batch = ranks(2).run(both, pipeline=pipeline, kind="mixed", what=what)
    of_dict = ranks(2).run(both, pipeline=pipeline, kind="mixed", what=AS_TENSOR_DICT + what)
    assert_parity(of_dict)
    assert_parity(
        [(plain, early) for (plain, _), (_, early) in zip(of_batch, of_dict, strict=True)]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tables in files are on the CPU")
@pytest.mark.parametrize(("what", "kind"), [("bags", "row_wise"), ("rows", "table_wise")])
def test_rows_of_cached_tables_are_read_ahead_and_nothing_else_changes(ranks, what, kind):
    cache = {"kernel": "fused_uvm_caching", "cache_load_factor": 0.3}
    found = ranks(2).run(both, pipeline="prefetch", kind=kind, what=what, **cache)
    assert_parity(found)
