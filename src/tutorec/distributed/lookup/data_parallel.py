"""Lookup of replicated tables, which backward updates on every rank with all ranks' samples.

::

    forward    local bags -> local pooled rows                         (no communication)
    backward   local bags and the gradient of their rows -> those of all ranks -> lookup's backward

In backward the lookup runs once more, on the batch of all ranks, and is differentiated there. A
fused kernel applies the update of one table for all samples; a dense kernel returns the mean
gradient. Every rank computes the same from the same numbers in the same order, so replicas stay
equal bit for bit. If ranks have exchanged the gradient of a whole table (see `sparse_gradients`),
each of its rows is a bag in that batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.specs import kernel_pooling
from tutorec._kernels.tbe import TableBatch
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import gradient_divisor
from tutorec.distributed.collectives.kjt import ArrivedIds
from tutorec.distributed.collectives.sparse_gradients import (
    CopiedTable,
    GradientExchange,
    PooledGradients,
    add_over_ranks,
    features_of,
)
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.initial_rows import InitialRows
from tutorec.distributed.core.tables import TableGroup
from tutorec.distributed.lookup.grouped import (
    EmbeddingLookup,
    GroupedLookup,
    GroupedPooledEmbeddingsLookup,
)
from tutorec.distributed.lookup.rows import GroupedEmbeddingsLookup
from tutorec.distributed.lookup.variable_batch import flatten_by_rank, pad_bags
from tutorec.optim.fused import EmbeddingFusedOptimizer
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class FeatureBags(NamedTuple):
    """The bags of one feature.

    Args:
        lengths: ``[B]``.
        ids: ``[N]``.
        weights: ``[N]`` or None.
        gradient: Gradient of the pooled rows ``[B, D]``.
    """

    lengths: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None
    gradient: torch.Tensor


class ReplicatedLookup(EmbeddingLookup):
    """Base of lookups in replicated tables.

    Construction and every backward are collective; construction gives every replica the rows of
    rank 0.

    Args:
        groups: The tables.
        initial_rows: Writes the initial rows of each table.
        device: Device of the rows.
        env: The ranks.
        ids_dtype: Dtype in which ids are sent.
    """

    _lookup_of: Callable[..., GroupedLookup]
    """Builds the lookup in this rank's replicas, without exchange."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        initial_rows: InitialRows,
        device: torch.device,
        env: ShardingEnv,
        ids_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._lookup = lookup = self._lookup_of(groups, initial_rows, device)
        self._env = env
        self._ids_dtype = ids_dtype
        self._columns = [columns for group in groups for columns in group.columns]
        self._operators = [module for module in lookup.modules() if isinstance(module, TableBatch)]

        tables = [
            (table, operator)
            for group, operator in zip(groups, self._operators, strict=True)
            for table in group.tables
        ]
        self._operator_of = [operator for _, operator in tables]
        self._tables = [
            CopiedTable(
                table.rows,
                table.columns,
                len(table.features),
                # A table with elementwise clipping cannot be summed first: clipping applies to the
                # terms.
                summable=operator.optimizer is None or operator.optimizer.max_gradient is None,
            )
            for table, operator in tables
        ]

        broadcast_rows(lookup, env)

    def forward(self, batch: Any) -> torch.Tensor:
        """Look a batch up in the local replicas."""
        if not torch.is_grad_enabled():
            return self._lookup(batch)

        self.process_group()
        # without gradients a lookup does not notice a frozen parameter
        for optimizer in self.fused_optimizers():
            optimizer.check_parameters()

        # Recorded even if no gradient is needed here: the other ranks expect this rank to take
        # part.
        anchor = torch.empty(0, device=self._tensors(batch)[0].device, requires_grad=True)
        rows: Any = _LocalLookup.apply(anchor, self, batch, *self.dense_parameters())
        for optimizer in self.fused_optimizers():
            optimizer.passes.watch(rows)
        return cast(torch.Tensor, rows)

    @abstractmethod
    def _tensors(self, batch: Any) -> list[torch.Tensor]:
        """The tensors of a batch."""

    @abstractmethod
    def _gather(self, batch: Any, gradient: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The batches and gradients of all ranks, from the local ones."""

    def gradients(
        self, batch: Any, gradient: torch.Tensor, rates: Sequence[float]
    ) -> list[torch.Tensor | None]:
        """Update the fused tables with the samples of all ranks; a collective call.

        Args:
            batch: The local batch.
            gradient: Gradient of its output.
            rates: Learning rate of each fused optimizer at the time of the forward.

        Returns:
            The gradient ``[R, D]`` of each dense table, the mean over ranks.
        """
        # Divided once here, so that the sum over ranks is the mean.
        gathered, gradient = self._gather(batch, gradient / gradient_divisor(self._env.world_size))
        dense = self.dense_parameters()
        leaves = [
            *dense,
            *(operator.autograd_leaf() for operator in self._operators if operator.optimizer),
        ]
        trainable = [leaf for leaf in leaves if leaf.requires_grad]
        if not trainable:
            return [None] * len(dense)

        with torch.enable_grad(), _learning_rates(self.fused_optimizers(), rates):
            rows = self._lookup(gathered)
        grads = iter(torch.autograd.grad(rows, trainable, gradient, allow_unused=True))
        return [next(grads) if parameter.requires_grad else None for parameter in dense]

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, its rows as a parameter), group after group."""
        return self._lookup.named_weights()

    def fused_optimizers(self) -> list[EmbeddingFusedOptimizer]:
        """One optimizer per group that is updated during backward."""
        return self._lookup.fused_optimizers()

    def rebind(self) -> None:
        """Update parameters after the operators' memory has moved."""
        self._lookup.rebind()

    def process_group(self) -> dist.ProcessGroup:
        """The ranks.

        Raises:
            ValueError: There is no process group to keep replicas equal.
        """
        group = self._env.group_for("training data_parallel tables")
        assert group is not None, "in a world of 1 there are no replicas"
        return group

    def dense_parameters(self) -> list[nn.Parameter]:
        """The weights of tables that get a gradient, table after table."""
        weights = [rows for operator in self._operators for rows in operator.table_weights()]
        return [rows for rows in weights if isinstance(rows, nn.Parameter)]

    def _marked(self, table: int) -> bool:
        """Whether a table's summed gradient has one more column, which marks rows in the batch."""
        rule = self._operator_of[table].optimizer
        return rule is not None and rule.moves_without_gradient

    def _table_gradient(
        self, table: int, ids: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        """A table's gradient ``[R, D]``, from each id's ``[N, D]``; ``[R, D + 1]`` with marks."""
        size = self._tables[table]
        summed = gradient.new_zeros(size.rows, size.columns).index_add_(0, ids, gradient)

        if not self._marked(table):
            return summed
        marks = summed.new_zeros(size.rows, 1).index_fill_(0, ids.long(), 1.0)
        return torch.cat([summed, marks], dim=1)

    def _touched(self, table: int, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that a summed gradient updates, and their gradients."""
        moved = gradient[:, -1] if self._marked(table) else gradient.any(dim=1)
        rows = moved.nonzero().view(-1)
        columns = self._tables[table].columns
        return rows.to(self._ids_dtype), gradient[:, :columns].index_select(0, rows)


class ReplicatedPooledEmbeddingsLookup(ReplicatedLookup):
    """Local samples, all features of the replicated tables -> their pooled rows."""

    _lookup_of = GroupedPooledEmbeddingsLookup

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Local slots, B samples -> ``[B, D]``; flat, slot by slot, for a variable batch."""
        if batch.variable_stride_per_key() and torch.is_grad_enabled():
            return flatten_by_rank(super().forward(pad_bags(batch)), batch, self._columns)
        return super().forward(batch)

    def _tensors(self, batch: KeyedJaggedTensor) -> list[torch.Tensor]:
        weights = batch.weights_or_none()
        return [batch.values(), batch.lengths(), *([] if weights is None else [weights])]

    def _gather(
        self, batch: KeyedJaggedTensor, gradient: torch.Tensor
    ) -> tuple[KeyedJaggedTensor, torch.Tensor]:
        weights = batch.weights_or_none()
        counts = batch.length_per_key()
        lengths = batch.lengths().view(len(self._columns), -1)
        exchange = PooledGradients(
            self.process_group(), self._tables, self._ids_dtype, weights is not None
        )
        agreed = exchange.agree(lengths.shape[1], counts)

        arriving = summed = None
        if any(agreed.as_bags):
            arriving = exchange.gather(agreed, lengths, batch.values(), weights, gradient)

        in_sum = [table for table, as_bags in enumerate(agreed.as_bags) if not as_bags]
        if in_sum:
            local = self._by_feature(
                lengths, batch.values(), weights, gradient, counts, self._columns
            )
            summed = add_over_ranks(
                [self._gradient_of_bags(table, local) for table in in_sum], self.process_group()
            )

        features: list[FeatureBags] = []
        if arriving is not None:
            chosen = features_of(self._tables, agreed.as_bags)
            gathered = arriving.wait()
            if not in_sum:
                return self._batch(
                    batch.keys(), gathered.lengths, gathered.values, gathered.weights
                ), gathered.grad

            totals = [sum(rank_ids[feature] for rank_ids in agreed.ids) for feature in chosen]
            columns = [self._columns[feature] for feature in chosen]
            features = self._by_feature(
                gathered.lengths, gathered.values, gathered.weights, gathered.grad, totals, columns
            )

        assert summed is not None, "a table is sent as bags or as a sum"
        sums = iter(summed.wait())
        bags = iter(features)
        merged: list[FeatureBags] = []
        for table, as_bags in enumerate(agreed.as_bags):
            count = self._tables[table].features
            merged += (
                [next(bags) for _ in range(count)]
                if as_bags
                else self._bags_of_sum(table, next(sums), weights)
            )
        return self._padded(batch.keys(), merged)

    def _gradient_of_bags(self, table: int, bags: Sequence[FeatureBags]) -> torch.Tensor:
        """This rank's term of the sum over ranks."""
        first = sum(earlier.features for earlier in self._tables[:table])
        spec = self._operator_of[table].spec

        ids = []
        gradients = []
        for lengths, values, weights, gradient in bags[
            first : first + self._tables[table].features
        ]:
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            factors = bag_weights(spec.pooling, offsets, weights, values.numel())
            # The kernel's backward divides by the bag's length; here no kernel runs.
            if kernel_pooling(spec.pooling, spec.weighted) == "mean":
                gradient = gradient / lengths.clamp(min=1).unsqueeze(1)
            terms = gradient.repeat_interleave(lengths, dim=0, output_size=values.numel())
            ids.append(values)
            gradients.append(terms if factors is None else terms * factors.unsqueeze(1))

        return self._table_gradient(table, torch.cat(ids), torch.cat(gradients))

    def _bags_of_sum(
        self, table: int, gradient: torch.Tensor, weights: torch.Tensor | None
    ) -> list[FeatureBags]:
        """Rows of a summed gradient as bags of the table's first feature; others get none."""
        rows, row_gradients = self._touched(table, gradient)
        ones = None if weights is None else torch.ones_like(rows, dtype=torch.float32)
        bags = FeatureBags(torch.ones_like(rows), rows, ones, row_gradients)
        none = FeatureBags(
            bags.lengths[:0], rows[:0], None if ones is None else ones[:0], row_gradients[:0]
        )
        return [bags] + [none] * (self._tables[table].features - 1)

    @staticmethod
    def _by_feature(
        lengths: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        gradient: torch.Tensor,
        counts: list[int],
        columns: list[int],
    ) -> list[FeatureBags]:
        """Split lengths ``[F, B]``, ids, weights ``[N]`` and gradients ``[B, D]`` by feature."""
        id_weights = [None] * len(counts) if weights is None else weights.split_with_sizes(counts)
        blocks = gradient.split_with_sizes(columns, dim=1)
        return [
            FeatureBags(*tensors)
            for tensors in zip(
                lengths, values.split_with_sizes(counts), id_weights, blocks, strict=True
            )
        ]

    def _padded(
        self, keys: list[str], bags: Sequence[FeatureBags]
    ) -> tuple[KeyedJaggedTensor, torch.Tensor]:
        """The batch and its gradient; empty bags pad each feature to the same number of bags."""
        longest = max(block.lengths.shape[0] for block in bags)
        lengths = [F.pad(block.lengths, (0, longest - block.lengths.shape[0])) for block in bags]
        gradients = [
            F.pad(block.gradient, (0, 0, 0, longest - block.gradient.shape[0])) for block in bags
        ]

        weights = [block.weights for block in bags if block.weights is not None]
        ids = torch.cat([block.ids for block in bags])
        batch = self._batch(
            keys, torch.stack(lengths), ids, torch.cat(weights) if weights else None
        )
        return batch, torch.cat(gradients, dim=1)

    @staticmethod
    def _batch(
        keys: list[str], lengths: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor._from_parts(
            keys, ids, weights, lengths.reshape(-1), None, lengths.shape[1], None
        )


class ReplicatedEmbeddingsLookup(ReplicatedLookup):
    """Local ids, all features of the replicated tables -> their rows."""

    _lookup_of = staticmethod(partial(GroupedEmbeddingsLookup, ranks=1))

    def _tensors(self, batch: ArrivedIds) -> list[torch.Tensor]:
        return [batch.values]

    def _gather(self, batch: ArrivedIds, gradient: torch.Tensor) -> tuple[ArrivedIds, torch.Tensor]:
        counts = batch.counts[0]
        exchange = GradientExchange(self.process_group(), self._tables, self._ids_dtype)
        agreed = exchange.agree(counts)

        in_sum = [table for table, as_bags in enumerate(agreed.as_bags) if not as_bags]
        arriving = exchange.gather(agreed, batch.values, gradient) if any(agreed.as_bags) else None
        summed = (
            add_over_ranks(
                self._gradients(batch.values, counts, gradient, in_sum), self.process_group()
            )
            if in_sum
            else None
        )

        bags = iter(arriving.wait() if arriving else ())
        sums = iter(summed.wait() if summed else ())

        totals: list[int] = []
        ids = []
        rows = []
        for table, (size, as_bags) in enumerate(zip(self._tables, agreed.as_bags, strict=True)):
            table_rows = tuple(next(bags)) if as_bags else self._touched(table, next(sums))
            ids.append(table_rows[0])
            rows.append(table_rows[1].reshape(-1))
            # All ids are assigned to the table's first feature.
            totals += [ids[-1].numel()] + [0] * (size.features - 1)
        return ArrivedIds(torch.cat(ids), [totals]), torch.cat(rows)

    def _gradients(
        self, values: torch.Tensor, counts: list[int], gradient: torch.Tensor, tables: list[int]
    ) -> list[torch.Tensor]:
        """This rank's terms of the sums over ranks."""
        ends = [*accumulate((table.features for table in self._tables), initial=0)]
        table_counts = [sum(counts[first:last]) for first, last in pairwise(ends)]
        table_elements = [
            count * size.columns for count, size in zip(table_counts, self._tables, strict=True)
        ]

        ids = values.split_with_sizes(table_counts)
        rows = gradient.split_with_sizes(table_elements)
        return [
            self._table_gradient(
                table, ids[table], rows[table].view(-1, self._tables[table].columns)
            )
            for table in tables
        ]


class _LocalLookup(torch.autograd.Function):
    """Lookup of the local batch; backward updates with the batch of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, lookup: ReplicatedLookup, batch: Any, *dense: nn.Parameter
    ) -> torch.Tensor:
        ctx.lookup = lookup
        ctx.batch = batch

        # Autograd refuses backward if one of them has been written to.
        ctx.save_for_backward(*lookup._tensors(batch))
        rows = lookup._lookup(batch)
        ctx.rates = [optimizer.operator.learning_rate for optimizer in lookup.fused_optimizers()]
        return rows

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, None, *ctx.lookup.gradients(ctx.batch, gradients[0], ctx.rates)


@contextmanager
def _learning_rates(
    optimizers: Sequence[EmbeddingFusedOptimizer], rates: Sequence[float]
) -> Iterator[None]:
    """Set other learning rates temporarily: an update uses the rate at its forward."""
    current_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    try:
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
        yield
    finally:
        for optimizer, rate in zip(optimizers, current_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate


@torch.no_grad()
def broadcast_rows(lookup: EmbeddingLookup, env: ShardingEnv) -> None:
    """Copy rank 0's rows to every replica: a collective call; nothing without a process group."""
    group = env.process_group
    if group is None or group.size() == 1:
        return
    for rows in (
        parameter.detach() for _, parameter in lookup.named_weights() if parameter.numel()
    ):
        sent = rows.contiguous()
        comm.broadcast(sent, 0, group, "initial rows")
        if not rows.is_contiguous():
            rows.copy_(sent)


__all__ = ["ReplicatedEmbeddingsLookup", "ReplicatedLookup", "ReplicatedPooledEmbeddingsLookup"]
