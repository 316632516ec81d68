"""Options and ranks with numbers written by hand, for the parts of the planner that choose and
place.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tutorec.distributed.planner.options import Shard, ShardingOption
from tutorec.distributed.planner.topology import Perf, Storage

PARTITION_BY = {
    "table_wise": "device",
    "column_wise": "device",
    "row_wise": "uniform",
    "data_parallel": "uniform",
    "table_row_wise": "host",
    "table_column_wise": "host",
    "grid_shard": "multi_host",
}


def option(
    name: str,
    kind: str,
    times: Sequence[float],
    memory: Sequence[int],
    path: str = "model",
    **words: Any,
) -> ShardingOption:
    """An option with a shard for each of the times (ms); `memory` is bytes of HBM, or of DDR with
    ``ddr=True``.
    """
    in_ddr = words.pop("ddr", False)
    shards = [
        Shard(
            [4, 4],
            [4 * number, 0],
            Storage(0, held) if in_ddr else Storage(held, 0),
            Perf(ms, 0.0, 0.0, 0.0),
        )
        for number, (ms, held) in enumerate(zip(times, memory, strict=True))
    ]
    tensor = torch.empty(4 * len(shards), 4, device="meta")
    module = (path, torch.nn.Identity())
    return ShardingOption(
        name, tensor, module, [1.0], 2, kind, PARTITION_BY[kind], "fused", shards, **words
    )


def ranks(world_size: int, hbm: int, local_size: int | None = None, ddr: int = 0) -> Any:
    """A topology as partitioners and proposers read it."""
    devices = [
        SimpleNamespace(rank=rank, storage=Storage(hbm, ddr), perf=Perf(0.0, 0.0, 0.0, 0.0))
        for rank in range(world_size)
    ]
    return SimpleNamespace(
        world_size=world_size, local_world_size=local_size or world_size, devices=devices
    )


def places(plan: Sequence[ShardingOption]) -> dict[str, list[int | None]]:
    """The rank of every shard."""
    return {each.name: [shard.rank for shard in each.shards] for each in plan}
