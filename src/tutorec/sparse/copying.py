"""The jagged and keyed tensors taken apart and put together: copies, files, and pytrees.

**Copies and files**: pickle, ``copy.copy``, ``copy.deepcopy``, ``torch.save`` and ``torch.load``.
Most of these objects are views: one feature of a batch, one key of a result. torch writes the whole
storage of a tensor, so that a pickled feature of 80 ids would carry its batch of 8 million. Here a
part that is a view of more is copied before it is written, and each object carries its own numbers
only. What that gives up is aliasing: features that were views of one batch come back as tensors of
their own. A shallow copy (``copy.copy``) shares the tensors.

``torch.load(path)`` reads what ``torch.save`` wrote with ``weights_only=True``, its default:
importing the types tells torch that the functions below, which do nothing but fill in the parts,
are safe to call. A process that has imported nothing of tutorec is told by torch which name it
lacks; ``import tutorec.sparse`` there is the cure.

**Pytrees**: ``tree_map`` and ``torch.export`` see the tensors of an object. What is a leaf, and
what is context (which two trees must share to be of the same structure):

====================  ===========================================  ===========================
type                  leaves                                       context
====================  ===========================================  ===========================
JaggedTensor          values ``[N]``, lengths ``[B]``, weights     whether there are weights
KeyedJaggedTensor     values ``[N]``, lengths ``[F * B]``,         keys, whether there are
                      weights, inverse indices                     weights; for variable batch
                                                                   size samples of each key
KeyedTensor           values ``[B, D]``                            keys, sizes, their dimension
====================  ===========================================  ===========================

Lengths are a leaf always and offsets never, so that two batches have one structure whichever of the
two they were built from; a missing part is not a leaf, so that ``tree_map`` meets tensors only.
B is not context: an exported program takes batches of other sizes. Rebuilding checks nothing:
leaves may be anything that a function made of them.

Importing this module registers the types; ``tutorec.sparse`` does.
"""

import copyreg
from collections.abc import Callable, Iterable
from typing import Any

import torch.fx._pytree
import torch.utils._pytree as pytree
from torch import Tensor

from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import KeyedLayout, strides_of_ranks

# Leaves by the names of the attributes that hold them, and context.
Leaves = tuple[dict[str, Any], Any]

_TYPES: dict[str, type] = {
    cls.__name__: cls for cls in (JaggedTensor, KeyedJaggedTensor, KeyedTensor)
}
# What can be made again from the rest, and would be written twice.
_DERIVED = frozenset({"_index_per_key", "_jt_dict", "_layout", "_checked"})


def _part(tensor: Tensor) -> Tensor:
    """What older files call for each part: the tensor itself."""
    return tensor


def _restore(name: str, state: dict[str, Any]) -> Any:
    """An object of one of the three types from its attributes; the rest is derived on demand."""
    restored = object.__new__(_TYPES[name])
    for attribute in _TYPES[name].__slots__:
        setattr(restored, attribute, state.get(attribute))

    if isinstance(restored, KeyedJaggedTensor):
        layout = object.__new__(KeyedLayout)
        for attribute in KeyedLayout.__slots__:
            setattr(layout, attribute, state.get(attribute))
        layout._checked = "_unchecked" not in state
        restored._layout = layout
    return restored


def _state(node: Any) -> tuple[Callable[..., Any], tuple[str, dict[str, Any]]]:
    """How an object is made again, for the module ``copyreg``, which pickle and deepcopy use.

    A batch is written without its layout, with the attributes of both: files do not depend on how
    the two share them.
    """
    state: dict[str, Any] = {}
    for owner in (node, getattr(node, "_layout", None)):
        for name in getattr(owner, "__slots__", ()):
            value = getattr(owner, name, None)
            if name not in _DERIVED and value is not None:
                state[name] = pytree.tree_map_only(Tensor, _compact, value)

    if isinstance(node, KeyedJaggedTensor) and not node._layout._checked:
        state["_unchecked"] = True
    return _restore, (type(node).__name__, state)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor itself where it fills its storage, else a copy that does."""
    if (
        type(tensor) is not Tensor
        or tensor.is_meta
        or not (tensor.is_leaf or not tensor.requires_grad)
    ):
        return tensor
    if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


for _type in _TYPES.values():
    copyreg.pickle(_type, _state)
torch.serialization.add_safe_globals([_restore, _part])


def _jagged_leaves(jagged: JaggedTensor) -> Leaves:
    leaves = {
        "_values": jagged.values(),
        "_lengths": jagged.lengths(),
        "_weights": jagged.weights_or_none(),
    }
    return leaves, jagged.weights_or_none() is not None


def _jagged(leaves: Iterable[Any], weighted: bool) -> JaggedTensor:
    values, lengths, *rest = leaves
    return jagged_from_parts(values, rest[0] if weighted else None, lengths, None)


def _batch_leaves(batch: KeyedJaggedTensor) -> Leaves:
    if not batch._layout._checked and batch.values().is_cpu:
        batch._check_numbers()  # a batch that is made of the leaves is not checked

    weights = batch.weights_or_none()
    inverse = batch.inverse_indices_or_none()
    variable = batch.variable_stride_per_key()
    leaves = {
        "_values": batch.values(),
        "_lengths": batch.lengths(),
        "_weights": weights,
        "_inverse_indices": None if inverse is None else inverse[1],
    }
    context = {
        "keys": list(batch.keys()),
        "weighted": weights is not None,
        "samples": batch.stride_per_key_per_rank() if variable else None,
        "inverse": None if inverse is None else list(inverse[0]),
        # Lengths of no key say nothing about the number of samples.
        "stride": None if batch.keys() or variable else batch.stride(),
    }
    return leaves, context


def _batch(leaves: Iterable[Any], context: dict[str, Any]) -> KeyedJaggedTensor:
    values, lengths, *rest = leaves
    weights = rest.pop(0) if context["weighted"] else None
    strides = None if context["samples"] is None else strides_of_ranks(context["samples"])
    batch = KeyedJaggedTensor._from_parts(
        list(context["keys"]), values, weights, lengths, None, context["stride"], None, strides
    )
    if context["inverse"] is not None:
        return batch._with_inverse_indices((list(context["inverse"]), rest.pop(0)))
    return batch


def _keyed_leaves(keyed: KeyedTensor) -> Leaves:
    context = {
        "keys": list(keyed.keys()),
        "sizes": list(keyed.length_per_key()),
        "key_dim": keyed.key_dim(),
    }
    return {"_values": keyed.values()}, context


def _keyed(leaves: Iterable[Any], context: dict[str, Any]) -> KeyedTensor:
    (values,) = leaves
    return KeyedTensor._from_parts(
        list(context["keys"]), list(context["sizes"]), values, context["key_dim"]
    )


def _register(
    cls: type,
    leaves_and_context: Callable[[Any], Leaves],
    unflatten: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Register one type as a node of a pytree."""

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = leaves_and_context(node)
        present = [(name, leaf) for name, leaf in leaves.items() if leaf is not None]
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in present], context

    def flatten(node: Any) -> tuple[list[Any], Any]:
        leaves, context = leaves_and_context(node)
        return [leaf for leaf in leaves.values() if leaf is not None], context

    def named(context: Any) -> dict[str, Any]:
        return context if isinstance(context, dict) else {"weighted": context}

    def flatten_as(node: Any, spec: pytree.TreeSpec) -> list[Any]:
        """The leaves for a program that was traced with this structure: its keys, in its order."""
        traced = named(spec.context)
        if (
            "keys" in traced
            and sorted(node.keys()) == sorted(traced["keys"])
            and node.keys() != traced["keys"]
        ):
            node = node.permute([node.keys().index(key) for key in traced["keys"]])

        leaves, context = flatten(node)
        for name, value in named(context).items():
            if value != traced[name]:
                raise ValueError(
                    f"the program was traced with {name} {traced[name]}, and was called with "
                    f"{value}; trace it again for this input"
                )
        return leaves

    name = f"tutorec.sparse.jagged_tensor.{cls.__name__}"
    pytree.register_pytree_node(
        cls, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=flatten_with_keys
    )
    torch.fx._pytree.register_pytree_flatten_spec(cls, flatten_as)


_register(JaggedTensor, _jagged_leaves, _jagged)
_register(KeyedJaggedTensor, _batch_leaves, _batch)
_register(KeyedTensor, _keyed_leaves, _keyed)
