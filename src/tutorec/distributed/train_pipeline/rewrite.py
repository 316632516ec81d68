"""Replacement of the forwards of a model's sharded modules, until the pipeline is detached."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.train_pipeline.pipeline_context import TrainPipelineContext
from tutorec.distributed.train_pipeline.runtime_forwards import (
    Ahead,
    PipelinedForward,
    PipelinedPostproc,
    written,
)
from tutorec.distributed.train_pipeline.tracing import EarlyInputs, arguments, trace_inputs
from tutorec.fx.tracer import without_wrappers

__all__ = ["RewrittenModel"]

_logger = logging.getLogger("tutorec.distributed")
_MISSING: Any = object()


class RewrittenModel:
    """Trace a model and replace the forwards that run ahead; ``restore`` puts them back.

    Args:
        model: A model with sharded modules.
        call: What the pipeline calls with a batch: the model, or a function that calls it.
        current: The batch in the pipeline's forward.
        preprocess: Whether modules without trainable parameters may run ahead, too.
        scripted: Whether parts without sharded modules are compiled with TorchScript.

    Attributes:
        early: What is started early, and why the rest is not.
        is_proven: Whether the trace has matched a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[Any], Any],
        current: Callable[[], TrainPipelineContext | None],
        preprocess: bool,
        scripted: bool,
    ) -> None:
        self.early: EarlyInputs = trace_inputs(model, call, preprocess)
        self.is_proven = not self.early.modules
        # Of the first batch: path of a module -> the error of its input.
        self._errors: dict[str, Exception] = {}
        self._ahead = Ahead()
        self._replaced: list[tuple[nn.Module, str, Any]] = []

        for path, module in self.early.modules.items():
            self._replace(module, "forward", PipelinedForward(path, module, current, self.reject))
        for path, module in self.early.preprocessing.items():
            self._replace(module, "forward", PipelinedPostproc(path, module, current, self._ahead))

        self._cut()
        if scripted:
            self._script(without_wrappers(model))
        self._warn()

    @property
    def env(self) -> ShardingEnv | None:
        """The ranks of the first module that is started early."""
        return next((getattr(module, "env", None) for module in self.early.modules.values()), None)

    @property
    def sends_status(self) -> bool:
        """Whether a rank without a batch can report so in the first round of every module."""
        return all(hasattr(module, "send_status") for module in self.early.modules.values())

    def prepare(self, ctx: TrainPipelineContext) -> None:
        """Compute the arguments of a batch and check them on this rank, without communication."""
        if not self.early.modules:
            return

        self._ahead.ctx = ctx
        try:
            self._compute(ctx)
        finally:
            self._ahead.ctx = None

        self.is_proven = True
        self._check(ctx)

    def _compute(self, ctx: TrainPipelineContext) -> None:
        """Compute the arguments of all modules; of the first batch, as many as possible."""
        try:
            ctx.arguments = arguments(self._program, ctx.batch)
        except Exception:
            if self.is_proven:
                raise

            for path in self.early.modules:
                try:
                    ctx.arguments |= arguments(self.early.cut([path]), ctx.batch)
                except Exception as error:  # the model's own code may raise anything
                    self._errors[path] = error
            if self._errors:
                raise

    def settle(self, ctx: TrainPipelineContext) -> Exception | None:
        """Leave in the forward the modules whose input fails on every rank for the first batch.

        Every rank calls it where `prepare` has failed on all of them. Blocks.

        Returns:
            The error of the batch on this rank that remains, or None: it is prepared now.
        """
        if not self._errors:
            return ctx.error

        errors = self._errors
        self._errors = {}
        paths = list(self.early.modules)
        flags = [[int(path in errors) for path in paths]]
        if self.env is not None and self.env.process_group is not None:
            flags = comm.all_gather_ints(flags[0], self.env.process_group, "pipeline")

        for path, rank_flags in zip(paths, zip(*flags, strict=True), strict=True):
            if all(rank_flags):
                self._leave(path, _no_input(errors.pop(path)))
        self._cut()
        self._warn()
        if errors:
            return next(iter(errors.values()))

        self.is_proven = True
        try:
            self._check(ctx)
        except Exception as error:
            return error
        return None

    def _check(self, ctx: TrainPipelineContext) -> None:
        """Check the arguments of a batch, module by module."""
        for path, module in self.early.modules.items():
            ctx.module_contexts[path] = module.create_context()
            args, kwargs = ctx.arguments[path]
            check = getattr(module, "prepare_input", None)
            if check is not None:
                check(ctx.module_contexts[path], *args, **kwargs)
            if not cast(PipelinedForward, module.forward).is_checked:
                ctx.written[path] = written(ctx.arguments[path])

    def reject(self, path: str, reason: str) -> None:
        """Stop starting a sharded module early. Every rank does so at the same batch."""
        self._leave(path, reason)
        self._cut()
        self._warn()

    def _leave(self, path: str, reason: str) -> None:
        """Leave a sharded module in the forward."""
        module = self.early.modules.pop(path)
        module.forward = cast(PipelinedForward, module.forward).original
        self.early.reasons[path] = reason

    def _cut(self) -> None:
        """Compute ahead only what the modules that are started early need."""
        self._program = program = self.early.cut(self.early.modules)
        calls = [node for node in program.graph.nodes if node.op == "call_module"]
        called = {program.get_submodule(str(node.target)) for node in calls}
        for path, module in list(self.early.preprocessing.items()):
            if module not in called:
                del self.early.preprocessing[path]

    def _warn(self) -> None:
        if self.early.reasons:
            _logger.warning(
                "a pipeline cannot start every sharded module early:\n%s", self.explain()
            )

    def explain(self) -> str:
        """Which sharded modules are started early, and why the others are not."""
        lines = [f"{path}: started early" for path in self.early.modules]
        lines += [
            f"{path}: runs ahead, before a sharded module" for path in self.early.preprocessing
        ]
        lines += [
            f"{path}: runs in the forward, since {reason}"
            for path, reason in self.early.reasons.items()
        ]
        return "\n".join(lines) or "the model has no sharded modules"

    def restore(self) -> None:
        """Restore the forwards of the model."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            if value is _MISSING:
                owner.__dict__.pop(name)
            else:
                setattr(owner, name, value)

    def _replace(self, owner: nn.Module, name: str, value: Any) -> None:
        registry = owner._modules if name in owner._modules else owner.__dict__
        self._replaced.append((owner, name, registry.get(name, _MISSING)))
        setattr(owner, name, value)

    def _script(self, module: nn.Module) -> None:
        """Compile the largest parts without sharded modules, if TorchScript accepts them."""
        ahead = {*self.early.modules.values(), *self.early.preprocessing.values()}
        for name, child in list(module.named_children()):
            if isinstance(child, ShardedModule) or child in ahead:
                continue
            if any(
                isinstance(submodule, ShardedModule) or submodule in ahead
                for submodule in child.modules()
            ):
                self._script(child)
                continue

            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=r".torch\.jit\.\w+. is deprecated")
                    self._replace(module, name, torch.jit.script(child))
            except Exception as error:  # TorchScript's compiler has no common class of errors
                _logger.info("apply_jit: %s is not compiled: %s", type(child).__name__, error)


def _no_input(error: Exception) -> str:
    """Why a module whose input fails runs in the forward."""
    text = next(iter(str(error).splitlines()), "")
    reason = f"its input cannot be computed ahead ({type(error).__name__}: {text})"
    if "NoneType" in text:
        reason += (
            "; a trace takes `is not None` as true, so hand weights_or_none() on without asking"
        )
    return reason
