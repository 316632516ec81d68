"""The implementations of table-batched lookups that the tests hold equal to one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernels import pretended_fbgemm
from torch import Tensor

from tutorec._kernels import adagrad_stalls, tbe, tbe_build, tbe_cuda, tbe_fbgemm
from tutorec._kernels.backend import use_backend
from tutorec._kernels.specs import GroupSpec, OptimizerSpec, UpdateStep
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec._kernels.wheels import BackendChoice
from tutorec.errors import BackendError

_choose = tbe_build._implementation


def has_fbgemm() -> bool:
    try:
        with use_backend("fbgemm"):
            return True
    except BackendError:
        return False


needs_fbgemm = pytest.mark.skipif(not has_fbgemm(), reason="no fbgemm wheel that fits this torch")


@torch.no_grad()
def copy_numbers(tables: Sequence[Any], new: Sequence[Any]) -> None:
    """Copy weights, or states by name, into those of an operator, table by table."""
    for own, given in zip(tables, new, strict=True):
        if isinstance(own, dict):
            assert own.keys() == given.keys()
            copy_numbers([*own.values()], [given[name] for name in own])
        else:
            own.copy_(given)


# The adapter of CUDA tables on CPU tensors: through fbgemm's CPU mode; and in the form that it has
# on CUDA, with the formulas of the tests as kernels.
CUDA_ADAPTER, CUDA_FORM = "fbgemm's module", "fbgemm's module for CUDA"
# What runs on processors on which fbgemm's row-wise Adagrad stalls, there for large batches only.
STALLS = "fbgemm's lookup, torch's update"
IMPLEMENTATIONS = [
    pytest.param("torch"),
    *(
        pytest.param(name, marks=needs_fbgemm)
        for name in ("fbgemm", STALLS, CUDA_ADAPTER, CUDA_FORM)
    ),
]


def stalls() -> AbstractContextManager[object]:
    """As on a processor on which row-wise Adagrad stalls; batches of any size are
    updated in torch.
    """
    return patch.multiple(adagrad_stalls, _FEW_IDS=0, _row_wise_adagrad_stalls=lambda: True)


class _UpdatedInTorch(tbe_fbgemm.FbgemmCpuTables):
    def _call(self, values: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        with stalls():
            return super()._call(values, offsets, weights)

    def _step(self, batch: PooledBatch, grad: Tensor, steps: Sequence[UpdateStep]) -> None:
        with stalls():
            super()._step(batch, grad, steps)


def _updated_in_torch(
    spec: GroupSpec, rule: OptimizerSpec | None, device: torch.device
) -> type[tbe.TableBatch]:
    chosen = _choose(spec, rule, device)
    return _UpdatedInTorch if chosen is tbe_fbgemm.FbgemmCpuTables else chosen


def _adapter_on_cpu(
    spec: GroupSpec, rule: OptimizerSpec | None, device: torch.device
) -> type[tbe.TableBatch]:
    adapters: dict[type[tbe.TableBatch], type[tbe.TableBatch]] = {
        tbe_fbgemm.FbgemmCpuTables: tbe_cuda.FbgemmCudaTables,
        tbe_fbgemm.FbgemmCpuDenseTables: tbe_cuda.FbgemmCudaDenseTables,
    }
    chosen = _choose(spec, rule, device)
    return adapters.get(chosen, chosen)


def _cuda_form(
    spec: GroupSpec, rule: OptimizerSpec | None, device: torch.device
) -> type[tbe.TableBatch]:
    with patch.object(BackendChoice, "serves", lambda choice, device_type: True):
        chosen = _choose(spec, rule, torch.device("cuda"))
    fused = tbe_cuda.FbgemmCudaTables
    return pretended_fbgemm.TablesInHostMemory if chosen is fused else chosen


_ADAPTERS = {CUDA_ADAPTER: _adapter_on_cpu, CUDA_FORM: _cuda_form, STALLS: _updated_in_torch}


@contextmanager
def implementation(name: str) -> Iterator[None]:
    """Build operators by the backend of this name, or by one of the two adapters."""
    choose = patch.object(tbe_build, "_implementation", _ADAPTERS.get(name, _choose))
    with use_backend("fbgemm" if name in _ADAPTERS else name), choose:
        yield
