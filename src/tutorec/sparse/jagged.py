"""JaggedTensor: one feature's lists of ids, one list per sample."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.jagged_layout import (
    FEW_LISTS,
    check_dense_lengths,
    check_dense_weights,
    check_padding,
    first_entries,
    int_tensor,
    kept,
    longest,
    masked,
    padded_rows,
    pieces_of,
)
from tutorec.sparse.kjt_layout import lengths_of_offsets, offsets_of_lengths
from tutorec.sparse.kjt_move import copy_numbers
from tutorec.sparse.printing import jagged_text, object_text
from tutorec.sparse.traced import kind_of
from tutorec.sparse.validate import check_form, check_lists, checkable, refuse_lists

# While a graph is traced, these stay whole as calls in it: they are compiled as they stand.
torch.fx.wrap("first_entries")
torch.fx.wrap("kept")
torch.fx.wrap("lengths_of_offsets")
torch.fx.wrap("longest")
torch.fx.wrap("masked")
torch.fx.wrap("offsets_of_lengths")
torch.fx.wrap("padded_rows")
torch.fx.wrap("pieces_of")


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
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        if lengths is None and offsets is None:
            raise ValueError("JaggedTensor: neither lengths nor offsets given; one of them says where samples end")
        if not is_scripting():
            _check(self)

    @staticmethod
    @torch.jit.unused
    def _from_parts(
        values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> "JaggedTensor":
        """A jagged tensor from parts that are known to fit, unchecked."""
        jagged = object.__new__(JaggedTensor if type(values) is Tensor else kind_of(JaggedTensor, values))
        jagged._values = values
        jagged._weights = weights
        jagged._lengths = lengths
        jagged._offsets = offsets
        return jagged

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
        if is_scripting():
            return JaggedTensor(values, weights, lengths, None)
        else:
            return JaggedTensor._from_parts(values, weights, lengths, None)

    @staticmethod
    @torch.jit.unused
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """Without a device, one of the same dtypes without samples; with one, uninitialised tensors of the same shapes.

        The second is what ``copy_`` fills; ``device=jt.device()`` makes it beside the first.
        """
        if device is None:
            weights = jt._weights
            weights_dtype = None if weights is None else weights.dtype
            lengths_dtype = jt.lengths().dtype
            return JaggedTensor.empty(weights is not None, jt.device(), jt._values.dtype, weights_dtype, lengths_dtype)
        return _map(jt, lambda part: torch.empty_like(part, device=device))

    @torch.jit.unused
    def copy_(self, jt: "JaggedTensor", non_blocking: bool = False) -> "JaggedTensor":
        """Copy the other's parts, of equal shapes, into this one's memory."""
        copy_numbers("JaggedTensor", self, jt, non_blocking)
        return self

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """The first ``lengths[b]`` entries of row b of ``values`` [B, longest], and of ``weights``."""
        if not is_scripting():
            check_dense_lengths(values, lengths, weights)
        mask = first_entries(values, lengths)
        return JaggedTensor(kept(values, mask), masked(weights, mask), lengths, None)

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> "JaggedTensor":
        """One list of values for each sample, the inverse of ``to_dense``. Lengths are int32, as TorchRec's."""
        if len(values) == 0:
            raise ValueError("JaggedTensor.from_dense: no samples given; JaggedTensor.empty() makes an empty one")
        together = torch.cat(values)
        sizes = [value.size(0) for value in values]
        together_weights: Tensor | None = None
        if weights is not None:
            together_weights = torch.cat(weights)
        if is_scripting():
            lengths = torch.tensor(sizes, dtype=torch.int32, device=together.device)
            return JaggedTensor(together, together_weights, lengths, None)
        else:
            if weights is not None:
                check_dense_weights(values, weights)
            lengths = int_tensor(sizes, torch.int32).to(together.device)
            return JaggedTensor._from_parts(together, together_weights, lengths, None)

    def to_dense(self) -> list[Tensor]:
        """One tensor of values for each sample: views. A sync point."""
        return pieces_of(self._values, self.lengths())

    def to_dense_weights(self) -> list[Tensor] | None:
        """One tensor of weights for each sample, None without weights. A sync point."""
        weights = self._weights
        if weights is None:
            return None
        return pieces_of(weights, self.lengths())

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Rows of equal length [B, desired_length]: longer samples are cut, shorter ones padded.

        Without ``desired_length`` rows are as long as the longest sample, and asking for that is a sync point.
        """
        width = longest(self.lengths()) if desired_length is None else desired_length
        if not is_scripting():
            check_padding(self._values, width, padding_value)
        return padded_rows(self._values, self.offsets(), width, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """The weights as rows of equal length, None without weights."""
        weights = self._weights
        if weights is None:
            return None
        width = longest(self.lengths()) if desired_length is None else desired_length
        if not is_scripting():
            check_padding(weights, width, padding_value)
        return padded_rows(weights, self.offsets(), width, padding_value)

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def lengths(self) -> Tensor:
        """Values per sample [B]."""
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None, "lengths or offsets are always there"
            lengths = lengths_of_offsets(offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Values per sample [B] if they were given or asked for already."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each sample's values start [B + 1]."""
        offsets = self._offsets
        if offsets is None:
            lengths = self._lengths
            assert lengths is not None, "lengths or offsets are always there"
            offsets = offsets_of_lengths(lengths)
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
            raise ValueError("JaggedTensor has no weights; pass weights= when it is built, or ask weights_or_none()")
        return weights

    def weights_or_none(self) -> Tensor | None:
        """One weight per value [N], or None."""
        return self._weights

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedTensor":
        """A copy on ``device``; the parts themselves where they are there already."""
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
        if lengths is not None:
            lengths = lengths.to(device, non_blocking=non_blocking)
        if offsets is not None:
            offsets = offsets.to(device, non_blocking=non_blocking)
        values = self._values.to(device, non_blocking=non_blocking)
        if is_scripting():
            return JaggedTensor(values, weights, lengths, offsets)
        else:
            return JaggedTensor._from_parts(values, weights, lengths, offsets)

    @torch.jit.unused
    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that ``stream`` reads the parts."""
        for part in (self._values, self._weights, self._lengths, self._offsets):
            if part is not None:
                part.record_stream(stream)

    @torch.jit.unused
    def size_in_bytes(self) -> int:
        """Bytes of all parts."""
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @torch.jit.unused
    def __repr__(self) -> str:
        return object_text(self)

    @torch.jit.unused
    def __str__(self) -> str:
        return jagged_text(self._values, self._weights, self.offsets())

    @torch.jit.unused
    def __fx_create_arg__(self, tracer: Any) -> Any:
        """In a traced graph, a jagged tensor that leaves the graph is a call of its constructor."""
        parts = {"values": self._values, "weights": self._weights, "lengths": self._lengths, "offsets": self._offsets}
        return tracer.create_node("call_function", JaggedTensor, (), tracer.create_arg(parts))


def _check(jagged: JaggedTensor) -> None:
    """Check the parts that a caller gave; keeps the offsets found on the way."""
    if not checkable(jagged._values):
        refuse_lists("JaggedTensor", values=jagged._values)
        if not isinstance(jagged._values, Tensor):
            jagged.__class__ = kind_of(JaggedTensor, jagged._values)
        return
    values, weights, lengths, offsets = jagged._values, jagged._weights, jagged._lengths, jagged._offsets
    try:
        check_form("JaggedTensor", values, weights, lengths, offsets)
    except AttributeError:
        refuse_lists("JaggedTensor", weights=weights, lengths=lengths, offsets=offsets)
        raise
    if values.is_cpu and not _few_fit(values, lengths, offsets):
        jagged._offsets = check_lists("JaggedTensor", values, lengths, offsets, lambda index: f"sample {index}")


def _few_fit(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> bool:
    """Whether there are few lists and they describe the values, looked at in Python; False says nothing."""
    counted = lengths if lengths is not None else offsets
    if counted is None or counted.numel() > FEW_LISTS:
        return False
    numbers: list[int] = [] if lengths is None else lengths.tolist()
    if offsets is not None:
        starts: list[int] = offsets.tolist()
        steps = [end - start for start, end in pairwise(starts)]
        if starts[0] != 0 or (lengths is not None and steps != numbers):
            return False
        numbers = steps
    return sum(numbers) == values.shape[0] and (not numbers or min(numbers) >= 0)


def _map(jagged: JaggedTensor, change: Any) -> JaggedTensor:
    """The jagged tensor with every part changed the same way."""
    weights, lengths, offsets = jagged._weights, jagged._lengths, jagged._offsets
    return JaggedTensor._from_parts(
        change(jagged._values),
        None if weights is None else change(weights),
        None if lengths is None else change(lengths),
        None if offsets is None else change(offsets),
    )
