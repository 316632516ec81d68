"""Tracing: a model's calls written down as a graph, which TorchScript can compile and another process can load."""

from tutorec.fx.tracer import Tracer, symbolic_trace

__all__ = ["Tracer", "symbolic_trace"]
