"""What stands in for the forward of a module that a pipeline runs ahead.

The module stays what it is and where it is; an attribute ``forward`` of the object hides that of its class until the
pipeline is detached. Outside of the pipeline's own forward it does what the module does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tutorec.distributed.sharded_module import ShardedModule
from tutorec.distributed.train_pipeline.pipeline_context import TrainPipelineContext

__all__ = ["PipelinedForward", "PipelinedPostproc"]

# The batch that the pipeline runs the model with at this moment, or None.
Current = Callable[[], TrainPipelineContext | None]


class PipelinedForward:
    """Of a sharded module: takes what was started early in place of its arguments.

    Args:
        name: The module's path.
        module: The module.
        current: The batch in the pipeline's forward.
        reject: Told the name and the reason, where the model passes other arguments than the trace has said.

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
        self._module, self._current = module, current
        self._reject, self._is_checked = reject, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result for the batch, by the module's own forward if nothing was started early."""
        ctx = self._current()
        name = self.name
        if ctx is None or not (name in ctx.input_dist_tensors_requests or name in ctx.embedding_a2a_requests):
            return self.original(*args, **kwargs)
        if not self._is_checked and not _same(ctx.arguments[name], (args, kwargs)):
            self._reject(name, "the forward passes another input than its trace: it depends on types or settings")
            return self.original(*args, **kwargs)
        self._is_checked = True
        look_up(name, self._module, ctx)
        return ctx.embedding_a2a_requests.pop(name)


def look_up(name: str, module: ShardedModule[Any, Any, Any, Any], ctx: TrainPipelineContext) -> None:
    """Look up and send back the rows of a batch whose ids have arrived, unless already done."""
    if name in ctx.input_dist_tensors_requests:
        arrived = ctx.input_dist_tensors_requests.pop(name).wait()
        ctx.embedding_a2a_requests[name] = module.compute_and_output_dist(ctx.module_contexts[name], arrived)


def _same(traced: Any, passed: Any) -> bool:
    """Whether a module is passed what was computed ahead, as far as tensors can be compared."""
    (parts, tree), (others, other_tree) = tree_flatten(traced), tree_flatten(passed)
    return tree == other_tree and all(
        one is other or not isinstance(one, Tensor) or (isinstance(other, Tensor) and torch.equal(one, other))
        for one, other in zip(parts, others, strict=True)
    )


@dataclass
class Ahead:
    """The batch whose preprocessing runs ahead of its forward at this moment, or None."""

    ctx: TrainPipelineContext | None = None


class PipelinedPostproc:
    """The forward of a module in front of a sharded one: it runs once for each batch.

    Args:
        name: The module's path.
        module: The module.
        current: The batch in the pipeline's forward.
        ahead: The batch that is prepared.

    Source:
        TorchRec's ``PipelinedPostproc``.
    """

    def __init__(self, name: str, module: nn.Module, current: Current, ahead: Ahead) -> None:
        self.name = name
        self._forward, self._current, self._ahead = module.forward, current, ahead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result for the batch."""
        ctx = self._current()
        if ctx is not None and self.name in ctx.postproc_fwd_results:
            return ctx.postproc_fwd_results.pop(self.name)
        result = self._forward(*args, **kwargs)
        if self._ahead.ctx is not None:
            self._ahead.ctx.postproc_fwd_results[self.name] = result
        return result
