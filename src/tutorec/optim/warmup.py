"""Learning rate schedules in stages, by the number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any

import torch

from tutorec.optim.keyed import KeyedOptimizer, OptimizerWrapper
from tutorec.optim.keyed_state import check_form, check_state, load_state
from tutorec.optim.rates import check_rate

_STATE = "warmup"
_LAST_ITER = 1 << 63


@unique
class WarmupPolicy(Enum):
    """The factor of the learning rate as a function of the number t of steps; ``v`` is ``value``.

    ==================================  ============================================================
    NONE                                1
    LINEAR                              from ``v`` to 1: ``v + (1 - v) * t / max_iters``
    CONSTANT                            ``v``
    POLY                                ``(1 - t / decay_iters) ** v``; 0 from ``decay_iters`` on
    STEP                                ``v ** (t // decay_iters)``
    INVSQRT                             ``1 / sqrt(t)``, and 1 before the first step
    COSINE_ANNEALING_WARM_RESTARTS      cosine from 1 to ``v``, restarted every ``sgdr_period``
    INTERPOLATE                         from ``v`` at ``start_interpolating_iters`` to ``end_value``
    ==================================  ============================================================

    Source:
        TorchRec's ``torchrec.optim.warmup.WarmupPolicy``.
    """

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@dataclass
class WarmupStage:
    """A stage of the schedule: the steps up to ``max_iters``, counted from the start of training.

    Args:
        policy: The policy.
        max_iters: The last step of the stage, not its length.
        value: See the policy.
        lr_scale: A further factor.
        decay_iters: For POLY, by default ``max_iters``, and for STEP, by default 1.
        sgdr_period: Steps between restarts.
        start_interpolating_iters: For INTERPOLATE: the step at which the factor is ``value``.
        end_value: For INTERPOLATE: the factor at ``max_iters``.

    Example:
        >>> WarmupStage(WarmupPolicy.LINEAR, max_iters=100, value=0.1).policy
        <WarmupPolicy.LINEAR: 'linear'>

    Source:
        TorchRec's ``torchrec.optim.warmup.WarmupStage``.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None


class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rate of all groups by a schedule: at construction, and after each step.

    Fused tables follow it, too: they read the rate from their parameter group at the next forward.
    After the last stage the rate is ``lr``. The number of steps is state, stored under the name of
    a parameter without elements.

    Args:
        optimizer: The optimizer whose rates are set.
        stages: In the order of their ``max_iters``.
        lr: The rate for a factor of 1; it replaces the rates of all groups.
        lr_param: Key of the rate in the groups.
        param_name: Name of the parameter that represents the schedule in ``params`` and
            ``state_dict()``.

    Raises:
        ValueError: Stages are not in order, a rate is negative or NaN, no group has ``lr_param``,
            or ``param_name`` is already used.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> from tutorec.optim.keyed import KeyedOptimizerWrapper
        >>> dense = KeyedOptimizerWrapper(
        ...     {"weight": layer.weight}, lambda params: torch.optim.SGD(params, lr=9.0)
        ... )
        >>> warm = WarmupOptimizer(
        ...     dense, [WarmupStage(WarmupPolicy.LINEAR, max_iters=2, value=0.5)], lr=0.1
        ... )
        >>> rates = [warm.param_groups[0]["lr"]] + [
        ...     warm.step() or warm.param_groups[0]["lr"] for _ in range(3)
        ... ]
        >>> [round(rate, 3) for rate in rates]
        [0.05, 0.075, 0.1, 0.1]

    Source:
        TorchRec's ``torchrec.optim.warmup.WarmupOptimizer``.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        self._stages = _checked_stages(stages)
        self._lr = check_rate(lr, "WarmupOptimizer")
        self._lr_param = lr_param
        self._param_name = param_name

        if param_name in optimizer.params:
            raise ValueError(f"param_name={param_name!r} is the name of a parameter already")
        known = {key for group in optimizer.param_groups for key in group if key != "params"}
        if lr_param != "lr" and optimizer.param_groups and lr_param not in known:
            raise ValueError(f"lr_param={lr_param!r} is in no parameter group; they have {known}")

        self._parameter = torch.nn.Parameter(torch.empty(0))
        # State of the schedule; created at the first step, like that of torch's optimizers.
        self._progress: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._set_rate()

    @property
    def params(self) -> Mapping[str, torch.Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name -> parameter, including the one that represents the schedule."""
        return {**self._optimizer.params, self._param_name: self._parameter}

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter -> its state, including ``{"warmup": [steps made, stage]}``."""
        return {**self._optimizer.state, **self._progress}

    @property
    def own_state(self) -> dict[torch.Tensor, Any]:
        """``{"warmup": [steps made, stage]}`` of the parameter that represents the schedule."""
        return self._progress

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step with the current rate, then set the rate of the next step."""
        loss = super().step(closure)

        steps, stage = self._position()
        steps += 1
        if steps > self._stages[stage].max_iters and stage + 1 < len(self._stages):
            stage += 1
        self._progress[self._parameter] = {_STATE: torch.tensor([steps, stage])}
        self._set_rate()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer, and the position in the schedule."""
        state_dict = super().state_dict()
        if not self._progress:
            return state_dict

        return {
            **state_dict,
            "state": {
                **state_dict["state"],
                self._param_name: dict(self._progress[self._parameter]),
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state and the position in the schedule, and set the rate.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``. Nothing has been changed.
        """
        self.check_state_dict(state_dict)
        progress = state_dict["state"].get(self._param_name)
        if progress is not None:
            self._progress.setdefault(self._parameter, {_STATE: torch.zeros(2, dtype=torch.long)})
            load_state(self._progress[self._parameter], progress)
        super().load_state_dict(self._inner_state(state_dict))

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if ``load_state_dict`` would raise, and change nothing.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``.
        """
        super().check_state_dict(self._inner_state(state_dict))
        progress = state_dict["state"].get(self._param_name)
        if progress is None:
            if self._progress:
                raise ValueError(
                    f"Parameter {self._param_name} not found: what is loaded was stored without a "
                    "WarmupOptimizer, or before its first step; load it into the wrapped optimizer"
                )
            return

        check_state({_STATE: torch.zeros(2)}, progress, [self._param_name])
        steps, stage = (int(number) for number in progress[_STATE].tolist())
        if steps < 0 or not 0 <= stage < len(self._stages):
            raise ValueError(
                f"{self._param_name} in what is loaded is at step {steps} in stage {stage}, and "
                f"there are {len(self._stages) - 1} stages here: load with the stages that it was "
                "stored with"
            )

    def post_load_state_dict(self) -> None:
        """Set the rate of the loaded position."""
        super().post_load_state_dict()
        self._set_rate()

    def _position(self) -> tuple[int, int]:
        """Number of steps made, and the stage of the next step."""
        if not self._progress:
            return 0, 0
        steps, stage = self._progress[self._parameter][_STATE].tolist()
        return steps, stage

    def _set_rate(self) -> None:
        steps, stage = self._position()
        rate = self._lr * (_factor(self._stages[stage], steps) * self._stages[stage].lr_scale)
        check_rate(rate, f"WarmupOptimizer at step {steps} in {self._stages[stage]}")
        for group in self.param_groups:
            group[self._lr_param] = rate

    def _inner_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        check_form(state_dict)
        others = {
            name: state for name, state in state_dict["state"].items() if name != self._param_name
        }
        return {**state_dict, "state": others}


def _checked_stages(stages: Sequence[WarmupStage]) -> list[WarmupStage]:
    """The stages with defaults filled in, and a final stage with factor 1 and no end."""
    filled: list[WarmupStage] = []
    for stage in stages:
        stage = replace(stage, policy=WarmupPolicy(stage.policy))
        before = filled[-1].max_iters if filled else 0
        if not stage.max_iters > before:
            raise ValueError(
                f"Max iter of the stage {stage} must be greater than the previous max iter "
                f"{before}: max_iters counts from the beginning of training"
            )

        if stage.policy is WarmupPolicy.INTERPOLATE:
            _check_interpolation(stage)
        if stage.policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS and stage.sgdr_period < 1:
            raise ValueError(f"sgdr_period={stage.sgdr_period} of stage {stage} must be at least 1")
        if stage.decay_iters <= 0:
            stage.decay_iters = 1 if stage.policy is WarmupPolicy.STEP else stage.max_iters
        filled.append(stage)
    return [*filled, WarmupStage(WarmupPolicy.NONE, max_iters=_LAST_ITER)]


def _check_interpolation(stage: WarmupStage) -> None:
    start = stage.start_interpolating_iters
    for name, value in (("start_interpolating_iters", start), ("end_value", stage.end_value)):
        if value is None:
            raise ValueError(f"{name} must be set for INTERPOLATE policy: {stage}")

    if start is not None and not stage.max_iters > start:
        raise ValueError(
            f"max_iters ({stage.max_iters}) must be greater than start_interpolating_iters "
            f"({start}) for INTERPOLATE policy"
        )


def _factor(stage: WarmupStage, t: int) -> float:
    """The policy's factor of the learning rate after t steps."""
    v = stage.value
    match stage.policy:
        case WarmupPolicy.LINEAR:
            return v + (1.0 - v) * t / stage.max_iters
        case WarmupPolicy.CONSTANT:
            return v
        case WarmupPolicy.POLY:
            return math.pow(max(1 - t / stage.decay_iters, 0.0), v)
        case WarmupPolicy.STEP:
            return math.pow(v, t // stage.decay_iters)
        case WarmupPolicy.INVSQRT:
            return 1.0 / math.sqrt(max(t, 1))
        case WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
            fraction = t % stage.sgdr_period / stage.sgdr_period
            return v + (1.0 - v) * 0.5 * (1 + math.cos(math.pi * fraction))
        case WarmupPolicy.INTERPOLATE:
            start = stage.start_interpolating_iters
            end = stage.end_value
            assert start is not None and end is not None, "stages were checked at construction"
            return v + (end - v) * (t - start) / (stage.max_iters - start)
        case _:
            return 1.0


__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]
