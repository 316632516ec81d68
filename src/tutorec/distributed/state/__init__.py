"""State of sharded modules: weights and optimizer state by the names of the unsharded module."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
