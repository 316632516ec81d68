"""Lookups of packed rows: both backends against the rows that they hold, eager, traced, scripted
and exported.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import oracles
from kernels.implementations import needs_fbgemm
from torch import Tensor, nn
from torch.testing import assert_close

from tutorec._kernels import packed
from tutorec._kernels.backend import operator_libraries, use_backend
from tutorec._kernels.memory import ask_for_large_pages
from tutorec._kernels.older_torch import BEFORE_2_11
from tutorec._kernels.operator_shapes import register_shapes
from tutorec._kernels.packed import PackedTable, PackedTableLookup
from tutorec._kernels.specs import POOLINGS
from tutorec.fx.tracer import Tracer
from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.types import DataType

ALL = (DataType.FP32, DataType.FP16, DataType.INT8, DataType.INT4, DataType.INT2)


# The operator with the numbers that it is given on CUDA, in CPU memory.
CUDA_FORM = "fbgemm as on CUDA"
every = pytest.mark.parametrize(
    "name", ["torch", *(pytest.param(n, marks=needs_fbgemm) for n in ("fbgemm", CUDA_FORM))]
)


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Build operators by a backend, or in the form that they have on CUDA but for the place of
    their rows.
    """
    with ExitStack() as stack:
        stack.enter_context(use_backend("fbgemm" if name == CUDA_FORM else name))
        if name == CUDA_FORM:
            stack.enter_context(patch.object(packed, "_is_on_cuda", lambda rows: True))
            stack.enter_context(patch.object(packed, "_ON_DEVICE", packed._ON_HOST))
        yield


Batch = tuple[Tensor, Tensor, Tensor | None]  # ids, offsets, weights


def make(
    tables: Sequence[PackedTable], feature_tables: Sequence[int], pooling: str, **options: object
) -> PackedTableLookup:
    op = PackedTableLookup(tables, feature_tables, pooling, **options)  # type: ignore[arg-type]
    for index, table in enumerate(tables):
        rows = torch.randn(table.rows, table.columns)
        pack_rows(rows, table.data_type, out=op.table_rows(index), alignment=table.alignment)
    return op


def numbers(op: PackedTableLookup) -> list[Tensor]:
    return [
        unpack_rows(op.table_rows(index), table.columns, table.data_type)
        for index, table in enumerate(op.tables)
    ]


def expected(op: PackedTableLookup, batch: Batch) -> Tensor:
    """What the rows say, feature by feature, by the formulas."""
    ids, offsets, weights = batch
    tables, per_feature = numbers(op), (offsets.numel() - 1) // len(op.feature_tables)
    results = []
    for feature, table in enumerate(op.feature_tables):
        own = offsets[feature * per_feature : (feature + 1) * per_feature + 1].long()
        low, high = int(own[0]), int(own[-1])
        own_weights = None if weights is None else weights[low:high]
        bag = oracles.embedding_bag_forward(
            tables[table], ids[low:high].long(), own - low, op.pooling, own_weights
        )
        results.append(bag)
    return torch.cat(results, dim=0 if op.pooling == "none" else 1)


@dataclass(frozen=True)
class Drawn:
    tables: list[PackedTable]
    features: list[int]
    pooling: str
    batch: Batch
    seed: int


@st.composite
def lookups(draw: st.DrawFn) -> Drawn:
    pooling = draw(st.sampled_from(POOLINGS))
    width = draw(st.integers(1, 20))
    tables = [
        PackedTable(
            f"t{index}",
            draw(st.integers(1, 9)),
            width if pooling == "none" else draw(st.integers(1, 20)),
            draw(st.sampled_from(ALL)),
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    features = draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=5))
    samples = draw(st.integers(0, 4))
    bags = [
        draw(st.lists(st.integers(0, tables[table].rows - 1), max_size=4))
        for table in features
        for _ in range(samples)
    ]
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    ids = torch.tensor([number for bag in bags for number in bag], dtype=dtype)
    offsets = torch.tensor(
        [0, *torch.tensor([len(bag) for bag in bags]).cumsum(0).tolist()], dtype=dtype
    )
    weighted = pooling != "none" and draw(st.booleans())
    weights = torch.rand(ids.numel()) + 0.1 if weighted else None
    return Drawn(tables, features, pooling, (ids, offsets, weights), draw(st.integers(0, 99)))


@every
@given(lookups())
def test_lookups_are_what_the_rows_say(name, drawn):
    torch.manual_seed(drawn.seed)
    with implementation(name):
        op = make(drawn.tables, drawn.features, drawn.pooling)
    found, want = op(*drawn.batch), expected(op, drawn.batch)
    assert found.dtype == torch.float32
    assert_close(found, want, rtol=1e-5, atol=1e-5)


TABLES = [
    PackedTable("item", 7, 8, DataType.INT8),
    PackedTable("user", 5, 6, DataType.INT4),
    PackedTable("shop", 6, 3, DataType.INT2),
    PackedTable("day", 4, 5, DataType.FP16),
]
ONE_WIDTH = [PackedTable("item", 7, 6, DataType.INT8), PackedTable("user", 5, 6, DataType.INT8)]


def small(pooling: str, **options: object) -> PackedTableLookup:
    return make(
        ONE_WIDTH if pooling == "none" else TABLES,
        [0, 1, 0] if pooling == "none" else [0, 1, 2, 3, 0],
        pooling,
        **options,
    )


def some_batch(op: PackedTableLookup, samples: int, most: int = 3) -> tuple[Tensor, Tensor]:
    """Ids, and lengths [F, B]."""
    lengths = torch.randint(0, most + 1, (len(op.feature_tables), samples))
    pieces = [
        torch.randint(0, op.tables[table].rows, (int(own.sum()),))
        for table, own in zip(op.feature_tables, lengths, strict=True)
    ]
    return torch.cat(pieces), lengths


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.reshape(-1).cumsum(0)])


class Model(nn.Module):
    """The operator in a model whose inputs are ids and lengths [F, B]."""

    def __init__(self, op: PackedTableLookup) -> None:
        super().__init__()
        self.op = op

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths.reshape(-1)
        return self.op.forward(ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


def scripted(module: nn.Module) -> torch.jit.ScriptModule:
    """Scripted, saved and loaded."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is deprecated", category=DeprecationWarning)
        # about torch's own GraphModule
        warnings.filterwarnings("ignore", message="The TorchScript type system")
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(module), file)
        file.seek(0)
        return torch.jit.load(file)


@every
@pytest.mark.parametrize("pooling", POOLINGS)
def test_traced_and_scripted_equal_eager(name, pooling):
    with implementation(name):
        model = Model(small(pooling))
        graph = torch.fx.GraphModule(model, Tracer().trace(model))
        loaded, operator = scripted(graph), scripted(model.op)
        for samples in (0, 1, 5):
            for dtype in (torch.int32, torch.int64):
                ids, lengths = (part.to(dtype) for part in some_batch(model.op, samples))
                want = model(ids, lengths)
                assert torch.equal(graph(ids, lengths), want)
                assert torch.equal(loaded(ids, lengths), want)
                assert torch.equal(operator(ids, offsets_of(lengths)), want)


@pytest.mark.slow
@every
@pytest.mark.parametrize("pooling", POOLINGS)
def test_exported_equals_eager_for_any_numbers_of_ids_and_samples(name, pooling):
    dynamic = ({0: torch.export.Dim("N")}, {1: torch.export.Dim("B")})
    with implementation(name):
        model = Model(small(pooling))
        program = torch.export.export(model, some_batch(model.op, 3), dynamic_shapes=dynamic)
        module = program.module()
        for samples, most in ((0, 0), (1, 0), (1, 1), (1, 3), (2, 4), (7, 3)):
            batch = some_batch(model.op, samples, most)
            assert_close(module(*batch), model(*batch), rtol=1e-6, atol=1e-6)
        ids, lengths = some_batch(model.op, 4)
        for wrong in (-1, 100):
            ids[0] = wrong
            with pytest.raises(RuntimeError, match="not a row of the table"):
                module(ids, lengths)


@pytest.mark.slow
@every
def test_compiled_equals_eager_in_one_graph(name):
    # Older ones take a shape that depends on numbers into one graph when they are told to.
    told = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    with implementation(name), told if BEFORE_2_11 else nullcontext():
        model = Model(small("sum"))
        torch.compiler.reset()  # so many models of one class are no recompilations of one
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        for samples in (3, 5):
            batch = some_batch(model.op, samples)
            assert_close(compiled(*batch), model(*batch), rtol=1e-6, atol=1e-6)


@every
def test_a_graph_refuses_ids_that_are_no_rows(name):
    """Also -1, which fbgemm's own check lets pass for an id that was pruned."""
    with implementation(name):
        model = Model(small("sum"))
        graph = torch.fx.GraphModule(model, Tracer().trace(model))
        loaded = scripted(graph)
        for feature, rows in enumerate(model.op._rows):
            for wrong in (-1, -2, rows, 2**31 - 1, -(2**31)):
                for dtype in (torch.int32, torch.int64):
                    ids, lengths = some_batch(model.op, 2, 0)
                    lengths[feature, 1] = 1
                    ids = torch.tensor([wrong], dtype=dtype)
                    with pytest.raises((RuntimeError, ValueError)) as eager:
                        graph(ids, lengths.to(dtype))
                    with pytest.raises((RuntimeError, torch.jit.Error)):
                        loaded(ids, lengths.to(dtype))
                    if name == "torch":
                        table = model.op._names[feature]
                        assert str(eager.value).startswith(
                            f"table '{table}' has {rows} rows"
                        ) and str(wrong) in str(eager.value)


@needs_fbgemm
def test_the_graph_holds_the_check_and_the_raw_operator():
    with use_backend("fbgemm"):
        op = make([PackedTable("item", 7, 8, DataType.INT8)], [0], "sum")
        model = Model(op)
        calls = [
            str(node.target) for node in Tracer().trace(model).nodes if node.op == "call_function"
        ]
    fbgemm = [call for call in calls if call.startswith("fbgemm.")]
    assert fbgemm == [
        "fbgemm.bounds_check_indices",
        "fbgemm.int_nbit_split_embedding_codegen_lookup_function",
    ]


@every
@pytest.mark.parametrize("output", [torch.float16, torch.bfloat16])
def test_output_of_another_type_is_the_rounded_one(name, output):
    with implementation(name):
        op = small("mean", output_dtype=output)
        batch = some_batch(op, 4)
        found = op(batch[0], offsets_of(batch[1]))
    assert found.dtype == output
    assert_close(
        found.float(), expected(op, (batch[0], offsets_of(batch[1]), None)), rtol=1e-2, atol=1e-2
    )


@every
def test_weights_of_any_type_are_taken_and_have_no_gradient(name):
    with implementation(name):
        op = small("sum")
        ids, lengths = some_batch(op, 4)
        weights = torch.rand(ids.numel(), dtype=torch.float64, requires_grad=True)
        found = op(ids, offsets_of(lengths), weights)
        assert not found.requires_grad
        assert_close(
            found,
            expected(op, (ids, offsets_of(lengths), weights.detach().float())),
            rtol=1e-5,
            atol=1e-5,
        )


@every
def test_ids_and_offsets_of_different_types_and_strides_are_taken(name):
    with implementation(name):
        op = small("sum")
        ids, lengths = some_batch(op, 3)
        want = op(ids, offsets_of(lengths))
        assert torch.equal(op(ids.int(), offsets_of(lengths)), want)
        assert torch.equal(op(ids, offsets_of(lengths).int()), want)
        strided = torch.stack([ids, ids], dim=1)[:, 0]
        offsets = torch.stack([offsets_of(lengths)] * 2, dim=1)[:, 0]
        assert torch.equal(op(strided, offsets), want)


@every
def test_rows_written_later_are_read(name):
    with implementation(name):
        op = make([PackedTable("item", 3, 4, DataType.INT8)], [0], "sum")
        rows = torch.randn(3, 4)
        pack_rows(rows, DataType.INT8, out=op.table_rows(0))
        assert_close(op(torch.tensor([2]), torch.tensor([0, 1]))[0], rows[2], atol=0.02, rtol=0)


@every
def test_an_operator_over_rows_of_another_copies_nothing(name):
    with implementation(name):
        whole = small("sum")
        start = whole.table_offsets[1] + 2 * TABLES[1].layout.row_bytes
        part = PackedTableLookup(
            [PackedTable("user", 3, 6, DataType.INT4), TABLES[3]],
            [0, 1],
            "sum",
            storage=whole.weights,
            table_offsets=[start, whole.table_offsets[3]],
        )
    assert part.weights.data_ptr() == whole.weights.data_ptr()
    assert torch.equal(part.table_rows(0), whole.table_rows(1)[2:])
    found = part(torch.tensor([0, 2]), torch.tensor([0, 1, 2]))
    assert_close(found[0], torch.cat([numbers(whole)[1][2], numbers(whole)[3][2]]))


@every
def test_copies_and_pickles_have_rows_of_their_own(name):
    with implementation(name):
        op = small("sum")
        ids, lengths = some_batch(op, 3)
        want = op(ids, offsets_of(lengths)).clone()
        copies = [copy.deepcopy(op), pickle.loads(pickle.dumps(op))]
        op.weights.zero_()
        for one in copies:
            assert torch.equal(one(ids, offsets_of(lengths)), want)
            assert one.table_rows(0).data_ptr() == one.weights.data_ptr() + one.table_offsets[0]


@every
def test_rows_have_no_place_in_the_state_of_a_module(name):
    with implementation(name):
        op = small("sum")
    assert dict(op.state_dict()) == {} and not list(op.parameters())
    assert op.total_columns == 8 + 6 + 3 + 5 + 8 and small("none").total_columns == 6


@every
def test_tables_begin_at_cache_lines_and_padding_is_asked_for(name):
    tables = [
        PackedTable("a", 3, 64, DataType.INT4, 64),
        PackedTable("b", 2, 64, DataType.INT8, 64),
    ]
    with implementation(name):
        op = make(tables, [0, 1], "sum")
        assert [op.table_rows(index).shape for index in range(2)] == [(3, 64), (2, 128)]
        assert all(offset % 128 == 0 for offset in op.table_offsets)
        batch = torch.tensor([2, 0, 1]), torch.tensor([0, 2, 3]), None
        assert_close(op(*batch), expected(op, batch), rtol=1e-5, atol=1e-5)


@every
def test_no_samples_give_no_rows(name):
    with implementation(name):
        for pooling in POOLINGS:
            op = small(pooling)
            found = op(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
            assert found.shape == (0, op.total_columns)


def test_a_module_on_meta_has_shapes_only():
    op = PackedTableLookup(TABLES, [0, 1, 2, 3], "sum", device="meta")
    assert op.table_rows(1).is_meta and op.table_rows(1).shape == (5, 16)


ITEM = PackedTable("item", 3, 4, DataType.INT8)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (
            ([ITEM], [0], "sum"),
            {"storage": torch.empty(48), "table_offsets": [0]},
            r"float32 \[48\]",
        ),
        (
            ([ITEM], [0], "sum"),
            {"storage": torch.empty(48, dtype=torch.uint8), "table_offsets": [16]},
            "table 'item': bytes 16 to 64 are not in a storage of 48 bytes",
        ),
        (
            ([ITEM], [0], "sum"),
            {"storage": torch.empty(99, dtype=torch.uint8), "table_offsets": [6]},
            "bytes 6 to 54.*multiple of 4",
        ),
        (([PackedTable("item", 3, 4, DataType.BF16)], [0], "sum"), {}, "BF16"),
    ],
)
def test_operators_that_cannot_be_are_refused(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        PackedTableLookup(*arguments, **options)


@every
def test_a_batch_that_would_be_read_beyond_its_end_is_refused(name):
    with implementation(name):
        op = make([ITEM, ITEM], [0, 1], "sum")
    ids, offsets = torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])
    for wrong in (
        (ids, offsets[:2], None),
        (ids, torch.tensor([]), None),
        (ids, offsets, torch.ones(2)),
        (ids, offsets, torch.ones(3, 1)),
        (ids.float(), offsets, None),
    ):
        with pytest.raises(ValueError, match=r"\['item'\]:.*not.*2 features"):
            op(*wrong)


@needs_fbgemm
def test_shapes_are_registered_once_and_libraries_are_named():
    with use_backend("fbgemm"):
        register_shapes()
        libraries = operator_libraries()
    assert any(path.endswith("fbgemm_gpu_tbe_inference.so") for path in libraries)
    with use_backend("torch"):
        assert operator_libraries() == []


def test_large_pages_change_no_number():
    rows = torch.arange(3 << 20, dtype=torch.int32)
    before = rows.clone()
    ask_for_large_pages(rows)  # what the system makes of it is its own affair
    assert torch.equal(rows, before)
    assert ask_for_large_pages(torch.empty(8 << 20, device="meta")) is False
