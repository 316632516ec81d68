"""Optimizers in backward: sharded as unsharded, counted steps, rows without gradient, gradients
that are cut.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import row_cases
from distributed.cases import (
    KINDS,
    LEARNING_RATE,
    OPTIMIZERS,
    ROWS,
    Reference,
    batch,
    coefficients,
    collection,
    held,
    local_weights,
    on_rank,
    shard,
)
from torch import Tensor
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.debug_grads import debug_grads
from tutorec.optim.optimizers import PartialRowWiseAdam
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

IN_BACKWARD: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3}),
    "PartialRowWiseAdam": (PartialRowWiseAdam, {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-3}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3}),
}


def some(step: int) -> KeyedJaggedTensor:
    """A batch in which features of some steps have no ids, so that whole tables have none."""
    ids = {"f3": [[1, 1, 4], [2]], "f1": [[3], [3, 0]], "f0": [[6, 5], []], "f2": [[2], [2, 2]]}
    for feature in (("f3",), ("f0", "f1"), ("f0", "f1", "f2", "f3"), ())[step]:
        ids[feature] = [[], []]
    flat = [one for bags in ids.values() for bag in bags for one in bag]
    lengths = [len(bag) for bags in ids.values() for bag in bags]
    return on_rank(
        KeyedJaggedTensor(
            [*ids], torch.tensor(flat, dtype=torch.int64), lengths=torch.tensor(lengths)
        )
    )


def loss_of(out: Tensor, step: int) -> Tensor:
    return (out * coefficients(out, step)).sum()


def routes(rank: int, world_size: int, name: str, kind: str) -> list[tuple[Tensor, Tensor]]:
    """The tables after the same steps, unsharded and sharded; every rank brings the
    same samples.
    """
    optimizer, arguments = IN_BACKWARD[name]
    unsharded, source = on_rank(collection()), collection()
    for module in (unsharded, source):
        apply_optimizer_in_backward(optimizer, module.parameters(), arguments)
    sharded = shard(source, kind=kind)
    for step in range(4):
        for module in (unsharded, sharded):
            loss_of(module(some(step)).values(), step).backward()
    found = []
    for table, pieces in held(sharded).items():
        for (row, column), rows, _ in pieces:
            whole = unsharded.embedding_bags[table].get_parameter("weight").detach()
            found.append((rows, whole[row : row + rows.shape[0], column : column + rows.shape[1]]))
    return found


@pytest.mark.parametrize("name", IN_BACKWARD)
@pytest.mark.parametrize("kind", ["row_wise", "data_parallel", "table_wise"])
def test_optimizers_in_backward_do_the_same_unsharded_and_fused(ranks, kind, name):
    for of_rank in ranks(2).run(routes, name=name, kind=kind):
        for rows, whole in of_rank:
            assert_close(rows, whole, rtol=1e-5, atol=1e-6)


def counted(rank: int, world_size: int) -> list[dict[str, float]]:
    """Steps of each table here after each of: a batch, one that only rank 0 has samples of, one
    without gradients.
    """
    found = []
    for kind in KINDS:
        sharded = shard(collection(), "adam", kind=kind)
        sharded(batch(rank, 3)).values().sum().backward()
        sharded(batch(rank, 0 if rank else 3)).values().sum().backward()
        with torch.no_grad():
            sharded(batch(rank, 3)).values()
        found.append(
            {
                name: float(own["step"])
                for name, pieces in held(sharded).items()
                for _, _, own in pieces
            }
        )
    return found


def test_a_forward_with_gradients_is_a_step_on_every_rank_with_or_without_ids(ranks):
    of_ranks = ranks(2).run(counted)
    assert all(
        {"t0", "t1", "t2"} == {name for rank in of_ranks for name in rank[index]}
        for index in range(len(KINDS))
    )
    assert {count for of_rank in of_ranks for of_kind in of_rank for count in of_kind.values()} == {
        2.0
    }


def batch_of_rows(samples: int) -> KeyedJaggedTensor:
    """Every sample reads row 2 by all features, and every second sample row 3."""
    bags = [[2, 3] if sample % 2 else [2] for sample in range(samples)]
    lengths = torch.tensor([len(bag) for bag in bags] * 4)
    ids = torch.tensor([one for bag in bags for one in bag] * 4)
    return on_rank(KeyedJaggedTensor(["f3", "f1", "f0", "f2"], ids, lengths=lengths))


def without_gradient(rank: int, world_size: int, kind: str, samples: int, pooled: bool) -> Any:
    """A step that moves rows 2 and 3, then one in which the rows are looked up and their gradient
    is 0.
    """
    if pooled:
        sharded: Any = shard(collection(), "adam", kind=kind)
    else:
        sharded = row_cases.shard(row_cases.collection(), "adam", kind=kind)
    for factor in (1.0, 0.0):
        out = sharded(batch_of_rows(samples))
        values = [out.values()] if pooled else [one.values() for one in out.wait().values()]
        torch.stack([factor * loss_of(each, 3) for each in values]).sum().backward()
    return held(sharded) if pooled else row_cases.held(sharded)


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "rows"])
@pytest.mark.parametrize("samples", [2, 40], ids=["few samples", "many samples"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_a_row_of_the_batch_without_gradient_moves_on_along_its_mean(ranks, kind, samples, pooled):
    # Of copied tables few samples travel as bags, many as the gradient of the table.
    reference = (
        Reference(collection(), "adam", 1)
        if pooled
        else row_cases.RowsReference(row_cases.collection(), "adam", 1)
    )
    weights, features = reference.weights(), batch_of_rows(samples)
    for factor in (1.0, 0.0):
        found = reference.ebc(features)
        outs = [found.values()] if pooled else [one.values() for one in found.values()]
        loss = torch.stack([factor * loss_of(each, 3) for each in outs]).sum()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        reference.update(dict(zip(weights, gradients, strict=True)), reference.rows_of([features]))
    for of_rank in ranks(2).run(without_gradient, kind=kind, samples=samples, pooled=pooled):
        for name, pieces in of_rank.items():
            for piece in pieces:
                reference.check_piece(name, piece, kind)


def cut(rank: int, world_size: int, kind: str, backend: str, optimizer: str) -> Any:
    with use_backend(backend):
        sharded = shard(
            collection(), optimizer, kind=kind, gradient_clipping=True, max_gradient=0.25
        )
        for step in range(2):
            loss_of(sharded(batch(step, 3)).values(), step).backward()
            loss_of(sharded(batch(step, 60)).values(), step).backward()
        return held(sharded)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_max_gradient_cuts_the_gradient_of_each_pooled_row(ranks, kind, optimizer, backend):
    reference = Reference(collection(), optimizer, 1)
    weights = reference.weights()
    for step in range(2):
        for samples in (3, 60):
            features = batch(step, samples)
            out = reference.ebc(features).values()
            # Every rank has the same gradient g, and the operator is given g / 2 from each.
            gradients = torch.autograd.grad(
                out, list(weights.values()), 2 * (coefficients(out, step) / 2).clamp(max=0.25)
            )
            reference.update(
                dict(zip(weights, gradients, strict=True)), reference.rows_of([features])
            )
    for of_rank in ranks(2).run(cut, kind=kind, backend=backend, optimizer=optimizer):
        for name, pieces in of_rank.items():
            for piece in pieces:
                reference.check_piece(name, piece, kind)


def shown(rank: int, world_size: int, kind: str, samples: int) -> list[tuple[Tensor, Tensor]]:
    """How far the rows of a step of SGD went, and the cut gradient that debug_grads shows."""
    sharded = shard(collection(), kind=kind, gradient_clipping=True, max_gradient=0.25)
    before = local_weights(sharded)
    with debug_grads(sharded) as grads:
        loss_of(sharded(batch(0, samples)).values(), 0).backward()
    after = local_weights(sharded)
    return [
        (
            (before[name] - after[name]) / LEARNING_RATE,
            grads[f"embedding_bags.{name}.weight"].to_dense(),
        )
        for name in after
    ]


@pytest.mark.parametrize("samples", [3, 60])
@pytest.mark.parametrize("kind", ["table_wise", "data_parallel"])
def test_the_gradient_that_is_shown_is_the_one_that_was_cut(ranks, kind, samples):
    for of_rank in ranks(2).run(shown, kind=kind, samples=samples):
        for moved, gradient in of_rank:
            assert_close(gradient, moved, rtol=1e-4, atol=1e-4)


def loaded_counts(rank: int, world_size: int) -> dict[str, Tensor]:
    """Tables of one operator that were trained for different numbers of steps before."""
    sharded = shard(collection(), "adam", kind="table_wise")
    for parameter in sharded.parameters():
        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
            for name, state in optimizer.state[parameter].items():
                state.fill_({"t0.step": 10.0, "t1.step": 0.0, "t2.step": 3.0}.get(name, 0.0))
    sharded(batch(1, 4)).values().sum().backward()
    return local_weights(sharded)


def test_tables_of_one_operator_may_have_made_different_numbers_of_steps(ranks):
    [found] = ranks(1).run(loaded_counts)
    ebc = collection()
    ebc(batch(1, 4)).values().sum().backward()
    touched = Reference(ebc, "adam", 1).rows_of([batch(1, 4)])
    for name, steps in (("t0", 11), ("t1", 1), ("t2", 4)):
        weight = ebc.embedding_bags[name].get_parameter("weight")
        assert weight.grad is not None
        grad, rows = weight.grad[touched[name]], weight.detach()[touched[name]]
        mean, root = (
            0.1 * grad / (1 - 0.9**steps),
            (0.001 * grad**2 / (1 - 0.999**steps)).sqrt() + 1e-3,
        )
        assert_close(
            found[name][touched[name]],
            rows - 0.05 * (mean / root + 0.1 * rows),
            rtol=1e-5,
            atol=1e-6,
        )
        assert torch.equal(found[name][ROWS:], weight.detach()[ROWS:])
