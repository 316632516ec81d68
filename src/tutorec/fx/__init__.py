"""Tracing: a model's calls written down as a graph, which TorchScript can compile and another process can load."""

from importlib import import_module

from tutorec.fx.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]


def __getattr__(name: str) -> object:
    """Load a submodule at its first use."""
    if name != "utils":
        raise AttributeError(f"module 'tutorec.fx' has no attribute {name!r}")
    return import_module("tutorec.fx.utils")
