"""A click model of the shop on one or many ranks, with planned tables and a known best AUC.

::

    python -m tutorec.examples.dlrm
    torchrun --nproc-per-node 2 -m tutorec.examples.dlrm --checkpoints /tmp/dlrm

Stopped and started again with the same folder it goes on where it stood, with any number of ranks.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

import torch

from tutorec.datasets.random import DENSE_NAMES, Shop
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.examples.running import Run, parser, shop_of
from tutorec.models.dlrm import DLRM, DLRMTrain
from tutorec.models.training import Metrics, evaluate
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection

NAME = "tutorec.examples.dlrm"


def main(argv: Sequence[str] | None = None) -> int:
    """Train and judge.

    Args:
        argv: the options; by default those of the command line.

    Returns:
        The exit status, 0.
    """
    options = parser(
        NAME,
        "Train a small DLRM on the shop's clicks.",
        rows=120_000,
        test_rows=20_000,
        users=500,
        items=200,
    ).parse_args(argv)
    store = shop_of(options)
    run = Run(options, f"{store}\n", build(store, options), EmbeddingBagCollectionSharder)

    def judge(when: str) -> Metrics:
        test = store.batches(2048, *run.ranks, split="test")
        metrics = evaluate(run.model, test.map(run.to_device))
        run.say(f"{when}: {metrics}; best possible AUC {store.best_auc:.4f}")
        return metrics

    judge("before")
    run.train(store.batches)
    run.report(asdict(judge("after")))
    return 0


def build(store: Shop, options: Namespace) -> DLRMTrain:
    """The model with tables on the meta device, so that each rank allocates only its own rows."""
    torch.manual_seed(options.seed)
    tables = [
        EmbeddingBagConfig(
            store.table_rows[table],
            options.columns,
            f"t_{table}",
            feature_names=features,
            pooling=PoolingType.MEAN,
        )
        for table, features in (("user", ["user"]), ("item", ["item", "clicked"]))
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dense_layers = [32, options.columns]
    over_layers = [32, 1]

    return DLRMTrain(DLRM(collection, len(DENSE_NAMES), dense_layers, over_layers))


if __name__ == "__main__":
    sys.exit(main())
