"""The exchange of gradients of replicated tables, in the fewest bytes.

The gradient of a table [R, D] comes from the ids that a rank has looked up. There are two ways to
send it::

    as bags    ids of the local bags and the gradient of each pooled row    grows with the batch
    as sums    gradient of the whole table, added over ranks                grows with the table

Bags are sent by one all-gather. Afterwards every rank has the batch of all ranks and its gradients,
and computes what one rank with that batch would compute. Sums are sent by a reduce-scatter and an
all-gather. Ranks first exchange their numbers of ids, and from these all make the same choice, for
each table at every step.

Bytes that rank r sends to each other rank, with F features, B_r samples, N_rf ids of feature f (of
4 bytes, or 8 where a table has 2 ** 31 rows), and E elements of all summed tables, of which rank r
sums E_r (E / W; the first E % W ranks have one more). Some optimizers, such as Adam, update rows
whose gradient is zero; their tables have one more element per row, which marks rows in the batch.

::

    gradient sizes     8 * (1 + F)
    gradient ids       sum over f as bags of  4 * (B_r + N_rf)
    gradient weights   sum over f as bags of  4 * N_rf                where ids carry weights
    gradient rows      sum over f as bags of  4 * B_r * D_f
    gradient sums      4 * E_s to rank s, and then  4 * E_r           two issues

A table is sent as bags unless the sum over ranks of its ids, weights and rows exceeds 8 * R * D
bytes. A table with elementwise gradient clipping is always sent as bags: a clipped sum is not the
sum of clipped terms. With a variable batch B_r is the largest number of samples of a feature.
Unpooled rows are sent as bags of one id: without lengths, with N_rf in place of B_r and sizes of 8
* F bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
import torch.distributed as dist

from tutorec.awaitable import Awaitable, map_awaitable
from tutorec.distributed import comm
from tutorec.distributed.collectives.kjt import feature_major

SIZES_STAGE = "gradient sizes"
IDS_STAGE = "gradient ids"
WEIGHTS_STAGE = "gradient weights"
ROWS_STAGE = "gradient rows"
SUMS_STAGE = "gradient sums"

_FLOAT = 4  # bytes of a gradient element and of a length


@dataclass(frozen=True)
class CopiedTable:
    """A replicated table.

    Args:
        rows: R.
        columns: D.
        features: Number of features that read it; those of all tables are stored one after the
            other.
        summable: Whether its gradient may be sent as a sum.
    """

    rows: int
    columns: int
    features: int
    summable: bool = True


@dataclass(frozen=True)
class GlobalBags:
    """The batch of all ranks, for the features that are sent as bags.

    Args:
        values: Ids, feature after feature, rank 0's first ``[N]``.
        lengths: ``[F, sum of B]``.
        weights: ``[N]``, or None.
        grad: Gradient of the pooled rows ``[sum of B, sum of D]``.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None
    grad: torch.Tensor


@dataclass(frozen=True)
class Agreed:
    """The sizes of all ranks in one backward, and the choice made from them.

    Args:
        samples: B of each rank.
        ids: Number of ids per rank and feature ``[W][F]``.
        as_bags: For each table, whether it is sent as bags.
    """

    samples: list[int]
    ids: list[list[int]]
    as_bags: list[bool]


class PooledGradients:
    """The exchange of gradients of pooled rows.

    Args:
        group: The ranks.
        tables: The tables.
        ids_dtype: Dtype in which ids are sent.
        weighted: Whether each id carries a weight.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        tables: Sequence[CopiedTable],
        ids_dtype: torch.dtype,
        weighted: bool,
    ) -> None:
        self._group = group
        self._tables = list(tables)
        self._dtype = ids_dtype
        self._weighted = weighted
        self._columns = [table.columns for table in tables for _ in range(table.features)]
        self._id_bytes = ids_dtype.itemsize + (_FLOAT if weighted else 0)

    def agree(self, samples: int, ids: Sequence[int]) -> Agreed:
        """Exchange the local number of samples and of ids per feature, and choose. Blocks."""
        sizes = comm.all_gather_ints([samples, *ids], self._group, SIZES_STAGE)
        samples_by_rank = [size[0] for size in sizes]
        ids_by_rank = [size[1:] for size in sizes]
        total = [sum(counts) for counts in zip(*ids_by_rank, strict=True)]

        as_bags = []
        first = 0
        for table in self._tables:
            own = sum(total[first : first + table.features])
            bags = table.features * sum(samples_by_rank)
            as_bags.append(cheaper_as_bags(table, own * self._id_bytes + bags * _FLOAT, bags))
            first += table.features
        return Agreed(samples_by_rank, ids_by_rank, as_bags)

    def gather(
        self,
        agreed: Agreed,
        lengths: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        grad: torch.Tensor,
    ) -> Awaitable[GlobalBags]:
        """Issue the all-gather of the tables that are sent as bags.

        Args:
            agreed: Sizes and choice of this backward.
            lengths: ``[F, B]``.
            values: Ids ``[N]``.
            weights: ``[N]`` or None.
            grad: Gradient of the pooled rows ``[B, sum of D]``.
        """
        chosen = features_of(self._tables, agreed.as_bags)
        rank = self._group.rank()
        group = self._group
        ids = [[rank_ids[feature] for feature in chosen] for rank_ids in agreed.ids]
        columns = [self._columns[feature] for feature in chosen]

        if len(chosen) < len(self._columns):
            lengths = lengths[chosen]
            values = _pick(values, agreed.ids[rank], chosen)
            weights = None if weights is None else _pick(weights, agreed.ids[rank], chosen)
            grad = torch.cat(
                [grad.split(self._columns, dim=1)[feature] for feature in chosen], dim=1
            )

        counts = [sum(rank_ids) for rank_ids in ids]
        lists = [len(chosen) * samples for samples in agreed.samples]
        packed = torch.cat([lengths.reshape(-1).to(self._dtype), values.to(self._dtype)])
        sizes = [a + b for a, b in zip(lists, counts, strict=True)]
        arriving = comm.all_gather(packed, sizes, group, IDS_STAGE)
        arriving_weights = []
        if weights is not None:
            arriving_weights.append(comm.all_gather(weights.float(), counts, group, WEIGHTS_STAGE))

        rows = [samples * sum(columns) for samples in agreed.samples]
        gradients = comm.all_gather(grad.reshape(-1), rows, group, ROWS_STAGE)

        def bags(packed: torch.Tensor, grad: torch.Tensor, *given: torch.Tensor) -> GlobalBags:
            slices = packed.split_with_sizes(
                [*chain.from_iterable(zip(lists, counts, strict=True))]
            )
            lengths = torch.cat([block.view(len(chosen), -1) for block in slices[::2]], dim=1)
            weights = [feature_major(tensor.split_with_sizes(counts), ids) for tensor in given]
            values = feature_major(slices[1::2], ids)
            return GlobalBags(
                values, lengths, weights[0] if weights else None, grad.view(-1, sum(columns))
            )

        return map_awaitable(bags, arriving, gradients, *arriving_weights)


class TableRows(NamedTuple):
    """Gradients of unpooled rows of one table, of all ranks.

    Args:
        ids: ``[N]``.
        grad: ``[N, D]``.
    """

    ids: torch.Tensor
    grad: torch.Tensor


class GradientExchange:
    """The exchange of gradients of unpooled rows, as bags of one id.

    Args:
        group: The ranks.
        tables: The tables.
        ids_dtype: Dtype in which ids are sent.
    """

    def __init__(
        self, group: dist.ProcessGroup, tables: Sequence[CopiedTable], ids_dtype: torch.dtype
    ) -> None:
        self._group = group
        self._tables = list(tables)
        self._dtype = ids_dtype
        self._columns = [table.columns for table in tables for _ in range(table.features)]

    def agree(self, ids: Sequence[int]) -> Agreed:
        """Exchange the local number of ids per feature, and choose. Blocks."""
        ids_by_rank = comm.all_gather_ints(ids, self._group, SIZES_STAGE)
        total = [sum(counts) for counts in zip(*ids_by_rank, strict=True)]

        as_bags = []
        first = 0
        for table in self._tables:
            own = sum(total[first : first + table.features])
            as_bags.append(cheaper_as_bags(table, own * self._dtype.itemsize, own))
            first += table.features
        return Agreed([sum(rank_ids) for rank_ids in ids_by_rank], ids_by_rank, as_bags)

    def gather(
        self, agreed: Agreed, values: torch.Tensor, grad: torch.Tensor
    ) -> Awaitable[list[TableRows]]:
        """Issue the all-gather of the tables that are sent as bags, in table order.

        Args:
            agreed: Sizes and choice of this backward.
            values: Ids ``[N]``, feature after feature.
            grad: Gradients of their rows, flat ``[sum of N_f * D_f]``.
        """
        chosen = features_of(self._tables, agreed.as_bags)
        local_counts = agreed.ids[self._group.rank()]
        group = self._group
        if len(chosen) < len(self._columns):
            values = _pick(values, local_counts, chosen)
            grad = _pick(
                grad,
                [count * width for count, width in zip(local_counts, self._columns, strict=True)],
                chosen,
            )

        ids = [[rank_ids[feature] for feature in chosen] for rank_ids in agreed.ids]
        columns = [self._columns[feature] for feature in chosen]
        elements = [
            [n * width for n, width in zip(rank_ids, columns, strict=True)] for rank_ids in ids
        ]
        counts = [sum(rank_ids) for rank_ids in ids]

        arriving = comm.all_gather(values.to(self._dtype), counts, group, IDS_STAGE)
        rows = comm.all_gather(grad, [sum(rank_ids) for rank_ids in elements], group, ROWS_STAGE)
        tables = [table for table, take in zip(self._tables, agreed.as_bags, strict=True) if take]

        def of_tables(all_ids: torch.Tensor, all_rows: torch.Tensor) -> list[TableRows]:
            id_blocks = all_ids.split_with_sizes([*chain.from_iterable(ids)])
            row_blocks = all_rows.split_with_sizes([*chain.from_iterable(elements)])
            gathered = []
            first = 0

            for table in tables:
                features = range(first, first + table.features)
                # In rank order.
                indices = [
                    rank * len(columns) + feature
                    for rank in range(len(ids))
                    for feature in features
                ]
                grad = torch.cat([row_blocks[index] for index in indices]).view(-1, table.columns)
                gathered.append(TableRows(torch.cat([id_blocks[index] for index in indices]), grad))
                first += table.features
            return gathered

        return map_awaitable(of_tables, arriving, rows)


def cheaper_as_bags(table: CopiedTable, bytes_of_ids: int, bags: int) -> bool:
    """Whether a table's gradient is sent as bags, from the sizes of all ranks.

    Args:
        table: The table.
        bytes_of_ids: Bytes of ids, lengths and weights.
        bags: Number of pooled rows, each of which has a gradient.

    Example:
        >>> table = CopiedTable(
        ...     rows=100, columns=8, features=1
        ... )  # as sums: 2 * 100 * 8 * 4 = 6400 bytes
        >>> (
        ...     cheaper_as_bags(table, bytes_of_ids=0, bags=200),
        ...     cheaper_as_bags(table, bytes_of_ids=1, bags=200),
        ... )
        (True, False)
    """
    few = bytes_of_ids + bags * table.columns * _FLOAT <= 2 * table.rows * table.columns * _FLOAT
    return few or not table.summable


def features_of(tables: Sequence[CopiedTable], chosen: Sequence[bool]) -> list[int]:
    """The features of the chosen tables."""
    starts = accumulate((table.features for table in tables), initial=0)
    return [
        first + feature
        for table, first, take in zip(tables, starts, chosen, strict=False)
        if take
        for feature in range(table.features)
    ]


def add_over_ranks(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> Awaitable[list[torch.Tensor]]:
    """Issue the all-reduce of gradients of whole tables ``[R, D]``; waiting issues step two."""
    shapes = [gradient.shape for gradient in gradients]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    share, remainder = divmod(flat.numel(), group.size())
    counts = [share + (rank < remainder) for rank in range(group.size())]

    def sums(mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = comm.all_gather(mine, counts, group, SUMS_STAGE).wait()
        by_table = gathered.split_with_sizes([shape.numel() for shape in shapes])
        return [table_sum.view(shape) for table_sum, shape in zip(by_table, shapes, strict=True)]

    return map_awaitable(sums, comm.reduce_scatter(flat, counts, group, SUMS_STAGE))


def _pick(values: torch.Tensor, counts: Sequence[int], chosen: Sequence[int]) -> torch.Tensor:
    """Select what belongs to the chosen features."""
    by_feature = values.split_with_sizes(list(counts))
    return torch.cat([by_feature[feature] for feature in chosen]) if chosen else values[:0]


__all__ = [
    "Agreed",
    "CopiedTable",
    "GlobalBags",
    "GradientExchange",
    "PooledGradients",
    "TableRows",
    "add_over_ranks",
    "cheaper_as_bags",
]
