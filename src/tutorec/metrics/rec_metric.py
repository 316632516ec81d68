"""A metric over all samples so far, and over a window of the last ones, right over ranks.

A computation holds *states*: tensors with one number for each task. `update` adds a batch to them
on this rank; `compute` reduces them over the ranks, and returns the reports of what they give.
TorchRec's ``metrics/rec_metric.py`` has the same classes on top of torchmetrics; this file needs
torch alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tutorec.distributed.comm import all_gather, all_gather_ints, default_group
from tutorec.metrics.metrics_namespace import MetricNameBase, MetricPrefix

# A window holds the sums of at most so many batches, as TorchRec's does.
MAX_BUFFER_COUNT = 1000

_STAGE = "metrics"
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(dim=0),
    "mean": lambda values: values.mean(dim=0),
    "max": lambda values: values.amax(dim=0),
    "min": lambda values: values.amin(dim=0),
}


class RecMetricException(ValueError):
    """A metric cannot be computed from its input."""


@dataclass
class MetricComputationReport:
    """One number for each task.

    Args:
        name: What was computed.
        metric_prefix: Over which samples.
        value: ``[n_tasks]``.
        description: A remark of the metric's author.
    """

    name: MetricNameBase
    metric_prefix: MetricPrefix
    value: Tensor
    description: str | None = None


class WindowBuffer:
    """The batches that a window's state is the sum of, oldest first.

    Args:
        max_size: The most samples in the window.
        max_buffer_count: The most batches.
    """

    def __init__(self, max_size: int, max_buffer_count: int) -> None:
        self.max_size = max_size
        self.max_buffer_count = max_buffer_count
        self.batches: deque[tuple[Tensor, int]] = deque()
        self.samples = 0

    def aggregate_state(self, window_state: Tensor, curr_state: Tensor, size: int) -> None:
        """Add a batch of ``size`` samples to the window's state, and subtract those that left."""
        self.batches.append((curr_state.clone(), size))
        self.samples += size
        window_state += curr_state

        while self.samples > self.max_size or len(self.batches) > self.max_buffer_count:
            oldest, its_size = self.batches.popleft()
            self.samples -= its_size
            window_state -= oldest


class RecMetricComputation(nn.Module, ABC):
    """States of a metric for several tasks at once; a metric overrides `update` and `_compute`.

    States are buffers: they move with the module, and the persistent ones are in its
    ``state_dict()``.

    Args:
        my_rank: This rank. Rank 0 alone gets reports, unless ``compute_on_all_ranks``.
        batch_size: Samples in a batch of one rank, B.
        n_tasks: Tasks that are judged at once; inputs are ``[n_tasks, B]``.
        window_size: The most samples of this rank in the window.
        compute_on_all_ranks: Whether every rank gets the reports.
        process_group: The ranks; None is the default group, or this process alone.

    Example:
        >>> import torch
        >>> from tutorec.metrics.mse import MSEMetricComputation
        >>> mse = MSEMetricComputation(my_rank=0, batch_size=2, n_tasks=1, window_size=2)
        >>> for prediction in (1.0, 3.0):
        ...     mse.update(
        ...         predictions=torch.full((1, 2), prediction),
        ...         labels=torch.zeros(1, 2),
        ...         weights=torch.ones(1, 2),
        ...     )
        >>> [(f"{r.metric_prefix}{r.name}", r.value.item()) for r in mse.compute()][::2]
        [('lifetime_mse', 5.0), ('window_mse', 9.0)]
    """

    def __init__(
        self,
        my_rank: int,
        batch_size: int,
        n_tasks: int,
        window_size: int,
        compute_on_all_ranks: bool = False,
        *,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._my_rank = my_rank
        self._batch_size = batch_size
        self._n_tasks = n_tasks
        self._window_size = window_size
        self._compute_on_all_ranks = compute_on_all_ranks
        self._group = process_group

        self._windows: dict[str, WindowBuffer] = {}
        self._defaults: dict[str, Tensor | list[Tensor]] = {}
        self._reductions: dict[str, Callable[[Tensor], Tensor]] = {}

    @staticmethod
    def get_window_state_name(state_name: str) -> str:
        """Name of the window's state; the lifetime's state has ``state_name``."""
        return f"window_{state_name}"

    def get_window_state(self, state_name: str) -> Tensor:
        """The window's state, ``[n_tasks]``."""
        return getattr(self, self.get_window_state_name(state_name))

    def _add_state(
        self,
        name: str,
        default: Tensor | list[Tensor],
        add_window_state: bool,
        dist_reduce_fx: str | Callable[[Tensor], Tensor] = "sum",
        persistent: bool = False,
    ) -> None:
        """Add a state; the metric finds it as the attribute ``name``.

        Args:
            name: The attribute.
            default: The value at the start, with ``n_tasks`` as its first dimension; or an empty
                list, for tensors ``[..., samples]`` that ranks concatenate.
            add_window_state: Whether a second state holds the window.
            dist_reduce_fx: sum, mean, max, min, or a function of the states of all ranks, stacked.
            persistent: Whether it is in ``state_dict()``. A window never is.

        Raises:
            RuntimeError: ``add_window_state`` is set and ``window_size`` is 0.
        """
        if add_window_state and self._window_size <= 0:
            raise RuntimeError(
                f"{type(self).__name__}: state {name!r} has a window, and window_size is "
                f"{self._window_size}: pass the number of samples in the window"
            )
        self._defaults[name] = default
        if isinstance(default, list):
            setattr(self, name, list(default))
            return

        named = isinstance(dist_reduce_fx, str)
        self._reductions[name] = _REDUCTIONS[dist_reduce_fx] if named else dist_reduce_fx
        self.register_buffer(name, default.clone(), persistent=persistent)
        if add_window_state:
            window = self.get_window_state_name(name)
            self._add_state(window, default, False, dist_reduce_fx)
            self._windows[window] = WindowBuffer(self._window_size, MAX_BUFFER_COUNT)

    def _aggregate_window_state(self, state_name: str, state: Tensor, num_samples: int) -> None:
        """Add a batch to the window of a state."""
        window = self.get_window_state_name(state_name)
        self._windows[window].aggregate_state(getattr(self, window), state, num_samples)

    @abstractmethod
    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Add a batch: predictions, labels and weights of the samples, ``[n_tasks, B]`` each."""

    @abstractmethod
    def _compute(self) -> list[MetricComputationReport]:
        """The reports, from states that hold all ranks' samples."""

    def pre_compute(self) -> None:
        """Called before states are reduced; a metric may override it."""

    @torch.no_grad()
    def compute(self) -> list[MetricComputationReport]:
        """The reports over the samples of all ranks; every rank calls it, rank 0 gets them.

        The states of this rank stay as they are.
        """
        self.pre_compute()
        states = {name: getattr(self, name) for name in self._defaults}
        group = self._group or default_group()

        try:
            if group is not None and group.size() > 1:
                for name, state in states.items():
                    setattr(self, name, self._gathered(name, state, group))
            if self._my_rank != 0 and not self._compute_on_all_ranks:
                return []
            return self._compute()
        finally:
            for name, state in states.items():
                setattr(self, name, state)

    def local_compute(self) -> list[MetricComputationReport]:
        """The reports over the samples of this rank."""
        return self._compute()

    def reset(self) -> None:
        """Forget all samples."""
        for name, default in self._defaults.items():
            if isinstance(default, list):
                setattr(self, name, list(default))
            else:
                getattr(self, name).copy_(default)
        for name in self._windows:
            self._windows[name] = WindowBuffer(self._window_size, MAX_BUFFER_COUNT)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RecMetricComputation:
        """Also move what is not a buffer: lists of tensors, and the batches of windows."""
        super()._apply(fn, recurse)
        for name, default in self._defaults.items():
            if isinstance(default, list):
                self._defaults[name] = [fn(tensor) for tensor in default]
                setattr(self, name, [fn(tensor) for tensor in getattr(self, name)])

        for window in self._windows.values():
            window.batches = deque((fn(added), size) for added, size in window.batches)
        return self

    def _gathered(self, name: str, state: Any, group: ProcessGroup) -> Any:
        if isinstance(state, list):
            joined = torch.cat(state, dim=-1)
            return [torch.cat(_gather(joined, group), dim=-1)]
        return self._reductions[name](torch.stack(_gather(state, group)))


def _gather(local: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks, which differ in their last dimension at most."""
    lengths = [length for (length,) in all_gather_ints([local.shape[-1]], group, _STAGE)]
    rows = local.shape[:-1]
    counts = [rows.numel() * length for length in lengths]
    flat = all_gather(local.reshape(-1), counts, group, _STAGE).wait()
    tensors = flat.split(counts)
    return [tensor.view(*rows, length) for tensor, length in zip(tensors, lengths, strict=True)]


class SumsOfSamples(RecMetricComputation):
    """A metric that is a function of sums over samples, such as a mean.

    A subclass names its sums in `SUMS`, and overrides `sums`, which has them for one batch, and
    `values`, which makes the metric of them.
    """

    SUMS: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in self.SUMS:
            zeros = torch.zeros(self._n_tasks, dtype=torch.double)
            self._add_state(name, zeros, add_window_state=True, persistent=True)

    @abstractmethod
    def sums(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Each sum over one batch, ``[n_tasks]``."""

    @abstractmethod
    def values(self, sums: Mapping[str, Tensor]) -> dict[MetricNameBase, Tensor]:
        """The reported values, from the sums over samples, ``[n_tasks]`` each."""

    @torch.no_grad()
    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Add a batch: predictions, labels and weights of the samples, ``[n_tasks, B]`` each.

        Raises:
            RecMetricException: An input is missing, or shapes differ.
        """
        checked = check_inputs(self, predictions=predictions, labels=labels, weights=weights)
        for name, added in self.sums(**checked, **kwargs).items():
            getattr(self, name).add_(added)
            self._aggregate_window_state(name, added, labels.shape[-1])

    def _compute(self) -> list[MetricComputationReport]:
        lifetime = {name: getattr(self, name) for name in self.SUMS}
        window = {name: self.get_window_state(name) for name in self.SUMS}
        return [
            *_reports(MetricPrefix.LIFETIME, self.values(lifetime)),
            *_reports(MetricPrefix.WINDOW, self.values(window)),
        ]


def _reports(
    prefix: MetricPrefix, values: Mapping[MetricNameBase, Tensor]
) -> Iterable[MetricComputationReport]:
    return [MetricComputationReport(name, prefix, value) for name, value in values.items()]


def check_inputs(metric: RecMetricComputation, **inputs: Tensor | None) -> dict[str, Tensor]:
    """The inputs of `update`, none of them missing and all of the same shape.

    Raises:
        RecMetricException: One is None, or is not ``[n_tasks, B]`` as the others.
    """
    title = type(metric).__name__
    present = {name: value for name, value in inputs.items() if value is not None}
    missing = inputs.keys() - present.keys()
    if missing:
        raise RecMetricException(f"{title}.update needs {' and '.join(sorted(missing))}, not None")

    shapes = {name: tuple(value.shape) for name, value in present.items()}
    tasks = {shape[0] if len(shape) == 2 else None for shape in shapes.values()}
    if len(set(shapes.values())) > 1 or tasks != {metric._n_tasks}:
        raise RecMetricException(
            f"{title}.update needs tensors [{metric._n_tasks} tasks, samples], not {shapes}"
        )
    return present


def weighted_mean(total: Tensor, weight: Tensor) -> Tensor:
    """A sum over its weight; 0 if the weight is 0."""
    return torch.where(weight == 0.0, 0.0, total / weight)
