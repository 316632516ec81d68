"""Sharding types, one file each; its docstring is the figure of the data flow."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
