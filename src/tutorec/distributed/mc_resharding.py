"""Move the ids of mappings that come from another plan or an unsharded module to their owners.

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
    """Send ids whose row is on another rank to their owner, with their row. A collective.

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

    weights = {shard.table.name: shard.rows for shard in tables.local_shards()}
    for mapping in mappings.mappings:
        name = mapping.table.name
        if mapping.full.row_ids is None or not mapping.table.splits_rows:
            continue

        rows = _TableRows(mapping, weights[name], configs[name], tables.device, env)
        received = rows.exchange()
        lost = rows.assign(*received)
        lost_per_rank = comm.all_gather_ints([lost], _group(env), MOVED_IDS_STAGE)
        dropped = sum(counts[0] for counts in lost_per_rank)
        if dropped and env.rank == 0:
            _logger.warning(
                "table %r: %d ids lose their rows: their owners have no open row left",
                name,
                dropped,
            )


class _TableRows:
    """The rows of one table on this rank: their ids, states and values.

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
        self._module = mapping.local
        self._config = config
        self._env = env
        self._state: dict[str, torch.Tensor] = {}
        state = (self._module or mapping.full).state_by_row()
        for name, value in state.items():
            if name not in mapping.full.once_per_table:
                no_rows = torch.empty(0, dtype=torch.int64, device=device)
                self._state[name] = no_rows if self._module is None else value

        no_weight = torch.empty(0, mapping.table.columns, device=device)
        self._weight = weights[0] if weights else no_weight

        self._optimizer_states: list[torch.Tensor] = []
        for optimizer in getattr(self._weight, "_in_backward_optimizers", ()):
            for value in optimizer.state.get(self._weight, {}).values():
                if isinstance(value, torch.Tensor) and value.shape[:1] == self._weight.shape[:1]:
                    self._optimizer_states.append(value)

        self._ids = self._state[str(mapping.full.row_ids)]
        self._owners = mapping.owners(self._ids)
        has_other_owner = self._owners != env.rank
        has_other_owner[-1:] = True  # ids without a row share the last row of a rank
        self._leaves = (self._ids != NO_ID) & has_other_owner

    def exchange(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the leaving ids to their owners -> states ``[N, S]``, values ``[N, numbers]``."""
        group = _group(self._env)
        rows = self._leaves.nonzero().view(-1)
        rows = rows[self._owners[rows].argsort(stable=True)]
        sent_counts = self._owners[rows].bincount(minlength=self._env.world_size).tolist()
        counts_per_rank = comm.all_gather_ints(sent_counts, group, MOVED_IDS_STAGE)
        received_counts = [counts[self._env.rank] for counts in counts_per_rank]

        states = torch.stack([state[rows] for state in self._state.values()], dim=1)
        values = torch.cat(
            [
                tensor[rows].reshape(len(rows), prod(tensor.shape[1:]))
                for tensor in (self._weight, *self._optimizer_states)
            ],
            dim=1,
        )

        received: list[torch.Tensor] = []
        for matrix in (states, values):
            width = matrix.shape[1]
            flat = comm.all_to_all(
                matrix.reshape(-1),
                [count * width for count in sent_counts],
                [count * width for count in received_counts],
                group,
                MOVED_IDS_STAGE,
            ).wait()
            received.append(flat.view(-1, width))

        return received[0], received[1]

    def assign(self, states: torch.Tensor, values: torch.Tensor) -> int:
        """Give received ids open rows; returns the number of ids that got none."""
        if self._module is None:
            return 0

        left_rows = self._leaves.nonzero().view(-1)
        for state in self._state.values():
            state[left_rows] = 0

        self._ids[left_rows] = NO_ID
        if left_rows.numel():
            reset_rows(self._config, self._weight, left_rows)

        open_rows = (self._ids[:-1] == NO_ID).nonzero().view(-1)
        priority = states[:, min(1, states.shape[1] - 1)]  # after the ids: the policy's first state
        ranked = priority.argsort(descending=True, stable=True)[: open_rows.numel()]
        rows = open_rows[: ranked.numel()]
        for index, state in enumerate(self._state.values()):
            state[rows] = states[ranked, index]

        tensors = (self._weight, *self._optimizer_states)
        widths = [prod(tensor.shape[1:]) for tensor in tensors]
        received = values[ranked].split(widths, dim=1)
        for tensor, tensor_values in zip(tensors, received, strict=True):
            tensor[rows] = tensor_values.view(-1, *tensor.shape[1:])

        self._module.load_state_by_row({**self._module.state_by_row(), **self._state})
        return len(states) - len(rows)


def _group(env: ShardingEnv) -> Any:
    return env.group_for("moving ids to their owners")
