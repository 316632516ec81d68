"""Serving: quantized and sharded models, as graphs and as files for processes without Python."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
