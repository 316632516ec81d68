"""The moves between ranks: ids to the tables, pooled rows home, and the gradients of both."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
