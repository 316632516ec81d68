"""What stands in for the forward of a module that a pipeline runs ahead.

The module stays what it is and where it is; an attribute ``forward`` of the object hides that of its class until the
pipeline is detached. Outside of the pipeline's own forward it does what the module does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

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

    Source:
        TorchRec's ``PipelinedForward``.
    """

    def __init__(self, name: str, module: ShardedModule[Any, Any, Any, Any], current: Current) -> None:
        self.name = name
        self._module, self._current, self._forward = module, current, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result for the batch; by the module's own forward where nothing of it was started early."""
        ctx = self._current()
        if ctx is None or self.name not in ctx.module_contexts:
            return self._forward(*args, **kwargs)
        look_up(self.name, self._module, ctx)
        del ctx.module_contexts[self.name]
        return ctx.embedding_a2a_requests.pop(self.name)


def look_up(name: str, module: ShardedModule[Any, Any, Any, Any], ctx: TrainPipelineContext) -> None:
    """Look the rows of a batch up whose ids have been sent, and send them back, unless that has been done."""
    if name in ctx.input_dist_tensors_requests:
        arrived = ctx.input_dist_tensors_requests.pop(name).wait()
        ctx.embedding_a2a_requests[name] = module.compute_and_output_dist(ctx.module_contexts[name], arrived)


@dataclass
class Ahead:
    """The batch whose preprocessing runs ahead of its forward at this moment, or None."""

    ctx: TrainPipelineContext | None = None


class PipelinedPostproc:
    """Of a module between the batch and a sharded module: runs once for each batch, and the forward has its result.

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
