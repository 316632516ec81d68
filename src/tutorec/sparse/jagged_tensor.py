"""Facade: the jagged types under TorchRec's path."""

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
