"""The copies of tables that a rank holds, and what is done to them with gradients that all ranks know.

What is added is added in the same order on every rank, so that copies stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tutorec._kernels.gradient_listener import report_batch, report_rows
from tutorec._kernels.optimizer_spec import UpdateStep
from tutorec._kernels.table_steps import TouchedRows, gradient_of_table, step_rows, step_tables, touched_rows
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec.distributed import comm
from tutorec.distributed.collectives.sparse_gradients import CopiedTable, TableRows
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.lookup.base import EmbeddingLookup
from tutorec.distributed.lookup.grouped import GroupedLookup
from tutorec.optim.fused import EmbeddingFusedOptimizer

COPIES_STAGE = "initial rows"


@dataclass(frozen=True)
class CopiedGroup:
    """The tables of one operator.

    Args:
        operator: It holds the rows.
        features: Where its features stand among those of the lookup.
        tables: Where its tables stand among those of the lookup.
        feature_tables: For each of its features which of its tables that reads.
    """

    operator: TableBatch
    features: range
    tables: range
    feature_tables: tuple[int, ...]

    def rows(self) -> list[torch.Tensor]:
        """``[R, D]`` of each table, live."""
        return [rows.detach() for rows in self.operator.table_weights()]

    @property
    def marked(self) -> bool:
        """Whether gradients of whole tables have one column more, which says which rows are in a batch."""
        return self.operator.optimizer is not None and self.operator.optimizer.moves_without_gradient

    def limited(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of pooled rows as the optimizer wants it."""
        return grad if self.operator.optimizer is None else self.operator.optimizer.limited(grad)

    def take_bags(self, batch: PooledBatch, grad: torch.Tensor, steps: Sequence[UpdateStep]) -> dict[int, torch.Tensor]:
        """Move rows by the batch of all ranks; of a dense group give the gradients instead.

        Args:
            batch: Its tables are numbered as in the group.
            grad: Of the pooled rows ``[B, sum of D]``, limited.
            steps: Of each table, as numbered in the group; none of a dense group.

        Returns:
            Table, as numbered in the lookup -> ``[R, D]``.
        """
        rows = self.rows()
        if steps:
            if self.operator.gradient_listener is not None:
                columns, counts = [own.shape[1] for own in rows], [own.shape[0] for own in rows]
                report_batch(self.operator.gradient_listener, batch, grad, columns, counts)
            step_tables(rows, self.operator.table_states(), batch, grad, steps)
            return {}
        found = {self.tables[table]: torch.zeros_like(rows[table]) for table in set(batch.feature_tables)}
        for touched in touched_rows(batch, grad, [own.shape[1] for own in rows]):
            found[self.tables[touched.table]] = gradient_of_table(touched, rows[touched.table].shape[0])
        return found

    def take_rows(self, found: Mapping[int, TableRows], steps: Sequence[UpdateStep]) -> dict[int, torch.Tensor]:
        """The same with rows that were looked up one by one: table, as numbered in the lookup -> ``[R, D]``."""
        rows, states = self.rows(), self.operator.table_states()
        gradients: dict[int, torch.Tensor] = {}
        for table in set(found).intersection(self.tables):
            ids, grad, place = found[table].ids, self.limited(found[table].grad), table - self.tables.start
            if not steps:
                gradients[table] = gradient_of_table(TouchedRows(place, ids, None, None, grad), rows[place].shape[0])
                continue
            if self.operator.gradient_listener is not None:
                touched = TouchedRows(place, ids, None, None, grad)
                report_rows(self.operator.gradient_listener, touched, rows[place].shape[0])
            each = torch.arange(ids.numel() + 1, dtype=ids.dtype, device=ids.device)
            batch = PooledBatch(ids, each, None, False, (0,))
            step_tables([rows[place]], [states[place]], batch, grad, [steps[place]])
        return gradients

    def take_sums(self, sums: Mapping[int, torch.Tensor], steps: Sequence[UpdateStep]) -> dict[int, torch.Tensor]:
        """The same with gradients of whole tables: table, as numbered in the lookup -> ``[R, D]``, or marked."""
        rows, states = self.rows(), self.operator.table_states()
        own = {table: gradient for table, gradient in sums.items() if table in self.tables}
        if not steps:
            return own
        for table, gradient in own.items():
            place = table - self.tables.start
            # A row without gradient keeps its place and its state, unless the rule moves it on and it is marked.
            ids = (gradient[:, -1] if self.marked else gradient.any(dim=1)).nonzero().view(-1)
            gradient = gradient[:, : rows[place].shape[1]]
            if self.operator.gradient_listener is not None:
                self.operator.gradient_listener(place, ids, gradient.index_select(0, ids))
            step_rows(rows[place], states[place], ids, gradient.index_select(0, ids), steps[place])
        return {}


class ReplicatedLookup(EmbeddingLookup):
    """A lookup in tables that every rank has.

    To build one is a collective: every copy becomes rank 0's. Every backward is one, too.

    Args:
        lookup: In this rank's copies, without an exchange.
        groups: The tables.
        env: The ranks.
        ids_dtype: What ids travel as.
    """

    def __init__(
        self, lookup: GroupedLookup, groups: Sequence[TableGroup], env: ShardingEnv, ids_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._lookup = lookup
        self._env, self._ids_dtype = env, ids_dtype
        shards = [shard for group in groups for shard in group.shards]
        self._tables = [
            CopiedTable(shard.table.rows, shard.table.columns, len(shard.table.features)) for shard in shards
        ]
        self._groups: list[CopiedGroup] = []
        operators = [part for part in lookup.modules() if isinstance(part, TableBatch)]
        feature = table = 0
        for group, operator in zip(groups, operators, strict=True):
            features, tables = range(feature, feature + len(group.features)), range(table, table + len(group.shards))
            self._groups.append(CopiedGroup(operator, features, tables, group.spec().feature_tables))
            feature, table = features.stop, tables.stop
        copy_from_first_rank(lookup, env)

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(``table.weight``, its rows as a parameter), group after group."""
        return self._lookup.named_weights()

    def fused_optimizers(self) -> list[EmbeddingFusedOptimizer]:
        """One for each group that is updated during backward."""
        return self._lookup.fused_optimizers()

    def rebind(self) -> None:
        """Point parameters at the operators' memory again, after it has moved."""
        self._lookup.rebind()

    def check_recorded(self) -> None:
        """Look whether a batch may be recorded: without gradients torch lets a lookup see no frozen parameter.

        Raises:
            ValueError: There is no process group, or a fused copy may not move.
        """
        self.process_group()
        for optimizer in self.fused_optimizers():
            optimizer.check_parameters()

    def process_group(self) -> dist.ProcessGroup:
        """The ranks.

        Raises:
            ValueError: There is no process group, so that copies cannot be kept alike.
        """
        group = self._env.group_for("training data_parallel tables")
        assert group is not None, "in a world of 1 there are no copies"
        return group

    def next_steps(self) -> list[list[UpdateStep]]:
        """Of each group and table what the update of a batch looked up now is to be; the batch is counted."""
        return [group.operator.next_steps() for group in self._groups]

    def table_gradient(self, table: int, touched: TouchedRows | None, device: torch.device) -> torch.Tensor:
        """What this rank adds to the sum over ranks: the gradient ``[R, D]`` of a table, or ``[R, D + 1]`` with marks.

        Args:
            table: As numbered in the lookup.
            touched: What the batch has of it, limited; None for nothing.
            device: Where it is to be.
        """
        size, marked = self._tables[table], next(group.marked for group in self._groups if table in group.tables)
        if touched is None:
            return torch.zeros(size.rows, size.columns + marked, dtype=torch.float32, device=device)
        gradient = gradient_of_table(touched, size.rows)
        if not marked:
            return gradient
        marks = gradient.new_zeros(size.rows, 1).index_fill_(0, touched.ids.long(), 1.0)
        return torch.cat([gradient, marks], dim=1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """The rows of tables that get a gradient, table after table."""
        return [
            rows for group in self._groups for rows in group.operator.table_weights() if isinstance(rows, nn.Parameter)
        ]


@torch.no_grad()
def copy_from_first_rank(lookup: EmbeddingLookup, env: ShardingEnv) -> None:
    """Give every copy rank 0's rows; every rank calls it. Where there is no process group nothing is done."""
    group = env.process_group
    if group is None or group.size() == 1:
        return
    for rows in (parameter.detach() for _, parameter in lookup.named_weights() if parameter.numel()):
        sent = rows.contiguous()
        comm.broadcast(sent, 0, group, COPIES_STAGE)
        if not rows.is_contiguous():
            rows.copy_(sent)


__all__ = ["COPIES_STAGE", "CopiedGroup", "ReplicatedLookup"]
