"""Models on top of the collections of tables, and the metrics that judge them."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
