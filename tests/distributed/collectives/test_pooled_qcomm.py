"""What travels in 16 bits: the error that qcomm.py states, what is refused, and the bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.collectives.row_sums import (
    HostPooledEmbeddings,
    PooledEmbeddingsReduceScatter,
)
from tutorec.distributed.collectives.rows import (
    GRADIENTS_STAGE,
    ROWS_STAGE,
    PooledEmbeddingsAllToAll,
)
from tutorec.distributed.core.qcomm import CommCodec, CommOp, QuantizedCommCodecs
from tutorec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from tutorec.distributed.traffic import count_traffic
from tutorec.spmd import device

# Relative error of a value that is rounded once, in the range where that holds.
STATED = {torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.mark.parametrize("dtype", list(STATED))
def test_a_value_is_rounded_by_no_more_than_stated(dtype):
    low, high = (torch.finfo(torch.float16).tiny, 65504.0)
    magnitude = torch.logspace(
        torch.tensor(low).log2().item(), torch.tensor(high).log2().item(), 50_001, 2.0
    )
    values = torch.cat([magnitude.clamp(low, high), -magnitude.clamp(low, high)])
    codec = CommCodec(dtype)
    error = (codec.decode(codec.encode(values), torch.float32) - values).abs() / values.abs()
    assert STATED[dtype] / 2 < error.max() <= STATED[dtype]


def test_small_values_in_fp16_have_an_absolute_error_that_a_scale_removes():
    values = torch.linspace(1e-9, 6e-5, 10_001)
    plain, scaled = CommCodec(torch.float16), CommCodec(torch.float16, loss_scale=2.0**16)
    error = (plain.decode(plain.encode(values), torch.float32) - values).abs()
    assert 2**-26 < error.max() <= 2**-25
    error = (scaled.decode(scaled.encode(values), torch.float32) - values).abs() / values
    assert error.max() <= 2**-11


def test_what_is_too_large_for_fp16_becomes_infinite():
    assert torch.isinf(CommCodec(torch.float16).encode(torch.tensor([70_000.0]))).all()


def group() -> dist.ProcessGroup:
    world = comm.default_group()
    assert world is not None, "tests of several ranks run inside a pool"
    return world


def narrow_and_wide(rank: int, world_size: int, codecs: QuantizedCommCodecs) -> list[tuple]:
    """(rows, rows without codecs, gradient, without, bytes forward, without, bytes back, without)
    of each move.
    """
    hosts = host_groups(group(), 2)
    moves = [
        lambda codecs: PooledEmbeddingsAllToAll(group(), [8] * world_size, codecs=codecs),
        lambda codecs: PooledEmbeddingsReduceScatter(group(), codecs),
        lambda codecs: HostPooledEmbeddings(hosts, rank, 2, [8] * (world_size // 2), codecs),
    ]
    results = []
    for move in moves:
        found: list[tuple] = []
        for each in (codecs, None):
            draw = torch.Generator().manual_seed(rank)
            # Positive and near 1, so that a relative error of the sum is one of its parts.
            rows = (1 + torch.rand(world_size * 5, 8, generator=draw)).to(device()).requires_grad_()
            with count_traffic() as traffic:
                home = move(each)(rows, [5] * world_size).wait()
                home.backward((1 + torch.rand(home.shape, generator=draw)).to(device()))
            assert rows.grad is not None, "a move has a way back"
            found.append(
                (
                    home.detach(),
                    rows.grad,
                    traffic.total(ROWS_STAGE),
                    traffic.total(GRADIENTS_STAGE),
                )
            )
        results.append(tuple(pair for pairs in zip(*found, strict=True) for pair in pairs))
    return results


def check_errors(results: list[list[tuple]], forward: torch.dtype, backward: torch.dtype) -> None:
    for moves in results:
        # The moves over hosts round twice on each way.
        for steps, (rows, wide, gradient, wide_gradient, sent, full, back, full_back) in zip(
            (1, 1, 2), moves, strict=True
        ):
            error = ((rows - wide).abs() / wide).max()
            assert 0 < error <= steps * STATED[forward] * 1.01
            error = ((gradient - wide_gradient).abs() / wide_gradient).max()
            assert 0 < error <= steps * STATED[backward] * 1.01
            assert (2 * sent, 2 * back) == (full, full_back)
            assert sent > 0 < back


def registry(forward: CommType, backward: CommType) -> dict[str, QuantizedCommCodecs]:
    found = get_qcomm_codecs_registry(QCommsConfig(forward, backward))
    assert found is not None, "one of them is narrow"
    return found


def test_sums_of_two_ranks_err_no_more_than_a_value_and_take_half_the_bytes(ranks):
    codecs = registry(CommType.FP16, CommType.BF16)[CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name]
    check_errors(ranks(2).run(narrow_and_wide, codecs=codecs), torch.float16, torch.bfloat16)


@pytest.mark.world4
def test_sums_of_four_ranks_on_two_hosts_err_no_more_than_twice_a_value(ranks):
    codecs = registry(CommType.BF16, CommType.FP16)[CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name]
    check_errors(ranks(4).run(narrow_and_wide, codecs=codecs), torch.bfloat16, torch.float16)


def test_registry_has_each_direction_apart():
    assert get_qcomm_codecs_registry(QCommsConfig()) is None
    both = registry(CommType.FP32, CommType.BF16)
    assert set(both) == {op.name for op in CommOp}
    assert set(both.values()) == {QuantizedCommCodecs(None, CommCodec(torch.bfloat16))}
    one = get_qcomm_codecs_registry(
        QCommsConfig(CommType.FP16, forward_loss_scale=2.0), [CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL]
    )
    assert one == {
        "SEQUENCE_EMBEDDINGS_ALL_TO_ALL": QuantizedCommCodecs(CommCodec(torch.float16, 2.0), None)
    }


@pytest.mark.parametrize("precision", [CommType.FP8, CommType.INT8, CommType.MX4])
def test_other_types_are_refused_by_name(precision):
    with pytest.raises(
        ValueError,
        match=f"backward_precision {precision.name} is not supported.*FP32, FP16 or BF16",
    ):
        QCommsConfig(backward_precision=precision)


def test_words_and_scales_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match=r"forward_precision.*CommType, got 'fp16'"):
        QCommsConfig(forward_precision="fp16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"backward_loss_scale.*None.*0"):
        QCommsConfig(backward_precision=CommType.FP16, backward_loss_scale=0.0)


def test_codecs_of_one_move_are_those_of_the_registry():
    config = QCommsConfig(CommType.FP16, CommType.BF16, backward_loss_scale=8.0)
    registry = get_qcomm_codecs_registry(config)
    assert registry is not None
    assert set(registry.values()) == {get_qcomm_codecs(config)}
    assert get_qcomm_codecs(None) == get_qcomm_codecs(QCommsConfig()) == QuantizedCommCodecs()
    with pytest.raises(ValueError, match="FP8 is not supported"):
        get_qcomm_codecs(QCommsConfig(forward_precision=CommType.FP8))


def test_types_on_the_wire_that_are_no_configuration_are_named():
    with pytest.raises(
        TypeError,
        match=r"qcomms_config.*QCommsConfig.*'fp16': QCommsConfig\(forward_precision=",
    ):
        get_qcomm_codecs("fp16")  # pyright: ignore[reportArgumentType]
