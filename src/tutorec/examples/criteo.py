"""DLRM on Criteo's click logs (Kaggle or 1 TB), on one or many ranks; MLPerf's by a flag.

The logs are read from arrays of numpy on the disk, which one command makes of the text::

    python -m tutorec.datasets.scripts.npy_preproc_criteo --input_dir TSV --output_dir NPY
    python -m tutorec.examples.criteo NPY
    torchrun --nproc-per-node 2 -m tutorec.examples.criteo NPY --mlperf 0.001 --checkpoints DIR

Of several files (``day_0`` to ``day_23``) the last one is held out; of one file (Kaggle's
``train``) the last seventh, which is its last day. Stopped and started again with the same folder
it goes on where it stood, with any number of ranks.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from tutorec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DEFAULT_CAT_NAMES,
    INT_FEATURE_COUNT,
    InMemoryBinaryCriteoIterDataPipe,
)
from tutorec.datasets.utils import Batch, RowBatches
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.examples.running import Run, parser, positive, share
from tutorec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from tutorec.models.training import Metrics, evaluate
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.hashing import mixing_hash
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

NAME = "tutorec.examples.criteo"
_M = 40_000_000  # MLPerf's largest table: more ids than that share its rows
_MLPERF_ROWS = (_M, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, _M, 3067956, 405282, 10)
_MLPERF_ROWS += (2209, 11938, 155, 4, 976, 14, _M, _M, _M, 590152, 12973, 108, 36)
_MLPERF_BAGS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True)
class Shape:
    """How large the model is.

    Attributes:
        rows: of the table of each feature.
        bags: ids of each feature in a sample.
        columns: D.
        dense: layers of the dense MLP, without the last one, D.
        over: layers of the last MLP.
        rank: of the matrices of the cross network.
    """

    rows: tuple[int, ...]
    bags: tuple[int, ...]
    columns: int
    dense: tuple[int, ...]
    over: tuple[int, ...]
    rank: int


def main(argv: Sequence[str] | None = None) -> int:
    """Train and judge.

    Args:
        argv: the options; by default those of the command line.

    Returns:
        The exit status, 0.
    """
    options_parser = parser(NAME, "Train a DLRM on Criteo's click logs.")
    options_parser.epilog = f"{options_parser.epilog} folder"

    options_parser.add_argument(
        "folder", type=Path, help="where *_dense.npy, *_sparse.npy and *_labels.npy are"
    )
    options_parser.add_argument(
        "--interaction",
        choices=("original", "dcn", "projection"),
        help="of the features (original; for --mlperf dcn)",
    )
    options_parser.add_argument(
        "--hash-rows", type=positive, default=20_000, help="rows of each table (%(default)s)"
    )
    options_parser.add_argument(
        "--mlperf",
        type=share,
        metavar="SCALE",
        help="MLPerf's model, its tables with this share of their rows",
    )

    # MLPerf's rates are 0.005 with a batch of 65,536; a cross network of that size diverges with
    # them at 512
    options_parser.set_defaults(epochs=1, table_rate=0.02, rate=0.001)
    options = options_parser.parse_args(argv)

    shape = shape_of(options)
    train, test = read(options.folder, shape, options.batch_size)
    run = Run(
        options,
        "",
        build(shape, options),
        EmbeddingBagCollectionSharder,
        "adagrad",
        torch.optim.Adagrad,
    )

    def judge(when: str) -> Metrics:
        metrics = evaluate(run.model, test(run.samples, *run.ranks).map(run.to_device))
        run.say(f"{when}: {metrics}")
        return metrics

    judge("before")
    run.train(train)
    run.report(asdict(judge("after")))
    return 0


def shape_of(options: argparse.Namespace) -> Shape:
    """The model that the options describe: a small one, or MLPerf's."""
    if options.mlperf is None:
        rows = (options.hash_rows,) * CAT_FEATURE_COUNT
        bags = (1,) * CAT_FEATURE_COUNT
        return Shape(rows, bags, options.columns, dense=(64,), over=(64, 32, 1), rank=32)

    rows = tuple(max(1, round(table_rows * options.mlperf)) for table_rows in _MLPERF_ROWS)
    return Shape(
        rows, _MLPERF_BAGS, 128, dense=(512, 256), over=(1024, 1024, 512, 256, 1), rank=512
    )


def build(shape: Shape, options: argparse.Namespace) -> DLRMTrain:
    """The model with tables on the meta device, so that each rank allocates only its own rows."""
    torch.manual_seed(options.seed)
    width = shape.columns
    tables = [
        EmbeddingBagConfig(rows, width, name=f"t_{name}", feature_names=[name])
        for name, rows in zip(DEFAULT_CAT_NAMES, shape.rows, strict=True)
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    layers = INT_FEATURE_COUNT, [*shape.dense, width], list(shape.over)
    interaction = options.interaction or ("original" if options.mlperf is None else "dcn")
    if interaction == "dcn":
        return DLRMTrain(
            DLRM_DCN(collection, *layers, dcn_num_layers=3, dcn_low_rank_dim=shape.rank)
        )
    if interaction == "projection":
        return DLRMTrain(DLRM_Projection(collection, *layers, [4 * width], [8 * width]))

    return DLRMTrain(DLRM(collection, *layers))


def rows_between(
    data: InMemoryBinaryCriteoIterDataPipe, first: int, stop: int, shape: Shape
) -> Callable[..., RowBatches]:
    """What makes batches of consecutive rows of the files for any rank.

    Args:
        data: the files.
        first: the first row.
        stop: the row after the last one.
        shape: of the model, for the ids of a bag.
    """

    def read(start: int, end: int) -> Batch:
        return in_bags(data.to_batch(first + start, first + end), shape)

    return partial(RowBatches, read, stop - first)


def read(
    folder: Path, shape: Shape, batch_size: int
) -> tuple[Callable[..., RowBatches], Callable[..., RowBatches]]:
    """The rows to train with, and those that are held out.

    Raises:
        FileNotFoundError: the folder has no such files.
    """
    days = sorted(
        (path.name.removesuffix("_labels.npy") for path in folder.glob("*_labels.npy")),
        key=lambda day: [
            int(field) if field.isdigit() else field for field in re.split(r"(\d+)", day)
        ],
    )
    if not days:
        raise FileNotFoundError(
            f"{folder} has no *_labels.npy: python -m tutorec.datasets.scripts.npy_preproc_criteo "
            f"--input_dir TSV --output_dir {folder}"
        )

    paths = (
        [str(folder / f"{day}_{field}.npy") for day in days]
        for field in ("dense", "sparse", "labels")
    )
    data = InMemoryBinaryCriteoIterDataPipe(
        "train",
        *paths,
        batch_size=batch_size,
        rank=0,
        world_size=1,
        mmap_mode=True,
        hashes=list(shape.rows),
    )
    day_rows = [len(labels) for labels in data.labels_arrs]
    held_out = day_rows[-1] if len(days) > 1 else max(1, day_rows[0] // 7)
    train_rows = sum(day_rows) - held_out
    rows = sum(day_rows)

    return rows_between(data, 0, train_rows, shape), rows_between(data, train_rows, rows, shape)


def in_bags(batch: Batch, shape: Shape) -> Batch:
    """Extend each one-id bag with hashes of its id, since MLPerf's data have longer bags.

    Args:
        batch: B samples with one id for each feature.
        shape: with the ids of each bag.
    """
    if set(shape.bags) == {1}:
        return batch
    ids = batch.sparse_features.values().long().view(CAT_FEATURE_COUNT, -1)  # [F, B]
    values = []
    for feature, (first, rows, count) in enumerate(zip(ids, shape.rows, shape.bags, strict=True)):
        further = first.unsqueeze(1) * count + torch.arange(1, count)  # [B, count - 1]
        values.append(
            torch.cat([first.unsqueeze(1), mixing_hash(further, rows, seed=feature)], dim=1).view(
                -1
            )
        )

    lengths = torch.tensor(shape.bags).repeat_interleave(ids.shape[1])
    bags = KeyedJaggedTensor(DEFAULT_CAT_NAMES, torch.cat(values), lengths=lengths)
    return Batch(batch.dense_features, bags, batch.labels)


if __name__ == "__main__":
    sys.exit(main())
