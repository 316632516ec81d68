"""Models that stand on the collections of tables, and what they are judged by."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
