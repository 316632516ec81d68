"""The copies of tables that a rank holds, and what is done to them with gradients that all ranks know.

What is added is added in the same order on every rank, so that copies stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tutorec._kernels.table_steps import gradient_of_table, step_rows, step_tables, touched_rows
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.weighted_step import PooledBatch
from tutorec.distributed import comm
from tutorec.distributed.collectives.sparse_gradients import CopiedTable
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.grouping import TableGroup
from tutorec.distributed.lookup.base import EmbeddingLookup

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

    def states(self) -> list[torch.Tensor]:
        """``[R]`` of each table, live; none where the optimizer keeps nothing."""
        return [state for of_table in self.operator.optimizer_state() for state in of_table.values()]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Those that get a gradient; none where rows are updated during backward."""
        return [rows for rows in self.operator.table_weights() if isinstance(rows, nn.Parameter)]

    def take_bags(self, batch: PooledBatch, grad: torch.Tensor, rate: float) -> dict[int, torch.Tensor]:
        """Move rows by the batch of all ranks; of a dense group give the gradients instead.

        Args:
            batch: Its tables are numbered as in the group.
            grad: Of the pooled rows ``[B, sum of D]``.
            rate: Learning rate.

        Returns:
            Table, as numbered in the lookup -> ``[R, D]``.
        """
        rule, rows = self.operator.optimizer, self.rows()
        if rule is not None:
            step_tables(rows, self.states(), batch, grad, rule, rate)
            return {}
        found = {self.tables[table]: torch.zeros_like(rows[table]) for table in set(batch.feature_tables)}
        for touched in touched_rows(batch, grad, [own.shape[1] for own in rows]):
            found[self.tables[touched.table]] = gradient_of_table(touched, rows[touched.table].shape[0])
        return found

    def take_sums(self, sums: Mapping[int, torch.Tensor], rate: float) -> dict[int, torch.Tensor]:
        """The same with gradients of whole tables: table, as numbered in the lookup -> ``[R, D]``."""
        rule, rows, states = self.operator.optimizer, self.rows(), self.states()
        own = {table: gradient for table, gradient in sums.items() if table in self.tables}
        if rule is None:
            return own
        for table, gradient in own.items():
            place = table - self.tables.start
            # A row without gradient keeps its place and its state.
            ids = gradient.any(dim=1).nonzero().view(-1)
            state = states[place] if states else None
            step_rows(rows[place], state, ids, gradient.index_select(0, ids), rule, rate)
        return {}


def copied_groups(groups: Sequence[TableGroup], operators: Sequence[TableBatch]) -> list[CopiedGroup]:
    """The groups of a lookup, one operator each."""
    found: list[CopiedGroup] = []
    for group, operator in zip(groups, operators, strict=True):
        feature, table = (found[-1].features.stop, found[-1].tables.stop) if found else (0, 0)
        features, tables = range(feature, feature + len(group.features)), range(table, table + len(group.shards))
        found.append(CopiedGroup(operator, features, tables, group.spec().feature_tables))
    return found


def operators_of(lookup: nn.Module) -> list[TableBatch]:
    """The operators of a lookup, group after group."""
    return [part for part in lookup.modules() if isinstance(part, TableBatch)]


def copied_tables(groups: Sequence[TableGroup]) -> list[CopiedTable]:
    """The tables of a lookup, as the exchange of gradients wants them."""
    shards = [shard for group in groups for shard in group.shards]
    return [CopiedTable(shard.table.rows, shard.table.columns, len(shard.table.features)) for shard in shards]


@torch.no_grad()
def copy_from_first_rank(lookup: EmbeddingLookup, env: ShardingEnv) -> None:
    """Give every copy rank 0's rows; every rank calls it. Where there is no process group nothing is done."""
    group = env.process_group
    if group is None or group.size() == 1:
        return
    for rows in _rows_of(lookup):
        sent = rows.contiguous()
        comm.broadcast(sent, 0, group, COPIES_STAGE)
        if not rows.is_contiguous():
            rows.copy_(sent)


def _rows_of(lookup: EmbeddingLookup) -> Iterator[torch.Tensor]:
    for _, parameter in lookup.named_weights():
        if parameter.numel():
            yield parameter.detach()


__all__ = ["CopiedGroup", "copied_groups", "copied_tables", "copy_from_first_rank", "operators_of"]
