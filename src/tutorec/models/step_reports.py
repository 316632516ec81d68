"""Numbers to log while a model trains, the same on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.gradient_norm import NormOverRanks

_STAGE = "metrics"
_SHOWN = 5  # names in an error
_TABLE = re.compile(r"\.(embedding_bags|embeddings)\.[^.]+\.weight$")


@dataclass(frozen=True)
class StepReport:
    """Some steps of `train`, over the samples of all ranks.

    Attributes:
        step: number of the last one; the first step of a run is 1.
        loss: mean over the samples since the report before.
        samples: how many these are.
        samples_per_second: how many a second, in wall time.
        learning_rates: those of the optimizer's parameter groups, each once, the largest first.
        gradient_norm: 2-norm of the gradients of the last step, as ``optimizer.step()`` saw them;
            None where backward updates all parameters, and keeps no gradient.
    """

    step: int
    loss: float
    samples: int
    samples_per_second: float
    learning_rates: tuple[float, ...]
    gradient_norm: float | None


OnStep = Callable[[StepReport], bool | None]


class StepReports:
    """Collects steps, and reports every so many of them. Every rank adds the same steps.

    Args:
        model: the model, sharded or not.
        optimizer: its learning rates are reported.
        on_step: called on every rank with a report; True of any rank ends the run on all.
        every: steps in a report.
        group: the ranks; None is this process alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        on_step: OnStep,
        every: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._on_step = on_step
        self._every = every
        self._group = group
        alone = ShardingEnv.from_local(1, 0)
        env = alone if group is None else ShardingEnv.from_process_group(group)
        self._norm = NormOverRanks(model, env)
        self._begin_report()

    def _begin_report(self) -> None:
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._began = time.perf_counter()

    def add(self, step: int, loss: Tensor, samples: int) -> bool:
        """Add a step; True when the run is to end.

        Args:
            step: its number.
            loss: [], mean over this rank's samples.
            samples: how many these are.

        Raises:
            FloatingPointError: the loss is NaN or infinite; on every rank.
        """
        self._losses.append(loss)
        self._sizes.append(samples)
        if len(self._losses) < self._every:
            return False

        return self._report(step)

    def finish(self, step: int) -> None:
        """Report the steps after the last report, if there are any."""
        if self._losses:
            self._report(step)

    def _report(self, step: int) -> bool:
        device = self._losses[0].device
        sums = over_ranks(self._losses, self._sizes, device, self._group)
        means = sums[:, 0] / sums[:, 1].clamp(min=1)
        refuse_not_finite(means, step - len(means) + 1, self._model, self._group)

        total, count = sums.sum(dim=0).tolist()
        seconds = time.perf_counter() - self._began
        report = StepReport(
            step=step,
            loss=total / max(count, 1.0),
            samples=int(count),
            samples_per_second=count / max(seconds, 1e-9),
            learning_rates=self._learning_rates(),
            gradient_norm=self._gradient_norm(),
        )

        ends = bool(self._on_step(report))
        if self._group is not None:
            ends = any(
                any(rank_ends) for rank_ends in comm.all_gather_ints([ends], self._group, _STAGE)
            )
        self._begin_report()
        return ends

    def _learning_rates(self) -> tuple[float, ...]:
        rates = {float(group["lr"]) for group in self._optimizer.param_groups}
        if self._group is not None:  # a rank without tables has fewer groups
            rates = set().union(*comm.all_gather_objects(rates, self._group, _STAGE))
        return tuple(sorted(rates, reverse=True))

    def _gradient_norm(self) -> float | None:
        replicated: list[Tensor] = []
        sharded: list[Tensor] = []
        for parameter in self._model.parameters():
            grad = parameter.grad
            if grad is None:
                continue

            values = grad.coalesce().values() if grad.is_sparse else grad
            norms = sharded if self._norm.is_sharded(parameter) else replicated
            norms.append(values.detach().double().square().sum())

        zero = torch.zeros((), dtype=torch.float64)
        squares = self._norm(torch.stack(sharded).sum() if sharded else zero, largest=False).cpu()
        if replicated:
            squares = squares + torch.stack(replicated).sum().cpu()
        return float(squares.sqrt()) if replicated or sharded else None


def over_ranks(
    losses: list[Tensor],
    sizes: list[int],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Loss times samples, and samples, of each step over all ranks, ``[steps, 2]`` in float64.

    Args:
        losses: mean loss of each step on this rank, [].
        sizes: this rank's samples in each step.
        device: that of the losses.
        group: the ranks; None is this process alone.

    Raises:
        ValueError: ranks made different numbers of steps.
    """
    none = torch.zeros(0, dtype=torch.float64, device=device)
    local = torch.stack(losses).double() if losses else none
    weights = torch.tensor(sizes, dtype=torch.float64, device=device)
    # A mean over no samples may be NaN; it counts for nothing.
    products = torch.where(weights > 0, local * weights, 0.0)
    per_rank = gathered(torch.stack([products, weights], dim=1).view(-1), group)
    counts = [len(sums) // 2 for sums in per_rank]
    if len(set(counts)) > 1:
        raise ValueError(
            f"ranks made different numbers of steps: {counts}; give every rank as many batches"
        )

    return torch.stack(per_rank).sum(dim=0).cpu().view(-1, 2)


def gathered(local: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Flat tensors of all ranks, rank 0's first."""
    if group is None or group.size() == 1:
        return [local]
    counts = [count for (count,) in comm.all_gather_ints([local.numel()], group, _STAGE)]
    return [*comm.all_gather(local.contiguous(), counts, group, _STAGE).wait().split(counts)]


def refuse_not_finite(
    losses: Tensor, first_step: int, model: nn.Module, group: dist.ProcessGroup | None
) -> None:
    """Raise on every rank where a loss is not finite. Losses [steps] are those of all ranks.

    Args:
        losses: of the steps from ``first_step`` on.
        first_step: the number of the first of them.
        model: its tables with rows that are not finite are named.
        group: the ranks.

    Raises:
        FloatingPointError: a loss is NaN or infinite.
    """
    bad = (~losses.isfinite()).nonzero()
    if not len(bad):
        return

    step = int(bad[0])
    message = f"the loss of step {first_step + step} is {float(losses[step])}"
    if len(losses) > 1:
        message += f", and {len(bad)} of {len(losses)} are not finite"
    message += ": lower the learning rate, or look for NaN in the dense columns"

    names = _not_finite(model, group)
    tables = [name.split(".")[-2] for name in names if _TABLE.search(name)]
    if tables:
        listed = ", ".join(map(repr, tables[:_SHOWN]))
        more = f" and {len(tables) - _SHOWN} more" if len(tables) > _SHOWN else ""
        message += f"; NaN or infinite is in rows of {listed}{more}"
    if len(names) > len(tables):
        message += f"; {len(names) - len(tables)} dense parameters are not finite"
    raise FloatingPointError(message)


def _not_finite(model: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
    """Names of parameters that hold NaN or infinity on any rank."""
    local = [
        name
        for name, parameter in model.named_parameters()
        if not bool(parameter.detach().sum(dtype=torch.float64).isfinite())
    ]
    if group is None:
        return local
    per_rank = comm.all_gather_objects(local, group, _STAGE)
    return list(dict.fromkeys(name for names in per_rank for name in names))
