"""JaggedTensor: one feature's lists of ids, one list per sample."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_leaves

from tutorec._check import is_int
from tutorec._kernels.jagged import jagged_to_padded_dense
from tutorec.awaitable import proxies_in
from tutorec.sparse.layout import (
    checkable,
    lengths_of_either,
    lengths_of_offsets,
    offsets_of_either,
    offsets_of_lengths,
    optional_to,
)
from tutorec.sparse.refuse import refuse_lists, require_tensors
from tutorec.sparse.validate import check_form, count_ids, refuse_complex

# While a graph is traced, these stay whole as calls in it: they are compiled as they stand.
for _name in (
    "first_entries lengths_of_either lengths_of_offsets lists_of longest "
    "offsets_of_either offsets_of_lengths optional_first_entries padded_rows _empty_like "
    "_from_dense"
).split():
    torch.fx.wrap(_name)

_TENSORS = ("values", "weights", "lengths", "offsets")


# Jagged types that are made of proxies, as code makes them while torch.fx traces it, count as
# proxies themselves: a function under `torch.fx.wrap` that is given one, or is given what a method
# of one returns, is one call in the graph, and the object is a call of its constructor there.
# TorchRec intercepts each construction for that (`ProxyableClassMeta`); here a construction in
# eager code pays one comparison of types.


class _SeenAsProxy:
    """What torch.fx asks of a proxy."""

    __slots__ = ()
    __class__: Any = Proxy  # isinstance(jagged, Proxy) looks here

    @property
    def tracer(self) -> Any:
        """The tracer of the first proxy among the parts."""
        return proxies_in(constructor_arguments(self))[0].tracer

    @property
    def node(self) -> Any:
        """The call of the constructor in the graph."""
        return self.__fx_create_arg__(self.tracer)  # type: ignore[attr-defined]

    # Of two proxies one may be None when the graph runs, as `lengths_or_none()` of a batch may.

    def lengths(self) -> Any:
        """Ids per list."""
        lengths = stored(self, "lengths")
        offsets = stored(self, "offsets")
        if lengths is None or offsets is None:
            return super().lengths()  # type: ignore[misc]
        return lengths_of_either(lengths, offsets)

    def offsets(self) -> Any:
        """Where each list starts."""
        lengths = stored(self, "lengths")
        offsets = stored(self, "offsets")
        if lengths is None or offsets is None:
            return super().offsets()  # type: ignore[misc]
        return offsets_of_either(lengths, offsets)


_proxy_classes: dict[type, type] = {}


def class_for(cls: type, values: Any) -> Any:
    """The class of a jagged type that holds these values: ``cls``, or its proxy variant.

    Args:
        cls: A jagged type.
        values: Its values: a tensor, or a proxy of one.
    """
    if isinstance(values, Tensor) or not proxies_in(values):
        return cls

    if cls not in _proxy_classes:
        attributes = {"__slots__": (), "__module__": cls.__module__}
        _proxy_classes[cls] = type(cls.__name__, (_SeenAsProxy, cls), attributes)
    return _proxy_classes[cls]


def _plain(cls: Any) -> Any:
    """The class itself, of one that is seen as a proxy."""
    return cls.__mro__[2] if issubclass(cls, _SeenAsProxy) else cls


def stored(jagged: Any, name: str) -> Any:
    """An argument of a jagged type as it or its layout stores it; None if it is not stored."""
    own = hasattr(jagged, f"_{name}")
    return getattr(jagged if own else getattr(jagged, "_layout", None), f"_{name}", None)


def constructor_arguments(jagged: Any) -> dict[str, Any]:
    """The arguments of a constructor that makes the same."""
    return {name: stored(jagged, name) for name in jagged._arguments.split()}


def stored_tensors(jagged: Any, *more: str) -> list[Tensor]:
    """Values, weights, lengths, offsets and ``more``, without what is not stored."""
    arguments = [stored(jagged, name) for name in (*_TENSORS, *more)]
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


# Methods of all three types, under other names there, so that TorchScript does not compile them.


def sharing(self: Any) -> Any:
    """One that shares the tensors."""
    copied = object.__new__(type(self))
    for name in _plain(type(self)).__slots__:
        setattr(copied, name, getattr(self, name))
    return copied


def constructor_call(self: Any, tracer: Any) -> Any:
    """What stands for it where it leaves a traced graph: a call of its constructor."""
    arguments = tracer.create_arg(constructor_arguments(self))
    return tracer.create_node("call_function", _plain(type(self)), (), arguments)


def read_on_stream(self: Any, stream: Any) -> None:
    """Tell the allocator that ``stream`` reads the tensors."""
    for tensor in stored_tensors(self, "inverse_indices"):
        tensor.record_stream(stream)


def bytes_of(self: Any) -> int:
    """Bytes of all tensors, those of strides and inverse indices among them."""
    tensors = stored_tensors(self, "inverse_indices", "stride_per_key_per_rank")
    return sum(tensor.nbytes for tensor in tensors)


def object_text(self: object) -> str:
    """TorchRec's form of an object: its class and its address."""
    return f"<tutorec.sparse.jagged_tensor.{type(self).__name__} object at {hex(id(self))}>"


class JaggedTensor:
    """One feature of a batch: a list of values for each sample, laid end to end.

    ==============  ===========  ================================================
    ``values()``    ``[N]``      ids, sample after sample (or rows, ``[N, D]``)
    ``lengths()``   ``[B]``      values per sample
    ``offsets()``   ``[B + 1]``  running sum; sample b is
                                 ``values[offsets[b]:offsets[b + 1]]``
    ``weights()``   ``[N]``      optional, one per value
    ==============  ===========  ================================================

    Args:
        values: All samples' values, end to end.
        weights: One weight per value, or None.
        lengths: Values per sample. Give this or ``offsets``; the other is derived.
        offsets: Running sum of the lengths, starting at 0.

    Raises:
        ValueError: Neither lengths nor offsets are given, or they do not describe ``values``.

    Example:
        >>> import torch
        >>> jagged = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> jagged.offsets()
        tensor([0, 1, 3])
        >>> jagged.to_dense()
        [tensor([5]), tensor([7, 1])]

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.JaggedTensor``.
    """

    __slots__ = ("_lengths", "_offsets", "_values", "_weights")

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

        if lengths is None and offsets is None:
            raise ValueError(
                "JaggedTensor: neither lengths nor offsets given; one of them says where "
                "samples end"
            )
        if not is_scripting():
            self._check()

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """A jagged tensor without samples; its offsets are the 0 that offsets start with."""
        weights: Tensor | None = None
        if is_weighted:
            weights = torch.empty([0], dtype=weights_dtype, device=device)
        values = torch.empty([0], dtype=values_dtype, device=device)
        lengths = torch.empty([0], dtype=lengths_dtype, device=device)
        return jagged_from_parts(values, weights, lengths, None)

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """Without a device, an empty one of the same dtypes; with one, uninitialised tensors.

        The second is what ``copy_`` fills; ``device=jt.device()`` makes it beside the first.
        """
        return _empty_like(jt, device)

    @torch.jit.unused
    def copy_(self, jt: "JaggedTensor", non_blocking: bool = False) -> "JaggedTensor":
        """Copy the other's parts, of equal shapes, into this one's memory."""
        copy_numbers("JaggedTensor", self, jt, non_blocking)
        return self

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "JaggedTensor":
        """The first ``lengths[b]`` entries of row b of ``values`` [B, longest], and weights."""
        if not is_scripting():
            _check_dense_lengths(values, lengths, weights)

        first_weights: Tensor | None = None
        if weights is not None:
            first_weights = optional_first_entries(weights, lengths)
        return JaggedTensor(first_entries(values, lengths), first_weights, lengths, None)

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> "JaggedTensor":
        """One list of values for each sample, the inverse of ``to_dense``. Lengths are int32."""
        if not is_scripting():
            _require_lists(values, weights)
        return _from_dense(values, weights)

    def to_dense(self) -> list[Tensor]:
        """One tensor of values for each sample: views. A sync point."""
        return lists_of(self._values, self.lengths())

    def to_dense_weights(self) -> list[Tensor] | None:
        """One tensor of weights for each sample, None without weights. A sync point."""
        weights = self._weights
        if weights is None:
            return None
        return lists_of(weights, self.lengths())

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Rows of equal length [B, desired_length]: longer samples are cut, shorter ones padded.

        Without ``desired_length`` rows are as long as the longest sample, and asking for that is a
        sync point.
        """
        width = longest(self.lengths()) if desired_length is None else desired_length
        return padded_rows(self._values, self.offsets(), width, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """The weights as rows of equal length, None without weights."""
        weights = self._weights
        if weights is None:
            return None
        width = longest(self.lengths()) if desired_length is None else desired_length
        return padded_rows(weights, self.offsets(), width, padding_value)

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def lengths(self) -> Tensor:
        """Values per sample [B]."""
        lengths = self._lengths
        if lengths is None:
            lengths = lengths_of_offsets(self._offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Values per sample [B] if they were given or asked for already."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each sample's values start [B + 1]."""
        offsets = self._offsets
        if offsets is None:
            offsets = offsets_of_lengths(self._lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Where each sample's values start [B + 1] if given or asked for already."""
        return self._offsets

    def values(self) -> Tensor:
        """All samples' values, end to end [N]."""
        return self._values

    def weights(self) -> Tensor:
        """One weight per value [N]; an error without weights."""
        weights = self._weights
        if weights is None:
            raise ValueError(
                "JaggedTensor has no weights; pass weights= when it is built, or ask "
                "weights_or_none()"
            )
        return weights

    def weights_or_none(self) -> Tensor | None:
        """One weight per value [N], or None."""
        return self._weights

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedTensor":
        """A copy on ``device``; the parts themselves where they are there already."""
        values = self._values.to(device, non_blocking=non_blocking)
        weights = optional_to(self._weights, device, non_blocking)
        lengths = optional_to(self._lengths, device, non_blocking)
        offsets = optional_to(self._offsets, device, non_blocking)
        if is_scripting():
            return JaggedTensor(values, weights, lengths, offsets)
        else:
            return jagged_from_parts(values, weights, lengths, offsets)

    _arguments = "values weights lengths offsets"
    __fx_create_arg__ = constructor_call
    record_stream = read_on_stream
    size_in_bytes = bytes_of
    __copy__ = sharing
    __repr__ = object_text

    @torch.jit.unused
    def __str__(self) -> str:
        return "JaggedTensor({\n    " + lists_text(self, "\n    ") + "\n})\n"

    @torch.jit.unused
    def _check(self) -> None:
        """Check the form of what a caller gave, and on the CPU the numbers."""
        values = self._values
        lengths = self._lengths
        offsets = self._offsets
        if type(values) is not Tensor:
            require_tensors("JaggedTensor", {"values": values})
            self.__class__ = class_for(JaggedTensor, values)
        if not checkable(values):
            return

        try:
            lists = check_form("JaggedTensor", values, self._weights, lengths, offsets)
        except AttributeError:
            tensors = {"weights": self._weights, "lengths": lengths, "offsets": offsets}
            require_tensors("JaggedTensor", tensors, optional=True)
            raise

        if values.is_cpu and count_ids(values.shape[0], lengths, offsets, [lists]) is None:
            refuse_lists("JaggedTensor", values.shape[0], lengths, offsets)


def jagged_from_parts(
    values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> JaggedTensor:
    """A jagged tensor from parts that are known to fit: no check, and in eager code no constructor.

    Args:
        values: ``[N, ...]``.
        weights: ``[N]`` or None.
        lengths: ``[B]`` or None.
        offsets: ``[B + 1]``, starting at 0, or None; one of the two is given.

    Returns:
        The lists.
    """
    if is_scripting():
        return JaggedTensor(values, weights, lengths, offsets)
    else:
        jagged = object.__new__(
            JaggedTensor if type(values) is Tensor else class_for(JaggedTensor, values)
        )
        jagged._values = values
        jagged._weights = weights
        jagged._lengths = lengths
        jagged._offsets = offsets
        return jagged


def _empty_like(jt: JaggedTensor, device: torch.device | None) -> JaggedTensor:
    weights = jt._weights
    if device is None:
        weights = None if weights is None else weights.new_empty([0])
        lengths = jt.lengths().new_empty([0])
        return jagged_from_parts(jt._values.new_empty([0]), weights, lengths, None)

    return jagged_from_parts(
        torch.empty_like(jt._values, device=device),
        optional_empty_like(weights, device),
        optional_empty_like(jt._lengths, device),
        optional_empty_like(jt._offsets, device),
    )


def _require_lists(values: Any, weights: Any) -> None:
    """Check that each sample's values and weights are tensors."""
    for name, lists in (("values", values), ("weights", weights)):
        if isinstance(lists, Proxy) or lists is None or set(map(type, lists)) <= {Tensor}:
            continue
        for sample, sample_list in enumerate(lists):
            require_tensors("JaggedTensor.from_dense", {f"{name}[{sample}]": sample_list})


def _from_dense(values: list[Tensor], weights: list[Tensor] | None) -> JaggedTensor:
    if len(values) == 0:
        raise ValueError(
            "JaggedTensor.from_dense: no samples given; JaggedTensor.empty() makes an empty one"
        )

    sizes = [value.size(0) for value in values]
    joined_weights: Tensor | None = None
    if weights is not None:
        if len(weights) != len(values):
            raise ValueError(
                f"JaggedTensor.from_dense: {len(values)} samples of values, {len(weights)} "
                "of weights"
            )
        for sample, size in enumerate(sizes):
            count = weights[sample].size(0)
            if count != size:
                raise ValueError(
                    f"JaggedTensor.from_dense: sample {sample} has {size} values and "
                    f"{count} weights"
                )
        joined_weights = torch.cat(weights)
        refuse_complex("JaggedTensor.from_dense", joined_weights)

    lengths = torch.tensor(sizes, dtype=torch.int32, device=values[0].device)
    return jagged_from_parts(torch.cat(values), joined_weights, lengths, None)


def copy_numbers(owner: str, target: Any, source: Any, non_blocking: bool) -> None:
    """Copy values, weights, lengths and offsets into another batch's or feature's memory.

    Args:
        owner: Name of their class, for the message.
        target: What is written.
        source: What is read; the part of lengths and offsets that it lacks is derived.
        non_blocking: Whether a copy from page-locked memory may overlap with what follows.

    Raises:
        ValueError: Only one of the two has weights, or their shapes differ; nothing is copied then.
    """
    remedy = f"make the target with {owner}.empty_like(source, device)"
    if (target._weights is None) != (source._weights is None):
        has, lacks = ("source", "target") if target._weights is None else ("target", "source")
        raise ValueError(
            f"{owner}.copy_: the {has} has weights and the {lacks} has no weights; {remedy}"
        )

    shape = list(source._values.shape)
    target_shape = list(target._values.shape)
    lists = source.lengths().numel()
    target_lists = target.lengths().numel()
    if shape != target_shape or lists != target_lists:
        raise ValueError(
            f"{owner}.copy_: the source has values of shape {shape} and {lists} lengths, and "
            f"the target has room for {target_shape} and {target_lists}; {remedy}"
        )

    for name in _TENSORS:
        tensor = stored(target, name)
        if tensor is not None:
            tensor.copy_(getattr(source, name)(), non_blocking=non_blocking)


# As in ``layout.py``, the next functions give None for None, which a traced graph may hand over.


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, itself if it has it already."""
    if tensor is None:
        return tensor
    return tensor.to(dtype)


def optional_empty_like(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    """An uninitialised tensor of the same shape and dtype on a device; None for None."""
    if tensor is None:
        return None
    return torch.empty_like(tensor, device=device)


def lists_text(jagged: JaggedTensor, between: str) -> str:
    """Its lists as text, ``[[1, 2], [], [3]]``; with weights values, ``between`` and weights."""
    text = str([values.tolist() for values in jagged.to_dense()])
    weights = jagged.to_dense_weights()
    if weights is None:
        return text
    return f'"values": {text},{between}"weights": {[numbers.tolist() for numbers in weights]}'


def lists_of(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """The next ``lengths[b]`` values for each sample b: views. A sync point."""
    if values is None:
        return values
    sizes: list[int] = lengths.long().tolist()
    return list(values.split_with_sizes(sizes))


def longest(lengths: Tensor) -> int:
    """The largest length, 0 without samples. A sync point."""
    if lengths.numel() == 0:
        return 0
    most: int = lengths.max().long().tolist()  # pyright: ignore[reportAssignmentType]
    return most


def padded_rows(values: Tensor, offsets: Tensor, width: int, padding: float) -> Tensor:
    """Rows of equal length, cut or padded at their ends.

    Args:
        values: ``[N, ...]``.
        offsets: ``[B + 1]``.
        width: Of a row.
        padding: What fills a shorter row.

    Returns:
        ``[B, width, ...]``.

    Raises:
        ValueError: The width is negative, or integers are padded with infinity or NaN.
    """
    if values is None:
        return values
    if not is_scripting():  # noqa: SIM102 (alone, so that it is not compiled)
        if checkable(values):
            if not is_int(width, least=0):
                raise ValueError(
                    "JaggedTensor.to_padded_dense: desired_length must be 0 or more, got "
                    f"{width}; it is a whole number"
                )
            if not values.is_floating_point() and not float(padding).is_integer():
                raise ValueError(
                    f"JaggedTensor.to_padded_dense: padding_value {padding} is not a "
                    f"{values.dtype}, which the values are; pad them with a whole number, or "
                    "convert them first: values.float()"
                )

    return jagged_to_padded_dense(values, offsets, width, padding)


def first_entries(values: Tensor, lengths: Tensor) -> Tensor:
    """The first ``lengths[b]`` entries of each row of ``values`` [B, longest, ...], end to end."""
    return values[torch.arange(values.size(1), device=values.device) < lengths.unsqueeze(1)]


def optional_first_entries(values: Tensor | None, lengths: Tensor) -> Tensor | None:
    """``first_entries``, or None for None."""
    if values is None:
        return None
    return first_entries(values, lengths)


def _check_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None) -> None:
    """Check dense rows [B, longest]: one length per row, none too long, weights alike."""
    where = "JaggedTensor.from_dense_lengths"
    require_tensors(where, {"values": values, "lengths": lengths})
    require_tensors(where, {"weights": weights}, optional=True)
    if not checkable(values):
        return

    if values.dim() < 2 or lengths.shape != values.shape[:1]:
        raise ValueError(
            f"{where}: values have shape {list(values.shape)} and lengths {list(lengths.shape)}; "
            "give one row for each sample, [B, longest], and one length for each row, [B]"
        )
    if weights is not None and weights.shape[:2] != values.shape[:2]:
        raise ValueError(
            f"{where}: weights have shape {list(weights.shape)} and values {list(values.shape)}"
        )
    if lengths.is_cpu and lengths.numel() and int(lengths.max()) > values.shape[1]:
        sample = int(lengths.argmax())
        raise ValueError(
            f"{where}: lengths[{sample}] = {int(lengths[sample])}, and a row has "
            f"{values.shape[1]} values"
        )
