"""Table-batched operators: both backends against each other and against the plain formulas."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import oracles
from kernels.implementations import (
    CUDA_ADAPTER,
    CUDA_FORM,
    IMPLEMENTATIONS,
    copy_numbers,
    has_fbgemm,
    implementation,
    needs_fbgemm,
)
from kernels.pretended_fbgemm import pretended_kernels
from torch import Tensor
from torch.testing import assert_close

from tutorec._kernels.specs import (
    FBGEMM_KINDS,
    GroupSpec,
    OptimizerSpec,
    PoolingKind,
    TableSpec,
)
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch

CPU = torch.device("cpu")
RATE = 0.25


every = pytest.mark.parametrize("name", IMPLEMENTATIONS)
RULES = [
    None,
    OptimizerSpec("sgd", RATE),
    # Epsilons against which the rounding of gradients that cancel is nothing.
    OptimizerSpec("rowwise_adagrad", RATE, eps=0.1),
    OptimizerSpec("adagrad", RATE, eps=0.1),
    OptimizerSpec("adam", RATE, eps=0.1, weight_decay=0.5, beta1=0.8),
    OptimizerSpec("partial_rowwise_adam", RATE, eps=0.1, weight_decay=0.5, beta2=0.9),
]


@pytest.fixture(autouse=True, scope="module")
def _kernels_of_the_cuda_form() -> Iterator[None]:
    with pretended_kernels() if has_fbgemm() else nullcontext():
        yield


@dataclass(frozen=True)
class Drawn:
    """A group of tables with two batches, as tensors."""

    spec: GroupSpec
    tables: list[Tensor]
    # ids, offsets, weights, gradient of the result
    batches: list[tuple[Tensor, Tensor, Tensor | None, Tensor]]


@st.composite
def groups(draw: st.DrawFn) -> Drawn:
    pooling = draw(st.sampled_from(["sum", "mean", "sqrtn", "none"]))
    widths = draw(st.lists(st.sampled_from([1, 3, 4, 6, 64]), min_size=1, max_size=4))
    if pooling == "none":
        widths = widths[:1] * len(widths)
    # A table of no rows is read by empty bags only.
    specs = tuple(
        TableSpec(f"t{index}", draw(st.integers(0, 6)), width) for index, width in enumerate(widths)
    )
    features = tuple(draw(st.lists(st.integers(0, len(specs) - 1), min_size=1, max_size=5)))
    weighted = pooling != "none" and draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spec = GroupSpec(specs, features, pooling, weighted)
    tables = [torch.randn(table.rows, table.columns, generator=generator) for table in specs]
    return Drawn(spec, tables, [draw_batch(draw, spec, generator) for _ in range(2)])


def draw_batch(
    draw: st.DrawFn, spec: GroupSpec, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    samples = draw(st.integers(0, 3))
    lengths, ids = [], []
    for table in spec.feature_tables:
        for _ in range(samples):
            rows = spec.tables[table].rows
            bag = draw(st.lists(st.integers(0, min(rows, 3) - 1), max_size=4)) if rows else []
            lengths.append(len(bag))
            ids += bag
    offsets = (
        torch.tensor([0, *lengths]).cumsum(0).to(draw(st.sampled_from([torch.int32, torch.int64])))
    )
    values = torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    # Away from 0: sqrtn divides by the root of their squares, where gradients cancel to nothing but
    # rounding.
    signs = torch.randint(0, 2, (len(ids),), generator=generator) * 2 - 1
    weights = signs * (0.5 + torch.rand(len(ids), generator=generator)) if spec.weighted else None
    if weights is not None and spec.pooling == "sqrtn":
        # The gradient of w / |w| is 0 as the difference of two numbers as large as 1 / |w|.
        weights += 0.5 * weights.sign()
    shape = (
        (len(ids), spec.feature_columns[0])
        if spec.pooling == "none"
        else (samples, sum(spec.feature_columns))
    )
    return values, offsets, weights, torch.randn(shape, generator=generator)


def plain_forward(
    spec: GroupSpec, tables: list[Tensor], ids: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """One reference lookup for each feature, side by side (one behind the other without
    pooling).
    """
    outputs = []
    samples = (offsets.numel() - 1) // len(spec.feature_tables)
    for feature, table in enumerate(spec.feature_tables):
        bounds = offsets[feature * samples : (feature + 1) * samples + 1].long()
        one = slice(int(bounds[0]), int(bounds[-1]))
        own = None if weights is None else weights[one]
        outputs.append(
            oracles.embedding_bag_forward(
                tables[table], ids[one].long(), bounds - bounds[0], spec.pooling, own
            )
        )
    return torch.cat(outputs, dim=0 if spec.pooling == "none" else 1)


def build(
    spec: GroupSpec, rule: OptimizerSpec | None, name: str, weights: list[Tensor] | None = None
) -> TableBatch:
    with implementation(name):
        return build_table_batch(spec, optimizer=rule, device=CPU, weights=weights)


def one_table(rows: int = 5, columns: int = 4, **more: object) -> GroupSpec:
    return GroupSpec((TableSpec("item", rows, columns),), (0,), **more)  # type: ignore[arg-type]


@every
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind if rule else "dense")
@given(drawn=groups())
def test_lookup_equals_reference_forward_and_backward(
    name: str, rule: OptimizerSpec | None, drawn: Drawn
):
    op = build(drawn.spec, rule, name, drawn.tables)
    tables = [table.clone() for table in drawn.tables]
    kept = rule.states if rule else ()
    states = [
        [torch.zeros(t.shape[:1] if one.rowwise else t.shape) for one in kept] for t in tables
    ]
    for number, (ids, offsets, weights, grad) in enumerate(drawn.batches, start=1):
        own = None if weights is None else weights.clone().requires_grad_()
        plain = None if weights is None else weights.clone().requires_grad_()
        leaves = [table.clone().requires_grad_() for table in tables]

        result = op(ids, offsets, own)
        expected = plain_forward(drawn.spec, leaves, ids, offsets, plain)
        assert_close(result, expected)

        result.backward(grad)
        expected.backward(grad)
        if own is not None and plain is not None:
            found = own.grad if own.grad is not None else torch.zeros_like(own)
            assert_close(
                found, plain.grad, rtol=1e-5, atol=1e-4 if drawn.spec.pooling == "sqrtn" else 1e-5
            )
        gradients = [
            leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves
        ]
        if rule is None:
            for table, gradient in zip(op.table_weights(), gradients, strict=True):
                assert_close(
                    table.grad if table.grad is not None else torch.zeros_like(table), gradient
                )
                table.grad = None
            continue
        for index, gradient in enumerate(gradients):
            rows = torch.tensor(
                sorted(set(ids_of_table(drawn.spec, index, ids, offsets))), dtype=torch.int64
            )
            tables[index], states[index] = oracles.update(
                rule, tables[index], states[index], rows, gradient[rows], RATE, number
            )
        assert_close(op.table_weights(), tables)
        assert_close([list(of_table) for of_table in op.table_states()], states)
        assert [state.get("step", number) for state in op.optimizer_state()] == [number] * len(
            tables
        )


def ids_of_table(spec: GroupSpec, table: int, ids: Tensor, offsets: Tensor) -> list[int]:
    samples = (offsets.numel() - 1) // len(spec.feature_tables)
    bounds = offsets[::samples].tolist() if samples else [0] * (len(spec.feature_tables) + 1)
    read = [
        feature for feature, of_feature in enumerate(spec.feature_tables) if of_feature == table
    ]
    return [row for feature in read for row in ids[bounds[feature] : bounds[feature + 1]].tolist()]


@every
@pytest.mark.parametrize("rule", RULES[1:], ids=lambda rule: rule.kind)
def test_rows_absent_from_the_batch_do_not_move(name: str, rule: OptimizerSpec):
    op = build(one_table(rows=6), rule, name)
    before = op.table_weights()[0].clone()
    op(torch.tensor([1, 3, 3]), torch.tensor([0, 1, 3])).square().sum().backward()
    after = op.table_weights()[0]
    moved = (before != after).any(1)
    assert moved.tolist() == [False, True, False, True, False, False]
    assert not any(state[[0, 2, 4, 5]].any() for state in op.table_states()[0])


@every
def test_repeated_ids_are_summed_before_one_update(name: str):
    op = build(
        one_table(rows=2), OptimizerSpec("rowwise_adagrad", 1.0, eps=0.0), name, [torch.zeros(2, 4)]
    )
    op(torch.tensor([0, 0, 0]), torch.tensor([0, 2, 3])).sum().backward()
    # Gradient 3 in every column: state 9, step 3 / sqrt(9). Three updates of gradient 1 would give
    # 1 + 1/sqrt(2) + ...
    assert op.optimizer_state()[0]["momentum1"].tolist() == [9.0, 0.0]
    assert_close(op.table_weights()[0], torch.tensor([[-1.0] * 4, [0.0] * 4]))


@every
def test_shared_table_features_apart_make_one_update(name: str):
    # The table of the first and the third feature is not read by the second one.
    spec = GroupSpec((TableSpec("a", 3, 4), TableSpec("b", 3, 4)), (0, 1, 0))
    op = build(
        spec,
        OptimizerSpec("rowwise_adagrad", 1.0, eps=0.0),
        name,
        [torch.zeros(3, 4), torch.zeros(3, 4)],
    )
    op(torch.tensor([2, 1, 2]), torch.tensor([0, 1, 2, 3])).sum().backward()
    assert [state["momentum1"].tolist() for state in op.optimizer_state()] == [[0, 0, 4], [0, 1, 0]]


@every
def test_learning_rate_change_is_exact_and_taken_at_the_forward(name: str):
    op = build(one_table(rows=1), OptimizerSpec("sgd", 0.5), name, [torch.zeros(1, 4)])
    ids, offsets = torch.tensor([0]), torch.tensor([0, 1])
    op(ids, offsets).sum().backward()
    op.learning_rate = 0.125
    waiting = op(ids, offsets)
    op.learning_rate = 100.0
    waiting.sum().backward()
    assert op.learning_rate == 100.0
    assert op.table_weights()[0].tolist() == [[-0.625] * 4]
    with pytest.raises(ValueError, match=r"learning_rate=-1"):
        op.learning_rate = -1


@every
@pytest.mark.parametrize("rule", RULES[1:], ids=lambda rule: rule.kind)
def test_two_batches_in_flight_update_one_after_the_other(name: str, rule: OptimizerSpec):
    torch.manual_seed(0)
    start = torch.randn(4, 4)
    flying, plain = (build(one_table(rows=4), rule, name, [start]) for _ in range(2))
    first = torch.tensor([0, 1, 1]), torch.tensor([0, 3])
    second = torch.tensor([1, 2]), torch.tensor([0, 2])
    one, two = flying(*first), flying(*second)
    assert_close(two, start[1:3].sum(0, keepdim=True))
    grad_one, grad_two = torch.randn(1, 4), torch.randn(1, 4)
    one.backward(grad_one)
    two.backward(grad_two)
    plain(*first).backward(grad_one)
    plain(*second).backward(grad_two)
    assert_close(flying.table_weights(), plain.table_weights())
    assert_close(flying.optimizer_state(), plain.optimizer_state())


@every
@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_tables_with_different_numbers_of_steps_move_as_each_alone(name: str, pooling: PoolingKind):
    rule, start = OptimizerSpec("adam", RATE, eps=0.1), torch.randn(3, 4)
    tables = TableSpec("a", 3, 4), TableSpec("b", 3, 4)
    both = build(GroupSpec(tables, (1, 0, 1), pooling), rule, name, [start, start])
    # Features 0 and 2 read table b, feature 1 reads table a; one bag each.
    ids, offsets, grad = torch.tensor([2, 1, 0, 2]), torch.tensor([0, 1, 3, 4]), torch.randn(4, 4)
    one, two = (build(GroupSpec((table,), (0,), "none"), rule, name, [start]) for table in tables)
    state = {"momentum1": torch.rand(3, 4), "exp_avg_sq": torch.rand(3, 4)}
    for op, steps in ((both, [2, 7]), (one, [2]), (two, [7])):
        steps_of = [{**state, "step": torch.tensor(float(step))} for step in steps]
        copy_numbers(op.optimizer_state(), steps_of)
    found = both(ids, offsets)
    rows = grad[[0, 1, 1, 3]]
    found.backward(rows if pooling == "none" else rows[[0, 1, 3]].view(1, -1))
    alone_a, alone_b = (
        op(own, torch.tensor([0, 2])) for op, own in ((one, ids[1:3]), (two, ids[[0, 3]]))
    )
    alone_a.backward(rows[1:3])
    alone_b.backward(rows[[0, 3]])
    assert_close(both.table_weights(), [*one.table_weights(), *two.table_weights()])
    assert_close(both.optimizer_state(), [*one.optimizer_state(), *two.optimizer_state()])
    assert [float(state["step"]) for state in both.optimizer_state()] == [3.0, 8.0]
    of_a, of_b = start[ids[1:3]], start[ids[[0, 3]]]
    pooled = torch.cat([of_b[:1], of_a, of_b[1:]])
    assert_close(
        found, pooled if pooling == "none" else torch.cat([of_b[0], of_a.sum(0), of_b[1]])[None]
    )


@every
@pytest.mark.parametrize("rule", RULES[1:], ids=lambda rule: rule.kind)
def test_gradients_are_cut_before_they_are_summed(name: str, rule: OptimizerSpec):
    cut, whole = (
        build(one_table(), one, name, [torch.ones(5, 4)])
        for one in (replace(rule, max_gradient=0.5), rule)
    )
    ids, offsets = torch.tensor([1, 1, 2]), torch.tensor([0, 1, 2, 3])
    cut(ids, offsets).backward(torch.tensor([[3.0], [-0.25], [-7.0]]).expand(3, 4))
    whole(ids, offsets).backward(torch.tensor([[0.5], [-0.25], [-0.5]]).expand(3, 4))
    assert_close(cut.table_weights(), whole.table_weights())


@every
def test_weights_gradient_is_that_of_the_rows_before_the_update(name: str):
    start = torch.randn(3, 4)
    op = build(one_table(rows=3, weighted=True), OptimizerSpec("sgd", 10.0), name, [start])
    weights = torch.tensor([0.5, 2.0], requires_grad=True)
    op(torch.tensor([0, 2]), torch.tensor([0, 2]), weights).sum().backward()
    assert_close(weights.grad, start[[0, 2]].sum(1))


@every
@pytest.mark.parametrize("columns", [3, 4])
def test_table_weights_and_state_are_live(name: str, columns: int):
    op = build(one_table(rows=2, columns=columns), OptimizerSpec("rowwise_adagrad"), name)
    with torch.no_grad():
        op.table_weights()[0].fill_(7.0)
    assert op(torch.tensor([1]), torch.tensor([0, 1])).tolist() == [[7.0] * columns]
    op.optimizer_state()[0]["momentum1"].fill_(3.0)
    assert op.optimizer_state()[0]["momentum1"].tolist() == [3.0, 3.0]


@every
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind if rule else "dense")
def test_weights_and_state_round_trip_between_operators(name: str, rule: OptimizerSpec | None):
    spec = GroupSpec((TableSpec("a", 4, 3), TableSpec("b", 2, 8)), (1, 0))
    ids, offsets = torch.tensor([1, 1, 3]), torch.tensor([0, 2, 3])
    source, target = build(spec, rule, name), build(spec, rule, name)
    source(ids, offsets).square().sum().backward()
    copy_numbers(target.table_weights(), source.table_weights())
    copy_numbers(target.optimizer_state(), source.optimizer_state())
    for op in (source, target):
        op(ids, offsets).square().sum().backward()
    assert_close(
        [table.detach() for table in target.table_weights()],
        [t.detach() for t in source.table_weights()],
    )
    assert_close(target.optimizer_state(), source.optimizer_state())


@every
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind if rule else "dense")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copy_is_independent_and_whole(name: str, rule: OptimizerSpec | None, how: str):
    op = build(one_table(), rule, name)
    other = copy.deepcopy(op) if how == "deepcopy" else pickle.loads(pickle.dumps(op))
    ids, offsets = torch.tensor([1, 4]), torch.tensor([0, 2])
    before = op.table_weights()[0].detach().clone()
    with torch.no_grad():
        other.table_weights()[0].add_(1.0)
    assert_close(other(ids, offsets), op(ids, offsets) + 2)
    assert_close(op.table_weights()[0].detach(), before)
    other(ids, offsets).sum().backward()
    assert_close(op.table_weights()[0].detach(), before)
    assert rule is None or not torch.equal(other.table_weights()[0], before + 1)


@every
def test_fused_operator_has_no_parameters_and_dense_one_per_table(name: str):
    spec = GroupSpec((TableSpec("a", 4, 3), TableSpec("b", 2, 8)), (0, 1))
    fused, dense = build(spec, RULES[1], name), build(spec, None, name)
    assert not list(fused.parameters()) and not list(fused.buffers()) and not fused.state_dict()
    assert [tuple(own.shape) for own in dense.parameters()] == [(4, 3), (2, 8)]
    out = fused(torch.tensor([1, 1]), torch.tensor([0, 1, 2]))
    out.sum().backward()
    assert all(table.grad is None for table in fused.table_weights())
    step = torch.optim.SGD(dense.parameters(), lr=1.0)
    before = [own.detach().clone() for own in dense.parameters()]
    dense(torch.tensor([1, 1]), torch.tensor([0, 1, 2])).sum().backward()
    step.step()
    assert_close(dense(torch.tensor([1]), torch.tensor([0, 1, 1]))[:, :3], before[0][1:2] - 1)


def test_printed_form_is_that_of_the_documents():
    spec, rule = one_table(), OptimizerSpec("sgd")
    assert repr(build(spec, rule, "torch")) == "TorchTableBatchedEmbeddingBags()"
    assert build(spec, rule, "torch").kernel == "torch.sgd"


@needs_fbgemm
def test_printed_form_under_fbgemm_is_that_of_the_documents():
    spec = one_table()
    assert (
        repr(build(spec, OptimizerSpec("sgd"), "fbgemm"))
        == "SplitTableBatchedEmbeddingBagsCodegen()"
    )
    assert (
        build(spec, OptimizerSpec("rowwise_adagrad"), "fbgemm").kernel == "fbgemm.rowwise_adagrad"
    )
    assert build(spec, None, "fbgemm").kernel == "fbgemm.dense"
    # Padding is exact for sgd; row-wise Adagrad would average the squares over the padded width.
    assert build(one_table(columns=3), OptimizerSpec("sgd"), "fbgemm").kernel == "fbgemm.sgd"
    assert (
        build(one_table(columns=3), OptimizerSpec("rowwise_adagrad"), "fbgemm").kernel
        == "torch.rowwise_adagrad"
    )
    assert (
        build(one_table(columns=3), OptimizerSpec("adagrad"), "fbgemm").kernel == "fbgemm.adagrad"
    )
    # fbgemm has these for CUDA only.
    assert build(spec, OptimizerSpec("adam"), "fbgemm").kernel == "torch.adam"
    assert (
        build(spec, OptimizerSpec("partial_rowwise_adam"), "fbgemm").kernel
        == "torch.partial_rowwise_adam"
    )


@pytest.mark.slow
@needs_fbgemm
def test_rows_that_do_not_fit_on_a_stack_are_trained_in_torch():
    # in a process of its own, which fbgemm's kernels would end; on the stack of the smallest thread
    code = """
import sys
from threading import Thread, stack_size

import torch

from tutorec._kernels.specs import OptimizerSpec, fbgemm_cpu_columns
from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.specs import GroupSpec, TableSpec
from tutorec._kernels.table_steps import step_tables
from tutorec._kernels.tbe_build import build_table_batch
from tutorec._kernels.tbe_layout import PooledBatch

ids, offsets = torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3])


def train(kind, columns):
    rule = OptimizerSpec(kind, 0.5)
    group = GroupSpec((TableSpec("item", 2, columns),), (0,))
    ones = [torch.ones(2, columns)]
    tables = build_table_batch(group, optimizer=rule, device=torch.device("cpu"), weights=ones)
    tables(ids, offsets).sum().backward()
    states = [tuple(torch.zeros_like(state) for state in tables.table_states()[0])]
    batch = PooledBatch(ids, offsets, None, False, (0,))
    step_tables(ones, states, batch, torch.ones(2, columns), tables.next_steps())
    own = tables.table_weights()[0].detach()
    print(tables.kernel, own.unique().tolist(), (own - ones[0]).abs().max() < 1e-6)


stack_size(2 << 20)
for kind in sys.argv[1:]:
    widest = fbgemm_cpu_columns(kind)
    for columns in (widest, widest + 4, 8 * widest):
        thread = Thread(target=train, args=[kind, columns])
        thread.start()
        thread.join()
"""
    kinds = FBGEMM_KINDS["cpu"]
    command = [sys.executable, "-c", code, *kinds]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, (ran.returncode, ran.stdout, ran.stderr)
    lines = ran.stdout.splitlines()
    expected = [f"{where}.{kind}" for kind in kinds for where in ("fbgemm", "torch", "torch")]
    assert [line.split()[0] for line in lines] == expected
    assert all(line.endswith("tensor(True)") for line in lines)


@needs_fbgemm
def test_kernels_of_cuda_tables_are_fbgemms_but_for_padded_rows_whose_squares_are_averaged():
    for rule in RULES:
        if rule is not None and rule.kind not in FBGEMM_KINDS["cuda"]:
            continue
        assert (
            build(one_table(), rule, CUDA_FORM).kernel == f"fbgemm.{rule.kind if rule else 'dense'}"
        )
        averages = rule is not None and "rowwise" in rule.kind
        assert build(one_table(columns=6), rule, CUDA_FORM).kernel.startswith(
            "torch" if averages else "fbgemm"
        )


@needs_fbgemm
def test_a_rule_that_fbgemm_has_no_cuda_kernel_for_runs_in_torch_there(monkeypatch):
    monkeypatch.setitem(FBGEMM_KINDS, "cuda", ("sgd",))
    assert build(one_table(), OptimizerSpec("adagrad"), CUDA_FORM).kernel == "torch.adagrad"


@needs_fbgemm
@pytest.mark.parametrize("name", ["fbgemm", CUDA_ADAPTER, CUDA_FORM])
def test_fbgemm_operator_stays_on_its_kind_of_device(name: str):
    with pytest.raises(ValueError, match=r"fbgemm\.sgd and cannot"):
        build(one_table(), OptimizerSpec("sgd"), name).to("meta")


def test_meta_operator_becomes_real_where_it_is_filled():
    for rule in RULES:
        op = build_table_batch(one_table(), optimizer=rule, device=torch.device("meta"))
        assert op.table_weights()[0].is_meta
        op.to_empty(device=CPU)
        copy_numbers(op.table_weights(), [torch.ones(5, 4)])
        assert op(torch.tensor([1, 2]), torch.tensor([0, 2])).tolist() == [[2.0] * 4]
        assert not any(state.any() for state in op.table_states()[0])


@every
def test_default_weights_lie_within_one_over_the_root_of_rows(name: str):
    given_meta = [torch.empty(100, 4, device="meta")]
    for weights in (None, given_meta):
        table = build(one_table(rows=100), RULES[1], name, weights).table_weights()[0]
        assert 0.05 < float(table.abs().max()) <= 0.1


@every
def test_bad_batches_are_refused_with_names_and_numbers(name: str):
    op = build(GroupSpec((TableSpec("item", 5, 4),), (0, 0)), RULES[1], name)
    with pytest.raises(ValueError, match=r"4 offsets.*not.*2 features.*tables \['item'\]"):
        op(torch.tensor([1]), torch.tensor([0, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"tables \['item'\].*torch.float32"):
        op(torch.tensor([1.0]), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match=r"takes no weights"):
        op(torch.tensor([1]), torch.tensor([0, 1, 1]), torch.ones(1))
    weighted = build(one_table(weighted=True), RULES[1], name)
    with pytest.raises(ValueError, match=r"weights.* the batch has none"):
        weighted(torch.tensor([1]), torch.tensor([0, 1]))
    with pytest.raises((IndexError, RuntimeError), match=r"9"):
        build(one_table(), None, name)(torch.tensor([9]), torch.tensor([0, 1]))


@every
def test_another_dtype_is_refused_with_the_names(name: str):
    op = build(one_table(), OptimizerSpec("rowwise_adagrad"), name)
    with pytest.raises(ValueError, match=r"cannot become torch.float16"):
        op.half()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["torch", pytest.param("fbgemm", marks=needs_fbgemm)])
@pytest.mark.parametrize("rule", [OptimizerSpec("sgd", 1.0), OptimizerSpec("adagrad", 1.0, eps=0)])
def test_half_rows_are_rounded_once_after_gradients_are_summed(
    name: str, rule: OptimizerSpec, dtype: torch.dtype
) -> None:
    with implementation(name):
        spec = GroupSpec((TableSpec("item", 1, 4, dtype),), feature_tables=(0,))
        op = build_table_batch(spec, optimizer=rule, device=CPU, weights=[torch.ones(1, 4)])
    distance = torch.finfo(dtype).eps / 2  # from 1 to the next smaller number
    if rule.kind == "adagrad":  # then the step is the gradient over its root of 1
        op.optimizer_state()[0]["momentum1"].fill_(1 - distance**2)
    pooled = op(torch.zeros(4, dtype=torch.long), torch.arange(5))
    pooled.backward(torch.full((4, 4), distance / 4))
    assert op.table_weights()[0].dtype == dtype
    assert torch.equal(op.table_weights()[0].float(), torch.full((1, 4), 1 - distance))


def test_bad_specs_are_refused_with_names_and_numbers():
    with pytest.raises(ValueError, match=r"'item'.*torch.float64.*torch.bfloat16"):
        TableSpec("item", 5, 4, torch.float64)
    with pytest.raises(ValueError, match=r"'lamb' has no fused kernel"):
        OptimizerSpec("lamb")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"beta2=1.0.*least 0.*1"):
        OptimizerSpec("adam", beta2=1.0)
    with pytest.raises(ValueError, match=r"beta1=0.5.*partial_rowwise_adam, not"):
        OptimizerSpec("adagrad", beta1=0.5)
    with pytest.raises(ValueError, match=r"max_gradient=-1.0"):
        OptimizerSpec("sgd", max_gradient=-1.0)
    with pytest.raises(ValueError, match=r"learning_rate=-0.1"):
        OptimizerSpec("sgd", -0.1)
    with pytest.raises(ValueError, match=r"weight_decay=0.5"):
        OptimizerSpec("sgd", weight_decay=0.5)
    with pytest.raises(ValueError, match=r"got 2 weights for 1 tables"):
        build_table_batch(one_table(), optimizer=None, device=CPU, weights=[torch.zeros(5, 4)] * 2)
