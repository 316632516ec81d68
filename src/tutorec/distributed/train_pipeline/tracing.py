"""Tracing of a model's forward, to compute the inputs of sharded modules ahead of it.

A pipeline sends the ids of a batch before the model's forward needs them. The forward is therefore
traced once by torch.fx, with sharded modules as leaves, and the nodes from the batch to their
arguments are cut out of the graph::

    forward(batch)                                   the slice, which runs ahead of the forward
      sparse = batch.sparse_features                   sparse = batch.sparse_features
      pooled = self.ebc(sparse.permute([1, 0]))        {"ebc": ((sparse.permute([1, 0]),), {})}
      dense = self.dense(batch.dense_features)
      return self.over(pooled, dense)

What cannot run ahead is reported with a reason and runs in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.fx.tracer import Tracer as ModelTracer
from tutorec.fx.tracer import without_wrappers

__all__ = ["Arguments", "EarlyInputs", "Tracer", "trace_inputs"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_KNOWN = ("torch", "tutorec")  # functions of these packages do not change what they are given


class Tracer(ModelTracer):
    """Traces a model down to its sharded modules; a module without one inside is a leaf.

    Args:
        leaf_modules: Paths of further leaf modules.

    Source:
        TorchRec's ``torchrec.distributed.train_pipeline.tracing.Tracer``.
    """

    def __init__(self, leaf_modules: Sequence[str] | None = None) -> None:
        super().__init__()
        self._leaf_paths = list(leaf_modules or [])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a leaf of the graph."""
        if isinstance(m, ShardedModule) or module_qualified_name in self._leaf_paths:
            return True
        return not any(isinstance(submodule, ShardedModule) for submodule in m.modules())

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Replace the call of a wrapper (DDP, `DistributedModelParallel`) by that of its module."""
        inner = without_wrappers(m)
        return (
            super().call_module(m, forward, args, kwargs) if inner is m else inner(*args, **kwargs)
        )


@dataclass(frozen=True)
class EarlyInputs:
    """The parts of a model that can run ahead of its forward.

    Args:
        modules: Path -> sharded modules that can be started early, in forward order.
        preprocessing: Path -> modules without parameters whose output they read, in that order.
        reasons: Path of every other sharded module -> why it cannot.
        cut: Makes the program of some of ``modules``; `arguments` runs it.
    """

    modules: dict[str, ShardedModule[Any, Any, Any, Any]]
    preprocessing: dict[str, nn.Module]
    reasons: dict[str, str]
    cut: Callable[[Collection[str]], fx.GraphModule]


def arguments(program: fx.GraphModule, batch: Any) -> dict[str, Arguments]:
    """The arguments of the modules of a program for a batch."""
    # Not the call of the module: that prints the graph to stderr where the batch is wrong.
    return type(program).forward(program, batch)  # type: ignore[operator]


class _Step(nn.Module):
    """The traced call of a pipeline, which may do more than call the model."""

    def __init__(self, model: nn.Module, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self._call = (call,)  # in a tuple, so that the model is not registered as a submodule twice

    def forward(self, batch: Any) -> Any:
        return self._call[0](batch)


@dataclass
class _Slice:
    """Collects the nodes that lead to a node, or the first reason why they cannot run ahead."""

    modules: Mapping[str, nn.Module]
    names: Mapping[int, str]
    calls: Mapping[nn.Module, int]
    preprocess: bool
    nodes: set[fx.Node] = field(default_factory=set)

    def obstacle(self, node: fx.Node) -> str | None:
        """Why the arguments of a node cannot be computed ahead of the forward, or None."""
        for parent in node.all_input_nodes:
            if parent in self.nodes:
                continue

            reason = self._why_not(parent) or self.obstacle(parent)
            if reason is not None:
                return reason
            self.nodes.add(parent)

        return None

    def _why_not(self, node: fx.Node) -> str | None:
        if node.op == "call_module":
            return self._why_not_module(self.modules[str(node.target)])
        if node.op == "get_attr":
            value = _attribute(self.modules[""], str(node.target))
            return (
                f"its input needs the parameter {node.target}"
                if isinstance(value, nn.Parameter)
                else None
            )
        if node.op not in ("call_function", "call_method"):
            return None

        name = _called(node)
        effect = _writes(node)
        if effect is None and _is_random(name):
            effect = "draws random numbers"
        return f"its input needs {name}(), which {effect} and would run twice" if effect else None

    def _why_not_module(self, module: nn.Module) -> str | None:
        name = self.names.get(id(module), type(module).__name__)
        if isinstance(module, ShardedModule):
            return f"its input needs the result of the sharded module {name!r}"
        if any(parameter.requires_grad for parameter in module.parameters()):
            return f"its input needs the module {name!r}, whose parameters are trained"
        if not self.preprocess:
            return (
                f"its input needs the module {name!r}, which runs ahead only with "
                "pipeline_postproc=True"
            )

        return (
            f"its input needs the module {name!r}, which is called several times"
            if self.calls[module] > 1
            else None
        )


def trace_inputs(model: nn.Module, call: Callable[[Any], Any], preprocess: bool) -> EarlyInputs:
    """Find the sharded modules whose input can be computed ahead of the forward.

    If the forward cannot be traced to its end, because it branches on values, the calls before that
    point still count. A module that is called several times is started early for its first call.

    Args:
        model: A model with sharded modules; it may be wrapped.
        call: What a pipeline calls with a batch: the model, or a function that calls it.
        preprocess: Whether modules without trainable parameters may run ahead, too.
    """
    named = dict(without_wrappers(model).named_modules())
    sharded = {path: module for path, module in named.items() if isinstance(module, ShardedModule)}
    # A sharded module inside another one is called by that one, not by the forward.
    inner = {
        module_inside
        for outer in sharded.values()
        for module_inside in outer.modules()
        if module_inside is not outer
    }
    sharded = {path: module for path, module in sharded.items() if module not in inner}

    names = {id(module): path for path, module in named.items()}
    root = _Step(model, call)
    tracer = Tracer()
    stopped = ""

    try:
        tracer.trace(root)
    except Exception as error:  # the model's own code may raise anything when it gets proxies
        first = next(iter(str(error).splitlines()), "")
        stopped = (
            f"the forward cannot be traced as far as its call ({type(error).__name__}: {first})"
        )

    modules: dict[str, nn.Module] = dict(root.named_modules())
    calls = _calls(tracer.graph, root)
    first_calls: dict[str, fx.Node] = {}
    needed: dict[str, set[fx.Node]] = {}
    reasons: dict[str, str] = {}

    for node in tracer.graph.nodes:
        module = modules[str(node.target)] if node.op == "call_module" else None
        path = names.get(id(module))
        if (
            not isinstance(module, ShardedModule)
            or path is None
            or path in first_calls
            or path in reasons
        ):
            continue

        ahead = _Slice(modules, names, calls, preprocess)
        reason = ahead.obstacle(node)
        if reason is None:
            first_calls[path] = node
            needed[path] = ahead.nodes
        else:
            reasons[path] = reason
    for path in sharded:
        if path not in first_calls and path not in reasons:
            reasons[path] = stopped or "the forward does not call it"

    slices = {node for nodes in needed.values() for node in nodes}
    before = [
        modules[str(node.target)]
        for node in tracer.graph.nodes
        if node in slices and node.op == "call_module"
    ]
    preprocessing = {names.get(id(module), type(module).__name__): module for module in before}

    def cut(paths: Collection[str]) -> fx.GraphModule:
        nodes = {node for path in paths for node in needed[path]}
        return _program(root, tracer.graph, {path: first_calls[path] for path in paths}, nodes)

    return EarlyInputs({path: sharded[path] for path in first_calls}, preprocessing, reasons, cut)


def _program(
    root: nn.Module, graph: fx.Graph, calls: Mapping[str, fx.Node], needed: set[fx.Node]
) -> fx.GraphModule:
    """The slice as a module."""
    program = fx.Graph()
    copies = {}
    for node in graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = program.node_copy(node, copies.__getitem__)

    results = {path: (node.args, dict(node.kwargs)) for path, node in calls.items()}
    program.output(map_arg(results, copies.__getitem__))
    return fx.GraphModule(root, program, "EarlyInputs")


def _calls(graph: fx.Graph, root: nn.Module) -> dict[nn.Module, int]:
    counts: dict[nn.Module, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            module = root.get_submodule(str(node.target))
            counts[module] = counts.get(module, 0) + 1
    return counts


def _attribute(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


def _called(node: fx.Node) -> str:
    """Name of the function or method that a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def _writes(node: fx.Node) -> str | None:
    """How a function or a method writes into its arguments, by its name and arguments, or None."""
    name = _called(node)
    is_named_so = name.endswith("_") and not name.endswith("__")
    if is_named_so or node.kwargs.get("inplace") or node.kwargs.get("out") is not None:
        return "writes in place"
    return "may write in place" if _is_opaque(node.target) else None


def _is_opaque(target: Any) -> bool:
    """Whether a function is a caller's own, not traced because of ``torch.fx.wrap``."""
    return isinstance(target, FunctionType) and target.__module__.split(".")[0] not in _KNOWN


def _is_random(name: str) -> bool:
    """Whether a torch operator draws random numbers, by its name."""
    operator = getattr(torch.ops.aten, name, None)
    overloads = operator.overloads() if operator is not None else ()
    return any(
        torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags
        for overload in overloads
    )
