"""The accuracy report: what was measured is below what is possible, and bytes are those of the
rows.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quant.equals import DTYPES
from torch import nn

import tutorec
from tutorec._kernels.packed import PackedTable
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.accuracy import measured_errors, promised_error
from tutorec.quant.packing import pack_rows, round_trip_bound
from tutorec.quant.report import accuracy_report
from tutorec.types import DataType


def model(rows: int = 50, columns: int = 64) -> nn.ModuleDict:
    bags = [EmbeddingBagConfig(rows, columns, "a"), EmbeddingBagConfig(rows, columns, "b")]
    rows_of = [EmbeddingConfig(rows, columns, "a")]
    return nn.ModuleDict(
        {"x": EmbeddingBagCollection(bags), "y": EmbeddingCollection(rows_of), "z": nn.Linear(3, 3)}
    )


numbers = st.one_of(
    st.floats(-60000, 60000, width=32),
    st.floats(-(2**-10), 2**-10, width=32),
    st.sampled_from([0.0, 1.0, -1.0, 1e-8, 5.9e-8, -3e-8, 1e-40, 255.0, 2**-24, 7.6e-6, 100.003]),
)


@given(
    data=st.data(),
    kind=st.sampled_from(
        [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32]
    ),
)
def test_no_number_is_off_by_more_than_the_packed_rows_promise(data, kind):
    columns = data.draw(st.integers(1, 9))
    start = data.draw(numbers)
    row = st.one_of(
        st.lists(numbers, min_size=columns, max_size=columns),
        st.lists(
            st.floats(0, 2**-16, width=32).map(lambda step: start + step),
            min_size=columns,
            max_size=columns,
        ),
        st.just([start] * columns),
    )
    weight = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)), dtype=torch.float32)
    packed, table = pack_rows(weight, kind), PackedTable("t", len(weight), columns, kind)
    largest, mean = measured_errors(weight, packed, table)
    bound = promised_error(packed, table)
    assert mean <= largest * (1 + 1e-6) <= bound * (1 + 2e-6)
    assert kind is not DataType.FP32 or bound == 0


@pytest.mark.parametrize("kind", [DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16])
def test_the_promise_is_near_the_bound_that_knows_the_numbers(kind):
    weight = torch.randn(200, 32)
    weight[3] = 0.5  # a row without a step promises no half of one
    weight[4] = 0.0
    packed, table = pack_rows(weight, kind), PackedTable("t", 200, 32, kind)
    assert promised_error(packed, table) == pytest.approx(
        float(round_trip_bound(weight, kind).max()), rel=0.01
    )
    flat = pack_rows(weight[3:5], kind)
    assert promised_error(flat, PackedTable("t", 2, 32, kind)) < 1e-3


@pytest.mark.parametrize("kind", [DataType.INT8, DataType.INT4, DataType.INT2])
def test_numbers_below_the_rounded_bias_are_off_by_what_they_are_below(kind):
    """float16 has 100.0625 and nothing near it, so that a row from 100.05 to 100.07 begins above
    its first number.
    """
    weight = torch.tensor([[100.05, 100.07]])
    packed, table = pack_rows(weight, kind), PackedTable("t", 1, 2, kind)
    largest, _ = measured_errors(weight, packed, table)
    assert largest == pytest.approx(0.0125, rel=0.01)
    assert largest <= promised_error(packed, table) < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_report_tells_bytes_and_errors_of_each_table(dtype):
    whole = model()
    quantized = tutorec.quantize(whole, dtype, per_table={"b": torch.float16})
    report = accuracy_report(whole, quantized)
    assert [table.full_name for table in report.tables] == ["x.a", "x.b", "y.a"]
    assert report.names() == ["x.a", "b", "y.a"]
    for table in report.tables:
        path, name = table.path, table.name
        rows = quantized[path].packed_rows(name)
        held = whole[path].embedding_bags if path == "x" else whole[path].embeddings
        weight, packed = held[name].weight.detach(), quantized[path].packed_table(name)
        read = tutorec.quant.unpack_rows(rows, 64, packed.data_type)
        assert (table.bytes_before, table.bytes_after) == (50 * 64 * 4, rows.numel())
        assert table.bytes_saved == table.bytes_before - table.bytes_after
        assert table.largest == pytest.approx(float((weight - read).abs().max()))
        assert table.mean == pytest.approx(float((weight - read).abs().mean()))
        assert table.largest <= table.bound * (1 + 1e-6)
    assert report.bytes_before == 3 * 50 * 64 * 4
    assert report.bytes_after == sum(part.numel() for part in quantized.buffers())
    assert report["b"].data_type is DataType.FP16
    with pytest.raises(KeyError, match=r"2 tables.*'a'.*\['x.a', 'b', 'y.a'\]"):
        report["a"]
    assert report["y.a"] is report.tables[2]


def test_the_report_reads_as_text_and_as_html():
    whole = model()
    report = accuracy_report(whole, tutorec.quantize(whole))
    lines = str(report).splitlines()
    assert (
        lines[0].split()
        == "table format rows before after saved possible error largest mean".split()
    )
    assert lines[2].split()[:9] == ["x.a", "INT8", "50", "12.5", "KiB", "3.32", "KiB", "73", "%"]
    assert lines[-1].split() == ["all", "37.5", "KiB", "9.96", "KiB", "73", "%"]
    html = report._repr_html_()
    assert html.count("<tr>") == 5
    assert "3 tables: 37.5 KiB became 9.96 KiB" in html


def test_without_the_float_model_it_tells_what_was_measured_or_that_nothing_was():
    whole = model()
    expected = accuracy_report(whole, tutorec.quantize(whole))
    bare = accuracy_report(None, tutorec.quantize(whole))
    assert [(one.bound, one.bytes_before) for one in bare.tables] == [
        (one.bound, one.bytes_before) for one in expected.tables
    ]
    assert all(one.largest is one.mean is None for one in bare.tables)
    assert "not measured: the float table was not kept" in str(bare)
    assert "not measured" in bare._repr_html_()
    in_place = tutorec.quantize(whole, inplace=True, measure=True)
    kept = accuracy_report(None, in_place)
    assert kept == expected
    assert "not measured" not in str(kept)
    in_place.load_state_dict(in_place.state_dict())
    assert accuracy_report(None, in_place).tables[0].largest is None
    with pytest.raises(ValueError, match=r"quantized at 'x'.* in place"):
        accuracy_report(in_place, in_place)


def test_a_float_collection_that_was_given_up_is_not_measured():
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(20, 64, "a")])
    quantized = tutorec.quantize(ebc, inplace=True)
    report = accuracy_report(ebc, quantized)
    assert report["a"].largest is None
    assert report["a"].bytes_before == 20 * 64 * 4


def test_tables_of_16_bits_are_counted_as_such():
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(20, 64, "a", DataType.FP16)])
    for kept in (ebc, None):
        assert accuracy_report(kept, tutorec.quantize(ebc))["a"].bytes_before == 20 * 64 * 2


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda whole: accuracy_report(tutorec.quantize(whole), whole),
            ValueError,
            r"give \(float model, quantized",
        ),
        (
            lambda whole: accuracy_report(whole, nn.Linear(1, 1)),
            ValueError,
            "Linear has no complete quantized collection",
        ),
        (
            lambda whole: accuracy_report(nn.Linear(1, 1), tutorec.quantize(whole)),
            ValueError,
            "no collection at 'x'",
        ),
        (
            lambda whole: accuracy_report(model(40), tutorec.quantize(whole)),
            ValueError,
            r"\[50, 64\] .* \[40, 64\]",
        ),
    ],
)
def test_models_that_do_not_belong_together_are_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call(model())
