"""Brings ids of mappings from another plan or an unsharded module to their new ranks.

A stored mapping is cut by rows, as its table is. Under another number of ranks the owner of an id
may be another rank than the one that holds its row. The id then moves there, with its row, the
row's optimizer state and the metadata of the mapping, and is given an open row::

    ids below 4000    rank 0: ids 0 to 1999, rows 0 to 7; rank 1: ids 2000 to 3999, rows 8 to 15
    stored by one     id 2500 has row 3
    loaded by two     rank 0 sends id 2500 and row 3 to rank 1, where it gets row 8

A rank sends 8 bytes for each state of a row's mapping, and 4 for each number of the row and of its
optimizer state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.mc_modules import ShardedManagedCollisionCollection, TableMapping
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.modules.mc_embedding_modules import reset_rows
from tutorec.modules.mch_module import NO_ID

MOVED_IDS_STAGE = "moved ids"
_logger = logging.getLogger("tutorec.distributed")


@torch.no_grad()
def move_ids_to_owners(
    tables: ShardedEmbeddingModule[Any, Any, Any, Any, Any],
    mappings: ShardedManagedCollisionCollection,
    configs: Mapping[str, BaseEmbeddingConfig],
) -> None:
    """Send ids whose row lies on another rank than their owner there, with their row. A collective.

    Where an owner has fewer open rows than ids arrive, the ids that have the smallest numbers in
    the first state of the mapping's policy (counts, or the last access) lose their row, and a
    warning says how many.

    Args:
        tables: The tables.
        mappings: Their mappings.
        configs: Table name -> what it is.
    """
    env = tables.env
    if env.world_size == 1:
        return
    weights = {held.table.name: held.rows for held in tables.local_shards()}
    for mapping in mappings.mappings:
        name = mapping.table.name
        if mapping.whole.row_ids is None or not mapping.table.splits_rows:
            continue
        rows = _TableRows(mapping, weights[name], configs[name], tables.device, env)
        arrived = rows.exchange()
        lost = rows.place(*arrived)
        dropped = sum(
            of_rank[0] for of_rank in comm.all_gather_ints([lost], _group(env), MOVED_IDS_STAGE)
        )
        if dropped and env.rank == 0:
            _logger.warning(
                "table %r: %d ids lose their rows: their owners have no open row left",
                name,
                dropped,
            )


class _TableRows:
    """The rows of one table on this rank: their ids, their state, their values.

    Args:
        mapping: The mapping.
        weights: ``[R, D]``, or none.
        config: The table.
        device: Where they live.
        env: The ranks.
    """

    def __init__(
        self,
        mapping: TableMapping,
        weights: Sequence[torch.Tensor],
        config: BaseEmbeddingConfig,
        device: torch.device,
        env: ShardingEnv,
    ) -> None:
        self._module, self._config, self._env = mapping.held, config, env
        whole = [
            name
            for name in mapping.whole.state_by_row()
            if name not in mapping.whole.once_per_table
        ]
        self._state = (
            {name: torch.empty(0, dtype=torch.int64, device=device) for name in whole}
            if self._module is None
            else {name: each for name, each in self._module.state_by_row().items() if name in whole}
        )
        self._weight = (
            weights[0] if weights else torch.empty(0, mapping.table.columns, device=device)
        )
        self._kept = [
            value
            for optimizer in getattr(self._weight, "_in_backward_optimizers", ())
            for value in optimizer.state.get(self._weight, {}).values()
            if isinstance(value, torch.Tensor) and value.shape[:1] == self._weight.shape[:1]
        ]
        ids = self._ids = self._state[str(mapping.whole.row_ids)]
        self._owners = mapping.owners(ids)
        elsewhere = self._owners != env.rank
        elsewhere[-1:] = True  # ids without a row share the last row of a rank
        self._leaves = (ids != NO_ID) & elsewhere

    def exchange(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Send what leaves to its owners -> received states ``[N, S]``, values ``[N, numbers]``."""
        group, me = _group(self._env), self._env.rank
        rows = self._leaves.nonzero().view(-1)
        rows = rows[self._owners[rows].argsort(stable=True)]
        counts = self._owners[rows].bincount(minlength=self._env.world_size).tolist()
        into = [of_rank[me] for of_rank in comm.all_gather_ints(counts, group, MOVED_IDS_STAGE)]
        states = torch.stack([state[rows] for state in self._state.values()], dim=1)
        values = torch.cat(
            [
                each[rows].reshape(len(rows), prod(each.shape[1:]))
                for each in (self._weight, *self._kept)
            ],
            dim=1,
        )
        arrived = list[torch.Tensor]()
        for sent in (states, values):
            width = sent.shape[1]
            sizes = [count * width for count in counts], [count * width for count in into]
            flat = comm.all_to_all(sent.reshape(-1), *sizes, group, MOVED_IDS_STAGE).wait()
            arrived.append(flat.view(-1, width))
        return arrived[0], arrived[1]

    def place(self, states: torch.Tensor, values: torch.Tensor) -> int:
        """Give what has arrived open rows; returns how many ids there is none for."""
        if self._module is None:
            return 0
        left = self._leaves.nonzero().view(-1)
        for state in self._state.values():
            state[left] = 0
        self._ids[left] = NO_ID
        if left.numel():
            reset_rows(self._config, self._weight, left)
        open_rows = (self._ids[:-1] == NO_ID).nonzero().view(-1)
        first = states[:, min(1, states.shape[1] - 1)]  # the ids come before the policy's own
        ranked = first.argsort(descending=True, stable=True)[: open_rows.numel()]
        taken = open_rows[: ranked.numel()]
        for index, state in enumerate(self._state.values()):
            state[taken] = states[ranked, index]
        targets = (self._weight, *self._kept)
        widths = [prod(target.shape[1:]) for target in targets]
        for target, own in zip(targets, values[ranked].split(widths, dim=1), strict=True):
            target[taken] = own.view(-1, *target.shape[1:])
        self._module.load_state_by_row({**self._module.state_by_row(), **self._state})
        return len(states) - len(taken)


def _group(env: ShardingEnv) -> Any:
    return env.group_for("moving ids to their owners")
