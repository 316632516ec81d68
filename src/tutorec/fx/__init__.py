"""Tracing: a model's calls as a graph, which TorchScript can compile and others can load."""

from tutorec._lazy import lazy_package
from tutorec.fx.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]

__getattr__, __dir__ = lazy_package(__name__)
