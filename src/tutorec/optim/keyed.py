"""Keyed optimizers, whose state is keyed by parameter name.

torch numbers parameters, which has no meaning if every rank has other tables. State keyed by name
can be saved by one set of ranks and loaded by another.

Parameter groups are saved only after ``save_param_groups(True)``: ranks have different parameters
and thus different groups, and learning rates are usually set again when training continues. Groups
are shared, never copied: a torch scheduler on any optimizer of this module changes the dict that
the innermost optimizer reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer

from tutorec.optim.keyed_state import (
    check_form,
    check_names,
    check_state,
    extract_state,
    load_state,
)
from tutorec.optim.rates import check_rates

OptimizerFactory = Callable[[Any], Optimizer]


class KeyedOptimizer(Optimizer):
    """A torch optimizer whose state dict is keyed by parameter name.

    Args:
        params: Name -> parameter. May be empty on some ranks.
        state: Parameter -> name of a state -> tensor, ShardedTensor, number or dict; not copied.
        param_groups: As in torch; not copied, so that a change of ``"lr"`` is seen by their owner.

    Raises:
        ValueError: A key of ``state`` is not a parameter, or a parameter is not in exactly one
            group.

    Source:
        TorchRec's ``torchrec.optim.keyed.KeyedOptimizer``.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        state: Mapping[torch.Tensor, Any],
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        self._prepare({"_save_param_groups": False})
        self.params: Mapping[str, torch.Tensor] = params
        self.state: Any = state
        self.param_groups: Any = param_groups

        known = {id(parameter) for parameter in params.values()}
        strangers = [key for key in state if id(key) not in known]
        if strangers:
            raise ValueError(
                f"All state keys must be params. The following keys are not: {strangers}."
            )

        grouped = {id(parameter) for group in param_groups for parameter in group["params"]}
        if grouped != known:
            left = [name for name, parameter in params.items() if id(parameter) not in grouped]
            which = f"; no group holds {', '.join(map(repr, left))}" if left else ""
            raise ValueError(
                f"param_groups hold {len(grouped)} parameters and params names {len(params)}: "
                f"every parameter must be in exactly one group, under one name{which}"
            )

    def _prepare(self, defaults: dict[str, Any]) -> None:
        """Do what torch's constructor does, which refuses an optimizer without parameters."""
        Optimizer.__setstate__(self, {"defaults": defaults})

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, for pickles and copies."""
        return self.__dict__

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one step; the base class raises, as ``torch.optim.Optimizer`` does."""
        raise NotImplementedError(
            f"{type(self).__name__} has no step: it keeps state by name; "
            "KeyedOptimizerWrapper(params, lambda params: torch.optim.SGD(params, lr=0.1)) is one "
            "that steps"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: a parameter added later has no name."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot take further parameters: build another optimizer for "
            "them, and combine the two in a CombinedOptimizer"
        )

    def save_param_groups(self, save: bool) -> None:
        """Set whether ``state_dict()`` and ``load_state_dict`` include the parameter groups."""
        self.defaults["_save_param_groups"] = save

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state that torch's optimizer otherwise creates at the first step.

        It makes a step with zero gradients, which stay in ``.grad``, and a learning rate of 0: no
        parameter changes.

        Args:
            sparse_grad_parameter_names: Parameters with sparse gradients.
        """
        for name, parameter in self.params.items():
            if parameter.requires_grad:
                zeros = torch.zeros_like(parameter)
                sparse = (
                    sparse_grad_parameter_names is not None and name in sparse_grad_parameter_names
                )
                parameter.grad = zeros.to_sparse() if sparse else zeros

        rates = [(group, group["lr"]) for group in self.param_groups if "lr" in group]
        try:
            for group, _ in rates:
                group["lr"] = 0.0
            self.step(closure=None)
        finally:
            for group, rate in rates:
                group["lr"] = rate

    # --- state by name

    def state_dict(self) -> dict[str, Any]:
        """``{"state": {name: {...}}}`` with live tensors.

        After ``save_param_groups(True)`` it also has ``"param_groups"``.
        """
        state_dict: dict[str, Any] = {
            "state": {
                name: extract_state(self.state[parameter])
                for name, parameter in self.params.items()
                if parameter in self.state
            }
        }

        if self.defaults["_save_param_groups"]:
            state_dict["param_groups"] = [
                {
                    "params": names,
                    **{key: deepcopy(value) for key, value in group.items() if key != "params"},
                }
                for names, group in self._named_groups()
            ]
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state by name into the existing tensors; also parameter groups, if they are saved.

        Args:
            state_dict: In the form of ``state_dict()``.

        Raises:
            ValueError: Parameters, names of states, numbers of shards, shapes or groups differ.
                Nothing has been changed.
        """
        self.check_state_dict(state_dict)
        for name, new in state_dict["state"].items():
            self._load_state(self.params[name], new)

        if self.defaults["_save_param_groups"]:
            stored = _groups_by_names(state_dict["param_groups"])
            for names, group in self._named_groups():
                if names:
                    new = stored[tuple(names)]
                    group.update(
                        {key: deepcopy(value) for key, value in new.items() if key != "params"}
                    )
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Called after state has been loaded; for subclasses."""

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if ``load_state_dict`` would raise, and change nothing.

        Raises:
            ValueError: See ``load_state_dict``.
        """
        check_form(state_dict)
        new = state_dict["state"]
        current = {
            name: self.state[parameter]
            for name, parameter in self.params.items()
            if parameter in self.state
        }
        fresh = (
            [name for name in new if name in self.params and name not in current]
            if self._takes_new_state()
            else []
        )

        check_names(
            "Different parameter count",
            "Parameter {} not found",
            current,
            [name for name in new if name not in fresh],
        )
        for name, state in current.items():
            check_state(state, new[name], [name])

        if self.defaults["_save_param_groups"]:
            self._check_groups(state_dict)

    def _takes_new_state(self) -> bool:
        """Whether state can be loaded for a parameter that has none yet."""
        return False

    def _load_state(self, parameter: torch.Tensor, new: Mapping[str, Any]) -> None:
        load_state(self.state[parameter], new)

    def _named_groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """(sorted names of its parameters, group)."""
        names_by_id = {id(parameter): name for name, parameter in self.params.items()}
        for group in self.param_groups:
            yield sorted(names_by_id[id(parameter)] for parameter in group["params"]), group

    def _check_groups(self, state_dict: Mapping[str, Any]) -> None:
        if "param_groups" not in state_dict:
            raise ValueError(
                "what is loaded has no param_groups: it was stored without "
                "save_param_groups(True); call save_param_groups(False) before loading it, and "
                "set rates yourself"
            )

        current = {tuple(names): group for names, group in self._named_groups() if names}
        new = _groups_by_names(state_dict["param_groups"])
        if len(current) != len(new):
            raise ValueError(f"Different param_groups count: {len(current)} vs {len(new)}")
        for names, group in current.items():
            title = "/".join(names)
            if names not in new:
                raise ValueError(f"Group {title} not found: there are {[*new]} in what is loaded")
            missed = f"Group key {{}} not found for group {title}"
            check_names("Different param_group size", missed, group, new[names], f"group {title}")


class _Around(KeyedOptimizer, ABC):
    """A keyed optimizer around others."""

    @abstractmethod
    def _inner(self) -> Sequence[Any]:
        """The other optimizers."""

    def set_optimizer_step(self, step: int) -> None:
        """Pass the number of the next step to the inner optimizers that have the method."""
        self._pass_on("set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Pass hyper-parameters to the inner optimizers that have the method."""
        self._pass_on("update_hyper_parameters", params_dict)

    def _pass_on(self, method: str, argument: Any) -> None:
        for optim in self._inner():
            if hasattr(optim, method):
                getattr(optim, method)(argument)


class _Outer(_Around, ABC):
    """A keyed optimizer around keyed ones."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every inner optimizer."""
        for optim in self._inner():
            optim.zero_grad(set_to_none=set_to_none)

    def save_param_groups(self, save: bool) -> None:
        """Set whether every inner optimizer saves and loads parameter groups."""
        super().save_param_groups(save)
        for optim in self._inner():
            optim.save_param_groups(save)

    def post_load_state_dict(self) -> None:
        """Call ``post_load_state_dict`` of every inner optimizer."""
        for optim in self._inner():
            optim.post_load_state_dict()


class CombinedOptimizer(_Outer):
    """Several keyed optimizers as one, for step, zero_grad, state and parameter groups.

    Args:
        optims: Keyed optimizers, or pairs (prefix, keyed optimizer); a parameter's name is then
            ``prefix.name``.

    Raises:
        ValueError: Two optimizers have a parameter of the same name.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> dense = KeyedOptimizerWrapper(
        ...     {"weight": weight}, lambda params: torch.optim.SGD(params, lr=0.1)
        ... )
        >>> sorted(CombinedOptimizer([("over", dense)]).params)
        ['over.weight']

    Source:
        TorchRec's ``torchrec.optim.keyed.CombinedOptimizer``.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [optim if isinstance(optim, tuple) else ("", optim) for optim in optims]
        seen: set[str] = set()
        for key, optim in self._optims:
            for name in optim.params:
                full = self.prepend_opt_key(name, key)
                if full in seen:
                    raise ValueError(
                        f"Duplicate param key {full}: two optimizers hold a parameter of this "
                        "name; give one of them a prefix, CombinedOptimizer([('prefix', "
                        "optimizer), ...])"
                    )
                seen.add(full)

        self._prepare(
            {
                "_save_param_groups": any(
                    optim.defaults["_save_param_groups"] for _, optim in self._optims
                )
            }
        )

    def _inner(self) -> Sequence[KeyedOptimizer]:
        return [optim for _, optim in self._optims]

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """(prefix, optimizer) in order."""
        return self._optims

    @property
    def params(self) -> Mapping[str, torch.Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name -> parameter, of all optimizers."""
        return {
            self.prepend_opt_key(name, key): parameter
            for key, optim in self._optims
            for name, parameter in optim.params.items()
        }

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter -> its state, of all optimizers."""
        return {
            parameter: state
            for _, optim in self._optims
            for parameter, state in optim.state.items()
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all optimizers, not copied."""
        return [group for _, optim in self._optims for group in optim.param_groups]

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """``opt_key.name``; an empty one is omitted."""
        return f"{opt_key}.{name}" if opt_key and name else opt_key or name

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Call ``step`` of every optimizer."""
        # once for all optimizers
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optim in self._inner():
            optim.step(closure=None)
        return loss

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create every optimizer's state; names are those of this optimizer."""
        for key, optim in self._optims:
            names = {
                name
                for name in optim.params
                if self.prepend_opt_key(name, key) in (sparse_grad_parameter_names or ())
            }
            optim.init_state(names)

    def state_dict(self) -> dict[str, Any]:
        """The merged state dicts of all optimizers."""
        state_dict: dict[str, Any] = {"state": {}}
        for key, optim in self._optims:
            inner_state = optim.state_dict()
            state_dict["state"] |= {
                self.prepend_opt_key(name, key): state
                for name, state in inner_state["state"].items()
            }
            if self.defaults["_save_param_groups"]:
                state_dict.setdefault("param_groups", []).extend(
                    {
                        **group,
                        "params": [self.prepend_opt_key(name, key) for name in group["params"]],
                    }
                    for group in inner_state.get("param_groups", ())
                )

        if self.defaults["_save_param_groups"]:
            state_dict.setdefault("param_groups", [])
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load each optimizer's part, if all parts fit.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``. Nothing has been changed.
        """
        self.check_state_dict(state_dict)
        for (_, optim), inner_state in zip(self._optims, self._parts(state_dict), strict=True):
            optim.load_state_dict(inner_state)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if ``load_state_dict`` would raise, and change nothing.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``.
        """
        check_form(state_dict)
        names = self.params
        own = [name for name, parameter in names.items() if parameter in self.state]
        strangers = [name for name in state_dict["state"] if name not in names]
        if strangers:
            check_names(
                "Different parameter count", "Parameter {} not found", own, state_dict["state"]
            )

        if self.defaults["_save_param_groups"]:
            self._check_groups(state_dict)
        for (_, optim), inner_state in zip(self._optims, self._parts(state_dict), strict=True):
            optim.check_state_dict(inner_state)

    def __repr__(self) -> str:
        return ",".join(f"{key}: {optim!r}" for key, optim in self._optims)

    def _parts(self, state_dict: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Each optimizer's part of a state dict, under its own names."""
        state = state_dict["state"]
        for key, optim in self._optims:
            names = {self.prepend_opt_key(name, key): name for name in optim.params}
            inner_state: dict[str, Any] = {
                "state": {name: state[full] for full, name in names.items() if full in state}
            }

            if "param_groups" in state_dict:
                inner_state["param_groups"] = [
                    {**group, "params": [names[full] for full in group["params"]]}
                    for group in state_dict["param_groups"]
                    if group["params"] and all(full in names for full in group["params"])
                ]
            yield inner_state


class KeyedOptimizerWrapper(_Around):
    """A torch optimizer with parameter names.

    Args:
        params: Name -> parameter.
        optim_factory: Builds the optimizer from the list of parameters.
        pass_params_dict: Whether ``optim_factory`` gets ``params`` instead of the list.

    Raises:
        ValueError: There are no parameters.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> KeyedOptimizerWrapper(
        ...     dict(layer.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1)
        ... ).params
        {'weight': Parameter containing:
        ...

    Source:
        TorchRec's ``torchrec.optim.keyed.KeyedOptimizerWrapper``.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        optim_factory: OptimizerFactory,
        pass_params_dict: bool = False,
    ) -> None:
        if not params:
            raise ValueError(
                "there are no parameters to optimize: fused tables are updated during backward "
                "and in_backward_optimizer_filter leaves them out; without dense parameters "
                "model.fused_optimizer is enough"
            )

        self._optimizer = optim_factory(params if pass_params_dict else list(params.values()))
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)
        check_rates(self.param_groups, type(self._optimizer).__name__)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Call ``step`` of the wrapped optimizer.

        Raises:
            ValueError: A rate in ``param_groups`` is negative or NaN.
        """
        check_rates(self.param_groups, type(self._optimizer).__name__)
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None in any case: Adam would update with zero gradients."""
        self._optimizer.zero_grad()

    def _inner(self) -> Sequence[Any]:
        return [self._optimizer]

    def _takes_new_state(self) -> bool:
        # torch optimizers create their state at the first step; before it, the loaded state is
        # installed.
        return True

    def _load_state(self, parameter: torch.Tensor, new: Mapping[str, Any]) -> None:
        if parameter in self.state:
            super()._load_state(parameter, new)
            return

        self.state[parameter] = {
            key: _copy_beside(parameter, value)
            if isinstance(value, torch.Tensor)
            else deepcopy(value)
            for key, value in new.items()
        }


class OptimizerWrapper(_Outer):
    """A keyed optimizer that forwards everything to another one.

    Args:
        optimizer: The wrapped optimizer.

    Source:
        TorchRec's ``torchrec.optim.keyed.OptimizerWrapper``.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        # The same dict, so that both save their parameter groups or neither does.
        self._prepare(optimizer.defaults)

    def _inner(self) -> Sequence[KeyedOptimizer]:
        return [self._optimizer]

    @property
    def params(self) -> Mapping[str, torch.Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name -> parameter."""
        return self._optimizer.params

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter -> its state."""
        return self._optimizer.state

    @property
    def own_state(self) -> dict[torch.Tensor, Any]:
        """Parameter -> the wrapper's own state, which may be changed."""
        return {}

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups, shared."""
        return self._optimizer.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Call ``step`` of the wrapped optimizer."""
        return self._optimizer.step(closure=closure)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the wrapped optimizer's state."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the wrapped optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state into the wrapped optimizer.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``. Nothing has been changed.
        """
        self._optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if ``load_state_dict`` would raise, and change nothing.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``.
        """
        self._optimizer.check_state_dict(state_dict)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def _groups_by_names(
    groups: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Groups by the names of their parameters; empty groups of other ranks are dropped."""
    return {tuple(sorted(group["params"])): group for group in groups if group["params"]}


def _copy_beside(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A copy on the parameter's device; a number, such as a step count, is returned as it is."""
    copy = value.detach().clone()
    return copy.to(parameter.device) if copy.dim() else copy


__all__ = [
    "CombinedOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerFactory",
    "OptimizerWrapper",
]
