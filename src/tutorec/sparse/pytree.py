"""The jagged and keyed tensors as nodes of a pytree, so that ``tree_map`` and ``torch.export`` see their tensors.

What is a leaf, and what is context (which two trees must share to be of the same structure):

====================  =======================================================  ========================================
type                  leaves                                                   context
====================  =======================================================  ========================================
JaggedTensor          values ``[N]``, lengths ``[B]``, weights ``[N]``         whether there are weights
KeyedJaggedTensor     values ``[N]``, lengths ``[F * B]``, weights ``[N]``,    keys, whether there are weights; for
                      inverse indices                                          variable batch size samples of each key
KeyedTensor           values ``[B, D]``                                        keys, sizes, the dimension they cut
====================  =======================================================  ========================================

Lengths are a leaf always and offsets never, so that two batches have one structure whichever of the two they were built
from; a missing part is no leaf, so that ``tree_map`` meets tensors only. B is not context: an exported program takes
batches of other sizes. Rebuilding checks nothing: leaves may be anything that a function made of them.

Importing this module registers the types; ``tutorec.sparse`` does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch.fx._pytree
import torch.utils._pytree as pytree

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import strides_of_ranks

Leaves = tuple[list[Any], Any]


def _flatten_jagged(jagged: JaggedTensor) -> Leaves:
    weights = jagged.weights_or_none()
    leaves = [jagged.values(), jagged.lengths()]
    return leaves if weights is None else [*leaves, weights], weights is not None


def _unflatten_jagged(leaves: Iterable[Any], weighted: bool) -> JaggedTensor:
    values, lengths, *rest = leaves
    return JaggedTensor._from_parts(values, rest[0] if weighted else None, lengths, None)


def _flatten_batch(batch: KeyedJaggedTensor) -> Leaves:
    if batch._unchecked is not None and batch.values().is_cpu:
        batch._check_numbers()  # a batch that is made of the leaves is not checked
    weights, inverse = batch.weights_or_none(), batch.inverse_indices_or_none()
    leaves = [batch.values(), batch.lengths()]
    if weights is not None:
        leaves.append(weights)
    if inverse is not None:
        leaves.append(inverse[1])
    variable = batch.variable_stride_per_key()
    context = {
        "keys": list(batch.keys()),
        "weighted": weights is not None,
        "samples": batch.stride_per_key_per_rank() if variable else None,
        "inverse": None if inverse is None else list(inverse[0]),
        # Lengths of no key say nothing about the number of samples.
        "stride": None if batch.keys() or variable else batch.stride(),
    }
    return leaves, context


def _unflatten_batch(leaves: Iterable[Any], context: dict[str, Any]) -> KeyedJaggedTensor:
    values, lengths, *rest = leaves
    weights = rest.pop(0) if context["weighted"] else None
    inverse = None if context["inverse"] is None else (list(context["inverse"]), rest.pop(0))
    strides = None if context["samples"] is None else strides_of_ranks(context["samples"])
    batch = KeyedJaggedTensor._from_parts(
        list(context["keys"]), values, weights, lengths, None, context["stride"], None, strides
    )
    batch._inverse_indices = inverse
    return batch


def _flatten_keyed(keyed: KeyedTensor) -> Leaves:
    context = {"keys": list(keyed.keys()), "sizes": list(keyed.length_per_key()), "key_dim": keyed.key_dim()}
    return [keyed.values()], context


def _unflatten_keyed(leaves: Iterable[Any], context: dict[str, Any]) -> KeyedTensor:
    (values,) = leaves
    return KeyedTensor._from_parts(list(context["keys"]), list(context["sizes"]), values, context["key_dim"])


def _jagged_as(jagged: JaggedTensor, spec: pytree.TreeSpec) -> list[Any]:
    """The leaves for a program that was traced with a jagged tensor of this structure."""
    leaves, weighted = _flatten_jagged(jagged)
    _require("weights", weighted, spec.context)
    return leaves


def _batch_as(batch: KeyedJaggedTensor, spec: pytree.TreeSpec) -> list[Any]:
    """The leaves for a program that was traced with a batch of this structure: its keys, in its order."""
    keys = list(spec.context["keys"])
    if batch.keys() != keys:
        _require("keys", sorted(batch.keys()), sorted(keys))
        batch = batch.permute([batch.keys().index(key) for key in keys])
    leaves, context = _flatten_batch(batch)
    for part in ("weighted", "samples", "inverse"):
        _require(part, context[part], spec.context[part])
    return leaves


def _keyed_as(keyed: KeyedTensor, spec: pytree.TreeSpec) -> list[Any]:
    """The leaves for a program that was traced with a keyed tensor of this structure: its keys, in its order."""
    keys, sizes = list(spec.context["keys"]), list(spec.context["sizes"])
    if keyed.keys() != keys:
        _require("keys", sorted(keyed.keys()), sorted(keys))
        keyed = keyed.permute([keyed.keys().index(key) for key in keys])
    _require("sizes", list(keyed.length_per_key()), sizes)
    return [keyed.values()]


def _require(what: str, found: object, wanted: object) -> None:
    """Raise unless a part of the structure is the one that a program was traced with."""
    if found != wanted:
        raise ValueError(
            f"the program was traced with {what} {wanted}, and was called with {found}; trace it again for this input"
        )


def _register(
    kind: type,
    name: str,
    flatten: Callable[[Any], Leaves],
    unflatten: Callable[[Iterable[Any], Any], Any],
    flatten_as: Callable[[Any, pytree.TreeSpec], list[Any]],
    parts: Callable[[Any], list[str]],
) -> None:
    """Register one type; ``parts`` names the leaves of a context, for the paths of ``tree_map_with_path``."""

    def with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(node)
        return [(pytree.GetAttrKey(part), leaf) for part, leaf in zip(parts(context), leaves, strict=True)], context

    pytree.register_pytree_node(kind, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=with_keys)
    torch.fx._pytree.register_pytree_flatten_spec(kind, flatten_as)


def _jagged_parts(weighted: bool) -> list[str]:
    return ["_values", "_lengths", "_weights"] if weighted else ["_values", "_lengths"]


def _batch_parts(context: dict[str, Any]) -> list[str]:
    parts = _jagged_parts(context["weighted"])
    return parts if context["inverse"] is None else [*parts, "_inverse_indices"]


_HOME = "tutorec.sparse.jagged_tensor"
_register(JaggedTensor, f"{_HOME}.JaggedTensor", _flatten_jagged, _unflatten_jagged, _jagged_as, _jagged_parts)
_register(KeyedJaggedTensor, f"{_HOME}.KeyedJaggedTensor", _flatten_batch, _unflatten_batch, _batch_as, _batch_parts)
_register(KeyedTensor, f"{_HOME}.KeyedTensor", _flatten_keyed, _unflatten_keyed, _keyed_as, lambda _: ["_values"])
