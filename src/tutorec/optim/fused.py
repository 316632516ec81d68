"""The optimizer that runs inside backward, as a keyed optimizer with rates and state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch

from tutorec._kernels.tbe import TableBatch
from tutorec.optim.in_backward import listed, notice_steps
from tutorec.optim.keyed import KeyedOptimizer
from tutorec.optim.keyed_state import check_form
from tutorec.optim.rates import check_rate

# How many lookups are watched, since to count a pass costs some microseconds. Two lookups without a
# step between them start it again.
_WATCHED = 16
# Mapped over the tables of every batch, in which a loop would cost more.
_is_trained = attrgetter("requires_grad")


class FusedOptimizer(KeyedOptimizer):
    """Base of keyed optimizers that update in backward; ``step`` and ``zero_grad`` do nothing."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Do nothing: backward has updated the rows."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: there are no gradients."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Do nothing: the state exists from the beginning."""


class EmptyFusedOptimizer(FusedOptimizer):
    """The fused optimizer of a rank without tables: no parameters, and steps that do nothing.

    Example:
        >>> EmptyFusedOptimizer().state_dict()
        {'state': {}}

    Source:
        TorchRec's ``torchrec.optim.fused.EmptyFusedOptimizer``.
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])


class FusedOptimizerModule(ABC):
    """A module that updates its own parameters during backward.

    Source:
        TorchRec's ``torchrec.optim.fused.FusedOptimizerModule``.
    """

    @property
    @abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of these parameters."""


class StateForm(Protocol):
    """Conversion of states between parameters, which are shards, and whole tables."""

    def stored(self, state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """State by parameter -> state by table."""
        ...

    def local(
        self, loaded: Mapping[str, Mapping[str, Any]], state: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """State by table -> state by parameter; ``state`` is the local parameters' state."""
        ...


class _OfParameters(dict[str, Any]):
    """A state dict that is already keyed by local parameters."""


class BackwardPasses:
    """Counts the backward passes that reach a fused table between two steps: at most one may.

    Only a caller who steps or clears the fused optimizer can mean several passes as one step. One
    who never does is not watched for long.

    Args:
        names: The parameters that each pass updates.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._left = _WATCHED
        self._lookups = 0
        self._passes: list[int] = []
        self._is_stepped = False

    def watch(self, rows: torch.Tensor) -> torch.Tensor:
        """Looked-up rows, returned as they are; backward counts the pass when it reaches them."""
        if not rows.requires_grad or torch.compiler.is_compiling():
            return rows

        self._lookups += 1
        if self._is_stepped and self._lookups > 1:
            self._left = _WATCHED
        # A lookup that is made in backward, as replicas and activation checkpoints do, belongs to
        # the pass that is under way.
        if self._left and torch._C._current_graph_task_id() == -1:
            self._left -= 1
            rows.register_hook(self._count)
        return rows

    def clear(self) -> None:
        """Start to count the passes of the next step."""
        self._is_stepped = True
        self._lookups = 0
        self._passes.clear()

    def end(self) -> None:
        """A step is made.

        Raises:
            RuntimeError: Several passes have updated the rows since the last one.
        """
        passes = len(self._passes)
        self.clear()
        if passes > 1:
            raise RuntimeError(self._too_many(passes))

    def _count(self, _: torch.Tensor) -> None:
        this = torch._C._current_graph_task_id()
        if this in self._passes:
            return
        if self._is_stepped and self._passes:
            self._passes.clear()
            raise RuntimeError(self._too_many(2))
        self._passes.append(this)

    def _too_many(self, passes: int) -> str:
        return (
            f"{passes} backward passes reach {listed(self._names)} before one step of the "
            "optimizer, and each pass moves the rows: micro-batches do not add up. Give the table "
            "compute_kernel='dense', whose gradients do; or, where each pass may be a step of the "
            "table, call model.fused_optimizer.step() after each"
        )


class EmbeddingFusedOptimizer(FusedOptimizer):
    """The optimizer of one table-batched operator.

    A change of ``param_groups[0]["lr"]``, by hand or by a torch scheduler, takes effect at the next
    forward. The rate is stored as the given Python float.

    Args:
        tables: The operator.
        names: Parameter name of each of its tables.
        parameters: The weights ``[R, D]`` of each table, as the sharded module names them.

    Example:
        >>> import torch
        >>> from tutorec._kernels.specs import GroupSpec, OptimizerSpec, TableSpec
        >>> from tutorec._kernels.tbe_build import build_table_batch
        >>> tables = build_table_batch(
        ...     GroupSpec((TableSpec("item", 3, 4),), feature_tables=(0,)),
        ...     optimizer=OptimizerSpec("sgd", learning_rate=0.02),
        ...     device=torch.device("cpu"),
        ... )
        >>> EmbeddingFusedOptimizer(tables, ["item.weight"], tables.table_weights())
        EmbeddingFusedOptimizer (
        Parameter Group 0
            lr: 0.02
        )
    """

    def __init__(
        self, tables: TableBatch, names: Sequence[str], parameters: Sequence[torch.Tensor]
    ) -> None:
        self._tables = tables
        self._owners = list(parameters)
        self._state_form: StateForm | None = None
        self.passes = BackwardPasses(names)
        notice_steps()
        self._addresses = [rows.data_ptr() for rows in tables.table_weights()]

        params = dict(zip(names, parameters, strict=True))
        super().__init__(
            params, self._live_state(), [{"params": list(parameters), "lr": tables.learning_rate}]
        )

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Move nothing: backward has updated the rows.

        Raises:
            RuntimeError: Several backward passes have updated them since the last step.
        """
        loss = super().step(closure)
        self.passes.end()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear nothing: there are no gradients."""
        self.passes.clear()

    def store_as(self, form: StateForm) -> None:
        """Make ``state_dict()`` use whole tables, of which this rank has shards."""
        self._state_form = form

    def state_dict(self) -> dict[str, Any]:
        """State by parameter; for a sharded module each table once, as ShardedTensors."""
        self._tables.flush()
        state_dict = super().state_dict()
        return (
            state_dict
            if self._state_form is None
            else {**state_dict, "state": self._state_form.stored(state_dict["state"])}
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state in; for a sharded module ShardedTensors of the same plan, or whole tensors.

        Raises:
            ValueError: See ``KeyedOptimizer.load_state_dict``; or the state was saved under another
                plan.
        """
        self._tables.flush()
        super().load_state_dict(self._by_parameter(state_dict))

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise if ``load_state_dict`` would raise, and change nothing.

        Raises:
            ValueError: See ``load_state_dict``.
        """
        super().check_state_dict(self._by_parameter(state_dict))

    def _by_parameter(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """The loaded state, by local parameters."""
        check_form(state_dict)
        if self._state_form is None or isinstance(state_dict, _OfParameters):
            return state_dict

        current = super().state_dict()["state"]
        return _OfParameters(
            {**state_dict, "state": self._state_form.local(state_dict["state"], current)}
        )

    @property
    def operator(self) -> TableBatch:
        """The operator that applies the updates."""
        return self._tables

    def apply_learning_rate(self) -> None:
        """Pass the group's rate to the operator; the sharded module calls it at each forward.

        Raises:
            ValueError: The rate is negative or NaN.
        """
        rate = self.param_groups[0]["lr"]
        if rate != self._tables.learning_rate:
            names = ", ".join(map(repr, self.params))
            self._tables.learning_rate = check_rate(rate, f"the fused optimizer of {names}")

    def check_parameters(self) -> None:
        """Check that backward can update the parameters' memory; called at each forward.

        Raises:
            ValueError: A parameter's ``.data`` was replaced, or it is frozen while gradients are
                recorded.
        """
        if torch.compiler.is_compiling():
            return

        recorded = torch.is_grad_enabled()
        # Attributes of a class of its own are read as fast as torch's.
        with torch._C.DisableTorchFunctionSubclass():
            addresses = [*map(torch.Tensor.data_ptr, self._owners)]
            if addresses == self._addresses and (
                not recorded or all(map(_is_trained, self._owners))
            ):
                return
        for (name, owner), current, address in zip(
            self.params.items(), addresses, self._addresses, strict=True
        ):
            if current != address or (recorded and not owner.requires_grad):
                raise ValueError(_why_not(name, current != address))

    def rebind(self) -> None:
        """Update the state's tensors after the operator's memory has moved."""
        self._addresses = [rows.data_ptr() for rows in self._tables.table_weights()]
        self.state = self._live_state()

    def _live_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Parameter -> ``{"<table>.momentum1": [R]}``, the operator's own tensors."""
        states = zip(
            self._owners, self._tables.spec.tables, self._tables.optimizer_state(), strict=True
        )
        return {
            owner: {f"{table.name}.{name}": tensor for name, tensor in state.items()}
            for owner, table, state in states
        }


def _why_not(name: str, exchanged: bool) -> str:
    if exchanged:
        return (
            f"parameter {name!r} was given other memory (.data = ...), and rows are still looked "
            "up in the old one: write into it, parameter.copy_(rows) under torch.no_grad()"
        )

    return (
        f"parameter {name!r} is frozen (requires_grad=False), and its fused optimizer would move "
        "its rows in backward: call the model under torch.no_grad(), or shard the table with "
        "compute_kernel='dense', which leaves it alone"
    )
