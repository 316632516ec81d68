"""Data to train on: the shop with its planted truth, and files in Criteo's format."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
