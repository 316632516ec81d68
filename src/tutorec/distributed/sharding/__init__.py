"""Sharding types, one small file each; the docstring of the file is the figure of what travels where."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
