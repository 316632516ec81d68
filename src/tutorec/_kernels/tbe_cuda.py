"""Table-batched lookups on CUDA, through fbgemm's own Python module and its CUDA kernels.

fbgemm's module has the arguments of its CUDA kernels, and TorchRec runs it there, too. It is
imported when the first table is built on CUDA. It allocates the memory: tables and states are views
of its buffers, in which rows are padded to multiples of 4 columns.

On CPU tensors the same adapter runs fbgemm's CPU mode, and the tests compare it with the other
operators there. That mode has SGD, Adagrad and row-wise Adagrad. The form that the module has on
CUDA, both Adams included, also runs in CPU memory with formulas of the tests in place of fbgemm's
kernels, and on GPUs by ``make gpu``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tutorec._kernels import tbe_fbgemm
from tutorec._kernels.backend import fbgemm_module, without_fbgemm_warnings
from tutorec._kernels.specs import OptimizerKind
from tutorec._kernels.tbe_layout import empty_bags

__all__ = [
    "FbgemmCudaDenseTables",
    "FbgemmCudaTables",
    "RowMemory",
]

_TRAINING = "fbgemm_gpu.split_table_batched_embeddings_ops_training"
# The step of a call that is not counted. At step 1 fbgemm would read its count from the device.
_UNCOUNTED = 2.0
_INT32_ROWS = 2**31
_OPTIMIZERS: dict[OptimizerKind, str] = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adam": "ADAM",
    "partial_rowwise_adam": "PARTIAL_ROWWISE_ADAM",
}


class RowMemory(NamedTuple):
    """A memory of rows by fbgemm's names: in its enumerations, and the suffix of its buffers."""

    location: str
    computes: str
    suffix: str


class FbgemmCudaTables(tbe_fbgemm.FbgemmTableBatch):
    """Fused: backward sums the gradients of equal ids and updates their rows; no weight gradient.

    It calls fbgemm's module, which counts one number of steps for all tables: tables whose numbers
    differ are looked up by a call for each number. A copy, and a move to another GPU, needs memory
    for the tables twice.
    """

    _fbgemm: Any

    def _get_name(self) -> str:
        """The fbgemm class that it calls, so that modules print as TorchRec's do."""
        return "SplitTableBatchedEmbeddingBagsCodegen"

    def _place_on(self, device: torch.device) -> RowMemory:
        if device.type == "cpu":
            return RowMemory("HOST", "CPU", "host")
        return RowMemory("DEVICE", "CUDA", "dev")

    def _allocate(
        self, elements: int, rows: int, device: torch.device, zeros: Callable[[int], Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        module = self._build(device)
        flat, *states = (getattr(module, name).detach() for name in self._buffers_of(module))
        return flat, states

    def _build(self, device: torch.device) -> Any:
        """Build fbgemm's module, with memory of its own; zeros."""
        fbgemm = fbgemm_module(_TRAINING)
        rule = self.optimizer
        assert rule is not None, "a fused operator is built with an optimizer"

        memory = self._place_on(device)
        location = fbgemm.EmbeddingLocation[memory.location]
        computes = fbgemm.ComputeDevice[memory.computes]
        shapes, feature_tables = self._shapes()
        module = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, columns, location, computes) for rows, columns in shapes],
            feature_table_map=feature_tables,
            optimizer=fbgemm.OptimType[_OPTIMIZERS[rule.kind]],
            stochastic_rounding=False,
            gradient_clipping=rule.max_gradient is not None,
            max_gradient=rule.max_gradient or 0.0,
            learning_rate=rule.learning_rate,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
            beta1=rule.beta1,
            beta2=rule.beta2,
            pooling_mode=fbgemm.PoolingMode["MEAN" if self._pooling == "mean" else "SUM"],
            device=device,
            # The collection has checked the ids; its errors name tables and features.
            bounds_check_mode=fbgemm.BoundsCheckMode.NONE,
            table_names=self.spec.names,
            **self._cache_arguments(fbgemm, sum(rows for rows, _ in shapes)),
        )
        self._warns = rule.kind == "adam"

        # Not as a child module: its parameters and buffers do not enter the state_dict.
        object.__setattr__(self, "_fbgemm", module)
        return module

    def _cache_arguments(self, fbgemm: Any, rows: int) -> dict[str, Any]:
        """Arguments of the module for a cache of tables of so many rows; here there is no cache."""
        return {}

    def _shapes(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Rows and columns of fbgemm's tables in storage order, and the table of each feature."""
        if self.spec.pooling == "none":
            return [(self._rows, self._table_places[0][2])], [0]

        used = sorted(set(self.spec.feature_tables), key=lambda table: self._table_places[table])
        shapes = [
            (max(self.spec.tables[table].rows, 1), self._table_places[table][2]) for table in used
        ]
        # fbgemm takes no tables without features. They are stored after the others, as more rows of
        # the last used table.
        start, row, stride = self._table_places[used[-1]]
        rows = max(-(-(self._elements - start) // stride), self._rows - row)
        shapes[-1] = (rows, stride)

        return shapes, [used.index(self.spec.feature_tables[feature]) for feature in self._order]

    def _buffers_of(self, module: Any) -> list[str]:
        """Names of the module's buffers: of the weights, and of each state."""
        suffix = self._place_on(module.current_device).suffix
        states = range(1, len(self._state_specs) + 1)
        return [f"weights_{suffix}", *(f"momentum{number}_{suffix}" for number in states)]

    def _bind_kernel(self) -> None:
        super()._bind_kernel()
        module = self.__dict__.get("_fbgemm")
        if module is None or module.placeholder_autograd_tensor.device != self._flat.device:
            self._build(self._flat.device)

        tensors = (self._flat.detach(), *self._kept)
        for name, tensor in zip(self._buffers_of(self._fbgemm), tensors, strict=True):
            # No longer a parameter or a buffer of fbgemm's module: this module moves them.
            self._fbgemm._parameters.pop(name, None)
            self._fbgemm._buffers.pop(name, None)
            setattr(self._fbgemm, name, tensor)

    def autograd_leaf(self) -> Tensor:
        """The empty parameter of fbgemm's module."""
        return self._fbgemm.placeholder_autograd_tensor

    def _call(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        assert self.optimizer is not None, "a fused operator is built with an optimizer"
        # Without gradients there is no backward, and the batch is not counted.
        counted = self.optimizer.counts_steps and torch.is_grad_enabled()
        numbers = [step.number for step in self.next_steps()] if counted else [_UNCOUNTED]
        if len(set(numbers)) == 1:
            return self._run(values, offsets, weights, numbers[0])

        bag_tables = self._tables_of_bags(values, offsets)
        bag_numbers = torch.tensor(numbers, device=values.device)[bag_tables]
        outputs = [
            self._run(*empty_bags(values, offsets, weights, bag_numbers == number), number)
            for number in sorted(set(numbers))
        ]
        return torch.stack(outputs).sum(0)

    def _run(
        self, values: Tensor, offsets: Tensor, weights: Tensor | None, number: float
    ) -> Tensor:
        """One call, whose update is step ``number``."""
        module = self._fbgemm
        values = self._with_room(values)
        offsets = self._with_room(offsets)

        # A new tensor: a backward that has not run yet has the rate of its forward.
        module.learning_rate_tensor = torch.tensor(self._learning_rate, dtype=torch.float32)
        # fbgemm adds 1 at each forward, and reads the number from the device if its copy on the CPU
        # is 0.
        module.iter_cpu.fill_(int(number) - 1)
        if number == 1:
            module.iter.zero_()

        with without_fbgemm_warnings() if self._warns else nullcontext():
            return module(values, offsets, weights)

    def _with_room(self, ids: Tensor) -> Tensor:
        """Ids in a dtype for the rows of all tables, which the backward numbers in sequence."""
        return ids.long() if self._rows >= _INT32_ROWS else ids

    def _tables_of_bags(self, values: Tensor, offsets: Tensor) -> Tensor:
        """The table of each bag."""
        device = values.device
        feature_tables = self.spec.feature_tables
        if self.spec.pooling == "none":  # a bag is one id, a row in the sequence of all tables
            rows = torch.tensor([row for _, row, _ in self._table_places], device=device)
            starts, tables = rows.sort()
            return tables[torch.bucketize(values, starts, right=True) - 1]

        samples = (offsets.numel() - 1) // len(feature_tables)
        tables = torch.tensor([feature_tables[feature] for feature in self._order], device=device)
        return tables.repeat_interleave(samples)

    def __getstate__(self) -> dict[str, Any]:
        # fbgemm's module cannot be pickled; the copy builds its own around the buffers.
        return {name: value for name, value in super().__getstate__().items() if name != "_fbgemm"}


class FbgemmCudaDenseTables(tbe_fbgemm.FbgemmCpuDenseTables):
    """Dense: the backward fills the gradient of each table's Parameter, for an optimizer outside.

    It needs no module of fbgemm's: the operator is that of the CPU, and takes tensors of either
    device.
    """

    def _bind_kernel(self) -> None:
        super()._bind_kernel()
        fbgemm_module("fbgemm_gpu")  # loads the operator's CUDA library
