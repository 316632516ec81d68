"""KeyedJaggedTensor: a batch of id lists, one list per feature and sample."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _is_tracing
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_map_only

from tutorec.sparse.deferred import raise_deferred_id_errors
from tutorec.sparse.jagged import (
    JaggedTensor,
    bytes_of,
    cast,
    class_for,
    constructor_call,
    copy_numbers,
    jagged_from_parts,
    lists_text,
    object_text,
    read_on_stream,
    sharing,
    stored_tensors,
)
from tutorec.sparse.layout import (
    KeyedLayout,
    checkable,
    ids_by_offsets,
    ids_per_key,
    offsets_of_lengths,
    optional_to,
    permute_segments,
    rows_between,
    segment_sums,
    split_optional,
    strides_as_lists,
    strides_of_ranks,
)
from tutorec.sparse.refuse import (
    check_joined,
    require_features,
    require_tensors,
)
from tutorec.sparse.validate import (
    check_layout,
    check_numbers,
    check_positions,
    check_segments,
    key_list,
    refuse_wrapping,
)

_BATCH = "KeyedJaggedTensor"

# While a graph is traced, these stay whole as calls in it: they read numbers that a tracer does not
# have, and TorchScript compiles them as they are.
for _name in (
    "cast ids_by_offsets offsets_of_lengths permute_segments rows_between segment_sums "
    "strides_as_lists strides_of_ranks _concat _dist_init _by_label _empty_like _from_jt_dict"
).split():
    torch.fx.wrap(_name)


class KeyedJaggedTensor:
    """A batch of id lists of varying length: one list per feature and sample.

    Stored flat and feature-major, which is what lookup kernels read and what makes sending one
    feature to another rank a slice rather than a gather:

    ==============  ===============  ==========================================
    ``values()``    ``[N]``          ids, feature after feature, sample after sample
    ``lengths()``   ``[F * B]``      ids per list; list ``i = f * B + b``
    ``offsets()``   ``[F * B + 1]``  running sum of lengths; list ``i`` is
                                     ``values[offsets[i]:offsets[i + 1]]``
    ``weights()``   ``[N]``          optional, one per id
    ==============  ===============  ==========================================

    F is ``len(keys())``, B is ``stride()``. An empty list is a length of zero, never a padding id.
    Features may have different numbers of samples (*variable batch*): ``stride_per_key()`` then
    takes the place of B, see ``sparse/layout.py``.

    Args:
        keys: Feature names, distinct, in storage order.
        values: Ids of all lists, end to end.
        weights: One weight per id, or None for unweighted features.
        lengths: Ids per list ``[F * B]``, or ``[F, B]``. Give this or ``offsets``; the other is
            derived on first use.
        offsets: Running sum of lengths, starting at 0.
        stride: B, samples in the batch; by default the number of lists over F.
        stride_per_key_per_rank: Variable batch: samples of each key (rows) and rank (columns),
            ``[[2], [3]]``.
        stride_per_key: Samples of each key, where the caller knows them.
        length_per_key: Ids of each key, where the caller knows them: saves a sync point.
        lengths_offset_per_key: Where each key's lists start, where the caller knows them.
        offset_per_key: Where each key's ids start, where the caller knows them.
        index_per_key: Position of each key, where the caller knows them.
        jt_dict: What ``to_dict`` is to return, where the caller has it.
        inverse_indices: Variable batch: keys, and which list of its feature each sample of the
            whole batch means ``[F, B]``.

    Raises:
        ValueError: Lengths or offsets are missing or do not describe ``values``, or a key occurs
            twice. The numbers of many lists, or of lists on another device than the CPU, are
            checked where they are first used: by ``sync``, ``length_per_key``, ``split``,
            ``permute``, ``to_dict``, ``[]``, printing, and every lookup.

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
        ``sparse/layout.py`` for the arithmetic; TorchRec's
        ``torchrec.sparse.jagged_tensor.KeyedJaggedTensor``.
    """

    __slots__ = ("_jt_dict", "_layout", "_values", "_weights")

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
        self._values = values
        self._weights = weights
        self._jt_dict = jt_dict

        ranks: Tensor | None = None
        if stride_per_key_per_rank is not None:
            ranks = strides_of_ranks(stride_per_key_per_rank)
        layout = KeyedLayout(keys, lengths, offsets, stride, ranks, length_per_key, inverse_indices)
        layout._stride_per_key = stride_per_key
        layout._lengths_offset_per_key = lengths_offset_per_key
        layout._offset_per_key = offset_per_key
        layout._index_per_key = index_per_key

        self._layout = layout
        if not is_scripting():
            self._accept()

    @staticmethod
    @torch.jit.unused
    def _from_layout(
        values: Tensor, weights: Tensor | None, layout: KeyedLayout
    ) -> "KeyedJaggedTensor":
        """A batch over a layout that is known to fit, unchecked."""
        batch = object.__new__(
            KeyedJaggedTensor if type(values) is Tensor else class_for(KeyedJaggedTensor, values)
        )
        batch._values = values
        batch._weights = weights
        batch._layout = layout
        batch._jt_dict = None
        return batch

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
        """A batch from parts that are known to fit, unchecked.

        No constructor is called: an exchange and a split build many batches.
        """
        layout = object.__new__(KeyedLayout)
        layout._keys = keys
        layout._lengths = lengths
        layout._offsets = offsets
        layout._stride = stride
        layout._stride_per_key_per_rank = stride_per_key_per_rank
        layout._stride_per_key = None
        layout._length_per_key = length_per_key
        layout._lengths_offset_per_key = None
        layout._offset_per_key = None
        layout._index_per_key = None
        layout._inverse_indices = None
        layout._checked = True

        batch = object.__new__(
            KeyedJaggedTensor if type(values) is Tensor else class_for(KeyedJaggedTensor, values)
        )
        batch._values = values
        batch._weights = weights
        batch._layout = layout
        batch._jt_dict = None
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
        return _synced(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices
        )

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
        return _synced(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices
        )

    @staticmethod
    @torch.jit.unused
    def from_jt_dict(
        jt_dict: dict[str, JaggedTensor], force_variable_stride: bool = False
    ) -> "KeyedJaggedTensor":
        """One batch from a jagged tensor per feature, which may have different sample counts.

        With ``force_variable_stride`` it is of variable batch size even if they are equal.
        """
        try:
            return _from_jt_dict(jt_dict, force_variable_stride)
        except (AttributeError, TypeError, RuntimeError):
            require_features(jt_dict)
            raise

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """One batch with the keys of all: distinct keys, the same samples (or variable batch)."""
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
        lists = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        weights = lists.weights_or_none()
        return _synced(keys, lists.values(), weights, lists.lengths(), None, 0, None, None)

    @staticmethod
    def empty_like(
        kjt: "KeyedJaggedTensor", device: torch.device | None = None
    ) -> "KeyedJaggedTensor":
        """A batch to fill: with ``device`` uninitialised, same shapes; without, no keys or ids.

        The first is what ``copy_`` fills, the second a rank's share when it gets none of the
        features: dtypes and ``stride()`` are kept.
        """
        return _empty_like(kjt, device)

    def sync(self) -> "KeyedJaggedTensor":
        """Read the ids per key from the device, once; later calls then need no sync point."""
        self.offset_per_key()
        return self

    def device(self) -> torch.device:
        """Where the ids are."""
        return self._values.device

    def keys(self) -> list[str]:
        """Feature names, in storage order."""
        return self._layout._keys

    def values(self) -> Tensor:
        """Ids of all lists, end to end [N]."""
        return self._values

    def weights(self) -> Tensor:
        """One weight per id [N]; an error without weights."""
        weights = self._weights
        if weights is None:
            raise ValueError(
                "KeyedJaggedTensor has no weights; pass weights= when it is built, or ask "
                "weights_or_none()"
            )
        return weights

    def weights_or_none(self) -> Tensor | None:
        """One weight per id [N], or None."""
        return self._weights

    # What the layout knows already is read from it without a second call.

    def lengths(self) -> Tensor:
        """Ids per list [F * B]."""
        lengths = self._layout._lengths
        return self._layout.lengths() if lengths is None else lengths

    def lengths_or_none(self) -> Tensor | None:
        """Ids per list [F * B] if given or asked for already."""
        return self._layout._lengths

    def offsets(self) -> Tensor:
        """Where each list starts [F * B + 1]."""
        offsets = self._layout._offsets
        return self._layout.offsets() if offsets is None else offsets

    def offsets_or_none(self) -> Tensor | None:
        """Where each list starts [F * B + 1] if given or asked for already."""
        return self._layout._offsets

    def stride(self) -> int:
        """B, samples in the batch; with variable batch of the whole batch, or the most of a key."""
        stride = self._layout._stride
        return self._layout.stride() if stride is None else stride

    def stride_per_key(self) -> list[int]:
        """Samples of each key: B for all of them, or with variable batch each its own."""
        strides = self._layout._stride_per_key
        return self._layout.stride_per_key() if strides is None else strides

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Samples of each key from each rank with variable batch; an empty list without."""
        return strides_as_lists(self._layout._stride_per_key_per_rank)

    def variable_stride_per_key(self) -> bool:
        """Whether keys may have different numbers of samples."""
        return self._layout._stride_per_key_per_rank is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Keys, and the list that each sample of the whole batch uses [F, B]; an error if none."""
        inverse_indices = self._layout._inverse_indices
        if inverse_indices is None:
            raise ValueError(
                "there are no inverse indices; pass inverse_indices=, or ask "
                "inverse_indices_or_none()"
            )
        return inverse_indices

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Keys, and the list that each sample of the whole batch uses [F, B], or None."""
        return self._layout._inverse_indices

    def length_per_key(self) -> list[int]:
        """Ids of each key. Reads the device unless known: a sync point."""
        counts = self._layout._length_per_key
        if counts is None:
            if not is_scripting():
                counts = self._count()
            if counts is None:
                counts = ids_by_offsets(self.offsets(), self.stride_per_key())
            self._layout._length_per_key = counts
        return counts

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids of each key if known already."""
        return self._layout._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each key's ids start, and the last one's end. A sync point unless known."""
        starts = self._layout._offset_per_key
        if starts is None:
            self.length_per_key()
            starts = self._layout.offset_per_key()
        return starts

    def offset_per_key_or_none(self) -> list[int] | None:
        """Where each key's ids start if known already."""
        return self._layout._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Where each key's lists start among the lists, and the end of the last."""
        bounds = self._layout._lengths_offset_per_key
        return self._layout.lengths_offset_per_key() if bounds is None else bounds

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        index = self._layout._index_per_key
        return self._layout.index_per_key() if index is None else index

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Batches of the next ``segments[i]`` keys each: views, no id is copied.

        A segment of all keys is the batch itself; smaller ones leave the inverse indices of the
        whole behind.
        """
        layout = self._layout
        keys = layout._keys
        check_segments("KeyedJaggedTensor.split", segments, keys)
        count = len(segments)
        counts = self.length_per_key()
        sizes = segment_sums(counts, segments)
        values = self._values.split_with_sizes(sizes)
        weights = split_optional(self._weights, sizes, count)
        lengths, offsets = layout.cut(segments, self.lengths(), True)
        strides = split_optional(layout._stride_per_key_per_rank, segments, count)
        stride = self.stride()

        batches: list[KeyedJaggedTensor] = []
        start = 0
        for position, segment in enumerate(segments):
            end = start + segment
            if segment == len(keys):
                batches.append(self)
            else:
                batches.append(
                    self._derive(
                        keys[start:end],
                        values[position],
                        weights[position],
                        lengths[position],
                        offsets[position],
                        stride,
                        counts[start:end],
                        strides[position],
                    )
                )
            start = end
        return batches

    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """The batch with key ``indices[i]`` at position i; repeats allowed. No inverse indices."""
        layout = self._layout
        check_positions("KeyedJaggedTensor.permute", indices, layout._keys)
        counts = self.length_per_key()
        values = permute_segments(self._values, counts, indices)
        lengths = permute_segments(self.lengths(), self.stride_per_key(), indices)
        weights = self._weights
        if weights is not None:
            weights = permute_segments(weights, counts, indices)
        strides = layout._stride_per_key_per_rank
        if strides is not None:
            strides = permute_segments(strides, [1] * len(layout._keys), indices)

        keys = [layout._keys[index] for index in indices]
        known = [counts[index] for index in indices]
        stride = self.stride()
        return self._derive(keys, values, weights, lengths, None, stride, known, strides)

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature's lists: views."""
        index = self.index_per_key()
        if key not in index:
            raise KeyError(f"KeyedJaggedTensor has no key '{key}'; its keys are {self.keys()}")

        position = index[key]
        starts = self.offset_per_key()
        low = starts[position]
        high = starts[position + 1]
        weights = self._weights
        if weights is not None:
            weights = rows_between(weights, low, high)

        bounds = self.lengths_offset_per_key()
        lengths = self.lengths()[bounds[position] : bounds[position + 1]]
        return jagged_from_parts(self._values[low:high], weights, lengths, None)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Every feature's lists by name: views. Kept: a second call returns the same."""
        self.length_per_key()  # checks an unchecked batch
        known = self._jt_dict
        if known is not None:
            return known
        keys = self._layout._keys
        counts = self.length_per_key()
        values = self._values.split_with_sizes(counts)
        weights = split_optional(self._weights, counts, len(keys))
        lengths, offsets = self._layout.cut([1] * len(keys), self.lengths(), compute_offsets)

        features: dict[str, JaggedTensor] = {}
        for position, key in enumerate(keys):
            starts = offsets[position]
            if compute_offsets and starts is None:
                starts = offsets_of_lengths(lengths[position])
            features[key] = jagged_from_parts(
                values[position], weights[position], lengths[position], starts
            )

        self._jt_dict = features
        return features

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """A copy on ``device``; ``dtype`` is for the weights."""
        weights = optional_to(self._weights, device, non_blocking)
        if weights is not None and dtype is not None:
            weights = cast(weights, dtype)

        values = self._values.to(device, non_blocking=non_blocking)
        layout = self._layout.to(device, non_blocking)
        return self._with_layout(values, weights, layout)

    @torch.jit.unused
    def unsync(self) -> "KeyedJaggedTensor":
        """Forget the ids per key."""
        self._layout = self._layout.without_counts()
        return self

    @torch.jit.unused
    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """The batch with lengths as one dimension [F * B]: as they are here anyhow."""
        return self.to(self.device())

    @torch.jit.unused
    def pin_memory(self) -> "KeyedJaggedTensor":
        """A copy in page-locked memory, from which a copy to a GPU can overlap with computation."""
        layout = self._layout
        tensors = layout._lengths, layout._offsets, layout._inverse_indices
        pinned = tree_map_only(Tensor, Tensor.pin_memory, (self._values, self._weights, tensors))
        return self._from_layout(pinned[0], pinned[1], layout.with_tensors(*pinned[2]))

    @torch.jit.unused
    def copy_(self, kjt: "KeyedJaggedTensor", non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Copy another batch's parts, of equal keys and shapes, into this one's memory."""
        layout = self._layout
        source = kjt._layout
        if layout._keys != source._keys:
            raise ValueError(
                f"{_BATCH}.copy_: the source has the keys {source._keys} and the target "
                f"{layout._keys}; make the target with KeyedJaggedTensor.empty_like(source, device)"
            )
        copy_numbers(_BATCH, self, kjt, non_blocking)

        inverse = layout._inverse_indices
        if inverse is not None and source._inverse_indices is not None:
            keys, indices = source._inverse_indices
            inverse = (keys, inverse[1].copy_(indices, non_blocking=non_blocking))

        self._layout = source.with_tensors(layout._lengths, layout._offsets, inverse)
        if not source._checked and self._values.is_cpu:
            self._layout = self._layout.without_counts()
        self._jt_dict = None
        return self

    @torch.jit.unused
    def clear_storage(self) -> int:
        """Free the parts' memory at once, whoever else holds them; returns the bytes freed."""
        freed = 0
        for tensor in stored_tensors(self):
            freed += tensor.nbytes
            tensor.untyped_storage().resize_(0)
        return freed

    # What an exchange sends that knows no batches: it asks one for its labels, its splits and its
    # tensors, sends slice r of each tensor to rank r, and hands what arrives to ``dist_init``.
    # ``collectives.kjt.KJTAllToAll`` does the same in one round less; code written for TorchRec
    # calls these.

    @torch.jit.unused
    def dist_labels(self) -> list[str]:
        """What is sent, in the order in which it is sent."""
        return self._by_label("lengths", "values", "strides", "weights")

    @torch.jit.unused
    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Of each label, elements sent to each rank if rank r gets ``key_splits[r]`` keys.

        Example:
            >>> batch = KeyedJaggedTensor(
            ...     ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1, 0])
            ... )
            >>> batch.dist_splits([1, 1])
            [[2, 2], [2, 1]]
        """
        check_segments("KeyedJaggedTensor.dist_splits", key_splits, self.keys())
        ids = segment_sums(self.length_per_key(), key_splits)
        lists = segment_sums(self.stride_per_key(), key_splits)
        return self._by_label(lists, ids, key_splits, ids)

    @torch.jit.unused
    def dist_tensors(self) -> list[Tensor]:
        """Of each label, the tensor: lengths ``[F * B]``, values ``[N]``, strides, weights."""
        strides = torch.tensor(self.stride_per_key(), device=self.device())
        return self._by_label(self.lengths(), self._values, strides, self._weights)

    @torch.jit.unused
    def _by_label(self, lengths: Any, values: Any, strides: Any, weights: Any) -> list[Any]:
        """What belongs to each label that this batch sends."""
        ranks = self._layout._stride_per_key_per_rank
        return _by_label(ranks, self._weights, lengths, values, strides, weights)

    @staticmethod
    @torch.jit.unused
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """The batch that arrived: F keys, the samples of all ranks.

        Args:
            keys: F keys that this rank got.
            tensors: Of each label what arrived, rank after rank.
            variable_stride_per_key: Whether strides are among them.
            num_workers: W.
            recat: The order of the segments in the result, as positions in what arrived: of a
                rank's key each ``[F * W]``; of a list of ids each ``[F * sum of B_r]`` where ranks
                differ in B. None leaves what arrived as it stands.
            stride_per_rank: B of every rank; None with variable batch.
            stagger: With variable batch, in which order ranks stand: the first of each of
                ``stagger`` hosts, then the second, ...

        Example:
            >>> arrived = [
            ...     torch.tensor([1, 1, 1, 0]),
            ...     torch.tensor([7, 8, 9]),
            ... ]  # of rank 0 a: 7, b: 8; of rank 1 a: 9
            >>> batch = KeyedJaggedTensor.dist_init(
            ...     ["a", "b"], arrived, False, 2, torch.tensor([0, 2, 1, 3]), [1, 1]
            ... )
            >>> batch["a"].values(), batch["b"].values()
            (tensor([7, 9]), tensor([8]))
        """
        return _dist_init(
            keys, tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger
        )

    _arguments = (
        "keys values weights lengths offsets stride stride_per_key_per_rank inverse_indices"
    )
    __fx_create_arg__ = constructor_call
    record_stream = read_on_stream
    size_in_bytes = bytes_of
    __copy__ = sharing
    __repr__ = object_text

    @torch.jit.unused
    def __str__(self) -> str:
        """TorchRec's printed form: each key's lists and weights. Lengths are checked first."""
        entries: list[str] = []
        for key, lists in self.to_dict().items():
            text = lists_text(lists, "\n        ")
            if self._weights is not None:
                text = f"{{\n        {text}\n    }}"
            entries.append(f'    "{key}": {text}')

        text = "KeyedJaggedTensor({\n" + ",\n".join(entries) + "\n})\n"
        return text if entries else "KeyedJaggedTensor()\n"

    # TorchScript knows neither the static methods that make a batch nor ``object.__new__``.

    def _derive(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        length_per_key: list[int] | None,
        strides: Tensor | None,
    ) -> "KeyedJaggedTensor":
        """A batch made of parts of this one, unchecked; it has no inverse indices."""
        if is_scripting():
            # fmt: off
            return KeyedJaggedTensor(
                keys, values, weights, lengths, offsets, stride, strides, None,
                length_per_key, None, None, None, None, None,
            )
            # fmt: on
        else:
            return KeyedJaggedTensor._from_parts(
                keys, values, weights, lengths, offsets, stride, length_per_key, strides
            )

    def _with_layout(
        self, values: Tensor, weights: Tensor | None, layout: KeyedLayout
    ) -> "KeyedJaggedTensor":
        """A batch over a layout made of this one's, unchecked."""
        if is_scripting():
            # fmt: off
            return KeyedJaggedTensor(
                layout._keys, values, weights, layout._lengths, layout._offsets, layout._stride,
                layout._stride_per_key_per_rank, layout._stride_per_key, layout._length_per_key,
                layout._lengths_offset_per_key, layout._offset_per_key, layout._index_per_key,
                None, layout._inverse_indices,
            )
            # fmt: on
        else:
            return KeyedJaggedTensor._from_layout(values, weights, layout)

    @torch.jit.unused
    def _with_ids(self, values: Tensor, weights: Tensor | None) -> "KeyedJaggedTensor":
        """This batch with other ids [N] and their weights."""
        return KeyedJaggedTensor._from_layout(values, weights, self._layout)

    @torch.jit.unused
    def _with_inverse_indices(
        self, inverse_indices: tuple[list[str], Tensor] | None
    ) -> "KeyedJaggedTensor":
        """This batch with other inverse indices."""
        layout = self._layout
        layout = layout.with_tensors(layout._lengths, layout._offsets, inverse_indices)
        return KeyedJaggedTensor._from_layout(self._values, self._weights, layout)

    @torch.jit.unused
    def _accept(self) -> None:
        """Bring what a caller gave into one form and check it, on the CPU with the numbers if few.

        Lengths [F, B] become [F * B]; a batch without lists needs neither lengths nor offsets;
        strides that differ make a variable batch.
        """
        values = self._values
        if type(values) is not Tensor:
            require_tensors(_BATCH, {"values": values})
            self.__class__ = class_for(type(self), values)

        layout = self._layout
        keys = layout._keys
        if type(keys) is list:
            layout._keys = keys[:]
        elif not isinstance(keys, Proxy):
            layout._keys = key_list(_BATCH, keys)

        lengths = layout._lengths
        offsets = layout._offsets
        if lengths is not None:
            if isinstance(lengths, Tensor) and lengths.dim() == 2:
                layout._lengths = lengths.reshape(-1)
        elif offsets is None:
            if layout._keys:
                raise ValueError(
                    f"{_BATCH}: neither lengths nor offsets given; one of them says where the "
                    "lists of ids end"
                )
            layout._lengths = torch.empty(0, dtype=torch.int64, device=values.device)
        elif isinstance(offsets, Tensor) and offsets.numel() == 0:
            layout._lengths = offsets
            layout._offsets = None

        if checkable(values):
            check_layout(layout, values, self._weights)
            if self._jt_dict and values.is_cpu and list(self._jt_dict) != layout._keys:
                raise ValueError(
                    f"{_BATCH}: jt_dict has the keys {list(self._jt_dict)}, and the batch "
                    f"{layout._keys}; leave it out"
                )
        elif layout._stride_per_key is not None:
            layout.vary(layout._stride_per_key)

    @torch.jit.unused
    def _check_numbers(self, count: bool = True) -> None:
        """Check an unchecked batch. A sync point."""
        if not self._layout._checked:
            check_numbers(self._layout, self._values.shape[0], count)

    @torch.jit.unused
    def _can_be_joined(self) -> bool:
        """Check what cannot be seen once the batch is part of another; whether all is checked.

        Sums that are wrong in two batches may be right for both, and a joined batch has no offsets
        that could be compared with its lengths.
        """
        layout = self._layout
        if layout._checked:
            return True
        if layout._offsets is None and int(self.lengths().sum()) == self._values.shape[0]:
            return False
        self._check_numbers()
        return True

    @torch.jit.unused
    def _count(self) -> list[int] | None:
        """Ids per key, if something cheaper than the offsets gives them; else None."""
        values = self._values
        layout = self._layout
        on_cpu = type(values) is Tensor and values.is_cpu
        if not on_cpu and isinstance(values, Tensor) and values.is_meta:
            # placeholder lengths on meta tensors: split evenly, longer ones first
            keys = len(layout._keys)
            total = values.shape[0]
            return [total // keys + (total % keys if key == 0 else 0) for key in range(keys)]
        if type(values) is not Tensor or is_compiling() or _is_tracing():
            return None

        if not on_cpu:
            # this is a sync point, where the device tells what its checks of earlier ids have found
            raise_deferred_id_errors()
        if not layout._checked:
            self._check_numbers()
            return layout._length_per_key
        lengths = layout._lengths
        if lengths is None or layout._offsets is not None or not on_cpu:
            return None
        return ids_per_key(lengths, layout.stride_per_key(), values.shape[0])


# Whole calls in a traced graph, too. What makes a batch stands outside of the class: TorchScript
# compiles it apart.
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
    return KeyedJaggedTensor(
        keys, values, weights, lengths, offsets, stride, ranks, inverse_indices=inverse
    ).sync()


def _concat(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    if len(batches) == 0:
        raise ValueError(
            "KeyedJaggedTensor.concat: no batches given; KeyedJaggedTensor.empty() makes an "
            "empty one"
        )
    keys: list[str] = []
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    samples: list[int] = []
    weights: list[Tensor] = []
    strides: list[Tensor] = []
    inverse: list[Tensor] = []
    inverse_keys: list[str] = []
    counts: list[int] = []
    checked = True
    for batch in batches:
        if not is_scripting():
            checked = batch._can_be_joined() and checked
        layout = batch._layout
        keys += layout._keys
        values.append(batch._values)
        lengths.append(batch.lengths())
        samples.append(batch.stride())
        batch_weights = batch._weights
        if batch_weights is not None:
            weights.append(batch_weights)
        batch_strides = layout._stride_per_key_per_rank
        if batch_strides is not None:
            strides.append(batch_strides)
        batch_inverse = layout._inverse_indices
        if batch_inverse is not None:
            inverse_keys += batch_inverse[0]
            inverse.append(batch_inverse[1])
        batch_counts = layout._length_per_key
        if batch_counts is not None:
            counts += batch_counts

    check_joined(keys, samples, len(weights), [ranks.size(1) for ranks in strides], len(inverse))
    joined = batches[0]._derive(
        keys,
        torch.cat(values),
        torch.cat(weights) if len(weights) > 0 else None,
        torch.cat(lengths),
        None,
        max(samples),
        counts if len(counts) == len(keys) else None,
        torch.cat(strides) if len(strides) > 0 else None,
    )
    if len(inverse) > 0:
        joined._layout._inverse_indices = (inverse_keys, torch.cat(inverse))
    if not is_scripting():
        joined._layout._checked = checked
        refuse_wrapping("KeyedJaggedTensor.concat", joined._values, joined.lengths())
    return joined


def _by_label(
    batch_strides: Any, batch_weights: Any, lengths: Any, values: Any, strides: Any, weights: Any
) -> list[Any]:
    labelled = [lengths, values]
    if batch_strides is not None:
        labelled.append(strides)
    if batch_weights is not None:
        labelled.append(weights)
    return labelled


def _dist_init(
    keys: list[str],
    tensors: list[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int,
) -> KeyedJaggedTensor:
    where = f"{_BATCH}.dist_init"
    labels = ["lengths", "values", "strides"] if variable_stride_per_key else ["lengths", "values"]
    unweighted = len(labels)
    if len(tensors) not in (unweighted, unweighted + 1):
        raise ValueError(
            f"{where}: {len(tensors)} tensors; pass {unweighted} ({', '.join(labels)}), or "
            f"{unweighted + 1} with weights"
        )
    labelled = dict(zip([*labels, "weights"], tensors, strict=False))
    require_tensors(where, labelled, optional=True)

    lengths = labelled["lengths"]
    values = labelled["values"]
    weights = labelled.get("weights")
    stride = None
    strides = None
    if variable_stride_per_key:
        sizes = labelled["strides"]
        ranks = torch.arange(num_workers).view(stagger, -1).t().reshape(-1)
        strides = sizes.cpu().view(num_workers, len(keys))[ranks].t()
    elif stride_per_rank is None:
        raise ValueError(
            f"{where}: stride_per_rank is None; without strides it says B of each rank"
        )
    else:
        stride = sum(stride_per_rank)
        sizes = torch.ones_like(lengths)
        if len(set(stride_per_rank)) == 1:
            sizes = lengths.new_full([len(keys) * num_workers], stride_per_rank[0])

    if recat is not None:
        # each segment that arrived is a feature of its own
        segments = [""] * len(recat)
        arrived = KeyedJaggedTensor._from_parts(
            segments, values, weights, lengths, None, None, None, sizes.view(-1, 1)
        ).permute(recat.tolist())
        values = arrived.values()
        weights = arrived.weights_or_none()
        lengths = arrived.lengths()
    return KeyedJaggedTensor._from_parts(
        keys, values, weights, lengths, None, stride, None, strides
    ).sync()


def _from_jt_dict(
    jt_dict: dict[str, JaggedTensor], force_variable_stride: bool
) -> KeyedJaggedTensor:
    if len(jt_dict) == 0:
        return KeyedJaggedTensor.empty()
    keys: list[str] = []
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    weights: list[Tensor] = []
    weighted: list[str] = []
    for key, feature in jt_dict.items():
        keys.append(key)
        values.append(feature.values())
        lengths.append(feature.lengths())
        weight = feature.weights_or_none()
        if weight is not None:
            weights.append(weight)
            weighted.append(key)
    if len(weighted) > 0 and len(weighted) < len(keys):
        raise ValueError(
            f"KeyedJaggedTensor.from_jt_dict: weights differ: of {keys} only {weighted} have "
            "weights"
        )

    samples = [length.shape[0] for length in lengths]
    strides: Tensor | None = None
    if force_variable_stride or samples.count(samples[0]) != len(samples):
        strides = strides_of_ranks([[count] for count in samples])

    counts = [value.shape[0] for value in values]
    joined = torch.cat(values)
    all_lengths = torch.cat(lengths)
    all_weights: Tensor | None = None
    if len(weights) > 0:
        all_weights = torch.cat(weights)
    if is_scripting():
        # fmt: off
        return KeyedJaggedTensor(
            keys, joined, all_weights, all_lengths, None, max(samples), strides, None,
            counts, None, None, None, None, None,
        )
        # fmt: on
    else:
        if type(joined) is Tensor:
            refuse_wrapping("KeyedJaggedTensor.from_jt_dict", joined, all_lengths)
        return KeyedJaggedTensor._from_parts(
            keys, joined, all_weights, all_lengths, None, max(samples), counts, strides
        )


def _empty_like(kjt: KeyedJaggedTensor, device: torch.device | None) -> KeyedJaggedTensor:
    layout = kjt._layout
    lists = jagged_from_parts(kjt._values, kjt._weights, layout._lengths, layout._offsets)
    lists = JaggedTensor.empty_like(lists, device)
    if device is None:
        keys: list[str] = []
        counts: list[int] = []
        # fmt: off
        return kjt._derive(
            keys, lists._values, lists._weights, lists._lengths, None, kjt.stride(), counts,
            layout._stride_per_key_per_rank,
        )
        # fmt: on

    inverse = layout._inverse_indices
    if inverse is not None:
        inverse = (inverse[0], torch.empty_like(inverse[1], device=device))
    layout = layout.with_tensors(lists._lengths, lists._offsets, inverse)
    layout._checked = True
    return kjt._with_layout(lists._values, lists._weights, layout)


class ComputeKJTToJTDict(nn.Module):
    """``KeyedJaggedTensor.to_dict`` as a module: one jagged tensor per feature, as views.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2])
        ... )
        >>> ComputeKJTToJTDict()(batch)["b"].to_dense()
        [tensor([7, 1])]

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.ComputeKJTToJTDict``.
    """

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """The batch's features by name: each ``[B]`` lists."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """``KeyedJaggedTensor.from_jt_dict`` as a module: one jagged tensor per feature to a batch.

    Example:
        >>> import torch
        >>> one = JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1, 0]))
        >>> two = JaggedTensor(torch.tensor([7, 1]), lengths=torch.tensor([0, 2]))
        >>> ComputeJTDictToKJT()({"a": one, "b": two}).lengths()
        tensor([1, 0, 0, 2])

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.ComputeJTDictToKJT``.
    """

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """The features as one batch, in the order of the dict."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)
