"""Copies of the jagged and keyed tensors: pickle, ``copy.copy``, ``copy.deepcopy``, ``torch.save`` and ``torch.load``.

Most of these objects are views: one feature of a batch, one key of a result. torch writes the whole storage of a
tensor, so that a pickled feature of 80 ids would carry its batch of 8 million. Here a part that is a view of more is
copied before it is written, and each object carries its own numbers only. What that gives up is aliasing: features
that were views of one batch come back as tensors of their own. A shallow copy (``copy.copy``) shares the tensors.

``torch.load(path)`` reads what ``torch.save`` wrote with ``weights_only=True``, its default: importing the types tells
torch that the functions below, which do nothing but fill in the parts, are safe to call. A process that has imported
nothing of tutorec is told by torch which name it lacks; ``import tutorec.sparse`` there is the cure.

Importing this module registers the types; ``tutorec.sparse`` does.
"""

import copy
import copyreg
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_KINDS: dict[str, type] = {kind.__name__: kind for kind in (JaggedTensor, KeyedJaggedTensor, KeyedTensor)}
# What can be made again from the rest, and would be written twice.
_DERIVED = frozenset({"_index_per_key", "_jt_dict"})


class _Part:
    """A tensor on its way into a copy: shared by a shallow copy, without the rest of its storage in any other."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Callable[[Tensor], Tensor], tuple[Tensor]]:
        return _part, (_compact(self.tensor),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        known = memo.get(id(self.tensor))
        if known is None:
            compact = _compact(self.tensor)
            known = copy.deepcopy(compact, memo) if compact is self.tensor else compact
            memo[id(self.tensor)] = known
        return known


def _part(tensor: Tensor) -> Tensor:
    """What stands for a part in a file: the tensor itself."""
    return tensor


def _restore(kind: str, state: dict[str, Any]) -> Any:
    """An object of one of the three types from its attributes; what is not among them is derived when asked for."""
    made = object.__new__(_KINDS[kind])
    for name in _KINDS[kind].__slots__:
        value = state.get(name)
        if isinstance(value, tuple):
            value = tuple(_bare(item) for item in value)
        setattr(made, name, _bare(value))
    return made


def _state(node: Any) -> tuple[Callable[..., Any], tuple[str, dict[str, Any]]]:
    """How an object is made again, for the module ``copyreg``, which pickle and copy ask."""
    state: dict[str, Any] = {}
    for name in type(node).__slots__:
        value = getattr(node, name, None)
        if name in _DERIVED or value is None:
            continue
        state[name] = tuple(_wrapped(item) for item in value) if isinstance(value, tuple) else _wrapped(value)
    return _restore, (type(node).__name__, state)


def _wrapped(value: Any) -> Any:
    return _Part(value) if isinstance(value, Tensor) else value


def _bare(value: Any) -> Any:
    return value.tensor if isinstance(value, _Part) else value


def _compact(tensor: Tensor) -> Tensor:
    """The tensor itself where it fills its storage, else a copy that does."""
    if type(tensor) is not Tensor or tensor.is_meta or not (tensor.is_leaf or not tensor.requires_grad):
        return tensor
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


for _kind in _KINDS.values():
    copyreg.pickle(_kind, _state)
torch.serialization.add_safe_globals([_restore, _part])
