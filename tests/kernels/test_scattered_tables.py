"""Tables in separate memory are looked up and updated in one call as one by one."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from kernels import oracles
from torch import Tensor, nn
from torch.testing import assert_close

from tutorec._kernels import adagrad_stalls, scattered_tables
from tutorec._kernels.adagrad_stalls import updates_in_torch
from tutorec._kernels.backend import backend, use_backend
from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.specs import OptimizerKind, OptimizerSpec, UpdateStep
from tutorec._kernels.table_steps import step_tables
from tutorec._kernels.tbe_layout import PooledBatch

needs_fbgemm = pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
FEATURES = (2, 0, 0, 1)
IDS, OFFSETS = torch.tensor([1, 4, 4, 0, 0, 2, 3, 3]), torch.tensor([0, 1, 3, 4, 4, 6, 6, 7, 8])


def tables(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.rand(rows, columns).to(dtype) for rows, columns in ((5, 8), (4, 4), (7, 12))]


def expected_pool(own: list[Tensor], mean: bool, weights: Tensor | None) -> Tensor:
    pooled = []
    for feature, table in enumerate(FEATURES):
        bounds = OFFSETS[2 * feature : 2 * feature + 3]
        part = slice(int(bounds[0]), int(bounds[-1]))
        factors = None if weights is None else weights[part]
        pooling = "mean" if mean else "sum"
        pooled.append(
            oracles.embedding_bag_forward(
                own[table], IDS[part], bounds - bounds[0], pooling, factors
            )
        )
    return torch.cat(pooled, dim=1)


@needs_fbgemm
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_rows_equal_those_of_each_table(
    dtype: torch.dtype, index: torch.dtype, weighted: bool
) -> None:
    own, weights = tables(dtype), torch.rand(8) if weighted else None
    scattered = address_tables(own, FEATURES)
    assert scattered is not None
    for mean in (False, *([] if weighted else [True])):
        pooled = scattered.pool(PooledBatch(IDS.to(index), OFFSETS, weights, mean, FEATURES))
        assert pooled.dtype == torch.float32
        assert_close(pooled, expected_pool([table.float() for table in own], mean, weights))


@needs_fbgemm
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
def test_steps_move_the_rows_as_the_formulas_do(
    kind: OptimizerKind, weighted: bool, index: torch.dtype
) -> None:
    features = (0, 0, 1, 2)  # features of one table side by side
    columns = [0, 8, 16, 20, 32]
    ids = torch.tensor([1, 4, 4, 0, 0, 2, 3, 3])
    bags = torch.arange(8).repeat_interleave(OFFSETS.diff())
    weights = torch.rand(8) if weighted else None
    grad = torch.rand(2, 32)

    own = tables()
    moved = [table.clone() for table in own]
    before = [torch.rand(table.shape if kind == "adagrad" else table.shape[:1]) for table in own]
    states = [[] if kind == "sgd" else [state.clone()] for state in before]

    scattered = address_tables(moved, features)
    assert scattered is not None
    batch = PooledBatch(ids.to(index), OFFSETS, weights, False, features)
    step = UpdateStep(OptimizerSpec(kind, eps=1e-6), 0.5)
    assert scattered.step(grad, batch, [states[table] for table in features], step)

    for table, rows_before in enumerate(own):
        picked = []
        row_grads = []
        for feature in [feature for feature, read in enumerate(features) if read == table]:
            which = (bags >= 2 * feature) & (bags < 2 * feature + 2)
            part = grad[:, columns[feature] : columns[feature + 1]][bags[which] - 2 * feature]
            picked.append(ids[which])
            row_grads.append(part if weights is None else part * weights[which].unsqueeze(1))
        rows = torch.cat(picked)
        grads = torch.cat(row_grads)

        if kind == "sgd":
            assert_close(moved[table], oracles.sgd_update(rows_before, rows, grads, 0.5))
            continue
        update = getattr(oracles, f"{kind}_update")
        after, state = update(rows_before, before[table], rows, grads, 0.5, 1e-6)
        assert_close(moved[table], after)
        assert_close(states[table][0], state)


@needs_fbgemm
def test_a_mean_and_a_table_without_ids_move_by_adagrad_as_in_torch() -> None:
    features = (0, 1, 2)
    ids, offsets = torch.tensor([1, 4, 1, 3]), torch.tensor([0, 3, 3, 3, 3, 3, 4])
    batch = PooledBatch(ids, offsets, None, True, features)
    before, grad = tables(), torch.rand(2, 24)
    steps = [UpdateStep(OptimizerSpec("adagrad", eps=1e-6), 0.5)] * 3

    moved = []
    for limit in (0, 1 << 16):
        own = [table.clone() for table in before]
        states = [(torch.zeros_like(table),) for table in own]
        with patch.object(scattered_tables, "_ELEMENTS_PER_TABLE", limit):
            step_tables(own, states, batch, grad, steps)
        moved.append([*own, *(state for (state,) in states)])

    for by_torch, by_operator in zip(*moved, strict=True):
        assert_close(by_operator, by_torch)
    assert torch.equal(moved[1][1], before[1])
    assert not torch.equal(moved[1][2], before[2])


@needs_fbgemm
@pytest.mark.parametrize(
    ("kind", "features"), [("rowwise_adagrad", (0, 1, 0)), ("adagrad", (0, 1, 0)), ("adam", (0, 1))]
)
def test_what_fbgemm_would_do_wrong_is_left_to_others(
    kind: OptimizerKind, features: tuple[int, ...]
) -> None:
    own = tables()
    before, scattered = [table.clone() for table in own], address_tables(own, features)
    assert scattered is not None
    offsets, grad = (
        torch.arange(len(features) + 1),
        torch.ones(1, sum(own[table].shape[1] for table in features)),
    )
    batch = PooledBatch(
        torch.zeros(len(features), dtype=torch.int64), offsets, None, False, features
    )
    states = [[torch.zeros(own[table].shape[0])] for table in features]
    assert not scattered.step(grad, batch, states, UpdateStep(OptimizerSpec(kind), 0.5, 1))
    assert all(torch.equal(*pair) for pair in zip(own, before, strict=True))


@needs_fbgemm
def test_where_row_wise_adagrad_stalls_large_batches_move_in_torch() -> None:
    torch.manual_seed(0)
    features, samples = (0, 1), 400
    before = [torch.rand(50, 8), torch.rand(60, 4)]
    offsets, ids = torch.arange(2 * samples + 1), torch.randint(0, 50, (2 * samples,))
    grad, step = (
        torch.rand(samples, 12),
        UpdateStep(OptimizerSpec("rowwise_adagrad", eps=1e-6), 0.5),
    )
    moved = []
    for slow in (False, True):
        own, states = [table.clone() for table in before], [[torch.zeros(50)], [torch.zeros(60)]]
        batch = PooledBatch(ids, offsets, None, False, features)
        with patch.object(adagrad_stalls, "_row_wise_adagrad_stalls", lambda slow=slow: slow):
            assert updates_in_torch("rowwise_adagrad", batch) is slow
            assert not updates_in_torch("sgd", batch)
            assert not updates_in_torch("rowwise_adagrad", replace(batch, values=ids[1:]))
            step_tables(own, states, batch, grad, [step, step])
        moved.append([*own, *(state for (state,) in states)])
    for one, other, first in zip(*moved, [*before, torch.zeros(50), torch.zeros(60)], strict=True):
        assert_close(one, other)
        assert not torch.equal(one, first)


class Odd(Tensor):
    """A tensor with a behaviour of its own."""


@pytest.mark.parametrize(
    "own",
    [
        [torch.rand(3, 6)],
        [torch.rand(3, 4).bfloat16()],
        [torch.rand(3, 4).double()],
        [torch.rand(3, 4), torch.rand(3, 4).half()],
        [torch.rand(4, 8).t()[:4]],
        [torch.rand(3, 8)[:, :4]],
        [torch.rand(0, 4)],
        [torch.rand(3, 4, device="meta")],
        [torch.rand(3, 4).as_subclass(Odd)],
    ],
    ids=[
        "width",
        "bfloat16",
        "double",
        "mixed",
        "transposed",
        "strided",
        "no rows",
        "meta",
        "subclass",
    ],
)
def test_tables_that_cannot_be_addressed_are_left_to_others(own: list[Tensor]) -> None:
    assert address_tables(own, tuple(range(len(own)))) is None


def test_nothing_is_found_without_fbgemm_or_features() -> None:
    assert address_tables(tables(), ()) is None
    with use_backend("torch"):
        assert address_tables(tables(), (0, 1, 2)) is None


@needs_fbgemm
def test_a_table_in_new_memory_is_found_there() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    for value in (1.0, 2.0):
        parameter.data = torch.full((3, 4), value)
        scattered = address_tables([parameter], (0,))
        assert scattered is not None
        assert scattered.pool(
            PooledBatch(torch.tensor([2]), torch.tensor([0, 1]), None, False, (0,))
        ).tolist() == [[value] * 4]
