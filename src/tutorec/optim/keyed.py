"""Optimizers that know their parameters by name.

torch numbers parameters, which means nothing once every rank holds other tables. A keyed optimizer's state is found by
the parameter's name, so that it can be stored by one set of ranks and loaded by another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class KeyedOptimizer(Optimizer):
    """A torch optimizer whose state dict is keyed by parameter name.

    Args:
        params: Name -> parameter. May be empty: a rank need not hold anything.
        state: Parameter -> name of a state -> tensor or number; kept, not copied.
        param_groups: As torch's; the dicts are kept, not copied, so that a change of ``"lr"`` is seen by their owner.

    Source:
        TorchRec's ``torchrec.optim.keyed.KeyedOptimizer``.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        state: Mapping[torch.Tensor, Any],
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        # torch refuses an empty list of parameters, but not an empty group, which is then replaced.
        super().__init__([{"params": []}], {})
        self.params: dict[str, torch.Tensor] = dict(params)
        self.state: Any = state
        self.param_groups: list[dict[str, Any]] = list(param_groups)
        grouped = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        if grouped != {id(parameter) for parameter in self.params.values()}:
            raise ValueError(
                f"param_groups hold {len(grouped)} parameters and params names {len(self.params)}: "
                "every parameter stands in exactly one group, under one name"
            )

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one step; subclasses say how."""
        raise NotImplementedError(f"{type(self).__name__} has no step")

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}``; tensors are live."""
        name_of = {id(parameter): name for name, parameter in self.params.items()}
        state = {
            name: dict(self.state[parameter]) for name, parameter in self.params.items() if parameter in self.state
        }
        groups = [
            {**group, "params": sorted(name_of[id(parameter)] for parameter in group["params"])}
            for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state in by name. ``param_groups`` may be missing; then rates stay as they are.

        Raises:
            ValueError: Parameters, names of states or shapes differ.
        """
        _check_names("parameters", self.params, state_dict["state"], allow_missing=not self._has_state())
        for name, new in state_dict["state"].items():
            self._load_state(name, self.params[name], new)
        groups = state_dict.get("param_groups")
        if groups is not None:
            self._load_groups(groups)

    def _has_state(self) -> bool:
        return any(parameter in self.state for parameter in self.params.values())

    def _load_state(self, name: str, parameter: torch.Tensor, new: Mapping[str, Any]) -> None:
        own = self.state[parameter]
        _check_names(f"states of {name!r}", own, new)
        for key, value in new.items():
            if not isinstance(own[key], torch.Tensor):
                own[key] = value
                continue
            if own[key].shape != value.shape:
                raise ValueError(
                    f"optimizer state {key!r} of {name!r} is {list(own[key].shape)} here and "
                    f"{list(value.shape)} in what is loaded"
                )
            own[key].detach().copy_(value)

    def _load_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        name_of = {id(parameter): name for name, parameter in self.params.items()}
        for group in self.param_groups:
            names = sorted(name_of[id(parameter)] for parameter in group["params"])
            match = next((new for new in groups if sorted(new["params"]) == names), None)
            if match is None:
                raise ValueError(f"no parameter group of {names} in what is loaded")
            group.update({key: value for key, value in match.items() if key != "params"})


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one: step, zero_grad and state reach all of them.

    Args:
        optims: Keyed optimizers, or pairs (prefix, keyed optimizer); a parameter's name here is ``prefix.name``.

    Raises:
        ValueError: Two optimizers hold a parameter of the same name.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> dense = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> sorted(CombinedOptimizer([("over", dense)]).params)
        ['over.weight']

    Source:
        TorchRec's ``torchrec.optim.keyed.CombinedOptimizer``.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims: list[tuple[str, KeyedOptimizer]] = [
            optim if isinstance(optim, tuple) else ("", optim) for optim in optims
        ]
        params: dict[str, torch.Tensor] = {}
        for key, optim in self._optims:
            for name, parameter in optim.params.items():
                full = self.prepend_opt_key(name, key)
                if full in params:
                    raise ValueError(f"two optimizers hold a parameter {full!r}: give one of them a prefix")
                params[full] = parameter
        super().__init__(
            params, _JoinedState(self._optims), [g for _, optim in self._optims for g in optim.param_groups]
        )

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """(prefix, optimizer) in order."""
        return self._optims

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """``opt_key.name``, or ``name`` without a key."""
        return f"{opt_key}.{name}" if opt_key else name

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Let every optimizer make a step."""
        loss = closure() if closure is not None else None
        for _, optim in self._optims:
            optim.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every optimizer's gradients."""
        for _, optim in self._optims:
            optim.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each optimizer its own part."""
        state = state_dict["state"]
        _check_names("parameters", self.params, state, allow_missing=True)
        for key, optim in self._optims:
            names = {self.prepend_opt_key(name, key): name for name in optim.params}
            part: dict[str, Any] = {"state": {names[full]: state[full] for full in names if full in state}}
            if "param_groups" in state_dict:
                part["param_groups"] = [
                    {**group, "params": [names[full] for full in group["params"]]}
                    for group in state_dict["param_groups"]
                    if all(full in names for full in group["params"])
                ]
            optim.load_state_dict(part)

    def __repr__(self) -> str:
        return ",".join(f"{key}: {optim!r}" for key, optim in self._optims)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A torch optimizer with names.

    Args:
        params: Name -> parameter.
        optim_factory: Makes the optimizer from the list of parameters.

    Raises:
        ValueError: There are no parameters.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> named = dict(layer.named_parameters())
        >>> optim = KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=0.1))
        >>> optim.state_dict()["param_groups"][0]["params"]
        ['bias', 'weight']

    Source:
        TorchRec's ``torchrec.optim.keyed.KeyedOptimizerWrapper``.
    """

    def __init__(
        self, params: Mapping[str, torch.Tensor], optim_factory: Callable[[list[torch.Tensor]], Optimizer]
    ) -> None:
        if not params:
            raise ValueError(
                "there are no parameters to optimize: fused tables are updated during backward and "
                "in_backward_optimizer_filter leaves them out; without dense parameters model.fused_optimizer is enough"
            )
        self._optimizer: Optimizer = optim_factory(list(params.values()))
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure) if closure is not None else self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def _load_state(self, name: str, parameter: torch.Tensor, new: Mapping[str, Any]) -> None:
        # torch optimizers make their state at the first step; before it, what is loaded becomes the state.
        if parameter in self.state:
            super()._load_state(name, parameter, new)
        else:
            self.state[parameter] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in new.items()
            }


class _JoinedState(Mapping[torch.Tensor, Any]):
    """The states of several optimizers, read where they are kept."""

    def __init__(self, optims: Sequence[tuple[str, KeyedOptimizer]]) -> None:
        self._optims = optims

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        for _, optim in self._optims:
            if parameter in optim.state:
                return optim.state[parameter]
        raise KeyError(f"no optimizer holds state for a parameter of shape {list(parameter.shape)}")

    def __iter__(self) -> Any:
        return (parameter for _, optim in self._optims for parameter in optim.state)

    def __len__(self) -> int:
        return sum(len(optim.state) for _, optim in self._optims)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optim.state for _, optim in self._optims)


def _check_names(what: str, own: Mapping[str, Any], new: Mapping[str, Any], allow_missing: bool = False) -> None:
    missing, surplus = sorted(own.keys() - new.keys()), sorted(new.keys() - own.keys())
    if surplus or (missing and not allow_missing):
        raise ValueError(f"optimizer {what} differ: {missing} are here only, {surplus} are in what is loaded only")
