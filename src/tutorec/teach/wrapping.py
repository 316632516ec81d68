"""What a rank holds of a model after `DistributedModelParallel`: replicas and shards."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.teach.canvas import Chart
from tutorec.teach.cuts import shard_boxes
from tutorec.teach.diagram import Diagram
from tutorec.teach.units import decimal_size

__all__ = ["wrapped"]


def wrapped(model: nn.Module, plan: ShardingPlan, *, claim: str) -> Chart:
    """A model after `DistributedModelParallel`: replicas of dense layers, and shards of tables.

    Args:
        model: The unsharded model. Parameters outside of the plan's module are dense, in float32.
        plan: Of one module with one or two tables; each rank has a shard of rows of each table.
        claim: The title; ``{dense}`` and ``{held}`` are the bytes that rank 0 has of dense layers
            and of tables.
    """
    [(path, tables)] = plan.plan.items()
    dense = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(f"{path}."))
    dense_bytes = decimal_size(4 * dense)
    boxes = {name: shard_boxes(entry) for name, entry in tables.items()}
    ranks = range(len(next(iter(boxes.values()))))

    diagram = Diagram(lines=5.6 * len(ranks) + 0.6)
    diagram.text(1, 0.6, "DistributedDataParallel", bold=True)
    diagram.text(28, 0.6, "sharded modules", bold=True)
    replicas = []
    for rank in ranks:
        y = 1.6 + 5.6 * rank
        replica = f"rank {rank}: dense layers\n{dense:,} numbers\n{dense_bytes}, a replica"
        replicas.append(diagram.box(1, y, replica, rank=rank, width=25, lines=3.4))
        for column, (name, shards) in enumerate(boxes.items()):
            _, first, _, rows, columns = shards[rank]
            size = decimal_size(4 * rows * columns)
            shard = f"rank {rank}: {name}\nrows {first:,} to {first + rows - 1:,}\n{size}"
            diagram.box(28 + 25 * column, y, shard, rank=rank, width=24, lines=3.4)
    for upper, lower in pairwise(replicas):
        diagram.arrow(upper.bottom, lower.top)
        diagram.arrow(lower.top, upper.bottom)
        diagram.text(15, (upper.bottom[1] + lower.y) / 2, "gradients: mean")

    held = sum(4 * rows * columns for [(*_, rows, columns), *_] in boxes.values())
    return diagram.chart(claim, dense=dense_bytes, held=decimal_size(held))
