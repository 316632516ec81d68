"""A tracer for models with embedding tables.

torch.fx runs a model's ``forward`` once with *proxies* for inputs and writes down each call that
they meet. What a table collection needs beyond that: modules that stay one call in the graph
although they are not torch's own, values that are still on their way, and models that are wrapped
for training on many ranks.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.graph import Graph

from tutorec.awaitable import LazyAwaitable, NoWait

__all__ = ["Tracer", "is_fx_tracing", "symbolic_trace"]


class _State:
    """How many traces by a `Tracer` are running."""

    depth: int = 0


def is_fx_tracing() -> bool:
    """Whether a `Tracer` is tracing at this moment; torch's own tracer does not count."""
    return _State.depth > 0


class Tracer(torch.fx.Tracer):
    """torch.fx's tracer, for models with collections of tables.

    - A module whose class or printed name is in ``leaf_modules`` stays one call, as modules of
      torch itself do. So does one that says ``is_traced_whole = True``, as a collection over the
      ranks of a process group does.
    - A lazy value is waited for where it enters the graph.
    - Of a model in ``DistributedModelParallel`` (or torch's DDP) the model is traced; the wrappers'
      forward takes ``*args``, which no tracer can look into.

    Args:
        leaf_modules: Names of classes, or as modules print them, for example
            ``["IntNBitTableBatchedEmbeddingBagsCodegen"]``.

    Raises:
        TypeError: ``leaf_modules`` is one string, or holds something else than names.

    Example:
        >>> import torch
        >>> class Twice(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + x
        >>> model = torch.nn.Sequential(Twice(), torch.nn.ReLU())
        >>> [node.op for node in Tracer().trace(model).nodes]
        ['placeholder', 'call_function', 'call_module', 'output']
        >>> [node.op for node in Tracer(leaf_modules=["Twice"]).trace(model).nodes]
        ['placeholder', 'call_module', 'call_module', 'output']

    Source:
        TorchRec's ``torchrec.fx.Tracer``.
    """

    def __init__(self, leaf_modules: Sequence[str] | None = None) -> None:
        super().__init__()
        names = list(leaf_modules or [])
        if isinstance(leaf_modules, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"leaf_modules={leaf_modules!r}: a list of class names is wanted, as in "
                "['EmbeddingBagCollection']"
            )
        self._leaf_modules = names

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module stays one call in the graph."""
        named = type(m).__name__ in self._leaf_modules or m._get_name() in self._leaf_modules
        if named or getattr(m, "is_traced_whole", False):
            return True

        return super().is_leaf_module(m, module_qualified_name)

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> Graph:
        """The calls of a model as a graph.

        Args:
            root: The model, or a function.
            concrete_args: Arguments that are known now; the graph holds what follows from them.

        Returns:
            The graph; ``torch.fx.GraphModule(root, graph)`` runs it.
        """
        _State.depth += 1
        try:
            graph = super().trace(root, concrete_args)
        finally:
            _State.depth -= 1

        _resolve_annotations(
            graph, type(without_wrappers(root)).forward if isinstance(root, nn.Module) else root
        )
        return graph

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],
        is_module: bool,
        concrete_args: dict[str, Any] | tuple[Any, ...] | None = None,
    ) -> tuple[Any, list[Any]]:
        """Inputs of the graph: those of the model, not of a wrapper around it."""
        model = without_wrappers(self.root)
        if not is_module or model is self.root:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        forward, args = super().create_args_for_root(type(model).forward, True, concrete_args)
        return forward, [model, *args[1:]]

    def create_arg(self, a: Any) -> Any:
        """The graph's argument for a value of eager code."""
        if isinstance(a, LazyAwaitable):
            return self.create_arg(a.wait())

        # It stays an awaitable: the caller of the graph waits for it as for the model's own.
        if isinstance(a, NoWait):
            return self.create_node(
                "call_function", NoWait, (self.create_arg(a.wait()),), {}, type_expr=NoWait
            )
        if isinstance(a, torch.Tensor) and (path := self._path_of_tensor(a)):
            return self.create_node("get_attr", path, (), {})
        return super().create_arg(a)

    def _path_of_tensor(self, tensor: torch.Tensor) -> str | None:
        """The path of a parameter or buffer, without `DistributedModelParallel`'s own prefix."""
        modules = self.root.named_modules() if isinstance(self.root, nn.Module) else ()
        for path, module in modules:
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is tensor:
                    return f"{path}.{name}" if path else name
        return None

    def path_of_module(self, mod: nn.Module) -> str:
        """The path of a module; a module outside the ``nn.Module`` tree is traced through."""
        try:
            return super().path_of_module(mod)
        except NameError:
            name = type(mod).__name__
            if self.is_leaf_module(mod, name):
                raise ValueError(
                    f"a {name} is called that is not a submodule of the traced "
                    f"{type(self.root).__name__}, so the graph cannot name it: assign it to an "
                    f"attribute, or leave {name!r} out of leaf_modules"
                ) from None
            return name


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: Sequence[str] | None = None,
) -> torch.fx.GraphModule:
    """A model as a graph that runs in its place.

    Args:
        root: The model, or a function.
        concrete_args: Arguments that are known now; the graph holds what follows from them.
        leaf_modules: Names of classes whose modules stay one call, see `Tracer`.

    Returns:
        A module with the model's submodules and the graph's code, ``.code``.

    Example:
        >>> import torch
        >>> traced = symbolic_trace(lambda x, y: torch.relu(x) + y)
        >>> print(traced.code.strip())
        def forward(self, x, y):
            relu = torch.relu(x);  x = None
            add = relu + y;  relu = y = None
            return add

    Source:
        TorchRec's ``torchrec.fx.symbolic_trace``.
    """
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    name = getattr(root, "__name__", type(root).__name__)
    return torch.fx.GraphModule(tracer.root, graph, name)


def _resolve_annotations(graph: Graph, forward: Callable[..., Any]) -> None:
    """Annotations as types instead of strings, which TorchScript would look up by name."""
    named = [node for node in graph.nodes if isinstance(node.type, str)]
    if not named:
        return

    try:
        hints = typing.get_type_hints(inspect.unwrap(forward))
    except Exception:  # a name that is imported for type checkers only; then the graph says nothing
        hints = {}
    for node in named:
        node.type = hints.get("return" if node.op == "output" else str(node.target).lstrip("*"))


def without_wrappers(module: nn.Module) -> nn.Module:
    """The model inside of wrappers whose forward takes whatever it is given."""
    while _takes_anything(module):
        inner = getattr(module, "_dmp_wrapped_module", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner
    return module


def _takes_anything(module: nn.Module) -> bool:
    parameter_kinds = {
        parameter.kind for parameter in inspect.signature(module.forward).parameters.values()
    }
    return parameter_kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
