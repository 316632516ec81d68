"""What a rank computes between the two exchanges: rows out of the tables that it holds."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
