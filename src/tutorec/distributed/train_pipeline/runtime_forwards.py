"""Replacement forwards of modules that a pipeline runs ahead.

An attribute ``forward`` of the object hides the method of its class until the pipeline is detached.
Outside the pipeline's own forward it calls the original method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.train_pipeline.pipeline_context import TrainPipelineContext

__all__ = ["PipelinedForward", "PipelinedPostproc"]

# The batch with which the pipeline is running the model, or None.
Current = Callable[[], TrainPipelineContext | None]


class PipelinedForward:
    """Forward of a sharded module: uses what was started early instead of its arguments.

    Args:
        name: Path of the module.
        module: The module.
        current: The batch in the pipeline's forward.
        reject: Called with the name and a reason if the first forward passes other arguments than
            the trace.

    Source:
        TorchRec's ``PipelinedForward``.
    """

    def __init__(
        self,
        name: str,
        module: ShardedModule[Any, Any, Any, Any],
        current: Current,
        reject: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.original = module.forward
        self._module = module
        self._current = current
        self._reject = reject
        self.is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result for the batch, by the module's own forward if nothing was started early."""
        ctx = self._current()
        name = self.name
        if ctx is None or not (
            name in ctx.input_dist_tensors_requests or name in ctx.embedding_a2a_requests
        ):
            return self.original(*args, **kwargs)

        # The first forward shows whether the trace was right.
        if not self.is_checked:
            self.is_checked = True
            reason = _difference(ctx, name, (args, kwargs))
            if reason is not None:
                self._reject(name, reason)
                return self.original(*args, **kwargs)

        look_up(name, self._module, ctx)
        return ctx.embedding_a2a_requests.pop(name)


def look_up(
    name: str, module: ShardedModule[Any, Any, Any, Any], ctx: TrainPipelineContext
) -> None:
    """Start the lookup of a batch whose ids have arrived, unless it is already started."""
    if name in ctx.input_dist_tensors_requests:
        arrived = ctx.input_dist_tensors_requests.pop(name).wait()
        ctx.embedding_a2a_requests[name] = module.compute_and_output_dist(
            ctx.module_contexts[name], arrived
        )


def written(value: Any) -> list[tuple[Tensor, int]]:
    """The tensors in a value, and how often each has been written in place."""
    return [
        (tensor, tensor._version)
        for tensor in tree_flatten(value)[0]
        if isinstance(tensor, Tensor) and not tensor.is_inference()
    ]


def _difference(ctx: TrainPipelineContext, name: str, passed: Any) -> str | None:
    """How the input of the forward differs from the one that was computed ahead, or None."""
    if not _same(ctx.arguments[name], passed):
        return "the forward passes another input than its trace: it depends on types or settings"
    if any(tensor._version != version for tensor, version in ctx.written.get(name, ())):
        return "the forward writes into its input in place"
    return None


def _same(traced: Any, passed: Any) -> bool:
    """Whether a module gets the arguments computed ahead, as far as tensors can be compared."""
    arguments, structure = tree_flatten(traced)
    passed_arguments, passed_structure = tree_flatten(passed)

    return structure == passed_structure and all(
        argument is passed_argument
        or not isinstance(argument, Tensor)
        or (isinstance(passed_argument, Tensor) and torch.equal(argument, passed_argument))
        for argument, passed_argument in zip(arguments, passed_arguments, strict=True)
    )


@dataclass
class Ahead:
    """The batch whose preprocessing is running ahead of its forward, or None."""

    ctx: TrainPipelineContext | None = None


class PipelinedPostproc:
    """Forward of a preprocessing module, which runs once per batch.

    Args:
        name: Path of the module.
        module: The module.
        current: The batch in the pipeline's forward.
        ahead: The batch that is being prepared.

    Source:
        TorchRec's ``PipelinedPostproc``.
    """

    def __init__(self, name: str, module: nn.Module, current: Current, ahead: Ahead) -> None:
        self.name = name
        self._forward = module.forward
        self._current = current
        self._ahead = ahead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result for the batch."""
        ctx = self._current()
        if ctx is not None and self.name in ctx.postproc_fwd_results:
            return ctx.postproc_fwd_results.pop(self.name)

        results = self._ahead.ctx.postproc_fwd_results if self._ahead.ctx is not None else {}
        if self.name not in results:
            results[self.name] = self._forward(*args, **kwargs)
        return results[self.name]
