"""Unsharded modules: embedding tables, their collections, and dense layers."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
