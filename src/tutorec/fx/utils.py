"""Marks in a traced graph, and checks that a tracer must not meet.

A transformation of a graph has to find places in it: where ids leave for another device, where they
have arrived. A *marker* is a call without effect at such a place. It exists in traced
graphs only; eager code pays an ``if``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace
from torch.fx.node import has_side_effect
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["assert_fx_safe", "call_whole", "fx_marker", "is_fx_symbolic_tracing"]


def _flag_without_compiling() -> bool:
    return _symbolic_trace.is_fx_tracing() and not torch.compiler.is_compiling()


# Whether torch.fx traces now, and not torch.export; older versions of torch have the two questions
# only.
is_fx_symbolic_tracing: Callable[[], bool] = getattr(
    _symbolic_trace, "is_fx_symbolic_tracing", _flag_without_compiling
)


# Its result is used by nobody, and it must not be taken out as dead code. TorchScript compiles it
# as it is.
@has_side_effect
@torch.fx.wrap
def _fx_marker(s: str, any_proxy_unused: Any) -> None:
    """Do nothing: the call is the mark."""


def fx_marker(s: str, any_proxy_unused: Any) -> None:
    """Leave a mark in the graph that is being traced; nothing in eager code.

    Args:
        s: The mark's name, for example ``"KJT_ONE_TO_ALL_FORWARD_BEGIN"``.
        any_proxy_unused: A value of the graph that the mark follows: it ties the call to a place.

    Example:
        >>> import torch
        >>> def double(x):
        ...     fx_marker("HERE", x)
        ...     return x + x
        >>> double(torch.ones(1))
        tensor([2.])
        >>> traced = torch.fx.symbolic_trace(double)
        >>> [node.args[0] for node in traced.graph.nodes if node.name == "_fx_marker"]
        ['HERE']

    Source:
        TorchRec's ``torchrec.fx.utils.fx_marker``.
    """
    if is_fx_symbolic_tracing():
        _fx_marker(s, any_proxy_unused)


def call_whole(module: nn.Module, traced: Any, *args: Any) -> Any:
    """The call of a submodule as one call in a traced graph, whatever tracer is at work.

    Args:
        module: A submodule of the model that is traced.
        traced: A value of the graph.
        args: What the module is called with.

    Returns:
        Its result, a value of the graph.

    Raises:
        ValueError: The module is the whole model.

    Example:
        >>> import torch
        >>> class Sign(torch.nn.Module):
        ...     def forward(self, x):
        ...         if is_fx_symbolic_tracing():
        ...             return call_whole(self, x, x)
        ...         return x if x.sum() > 0 else -x
        >>> torch.fx.symbolic_trace(torch.nn.Sequential(Sign()))(torch.tensor([-2.0, 1.0]))
        tensor([ 2., -1.])
    """
    tracer = traced.tracer
    if module is tracer.root:
        raise ValueError(
            f"a {type(module).__name__} is one call in a traced graph, and here it is all that is "
            "traced: trace a model that holds it"
        )

    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, {})


def assert_fx_safe(condition: bool, message: str) -> None:
    """Assert in eager code and in TorchScript; does nothing while a graph is traced.

    Args:
        condition: What has to hold. A traced one may be used here, though not in an ``if``.
        message: What is wrong otherwise.

    Raises:
        AssertionError: It does not hold.

    Example:
        >>> assert_fx_safe(2 < 1, "two are more than one")
        Traceback (most recent call last):
            ...
        AssertionError: two are more than one
    """
    traced = False
    if not is_scripting():
        traced = is_fx_symbolic_tracing()
    if not (traced or condition):
        raise AssertionError(message)
