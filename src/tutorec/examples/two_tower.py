"""Retrieval in the shop, on any ranks: find the items that a user will click.

::

    python -m tutorec.examples.two_tower
    torchrun --nproc-per-node 2 -m tutorec.examples.two_tower --negatives random --checkpoints DIR

Stopped and started again with the same folder it goes on where it stood. Each rank's samples find
others among their own, so that training with in-batch negatives is another one where ranks are more
or fewer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

import torch

from tutorec.datasets.random import Shop
from tutorec.datasets.utils import Batch
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.examples.running import Run, parser, shop_of
from tutorec.models.baseline import click_counts
from tutorec.models.two_tower import TwoTower, TwoTowerTrain, clicks_of
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection

NAME = "tutorec.examples.two_tower"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and compare the recall with that of the most popular items.

    Args:
        argv: the options; by default those of the command line.

    Returns:
        The exit status, 0.
    """
    options_parser = parser(
        NAME,
        "Train a two-tower model on the shop's clicks.",
        rows=120_000,
        test_rows=20_000,
        users=500,
        items=200,
    )
    options_parser.add_argument(
        "--negatives",
        choices=("in_batch", "random"),
        default="in_batch",
        help="items sampled from those that were not clicked (%(default)s)",
    )
    options = options_parser.parse_args(argv)
    store = shop_of(options)
    # every rank counts all clicks: one pass over the rows
    counts = click_counts(store.batches(8192), "item", store.table_rows["item"])
    model = build(store, counts, options)
    run = Run(options, f"{store}\n", model, EmbeddingBagCollectionSharder)

    def clicks(batch: Batch) -> Batch:
        return clicks_of(batch).to(run.device)

    run.train(store.batches, clicks)
    run.report(run.recall(store.batches, counts, store.best_recall, clicks))
    return 0


def build(store: Shop, counts: torch.Tensor, options: Namespace) -> TwoTowerTrain:
    """The model with tables on the meta device, so that each rank allocates only its own rows.

    Args:
        store: whose ids.
        counts: [items], how often each was clicked.
        options: of the command line.
    """
    torch.manual_seed(options.seed)
    columns = options.columns
    rows = store.table_rows
    tables = [
        EmbeddingBagConfig(
            num_embeddings=rows[table],
            embedding_dim=columns,
            name=f"t_{table}",
            feature_names=features,
            pooling=PoolingType.MEAN,
        )
        for table, features in (("user", ["user"]), ("item", ["item", "clicked"]))
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    towers = TwoTower(collection, ["user", "clicked"], ["item"], [2 * columns, columns])

    return TwoTowerTrain(towers, options.negatives, frequency=counts, rows=rows["item"])


if __name__ == "__main__":
    sys.exit(main())
