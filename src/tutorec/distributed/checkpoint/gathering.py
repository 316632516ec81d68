"""Gathering of a sharded model's state on one rank, as the state dict of the unsharded model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tutorec.distributed import comm
from tutorec.distributed.checkpoint.contents import contents_of
from tutorec.distributed.checkpoint.entries import BLOCK_BYTES, Entry, Form
from tutorec.distributed.core import messages
from tutorec.distributed.plan.geometry import ShardPiece
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
    contents = contents_of(model)
    group = contents.group if contents.group is not None and contents.group.size() > 1 else None
    first = group is None or group.rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, entry in contents.model.items():
        if entry.form is Form.WHOLE or entry.table is None:
            whole = entry.parts[0].tensor.detach().cpu().clone() if first else None
        elif entry.form is Form.TABLE:
            whole = _gathered(entry, group)
        else:
            raise ValueError(
                f"full_state_dict: {name!r} depends on the ranks that hold table "
                f"{entry.table.name!r}: call save_checkpoint(path, model) here, and "
                "load_checkpoint(path, unsharded, optimizer_state=False) on the unsharded model"
            )
        if whole is not None:
            state[name] = whole
    return state


def _gathered(entry: Entry, group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """The whole table on rank 0, None on other ranks."""
    table, rank = entry.table, 0 if group is None else group.rank()
    assert table is not None, f"{entry.name} is not a table"
    whole = torch.empty(table.rows, table.columns, dtype=table.dtype) if rank == 0 else None
    pieces = table.pieces[:1] if table.sharding_type is ShardingType.DATA_PARALLEL else table.pieces
    local = {part.piece: part.tensor for part in entry.parts}
    for piece in pieces:
        step = max(1, BLOCK_BYTES // (4 * piece.columns))
        for start in range(0, piece.rows, step):
            rows = min(step, piece.rows - start)
            block = local[piece][start : start + rows] if piece in local else None
            arrived = block
            if piece.rank != 0 and group is not None:
                arrived = _sent(block, piece, rows, group, table.dtype)
            if whole is not None and arrived is not None:
                piece.of(whole)[start : start + rows] = arrived.view(rows, -1)
    return whole


def _sent(
    block: torch.Tensor | None,
    piece: ShardPiece,
    rows: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Send a block from its rank to rank 0; None on other ranks."""
    numbers, ranks = rows * piece.columns, group.size()
    device = messages.message_device(group)
    send = (
        block.reshape(-1).to(device)
        if block is not None
        else torch.empty(0, dtype=dtype, device=device)
    )
    out, into = [0] * ranks, [0] * ranks
    if group.rank() == piece.rank:
        out[0] = numbers
    if group.rank() == 0:
        into[piece.rank] = numbers
    arrived = comm.all_to_all(send.contiguous(), out, into, group, _STAGE).wait()
    return arrived if group.rank() == 0 else None
