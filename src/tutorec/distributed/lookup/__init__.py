"""The lookups of one rank between the two exchanges."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
