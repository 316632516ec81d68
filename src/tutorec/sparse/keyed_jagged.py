"""KeyedJaggedTensor: a batch of id lists, one list per feature and sample."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.kjt_build import all_features, one_feature, parts_of_batches, parts_of_features
from tutorec.sparse.kjt_layout import (
    differences,
    lengths_of_offsets,
    offset_per_key_of,
    offsets_of_lengths,
    permute_pieces,
    positions,
    running_sum,
    segment_sums,
    split_weights,
    stride_of,
)
from tutorec.sparse.printing import keyed_jagged_text
from tutorec.sparse.validate import (
    check_batch_form,
    check_batch_lists,
    check_counts,
    check_positions,
    checkable,
    key_list,
    missing_key,
)

# While a graph is traced, these stay whole as calls in it: they read numbers that a tracer does not have, and
# TorchScript compiles them as they stand.
torch.fx.wrap("differences")
torch.fx.wrap("lengths_of_offsets")
torch.fx.wrap("offset_per_key_of")
torch.fx.wrap("offsets_of_lengths")
torch.fx.wrap("permute_pieces")
torch.fx.wrap("running_sum")
torch.fx.wrap("segment_sums")


class KeyedJaggedTensor:
    """A batch of id lists of varying length: one list per feature and sample.

    Stored flat and feature-major, which is what lookup kernels read and what makes sending one feature to another
    rank a slice rather than a gather:

    ==============  ===============  ==========================================
    ``values()``    ``[N]``          ids, feature after feature, sample after sample
    ``lengths()``   ``[F * B]``      ids per list; list ``i = f * B + b``
    ``offsets()``   ``[F * B + 1]``  running sum of lengths; list ``i`` is
                                     ``values[offsets[i]:offsets[i + 1]]``
    ``weights()``   ``[N]``          optional, one per id
    ==============  ===============  ==========================================

    F is ``len(keys())``, B is ``stride()``. An empty list is a length of zero, never a padding id.

    Args:
        keys: Feature names, distinct, in storage order.
        values: Ids of all lists, end to end.
        weights: One weight per id, or None for unweighted features.
        lengths: Ids per list. Give this or ``offsets``; the other is derived on first use and kept.
        offsets: Running sum of lengths, starting at 0.
        stride: B, samples in the batch; by default the number of lists over F.
        stride_per_key_per_rank: Variable batch is not supported yet: leave it None.
        stride_per_key: As above.
        length_per_key: Ids of each key, where the caller knows them: saves a sync point.
        lengths_offset_per_key: Part of variable batch; leave it None.
        offset_per_key: Where each key's ids start, where the caller knows them.
        index_per_key: Position of each key, where the caller knows them.
        jt_dict: What ``to_dict`` is to return, where the caller has it.
        inverse_indices: Part of variable batch; leave it None.

    Raises:
        ValueError: Lengths or offsets are missing or do not describe ``values``, or a key occurs twice.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     keys=["item", "user"],
        ...     values=torch.tensor([7, 8, 9, 4, 5]),
        ...     lengths=torch.tensor([2, 1, 0, 2]),  # item: 2, 1   user: 0, 2
        ... )
        >>> batch.stride(), batch.length_per_key()
        (2, [3, 2])
        >>> batch["user"].to_dense()
        [tensor([], dtype=torch.int64), tensor([4, 5])]

    See Also:
        ``sparse/kjt_layout.py`` for the arithmetic; TorchRec's ``torchrec.sparse.jagged_tensor.KeyedJaggedTensor``.
    """

    __slots__ = (
        "_checked",
        "_index_per_key",
        "_jt_dict",
        "_keys",
        "_length_per_key",
        "_lengths",
        "_offset_per_key",
        "_offsets",
        "_stride",
        "_values",
        "_weights",
    )

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        self._keys: list[str] = keys
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        self._stride: int = stride_of(len(keys), lengths, offsets) if stride is None else stride
        self._length_per_key: list[int] | None = length_per_key
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        self._jt_dict: dict[str, JaggedTensor] | None = jt_dict
        self._checked: bool = True
        if stride_per_key_per_rank is not None or stride_per_key is not None or inverse_indices is not None:
            raise NotImplementedError(
                "KeyedJaggedTensor: variable batch is not supported yet: leave stride_per_key_per_rank, "
                "stride_per_key and inverse_indices None, and give every key the same number of samples"
            )
        if not is_scripting():
            self._keys = key_list("KeyedJaggedTensor", keys)
            _check(self)

    @staticmethod
    @torch.jit.unused
    def _from_parts(
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int,
        length_per_key: list[int] | None = None,
    ) -> "KeyedJaggedTensor":
        """A batch from parts that are known to fit, unchecked."""
        batch = object.__new__(KeyedJaggedTensor)
        batch._keys = keys
        batch._values = values
        batch._weights = weights
        batch._lengths = lengths
        batch._offsets = offsets
        batch._stride = stride
        batch._length_per_key = length_per_key
        batch._offset_per_key = None
        batch._index_per_key = None
        batch._jt_dict = None
        batch._checked = True
        return batch

    @staticmethod
    @torch.jit.unused
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """A batch from offsets [F * B + 1], with the ids per key read at once."""
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    @torch.jit.unused
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """A batch from lengths [F * B], with the ids per key read at once."""
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    @torch.jit.unused
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """One batch from one jagged tensor per feature, all with the same samples."""
        return KeyedJaggedTensor._from_parts(*parts_of_features(jt_dict))

    @staticmethod
    @torch.jit.unused
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """One batch with the keys of all, which must be distinct and hold the same samples."""
        return KeyedJaggedTensor._from_parts(*parts_of_batches(kjt_list))

    @staticmethod
    @torch.jit.unused
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """A batch without keys and samples."""
        jagged = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor._from_parts(
            [], jagged.values(), jagged.weights_or_none(), jagged.lengths(), jagged.offsets(), 0, []
        )

    @staticmethod
    @torch.jit.unused
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """Uninitialised tensors of the same shapes and dtypes, to be filled by ``copy_``."""
        return _map(kjt, lambda part: torch.empty_like(part, device=device))

    @torch.jit.unused
    def copy_(self, kjt: "KeyedJaggedTensor", non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Copy the other's parts, of equal keys and shapes, into this one's memory."""
        self._values.copy_(kjt._values, non_blocking=non_blocking)
        if self._weights is not None:
            self._weights.copy_(kjt.weights(), non_blocking=non_blocking)
        if self._lengths is not None:
            self._lengths.copy_(kjt.lengths(), non_blocking=non_blocking)
        if self._offsets is not None:
            self._offsets.copy_(kjt.offsets(), non_blocking=non_blocking)
        self._length_per_key, self._offset_per_key = kjt._length_per_key, kjt._offset_per_key
        self._jt_dict = None
        return self

    def sync(self) -> "KeyedJaggedTensor":
        """Read the ids per key from the device, once: what later calls need then costs no sync point."""
        self.offset_per_key()
        self.length_per_key()
        return self

    @torch.jit.unused
    def unsync(self) -> "KeyedJaggedTensor":
        """Forget the ids per key."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def device(self) -> torch.device:
        """Where the ids are."""
        return self._values.device

    def keys(self) -> list[str]:
        """Feature names, in storage order."""
        return self._keys

    def values(self) -> Tensor:
        """Ids of all lists, end to end [N]."""
        return self._values

    def weights(self) -> Tensor:
        """One weight per id [N]; an error without weights."""
        weights = self._weights
        if weights is None:
            raise ValueError(
                "KeyedJaggedTensor has no weights; pass weights= when the batch is built, or ask weights_or_none()"
            )
        return weights

    def weights_or_none(self) -> Tensor | None:
        """One weight per id [N], or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Ids per list [F * B]."""
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None, "lengths or offsets are always there"
            lengths = lengths_of_offsets(offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Ids per list [F * B] if given or asked for already."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each list starts [F * B + 1]."""
        offsets = self._offsets
        if offsets is None:
            lengths = self._lengths
            assert lengths is not None, "lengths or offsets are always there"
            offsets = offsets_of_lengths(lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Where each list starts [F * B + 1] if given or asked for already."""
        return self._offsets

    def stride(self) -> int:
        """B, samples in the batch."""
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Samples of each key: B for all of them."""
        return [self._stride] * len(self._keys)

    def variable_stride_per_key(self) -> bool:
        """Whether keys have different numbers of samples: never, until variable batch is supported."""
        return False

    def length_per_key(self) -> list[int]:
        """Ids of each key. Reads the device unless known."""
        counts = self._length_per_key
        if counts is None:
            counts = differences(self.offset_per_key())
            self._length_per_key = counts
        return counts

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids of each key if known already."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each key's ids start, and the end of the last. Reads the device unless known: a sync point."""
        starts = self._offset_per_key
        if starts is None:
            counts = self._length_per_key
            if counts is not None:
                starts = running_sum(counts)
            else:
                if not is_scripting():
                    _check_once(self)
                starts = offset_per_key_of(self.offsets(), len(self._keys), self._stride)
            self._offset_per_key = starts
        return starts

    def offset_per_key_or_none(self) -> list[int] | None:
        """Where each key's ids start if known already."""
        return self._offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        index = self._index_per_key
        if index is None:
            index = positions(self._keys)
            self._index_per_key = index
        return index

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Batches of the next ``segments[i]`` keys each: views, no id is copied."""
        if sum(segments) != len(self._keys):
            raise ValueError(
                f"KeyedJaggedTensor.split: segments {segments} hold {sum(segments)} keys, and the batch has "
                f"{len(self._keys)}: {self._keys}"
            )
        stride, counts = self._stride, self.length_per_key()
        sizes = segment_sums(counts, segments)
        values = self._values.split_with_sizes(sizes)
        weights = split_weights(self._weights, sizes, len(segments))
        lengths = self.lengths().split_with_sizes([segment * stride for segment in segments])
        out: list[KeyedJaggedTensor] = []
        start = 0
        for position, segment in enumerate(segments):
            end = start + segment
            keys = self._keys[start:end]
            out.append(self._derive(keys, values[position], weights[position], lengths[position], counts[start:end]))
            start = end
        return out

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        """The batch with key ``indices[i]`` at position i; keys may repeat or be left out."""
        if not is_scripting():
            check_positions("KeyedJaggedTensor.permute", indices, self._keys)
        counts = self.length_per_key()
        values = permute_pieces(self._values, counts, indices)
        lengths = permute_pieces(self.lengths(), [self._stride] * len(self._keys), indices)
        weights = self._weights
        if weights is not None:
            weights = permute_pieces(weights, counts, indices)
        keys = [self._keys[index] for index in indices]
        return self._derive(keys, values, weights, lengths, [counts[index] for index in indices])

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature's lists: views."""
        index = self.index_per_key()
        if key not in index:
            if is_scripting():
                raise KeyError(key)
            raise missing_key("KeyedJaggedTensor", key, self._keys)
        position = index[key]
        starts, stride = self.offset_per_key(), self._stride
        start, end = starts[position], starts[position + 1]
        weights = self._weights
        if weights is not None:
            weights = weights[start:end]
        lengths = self.lengths()[position * stride : (position + 1) * stride]
        return one_feature(self._values[start:end], weights, lengths, None)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Every feature's lists by name: views, with all offsets from one subtraction."""
        known = self._jt_dict
        if known is not None:
            return known
        counts, lengths = self.length_per_key(), self.lengths()
        offsets = self.offsets() if compute_offsets else None
        bags = all_features(self._keys, self._values, self._weights, lengths, offsets, counts, self._stride)
        self._jt_dict = bags
        return bags

    def _derive(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        length_per_key: list[int],
    ) -> "KeyedJaggedTensor":
        """A batch of the same samples made of parts of this one: no check, and in eager code no constructor."""
        if is_scripting():
            return KeyedJaggedTensor(
                keys,
                values,
                weights,
                lengths,
                None,
                self._stride,
                None,
                None,
                length_per_key,
                None,
                None,
                None,
                None,
                None,
            )
        else:
            return KeyedJaggedTensor._from_parts(keys, values, weights, lengths, None, self._stride, length_per_key)

    @torch.jit.unused
    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """The batch with lengths as one dimension [F * B]."""
        return KeyedJaggedTensor._from_parts(
            self._keys, self._values, self._weights, self.lengths().view(-1), None, self._stride, self._length_per_key
        )

    @torch.jit.unused
    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """A copy on ``device``; ``dtype`` is for the weights."""
        moved = _map(self, lambda part: part.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    @torch.jit.unused
    def pin_memory(self) -> "KeyedJaggedTensor":
        """A copy in page-locked memory, from which a copy to a GPU can overlap with computation."""
        return _map(self, lambda part: part.pin_memory())

    @torch.jit.unused
    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that ``stream`` reads the parts."""
        for part in self._tensors():
            part.record_stream(stream)

    @torch.jit.unused
    def _tensors(self) -> list[Tensor]:
        return [part for part in (self._values, self._weights, self._lengths, self._offsets) if part is not None]

    @torch.jit.unused
    def size_in_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self._tensors())

    @torch.jit.unused
    def __str__(self) -> str:
        return keyed_jagged_text(self._keys, self._values, self._weights, self.offsets(), self._stride)

    @torch.jit.unused
    def __fx_create_arg__(self, tracer: Any) -> Any:
        """In a traced graph, a batch that leaves the graph is a call of its constructor."""
        names = ("keys", "values", "weights", "lengths", "offsets", "stride")
        parts = {name: getattr(self, f"_{name}") for name in names}
        return tracer.create_node("call_function", KeyedJaggedTensor, (), tracer.create_arg(parts))


def _check(batch: KeyedJaggedTensor) -> None:
    """Check what a caller gave: its form now, its numbers now on the CPU and at the first sync point elsewhere."""
    if not checkable(batch._values):
        return
    check_batch_form(batch._keys, batch._values, batch._weights, batch._lengths, batch._offsets, batch._stride)
    batch._checked = False
    if batch._values.device.type == "cpu":
        _check_once(batch)


def _check_once(batch: KeyedJaggedTensor) -> None:
    """Check the numbers that a caller gave, if that is still to be done; keeps the offsets found on the way."""
    if batch._checked:
        return
    batch._offsets = check_batch_lists(batch._keys, batch._values, batch._lengths, batch._offsets, batch._stride)
    batch._checked = True
    for name, given in (
        ("length_per_key", batch._length_per_key),
        ("offset_per_key", None if batch._offset_per_key is None else differences(batch._offset_per_key)),
    ):
        if given is not None:
            check_counts(name, given, batch._keys, batch._offsets, batch._stride)


def _map(batch: KeyedJaggedTensor, change: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
    """The batch with every tensor changed the same way."""
    weights, lengths, offsets = batch._weights, batch._lengths, batch._offsets
    changed = KeyedJaggedTensor._from_parts(
        batch._keys,
        change(batch._values),
        None if weights is None else change(weights),
        None if lengths is None else change(lengths),
        None if offsets is None else change(offsets),
        batch._stride,
        batch._length_per_key,
    )
    changed._offset_per_key = batch._offset_per_key
    changed._index_per_key = batch._index_per_key
    changed._checked = batch._checked
    return changed
