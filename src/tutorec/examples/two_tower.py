"""Retrieval in the shop, on one rank or many: which items will this user click, found among all of them.

::

    python -m tutorec.examples.two_tower
    torchrun --nproc-per-node 2 -m tutorec.examples.two_tower --negatives random --checkpoints /tmp/two_tower

Stopped and started again with the same folder it goes on where it stood. Each rank's samples find others among their
own, so that training with in-batch negatives is another one where ranks are more or fewer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

import torch

from tutorec._spmd_device import device as own_device
from tutorec.datasets.random import Shop
from tutorec.datasets.utils import Batch, RowBatches
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.examples.running import (
    go_on,
    parser,
    plan_in_words,
    samples_of_rank,
    say,
    say_speed,
    shop_of,
    start,
    train_on,
)
from tutorec.models.baseline import click_counts
from tutorec.models.retrieval import build_index, recall_at
from tutorec.models.training import combined_optimizer
from tutorec.models.two_tower import TwoTower, TwoTowerTrain, clicks_of
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection

NAME = "tutorec.examples.two_tower"
KS = (1, 10, 50)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and compare what is found with what is popular.

    Args:
        argv: the options; by default those of the command line.

    Returns:
        The exit status, 0.
    """
    made = parser(NAME, "Train a two-tower model on the shop's clicks.", rows=120_000)
    made.add_argument(
        "--negatives",
        choices=("in_batch", "random"),
        default="in_batch",
        help="items that stand for all that were not clicked (%(default)s)",
    )
    options = made.parse_args(argv)
    group = start(options)
    device, store = own_device(), shop_of(options)
    rank, world_size, samples = group.rank(), group.size(), samples_of_rank(options, group)
    # every rank counts all clicks: one pass over the rows
    counts = click_counts(store.batches(8192), "item", store.table_rows["item"])
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "exact_row_wise_adagrad", "learning_rate": options.table_rate}
    )
    model = DistributedModelParallel(build(store, counts, options), device=device, sharders=[sharder])
    optimizer = combined_optimizer(model, lambda params: torch.optim.Adam(params, lr=options.rate))
    say(f"{store}\n{world_size} rank(s), {samples} samples each: {plan_in_words(model.plan)}", group)
    begun = go_on(model, optimizer, options, group)

    def clicks(batch: Batch) -> Batch:
        return clicks_of(batch).to(device)

    batches = store.batches(samples, rank, world_size, epochs=options.epochs, start=begun.position).map(clicks)
    say_speed(train_on(model, optimizer, batches, begun.step, options, group), group)
    towers = model.module.model
    assert isinstance(towers, TwoTower), "build() makes a TwoTowerTrain of a TwoTower"
    ks = [k for k in KS if k <= len(counts)]
    index = build_index(towers, torch.arange(len(counts), device=device))
    popular = counts.to(device).topk(max(ks)).indices

    @torch.no_grad()
    def found(batch: Batch) -> torch.Tensor:
        return index.retrieve(towers.queries(batch.sparse_features), max(ks))[0]

    def test() -> RowBatches:
        return store.batches(2048, rank, world_size, split="test").map(clicks)

    of_model = recall_at(ks, test(), found, "item")
    of_popular = recall_at(ks, test(), lambda batch: popular.expand(len(batch.labels), -1), "item")
    for k in ks:
        best = f"{store.best_recall(k):.4f}" if rank == 0 else ""
        say(f"recall@{k}: {of_model[k]:.4f}; the {k} most popular {of_popular[k]:.4f}; best possible {best}", group)
    return 0


def build(store: Shop, counts: torch.Tensor, options: Namespace) -> TwoTowerTrain:
    """The model; its tables are on the meta device, so that each rank allocates the rows that it is to hold.

    Args:
        store: whose ids.
        counts: [items], how often each was clicked.
        options: of the command line.
    """
    torch.manual_seed(options.seed)
    columns, rows = options.columns, store.table_rows
    tables = [
        EmbeddingBagConfig(
            num_embeddings=rows[of],
            embedding_dim=columns,
            name=f"t_{of}",
            feature_names=features,
            pooling=PoolingType.MEAN,
        )
        for of, features in (("user", ["user"]), ("item", ["item", "clicked"]))
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    towers = TwoTower(collection, ["user", "clicked"], ["item"], [2 * columns, columns])
    return TwoTowerTrain(towers, options.negatives, frequency=counts, rows=rows["item"])


if __name__ == "__main__":
    sys.exit(main())
