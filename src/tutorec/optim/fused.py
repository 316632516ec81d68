"""The optimizer that runs inside backward, seen as an optimizer: its rate can be changed, its state read and loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tutorec._kernels.tbe import TableBatch
from tutorec.optim.keyed import KeyedOptimizer
from tutorec.optim.rates import check_rate


class FusedOptimizer(KeyedOptimizer):
    """A keyed optimizer whose update happens during backward; ``step`` and ``zero_grad`` have nothing to do."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Nothing: backward has updated the rows."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: there are no gradients."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Nothing: the state is there from the beginning, and no gradient of a table's size is made."""


class EmptyFusedOptimizer(FusedOptimizer):
    """What a rank without tables has: no parameters, and steps that do nothing.

    Example:
        >>> EmptyFusedOptimizer().state_dict()
        {'state': {}}

    Source:
        TorchRec's ``torchrec.optim.fused.EmptyFusedOptimizer``.
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])


class FusedOptimizerModule(ABC):
    """A module that updates parameters of its own during backward.

    Source:
        TorchRec's ``torchrec.optim.fused.FusedOptimizerModule``.
    """

    @property
    @abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """What updates them."""


class EmbeddingFusedOptimizer(FusedOptimizer):
    """The optimizer of one table-batched operator.

    A change of ``param_groups[0]["lr"]``, by hand or by a torch scheduler, holds from the next forward on. The rate is
    kept as the Python float that it was given as.

    Args:
        tables: The operator.
        names: Parameter name of each of its tables.
        parameters: The weights ``[R, D]`` of each table, as the sharded module names them.

    Example:
        >>> import torch
        >>> from tutorec._kernels.optimizer_spec import OptimizerSpec
        >>> from tutorec._kernels.tbe import GroupSpec, TableSpec, build_table_batch
        >>> tables = build_table_batch(
        ...     GroupSpec((TableSpec("item", 3, 4),), feature_tables=(0,)),
        ...     optimizer=OptimizerSpec("sgd", learning_rate=0.02), device=torch.device("cpu"))
        >>> EmbeddingFusedOptimizer(tables, ["item.weight"], tables.table_weights())
        EmbeddingFusedOptimizer (
        Parameter Group 0
            lr: 0.02
        )
    """

    def __init__(self, tables: TableBatch, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._tables = tables
        self._owners = list(parameters)
        params = dict(zip(names, parameters, strict=True))
        super().__init__(params, self._live_state(), [{"params": list(parameters), "lr": tables.learning_rate}])

    @property
    def operator(self) -> TableBatch:
        """What makes the updates."""
        return self._tables

    def apply_learning_rate(self) -> None:
        """Hand the rate of the parameter group to the operator; the sharded module does so at each forward.

        Raises:
            ValueError: The rate is negative or not a number.
        """
        rate = self.param_groups[0]["lr"]
        if rate != self._tables.learning_rate:
            names = ", ".join(map(repr, self.params))
            self._tables.learning_rate = check_rate(rate, f"the fused optimizer of {names}")

    def rebind(self) -> None:
        """Find the state again after the operator's memory has moved."""
        self.state = self._live_state()

    def _live_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Parameter -> ``{"<table>.momentum1": [R]}``, the operator's own tensors."""
        states = zip(self._owners, self._tables.spec.tables, self._tables.optimizer_state(), strict=True)
        return {
            owner: {f"{table.name}.{name}": tensor for name, tensor in state.items()} for owner, table, state in states
        }
