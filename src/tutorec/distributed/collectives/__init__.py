"""Exchanges between ranks that autograd can differentiate: ids, rows, and their gradients."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
