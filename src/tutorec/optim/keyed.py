"""Optimizers that know their parameters by name.

torch numbers parameters, which means nothing once every rank holds other tables. A keyed optimizer's state is found by
the parameter's name, so that it can be stored by one set of ranks and loaded by another.

Parameter groups are not stored unless ``save_param_groups(True)`` asks for it: ranks hold different parameters, hence
different groups, and rates are usually set anew when training is. Groups are shared, never copied: a torch scheduler on
any optimizer of this module changes the very dict that the optimizer at the bottom reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.optim import Optimizer

from tutorec.optim.keyed_state import check_form, check_names, check_state, extract_state, load_state
from tutorec.optim.rates import check_rates

OptimizerFactory = Callable[[Any], Optimizer]


class KeyedOptimizer(Optimizer):
    """A torch optimizer whose state dict is keyed by parameter name.

    Args:
        params: Name -> parameter. May be empty: a rank need not hold anything.
        state: Parameter -> name of a state -> tensor, ShardedTensor, number or dict; kept, not copied.
        param_groups: As torch's; kept, not copied, so that a change of ``"lr"`` is seen by their owner.

    Raises:
        ValueError: State of something that is no parameter, or a parameter in no group.

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
            raise ValueError(f"All state keys must be params. The following keys are not: {strangers}.")
        grouped = {id(parameter) for group in param_groups for parameter in group["params"]}
        if grouped != known:
            raise ValueError(
                f"param_groups hold {len(grouped)} parameters and params names {len(params)}: "
                "every parameter stands in exactly one group, under one name"
            )

    def _prepare(self, defaults: dict[str, Any]) -> None:
        """Set up what torch's constructor sets up: that one refuses an optimizer without parameters."""
        Optimizer.__setstate__(self, {"defaults": defaults})

    def __getstate__(self) -> dict[str, Any]:
        """Everything, for pickles and copies."""
        return self.__dict__

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Make one step; subclasses say how, and the base refuses as ``torch.optim.Optimizer`` does."""
        raise NotImplementedError(
            f"{type(self).__name__} has no step: it keeps state by name; KeyedOptimizerWrapper(params, "
            "lambda params: torch.optim.SGD(params, lr=0.1)) is one that steps"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a parameter that comes later has no name."""
        raise NotImplementedError(
            f"{type(self).__name__} takes no further parameters: build another optimizer for them, and combine the two "
            "in a CombinedOptimizer"
        )

    def save_param_groups(self, save: bool) -> None:
        """Whether ``state_dict()`` holds the parameter groups, and ``load_state_dict`` takes them back."""
        self.defaults["_save_param_groups"] = save

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Let torch's optimizer make the state that it otherwise makes at the first step.

        That is a step with gradients of zeros, which stay in ``.grad``, at a rate of 0: no parameter moves.

        Args:
            sparse_grad_parameter_names: Parameters whose gradient is sparse.
        """
        for name, parameter in self.params.items():
            if parameter.requires_grad:
                zeros = torch.zeros_like(parameter)
                sparse = sparse_grad_parameter_names is not None and name in sparse_grad_parameter_names
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
        """``{"state": {name: {...}}}``; tensors are live. With ``save_param_groups(True)`` also ``"param_groups"``."""
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
        """Copy state in by name, into the tensors that are there; parameter groups if they are saved.

        Args:
            state_dict: As ``state_dict()`` gives it.

        Raises:
            ValueError: Parameters, names of states, numbers of shards, shapes or groups differ. Nothing has changed.
        """
        self.check_state_dict(state_dict)
        for name, new in state_dict["state"].items():
            self._load_state(self.params[name], new)
        if self.defaults["_save_param_groups"]:
            stored = _groups_by_names(state_dict["param_groups"])
            for names, group in self._named_groups():
                if names:
                    new = stored[tuple(names)]
                    group.update({key: deepcopy(value) for key, value in new.items() if key != "params"})
        self.post_load_state_dict()

    def post_load_state_dict(self) -> None:
        """Called when state has been loaded; for subclasses."""

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise where ``load_state_dict`` would, and change nothing.

        Raises:
            ValueError: See ``load_state_dict``.
        """
        check_form(state_dict)
        new = state_dict["state"]
        current = {name: self.state[parameter] for name, parameter in self.params.items() if parameter in self.state}
        fresh = [name for name in new if name in self.params and name not in current] if self._takes_new_state() else []
        check_names(
            "Different parameter count", "Parameter {} not found", current, [name for name in new if name not in fresh]
        )
        for name, state in current.items():
            check_state(state, new[name], [name])
        if self.defaults["_save_param_groups"]:
            self._check_groups(state_dict)

    def _takes_new_state(self) -> bool:
        """Whether state may be loaded for a parameter that has none yet."""
        return False

    def _load_state(self, parameter: torch.Tensor, new: Mapping[str, Any]) -> None:
        load_state(self.state[parameter], new)

    def _named_groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """(sorted names of its parameters, group)."""
        name_of = {id(parameter): name for name, parameter in self.params.items()}
        for group in self.param_groups:
            yield sorted(name_of[id(parameter)] for parameter in group["params"]), group

    def _check_groups(self, state_dict: Mapping[str, Any]) -> None:
        if "param_groups" not in state_dict:
            raise ValueError(
                "what is loaded has no param_groups: it was stored without save_param_groups(True); call "
                "save_param_groups(False) before loading it, and set rates yourself"
            )
        current = {tuple(names): group for names, group in self._named_groups() if names}
        new = _groups_by_names(state_dict["param_groups"])
        if len(current) != len(new):
            raise ValueError(f"Different param_groups count: {len(current)} vs {len(new)}: {[*current]} vs {[*new]}")
        for names, group in current.items():
            title = "/".join(names)
            if names not in new:
                raise ValueError(f"Group {title} not found: there are {[*new]} in what is loaded")
            missed = f"Group key {{}} not found for group {title}"
            check_names("Different param_group size", missed, group, new[names], f"group {title}")


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one: step, zero_grad, state and parameter groups reach all of them.

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
        self._optims = [optim if isinstance(optim, tuple) else ("", optim) for optim in optims]
        seen: set[str] = set()
        for key, optim in self._optims:
            for name in optim.params:
                full = self.prepend_opt_key(name, key)
                if full in seen:
                    raise ValueError(
                        f"Duplicate param key {full}: two optimizers hold a parameter of this name; give one of them "
                        "a prefix, CombinedOptimizer([('prefix', optimizer), ...])"
                    )
                seen.add(full)
        self._prepare({"_save_param_groups": any(optim.defaults["_save_param_groups"] for _, optim in self._optims)})

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """(prefix, optimizer) in order."""
        return self._optims

    @property
    def params(self) -> Mapping[str, torch.Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Name -> parameter of all optimizers, now."""
        return {
            self.prepend_opt_key(name, key): parameter
            for key, optim in self._optims
            for name, parameter in optim.params.items()
        }

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Parameter -> its state in the optimizer that holds it, now."""
        return {parameter: state for _, optim in self._optims for parameter, state in optim.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups of all optimizers, their own dicts."""
        return [group for _, optim in self._optims for group in optim.param_groups]

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """``opt_key.name``, or what there is of the two."""
        return f"{opt_key}.{name}" if opt_key and name else opt_key or name

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Let every optimizer make a step."""
        loss = _evaluate(closure)
        for _, optim in self._optims:
            optim.step(closure=None)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every optimizer's gradients."""
        for _, optim in self._optims:
            optim.zero_grad(set_to_none=set_to_none)

    def save_param_groups(self, save: bool) -> None:
        """Whether parameter groups are stored and loaded, by every optimizer."""
        super().save_param_groups(save)
        for _, optim in self._optims:
            optim.save_param_groups(save)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Let every optimizer make its state; names are those of this optimizer."""
        for key, optim in self._optims:
            names = {
                name for name in optim.params if self.prepend_opt_key(name, key) in (sparse_grad_parameter_names or ())
            }
            optim.init_state(names)

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of all optimizers in one."""
        state_dict: dict[str, Any] = {"state": {}}
        for key, optim in self._optims:
            part = optim.state_dict()
            state_dict["state"] |= {self.prepend_opt_key(name, key): state for name, state in part["state"].items()}
            if self.defaults["_save_param_groups"]:
                state_dict.setdefault("param_groups", []).extend(
                    {**group, "params": [self.prepend_opt_key(name, key) for name in group["params"]]}
                    for group in part.get("param_groups", ())
                )
        if self.defaults["_save_param_groups"]:
            state_dict.setdefault("param_groups", [])
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each optimizer its own part, when all parts fit.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``. Nothing has changed.
        """
        self.check_state_dict(state_dict)
        for (_, optim), part in zip(self._optims, self._parts(state_dict), strict=True):
            optim.load_state_dict(part)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise where ``load_state_dict`` would, and change nothing.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``.
        """
        check_form(state_dict)
        names = self.params
        held = [name for name, parameter in names.items() if parameter in self.state]
        strangers = [name for name in state_dict["state"] if name not in names]
        if strangers:
            check_names("Different parameter count", "Parameter {} not found", held, state_dict["state"])
        if self.defaults["_save_param_groups"]:
            self._check_groups(state_dict)
        for (_, optim), part in zip(self._optims, self._parts(state_dict), strict=True):
            optim.check_state_dict(part)

    def post_load_state_dict(self) -> None:
        """Tell every optimizer that state has been loaded."""
        for _, optim in self._optims:
            optim.post_load_state_dict()

    def set_optimizer_step(self, step: int) -> None:
        """Tell the number of the next step to the optimizers that ask for it."""
        for _, optim in self._optims:
            _call_if_there(optim, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Hand hyper-parameters to the optimizers that take them so."""
        for _, optim in self._optims:
            _call_if_there(optim, "update_hyper_parameters", params_dict)

    def __repr__(self) -> str:
        return ",".join(f"{key}: {optim!r}" for key, optim in self._optims)

    def _parts(self, state_dict: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What each optimizer is to load, under its own names."""
        state = state_dict["state"]
        for key, optim in self._optims:
            names = {self.prepend_opt_key(name, key): name for name in optim.params}
            part: dict[str, Any] = {"state": {name: state[full] for full, name in names.items() if full in state}}
            if "param_groups" in state_dict:
                part["param_groups"] = [
                    {**group, "params": [names[full] for full in group["params"]]}
                    for group in state_dict["param_groups"]
                    if group["params"] and all(full in names for full in group["params"])
                ]
            yield part


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A torch optimizer with names.

    Args:
        params: Name -> parameter.
        optim_factory: Makes the optimizer from the list of parameters.
        pass_params_dict: Give ``params`` itself to ``optim_factory`` instead.

    Raises:
        ValueError: There are no parameters.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> KeyedOptimizerWrapper(dict(layer.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1)).params
        {'weight': Parameter containing:
        ...

    Source:
        TorchRec's ``torchrec.optim.keyed.KeyedOptimizerWrapper``.
    """

    def __init__(
        self, params: Mapping[str, torch.Tensor], optim_factory: OptimizerFactory, pass_params_dict: bool = False
    ) -> None:
        if not params:
            raise ValueError(
                "there are no parameters to optimize: fused tables are updated during backward and "
                "in_backward_optimizer_filter leaves them out; without dense parameters model.fused_optimizer is enough"
            )
        self._optimizer = optim_factory(params if pass_params_dict else list(params.values()))
        super().__init__(params, self._optimizer.state, self._optimizer.param_groups)
        check_rates(self.param_groups, type(self._optimizer).__name__)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the wrapped optimizer.

        Raises:
            ValueError: A rate in ``param_groups`` is negative or not a number.
        """
        check_rates(self.param_groups, type(self._optimizer).__name__)
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, whatever ``set_to_none`` says: Adam would move a parameter by a gradient of zeros."""
        self._optimizer.zero_grad()

    def set_optimizer_step(self, step: int) -> None:
        """Tell the number of the next step to the wrapped optimizer, if it asks for it."""
        _call_if_there(self._optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Hand hyper-parameters to the wrapped optimizer, if it takes them so."""
        _call_if_there(self._optimizer, "update_hyper_parameters", params_dict)

    def _takes_new_state(self) -> bool:
        # torch optimizers make their state at the first step; before it, what is loaded becomes the state.
        return True

    def _load_state(self, parameter: torch.Tensor, new: Mapping[str, Any]) -> None:
        if parameter in self.state:
            super()._load_state(parameter, new)
            return
        self.state[parameter] = {
            key: _copy_beside(parameter, value) if isinstance(value, torch.Tensor) else deepcopy(value)
            for key, value in new.items()
        }


class OptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer around another: everything goes through to it. What it wraps it is seen as.

    Args:
        optimizer: The other.

    Source:
        TorchRec's ``torchrec.optim.keyed.OptimizerWrapper``.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        # The very dict, so that both save their parameter groups or neither does.
        self._prepare(optimizer.defaults)

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
        """Parameter -> state that the wrapper keeps itself, besides that of the other; may be written to."""
        return {}

    @property
    def param_groups(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The groups, shared."""
        return self._optimizer.param_groups

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def save_param_groups(self, save: bool) -> None:
        """Whether parameter groups are stored and loaded."""
        self._optimizer.save_param_groups(save)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Let the wrapped optimizer make its state."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the wrapped optimizer load.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``. Nothing has changed.
        """
        self._optimizer.load_state_dict(state_dict)
        self.post_load_state_dict()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise where ``load_state_dict`` would, and change nothing.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``.
        """
        self._optimizer.check_state_dict(state_dict)

    def post_load_state_dict(self) -> None:
        """Tell the wrapped optimizer that state has been loaded."""
        self._optimizer.post_load_state_dict()

    def set_optimizer_step(self, step: int) -> None:
        """Tell the number of the next step to the wrapped optimizer, if it asks for it."""
        _call_if_there(self._optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Hand hyper-parameters to the wrapped optimizer, if it takes them so."""
        _call_if_there(self._optimizer, "update_hyper_parameters", params_dict)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def _evaluate(closure: Callable[[], float] | None) -> Any:
    """The loss of a closure, computed once for all optimizers."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _call_if_there(optimizer: Any, method: str, argument: Any) -> None:
    if hasattr(optimizer, method):
        getattr(optimizer, method)(argument)


def _groups_by_names(groups: Sequence[Mapping[str, Any]]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """Groups by the names of their parameters; those of ranks without parameters are left out."""
    return {tuple(sorted(group["params"])): group for group in groups if group["params"]}


def _copy_beside(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A copy on the parameter's device; a number, such as a step count, stays where it is."""
    copy = value.detach().clone()
    return copy.to(parameter.device) if copy.dim() else copy


__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerFactory", "OptimizerWrapper"]
