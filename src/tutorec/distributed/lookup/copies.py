"""The copies of tables that a rank holds, and what is done to them with gradients that all ranks know.

What is added is added in the same order on every rank, so that copies stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from tutorec._kernels.optimizer_spec import UpdateStep
from tutorec._kernels.table_steps import TouchedRows, gradient_of_table, step_rows, step_tables, touched_rows
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.weighted_step import PooledBatch
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

    def take_bags(self, batch: PooledBatch, grad: torch.Tensor, steps: Sequence[UpdateStep]) -> dict[int, torch.Tensor]:
        """Move rows by the batch of all ranks; of a dense group give the gradients instead.

        Args:
            batch: Its tables are numbered as in the group.
            grad: Of the pooled rows ``[B, sum of D]``.
            steps: Of each table, as numbered in the group; none of a dense group.

        Returns:
            Table, as numbered in the lookup -> ``[R, D]``.
        """
        rows = self.rows()
        if steps:
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
            ids, grad, place = found[table].ids, found[table].grad, table - self.tables.start
            if not steps:
                gradients[table] = gradient_of_table(TouchedRows(place, ids, None, None, grad), rows[place].shape[0])
                continue
            each = torch.arange(ids.numel() + 1, dtype=ids.dtype, device=ids.device)
            batch = PooledBatch(ids, each, None, False, (0,))
            step_tables([rows[place]], [states[place]], batch, grad, [steps[place]])
        return gradients

    def take_sums(self, sums: Mapping[int, torch.Tensor], steps: Sequence[UpdateStep]) -> dict[int, torch.Tensor]:
        """The same with gradients of whole tables: table, as numbered in the lookup -> ``[R, D]``."""
        rows, states = self.rows(), self.operator.table_states()
        own = {table: gradient for table, gradient in sums.items() if table in self.tables}
        if not steps:
            return own
        for table, gradient in own.items():
            place = table - self.tables.start
            # A row without gradient keeps its place and its state.
            ids = gradient.any(dim=1).nonzero().view(-1)
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
