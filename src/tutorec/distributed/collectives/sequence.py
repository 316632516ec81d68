"""The exchange of unpooled rows: a row per id, to the rank that sent it, and gradients back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tutorec.awaitable import Awaitable, NoWait, map_awaitable
from tutorec.distributed.collectives.rows import ViewAwaitable, rows_to_ranks
from tutorec.distributed.core.qcomm import QuantizedCommCodecs


class SequenceEmbeddingsAllToAll(nn.Module):
    """A row per received id -> a row per sent id.

    A rank that has looked up nothing takes part in backward, too.

    Args:
        pg: The ranks; None in a world of 1.
        features_per_rank: Features that each rank looks up: W numbers. `flat` does not need them.
        device: TorchRec's; has no effect.
        codecs: Data types in which rows and gradients are sent; None keeps them as they are.

    Source:
        TorchRec's ``SequenceEmbeddingsAllToAll``.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        features_per_rank: Sequence[int] = (),
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._features = list(features_per_rank)
        self._codecs = codecs

    def forward(
        self,
        local_embs: torch.Tensor,
        lengths: torch.Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        unbucketize_permute_tensor: torch.Tensor | None = None,
        batch_size_per_rank: Sequence[int] | None = None,
        sparse_features_recat: torch.Tensor | None = None,
    ) -> Awaitable[torch.Tensor]:
        """``local_embs [N, D]`` -> awaitable of a row ``[D]`` per sent id.

        Args:
            local_embs: Rows in lookup order: feature after feature, ranks inside.
            lengths: Ids of each feature and sample here.
            input_splits: Ids sent to each rank, whose rows return: W numbers.
            output_splits: Ids received from each rank, whose rows are sent back: W numbers.
            unbucketize_permute_tensor: For each id the place of its row among those that arrive.
            batch_size_per_rank: TorchRec's; has no effect, since it follows from the next one.
            sparse_features_recat: The order in which the input exchange left the segments of
                ``lengths``; needed where ranks have different numbers of samples.
        """
        group = self._pg
        permute = unbucketize_permute_tensor
        if group is None or group.size() == 1:
            return NoWait(local_embs if permute is None else local_embs[permute])

        if sparse_features_recat is None:
            order = torch.arange(group.size() * self._features[group.rank()], device=lengths.device)
            order = order.view(-1, group.size()).t().reshape(-1)
        else:
            order = sparse_features_recat.argsort()

        splits = input_splits, output_splits
        arriving = rows_of_ids(group, local_embs, lengths, order, splits, self._codecs)
        return arriving if permute is None else map_awaitable(lambda rows: rows[permute], arriving)

    def flat(
        self, rows: torch.Tensor, counts_out: Sequence[int], counts_in: Sequence[int]
    ) -> Awaitable[torch.Tensor]:
        """``rows [sum of counts_out]`` -> awaitable of ``[sum of counts_in]``, counts per rank.

        Ids of tables of different widths may be sent together; the caller knows the shapes.
        """
        return rows_to_ranks(self._pg, rows, counts_out, counts_in, self._codecs)


def rows_of_ids(
    group: dist.ProcessGroup,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    order: torch.Tensor,
    splits: tuple[Sequence[int], Sequence[int]],
    codecs: QuantizedCommCodecs | None,
) -> Awaitable[torch.Tensor]:
    """Send rows back to the ranks of their ids; see `alltoall_sequence`.

    Args:
        group: The ranks.
        rows: ``[N, D]`` in lookup order.
        lengths: Rows of each feature's samples here; a segment is an equal share of them.
        order: Segments of rows in the order in which they are sent.
        splits: Ids sent to each rank, and ids received from each.
        codecs: Data types in which rows and gradients are sent.
    """
    if group.size() == 1:
        return NoWait(rows)

    width = rows.shape[1]
    if len(order):
        rows = rows[_segments(lengths.view(len(order), -1).sum(1), order.long())]

    arriving, sent = ([width * count for count in rank_counts] for rank_counts in splits)
    moved = rows_to_ranks(group, rows.reshape(-1), sent, arriving, codecs)
    return ViewAwaitable(moved, (-1, width))


def _segments(lengths: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Row indices of segments of the given lengths, with the segments in another order.

    Example:
        >>> _segments(torch.tensor([2, 0, 1]), torch.tensor([2, 1, 0]))
        tensor([2, 0, 1])
    """
    starts = lengths.cumsum(0) - lengths
    lengths = lengths[order]
    starts = starts[order]
    shifts = starts - (lengths.cumsum(0) - lengths)
    return torch.arange(int(lengths.sum()), device=lengths.device) + shifts.repeat_interleave(
        lengths
    )


__all__ = ["SequenceEmbeddingsAllToAll", "rows_of_ids"]
