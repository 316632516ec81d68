"""What the example scripts share: options, process group, resumable training, report."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorec._whole_file import whole_file
from tutorec.datasets.random import Shop, shop
from tutorec.datasets.utils import Batch, RowBatches
from tutorec.distributed.checkpoint.manager import CheckpointManager
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan import EmbeddingModuleShardingPlan, ShardingPlan
from tutorec.models.retrieval import build_index, recall_at
from tutorec.models.training import Trained, train
from tutorec.models.two_tower import Towers
from tutorec.optim.keyed import KeyedOptimizer
from tutorec.optim.rates import check_rate
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
    made = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        epilog=f"on two ranks: torchrun --nproc-per-node 2 -m {program}",
    )
    for name, default in sizes.items():
        flag = f"--{name.replace('_', '-')}"
        made.add_argument(
            flag, type=positive, default=default, help=f"{_SIZES[name]} (%(default)s)"
        )
    made.add_argument(
        "--batch-size",
        type=positive,
        default=512,
        help="samples of a step, of all ranks (%(default)s)",
    )
    made.add_argument(
        "--epochs",
        type=_from_zero,
        default=2,
        help="how often the rows are gone through (%(default)s)",
    )
    made.add_argument(
        "--steps",
        type=_from_zero,
        help="stop after this step, counted from the first run's beginning",
    )
    made.add_argument("--columns", type=positive, default=16, help="D of the tables (%(default)s)")
    made.add_argument(
        "--table-rate", type=_rate, default=0.1, help="learning rate of the tables (%(default)s)"
    )
    made.add_argument(
        "--rate", type=_rate, default=0.003, help="learning rate of the dense parts (%(default)s)"
    )
    made.add_argument(
        "--seed",
        type=_from_zero,
        default=0,
        help="of the data and of the first weights (%(default)s)",
    )
    made.add_argument(
        "--checkpoints",
        type=_folder,
        metavar="FOLDER",
        help="save there, or below a URL; go on from what is there",
    )
    made.add_argument(
        "--save-every",
        type=positive,
        default=200,
        metavar="N",
        help="save after every N steps (%(default)s)",
    )
    made.add_argument(
        "--timeout",
        type=positive,
        default=600,
        metavar="S",
        help="seconds that a rank waits for others (%(default)s)",
    )
    made.add_argument("--no-progress", action="store_true", help="show no progress bar")
    made.add_argument(
        "--report", type=Path, metavar="FILE", help="write what was measured there, as JSON"
    )
    return made


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
    size, world_size = options.batch_size, group.size()
    if size < 1 or size % world_size:
        near = max(1, -(-size // world_size)) * world_size
        raise ValueError(
            f"--batch-size {size}: {world_size} ranks cannot share it evenly; try {near}"
        )
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


def say(text: str, group: dist.ProcessGroup) -> None:
    """Print on rank 0."""
    if group.rank() == 0:
        print(text, flush=True)


def say_speed(done: Trained, group: dist.ProcessGroup) -> None:
    """Print how long the training took."""
    say(f"{done.steps:,} steps, {done.samples:,} samples, {_speed(done):,.0f} samples/s", group)


def _speed(done: Trained) -> float:
    """Samples of all ranks in a second."""
    return done.samples / max(done.seconds, 1e-9)


def say_recall(
    model: DistributedModelParallel,
    items: int,
    test: Callable[[], Iterable[Batch]],
    popular: Tensor,
    best: Callable[[int], float],
    group: dist.ProcessGroup,
) -> dict[str, float]:
    """Print and return how often the next item is among the model's first k of all items.

    Args:
        model: of a `TwoTowerTrain`.
        items: how many items there are.
        test: makes this rank's held-out batches, with the feature ``item``.
        popular: the most popular items, best first.
        best: gives the best possible recall at k; asked on rank 0 alone.
        group: all ranks.
    """
    towers, ks = cast(Towers, model.module.model), [k for k in KS if k <= items]
    index = build_index(towers, torch.arange(items, device=popular.device))

    @torch.no_grad()
    def found(batch: Batch) -> Tensor:
        return index.retrieve(towers.queries(batch.sparse_features), max(ks))[0]

    of_model = recall_at(ks, test(), found, "item")
    of_popular = recall_at(ks, test(), lambda batch: popular.expand(len(batch.labels), -1), "item")
    for k in ks:
        limit = f"{best(k):.4f}" if group.rank() == 0 else ""
        say(
            (
                f"recall@{k}: {of_model[k]:.4f}; the {k} most popular {of_popular[k]:.4f}; best "
                f"possible {limit}"
            ),
            group,
        )
    return {f"recall@{k}": of_model[k] for k in ks}


def write_report(
    options: argparse.Namespace,
    model: DistributedModelParallel,
    done: Trained,
    metrics: Mapping[str, float],
    group: dist.ProcessGroup,
) -> None:
    """Write ``--report`` on rank 0: the options, the plan, the losses, the speed and the metrics.

    Args:
        options: of the command line.
        model: whose plan.
        done: what was trained.
        metrics: by name.
        group: all ranks.
    """
    if options.report is None or group.rank() != 0:
        return
    facts = {
        "options": {
            name: value if value is None else str(value) for name, value in vars(options).items()
        },
        "versions": {"tutorec": version("tutorec"), "torch": torch.__version__},
        "ranks": group.size(),
        "plan": dict(_placements(model.plan)),
        "steps": done.steps,
        "samples": done.samples,
        "samples_per_second": round(_speed(done), 1),
        "losses": [round(loss, 6) for loss in done.losses.tolist()],
        "metrics": dict(metrics),
    }
    with whole_file(options.report) as draft:
        draft.write_text(json.dumps(facts, indent=1) + "\n")


def plan_in_words(plan: ShardingPlan) -> str:
    """The tables of each sharding type and ranks; of more than three tables only their number."""
    groups: dict[str, list[str]] = {}
    for name, placement in _placements(plan):
        groups.setdefault(placement, []).append(name)
    return "; ".join(
        f"{kind}: {', '.join(names) if len(names) <= 3 else f'{len(names)} tables'}"
        for kind, names in groups.items()
    )


def _placements(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Each table with its sharding type and ranks."""
    for of_module in plan.plan.values():
        for name, entry in cast(EmbeddingModuleShardingPlan, of_module).items():
            yield name, f"{entry.sharding_type} on {entry.ranks}"


@dataclass(frozen=True)
class Begun:
    """Where a run begins.

    Attributes:
        step: steps that were made before.
        position: where the data stood then.
    """

    step: int = 0
    position: int = 0


def go_on(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    options: argparse.Namespace,
    group: dist.ProcessGroup,
) -> Begun:
    """Load the latest checkpoint, where the options name a folder that has one.

    Args:
        model: to be filled.
        optimizer: to be filled.
        options: of the command line.
        group: all ranks.
    """
    info = (
        None
        if options.checkpoints is None
        else CheckpointManager(options.checkpoints).load(model, optimizer)
    )
    if info is None:
        return Begun()
    say(
        (
            f"goes on from step-{info.step}, saved by {info.world_size} rank(s) after "
            f"{info.position:,} samples"
        ),
        group,
    )
    return Begun(int(info.step or 0), int(info.position))


def train_on(
    model: nn.Module,
    optimizer: KeyedOptimizer,
    batches: RowBatches,
    done: int,
    options: argparse.Namespace,
    group: dist.ProcessGroup,
) -> Trained:
    """Train to the last step, with checkpoints in the background and one at the end.

    Args:
        model: to be trained.
        optimizer: of the whole model.
        batches: this rank's, from where the run begins.
        done: steps that were made before.
        options: of the command line.
        group: all ranks.
    """
    folder, saved = options.checkpoints, done

    def save(step: int) -> None:
        nonlocal saved
        if manager is not None and step != saved:
            saved = step
            manager.save(model, optimizer, step=step, position=batches.position_after(step - done))

    def after_step(step: int) -> None:
        if step % options.save_every == 0:
            save(step)

    left = None if options.steps is None else max(options.steps - done, 0)
    with (
        nullcontext()
        if folder is None
        else CheckpointManager(folder, keep=_KEPT, asynchronous=True) as manager
    ):
        result = train(
            model,
            batches,
            optimizer,
            steps=left,
            first_step=done,
            progress=not options.no_progress,
            after_step=after_step,
            group=group,
        )
        save(done + result.steps)
    return result
