"""Sharded equals unsharded where rows are not pooled: results, table weights and optimizer state,
on the global batch.

By default a pairwise cover runs: every two values of two parameters meet. `pytest -m full` runs the
whole product.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from distributed import nano_reference
from distributed.cases import (
    FEATURES,
    KINDS,
    MIXES,
    OPTIMIZERS,
    batch,
    kind_of,
    on_rank,
    samples_of,
    seed_of,
)
from distributed.row_cases import KEYS, RowsReference, collection, held, lists, loss, plain, shard
from kernels.implementations import CUDA_ADAPTER, implementation
from pairwise import pairwise_cover
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks

STEPS = 3
BATCHES = ("samples", "lists")
MATRIX = ((*KINDS, *MIXES), BATCHES, OPTIMIZERS, (1, 2, 4), ("fbgemm", "torch", CUDA_ADAPTER))
PAIRWISE = pairwise_cover(MATRIX)


def cases() -> list[Any]:
    found = []
    for case in product(*MATRIX):
        marks = [] if case in PAIRWISE else [pytest.mark.full]
        marks += [pytest.mark.world4] if case[3] == 4 else []
        found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found


def batch_of(kind: str, rank: int, step: int) -> KeyedJaggedTensor:
    make = lists if kind == "lists" else batch
    return make(seed_of(rank, step), samples_of(rank, step))


def train(
    rank: int,
    world_size: int,
    kind: str,
    batches: str,
    optimizer: str,
    backend: str,
    dedup: bool = False,
) -> dict[str, Any]:
    """Three steps on one rank; what it computed, and holds."""
    with implementation(backend):
        sharded = shard(collection(need_indices=True), optimizer, kind=kind, dedup=dedup)
        results = []
        for step in range(STEPS):
            rows = sharded(batch_of(batches, rank, step)).wait()
            results.append(plain(rows))
            loss(rows, seed_of(rank, step)).backward()
    return {"results": results, "held": held(sharded)}


@pytest.mark.parametrize(("kind", "batches", "optimizer", "world_size", "backend"), cases())
def test_rows_weights_and_state_equal_unsharded(
    ranks: Callable[..., Ranks],
    kind: str,
    batches: str,
    optimizer: str,
    world_size: int,
    backend: str,
) -> None:
    with use_backend("auto") as chosen:
        if backend != "torch" and chosen.name != "fbgemm":
            pytest.skip(f"no fbgemm here: {chosen.reason}")
    assert_equal_to_unsharded(
        ranks(world_size, hosts=2) if world_size == 4 else ranks(world_size),
        kind,
        batches,
        optimizer,
        backend,
    )


@pytest.mark.parametrize("kind", [*KINDS, *MIXES])
@pytest.mark.parametrize("batches", BATCHES)
def test_ids_sent_once_give_the_same_rows_and_updates(
    ranks: Callable[..., Ranks], kind: str, batches: str
) -> None:
    assert_equal_to_unsharded(
        ranks(2), kind, batches, "exact_row_wise_adagrad", "torch", dedup=True
    )


def assert_equal_to_unsharded(
    pool: Ranks, kind: str, batches: str, optimizer: str, backend: str, **options: Any
) -> None:
    world_size = pool.world_size
    of_ranks = pool.run(
        train, kind=kind, batches=batches, optimizer=optimizer, backend=backend, **options
    )
    by_nano = optimizer in nano_reference.RULES and batches == "samples"
    make = nano_reference.NanoRowsReference if by_nano else RowsReference
    reference = make(collection(need_indices=True), optimizer, world_size, kind)
    for step in range(STEPS):
        wanted = reference.rows_step(
            [batch_of(batches, rank, step) for rank in range(world_size)], step
        )
        for rank, result in enumerate(of_ranks):
            assert sorted(result["results"][step]) == KEYS
            for key, (values, lengths, ids) in result["results"][step].items():
                message = f"{key} of step {step} on rank {rank}"
                assert_close(values, wanted[rank][key][0], rtol=1e-5, atol=1e-6, msg=message)
                assert torch.equal(lengths, wanted[rank][key][1]), message
                assert torch.equal(ids, wanted[rank][key][2]), message
    covered = {name: torch.zeros_like(rows) for name, rows in reference.weights().items()}
    for rank, result in enumerate(of_ranks):
        for name, piece in (
            (name, piece) for name, pieces in result["held"].items() for piece in pieces
        ):
            covered[name][reference.check_piece(name, piece, f"on rank {rank}")] += 1
    for index, count in enumerate(covered.values()):
        assert (count == (world_size if kind_of(kind, index) == "data_parallel" else 1)).all()


def dense_step(rank: int, world_size: int, kind: str) -> list[tuple[str, int, int, torch.Tensor]]:
    """The gradient of each piece here: its table, first row, first column."""
    sharded = shard(collection(), kernel="dense", kind=kind)
    loss(sharded(batch(rank, 3 + rank)).wait(), rank).backward()
    gradients = {name: parameter.grad for name, parameter in sharded.named_parameters()}
    found = []
    for name, pieces in held(sharded).items():
        for index, ((row, column), _, _) in enumerate(pieces):
            gradient = gradients[f"embeddings.{name}.weight" + (f"_{index}" if index else "")]
            assert gradient is not None
            found.append((name, row, column, gradient))
    return found


@pytest.mark.parametrize("kind", [*KINDS, *MIXES])
def test_dense_kernel_leaves_the_gradient_of_the_global_mean(ranks, kind):
    whole = collection()
    (sum(loss(whole(batch(rank, 3 + rank)), rank) for rank in range(2)) / 2).backward()
    found = [piece for of_rank in ranks(2).run(dense_step, kind=kind) for piece in of_rank]
    assert {name for name, *_ in found} == {"t0", "t1", "t2"}
    for name, row, column, gradient in found:
        wanted = whole.embeddings[name].weight.grad
        assert_close(
            gradient, wanted[row : row + gradient.shape[0], column : column + gradient.shape[1]]
        )


def repeated(rank: int, world_size: int, kind: str) -> list[tuple[str, list[int], torch.Tensor]]:
    """One id, many times, on every rank and in two features of one table: one update."""
    sharded = shard(collection(), "exact_row_wise_adagrad", kind=kind)
    ids = KeyedJaggedTensor(list(FEATURES), torch.full((12,), 5), lengths=torch.full((4,), 3))
    loss(sharded(on_rank(ids)).wait(), 0).backward()
    return [(name, *own[:2]) for name, pieces in held(sharded).items() for own in pieces]


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_that_repeats_is_one_update_and_other_rows_do_not_move(ranks, kind):
    reference = RowsReference(collection(), "exact_row_wise_adagrad", 2, kind)
    before = {name: rows.detach().clone() for name, rows in reference.weights().items()}
    same = KeyedJaggedTensor(list(FEATURES), torch.full((12,), 5), lengths=torch.full((4,), 3))
    weights = reference.weights()
    gradients = torch.autograd.grad(2 * loss(reference.ebc(same), 0), list(weights.values()))
    reference.update(dict(zip(weights, gradients, strict=True)), reference.rows_of([same]))
    for name, (row, column), rows in (
        piece for of_rank in ranks(2).run(repeated, kind=kind) for piece in of_rank
    ):
        part = slice(row, row + rows.shape[0]), slice(column, column + rows.shape[1])
        assert_close(rows, reference.weights()[name].detach()[part], rtol=1e-5, atol=1e-6)
        moved = (rows != before[name][part]).any(dim=1).nonzero().view(-1) + row
        assert moved.tolist() == ([5] if row <= 5 < row + rows.shape[0] else [])


def narrow(rank: int, world_size: int, dtype: torch.dtype) -> list[Any]:
    sharded = shard(collection(need_indices=True), kind="mixed")
    features = batch(rank, 4, dtype=dtype)
    rows = sharded(features).wait()
    loss(rows, rank).backward()
    assert all(one.weights().dtype == dtype for one in rows.values())
    pieces = [own[1] for of_table in held(sharded).values() for own in of_table]
    return [*(one.values().detach() for one in rows.values()), *pieces]


def test_int32_ids_train_like_int64_ids(ranks):
    for a, b in zip(
        ranks(2).run(narrow, dtype=torch.int64),
        ranks(2).run(narrow, dtype=torch.int32),
        strict=True,
    ):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
