"""Facade: the jagged types under TorchRec's path."""

from tutorec.sparse.equality import jt_is_equal, kjt_is_equal, kt_is_equal
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import ComputeJTDictToKJT, ComputeKJTToJTDict, KeyedJaggedTensor
from tutorec.sparse.layout import offsets_of_lengths as _to_offsets
from tutorec.sparse.tensor_dict import td_to_kjt

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "_to_offsets",
    "jt_is_equal",
    "kjt_is_equal",
    "kt_is_equal",
    "td_to_kjt",
]
