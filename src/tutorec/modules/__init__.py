"""Modules that run in one process: embedding tables, their collections, and the dense layers around them."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
