"""KeyedJaggedTensor: a batch of id lists, one list per feature and sample."""

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

import tutorec.sparse.kjt_move as move
import tutorec.sparse.kjt_shown as shown
import tutorec.sparse.kjt_wire as wire
from tutorec._validation import validation_enabled
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.kjt_build import (
    all_features,
    feature_at,
    join,
    join_keys,
    join_optional,
    offsets_of_features,
    parts_of_features,
)
from tutorec.sparse.kjt_checks import check_batch, check_numbers
from tutorec.sparse.kjt_layout import (
    check_all_cut,
    differences,
    lengths_of_offsets,
    offset_per_key_of,
    offsets_at,
    offsets_of_lengths,
    optional_to,
    permute_pieces,
    positions,
    running_sum,
    segment_sums,
    split_optional,
)
from tutorec.sparse.kjt_read import counts_of_lists, settle
from tutorec.sparse.kjt_share import cut, find_together, offsets_found
from tutorec.sparse.kjt_variable import stride_of, strides_as_lists, strides_of, strides_of_ranks, take_rows
from tutorec.sparse.traced import kind_of
from tutorec.sparse.validate import check_positions, check_segments, missing_key

# While a graph is traced, these stay whole as calls in it: they read numbers that a tracer does not have, and
# TorchScript compiles them as they stand.
for _name in (
    "differences lengths_of_offsets offset_per_key_of offsets_at offsets_of_features offsets_of_lengths permute_pieces "
    "running_sum segment_sums stride_of strides_as_lists strides_of take_rows _concat _empty_like"
).split():
    torch.fx.wrap(_name)


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

    F is ``len(keys())``, B is ``stride()``. An empty list is a length of zero, never a padding id. Features may have
    different numbers of samples (*variable batch*): ``stride_per_key()`` then takes the place of B, see
    ``sparse/kjt_variable.py``.

    Args:
        keys: Feature names, distinct, in storage order.
        values: Ids of all lists, end to end.
        weights: One weight per id, or None for unweighted features.
        lengths: Ids per list ``[F * B]``, or ``[F, B]``. Give this or ``offsets``; the other is derived on first use.
        offsets: Running sum of lengths, starting at 0.
        stride: B, samples in the batch; by default the number of lists over F.
        stride_per_key_per_rank: Variable batch: samples of each key (rows) and rank (columns), ``[[2], [3]]``.
        stride_per_key: Samples of each key, where the caller knows them.
        length_per_key: Ids of each key, where the caller knows them: saves a sync point.
        lengths_offset_per_key: Where each key's lists start, where the caller knows them.
        offset_per_key: Where each key's ids start, where the caller knows them.
        index_per_key: Position of each key, where the caller knows them.
        jt_dict: What ``to_dict`` is to return, where the caller has it.
        inverse_indices: Variable batch: keys, and which list of its feature each sample of the whole batch means
            ``[F, B]``.

    Raises:
        ValueError: Lengths or offsets are missing or do not describe ``values``, or a key occurs twice. The numbers of
            many lists, or of lists on another device than the CPU, are looked at where they are first used: by
            ``sync``, ``length_per_key``, ``split``, ``permute``, ``to_dict``, ``[]``, printing, and every lookup.

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

    # fmt: off
    __slots__ = (
        "_index_per_key", "_inverse_indices", "_jt_dict", "_keys", "_length_per_key", "_lengths",
        "_lengths_offset_per_key", "_offset_per_key", "_offsets", "_pending", "_shared_offsets", "_stride",
        "_stride_per_key", "_stride_per_key_per_rank", "_values", "_weights",
    )
    # fmt: on

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
        self._stride: int | None = stride
        ranks = stride_per_key_per_rank
        self._stride_per_key_per_rank: Tensor | None = None if ranks is None else strides_of_ranks(ranks)
        self._stride_per_key: list[int] | None = stride_per_key
        self._length_per_key: list[int] | None = length_per_key
        self._lengths_offset_per_key: list[int] | None = lengths_offset_per_key
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        self._jt_dict: dict[str, JaggedTensor] | None = jt_dict
        self._inverse_indices: tuple[list[str], Tensor] | None = inverse_indices
        # As kjt_share and kjt_checks call them, spelt out for TorchScript.
        self._shared_offsets: tuple[list[Tensor], int, int] | None = None
        self._pending: tuple[bool, bool, list[int] | None, list[int] | None, list[tuple[int, int]]] | None = None
        if not is_scripting():
            settle(self)
            if validation_enabled():
                check_batch(self)

    @staticmethod
    @torch.jit.unused
    def _from_parts(
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        length_per_key: list[int] | None = None,
        stride_per_key_per_rank: Tensor | None = None,
    ) -> "KeyedJaggedTensor":
        """A batch from parts that are known to fit, unchecked."""
        batch = object.__new__(KeyedJaggedTensor if type(values) is Tensor else kind_of(KeyedJaggedTensor, values))
        batch._keys, batch._values, batch._weights = keys, values, weights
        batch._lengths = lengths
        batch._offsets = offsets
        batch._stride = stride
        batch._stride_per_key_per_rank = stride_per_key_per_rank
        batch._length_per_key = length_per_key
        batch._stride_per_key = batch._lengths_offset_per_key = batch._offset_per_key = batch._index_per_key = None
        batch._jt_dict = batch._inverse_indices = batch._shared_offsets = batch._pending = None
        return batch

    @staticmethod
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
        return _synced(keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices)

    @staticmethod
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
        return _synced(keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices)

    @staticmethod
    @torch.jit.unused
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """One batch from one jagged tensor per feature; features may have different numbers of samples."""
        return KeyedJaggedTensor._from_parts(*parts_of_features(jt_dict))

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """One batch with the keys of all, which must be distinct and hold the same samples (or all variable batch)."""
        return _concat(kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """A batch without keys and samples."""
        keys: list[str] = []
        values = torch.empty(0, dtype=values_dtype, device=device)
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        return _synced(keys, values, weights, lengths, None, 0, None, None)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """A batch to fill: on ``device`` uninitialised tensors of the same shapes; without one, no keys and no ids.

        The first is what ``copy_`` fills, the second a rank's share when it gets none of the features: dtypes and
        ``stride()`` are kept.
        """
        return _empty_like(kjt, device)

    def sync(self) -> "KeyedJaggedTensor":
        """Read the ids per key from the device, once: what later calls need then costs no sync point."""
        self.length_per_key()
        self.offset_per_key()
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
            raise ValueError("KeyedJaggedTensor has no weights; pass weights= at its making, or ask weights_or_none()")
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
            if not is_scripting():
                return offsets_found(self)
            lengths = self._lengths
            assert lengths is not None, "lengths or offsets are always there"
            offsets = offsets_of_lengths(lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Where each list starts [F * B + 1] if given or asked for already."""
        return self._offsets

    def stride(self) -> int:
        """B, samples in the batch; with variable batch those of the whole batch, or the most that a key has."""
        stride = self._stride
        if stride is None:
            stride = stride_of(
                self._keys, self._lengths, self._offsets, self._stride_per_key_per_rank, self._inverse_indices
            )
            self._stride = stride
        return stride

    def stride_per_key(self) -> list[int]:
        """Samples of each key: B for all of them, or with variable batch each its own."""
        strides = self._stride_per_key
        if strides is None:
            strides = strides_of(self._keys, self.stride(), self._stride_per_key_per_rank)
            self._stride_per_key = strides
        return strides

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Samples of each key from each rank with variable batch; an empty list without."""
        return strides_as_lists(self._stride_per_key_per_rank)

    def variable_stride_per_key(self) -> bool:
        """Whether keys may have different numbers of samples."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Keys, and which list of its feature each sample of the whole batch means [F, B]; an error without."""
        inverse_indices = self._inverse_indices
        if inverse_indices is None:
            raise ValueError("there are no inverse indices; pass inverse_indices=, or ask inverse_indices_or_none()")
        return inverse_indices

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Keys, and which list of its feature each sample of the whole batch means [F, B], or None."""
        return self._inverse_indices

    def length_per_key(self) -> list[int]:
        """Ids of each key. Reads the device unless known: a sync point."""
        counts = self._length_per_key
        if counts is None:
            if not is_scripting():
                counts = counts_of_lists(self)
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
            if not is_scripting():
                counts = counts_of_lists(self)
                self._length_per_key = counts
            if counts is not None:
                starts = running_sum(counts)
            elif self._stride_per_key_per_rank is None:
                starts = offset_per_key_of(self.offsets(), len(self._keys), self.stride())
            else:
                starts = offsets_at(self.offsets(), self.lengths_offset_per_key())
            self._offset_per_key = starts
        return starts

    def offset_per_key_or_none(self) -> list[int] | None:
        """Where each key's ids start if known already."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Where each key's lists start among the lists, and the end of the last."""
        bounds = self._lengths_offset_per_key
        if bounds is None:
            bounds = running_sum(self.stride_per_key())
            self._lengths_offset_per_key = bounds
        return bounds

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        index = self._index_per_key
        if index is None:
            index = positions(self._keys)
            self._index_per_key = index
        return index

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Batches of the next ``segments[i]`` keys each: views, no id is copied.

        A segment of all keys is the batch itself; smaller ones leave the inverse indices of the whole behind.
        """
        if not is_scripting():
            check_segments("KeyedJaggedTensor.split", segments, self._keys)
            plain = type(self._values) is Tensor
            if plain:
                return cut(self, segments)
        check_all_cut(segments, self._keys)
        counts, count = self.length_per_key(), len(segments)
        sizes = segment_sums(counts, segments)
        values = self._values.split_with_sizes(sizes)
        lengths = self.lengths().split_with_sizes(segment_sums(self.stride_per_key(), segments))
        weights = split_optional(self._weights, sizes, count)
        strides = split_optional(self._stride_per_key_per_rank, segments, count)
        out: list[KeyedJaggedTensor] = []
        start = 0
        for part, segment in enumerate(segments):
            end = start + segment
            if segment == len(self._keys):
                out.append(self)
            else:
                keys, known = self._keys[start:end], counts[start:end]
                out.append(self._derive(keys, values[part], weights[part], lengths[part], known, strides[part]))
            start = end
        return out

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        """The batch with key ``indices[i]`` at position i; keys may repeat or be left out. No inverse indices."""
        if not is_scripting():
            check_positions("KeyedJaggedTensor.permute", indices, self._keys)
        counts = self.length_per_key()
        values = permute_pieces(self._values, counts, indices)
        lengths = permute_pieces(self.lengths(), self.stride_per_key(), indices)
        weights = self._weights
        if weights is not None:
            weights = permute_pieces(weights, counts, indices)
        keys, known = [self._keys[index] for index in indices], [counts[index] for index in indices]
        return self._derive(keys, values, weights, lengths, known, take_rows(self._stride_per_key_per_rank, indices))

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature's lists: views."""
        index = self.index_per_key()
        if key not in index:
            if is_scripting():
                raise KeyError(key)
            raise missing_key("KeyedJaggedTensor", key, self._keys)
        position, stride = index[key], self.stride()
        ids, lists = self.offset_per_key()[position : position + 2], [position * stride, stride]
        if self._stride_per_key_per_rank is not None:
            lists = [self.lengths_offset_per_key()[position], self.stride_per_key()[position]]
        return feature_at(self._values, self._weights, self.lengths(), ids, lists)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Every feature's lists by name: views. Kept: a second call returns the same."""
        if not is_scripting() and self._jt_dict is not None:
            check_numbers(self)
        known = self._jt_dict
        if known is not None:
            return known
        offsets: list[Tensor] | None = None
        if not is_scripting():
            offsets = find_together(self, compute_offsets)
        counts, strides, lengths = self.length_per_key(), self.stride_per_key(), self.lengths()
        pieces: list[Tensor] = lengths.split_with_sizes(strides)  # pyright: ignore[reportAssignmentType]
        if compute_offsets and offsets is None:
            together = self._stride_per_key_per_rank is None and len(self._keys) > 3  # fewer are faster one by one
            offsets = offsets_of_features(pieces, lengths, self._offsets, strides, together)
        bags = all_features(self._keys, self._values, self._weights, pieces, offsets, counts)
        self._jt_dict = bags
        return bags

    def _derive(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        length_per_key: list[int],
        strides: Tensor | None,
    ) -> "KeyedJaggedTensor":
        """A batch of the same samples made of parts of this one: no check, and in eager code no constructor."""
        stride = self.stride()
        if is_scripting():
            # fmt: off
            return KeyedJaggedTensor(
                keys, values, weights, lengths, None, stride, strides, None,
                length_per_key, None, None, None, None, None,
            )
            # fmt: on
        else:
            return KeyedJaggedTensor._from_parts(keys, values, weights, lengths, None, stride, length_per_key, strides)

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """A copy on ``device``; ``dtype`` is for the weights."""
        if not is_scripting():
            return move.each_on_device(self, device, non_blocking, dtype)
        weights, inverse = optional_to(self._weights, device, non_blocking, dtype), self._inverse_indices
        if inverse is not None:
            inverse = (inverse[0], inverse[1].to(device, non_blocking=non_blocking))
        # fmt: off
        return KeyedJaggedTensor(
            self._keys, self._values.to(device, non_blocking=non_blocking), weights,
            optional_to(self._lengths, device, non_blocking), optional_to(self._offsets, device, non_blocking),
            self._stride, self._stride_per_key_per_rank, self._stride_per_key, self._length_per_key,
            self._lengths_offset_per_key, self._offset_per_key, self._index_per_key, None, inverse,
        )
        # fmt: on

    unsync = move.unsync
    flatten_lengths = move.flatten_lengths
    copy_ = move.copy_
    pin_memory = move.pin_memory
    record_stream = move.record_stream
    size_in_bytes = move.size_in_bytes
    clear_storage = move.clear_storage

    # What an exchange that knows no batches sends of this one, and how it is rebuilt.
    dist_labels = wire.dist_labels
    dist_splits = wire.dist_splits
    dist_tensors = wire.dist_tensors
    dist_init = staticmethod(wire.dist_init)

    __repr__ = shown.represent  # pyright: ignore[reportAssignmentType]
    __str__ = shown.text  # pyright: ignore[reportAssignmentType]
    __fx_create_arg__ = shown.as_call


# Whole calls in a traced graph, too. What makes a batch stands outside of the class: TorchScript compiles it apart.
def _synced(
    keys: list[str],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride: int | None,
    ranks: list[list[int]] | None,
    inverse: tuple[list[str], Tensor] | None,
) -> KeyedJaggedTensor:
    batch = KeyedJaggedTensor(keys, values, weights, lengths, offsets, stride, ranks, inverse_indices=inverse)
    if not is_scripting():  # noqa: SIM102 (alone, so that it is not compiled)
        if isinstance(keys, torch.fx.Proxy):  # how many ids each key has is read when it is asked for
            return batch
    return batch.sync()


def _concat(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if not is_scripting():
        return join(batches)
    keys = join_keys([one.keys() for one in batches])
    values, lengths = [one.values() for one in batches], torch.cat([one.lengths() for one in batches])
    weights = [one.weights_or_none() for one in batches]
    for one in batches:
        assert not one.variable_stride_per_key(), "TorchScript does not join variable batches"
        assert one.stride() == batches[0].stride(), "batches that are joined have the same number of samples"
    return _synced(keys, torch.cat(values), join_optional(weights), lengths, None, batches[0].stride(), None, None)


def _empty_like(kjt: KeyedJaggedTensor, device: torch.device | None) -> KeyedJaggedTensor:
    if not is_scripting():
        return move.without_keys(kjt) if device is None else move.uninitialised_like(kjt, device)
    assert device is None, "TorchScript makes a batch like another one on its own device only"
    keys: list[str] = []
    held = kjt.weights_or_none()
    weights = held.new_empty([0]) if held is not None else None
    values, lengths = kjt.values().new_empty([0]), kjt.lengths().new_empty([0])
    return _synced(keys, values, weights, lengths, None, kjt.stride(), None, None)
