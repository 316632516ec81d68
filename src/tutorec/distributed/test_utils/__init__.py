"""Test utilities of models on several ranks, under TorchRec's names."""

from tutorec._lazy import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
