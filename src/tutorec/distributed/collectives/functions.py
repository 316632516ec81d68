"""The exchanges of rows as functions, under TorchRec's names.

A group of None is the default process group. Each function returns an awaitable that autograd can
differentiate; gradients are divided by W unless `set_gradient_division(False)` was called. In a
group of one rank the input is returned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.row_sums import (
    PooledEmbeddingsAllGather,
    PooledEmbeddingsReduceScatter,
)
from tutorec.distributed.collectives.rows import PooledEmbeddingsAllToAll, ViewAwaitable
from tutorec.distributed.collectives.sequence import rows_of_ids
from tutorec.distributed.core.qcomm import QuantizedCommCodecs


def alltoall_pooled(
    a2a_pooled_embs_tensor: torch.Tensor,
    batch_size_per_rank: Sequence[int],
    dim_sum_per_rank: Sequence[int],
    dim_sum_per_rank_tensor: torch.Tensor | None = None,
    cumsum_dim_sum_per_rank_tensor: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """``[sum of B_s, D_local]`` -> awaitable of ``[B_local, sum of D_r]``.

    Args:
        a2a_pooled_embs_tensor: Pooled rows of every rank's samples, rank 0's first.
        batch_size_per_rank: B_s: W numbers.
        dim_sum_per_rank: D_r: W numbers.
        dim_sum_per_rank_tensor: TorchRec's; has no effect.
        cumsum_dim_sum_per_rank_tensor: TorchRec's; has no effect.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.alltoall_pooled``.
    """
    exchange = PooledEmbeddingsAllToAll(_ranks(group), dim_sum_per_rank, codecs=codecs)
    return exchange(a2a_pooled_embs_tensor, batch_size_per_rank)


def variable_batch_alltoall_pooled(
    a2a_pooled_embs_tensor: torch.Tensor,
    batch_size_per_rank_per_feature: Sequence[Sequence[int]],
    batch_size_per_feature_pre_a2a: Sequence[int],
    emb_dim_per_rank_per_feature: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """`alltoall_pooled` for features with different numbers of samples; all tensors are flat.

    Args:
        a2a_pooled_embs_tensor: For each rank the rows of its samples, feature after feature: flat.
        batch_size_per_rank_per_feature: Samples of each rank, for each feature that is looked up
            here.
        batch_size_per_feature_pre_a2a: Local samples of each feature, the features of rank 0 first.
        emb_dim_per_rank_per_feature: Columns of the features that each rank looks up.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.variable_batch_alltoall_pooled``.
    """
    ranks = _ranks(group)
    local_columns = emb_dim_per_rank_per_feature[ranks.rank()]
    counts_out = [_elements(samples, local_columns) for samples in batch_size_per_rank_per_feature]
    samples = iter(batch_size_per_feature_pre_a2a)
    counts_in = [
        sum(width * next(samples) for width in widths) for widths in emb_dim_per_rank_per_feature
    ]

    exchange = PooledEmbeddingsAllToAll(
        ranks, [sum(widths) for widths in emb_dim_per_rank_per_feature], codecs=codecs
    )
    return exchange.variable(a2a_pooled_embs_tensor, counts_out, counts_in)


def alltoall_sequence(
    a2a_sequence_embs_tensor: torch.Tensor,
    forward_recat_tensor: torch.Tensor,
    backward_recat_tensor: torch.Tensor,
    lengths_after_sparse_data_all2all: torch.Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    variable_batch_size: bool = False,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """A row per received id -> awaitable of a row per sent id.

    Args:
        a2a_sequence_embs_tensor: ``[N, D]``, in lookup order: feature after feature.
        forward_recat_tensor: Segments of rows in the order in which they are sent: those for rank 0
            first.
        backward_recat_tensor: TorchRec's, the inverse order; has no effect.
        lengths_after_sparse_data_all2all: Rows of each feature's samples here; a segment is an
            equal share of them.
        input_splits: Ids sent to each rank, whose rows return: W numbers.
        output_splits: Ids received from each rank, whose rows are sent back: W numbers.
        variable_batch_size: TorchRec's; has no effect, since it follows from the number of
            segments.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.alltoall_sequence``.
    """
    return rows_of_ids(
        _ranks(group),
        a2a_sequence_embs_tensor,
        lengths_after_sparse_data_all2all,
        forward_recat_tensor,
        (input_splits, output_splits),
        codecs,
    )


def reduce_scatter_pooled(
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """One tensor per rank -> awaitable of the sum of all ranks' tensors for this rank.

    Args:
        inputs: W tensors; those for one rank have the same shape on every rank.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.reduce_scatter_pooled``.
    """
    return reduce_scatter_v_pooled(
        torch.cat(list(inputs)), [len(tensor) for tensor in inputs], group, codecs
    )


def reduce_scatter_base_pooled(
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """``[W * B, ...]`` -> awaitable of ``[B, ...]``: equal parts are summed, one per rank.

    Args:
        input: The same shape on every rank.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.reduce_scatter_base_pooled``.
    """
    return reduce_scatter_v_pooled(input, None, group, codecs)


def reduce_scatter_v_pooled(
    input: torch.Tensor,
    input_splits: Sequence[int] | None,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """``[sum of B_s, ...]`` -> awaitable of ``[B_local, ...]``.

    Args:
        input: The same shape on every rank.
        input_splits: B_s: W numbers; None for equal parts.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.reduce_scatter_v_pooled``.
    """
    exchange = PooledEmbeddingsReduceScatter(_ranks(group), codecs)
    row = input.shape[1:]
    summed = exchange(input.reshape(len(input), row.numel()), input_splits)
    return ViewAwaitable(summed, (-1, *row))


def reduce_scatter_v_per_feature_pooled(
    input: torch.Tensor,
    batch_size_per_rank_per_feature: Sequence[Sequence[int]],
    embedding_dims: Sequence[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """`reduce_scatter_v_pooled` for features with different numbers of samples; tensors are flat.

    Args:
        input: For each rank the rows of its samples, feature after feature: flat.
        batch_size_per_rank_per_feature: Samples of each rank, for each feature.
        embedding_dims: Columns of each feature.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.reduce_scatter_v_per_feature_pooled``.
    """
    counts = [_elements(samples, embedding_dims) for samples in batch_size_per_rank_per_feature]
    return PooledEmbeddingsReduceScatter(_ranks(group), codecs).variable(input, counts)


def all_gather_base_pooled(
    input: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[torch.Tensor]:
    """``[B, ...]`` -> awaitable of ``[W * B, ...]``, the rows of all ranks.

    Args:
        input: The same shape on every rank.
        group: The ranks.
        codecs: Data types in which rows and gradients are sent.

    Source:
        TorchRec's ``torchrec.distributed.comm_ops.all_gather_base_pooled``.
    """
    return PooledEmbeddingsAllGather(_ranks(group), codecs)(input)


def _ranks(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, or the default process group, which must exist."""
    return group or dist.distributed_c10d._get_default_group()


def _elements(samples: Sequence[int], widths: Sequence[int]) -> int:
    return sum(count * width for count, width in zip(samples, widths, strict=True))


__all__ = [
    "all_gather_base_pooled",
    "alltoall_pooled",
    "alltoall_sequence",
    "reduce_scatter_base_pooled",
    "reduce_scatter_pooled",
    "reduce_scatter_v_per_feature_pooled",
    "reduce_scatter_v_pooled",
    "variable_batch_alltoall_pooled",
]
