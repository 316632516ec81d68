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
from tutorec.datasets.utils import Batch
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
    write_report,
)
from tutorec.models.dlrm import DLRM, DLRMTrain
from tutorec.models.training import Metrics, combined_optimizer, evaluate
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd.devices import device as own_device

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
    group = start(options)
    rank, world_size, samples = group.rank(), group.size(), samples_of_rank(options, group)
    store = shop_of(options)
    device = own_device()
    model = DistributedModelParallel(
        build(store, options),
        device=device,
        sharders=[
            EmbeddingBagCollectionSharder(
                {"optimizer": "exact_row_wise_adagrad", "learning_rate": options.table_rate}
            )
        ],
    )
    optimizer = combined_optimizer(model, lambda params: torch.optim.Adam(params, lr=options.rate))
    say(
        f"{store}\n{world_size} rank(s), {samples} samples each: {plan_in_words(model.plan)}", group
    )
    begun = go_on(model, optimizer, options, group)

    def to_device(batch: Batch) -> Batch:
        return batch.to(device)

    def judge(when: str) -> Metrics:
        test = store.batches(2048, rank, world_size, split="test")
        metrics = evaluate(model, test.map(to_device))
        say(f"{when}: {metrics}; best possible AUC {store.best_auc:.4f}", group)
        return metrics

    judge("before")
    batches = store.batches(
        samples, rank, world_size, epochs=options.epochs, start=begun.position
    ).map(to_device)
    done = train_on(model, optimizer, batches, begun.step, options, group)
    say_speed(done, group)
    write_report(options, model, done, asdict(judge("after")), group)
    return 0


def build(store: Shop, options: Namespace) -> DLRMTrain:
    """The model with tables on the meta device, so that each rank allocates only its own rows."""
    torch.manual_seed(options.seed)
    options_of_tables = {"embedding_dim": options.columns, "pooling": PoolingType.MEAN}
    tables = [
        EmbeddingBagConfig(
            store.table_rows["user"], name="t_user", feature_names=["user"], **options_of_tables
        ),
        EmbeddingBagConfig(
            store.table_rows["item"],
            name="t_item",
            feature_names=["item", "clicked"],
            **options_of_tables,
        ),
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dense_layers, over_layers = [32, options.columns], [32, 1]
    return DLRMTrain(DLRM(collection, len(DENSE_NAMES), dense_layers, over_layers))


if __name__ == "__main__":
    sys.exit(main())
