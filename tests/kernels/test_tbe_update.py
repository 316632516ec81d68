"""The torch update in slices, and the cuts of feature-major batches."""

from typing import get_args

import pytest
import torch
from kernels import oracles
from torch.testing import assert_close

from tutorec._kernels import tbe_update
from tutorec._kernels.specs import OptimizerKind, OptimizerSpec, UpdateStep
from tutorec._kernels.tbe_layout import column_slices, pick_columns, select_features


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("slice_rows", [1, 2, 3, 7, 100])
def test_update_in_slices_equals_the_plain_formula(
    monkeypatch: pytest.MonkeyPatch, kind: OptimizerKind, weighted: bool, slice_rows: int
):
    torch.manual_seed(0)
    monkeypatch.setattr(tbe_update, "_SLICE_BYTES", slice_rows * 4 * 5)
    rule = OptimizerSpec(kind, weight_decay=0.1) if "adam" in kind else OptimizerSpec(kind)
    matrix, grad = torch.randn(12, 5), torch.randn(6, 5)
    states = [torch.rand((12,) if state.rowwise else (12, 5)) for state in rule.states]
    ids, bags = torch.randint(0, 12, (30,)), torch.randint(0, 6, (30,))
    weights = torch.randn(30) if weighted else None
    row_grads = grad[bags] if weights is None else grad[bags] * weights.unsqueeze(1)
    expected, after = oracles.update(rule, matrix, states, ids, row_grads, rate=0.5, number=3)
    groups = tbe_update.sort_rows(ids, bags, weights, rows=12)
    tbe_update.apply_update(matrix, states, grad, groups, UpdateStep(rule, 0.5, 3))
    assert_close(matrix, expected)
    assert_close(states, after)


def test_packed_and_plain_sort_give_the_same_groups():
    ids, bags = torch.tensor([5, 0, 5, 2, 0]), torch.tensor([1, 0, 0, 2, 2])
    packed = tbe_update.sort_rows(ids, bags, None, rows=6)
    plain = tbe_update.sort_rows(ids, bags, None, rows=2**62)  # too many rows to pack
    assert packed.rows.tolist() == plain.rows.tolist() == [0, 2, 5]
    assert packed.starts.tolist() == plain.starts.tolist() == [0, 2, 3, 5]
    assert [sorted(packed.bags[a:b].tolist()) for a, b in ((0, 2), (2, 3), (3, 5))] == [
        [0, 2],
        [2],
        [0, 1],
    ]


def test_select_features_cuts_ids_offsets_and_weights():
    values, offsets = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 1, 3, 3, 3, 4])
    ids, bounds, weights = select_features(values, offsets, values * 10.0, [2, 0], total=3)
    assert ids.tolist() == [4, 1]
    assert bounds.tolist() == [0, 0, 1, 2, 2]
    assert weights is not None and weights.tolist() == [40.0, 10.0]
    empty = select_features(values[:0], torch.tensor([0]), None, [2, 0], total=3)
    assert (empty[0].tolist(), empty[1].tolist()) == ([], [0])


def test_pick_columns_returns_the_tensor_itself_when_nothing_is_cut():
    pooled = torch.randn(2, 8)
    assert pick_columns(pooled, column_slices([0, 1], [4, 4], [4, 4])) is pooled
    reordered = pick_columns(pooled, column_slices([1, 0], columns=[3, 4], strides=[4, 4]))
    assert torch.equal(reordered, torch.cat([pooled[:, 4:7], pooled[:, :4]], dim=1))
