"""Draw the first picture of README and book: a batch on two ranks, and its bytes.

`python book/_static/readme_picture.py` starts two ranks, runs one step and writes two_ranks.png,
two_ranks.html and card.png, which previews of a link show, beside this file. The bytes are counted
where tensors are handed to torch.distributed, and are the same everywhere.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

from tutorec import EmbeddingBagCollection, EmbeddingBagConfig, Ranks
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.distributed.traffic import count_traffic
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.lists import kjt_from_lists
from tutorec.spmd import device
from tutorec.teach import draw

COLUMNS = 64
HOLDER = {"user": 0, "product": 1}
VISITS = [
    {"user": [[2], []], "product": [[7], [7, 2]]},
    {"user": [[2, 3], [4, 1]], "product": [[1, 2, 1], [5]]},
]
STAGES = {"ids": "input ids", "rows": "output rows", "gradients": "output gradients"}
HERE = Path(__file__).parent


def one_step(rank: int, batches: list[KeyedJaggedTensor]) -> dict[str, int]:
    """Forward and backward of the rank's batch; bytes that this rank sends in each stage."""
    tables = [
        EmbeddingBagConfig(4096, COLUMNS, f"{feature}_table", feature_names=[feature])
        for feature in HOLDER
    ]
    module = EmbeddingBagCollection(tables)
    plan = construct_module_sharding_plan(
        module, {f"{key}_table": table_wise(rank=r) for key, r in HOLDER.items()}
    )
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharded = EmbeddingBagCollectionSharder().shard(module, plan, env)
    batch = batches[rank].to(device())
    # the first batch builds the exchanges and compares the ranks
    sharded(batch).values().sum().backward()
    with count_traffic() as traffic:
        sharded(batch).values().sum().backward()
    return traffic.by_stage()


def card() -> None:
    """The picture beside the book's title, 1200 x 630 pixels on white."""
    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="white")
    axes = figure.add_axes((0.38, 0.0, 0.62, 1.0))
    axes.imshow(imread(HERE / "two_ranks.png"))
    axes.axis("off")
    figure.text(0.03, 0.68, "tutorec", fontsize=48, fontweight="bold", color="#333333")
    title = "Distributed\nembedding tables,\nfrom a click to\nmany GPUs"
    figure.text(0.03, 0.3, title, fontsize=26, color="#333333", linespacing=1.3)
    figure.savefig(HERE / "card.png")


def main() -> None:
    """Run the step, draw what was counted, save the picture."""
    batches = [kjt_from_lists(lists) for lists in VISITS]
    with Ranks(2) as world:
        counted = world.run(one_step, batches)
    sent = {name: [one[stage] for one in counted] for name, stage in STAGES.items()}
    claim = (
        "One training step of two samples on each of two ranks: {ids} bytes of ids and lengths "
        "cross, {rows:,} bytes of pooled rows come back, and {gradients:,} bytes of gradients "
        "return to the tables"
    )
    chart = draw.swim_lanes(batches, HOLDER, COLUMNS, sent, mark=7, claim=claim)
    picture = draw.show(
        chart, alt="One lane for each rank, from its batch down to the update of its table"
    )
    picture.save(str(HERE / "two_ranks.png"))
    (HERE / "two_ranks.html").write_text(picture._repr_html_() + "\n", encoding="utf-8")
    card()
    print(picture.alt)


if __name__ == "__main__":
    main()
