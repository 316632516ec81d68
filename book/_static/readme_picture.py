"""Draw the README's picture: every byte that one training step sends between two ranks, counted.

`python book/_static/readme_picture.py` starts two ranks, runs one step and writes readme.png beside this file. The
numbers are counted where tensors are handed to torch.distributed, and are the same on every machine.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tutorec import EmbeddingBagCollection, EmbeddingBagConfig, Ranks
from tutorec.datasets.random import shop
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.distributed.traffic import count_traffic
from tutorec.teach import draw

SAMPLES = 1024
COLUMNS = 64
PICTURE = Path(__file__).with_name("readme.png")
# Stages as the library names them -> what the picture calls them.
TITLES = {
    "input ids": "sends ids to their table",
    "output rows": "sends pooled rows home",
    "output gradients": "sends gradients to the table",
}


def one_step(rank: int, world_size: int) -> dict[str, int]:
    """Forward and backward of one batch of the shop; bytes sent by this rank in each stage."""
    tables = [
        EmbeddingBagConfig(500, COLUMNS, "user_table", feature_names=["user"]),
        EmbeddingBagConfig(200, COLUMNS, "item_table", feature_names=["item", "clicked"]),
    ]
    module = EmbeddingBagCollection(tables)
    plan = construct_module_sharding_plan(module, {"user_table": table_wise(rank=0), "item_table": table_wise(rank=1)})
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharded = EmbeddingBagCollectionSharder().shard(module, plan, env)
    first, second = (batch.sparse_features for batch in list(shop().batches(SAMPLES, rank, world_size))[:2])
    sharded(first).values().sum().backward()  # builds the dists and compares the ranks, once
    with count_traffic() as traffic:
        sharded(second).values().sum().backward()
    return traffic.by_stage()


def main() -> None:
    """Run the step, draw what was counted, save the picture."""
    with Ranks(2) as world:
        counted = world.run(one_step)
    values = {f"rank {rank} {title}": counted[rank][stage] for stage, title in TITLES.items() for rank in range(2)}
    ids, total = sum(one["input ids"] for one in counted), sum(sum(one.values()) for one in counted)
    claim = (
        f"One training step of {SAMPLES:,} samples on each of two ranks moves {total / 2**20:.2f} MiB: "
        f"{ids / total:.0%} of it are ids and lengths, the rest are rows and their gradients"
    )
    chart = draw.bars(values, unit="B", ranks=[0, 1] * len(TITLES), claim=claim)
    picture = draw.show(chart, alt="; ".join(f"{what}: {count:,} bytes" for what, count in values.items()))
    picture.save(str(PICTURE))
    print(picture.alt)


if __name__ == "__main__":
    main()
