"""Sharded equals unsharded: outputs, table weights and optimizer state, each by itself, on the
global batch.

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
    KINDS,
    LEARNING_RATE,
    MIXES,
    OPTIMIZERS,
    ROWS,
    Reference,
    batch,
    coefficients,
    collection,
    held,
    kind_of,
    local_state,
    local_weights,
    samples_of,
    seed_of,
    shard,
)
from kernels.implementations import CUDA_ADAPTER, implementation
from pairwise import pairwise_cover
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec.modules.embedding_configs import PoolingType
from tutorec.spmd import Ranks, device

STEPS = 3
POOLINGS = {
    "sum": (PoolingType.SUM, False),
    "mean": (PoolingType.MEAN, False),
    "sqrtn": (PoolingType.SQRTN, False),
    "weighted": (PoolingType.SUM, True),
    "weighted sqrtn": (PoolingType.SQRTN, True),
}
BACKENDS = ("fbgemm", "torch", CUDA_ADAPTER)
MATRIX = ((*KINDS, *MIXES), tuple(POOLINGS), OPTIMIZERS, (1, 2, 4), BACKENDS)
PAIRWISE = pairwise_cover(MATRIX)


def cases() -> list[Any]:
    found = []
    for case in product(*MATRIX):
        marks = [] if case in PAIRWISE else [pytest.mark.full]
        marks += [pytest.mark.world4] if case[3] == 4 else []
        found.append(pytest.param(*case, marks=marks, id="-".join(map(str, case))))
    return found


def train(
    rank: int,
    world_size: int,
    kind: str,
    pooling: str,
    optimizer: str,
    backend: str,
    dtype: torch.dtype = torch.int64,
) -> dict[str, Any]:
    """Three steps on one rank; what it computed, holds, and remembers."""
    pooled, weighted = POOLINGS[pooling]
    with implementation(backend):
        sharded = shard(collection(pooled, weighted), optimizer, kind=kind)
        outputs = []
        for step in range(STEPS):
            features = batch(seed_of(rank, step), samples_of(rank, step), weighted, dtype)
            out = sharded(features).wait()
            outputs.append(out.values().detach())
            (out.values() * coefficients(out.values(), seed_of(rank, step))).sum().backward()
        with torch.no_grad():  # a forward that is followed by no backward, and no step of Adam's
            keys = sharded(features).keys()
    return {"outputs": outputs, "keys": keys, "held": held(sharded)}


def expected(
    kind: str, world_size: int, pooling: str, optimizer: str
) -> tuple[list[list[torch.Tensor]], Reference]:
    pooled, weighted = POOLINGS[pooling]
    by_nano = optimizer in nano_reference.RULES and pooled in nano_reference.POOLINGS
    make = nano_reference.NanoReference if by_nano and not weighted else Reference
    reference = make(collection(pooled, weighted), optimizer, world_size, kind)
    outputs = []
    for step in range(STEPS):
        batches = [
            batch(seed_of(rank, step), samples_of(rank, step), weighted)
            for rank in range(world_size)
        ]
        outputs.append(reference.step(batches, step))
    return outputs, reference


def skip_without(backend: str) -> None:
    with use_backend("auto") as found:
        if backend != "torch" and found.name != "fbgemm":
            pytest.skip(f"no fbgemm here: {found.reason}")


@pytest.mark.parametrize(("kind", "pooling", "optimizer", "world_size", "backend"), cases())
def test_outputs_weights_and_state_equal_unsharded(
    ranks: Callable[..., Ranks],
    kind: str,
    pooling: str,
    optimizer: str,
    world_size: int,
    backend: str,
) -> None:
    skip_without(backend)
    assert_equal_to_unsharded(
        ranks(world_size, hosts=2) if world_size == 4 else ranks(world_size),
        kind,
        pooling,
        optimizer,
        backend,
    )


def assert_equal_to_unsharded(
    pool: Ranks, kind: str, pooling: str, optimizer: str, backend: str
) -> None:
    world_size = pool.world_size
    of_ranks = pool.run(train, kind=kind, pooling=pooling, optimizer=optimizer, backend=backend)
    outputs, reference = expected(kind, world_size, pooling, optimizer)
    for rank, result in enumerate(of_ranks):
        assert result["keys"] == ["f0", "f1@t0", "f1@t1", "f2", "f3"]
        for step in range(STEPS):
            message = f"outputs of step {step} on rank {rank}"
            assert_close(
                result["outputs"][step], outputs[step][rank], rtol=1e-5, atol=1e-6, msg=message
            )
    covered = {name: torch.zeros_like(rows) for name, rows in reference.weights().items()}
    for rank, result in enumerate(of_ranks):
        for name, piece in (
            (name, piece) for name, pieces in result["held"].items() for piece in pieces
        ):
            covered[name][reference.check_piece(name, piece, f"on rank {rank}")] += 1
    for index, count in enumerate(covered.values()):
        assert (count == (world_size if kind_of(kind, index) == "data_parallel" else 1)).all()


def touched_rows_only(rank: int, world_size: int) -> dict[str, tuple[bool, bool]]:
    before = {
        name: bag.get_parameter("weight").detach()
        for name, bag in collection().embedding_bags.items()
    }
    sharded = shard(collection(), "exact_row_wise_adagrad")
    sharded(batch(rank, 4)).values().sum().backward()
    state = local_state(sharded)
    return {
        name: (
            torch.equal(rows[ROWS:].cpu(), before[name][ROWS:]),
            bool((state[f"{name}.momentum1"][ROWS:] == 0).all()),
        )
        for name, rows in local_weights(sharded).items()
    }


def test_rows_outside_of_the_batch_and_their_state_do_not_move(ranks):
    found = {
        name: kept for result in ranks(2).run(touched_rows_only) for name, kept in result.items()
    }
    assert found == {"t0": (True, True), "t1": (True, True), "t2": (True, True)}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_int32_ids_train_like_int64_ids(ranks, world_size):
    options = {"kind": "mixed", "pooling": "sum", "optimizer": "exact_sgd", "backend": "auto"}
    wide = ranks(world_size).run(train, **options)
    narrow = ranks(world_size).run(train, **options, dtype=torch.int32)
    for a, b in zip(wide, narrow, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a["outputs"], b["outputs"], strict=True))
        for name, pieces in a["held"].items():
            assert all(
                torch.equal(x[1], y[1]) for x, y in zip(pieces, b["held"][name], strict=True)
            )


def train_dense(rank: int, world_size: int, kind: str) -> list[tuple[str, int, int, torch.Tensor]]:
    """The gradient of each piece here: its table, first row, first column."""
    sharded = shard(collection(), kernel="dense", kind=kind)
    out = sharded(batch(rank, 3 + rank)).values()
    (out * coefficients(out, rank)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in sharded.named_parameters()}
    found = []
    for name, pieces in held(sharded).items():
        for index, ((row, column), _, _) in enumerate(pieces):
            gradient = gradients[f"embedding_bags.{name}.weight" + (f"_{index}" if index else "")]
            assert gradient is not None
            found.append((name, row, column, gradient))
    return found


@pytest.mark.parametrize("kind", [*KINDS, *MIXES])
def test_dense_kernel_leaves_the_gradient_of_the_global_mean(ranks, kind):
    reference = Reference(collection(), "exact_sgd", 2)
    outputs = reference.outputs([batch(0, 3), batch(1, 4)])
    loss = sum((out * coefficients(out, rank)).sum() for rank, out in enumerate(outputs)) / 2
    loss.backward()
    found = [piece for of_rank in ranks(2).run(train_dense, kind=kind) for piece in of_rank]
    assert {name for name, *_ in found} == {"t0", "t1", "t2"}
    for name, row, column, gradient in found:
        whole = reference.weights()[name].grad
        assert_close(
            gradient, whole[row : row + gradient.shape[0], column : column + gradient.shape[1]]
        )


def loss_drop(rank: int, world_size: int) -> float:
    from tutorec.modules.embedding_configs import EmbeddingBagConfig
    from tutorec.modules.embedding_modules import EmbeddingBagCollection
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=4096,
                embedding_dim=64,
                name="product_table",
                feature_names=["product"],
            ),
            EmbeddingBagConfig(
                num_embeddings=4096, embedding_dim=64, name="user_table", feature_names=["user"]
            ),
        ]
    )
    sharded = shard(ebc, "exact_row_wise_adagrad", learning_rate=0.02, eps=0.002)
    features = KeyedJaggedTensor(
        ["product", "user"],
        torch.tensor([1, 2, 1, 5, 2, 3, 4, 1]),
        lengths=torch.tensor([3, 1, 2, 2]),
    ).to(device())
    # Every rank brings the same samples, so that the mean over ranks is what one rank alone
    # computes.
    first = sharded(features).values().detach().double()
    out = sharded(features).values()
    (torch.ones_like(out) - out).sum().backward()
    return float((sharded(features).values().detach().double() - first).sum())


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_passes_over_the_tutorial_batch_lower_the_loss_by_the_exact_amount(ranks, world_size):
    # product 1 is in its bag twice: its gradients are summed before the one update
    counts = [2, 1, 1, 1, 1, 1, 1]
    exact = 64 * sum(c * 0.02 * c / (c + 0.002) for c in counts)
    assert exact == pytest.approx(10.222113, abs=1e-6)
    assert ranks(world_size).run(loss_drop) == pytest.approx([exact] * world_size, abs=2e-5)


def learning_rate_change(rank: int, world_size: int) -> list[float]:
    sharded = shard(collection(), "exact_sgd")
    moved = []
    for rate in (LEARNING_RATE, 0.0, 0.5):
        for group in sharded.fused_optimizer.param_groups:
            group["lr"] = rate
        before = local_weights(sharded)
        sharded(batch(3, 4)).values().sum().backward()
        after = local_weights(sharded)
        moved.append(sum(float((after[name] - before[name]).abs().sum()) for name in after))
    return moved


def test_learning_rate_change_takes_effect_at_the_next_step(ranks):
    for first, none, ten_times in ranks(2).run(learning_rate_change):
        assert none == 0
        assert ten_times == pytest.approx(first * 0.5 / LEARNING_RATE, rel=1e-3)
