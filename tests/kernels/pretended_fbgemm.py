"""fbgemm's training module as it stands on CUDA, in CPU memory, with kernels in plain formulas in
place of its own.

What reaches the kernels is fbgemm's: the module checks, lays out and hands over. What they do with
it stands here, read from nothing but their arguments. So all that is not run is the kernel itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from kernels import oracles
from torch import Tensor

from tutorec._kernels import tbe_cuda
from tutorec._kernels.backend import fbgemm_module
from tutorec._kernels.specs import OptimizerKind, OptimizerSpec

_INVOKERS = "fbgemm_gpu.split_embedding_codegen_lookup_invokers.lookup_"
_ON_DEVICE = 0  # fbgemm's code of the place where the rows of a CUDA table are


class TablesInHostMemory(tbe_cuda.FbgemmCudaTables):
    """The adapter whose module takes the form that it has on CUDA, wherever its memory is."""

    def _place_on(self, device: torch.device) -> tbe_cuda.RowMemory:
        return tbe_cuda.RowMemory("DEVICE", "CUDA", "dev")


@contextmanager
def pretended_kernels() -> Iterator[None]:
    """Lookups of that form run the formulas, others fbgemm."""
    fbgemm_module(tbe_cuda._TRAINING)
    with ExitStack() as stack:
        for kind in tbe_cuda._OPTIMIZERS:
            invoker = import_module(_INVOKERS + kind)
            stack.enter_context(
                patch.object(invoker, "invoke", partial(_invoke, invoker.invoke, kind))
            )
        yield


def _invoke(
    fbgemm: Callable[..., Tensor],
    kind: OptimizerKind,
    common: Any,
    options: Any,
    *momenta_and_number: Any,
    **more: Any,
) -> Tensor:
    if common.host_weights.numel():
        return fbgemm(common, options, *momenta_and_number, **more)
    if kind == "adam":
        warnings.warn(
            "\033[93m\n        [FBGEMM_GPU] NOTE: The training optimizer 'adam' is marked as",
            stacklevel=1,
        )
    assert (
        not options.stochastic_rounding
        and common.output_dtype == 0
        and common.feature_requires_grad is None
    )
    assert len(set(common.weights_placements.tolist())) == 1
    rule = OptimizerSpec(
        kind,
        eps=options.eps,
        max_gradient=options.max_gradient if options.gradient_clipping else None,
    )
    if rule.counts_steps:
        decay = {
            "beta1": options.beta1,
            "beta2": options.beta2,
            "weight_decay": options.weight_decay,
        }
        rule = OptimizerSpec(kind, eps=rule.eps, max_gradient=rule.max_gradient, **decay)
    momenta = momenta_and_number[: len(rule.states)]
    number = momenta_and_number[len(rule.states)] if rule.counts_steps else 0
    return _Lookup.apply(common.placeholder_autograd_tensor, common, rule, momenta, number)


def _rows(common: Any) -> Tensor:
    """Where the rows of all tables are."""
    buffers = (common.dev_weights, common.uvm_weights, common.lxu_cache_weights)
    return buffers[int(common.weights_placements[0])].view(-1)


def _features(common: Any) -> list[tuple[int, int, int, int, Tensor, Tensor, Tensor | None]]:
    """Of each feature: where its table begins, rows, columns, first column; its ids, bag bounds and
    weights.
    """
    columns, count = common.D_offsets.tolist(), common.weights_offsets.numel()
    rows_before = common.hash_size_cumsum.tolist()
    samples = (common.offsets.numel() - 1) // count
    found = []
    for feature, start in enumerate(common.weights_offsets.tolist()):
        rows = min(end for end in rows_before if end > rows_before[feature]) - rows_before[feature]
        bounds = common.offsets[feature * samples : (feature + 1) * samples + 1].long()
        ids = slice(int(bounds[0]), int(bounds[-1]))
        weights = None if common.indice_weights is None else common.indice_weights[ids]
        width = columns[feature + 1] - columns[feature]
        found.append(
            (
                start,
                rows,
                width,
                columns[feature],
                common.indices[ids].long(),
                bounds - bounds[0],
                weights,
            )
        )
    return found


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, placeholder: Tensor, common: Any, rule: OptimizerSpec, momenta: Any, number: int
    ) -> Tensor:
        ctx.given = common, rule, momenta, number
        pooling = {0: "sum", 1: "mean"}[int(common.pooling_mode)]
        return torch.cat(
            [
                oracles.embedding_bag_forward(
                    _rows(common)[start : start + rows * width].view(rows, width),
                    ids,
                    bounds,
                    pooling,
                    weights,
                )
                for start, rows, width, _, ids, bounds, weights in _features(common)
            ],
            dim=1,
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        common, rule, momenta, number = ctx.given
        grad = rule.limited(grads[0])
        by_table: dict[int, tuple[int, int, list[Tensor], list[Tensor]]] = {}
        for feature, (start, rows, width, column, ids, bounds, weights) in enumerate(
            _features(common)
        ):
            lengths = bounds.diff()
            of_bags = grad[:, column : column + width]
            if common.pooling_mode == 1:
                of_bags = of_bags / lengths.clamp(min=1).unsqueeze(1)
            of_ids = of_bags.repeat_interleave(lengths, dim=0)
            of_ids = of_ids if weights is None else of_ids * weights.unsqueeze(1)
            _, _, all_ids, all_grads = by_table.setdefault(start, (feature, rows, [], []))
            all_ids.append(ids)
            all_grads.append(of_ids)
        for start, (feature, rows, all_ids, all_grads) in by_table.items():
            width = all_grads[0].shape[1]
            matrix = _rows(common)[start : start + rows * width].view(rows, width)
            states = []
            for momentum, kept in zip(momenta, rule.states, strict=True):
                first = int(momentum.offsets[feature])
                shape = (rows,) if kept.rowwise else (rows, width)
                buffer = (
                    momentum.dev
                    if int(momentum.placements[feature]) == _ON_DEVICE
                    else momentum.uvm
                )
                states.append(
                    buffer[first : first + matrix[:, : 1 if kept.rowwise else None].numel()].view(
                        shape
                    )
                )
            touched, row_grads = torch.cat(all_ids), torch.cat(all_grads).cpu()
            before, rate = [kept.cpu() for kept in states], float(common.learning_rate_tensor)
            new, after = oracles.update(
                rule, matrix.cpu(), before, touched.cpu(), row_grads, rate, number
            )
            for kept, value in zip((matrix, *states), (new, *after), strict=True):
                kept[touched] = value.to(kept.device)[touched]
        return (None,) * 5


@contextmanager
def pretended_cache() -> Iterator[None]:
    """Lookups as above, and a cache that holds the rows of the last batch, or with a pipeline of
    all batches.

    It has room for the whole buffer; what is not in it is NaN.
    """
    module = fbgemm_module(tbe_cuda._TRAINING).SplitTableBatchedEmbeddingBagsCodegen
    replaced: dict[str, Any] = {
        "_prefetch": _fill_cache,
        "flush": _flush,
        "reset_cache_states": _reset,
        "_update_cache_counter_and_locations": lambda *_: None,
    }
    with pretended_kernels(), ExitStack() as stack:
        for name, method in replaced.items():
            stack.enter_context(patch.object(module, name, method))
        memory = SimpleNamespace(total_memory=2**40, warp_size=32)
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda device: memory))
        stack.enter_context(patch("torch.cuda.memory_reserved", lambda device: 0))
        if not torch.cuda.is_available():
            stack.enter_context(patch("torch.cuda.current_stream", lambda: None))
        yield


def _fill_cache(module: Any, indices: Tensor, offsets: Tensor, *_: Any, **more: Any) -> None:
    module.timestep += 1
    module.timesteps_prefetched.append(module.timestep)
    if not module.lxu_cache_weights.numel():
        return
    if not hasattr(module, "is_cached"):
        _reset(module)
    _flush(module)
    if not module.prefetch_pipeline:
        _reset(module)
    count, widths = module.weights_offsets.numel(), module.D_offsets.diff().tolist()
    bounds = offsets[:: (offsets.numel() - 1) // count].tolist()
    for feature, start in enumerate(module.weights_offsets.tolist()):
        ids = indices[bounds[feature] : bounds[feature + 1]].long()
        numbers = (
            start
            + ids[:, None] * widths[feature]
            + torch.arange(widths[feature], device=ids.device)
        ).view(-1)
        new = numbers[~module.is_cached[numbers]]
        module.lxu_cache_weights[new] = module.weights_uvm[new]
        module.is_cached[numbers] = True
    module.lxu_cache_locations_list.append(torch.zeros_like(indices, dtype=torch.int32))


def _flush(module: Any) -> None:
    if hasattr(module, "is_cached"):
        module.weights_uvm[module.is_cached] = module.lxu_cache_weights[module.is_cached]


def _reset(module: Any) -> None:
    if module.lxu_cache_weights.numel():
        module.is_cached = torch.zeros_like(module.weights_uvm, dtype=torch.bool)
        module.lxu_cache_weights = torch.full_like(module.weights_uvm, float("nan"))
