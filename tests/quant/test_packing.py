"""Packed rows: byte for byte fbgemm's, read back within the bound, and no number that is not finite
gets by.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutorec._kernels.backend import use_backend
from tutorec._kernels.packed_layout import row_layout
from tutorec.errors import BackendError
from tutorec.quant import packing
from tutorec.quant.packing import pack_rows, round_trip_bound, unpack_rows
from tutorec.types import DataType

CODES = (DataType.INT8, DataType.INT4, DataType.INT2)
ALL = (DataType.FP32, DataType.FP16, *CODES)
# The widths that fbgemm's operator takes; the others are compared with the next one, its last
# column repeated.
STEP = {DataType.INT8: 2, DataType.INT4: 4, DataType.INT2: 8}


def has_fbgemm() -> bool:
    try:
        with use_backend("fbgemm"):
            return True
    except BackendError:
        return False


needs_fbgemm = pytest.mark.skipif(not has_fbgemm(), reason="no fbgemm wheel that fits this torch")


def fbgemm_rows(rows: Tensor, data_type: DataType) -> tuple[Tensor, Tensor]:
    """Payload of the shown columns, and scale and bias, as fbgemm's operator writes them."""
    layout = row_layout(rows.shape[1], data_type)
    missing = -rows.shape[1] % STEP[data_type]
    wide = torch.cat([rows, rows[:, -1:].expand(-1, missing)], dim=1)
    with use_backend("fbgemm"):
        fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(wide, layout.bits)
    return fused[:, : -(-rows.shape[1] * layout.bits // 8)], fused[:, -4:]


def as_halves(scale_bias: Tensor) -> Tensor:
    return scale_bias.contiguous().view(torch.float16).nan_to_num(7.0)


def awkward_rows(columns: int) -> Tensor:
    """Rows of every kind that could be rounded another way: [40, columns]."""
    normal = torch.randn(4, columns)
    tiny = torch.finfo(torch.float32).tiny
    kinds = [
        *(
            normal,
            torch.rand(4, columns) * 1e-3,
            normal * 2e4,
            normal * 1e6,
            normal * 1e-6,
            normal * tiny / 8,
        ),
        *(torch.exp(20 * torch.randn(4, columns)), 1000 + torch.rand(4, columns)),
        *(
            torch.randn(3, 1).expand(3, columns),
            torch.zeros(1, columns),
            torch.randint(-3, 4, (4, columns)).float(),
        ),
    ]
    return torch.cat(kinds)


@needs_fbgemm
@pytest.mark.parametrize("data_type", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_those_of_fbgemm_for_every_width(data_type, dtype):
    per_byte = {DataType.INT8: 1, DataType.INT4: 2, DataType.INT2: 4}[data_type]
    for columns in range(1, 513, 1 if dtype is torch.float32 else 15):
        rows = awkward_rows(columns).to(dtype)
        layout = row_layout(columns, data_type)
        packed = pack_rows(rows, data_type, on_nonfinite="keep")
        payload, scale_bias = fbgemm_rows(rows, data_type)
        finite = rows.isfinite().all(1)
        # As numbers: of the zeros of a row that has both, fbgemm takes another one for each width.
        assert torch.equal(as_halves(packed[finite, :4]), as_halves(scale_bias[finite])), columns
        # the last byte, where it is not full, is not fbgemm's, which knows more columns
        whole = columns // per_byte
        assert torch.equal(packed[finite, 4 : 4 + whole], payload[finite, :whole]), columns
        assert not packed[:, 4 + layout.payload_bytes :].any(), columns


@pytest.mark.parametrize("columns", [1, 3, 64, 511])
def test_rows_of_floats_are_their_bytes(columns):
    rows = torch.randn(5, columns)
    half, full = pack_rows(rows, DataType.FP16), pack_rows(rows, DataType.FP32)
    assert torch.equal(half[:, : 2 * columns], rows.half().view(torch.uint8))
    assert torch.equal(full[:, : 4 * columns], rows.view(torch.uint8))
    assert torch.equal(unpack_rows(full, columns, DataType.FP32), rows)
    assert torch.equal(unpack_rows(half, columns, DataType.FP16), rows.half().float())


def test_the_bytes_of_a_row_can_be_worked_out_by_hand():
    # steps of 1 from -1: codes 0, 1, 2 (1.6), 3, 1 (0.6)
    row = torch.tensor([[-1.0, 0.0, 0.6, 2.0, -0.4]])
    packed = pack_rows(row, DataType.INT2)[0]
    assert packed[:4].view(torch.float16).tolist() == [1.0, -1.0]
    assert packed[4:6].tolist() == [0b11_10_01_00, 0b00_00_00_01]
    assert packed.shape == (16,) and not packed[6:].any()
    assert unpack_rows(packed[None], 5, DataType.INT2).tolist() == [[-1.0, 0.0, 1.0, 2.0, 0.0]]


small = st.floats(-(2.0**-10), 2.0**-10, width=32)
numbers = (
    st.floats(-65504, 65504, width=32) | small | st.sampled_from([0.0, -0.0, 2.0**-140, 65504.0])
)


@given(st.data(), st.sampled_from(ALL), st.sampled_from([torch.float32, torch.float16]))
def test_what_is_read_back_is_within_the_bound(data, data_type, dtype):
    columns = data.draw(st.integers(1, 19))
    lists = data.draw(st.lists(st.lists(numbers, min_size=columns, max_size=columns), max_size=4))
    rows = torch.tensor(lists, dtype=torch.float32).view(-1, columns).to(dtype)
    rows = rows.clamp(-65504, 65504)
    error = (unpack_rows(pack_rows(rows, data_type), columns, data_type) - rows.float()).abs()
    bound = round_trip_bound(rows, data_type)
    assert bound.shape == (len(lists),)
    assert (error.amax(1) <= bound).all(), (error.amax(1), bound) if len(lists) else None


@pytest.mark.parametrize("data_type", CODES, ids=str)
def test_the_bound_is_tight(data_type):
    rows = torch.rand(200, 400)
    error = (unpack_rows(pack_rows(rows, data_type), 400, data_type) - rows).abs().amax(1)
    bound = round_trip_bound(rows, data_type)
    assert (error <= bound).all()
    assert (error >= 0.8 * bound).float().mean() > 0.9


@pytest.mark.parametrize("width", [2.0**-24, 1e-6, 8e-6, 2e-4, 1e-3])
def test_the_bound_holds_where_float16_has_steps_of_one_size(width):
    """A scale below 2**-14 is off by up to 2**-25, however small it is, and the end of the row by L
    times that.
    """
    rows = (torch.rand(300, 64) - 0.5) * width
    for data_type in (*CODES, DataType.FP16):
        error = (unpack_rows(pack_rows(rows, data_type), 64, data_type) - rows).abs().amax(1)
        assert (error <= round_trip_bound(rows, data_type)).all(), data_type
    row = torch.linspace(-1e-4, 1e-4, 64).unsqueeze(0)
    error = (unpack_rows(pack_rows(row, DataType.INT8), 64, DataType.INT8) - row).abs().max()
    assert 5 * 2e-4 / 510 < error <= round_trip_bound(row, DataType.INT8)


def test_packing_again_changes_nothing():
    for data_type in CODES:
        rows = torch.randn(50, 24)
        once = unpack_rows(pack_rows(rows, data_type), 24, data_type)
        scale = pack_rows(rows, data_type)[:, :2].contiguous().view(torch.float16).float()
        twice = unpack_rows(pack_rows(once, data_type), 24, data_type)
        assert ((twice - once).abs() <= scale * 0.05).all()


def test_chunks_are_one_table(monkeypatch):
    rows = torch.randn(37, 6)
    whole = {
        data_type: (pack_rows(rows, data_type), round_trip_bound(rows, data_type))
        for data_type in ALL
    }
    monkeypatch.setattr(packing, "enumerate_chunks", partial(packing.enumerate_chunks, numbers=24))
    for data_type, (packed, bound) in whole.items():
        assert torch.equal(pack_rows(rows, data_type), packed)
        assert torch.equal(round_trip_bound(rows, data_type), bound)
    rows[36, 5] = torch.nan
    with pytest.raises(ValueError, match=r"table 'item'.*row 36, column 5.*on_nonfinite='keep'"):
        pack_rows(rows, DataType.INT8, name="item")


@pytest.mark.parametrize("data_type", ALL, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_is_refused_or_read_as_such(data_type, bad):
    rows = torch.randn(4, 9)
    rows[2, 7] = bad
    with pytest.raises(ValueError, match=r"table 'item' holds -?(nan|inf) in row 2, column 7"):
        pack_rows(rows, data_type, name="item")
    read = unpack_rows(pack_rows(rows, data_type, on_nonfinite="keep"), 9, data_type)
    assert not read[2, 7].isfinite()
    assert read[[0, 1, 3]].isfinite().all()
    if data_type in CODES:
        assert not read[2].isfinite().any(), "a row that cannot be trusted shows it in every column"


@pytest.mark.parametrize(
    ("data_type", "row"),
    [
        (DataType.FP16, [0.0, 1e5]),
        (DataType.INT8, [-1e5, 0.0]),
        (DataType.INT8, [0.0, 3e7]),
        (DataType.INT4, [0.0, 2e6]),
        (DataType.INT2, [0.0, 3e5]),
    ],
)
def test_a_row_beyond_float16_is_refused(data_type, row):
    rows = torch.tensor([[0.0, 1.0], row])
    with pytest.raises(
        ValueError, match=rf"table 'item': row 1 reaches from .* to .*{data_type}.*FP32"
    ):
        pack_rows(rows, data_type, name="item")
    assert (
        not unpack_rows(pack_rows(rows, data_type, on_nonfinite="keep"), 2, data_type)[1]
        .isfinite()
        .all()
    )
    assert not round_trip_bound(rows, data_type)[1].isfinite()


def test_rows_are_written_into_memory_that_is_there():
    rows, out = torch.randn(3, 5), torch.full((3, 16), 9, dtype=torch.uint8)
    assert pack_rows(rows, DataType.INT8, out=out) is out
    assert torch.equal(out, pack_rows(rows, DataType.INT8))
    assert not out[:, 9:].any()
    strided = torch.full((3, 40), 9, dtype=torch.uint8)[:, 8:24]
    pack_rows(rows.t().contiguous().t(), DataType.INT8, out=strided)
    assert torch.equal(strided, out)


def test_rows_that_need_grad_are_packed_without():
    rows = torch.nn.Parameter(torch.randn(3, 5))
    assert not pack_rows(rows, DataType.INT4).requires_grad
    assert not round_trip_bound(rows, DataType.INT4).requires_grad


def test_another_alignment_only_pads():
    rows = torch.randn(3, 64)
    narrow, wide = pack_rows(rows, DataType.INT4), pack_rows(rows, DataType.INT4, alignment=64)
    assert (narrow.shape[1], wide.shape[1]) == (48, 64)
    assert torch.equal(narrow[:, :36], wide[:, :36]) and not wide[:, 36:].any()
    assert torch.equal(unpack_rows(wide, 64, DataType.INT4), unpack_rows(narrow, 64, DataType.INT4))


@pytest.mark.parametrize("data_type", ALL, ids=str)
def test_no_rows_are_no_rows(data_type):
    empty = torch.empty(0, 6)
    packed = pack_rows(empty, data_type)
    assert packed.shape == (0, row_layout(6, data_type).row_bytes)
    assert unpack_rows(packed, 6, data_type).shape == (0, 6)
    assert round_trip_bound(empty, data_type).shape == (0,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: pack_rows(torch.ones(3), DataType.INT8, name="item"),
            r"table 'item'.*float32 \[3\]",
        ),
        (lambda: pack_rows(torch.ones(3, 2, dtype=torch.int64), DataType.INT8), r"int64 \[3, 2\]"),
        (lambda: pack_rows(torch.ones(3, 2), DataType.BF16), "BF16"),
        (lambda: pack_rows(torch.ones(3, 0), DataType.INT8), "0 columns"),
        (
            lambda: pack_rows(torch.ones(3, 2), DataType.INT8, out=torch.ones(3, 2)),
            r"uint8 \[3, 16\]",
        ),
        (lambda: pack_rows(torch.ones(3, 2), DataType.INT8, alignment=6), "alignment 6"),
        (
            lambda: unpack_rows(torch.ones(3, 4, dtype=torch.uint8), 2, DataType.INT8),
            r"uint8 \[R, 8 or more\]",
        ),
        (lambda: unpack_rows(torch.ones(3, 16), 2, DataType.INT8), "float32"),
        (lambda: round_trip_bound(torch.ones(3), DataType.INT8), r"\[3\]"),
        (lambda: pack_rows(torch.ones(3, 2), DataType.INT8, on_nonfinite="ignore"), "'ignore'"),  # type: ignore[arg-type]
    ],
)
def test_rows_and_formats_that_do_not_fit_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("columns", "data_type", "expected"),
    [
        (64, DataType.INT8, (64, 4, 64, 80)),
        (64, DataType.INT4, (64, 4, 32, 48)),
        (64, DataType.INT2, (64, 4, 16, 32)),
        (64, DataType.FP16, (64, 0, 128, 128)),
        (6, DataType.INT4, (8, 4, 4, 16)),
        (9, DataType.INT2, (16, 4, 4, 16)),
        (3, DataType.INT8, (3, 4, 3, 16)),
        (5, DataType.FP32, (5, 0, 20, 32)),
    ],
)
def test_layout_of_a_row(columns, data_type, expected):
    layout = row_layout(columns, data_type)
    assert (
        layout.stored_columns,
        layout.scale_bytes,
        layout.payload_bytes,
        layout.row_bytes,
    ) == expected
