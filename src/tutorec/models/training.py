"""The loops around a model: train it, judge it. On one rank or many, the tables sharded or not.

A model here takes a batch and answers ``loss, (loss detached, logits, labels)``, as `DLRMTrain`
does::

    for batch in batches:                train(model, batches, optimizer)
        optimizer.zero_grad()
        loss, _ = model(batch)           ids travel, rows are looked up, rows travel back
        loss.backward()                  and here the other way; fused tables are updated on the way
        optimizer.step()                 the dense parts

It does so in a `TrainPipelineSparseDist`: the ids of the next batch travel while this one is
trained, and the results are those of the loop, bit for bit. Every rank calls these functions at the
same time, with as many batches as the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tutorec._check import require_int, warn_caller
from tutorec.datasets.utils import Batch
from tutorec.distributed import comm
from tutorec.distributed.train_pipeline.streams import to_device
from tutorec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tutorec.models.metrics import auc, base_entropy
from tutorec.models.step_reports import (
    OnStep,
    StepReports,
    gathered,
    over_ranks,
    refuse_not_finite,
)
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter

_STAGE = "metrics"
_SHOW_EVERY = 10  # steps: the bar's loss is read so rarely because reading waits for the device


@dataclass(frozen=True)
class Metrics:
    """Quality of a click model's predictions, over the samples of all ranks.

    Attributes:
        auc: how often a click is scored above a non-click.
        normalized_entropy: log loss over that of always predicting the mean click rate.
        loss: mean log loss, in nats.
        samples: over how many samples.
    """

    auc: float
    normalized_entropy: float
    loss: float
    samples: int

    def __str__(self) -> str:
        return (
            f"AUC {self.auc:.4f}, normalized entropy {self.normalized_entropy:.4f}, log loss "
            f"{self.loss:.4f} over {self.samples:,} samples"
        )


@dataclass(frozen=True)
class Trained:
    """The result of :func:`train`.

    Attributes:
        losses: [steps] in float64: the loss of each step, over the samples of all ranks.
        samples: samples that all ranks together have trained with.
        seconds: how long it took, in wall time.
    """

    losses: Tensor
    samples: int
    seconds: float

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.losses)


def combined_optimizer(
    model: nn.Module, dense: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> CombinedOptimizer:
    """One optimizer for the whole model: the fused tables' and one for all other parameters.

    The tables that are fused are trained by the optimizer that was named for them before sharding,
    see `DistributedModelParallel`, and all other parameters by ``dense``, under every plan.

    A schedule of learning rates reaches both. One that looks at the loss has to be given a loss
    that all ranks share: ranks whose own losses lower their rates at different steps drift apart.

    Args:
        model: a `DistributedModelParallel`, or a plain module.
        dense: makes the optimizer of the parameters that backward does not update.

    Returns:
        Both as one. Where everything is fused, or nothing is, that one alone.

    Raises:
        ValueError: ``dense`` leaves out a parameter, so that no optimizer trains it; or two train
            one.

    Example:
        >>> import torch
        >>> from tutorec.models.training import combined_optimizer
        >>> optimizer = combined_optimizer(
        ...     torch.nn.Linear(2, 1), lambda params: torch.optim.Adam(params, lr=0.01)
        ... )
        >>> sorted(optimizer.params)
        ['bias', 'weight']
    """
    optimizers: list[KeyedOptimizer] = []
    fused = getattr(model, "fused_optimizer", None)
    if isinstance(fused, KeyedOptimizer):
        optimizers.append(fused)
    other_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    if other_parameters:
        optimizers.append(KeyedOptimizerWrapper(other_parameters, dense))
    combined = CombinedOptimizer(optimizers)
    _check_each_is_trained("combined_optimizer", model, combined)

    return combined


def _check_each_is_trained(caller: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn of parameters that no optimizer trains, and refuse those that two train.

    Raises:
        ValueError: Two optimizers train a parameter.
    """
    trained = Counter(id(weight) for group in optimizer.param_groups for weight in group["params"])
    untrained = []
    twice = []
    for name, parameter in model.named_parameters():
        in_backward = hasattr(parameter, "_in_backward_optimizers")
        if parameter.requires_grad and not in_backward and not trained[id(parameter)]:
            untrained.append(name)
        if trained[id(parameter)] > 1:
            twice.append(name)

    if twice:
        raise ValueError(
            f"{caller}: two optimizers train {', '.join(map(repr, twice))}, and each step would "
            "move them twice: give each parameter to one of them"
        )

    if untrained:
        warn_caller(
            f"{caller}: no optimizer trains {', '.join(map(repr, untrained))}: give them to the "
            "optimizer, or say that they stay as they are, requires_grad_(False)"
        )


def train(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    steps: int | None = None,
    first_step: int = 0,
    progress: bool = True,
    after_step: Callable[[int], None] | None = None,
    on_step: OnStep | None = None,
    report_every: int = 10,
    group: dist.ProcessGroup | None = None,
) -> Trained:
    """Train until the batches end, or for some steps.

    Args:
        model: answers a batch with ``loss, (loss detached, logits, labels)``.
        batches: this rank's.
        optimizer: steps everything that backward does not update; see :func:`combined_optimizer`.
        steps: most steps to make; None: as many as there are batches.
        first_step: steps that were made before, in an earlier run: the numbers go on from there.
        progress: show a bar on rank 0, on standard error.
        after_step: called after each step with its number, the first is 1: to save, to evaluate. Up
            to two batches more have been taken from ``batches`` then.
        on_step: called on every rank with a `StepReport` of the last steps: to log the loss, or to
            stop early. The run ends on all ranks when it returns True on one.
        report_every: steps in a report; the last one may have fewer. A report waits for the device
            and for the other ranks.
        group: the ranks; by default all of the default process group, or this process alone where
            there is none.

    Returns:
        The losses of all steps, and how many samples were seen; the same on every rank.

    A step for which no rank has samples has the loss 0. The replicas of a `DMPCollection` are
    averaged after each batch.

    Warns:
        UserWarning: no optimizer trains a parameter, before the first step.

    Raises:
        FloatingPointError: the loss of a step was NaN or infinite. It names the tables that hold
            NaN. It is raised on every rank, at the next report or at the end: a rank that stopped
            alone would leave the others waiting.
        ValueError: a rank is given fewer batches than another, or ``steps`` is negative. Batches
            that do not say how many they are cannot be counted before: the others then wait until
            the group's timeout. Two optimizers train a parameter.
        TypeError: the model answers with something else.

    Example:
        >>> import torch
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.training import train
        >>> class Dense(torch.nn.Linear):  # the smallest click model
        ...     def forward(self, batch):
        ...         logits = super().forward(batch.dense_features).squeeze(1)
        ...         loss = torch.nn.functional.binary_cross_entropy_with_logits(
        ...             logits, batch.labels
        ...         )
        ...         return loss, (loss.detach(), logits.detach(), batch.labels)
        >>> model = Dense(4, 1)
        >>> done = train(
        ...     model,
        ...     shop().batches(100),
        ...     torch.optim.SGD(model.parameters(), 0.1),
        ...     steps=5,
        ...     progress=False,
        ... )
        >>> done.steps, done.samples
        (5, 500)
    """
    group = group or comm.default_group()
    _check_each_is_trained("train", model, optimizer)
    _agree_on_steps("train", batches, steps, group)

    reports = None
    if on_step is not None:
        require_int("train: report_every", report_every, 1)
        reports = StepReports(model, optimizer, on_step, report_every, group)

    began = time.perf_counter()
    losses: list[Tensor] = []
    sizes: list[int] = []
    model.train()
    total = steps if steps is not None else length_hint(batches) or None
    with _bar(progress, total, group) as show:
        for step, (detached, _, labels) in enumerate(
            _pipelined(model, islice(batches, steps), optimizer), first_step + 1
        ):
            losses.append(detached)
            sizes.append(len(labels))
            show(detached)
            if after_step is not None:
                after_step(step)
            if reports is not None and reports.add(step, detached, len(labels)):
                break

    total, weight = over_ranks(losses, sizes, _device_of(model), group).unbind(1)
    mean = total / weight.clamp(min=1)
    refuse_not_finite(mean, first_step + 1, model, group)
    if reports is not None:
        reports.finish(first_step + len(losses))
    return Trained(mean, int(weight.sum()), time.perf_counter() - began)


def _pipelined(
    model: nn.Module, batches: Iterator[Batch], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Train with each batch; what the model says of it."""
    pipeline: TrainPipelineSparseDist[Batch, tuple[Tensor, Tensor, Tensor]] = (
        TrainPipelineSparseDist(
            model,
            optimizer,
            _device_of(model),
            pipeline_postproc=True,
            custom_model_fwd=lambda batch: _answer("train", model, batch),
        )
    )
    try:
        with suppress(StopIteration):
            while True:
                yield pipeline.progress(batches)
    finally:
        pipeline.detach()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    progress: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Metrics:
    """Evaluate a click model on the samples of all ranks; the mean of the ranks' AUCs would differ.

    Nothing is trained; a fused table stays as it is, and so does its optimizer. Every rank gets the
    logits and labels of all, 8 bytes a sample.

    Args:
        model: answers a batch with ``loss, (loss detached, logits, labels)``.
        batches: this rank's.
        progress: show a bar on rank 0, on standard error.
        group: the ranks; by default all of the default process group, or this process alone where
            there is none.

    Returns:
        The metrics, the same on every rank.

    Raises:
        TypeError: the model answers with something else.
        ValueError: there are no samples, a logit is NaN, or all labels are of one class; a rank is
            given fewer batches than another, see :func:`train`.

    Example:
        >>> import torch
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.training import evaluate
        >>> class Cheap(torch.nn.Module):  # the larger the discount, the likelier the click
        ...     def forward(self, batch):
        ...         logits = batch.dense_features[:, 3]
        ...         return logits.mean(), (logits.mean(), logits, batch.labels)
        >>> 0.5 < evaluate(Cheap(), shop().batches(4096, split="test")).auc < 0.65
        True
    """
    group = group or comm.default_group()
    _agree_on_steps("evaluate", batches, None, group)
    was_training = model.training
    columns = []
    device = _device_of(model)

    model.eval()
    try:
        with _bar(progress, length_hint(batches) or None, group) as show:
            for batch in batches:
                loss, (_, logits, labels) = _answer("evaluate", model, to_device(batch, device))
                columns.append(
                    torch.stack([logits.float().reshape(-1), labels.float().reshape(-1)])
                )
                show(loss)
    finally:
        model.train(was_training)

    local = torch.cat(columns, 1) if columns else torch.zeros(2, 0, device=device)
    per_rank = gathered(local.t().reshape(-1), group)
    logits, labels = torch.cat(per_rank).cpu().view(-1, 2).unbind(1)
    area = auc(labels, logits)  # refuses what has no AUC, before a number is divided by zero
    loss = float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))
    return Metrics(area, loss / base_entropy(labels), loss, len(labels))


def _answer(
    caller: str, model: nn.Module, batch: Any
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A click model's answer to a batch.

    Raises:
        TypeError: It is something else.
    """
    output = model(batch)
    if isinstance(output, tuple) and len(output) == 2:
        loss, details = output
        if isinstance(details, tuple | list) and len(details) == 3:
            detached, logits, labels = details
            if all(isinstance(value, Tensor) for value in (loss, detached, logits, labels)):
                return loss, (detached, logits, labels)

    raise TypeError(
        f"{caller}: the model answers a batch with {_form(output)}, and a click model answers with "
        "loss, (loss.detach(), logits.detach(), labels): let its forward return these, as "
        "DLRMTrain's does; TrainPipelineSparseDist trains a model with other results"
    )


def _form(result: Any) -> str:
    """The form of a result: ``(a tensor [], a dict)``."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(_form, result))})"

    return (
        f"a tensor {list(result.shape)}"
        if isinstance(result, Tensor)
        else f"a {type(result).__name__}"
    )


def _device_of(model: nn.Module) -> torch.device:
    """The device of the model; a rank without batches sends an empty tensor from it."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _agree_on_steps(
    caller: str, batches: Iterable[Batch], steps: int | None, group: dist.ProcessGroup | None
) -> None:
    """Compare the ranks' numbers of batches where known: with fewer, one would let others wait.

    Raises:
        ValueError: they differ.
    """
    if group is None or group.size() == 1:
        return

    most = -1 if steps is None else steps
    known = length_hint(batches, -1)
    planned = max(most, known) if min(most, known) < 0 else min(most, known)
    counts = [count for (count,) in comm.all_gather_ints([planned], group, _STAGE)]
    if len({count for count in counts if count >= 0}) > 1:
        numbers = ", ".join(
            f"rank {rank} {'an unknown number' if n < 0 else n}" for rank, n in enumerate(counts)
        )
        raise ValueError(
            f"{caller}: ranks have different numbers of batches: {numbers}; give the others "
            "empty batches"
        )


@contextmanager
def _bar(
    progress: bool, steps: int | None, group: dist.ProcessGroup | None
) -> Iterator[Callable[[Tensor], None]]:
    """A progress bar of rank 0 with a late loss; yields a function to call after each step."""
    if not progress or (group is not None and group.rank() != 0):
        yield lambda loss: None
        return
    from tqdm import tqdm

    with tqdm(total=steps, unit="step", dynamic_ncols=True, mininterval=0.5) as bar:

        def show(loss: Tensor) -> None:
            if bar.n % _SHOW_EVERY == 0:
                bar.set_postfix(loss=f"{float(loss):.4f}", refresh=False)
            bar.update()

        yield show
