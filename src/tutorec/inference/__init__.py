"""Models that answer requests: quantized, sharded, as a graph, as a file that a process without Python loads."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
