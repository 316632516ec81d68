"""Gathering of a sharded model's state on one rank, as the state dict of the unsharded model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tutorec.distributed import comm
from tutorec.distributed.checkpoint.contents import collect_contents, process_group
from tutorec.distributed.checkpoint.entries import BLOCK_BYTES, Entry, Form
from tutorec.distributed.plan.geometry import TableShard
from tutorec.distributed.plan.plan import ShardingType

_STAGE = "full state dict"


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather every tensor of a model to the CPU of rank 0.

    The result fits ``load_state_dict`` of the unsharded model. A collective. Shards are sent in
    blocks of at most 4 MiB, so the other ranks need little extra memory; rank 0 needs memory for
    the whole state.

    Returns:
        The state on rank 0; ``{}`` on the other ranks.

    Raises:
        ValueError: A table has managed collisions. Which row an id has depends on the ranks, and
            ``load_checkpoint`` converts that.

    Example:
        >>> sorted(full_state_dict(torch.nn.Linear(2, 1)))
        ['bias', 'weight']
    """
    contents = collect_contents(model)
    group = process_group(model)
    if group is not None and group.size() == 1:
        group = None
    is_first = group is None or group.rank() == 0

    state: dict[str, torch.Tensor] = {}
    for name, entry in contents.model.items():
        if entry.form is Form.ROWS and entry.table is not None:
            raise ValueError(
                f"full_state_dict: {name!r} depends on the ranks that hold table "
                f"{entry.table.name!r}: call save_checkpoint(path, model) here, and "
                "load_checkpoint(path, unsharded, optimizer_state=False) on the unsharded model"
            )

        if entry.form is Form.TABLE:
            table = _gather_table(entry, group)
            if table is not None:
                state[name] = table
        elif is_first:
            state[name] = entry.shards[0].tensor.detach().cpu().clone()
    return state


def _gather_table(entry: Entry, group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """The whole table on rank 0, None on other ranks."""
    table = entry.table
    assert table is not None, f"{entry.name} is not a table"
    rank = 0 if group is None else group.rank()
    result = torch.empty(table.rows, table.columns, dtype=table.dtype) if rank == 0 else None
    local = {shard.bounds: shard.tensor for shard in entry.shards}
    is_replicated = table.sharding_type is ShardingType.DATA_PARALLEL

    for bounds in table.shards[:1] if is_replicated else table.shards:
        step = max(1, BLOCK_BYTES // (4 * bounds.columns))
        for start in range(0, bounds.rows, step):
            rows = min(step, bounds.rows - start)
            block = local[bounds][start : start + rows] if bounds in local else None
            if bounds.rank != 0 and group is not None:
                block = _send_to_first(block, bounds, rows, group, table.dtype)
            if result is not None and block is not None:
                bounds.view(result)[start : start + rows] = block.view(rows, -1)
    return result


def _send_to_first(
    block: torch.Tensor | None,
    bounds: TableShard,
    rows: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Send a block from its rank to rank 0; None on other ranks."""
    device = comm.message_device(group)
    numbers = rows * bounds.columns
    sent = torch.empty(0, dtype=dtype, device=device)
    sent_numbers = [0] * group.size()
    received_numbers = [0] * group.size()
    if block is not None:
        sent = block.reshape(-1).to(device).contiguous()
        sent_numbers[0] = numbers
    if group.rank() == 0:
        received_numbers[bounds.rank] = numbers

    received = comm.all_to_all(sent, sent_numbers, received_numbers, group, _STAGE).wait()
    return received if group.rank() == 0 else None
