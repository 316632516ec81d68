"""Batches as TensorDicts of nested tensors and back, with weights and variable batch.

A batch of F features is a TensorDict with one entry for each feature::

    unweighted     td["item"]             nested tensor [B, *] of ids
    weighted       td["item"]["values"]   nested tensor [B, *] of ids
                   td["item"]["weights"]  nested tensor [B, *], one weight per id

Features with different numbers of samples stand in a TensorDict with ``batch_size=[]``; where a
batch has inverse indices, ``td["item"]["inverse"]`` [B] holds the feature's row of them. The
package tensordict is imported by ``kjt_to_td`` alone: whoever passes a TensorDict has imported it
already.
"""

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import checkable, differences, offsets_of_lengths
from tutorec.sparse.validate import key_list

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

# Up to this many lists are counted in Python, which then beats joining and checking tensors.
_FEW_LISTS = 64


def maybe_td_to_kjt(
    features: KeyedJaggedTensor, keys: list[str] | None = None
) -> KeyedJaggedTensor:
    """The batch itself, or the batch of a TensorDict: a collection's first operation.

    Args:
        features: A batch, or a TensorDict as ``td_to_kjt`` takes it. Anything else is handed back
            as it is.
        keys: For a TensorDict: its features, in the order wanted; by default all, in its order.

    Returns:
        The batch.

    Raises:
        KeyError: The TensorDict has no such key.
        ValueError: An entry of the TensorDict is not a nested tensor.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([7, 8]), lengths=torch.tensor([0, 2])
        ... )
        >>> maybe_td_to_kjt(batch) is batch
        True

    See Also:
        TorchRec's ``torchrec.sparse.tensor_dict.maybe_td_to_kjt``, which takes no weights and no
        variable batch.
    """
    if is_scripting():
        return features
    else:
        module = None if type(features) is KeyedJaggedTensor else sys.modules.get("tensordict")
        if module is None or not isinstance(features, module.TensorDictBase):
            return features
        return td_to_kjt(features, keys)


def td_to_kjt(td: "TensorDictBase | Any", keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
    """The batch of a TensorDict of nested tensors, in the form shown in the module's head.

    Args:
        td: Its entries are nested tensors ``[B, *]``, or TensorDicts of ``values`` and ``weights``.
        keys: The features, in the order wanted; by default all, in the order of the TensorDict.

    Returns:
        The batch. Where features differ in their number of samples, or have inverse indices, it is
        one of variable batch size.

    Raises:
        KeyError: The TensorDict has no such key.
        ValueError: An entry is not a nested tensor, or only some have weights or inverse indices.

    Example:
        >>> import torch
        >>> ragged = torch.nested.nested_tensor_from_jagged(
        ...     torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1])
        ... )
        >>> td_to_kjt({"item": ragged}).lengths()
        tensor([2, 1])

    See Also:
        ``kjt_to_td``.
    """
    entries: dict[str, Any] = dict(td.items())
    names = list(entries) if keys is None else key_list("td_to_kjt", keys)

    values: list[Tensor] = []
    offsets: list[Tensor] = []
    weights: dict[str, Tensor] = {}
    inverse: dict[str, Tensor] = {}
    for name in names:
        if name not in entries:
            raise KeyError(
                f"td_to_kjt: the TensorDict has no key {name!r}; its keys are {list(entries)}"
            )
        entry = entries[name]
        tensors = {} if isinstance(entry, Tensor) else _entry_tensors(name, entry)
        ids, starts = _flat(name, tensors["values"] if tensors else entry)
        values.append(ids)
        offsets.append(starts)
        if "weights" in tensors:
            weights[name] = _flat_weights(name, tensors["weights"], starts)
        if "inverse" in tensors:
            inverse[name] = tensors["inverse"]

    for label, by_feature in (("weights", weights), ("inverse", inverse)):
        if by_feature and len(by_feature) < len(names):
            raise ValueError(
                f"td_to_kjt: of the features {names} only {list(by_feature)} have {label!r}; give "
                "it to all or to none (keys= chooses features)"
            )

    samples = [starts.numel() - 1 for starts in offsets]
    even = len(set(samples)) == 1 and not inverse
    batch = _few_lists(names, values, offsets, samples[0]) if even and not weights else None
    if batch is not None or not names:
        return batch or KeyedJaggedTensor.empty()

    return KeyedJaggedTensor(
        names,
        torch.cat(values),
        torch.cat(list(weights.values())) if weights else None,
        lengths=torch.cat(offsets).view(len(names), -1).diff().view(-1)
        if even
        else torch.cat([starts.diff() for starts in offsets]),
        stride=samples[0] if even else None,
        stride_per_key=None if even else samples,
        stride_per_key_per_rank=[[count] for count in samples] if inverse else None,
        inverse_indices=(names, torch.stack(list(inverse.values()))) if inverse else None,
    )


def _few_lists(
    names: list[str], values: list[Tensor], offsets: list[Tensor], samples: int
) -> KeyedJaggedTensor | None:
    """A batch of unweighted features with few lists, counted and checked in Python: faster.

    None where there are many, where their numbers cannot be looked at, or where they do not fit;
    the checks of the constructor say why.
    """
    first = offsets[0]
    if (
        samples * len(names) > _FEW_LISTS
        or type(first) is not Tensor
        or not first.is_cpu
        or is_compiling()
    ):
        return None

    lengths: list[int] = []
    counts: list[int] = []
    for ids, starts in zip(values, offsets, strict=True):
        numbers: list[int] = starts.tolist()
        if numbers[0] != 0 or numbers[-1] != ids.shape[0]:
            return None
        lengths += differences(numbers)
        counts.append(numbers[-1])

    if len(set(names)) != len(names) or min(lengths, default=0) < 0:
        return None
    # two thirds of torch.tensor's time
    lengths_tensor = torch.from_numpy(np.array(lengths)).to(first.dtype)
    return KeyedJaggedTensor._from_parts(
        names, torch.cat(values), None, lengths_tensor, None, samples, counts
    )


def kjt_to_td(kjt: KeyedJaggedTensor) -> "TensorDict":
    """The batch as a TensorDict of nested tensors, in the form that the head of this module shows.

    Ids and weights are shared with the batch, not copied. What the TensorDict cannot hold is on how
    many ranks the samples of one key of a variable batch lie: ``td_to_kjt`` gives them back as
    those of one rank.

    Args:
        kjt: The batch.

    Returns:
        A TensorDict with the batch's keys; its ``batch_size`` is ``[B]``, or ``[]`` for variable
        batch size.

    Raises:
        ImportError: The package tensordict is not installed.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([7, 8]), lengths=torch.tensor([0, 2])
        ... )
        >>> kjt_to_td(batch)["item"].unbind()  # doctest: +SKIP
        (tensor([], dtype=torch.int64), tensor([7, 8]))

    See Also:
        ``td_to_kjt``.
    """
    try:
        from tensordict import TensorDict
    except ImportError:
        raise ImportError(
            "kjt_to_td needs the package tensordict: pip install 'tutorec[tensordict]'"
        ) from None

    inverse = kjt.inverse_indices_or_none()
    rows = {} if inverse is None else dict(zip(inverse[0], inverse[1].unbind(0), strict=True))
    entries: dict[str, Any] = {}
    for key, jagged in kjt.to_dict().items():
        values = jt_to_nested(jagged)
        weights = jt_weights_to_nested(jagged)
        if weights is None and inverse is None:
            entries[key] = values
            continue

        tensors = {"values": values, "weights": weights, "inverse": rows.get(key)}
        # Inverse indices have as many entries as the full batch, so the feature's own entry has no
        # common first size.
        size = [jagged.lengths().numel()] if inverse is None else []
        entries[key] = TensorDict(
            {name: tensor for name, tensor in tensors.items() if tensor is not None},
            batch_size=size,
        )

    return TensorDict(entries, batch_size=[] if kjt.variable_stride_per_key() else [kjt.stride()])


def nested_to_jt(nested: Tensor, weights: Tensor | None = None) -> JaggedTensor:
    """A nested tensor as a jagged tensor, without a copy where its values lie end to end.

    Args:
        nested: ``[B, *]`` or ``[B, *, D]``, in layout ``torch.jagged`` or ``torch.strided``.
        weights: A nested tensor of the same lengths, or one weight per value ``[N]``, or None.

    Returns:
        The lists.

    Raises:
        ValueError: The tensor is not nested, a dimension other than the second varies, or the
            weights' lengths differ.

    Example:
        >>> import torch
        >>> ragged = torch.nested.nested_tensor_from_jagged(
        ...     torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2])
        ... )
        >>> nested_to_jt(ragged).to_dense()
        [tensor([5]), tensor([7, 1])]

    See Also:
        ``jt_to_nested``.
    """
    values, offsets = _flat("nested_to_jt", nested)
    if weights is not None and weights.is_nested:
        weights = _flat_weights("nested_to_jt", weights, offsets)
    return JaggedTensor(values, weights, None, offsets)


def jt_to_nested(jt: JaggedTensor) -> Tensor:
    """A jagged tensor's values as a nested tensor ``[B, *]`` of layout ``torch.jagged``; a view.

    Args:
        jt: The lists, values ``[N]`` or ``[N, D]``.

    Returns:
        The nested tensor; gradients flow back into ``jt.values()``.

    Example:
        >>> import torch
        >>> jagged = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> jt_to_nested(jagged).unbind()
        (tensor([5]), tensor([7, 1]))

    See Also:
        ``nested_to_jt``; ``jt_weights_to_nested`` for the weights.
    """
    return _ragged(jt.values(), jt.offsets())


def jt_weights_to_nested(jt: JaggedTensor) -> Tensor | None:
    """The weights of a jagged tensor as a nested tensor, None without weights.

    It shares its offsets with ``jt_to_nested(jt)``, so that torch knows the two to be of the same
    shape and multiplies them.

    Args:
        jt: The lists.

    Returns:
        The nested tensor ``[B, *]``, or None.

    Example:
        >>> import torch
        >>> jagged = JaggedTensor(
        ...     torch.tensor([5.0, 7.0]), torch.tensor([0.5, 2.0]), lengths=torch.tensor([1, 1])
        ... )
        >>> (jt_to_nested(jagged) * jt_weights_to_nested(jagged)).unbind()
        (tensor([2.5000]), tensor([14.]))

    See Also:
        ``jt_to_nested``.
    """
    weights = jt.weights_or_none()
    return None if weights is None else _ragged(weights, jt.offsets())


def _ragged(values: Tensor, offsets: Tensor) -> Tensor:
    """A nested tensor, without the warning that torch logs at its first call."""
    log = logging.getLogger("torch.fx._symbolic_trace")
    before = log.disabled
    log.disabled = True
    try:
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    finally:
        log.disabled = before


def _entry_tensors(name: str, entry: Any) -> dict[str, Tensor]:
    """Values, weights and inverse indices of an entry that is a TensorDict."""
    tensors = dict(entry.items()) if hasattr(entry, "items") else {type(entry).__name__: entry}
    if "values" not in tensors or not tensors.keys() <= {"values", "weights", "inverse"}:
        raise ValueError(
            f"td_to_kjt: feature {name!r} holds {sorted(tensors)}; a weighted feature holds "
            f"'values' and 'weights' (and 'inverse' for variable batch size); {_REMEDY}"
        )
    return tensors


_REMEDY = (
    "ids are a nested tensor [B, *]: "
    "torch.nested.nested_tensor_from_jagged(ids, lengths=lengths), with one length per sample"
)


def _flat(name: str, nested: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``[N]`` and offsets ``[B + 1]`` of a feature's nested tensor."""
    # Public attributes of a nested tensor dispatch through Python, 15 to 60 us each; its own are
    # what they return.
    inner: Any = nested
    if type(nested).__name__ == "NestedTensor" and inner._ragged_idx == 1:
        values, lengths, offsets = inner._values, inner._lengths, inner._offsets
        if values.dtype.is_floating_point and inner.requires_grad:
            values = nested.values()
        if lengths is None:
            return values, offsets

        # Between the lists there may be values that belong to none, as after nested.narrow(1, ...).
        ends = offsets_of_lengths(lengths)
        shift = (offsets[: lengths.numel()] - ends[:-1]).repeat_interleave(lengths)
        return values[shift + torch.arange(shift.numel(), device=values.device)], ends

    if not nested.is_nested:
        raise ValueError(f"feature {name!r} is a tensor of shape {list(nested.shape)}; {_REMEDY}")
    if nested.layout is torch.jagged:
        raise ValueError(
            f"feature {name!r} has shape {list(nested.shape)}: its dimension {inner._ragged_idx} "
            "varies, and a jagged tensor's is dimension 1; transpose it: nested.transpose(1, "
            f"{inner._ragged_idx})"
        )

    rows = nested.unbind()
    lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64, device=nested.device)
    return torch.cat(rows) if rows else nested.values(), offsets_of_lengths(lengths)


def _flat_weights(name: str, nested: Tensor, offsets: Tensor) -> Tensor:
    """A feature's weights ``[N]``, with the lengths of its values. No check on a device."""
    weights, starts = _flat(f"{name}, weights", nested)
    if starts is offsets or not checkable(offsets):
        return weights

    if starts.shape != offsets.shape:
        raise ValueError(
            f"feature {name!r}: values have {offsets.numel() - 1} samples, and weights have "
            f"{starts.numel() - 1}"
        )
    if offsets.is_cpu and len(wrong := (starts != offsets).nonzero()):
        sample = int(wrong[0]) - 1
        count = int(offsets.diff()[sample])
        weight_count = int(starts.diff()[sample])
        raise ValueError(
            f"feature {name!r}, sample {sample}, has {count} values and {weight_count} weights"
        )
    return weights
