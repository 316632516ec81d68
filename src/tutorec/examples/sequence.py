"""The next item of a session: a sequence model over an EmbeddingCollection, on any ranks.

::

    python -m tutorec.examples.sequence
    torchrun --nproc-per-node 2 -m tutorec.examples.sequence --checkpoints /tmp/sequence

Stopped and started again with the same folder it goes on where it stood. Each rank's samples find
others among their own, so that training is another one where ranks are more or fewer.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

import torch

from tutorec.datasets.sessions import Sessions
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.examples.running import Run, parser
from tutorec.models.baseline import click_counts
from tutorec.models.sequence import SequenceTower
from tutorec.models.two_tower import TwoTowerTrain
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig

NAME = "tutorec.examples.sequence"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and compare the recall with that of the most popular items.

    Args:
        argv: the options; by default those of the command line.

    Returns:
        The exit status, 0.
    """
    options_parser = parser(
        NAME,
        "Train self-attention on sessions of items.",
        rows=60_000,
        test_rows=5_000,
        items=200,
        longest=10,
    )
    options_parser.set_defaults(columns=64, table_rate=0.3, epochs=3)
    options = options_parser.parse_args(argv)
    sizes = options.items, options.rows, options.test_rows, options.longest, options.seed
    store = Sessions(*sizes)
    # every rank counts all items: one pass over the rows
    counts = click_counts(store.batches(8192), "item", store.items)
    model = build(store, counts, options)
    run = Run(options, f"{store}\n", model, EmbeddingCollectionSharder)
    run.train(store.batches)
    run.report(run.recall(store.batches, counts, store.best_recall))

    return 0


def build(store: Sessions, counts: torch.Tensor, options: Namespace) -> TwoTowerTrain:
    """The model with its table on the meta device, so that each rank allocates only its own rows.

    Args:
        store: whose items.
        counts: [items], how often each came next.
        options: of the command line.
    """
    torch.manual_seed(options.seed)
    table = EmbeddingConfig(
        store.items, options.columns, name="t_item", feature_names=["history", "item"]
    )
    collection = EmbeddingCollection(tables=[table], device=torch.device("meta"))
    return TwoTowerTrain(SequenceTower(collection, longest=store.longest), frequency=counts)


if __name__ == "__main__":
    sys.exit(main())
