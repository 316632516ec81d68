"""Row-wise sharding (RW): every rank holds a range of rows of every table.

::

    local samples, all features  KJT [F x B]
      | input_dist    bucketize ids by row range, send each bucket to its rank  (all-to-all)
    all samples, local rows      KJT [F x W*B]
      | lookup        add the local rows: a partial sum of each bag             (no communication)
    all samples, partial sums    [W*B, D]
      | output_dist   add the partial sums of each sample on its rank           (reduce-scatter)
    local samples, all columns   [B, D]

    a table of 4 rows on two ranks           the bag [0, 3] of rank 0

        rank 0   row 0, row 1                rank 0 contributes row 0
        rank 1   row 2, row 3                rank 1 contributes row 3; rank 0 adds row 0 + row 3

Bytes that rank r sends in one step, with N_rs of r's ids in the rows of s and 4 bytes per id::

    input ids          sum over s != r of  4 * (F * B_r + N_rs)
    output rows        sum over s != r of  4 * B_s * D    partial sums: one row per sample and rank
    output gradients   sum over s != r of  4 * B_r * D    every rank has rows to update

Table-wise sharding sends each pooled row once. Here every rank sends a partial sum of it, so the
output costs W times as much. Use it for tables that are too large for one rank, and for an equal
load on all ranks.

The ids of one bag may fall into several ranges: every rank with a range computes a partial sum, and
the exchange adds them. A mean is a sum divided by the bag's length, which the rank of the sample
knows: no extra bytes are sent for it, and tables with SUM and MEAN pooling share an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from tutorec._kernels.bucketize import bucketize
from tutorec.awaitable import Awaitable, map_awaitable
from tutorec.distributed.collectives.kjt import KJTAllToAll, KJTArrival
from tutorec.distributed.collectives.row_sums import PooledEmbeddingsReduceScatter
from tutorec.distributed.core.orders import OutputColumns
from tutorec.distributed.core.qcomm import CommOp, QuantizedCommCodecs
from tutorec.distributed.sharding.base import (
    EmbeddingShardingContext,
    PlacedSlots,
    PooledEmbeddingDist,
    PooledEmbeddingSharding,
    Route,
    SparseFeaturesDist,
    elements_out,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class RwSparseFeaturesDist(SparseFeaturesDist):
    """Local samples, all features -> all samples, the ids in the local row ranges.

    Args:
        pg: The ranks.
        slots: The slots of every rank.
        route: How ids reach the slots.
        keep_places: Whether to keep the position of each id, for rows that return unpooled.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        slots: PlacedSlots,
        route: Route,
        keep_places: bool = False,
    ) -> None:
        super().__init__()
        self._route = route
        self._raw_ids = slots.raw_ids
        self._keep_places = keep_places
        self._dist = KJTAllToAll(pg, slots.counts, order=route.order, ids_dtype=slots.ids_dtype)

    def forward(
        self, features: KeyedJaggedTensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[KJTArrival]:
        """Send ``features``, which are in the order of the route."""
        ctx.batch_size_per_feature_pre_a2a = features.stride_per_key()
        ctx.factors = home_factors(features, self._route.poolings)
        return self._dist(self._in_buckets(features, ctx))

    def _in_buckets(
        self, features: KeyedJaggedTensor, ctx: EmbeddingShardingContext
    ) -> KeyedJaggedTensor:
        buckets = len(self._route.bounds[0]) - 1
        if buckets == 1:
            return features

        strides = features.stride_per_key()
        raw_ids = self._raw_ids
        ids = features.values()
        bucketized = bucketize(
            features.lengths(),
            ids if raw_ids is None else raw_ids.buckets_of(features),
            features.weights_or_none(),
            strides,
            self._route.bounds if raw_ids is None else raw_ids.bounds,
            self._keep_places or raw_ids is not None,
        )
        ctx.places = bucketized.places
        values = bucketized.values
        # The owners remap raw ids, so the raw ids are sent, in the order of their buckets.
        if raw_ids is not None:
            assert bucketized.places is not None, "asked for above"
            values = ids.new_empty(ids.shape).index_copy_(0, bucketized.places, ids)

        variable = features.variable_stride_per_key()
        return KeyedJaggedTensor._from_parts(
            features.keys() * buckets,
            values,
            bucketized.weights,
            bucketized.lengths,
            None,
            None if variable else features.stride(),
            None,
            torch.tensor(strides * buckets, dtype=torch.int32).view(-1, 1) if variable else None,
        )


def home_factors(
    features: KeyedJaggedTensor, poolings: Sequence[str]
) -> list[torch.Tensor | None] | None:
    """Return the factor ``[B]`` of each feature's pooled sums; None for 1, and None if all are 1.

    Args:
        features: F features.
        poolings: The pooling of each.

    Example:
        >>> bags = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([0, 2, 1, 1])
        ... )
        >>> home_factors(bags, ["mean", "sum"])
        [tensor([1.0000, 0.5000]), None]
    """
    if all(pooling in ("sum", "none") for pooling in poolings):
        return None

    strides = features.stride_per_key()
    weights = features.weights_or_none()
    split_lengths = features.lengths().split(strides)
    counts = features.length_per_key()
    split_weights = weights.float().split(counts) if weights is not None else [None] * len(counts)
    return [
        _factor(pooling, lengths, own_weights)
        for pooling, lengths, own_weights in zip(
            poolings, split_lengths, split_weights, strict=True
        )
    ]


def _factor(
    pooling: str, lengths: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor | None:
    """The factors of one feature's bags; 1 for an empty bag, whose sum is 0."""
    if pooling == "mean":
        return lengths.clamp(min=1).float().reciprocal()
    if pooling != "sqrtn":
        return None
    if weights is None:
        return lengths.clamp(min=1).float().rsqrt()

    bags = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(
        lengths, output_size=weights.numel()
    )
    squares = weights.new_zeros(lengths.numel()).index_add_(0, bags, weights.square())
    return torch.where(squares > 0, squares, 1.0).rsqrt()


class Scaling:
    """Scales pooled sums that have returned to the rank of their sample.

    Args:
        columns: Columns of each output shard.
        features: The feature of each output shard.
    """

    def __init__(self, columns: Sequence[int], features: Sequence[int]) -> None:
        self._columns = list(columns)
        self._features = list(features)

    def apply(
        self, arriving: Awaitable[torch.Tensor], ctx: EmbeddingShardingContext
    ) -> Awaitable[torch.Tensor]:
        """Return the awaitable of the scaled sums, ``[B, D]``, or flat for a variable batch."""
        if ctx.factors is None:
            return arriving
        return map_awaitable(lambda pooled: pooled * self.factor(ctx), arriving)

    def factor(self, ctx: EmbeddingShardingContext) -> torch.Tensor:
        """One factor per element: ``[B, D]``, flat for a variable batch."""
        assert ctx.factors is not None, "without factors nothing is scaled"
        device = next(factor.device for factor in ctx.factors if factor is not None)
        factors = [
            torch.ones(samples, dtype=torch.float32, device=device) if factor is None else factor
            for factor, samples in zip(ctx.factors, ctx.batch_size_per_feature_pre_a2a, strict=True)
        ]

        shards = zip(self._features, self._columns, strict=True)
        if ctx.batch_size_per_rank_per_feature is None:
            return torch.cat(
                [factors[feature].unsqueeze(1).expand(-1, columns) for feature, columns in shards],
                dim=1,
            )
        return torch.cat(
            [factors[feature].repeat_interleave(columns) for feature, columns in shards]
        )


class SplitRowsSharding(PooledEmbeddingSharding):
    """Base of pooled shardings whose shards have a range of the rows of their table."""

    def _find_route(self) -> Route:
        return Route.to_split_rows(self._slots)

    def create_input_dist(self) -> RwSparseFeaturesDist:
        """Build the input dist: ids to the ranks that hold their rows."""
        return RwSparseFeaturesDist(self._slots.process_group(), self._slots, self._route)

    def _scaling(self) -> Scaling:
        """Divides sums by bag lengths for means."""
        return Scaling([shard.columns for shard in self.output_columns()], self.output_features())


@final
class RwPooledEmbeddingDist(PooledEmbeddingDist):
    """All samples, partial sums -> local samples, sums.

    Args:
        slots: The slots of every rank.
        scaling: Divides sums by bag lengths for means.
        codecs: Data types in which rows are sent; float32 by default.
    """

    def __init__(
        self, slots: PlacedSlots, scaling: Scaling, codecs: QuantizedCommCodecs | None
    ) -> None:
        super().__init__()
        self._slots = slots
        self._scaling = scaling
        self._codecs = codecs
        self._dist: PooledEmbeddingsReduceScatter | None = None

    def build(self) -> None:
        """Build the exchange."""
        if self._dist is None:
            self._dist = PooledEmbeddingsReduceScatter(self._slots.process_group(), self._codecs)

    def forward(
        self, pooled: torch.Tensor, ctx: EmbeddingShardingContext
    ) -> Awaitable[torch.Tensor]:
        """``pooled [sum of B_s, D]`` -> awaitable of ``[B_local, D]``."""
        assert self._dist is not None, "the first batch builds the exchange"
        if ctx.batch_size_per_rank_per_feature is None:
            arriving = self._dist(pooled, ctx.batch_size_per_rank)
        else:
            arriving = self._dist.variable(
                pooled, elements_out(self._slots, ctx.batch_size_per_rank_per_feature)
            )
        return self._scaling.apply(arriving, ctx)


@final
class RwPooledEmbeddingSharding(SplitRowsSharding):
    """The row-wise tables of a collection of pooled embeddings: one shard per rank."""

    def output_columns(self) -> list[OutputColumns]:
        """All columns: every rank has the same ones."""
        return [slot.output() for slot in self._slots.per_rank[0]]

    def output_features(self) -> list[int]:
        """For each output, its position in ``feature_names()``."""
        return self._route.positions[0]

    def create_output_dist(self) -> RwPooledEmbeddingDist:
        """Build the output dist: partial sums to the ranks of their samples."""
        codecs = self._codecs.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name)
        return RwPooledEmbeddingDist(self._slots, self._scaling(), codecs)
