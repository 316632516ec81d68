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
from tutorec.datasets.utils import Batch, RowBatches
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.examples.running import (
    KS,
    go_on,
    parser,
    plan_in_words,
    samples_of_rank,
    say,
    say_recall,
    say_speed,
    start,
    train_on,
    write_report,
)
from tutorec.models.baseline import click_counts
from tutorec.models.sequence import SequenceTower
from tutorec.models.training import combined_optimizer
from tutorec.models.two_tower import TwoTowerTrain
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.spmd.devices import device as own_device

NAME = "tutorec.examples.sequence"


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and compare what is found with what is popular.

    Args:
        argv: the options; by default those of the command line.

    Returns:
        The exit status, 0.
    """
    made = parser(
        NAME,
        "Train self-attention on sessions of items.",
        rows=60_000,
        test_rows=5_000,
        items=200,
        longest=10,
    )
    made.set_defaults(columns=64, table_rate=0.3, epochs=3)
    options = made.parse_args(argv)
    group = start(options)
    device, store = (
        own_device(),
        Sessions(options.items, options.rows, options.test_rows, options.longest, options.seed),
    )
    rank, world_size, samples = group.rank(), group.size(), samples_of_rank(options, group)
    # every rank counts all items: one pass over the rows
    counts = click_counts(store.batches(8192), "item", store.items)
    sharder = EmbeddingCollectionSharder(
        {"optimizer": "exact_row_wise_adagrad", "learning_rate": options.table_rate}
    )
    model = DistributedModelParallel(
        build(store, counts, options), device=device, sharders=[sharder]
    )
    optimizer = combined_optimizer(model, lambda params: torch.optim.Adam(params, lr=options.rate))
    say(
        f"{store}\n{world_size} rank(s), {samples} samples each: {plan_in_words(model.plan)}", group
    )
    begun = go_on(model, optimizer, options, group)

    def to_device(batch: Batch) -> Batch:
        return batch.to(device)

    batches = store.batches(
        samples, rank, world_size, epochs=options.epochs, start=begun.position
    ).map(to_device)
    done = train_on(model, optimizer, batches, begun.step, options, group)
    say_speed(done, group)

    def test() -> RowBatches:
        return store.batches(2048, rank, world_size, split="test").map(to_device)

    popular = counts.to(device).topk(min(max(KS), store.items)).indices
    metrics = say_recall(model, store.items, test, popular, store.best_recall, group)
    write_report(options, model, done, metrics, group)
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
