"""Batches as TensorDicts of nested tensors, in both directions, with weights and variable batch size.

A batch of F features is a TensorDict with one entry for each feature::

    unweighted     td["item"]             nested tensor [B, *] of ids
    weighted       td["item"]["values"]   nested tensor [B, *] of ids
                   td["item"]["weights"]  nested tensor [B, *], one weight per id

Features with different numbers of samples stand in a TensorDict with ``batch_size=[]``; where a batch has inverse
indices, ``td["item"]["inverse"]`` [B] holds the feature's row of them. The package tensordict is imported by
``kjt_to_td`` alone: whoever passes a TensorDict has imported it already.
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
from tutorec.sparse.layout import FEW_LISTS, differences, lengths_of_offsets
from tutorec.sparse.validate import checkable, key_list, missing_key

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase


def maybe_td_to_kjt(features: KeyedJaggedTensor, keys: list[str] | None = None) -> KeyedJaggedTensor:
    """The batch itself, or the batch that a TensorDict holds: what a collection does to its input first.

    Args:
        features: A batch, or a TensorDict as ``td_to_kjt`` takes it. Anything else is handed back as it is.
        keys: For a TensorDict: its features, in the order wanted; by default all, in its order.

    Returns:
        The batch.

    Raises:
        KeyError: The TensorDict has no such key.
        ValueError: An entry of the TensorDict is no nested tensor.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([7, 8]), lengths=torch.tensor([0, 2]))
        >>> maybe_td_to_kjt(batch) is batch
        True

    See Also:
        TorchRec's ``torchrec.sparse.tensor_dict.maybe_td_to_kjt``, which takes no weights and no variable batch.
    """
    if is_scripting():
        return features
    else:
        if type(features) is KeyedJaggedTensor or not _is_tensor_dict(features):
            return features
        return td_to_kjt(features, keys)


def td_to_kjt(td: "TensorDictBase | Any", keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
    """The batch that a TensorDict of nested tensors holds, in the form that the head of this module shows.

    Args:
        td: Its entries are nested tensors ``[B, *]``, or TensorDicts of ``values`` and ``weights``.
        keys: The features, in the order wanted; by default all, in the order of the TensorDict.

    Returns:
        The batch. Where features differ in their number of samples, or have inverse indices, it is one of variable
        batch size.

    Raises:
        KeyError: The TensorDict has no such key.
        TypeError: ``td`` is no TensorDict.
        ValueError: An entry is no nested tensor, or only some have weights or inverse indices.

    Example:
        >>> import torch
        >>> ragged = torch.nested.nested_tensor_from_jagged(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1]))
        >>> td_to_kjt({"item": ragged}).lengths()
        tensor([2, 1])

    See Also:
        ``kjt_to_td``.
    """
    if not hasattr(td, "items"):
        raise TypeError(f"td_to_kjt takes a TensorDict of nested tensors, got {type(td).__name__}")
    entries = dict(td.items())
    names = list(entries) if keys is None else key_list("td_to_kjt", keys)
    try:
        chosen: list[Any] = [entries[name] for name in names]
    except KeyError as error:
        raise missing_key("td_to_kjt: the TensorDict", error.args[0], list(entries)) from None
    values: list[Tensor] = []
    offsets: list[Tensor] = []
    for entry in chosen:
        # Ordinary nested tensors of ids make nearly every batch; their parts are read without asking torch.
        if type(entry).__name__ == "NestedTensor" and entry._lengths is None and entry._ragged_idx == 1:
            values.append(entry._values)
            offsets.append(entry._offsets)
    if len(values) == len(chosen) > 0 and not values[0].dtype.is_floating_point:
        samples = offsets[0].numel() - 1
        batch = _few_lists(names, values, offsets, samples)
        if batch is not None:
            return batch
        if all(each.numel() == samples + 1 for each in offsets):
            lengths = torch.cat(offsets).view(len(names), -1).diff().view(-1)
            return KeyedJaggedTensor(names, torch.cat(values), lengths=lengths, stride=samples)
    return _of_entries(names, [_read(name, entry) for name, entry in zip(names, chosen, strict=True)])


def _few_lists(names: list[str], values: list[Tensor], offsets: list[Tensor], samples: int) -> KeyedJaggedTensor | None:
    """The batch of ordinary entries with few lists, which are counted faster in Python, and checked there.

    None where there are many, where their numbers cannot be looked at, or where they do not fit; the checks of the
    constructor say why.
    """
    first = offsets[0]
    if samples * len(names) > FEW_LISTS or type(first) is not Tensor or not first.is_cpu or is_compiling():
        return None
    lengths: list[int] = []
    counts: list[int] = []
    for ids, starts in zip(values, offsets, strict=True):
        numbers: list[int] = starts.tolist()
        if numbers[0] != 0 or len(numbers) != samples + 1 or numbers[-1] != ids.shape[0]:
            return None
        lengths += differences(numbers)
        counts.append(numbers[-1])
    if len(set(names)) != len(names) or (lengths and min(lengths) < 0):
        return None
    made = torch.from_numpy(np.array(lengths, dtype=np.int64)).to(first.dtype)  # a third of the time of torch.tensor
    return KeyedJaggedTensor._from_parts(names, torch.cat(values), None, made, None, samples, counts)


def _of_entries(names: list[str], entries: list["_Entry"]) -> KeyedJaggedTensor:
    """The batch of entries of any form: weighted, of differing numbers of samples, with inverse indices."""
    if not entries:
        return KeyedJaggedTensor.empty()
    _check_alike(names, "weights", [entry.weights is not None for entry in entries])
    _check_alike(names, "inverse", [entry.inverse is not None for entry in entries])
    samples = [entry.samples for entry in entries]
    variable = len(set(samples)) > 1 or entries[0].inverse is not None
    weights = [entry.weights for entry in entries if entry.weights is not None]
    inverse = [entry.inverse for entry in entries if entry.inverse is not None]
    return KeyedJaggedTensor(
        names,
        torch.cat([entry.values for entry in entries]),
        torch.cat(weights) if weights else None,
        lengths=torch.cat([_lengths(entry.lengths, entry.offsets) for entry in entries]),
        stride=None if variable else samples[0],
        stride_per_key_per_rank=[[count] for count in samples] if variable else None,
        inverse_indices=(list(names), torch.stack(inverse)) if inverse else None,
    )


def kjt_to_td(kjt: KeyedJaggedTensor) -> "TensorDict":
    """The batch as a TensorDict of nested tensors, in the form that the head of this module shows.

    Ids and weights are shared with the batch, not copied. What the TensorDict cannot hold is on how many ranks the
    samples of one key of a variable batch lie: ``td_to_kjt`` gives them back as those of one rank.

    Args:
        kjt: The batch.

    Returns:
        A TensorDict with the batch's keys; its ``batch_size`` is ``[B]``, or ``[]`` for variable batch size.

    Raises:
        ImportError: The package tensordict is not installed.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([7, 8]), lengths=torch.tensor([0, 2]))
        >>> kjt_to_td(batch)["item"].unbind()  # doctest: +SKIP
        (tensor([], dtype=torch.int64), tensor([7, 8]))

    See Also:
        ``td_to_kjt``.
    """
    try:
        from tensordict import TensorDict
    except ImportError:
        raise ImportError("kjt_to_td needs the package tensordict: pip install 'tutorec[tensordict]'") from None
    inverse = kjt.inverse_indices_or_none()
    rows = {} if inverse is None else dict(zip(inverse[0], inverse[1].unbind(0), strict=True))
    entries: dict[str, Any] = {}
    for key, jagged in kjt.to_dict().items():
        values, weights = jt_to_nested(jagged), jt_weights_to_nested(jagged)
        if weights is None and inverse is None:
            entries[key] = values
            continue
        parts = {"values": values, "weights": weights, "inverse": rows.get(key)}
        # Inverse indices have as many entries as the full batch, so the feature's own entry has no common first size.
        size = [jagged.lengths().numel()] if inverse is None else []
        entries[key] = TensorDict({name: part for name, part in parts.items() if part is not None}, batch_size=size)
    return TensorDict(entries, batch_size=[] if kjt.variable_stride_per_key() else [kjt.stride()])


def nested_to_jt(nested: Tensor, weights: Tensor | None = None) -> JaggedTensor:
    """A nested tensor as a jagged tensor, without a copy where its values lie end to end.

    Args:
        nested: ``[B, *]`` or ``[B, *, D]``, in layout ``torch.jagged`` or ``torch.strided``.
        weights: A nested tensor of the same lengths, or one weight per value ``[N]``, or None.

    Returns:
        The lists.

    Raises:
        ValueError: The tensor is not nested, a dimension other than the second varies, or the weights' lengths differ.

    Example:
        >>> import torch
        >>> ragged = torch.nested.nested_tensor_from_jagged(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> nested_to_jt(ragged).to_dense()
        [tensor([5]), tensor([7, 1])]

    See Also:
        ``jt_to_nested``.
    """
    values, lengths, offsets = _parts("nested_to_jt", nested)
    if weights is not None and _is_nested(weights):
        weights, weight_lengths, weight_offsets = _parts("nested_to_jt: weights", weights)
        _check_lengths("nested_to_jt", (lengths, offsets), (weight_lengths, weight_offsets))
    return JaggedTensor(values, weights, lengths, offsets)


def jt_to_nested(jt: JaggedTensor) -> Tensor:
    """The values of a jagged tensor as a nested tensor ``[B, *]`` of layout ``torch.jagged``, without a copy.

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

    It shares its offsets with ``jt_to_nested(jt)``, so that torch knows the two to be of the same shape and
    multiplies them.

    Args:
        jt: The lists.

    Returns:
        The nested tensor ``[B, *]``, or None.

    Example:
        >>> import torch
        >>> jagged = JaggedTensor(torch.tensor([5.0, 7.0]), torch.tensor([0.5, 2.0]), lengths=torch.tensor([1, 1]))
        >>> (jt_to_nested(jagged) * jt_weights_to_nested(jagged)).unbind()
        (tensor([2.5000]), tensor([14.]))

    See Also:
        ``jt_to_nested``.
    """
    weights = jt.weights_or_none()
    return None if weights is None else _ragged(weights, jt.offsets())


def _ragged(values: Tensor, offsets: Tensor) -> Tensor:
    """A nested tensor, without the warning that torch logs at its first call, about a function of its own."""
    log = logging.getLogger("torch.fx._symbolic_trace")
    before, log.disabled = log.disabled, True
    try:
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)
    finally:
        log.disabled = before


class _Entry:
    """One feature of a TensorDict: values [N], lengths [B] or offsets [B + 1], weights [N], inverse indices."""

    __slots__ = ("inverse", "lengths", "offsets", "samples", "values", "weights")

    def __init__(self, where: str, nested: Tensor, weights: Tensor | None, inverse: Tensor | None) -> None:
        self.values, self.lengths, self.offsets = _parts(where, nested)
        self.samples = _count(self.lengths, self.offsets)
        self.weights, self.inverse = None, inverse
        if weights is not None:
            self.weights, lengths, offsets = _parts(f"{where}, weights", weights)
            _check_lengths(where, (self.lengths, self.offsets), (lengths, offsets))


def _read(name: str, entry: Any) -> _Entry:
    """One entry of a TensorDict, weighted or not."""
    where = f"td_to_kjt: feature {name!r}"
    if isinstance(entry, Tensor):
        return _Entry(where, entry, None, None)
    if not hasattr(entry, "keys"):
        raise ValueError(f"{where} is {type(entry).__name__}; {_REMEDY}")
    there = list(entry.keys())
    if "values" not in there or not {*there} <= {"values", "weights", "inverse"}:
        raise ValueError(
            f"{where} holds the entries {there}; a weighted feature holds 'values' and 'weights' "
            "(and 'inverse' for variable batch size), an unweighted one is the nested tensor itself"
        )
    return _Entry(where, entry["values"], entry.get("weights"), entry.get("inverse"))


_REMEDY = (
    "it should be a nested tensor [B, *] of ids: "
    "torch.nested.nested_tensor_from_jagged(ids, lengths=lengths), with one length per sample"
)


def _parts(where: str, nested: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, and lengths or offsets, of a nested tensor."""
    if not _is_nested(nested):
        raise ValueError(f"{where} is a tensor of shape {list(nested.shape)}; {_REMEDY}")
    inner: Any = nested
    if not hasattr(inner, "_ragged_idx"):  # Layout torch.strided.
        pieces = nested.unbind()
        lengths = torch.tensor([piece.shape[0] for piece in pieces], dtype=torch.int64, device=nested.device)
        return (torch.cat(pieces) if pieces else nested.values()), lengths, None
    # Public attributes of a nested tensor dispatch through Python, 15 to 60 us each; these are what they return.
    if inner._ragged_idx != 1:
        raise ValueError(
            f"{where} has shape {list(nested.shape)}: its dimension {inner._ragged_idx} varies, and a jagged tensor's "
            f"is dimension 1; transpose it: nested.transpose(1, {inner._ragged_idx})"
        )
    values = inner._values
    if values.dtype.is_floating_point and inner.requires_grad:
        values = nested.values()
    lengths, offsets = inner._lengths, inner._offsets
    if lengths is None:
        return values, None, offsets
    # Between the lists there may be values that belong to none, as after nested.narrow(1, ...).
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    source = torch.repeat_interleave(offsets[: lengths.numel()] - (ends - lengths), lengths, output_size=total)
    return values[source + torch.arange(total, device=values.device)], lengths, None


def _lengths(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    if lengths is not None:
        return lengths
    assert offsets is not None, "a nested tensor has lengths or offsets"
    return lengths_of_offsets(offsets)


def _count(lengths: Tensor | None, offsets: Tensor | None) -> int:
    if lengths is not None:
        return lengths.numel()
    assert offsets is not None, "a nested tensor has lengths or offsets"
    return offsets.numel() - 1


def _check_lengths(
    where: str, values: tuple[Tensor | None, Tensor | None], weights: tuple[Tensor | None, Tensor | None]
) -> None:
    """Raise unless a feature's weights have the lengths of its values. On the CPU alone: reading stops a device."""
    one, two = _lengths(*values), _lengths(*weights)
    if one.numel() != two.numel():
        raise ValueError(f"{where}: values have {one.numel()} samples, and weights have {two.numel()}")
    if not checkable(one) or one.device.type != "cpu":
        return
    wrong = (one != two).nonzero()
    if wrong.numel():
        sample = int(wrong[0])
        raise ValueError(
            f"{where}, sample {sample}, has {int(one[sample])} values and {int(two[sample])} weights; "
            "give one weight for each id"
        )


def _check_alike(names: list[str], what: str, there: list[bool]) -> None:
    """Raise where some features have a part and others have not."""
    if any(there) and not all(there):
        having = [name for name, has in zip(names, there, strict=True) if has]
        lacking = [name for name, has in zip(names, there, strict=True) if not has]
        raise ValueError(
            f"td_to_kjt: features {having} have {what!r}, and {lacking} have not; give it to all or to none "
            "(keys= chooses features)"
        )


def _is_nested(tensor: Tensor) -> bool:
    """Whether a tensor is nested: by its class where that says so, which is quicker than to ask it."""
    return type(tensor).__name__ == "NestedTensor" or tensor.is_nested


def _is_tensor_dict(features: object) -> bool:
    """Whether this is a TensorDict; without importing tensordict, as there is none where nobody has imported it."""
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(features, module.TensorDictBase)
