"""Shared parts of the example scripts: options, process group, resumable training, report."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorec._whole_file import whole_file
from tutorec.datasets.random import Shop, shop
from tutorec.datasets.utils import Batch, RowBatches
from tutorec.distributed.checkpoint.manager import CheckpointManager
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan, ShardingPlan
from tutorec.models.retrieval import build_index, recall_at
from tutorec.models.training import combined_optimizer, train
from tutorec.models.two_tower import Towers
from tutorec.optim.rates import check_rate
from tutorec.spmd.rank import device as own_device
from tutorec.spmd.worker import init

KS = (1, 10, 50)  # recall is given at these
_KEPT = 2  # checkpoints: the latest, and one to fall back on


_SIZES = {
    "rows": "training rows",
    "test_rows": "held-out rows",
    "users": "rows of the table of users",
    "items": "rows of the table of items",
    "longest": "items of the longest history",
}


def parser(program: str, description: str, **sizes: int) -> argparse.ArgumentParser:
    """The options that all scripts have.

    Args:
        program: what is started, for the usage line.
        description: what it does.
        sizes: of generated data, by the names of `_SIZES`, with their defaults: ``rows=1000`` makes
            ``--rows``.
    """
    options_parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        epilog=f"on two ranks: torchrun --nproc-per-node 2 -m {program}",
    )
    for name, default in sizes.items():
        flag = f"--{name.replace('_', '-')}"
        options_parser.add_argument(
            flag, type=positive, default=default, help=f"{_SIZES[name]} (%(default)s)"
        )

    for flag, kind, default, text in _OPTIONS:
        options_parser.add_argument(flag, type=kind, default=default, help=text)
    options_parser.add_argument(
        "--checkpoints",
        type=_folder,
        metavar="FOLDER",
        help="save there, or below a URL; go on from what is there",
    )
    options_parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    options_parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write what was measured there, as JSON"
    )

    return options_parser


def positive(text: str) -> int:
    """A whole number from 1 on, or argparse's complaint."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _from_zero(text: str) -> int:
    """A whole number from 0 on, or argparse's complaint."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def share(text: str) -> float:
    """A number above 0 and up to 1, or argparse's complaint."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0

    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1")
    return value


def _rate(text: str) -> float:
    """A learning rate, or argparse's complaint."""
    try:
        return check_rate(float(text), "--rate")
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a learning rate, a finite number from 0 on"
        ) from None


def _folder(text: str) -> Path | str:
    """A writable folder, made where it is missing, before training instead of after it.

    A URL of an object store is taken as it is: such stores have no folders.
    """
    if "://" in text:
        return text
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be a folder for checkpoints ({error})"
        ) from None

    if not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written to: choose another folder")
    return path


_OPTIONS: list[tuple[str, Callable[[str], Any], Any, str]] = [
    ("--batch-size", positive, 512, "samples of a step, of all ranks (%(default)s)"),
    ("--epochs", _from_zero, 2, "how often the rows are gone through (%(default)s)"),
    ("--steps", _from_zero, None, "stop after this step, counted from the first run's beginning"),
    ("--columns", positive, 16, "D of the tables (%(default)s)"),
    ("--table-rate", _rate, 0.1, "learning rate of the tables (%(default)s)"),
    ("--rate", _rate, 0.003, "learning rate of the dense parts (%(default)s)"),
    ("--seed", _from_zero, 0, "of the data and of the first weights (%(default)s)"),
    ("--save-every", positive, 200, "save after every so many steps (%(default)s)"),
    ("--timeout", positive, 600, "seconds that a rank waits for others (%(default)s)"),
]


def shop_of(options: argparse.Namespace) -> Shop:
    """The shop that the options describe."""
    return shop(
        users=options.users,
        items=options.items,
        rows=options.rows,
        test_rows=options.test_rows,
        seed=options.seed,
    )


def samples_of_rank(options: argparse.Namespace, group: dist.ProcessGroup) -> int:
    """B of each rank, so that a step has equally many samples with any number of ranks.

    Raises:
        ValueError: the ranks cannot share a batch evenly.
    """
    size = options.batch_size
    world_size = group.size()
    if size < 1 or size % world_size:
        near = max(1, -(-size // world_size)) * world_size
        raise ValueError(f"--batch-size {size}: {world_size} ranks share it unevenly; try {near}")
    return size // world_size


def start(options: argparse.Namespace) -> dist.ProcessGroup:
    """The group of all ranks, torchrun's or this process alone; one thread each on a CPU.

    Layers as small as these take longer where two threads share them.

    Args:
        options: of the command line.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return init(timeout=options.timeout)


class Run:
    """One run of a script: its ranks, and the sharded model with its optimizer.

    Args:
        options: of the command line.
        data: what the model is trained on, for the first line that is printed.
        model: with its tables on the meta device, so that each rank allocates only its own rows.
        sharder: class of the tables' sharder.
        optimizer: of the tables.
        dense: of the dense parts.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        data: str,
        model: nn.Module,
        sharder: Callable[[dict[str, Any]], Any],
        optimizer: str = "exact_row_wise_adagrad",
        dense: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    ) -> None:
        self.options = options
        self.group = start(options)
        self.device = own_device()
        self.ranks = self.group.rank(), self.group.size()
        self.samples = samples_of_rank(options, self.group)
        fused_params = {"optimizer": optimizer, "learning_rate": options.table_rate}
        self.model = DistributedModelParallel(
            model, device=self.device, sharders=[sharder(fused_params)]
        )
        self.optimizer = combined_optimizer(
            self.model, lambda params: dense(params, lr=options.rate)
        )
        ranks = f"{self.ranks[1]} rank(s), {self.samples} samples each"
        self.say(f"{data}{ranks}: {plan_in_words(self.model.plan)}")

        # where the run begins
        self._step = 0
        self._position = 0
        if options.checkpoints is not None:
            self._go_on()

    def _go_on(self) -> None:
        """Load the latest checkpoint, if there is one."""
        info = CheckpointManager(self.options.checkpoints).load(self.model, self.optimizer)
        if info is not None:
            self._step = int(info.step or 0)
            self._position = int(info.position)
            saved = f"saved by {info.world_size} rank(s) after {info.position:,} samples"
            self.say(f"goes on from step-{info.step}, {saved}")

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.ranks[0] == 0:
            print(text, flush=True)

    def to_device(self, batch: Batch) -> Batch:
        """The batch on this rank's device."""
        return batch.to(self.device)

    def train(
        self, data: Callable[..., RowBatches], change: Callable[[Batch], Batch] | None = None
    ) -> None:
        """Train to the last step, with checkpoints in the background and one at the end.

        Args:
            data: makes this rank's batches.
            change: what the model takes of a batch; the batch on the device by default.
        """
        options = self.options
        first = self._step
        batches = data(self.samples, *self.ranks, epochs=options.epochs, start=self._position).map(
            change or self.to_device
        )
        saved = first

        def save(step: int) -> None:
            nonlocal saved
            if manager is not None and step != saved:
                saved = step
                position = batches.position_after(step - first)
                manager.save(self.model, self.optimizer, step=step, position=position)

        with (
            nullcontext()
            if options.checkpoints is None
            else CheckpointManager(options.checkpoints, keep=_KEPT, asynchronous=True) as manager
        ):
            self._trained = train(
                self.model,
                batches,
                self.optimizer,
                steps=None if options.steps is None else max(options.steps - first, 0),
                first_step=first,
                progress=not options.no_progress,
                after_step=lambda step: None if step % options.save_every else save(step),
                group=self.group,
            )
            save(first + self._trained.steps)

        self._speed = self._trained.samples / max(self._trained.seconds, 1e-9)
        summary = f"{self._trained.steps:,} steps, {self._trained.samples:,} samples"
        self.say(f"{summary}, {self._speed:,.0f} samples/s")

    def recall(
        self,
        data: Callable[..., RowBatches],
        counts: Tensor,
        best: Callable[[int], float],
        change: Callable[[Batch], Batch] | None = None,
    ) -> dict[str, float]:
        """Print and return how often the next item is among a `TwoTowerTrain`'s first k of all.

        Args:
            data: makes batches with the feature ``item``.
            counts: how often each item was clicked [items].
            best: gives the best possible recall at k; asked on rank 0 alone.
            change: as of `train`.
        """
        counts = counts.to(self.device)
        towers = cast(Towers, self.model.module.model)
        ks = [k for k in KS if k <= len(counts)]
        index = build_index(towers, torch.arange(len(counts), device=self.device))
        popular = counts.topk(max(ks)).indices

        @torch.no_grad()
        def retrieved(batch: Batch) -> Tensor:
            return index.retrieve(towers.queries(batch.sparse_features), max(ks))[0]

        def recalls(retrieve: Callable[[Batch], Tensor]) -> dict[int, float]:
            test = data(2048, *self.ranks, split="test").map(change or self.to_device)
            return recall_at(ks, test, retrieve, "item")

        model_recall = recalls(retrieved)
        popular_recall = recalls(lambda batch: popular.expand(len(batch.labels), -1))
        for k in ks:
            limit = f"{best(k):.4f}" if self.ranks[0] == 0 else ""
            others = f"the {k} most popular {popular_recall[k]:.4f}; best possible {limit}"
            self.say(f"recall@{k}: {model_recall[k]:.4f}; {others}")
        return {f"recall@{k}": model_recall[k] for k in ks}

    def report(self, metrics: Mapping[str, float]) -> None:
        """Write ``--report`` on rank 0: options, plan, losses, speed and these metrics."""
        if self.options.report is None or self.ranks[0] != 0:
            return

        record = {
            "options": {
                name: value if value is None else str(value)
                for name, value in vars(self.options).items()
            },
            "versions": {"tutorec": version("tutorec"), "torch": torch.__version__},
            "ranks": self.ranks[1],
            "plan": dict(_placements(self.model.plan)),
            "steps": self._trained.steps,
            "samples": self._trained.samples,
            "samples_per_second": round(self._speed, 1),
            "losses": [round(loss, 6) for loss in self._trained.losses.tolist()],
            "metrics": dict(metrics),
        }
        with whole_file(self.options.report) as draft:
            draft.write_text(json.dumps(record, indent=1) + "\n")


def plan_in_words(plan: ShardingPlan) -> str:
    """The tables of each sharding type and ranks; of more than three tables only their number."""
    groups: dict[str, list[str]] = {}
    for name, placement in _placements(plan):
        groups.setdefault(placement, []).append(name)
    return "; ".join(
        f"{group}: {', '.join(names) if len(names) <= 3 else f'{len(names)} tables'}"
        for group, names in groups.items()
    )


def _placements(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Each table with its sharding type and ranks."""
    for module_plan in plan.plan.values():
        for name, entry in cast(EmbeddingModuleShardingPlan, module_plan).items():
            yield name, f"{entry.sharding_type} on {entry.ranks}"
