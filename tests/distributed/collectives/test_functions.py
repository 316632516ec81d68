"""TorchRec's functions for exchanges, beside plain torch.distributed: what arrives, and the
gradients of a loss.

Every rank sends what it drew and its own coefficients of the loss to all. From these each works out
in plain torch what it ought to receive, and the gradient: the coefficients at the places to which
its elements went, divided by W.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.awaitable import Awaitable
from tutorec.distributed import comm_ops
from tutorec.distributed.core.qcomm import CommCodec, QuantizedCommCodecs
from tutorec.distributed.dist_data import PooledEmbeddingsAllGather
from tutorec.spmd import device

SAMPLES, COLUMNS = [2, 3], [4, 1]
# Variable batches: features of each rank, their columns, and the samples of each rank.
WIDTHS, SAMPLES_OF_FEATURES = [[2], [3, 3]], [[2, 1, 3], [1, 2, 2]]
# Ids that are not pooled: two features on rank 0 and one on rank 1, lengths by feature and sample,
# for each rank.
FEATURES, LENGTHS = [[0, 1], [2]], [[[1, 2], [0, 1], [3, 0]], [[2, 0], [1, 1], [0, 4]]]


def draw(rank: int, *shape: int) -> Tensor:
    """Whole numbers, so that sums are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(rank)).float()


def everywhere(value: Tensor) -> list[Tensor]:
    """What each rank has, by plain torch."""
    gathered: list[Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(gathered, value.detach().cpu())
    return gathered


def check(
    sent: Tensor,
    move: Callable[[Tensor], Awaitable[Tensor]],
    plain: Callable[[list[Tensor], int], Tensor],
):
    """A move, beside ``plain``, which works out what a rank receives from what all ranks have."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = sent.to(device()).requires_grad_()
    arrived = move(mine).wait()
    all_sent = [each.requires_grad_() for each in everywhere(sent)]
    expected = [plain(all_sent, to) for to in range(world_size)]
    torch.testing.assert_close(arrived.cpu(), expected[rank], rtol=0, atol=0)
    coefficients = draw(7 + rank, *expected[rank].shape)
    (arrived * coefficients.to(arrived.device)).sum().backward()
    loss = torch.stack(
        [(e * c).sum() for e, c in zip(expected, everywhere(coefficients), strict=True)]
    ).mean()
    loss.backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad.cpu(), all_sent[rank].grad, rtol=0, atol=0)


def pooled(rank: int, world_size: int) -> None:
    starts = [0, *SAMPLES]
    check(
        draw(rank, sum(SAMPLES), COLUMNS[rank]),
        lambda rows: comm_ops.alltoall_pooled(rows, SAMPLES, COLUMNS),
        lambda sent, to: torch.cat(
            [rows[starts[to] : starts[to] + SAMPLES[to]] for rows in sent], dim=1
        ),
    )


def pooled_variable(rank: int, world_size: int) -> None:
    features = [[0], [1, 2]]
    of_mine = [[SAMPLES_OF_FEATURES[to][f] for f in features[rank]] for to in range(world_size)]
    counts = [
        [
            sum(w * SAMPLES_OF_FEATURES[to][f] for w, f in zip(WIDTHS[r], features[r], strict=True))
            for to in range(2)
        ]
        for r in range(world_size)
    ]
    check(
        draw(rank, sum(counts[rank])),
        lambda flat: comm_ops.variable_batch_alltoall_pooled(
            flat, of_mine, SAMPLES_OF_FEATURES[rank], WIDTHS
        ),
        lambda sent, to: torch.cat([flat.split(counts[r])[to] for r, flat in enumerate(sent)]),
    )


def sequence(rank: int, world_size: int) -> None:
    """Rows lie feature by feature, and in a feature by the rank of the sample; they go home by
    rank, then feature.
    """
    mine = FEATURES[rank]
    counts = [
        [[sum(LENGTHS[home][f]) for f in features] for home in range(2)] for features in FEATURES
    ]
    lengths = torch.tensor(
        [LENGTHS[home][f] for f in mine for home in range(2)], dtype=torch.int32
    ).view(len(mine), -1)
    recat = [feature * 2 + home for home in range(2) for feature in range(len(mine))]
    order = torch.tensor(recat, dtype=torch.int32, device=device())
    to_home = [sum(counts[rank][home]) for home in range(2)]
    from_tables = [sum(counts[r][rank]) for r in range(2)]

    def plain(sent: list[Tensor], to: int) -> Tensor:
        parts = []
        for r, rows in enumerate(sent):
            by_feature = rows.split(
                [counts[r][home][f] for f in range(len(FEATURES[r])) for home in range(2)]
            )
            parts += [by_feature[feature * 2 + to] for feature in range(len(FEATURES[r]))]
        return torch.cat(parts)

    check(
        draw(rank, sum(to_home), 3),
        lambda rows: comm_ops.alltoall_sequence(
            rows, order, order.argsort().int(), lengths.to(device()), from_tables, to_home
        ),
        plain,
    )


def reduce_scattered(rank: int, world_size: int) -> None:
    for shape in ([5], [5, 3], [5, 2, 2]):
        check(
            draw(rank, *shape),
            lambda rows: comm_ops.reduce_scatter_v_pooled(rows, SAMPLES),
            lambda sent, to: torch.stack(sent).sum(0).split(SAMPLES)[to],
        )
    check(
        draw(rank, 5, 3),
        lambda rows: comm_ops.reduce_scatter_pooled(rows.split(SAMPLES)),
        lambda sent, to: torch.stack(sent).sum(0).split(SAMPLES)[to],
    )
    check(
        draw(rank, 6, 3),
        comm_ops.reduce_scatter_base_pooled,
        lambda sent, to: torch.stack(sent).sum(0).chunk(2)[to],
    )
    check(
        draw(rank, 4 * (1 + 2) + 8 * (3 + 2)),
        lambda flat: comm_ops.reduce_scatter_v_per_feature_pooled(flat, [[1, 3], [2, 2]], [4, 8]),
        lambda sent, to: torch.stack(sent).sum(0).split([4 * 1 + 8 * 3, 4 * 2 + 8 * 2])[to],
    )


def gathered(rank: int, world_size: int) -> None:
    for shape in ([3], [3, 2], [0, 2]):
        check(draw(rank, *shape), comm_ops.all_gather_base_pooled, lambda sent, to: torch.cat(sent))
    # Small whole numbers, halves of them and their sums are exact in 16 bits, too.
    codecs = QuantizedCommCodecs(CommCodec(torch.float16), CommCodec(torch.float16, loss_scale=2.0))
    check(
        draw(rank, 3, 2),
        PooledEmbeddingsAllGather(dist.group.WORLD, codecs),
        lambda sent, to: torch.cat(sent),
    )


@pytest.mark.parametrize("body", [pooled, pooled_variable, sequence, reduce_scattered, gathered])
def test_functions_move_rows_and_gradients_as_plain_torch(ranks, body):
    ranks(2).run(body)


def alone(rank: int, world_size: int) -> None:
    rows = draw(0, 4, 2).requires_grad_()
    order = torch.tensor([0])
    results = [
        comm_ops.alltoall_pooled(rows, [4], [2]),
        comm_ops.variable_batch_alltoall_pooled(rows, [[4]], [4], [[2]]),
        comm_ops.alltoall_sequence(rows, order, order, torch.tensor([4]), [4], [4]),
        comm_ops.reduce_scatter_pooled([rows]),
        comm_ops.reduce_scatter_base_pooled(rows),
        comm_ops.reduce_scatter_v_pooled(rows, [4]),
        comm_ops.reduce_scatter_v_per_feature_pooled(rows, [[4]], [2]),
        comm_ops.all_gather_base_pooled(rows),
    ]
    for result in results:
        torch.testing.assert_close(result.wait(), rows, rtol=0, atol=0)


def test_in_a_world_of_one_the_rows_come_back(ranks):
    ranks(1).run(alone)


def misfit(rank: int, world_size: int) -> list[str]:
    refused = []
    for call in (
        lambda: comm_ops.reduce_scatter_v_pooled(torch.ones(5, 2), [2, 2]),
        lambda: comm_ops.reduce_scatter_base_pooled(torch.ones(5, 2)),
        lambda: comm_ops.alltoall_pooled(torch.ones(5, 2), [2, 3], [2]),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        refused.append(str(caught.value))
    return refused


def test_splits_that_do_not_add_up_are_refused_before_anything_is_sent(ranks):
    for refused in ranks(2).run(misfit):
        assert "[2, 2] is for 2 ranks and 4 samples" in refused[0] and "5 pooled rows" in refused[0]
        assert "5 pooled rows cannot be divided equally among 2 ranks" in refused[1]
        assert "[2] is for 1 ranks, and there are 2" in refused[2]
