"""KeyedJaggedTensor: a batch of id lists, one list per feature and sample."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx import Proxy
from torch.jit import is_scripting, is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.utils._pytree import tree_map_only

from tutorec.sparse.deferred import report
from tutorec.sparse.jagged import (
    JaggedTensor,
    bytes_of,
    cast,
    constructor_call,
    copy_numbers,
    jagged_from_parts,
    kind_of,
    lists_text,
    object_text,
    read_on_stream,
    sharing,
    tensors_of,
)
from tutorec.sparse.layout import (
    FEW_LISTS,
    ids_by_offsets,
    ids_per_key,
    lengths_of_offsets,
    offsets_of_lengths,
    permute_segments,
    positions,
    rows_between,
    running_sum,
    segment_sums,
    split_optional,
    stride_of,
    strides_as_lists,
    strides_of,
    strides_of_ranks,
)
from tutorec.sparse.refuse import (
    check_inverse,
    check_joined,
    check_stride_per_key,
    refuse_list_count,
    refuse_lists,
    require_features,
    require_tensors,
)
from tutorec.sparse.validate import (
    check_form,
    check_keys,
    check_names,
    check_positions,
    check_segments,
    check_strides,
    checkable,
    count_ids,
    key_list,
    refuse_wrapping,
)

_BATCH = "KeyedJaggedTensor"
# What a caller may give although it follows from the other arguments.
_DERIVED = ("_length_per_key", "_offset_per_key", "_lengths_offset_per_key", "_index_per_key")
_derived = attrgetter(*_DERIVED)
# The keys that were last found to be distinct: most batches of a program have the same ones.
_distinct: list[str] = []

# While a graph is traced, these stay whole as calls in it: they read numbers that a tracer does not
# have, and TorchScript compiles them as they stand.
for _name in (
    "cast ids_by_offsets lengths_of_offsets "
    "offsets_of_lengths permute_segments rows_between running_sum segment_sums stride_of "
    "strides_as_lists strides_of strides_of_ranks _concat _dist_init _empty_like _for_labels "
    "_from_jt_dict _inverse_on _strides_that_differ"
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

    # fmt: off
    __slots__ = (
        "_index_per_key", "_inverse_indices", "_jt_dict", "_keys", "_length_per_key", "_lengths",
        "_lengths_offset_per_key", "_offset_per_key", "_offsets", "_stride", "_stride_per_key",
        "_stride_per_key_per_rank", "_unchecked", "_values", "_weights",
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
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride
        ranks = stride_per_key_per_rank
        self._stride_per_key_per_rank: Tensor | None = (
            None if ranks is None else strides_of_ranks(ranks)
        )
        self._stride_per_key = stride_per_key
        self._length_per_key = length_per_key
        self._lengths_offset_per_key = lengths_offset_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._jt_dict = jt_dict
        self._inverse_indices = inverse_indices
        # True until the first use that checks that lengths and offsets describe the ids, then None.
        unchecked: bool | None = None  # named for TorchScript, which else takes it for a NoneType
        self._unchecked = unchecked
        if not is_scripting():
            self._accept()

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
        batch = object.__new__(
            KeyedJaggedTensor if type(values) is Tensor else kind_of(KeyedJaggedTensor, values)
        )
        batch._keys, batch._values, batch._weights = keys, values, weights
        batch._lengths = lengths
        batch._offsets = offsets
        batch._stride = stride
        batch._stride_per_key_per_rank = stride_per_key_per_rank
        batch._length_per_key = length_per_key
        batch._stride_per_key = batch._lengths_offset_per_key = batch._offset_per_key = (
            batch._index_per_key
        ) = None
        batch._jt_dict = batch._inverse_indices = batch._unchecked = None
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
        values, weights, lengths = lists.values(), lists.weights_or_none(), lists.lengths()
        return _synced(keys, values, weights, lengths, None, 0, None, None)

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
        return self._keys

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

    def lengths(self) -> Tensor:
        """Ids per list [F * B]."""
        lengths = self._lengths
        if lengths is None:
            lengths = lengths_of_offsets(self._offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Ids per list [F * B] if given or asked for already."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each list starts [F * B + 1]."""
        offsets = self._offsets
        if offsets is None:
            offsets = offsets_of_lengths(self._lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Where each list starts [F * B + 1] if given or asked for already."""
        return self._offsets

    def stride(self) -> int:
        """B, samples in the batch; with variable batch of the whole batch, or the most of a key."""
        stride = self._stride
        if stride is None:
            stride = stride_of(
                self._keys,
                self._lengths,
                self._offsets,
                self._stride_per_key_per_rank,
                self._inverse_indices,
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
        """Keys, and the list that each sample of the whole batch uses [F, B]; an error if none."""
        inverse_indices = self._inverse_indices
        if inverse_indices is None:
            raise ValueError(
                "there are no inverse indices; pass inverse_indices=, or ask "
                "inverse_indices_or_none()"
            )
        return inverse_indices

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Keys, and the list that each sample of the whole batch uses [F, B], or None."""
        return self._inverse_indices

    def length_per_key(self) -> list[int]:
        """Ids of each key. Reads the device unless known: a sync point."""
        counts = self._length_per_key
        if counts is None:
            if not is_scripting():
                counts = self._count()
            if counts is None:
                counts = ids_by_offsets(self.offsets(), self.stride_per_key())
            self._length_per_key = counts
        return counts

    def length_per_key_or_none(self) -> list[int] | None:
        """Ids of each key if known already."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each key's ids start, and the last one's end. A sync point unless known."""
        starts = self._offset_per_key
        if starts is None:
            starts = running_sum(self.length_per_key())
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

        A segment of all keys is the batch itself; smaller ones leave the inverse indices of the
        whole behind.
        """
        check_segments("KeyedJaggedTensor.split", segments, self._keys)
        counts, stride, count = self.length_per_key(), self.stride(), len(segments)
        values, weights, lengths, offsets = self._cut(segments, True)
        strides = split_optional(self._stride_per_key_per_rank, segments, count)
        out: list[KeyedJaggedTensor] = []
        start = 0
        for part, segment in enumerate(segments):
            end = start + segment
            if segment == len(self._keys):
                out.append(self)
            else:
                keys, known = self._keys[start:end], counts[start:end]
                out.append(
                    self._derive(
                        keys,
                        values[part],
                        weights[part],
                        lengths[part],
                        offsets[part],
                        stride,
                        known,
                        strides[part],
                    )
                )
            start = end
        return out

    def _cut(
        self, segments: list[int], with_offsets: bool
    ) -> tuple[list[Tensor], list[Tensor | None], list[Tensor], list[Tensor | None]]:
        """Values, weights, lengths and offsets of the next ``segments[i]`` keys each: views.

        Offsets are found for many single keys in one operation. For fewer, which are faster one by
        one when they are asked for, each is None.
        """
        count, stride = len(segments), self.stride()
        sizes = segment_sums(self.length_per_key(), segments)
        # Views that autograd does not track: it does not need those of integers, except of ids,
        # which lookups save.
        lengths = self.lengths().unsafe_split_with_sizes(
            segment_sums(self.stride_per_key(), segments)
        )
        offsets: Tensor | None = None
        single = segments.count(1) == len(self._keys) == count
        if with_offsets and single and count > 3 and not self.variable_stride_per_key():
            offsets = offsets_of_lengths(self.lengths().view(count, stride)).view(-1)
        # TorchScript's operator returns a list, Python's a tuple.
        return (  # pyright: ignore[reportReturnType]
            self._values.split_with_sizes(sizes),
            split_optional(self._weights, sizes, count),
            lengths,
            split_optional(offsets, [stride + 1] * count, count),
        )

    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """The batch with key ``indices[i]`` at position i; repeats allowed. No inverse indices."""
        check_positions("KeyedJaggedTensor.permute", indices, self._keys)
        counts = self.length_per_key()
        values = permute_segments(self._values, counts, indices)
        lengths = permute_segments(self.lengths(), self.stride_per_key(), indices)
        weights = self._weights
        if weights is not None:
            weights = permute_segments(weights, counts, indices)
        strides = self._stride_per_key_per_rank
        if strides is not None:
            strides = permute_segments(strides, [1] * len(self._keys), indices)
        keys, known = [self._keys[index] for index in indices], [counts[index] for index in indices]
        return self._derive(keys, values, weights, lengths, None, self.stride(), known, strides)

    def __getitem__(self, key: str) -> JaggedTensor:
        """One feature's lists: views."""
        index = self.index_per_key()
        if key not in index:
            raise KeyError(f"KeyedJaggedTensor has no key '{key}'; its keys are {self._keys}")
        position, starts, bounds = index[key], self.offset_per_key(), self.lengths_offset_per_key()
        low, high = starts[position], starts[position + 1]
        weights = self._weights
        if weights is not None:
            weights = rows_between(weights, low, high)
        lengths = self.lengths()[bounds[position] : bounds[position + 1]]
        return jagged_from_parts(self._values[low:high], weights, lengths, None)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Every feature's lists by name: views. Kept: a second call returns the same."""
        self.length_per_key()  # checks an unchecked batch
        known = self._jt_dict
        if known is not None:
            return known
        out: dict[str, JaggedTensor] = {}
        values, weights, lengths, offsets = self._cut([1] * len(self._keys), compute_offsets)
        for position, key in enumerate(self._keys):
            starts = offsets[position]
            if compute_offsets and starts is None:
                starts = offsets_of_lengths(lengths[position])
            out[key] = jagged_from_parts(
                values[position], weights[position], lengths[position], starts
            )
        self._jt_dict = out
        return out

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """A copy on ``device``; ``dtype`` is for the weights."""
        lists = jagged_from_parts(self._values, self._weights, self._lengths, self._offsets)
        moved = lists.to(device, non_blocking)
        weights, inverse = moved._weights, self._inverse_indices
        if weights is not None and dtype is not None:
            weights = cast(weights, dtype)
        if inverse is not None:
            inverse = _inverse_on(inverse, device, non_blocking)
        return self._with_tensors(moved._values, weights, moved._lengths, moved._offsets, inverse)

    @torch.jit.unused
    def unsync(self) -> "KeyedJaggedTensor":
        """Forget the ids per key."""
        self._length_per_key = self._offset_per_key = None
        return self

    @torch.jit.unused
    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """The batch with lengths as one dimension [F * B]: as they are here anyhow."""
        return self.to(self.device())

    @torch.jit.unused
    def pin_memory(self) -> "KeyedJaggedTensor":
        """A copy in page-locked memory, from which a copy to a GPU can overlap with computation."""
        parts = self._values, self._weights, self._lengths, self._offsets, self._inverse_indices
        return self._with_tensors(*tree_map_only(Tensor, Tensor.pin_memory, parts))

    @torch.jit.unused
    def copy_(self, kjt: "KeyedJaggedTensor", non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Copy another batch's parts, of equal keys and shapes, into this one's memory."""
        if self._keys != kjt._keys:
            raise ValueError(
                f"{_BATCH}.copy_: the source has the keys {kjt._keys} and the target {self._keys}; "
                "make the target with KeyedJaggedTensor.empty_like(source, device)"
            )
        copy_numbers(_BATCH, self, kjt, non_blocking)
        mine, theirs = self._inverse_indices, kjt._inverse_indices
        if mine is not None and theirs is not None:
            self._inverse_indices = (theirs[0], mine[1].copy_(theirs[1], non_blocking=non_blocking))
        self._jt_dict = None
        self._take_facts(kjt)
        return self

    @torch.jit.unused
    def clear_storage(self) -> int:
        """Free the parts' memory at once, whoever else holds them; returns the bytes freed."""
        freed = 0
        for part in tensors_of(self):
            freed += part.nbytes
            part.untyped_storage().resize_(0)
        return freed

    # What an exchange sends that knows no batches: it asks one for its labels, its splits and its
    # tensors, sends slice r of each tensor to rank r, and hands what arrives to ``dist_init``.
    # ``collectives.kjt.KJTAllToAll`` does the same in one round less; code written for TorchRec
    # calls these.

    @torch.jit.unused
    def dist_labels(self) -> list[str]:
        """What is sent, in the order in which it is sent."""
        return self._of_labels("lengths", "values", "strides", "weights")

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
        check_segments("KeyedJaggedTensor.dist_splits", key_splits, self._keys)
        ids = segment_sums(self.length_per_key(), key_splits)
        lists = segment_sums(self.stride_per_key(), key_splits)
        return self._of_labels(lists, ids, key_splits, ids)

    @torch.jit.unused
    def dist_tensors(self) -> list[Tensor]:
        """Of each label, the tensor: lengths ``[F * B]``, values ``[N]``, strides, weights."""
        strides = torch.tensor(self.stride_per_key(), device=self.device())
        return self._of_labels(self.lengths(), self._values, strides, self._weights)

    @torch.jit.unused
    def _of_labels(self, lengths: Any, values: Any, strides: Any, weights: Any) -> list[Any]:
        """What belongs to each label that this batch sends."""
        has = self._stride_per_key_per_rank, self._weights
        return _for_labels(has, lengths, values, strides, weights)

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
        entries = []
        for key, lists in self.to_dict().items():
            text = lists_text(lists, "\n        ")
            if self._weights is not None:
                text = f"{{\n        {text}\n    }}"
            entries.append(f'    "{key}": {text}')
        text = "KeyedJaggedTensor({\n" + ",\n".join(entries) + "\n})\n"
        return text if entries else "KeyedJaggedTensor()\n"

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
        """A batch made of parts of this one: no check, and in eager code no constructor."""
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

    def _with_tensors(
        self,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        inverse: tuple[list[str], Tensor] | None,
    ) -> "KeyedJaggedTensor":
        """This batch with other tensors of the same shapes; host-side facts are kept."""
        batch = self._derive(self._keys, values, weights, lengths, offsets, None, None, None)
        batch._inverse_indices = inverse
        batch._take_facts(self)
        return batch

    @torch.jit.unused
    def _with_ids(self, values: Tensor, weights: Tensor | None) -> "KeyedJaggedTensor":
        """This batch with other ids [N] and their weights."""
        return self._with_tensors(
            values, weights, self._lengths, self._offsets, self._inverse_indices
        )

    def _take_facts(self, source: "KeyedJaggedTensor") -> None:
        """Take over what is known of a batch on the host, and what is still to be checked."""
        self._stride, self._stride_per_key = source._stride, source._stride_per_key
        self._stride_per_key_per_rank = source._stride_per_key_per_rank
        self._lengths_offset_per_key = source._lengths_offset_per_key
        self._index_per_key, self._unchecked = source._index_per_key, source._unchecked
        # those of an unchecked batch were given by a caller: on the CPU they are counted
        known = self._unchecked is None or not self._values.is_cpu
        self._length_per_key = source._length_per_key if known else None
        self._offset_per_key = source._offset_per_key if known else None

    @torch.jit.unused
    def _accept(self) -> None:
        """Bring what a caller gave into one form and check it, on the CPU with the numbers if few.

        Lengths [F, B] become [F * B]; a batch without lists needs neither lengths nor offsets;
        strides that differ make a variable batch.
        """
        keys, values, lengths, offsets = self._keys, self._values, self._lengths, self._offsets
        ranks, strides = self._stride_per_key_per_rank, self._stride_per_key
        stride = self._stride
        if type(values) is not Tensor:
            require_tensors(_BATCH, {"values": values})
            self.__class__ = kind_of(type(self), values)
        if type(keys) is list:
            self._keys = keys[:]
        elif not isinstance(keys, Proxy):
            self._keys = keys = key_list(_BATCH, keys)
        if lengths is not None:
            if isinstance(lengths, Tensor) and lengths.dim() == 2:
                self._lengths = lengths = lengths.reshape(-1)
        elif offsets is None:
            if keys:
                raise ValueError(
                    f"{_BATCH}: neither lengths nor offsets given; one of them says where the "
                    "lists of ids end"
                )
            self._lengths = lengths = torch.empty(0, dtype=torch.int64, device=values.device)
        elif isinstance(offsets, Tensor) and offsets.numel() == 0:
            self._lengths, self._offsets = lengths, offsets = offsets, None
        if strides is not None and ranks is None:
            self._stride_per_key_per_rank = _strides_that_differ(strides)
        if not checkable(values):
            return
        if keys != _distinct:
            check_names(_BATCH, keys)
            check_keys(_BATCH, keys)
            _distinct[:] = keys
        try:
            lists = check_form(_BATCH, values, self._weights, lengths, offsets)
        except AttributeError:
            parts = {"weights": self._weights, "lengths": lengths, "offsets": offsets}
            require_tensors(_BATCH, parts, optional=True)
            raise
        if ranks is not None:
            check_strides(keys, ranks)
        if strides is not None:
            check_stride_per_key(keys, stride, strides, ranks)
        even = ranks is None and strides is None
        if lists != (len(keys) * self.stride() if even else sum(self.stride_per_key())):
            given = "" if stride is None else "stride"
            if not even:
                given = "stride_per_key" if ranks is None else "stride_per_key_per_rank"
            refuse_list_count(keys, lists, self.stride_per_key(), given)
        self._unchecked = True
        if not values.is_cpu:
            return
        given = _derived(self)
        if given != (None, None, None, None):
            self._check_derived(given)
        elif lists <= FEW_LISTS:
            self._check_numbers()
        if self._jt_dict and list(self._jt_dict) != keys:
            raise ValueError(
                f"{_BATCH}: jt_dict has the keys {list(self._jt_dict)}, and the batch {keys}; "
                "leave it out"
            )

    @torch.jit.unused
    def _check_derived(self, given: tuple[Any, ...]) -> None:
        """Check what follows from the other arguments: if wrong it would shift later results."""
        for name in _DERIVED:
            setattr(self, name, None)
        self._check_numbers()
        for name, value in zip(_DERIVED, given, strict=True):
            if value is not None and value != (derived := getattr(self, name[1:])()):
                raise ValueError(
                    f"{_BATCH}: {name[1:]} is {value}, and the other arguments say {derived}; "
                    "leave it out"
                )

    @torch.jit.unused
    def _check_numbers(self) -> None:
        """Check an unchecked batch; the ids per key are known afterwards. A sync point."""
        if self._unchecked is None:
            return
        total = self._values.shape[0]
        counts = count_ids(total, self._lengths, self._offsets, self.stride_per_key())
        if counts is None:
            bounds = self.lengths_offset_per_key()
            refuse_lists(_BATCH, total, self._lengths, self._offsets, self._keys, bounds)
        if self._inverse_indices is not None:
            check_inverse(self._keys, self.stride_per_key(), self._inverse_indices)
        self._length_per_key, self._unchecked = counts, None

    @torch.jit.unused
    def _can_be_joined(self) -> bool:
        """Check what cannot be seen once the batch is part of another; whether all is checked.

        Sums that are wrong in two batches may be right for both, and a joined batch has no offsets
        that could be compared with its lengths.
        """
        if self._unchecked is None:
            return True
        if self._offsets is None and int(self.lengths().sum()) == self._values.shape[0]:
            return False
        self._check_numbers()
        return True

    @torch.jit.unused
    def _count(self) -> list[int] | None:
        """Ids per key, if something cheaper than the offsets gives them; else None."""
        values, lengths = self._values, self._lengths
        # a stand-in where there are no numbers: as even as can be, more to the first
        if isinstance(values, Tensor) and values.is_meta:
            keys, total = len(self._keys), values.shape[0]
            return [total // keys + (total % keys if key == 0 else 0) for key in range(keys)]
        if type(values) is not Tensor or is_compiling() or is_tracing():
            return None
        if not values.is_cpu:
            # this is a sync point, where the device tells what its checks of earlier ids have found
            report()
        if self._unchecked is not None:
            self._check_numbers()
            return self._length_per_key
        if lengths is None or self._offsets is not None or not values.is_cpu:
            return None
        return ids_per_key(lengths, self.stride_per_key(), values.shape[0])


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
        keys += batch._keys
        values.append(batch._values)
        lengths.append(batch.lengths())
        samples.append(batch.stride())
        weight, ranks, rows, known = (
            batch._weights,
            batch._stride_per_key_per_rank,
            batch._inverse_indices,
            batch._length_per_key,
        )
        if weight is not None:
            weights.append(weight)
        if ranks is not None:
            strides.append(ranks)
        if rows is not None:
            inverse_keys += rows[0]
            inverse.append(rows[1])
        if known is not None:
            counts += known
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
        joined._inverse_indices = (inverse_keys, torch.cat(inverse))
    if not is_scripting():
        joined._unchecked = None if checked else True
        refuse_wrapping("KeyedJaggedTensor.concat", joined._values, joined.lengths())
    return joined


def _strides_that_differ(stride_per_key: list[int]) -> Tensor | None:
    if not stride_per_key or stride_per_key.count(stride_per_key[0]) == len(stride_per_key):
        return None
    return strides_of_ranks([[count] for count in stride_per_key])


def _inverse_on(
    inverse: tuple[list[str], Tensor] | None, device: torch.device, non_blocking: bool
) -> tuple[list[str], Tensor] | None:
    if inverse is None:
        return None
    return inverse[0], inverse[1].to(device, non_blocking=non_blocking)


def _for_labels(
    has: tuple[Any, Any], lengths: Any, values: Any, strides: Any, weights: Any
) -> list[Any]:
    given = [lengths, values]
    if has[0] is not None:
        given.append(strides)
    if has[1] is not None:
        given.append(weights)
    return given


def _dist_init(
    keys: list[str],
    tensors: list[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int,
) -> KeyedJaggedTensor:
    labels = ["lengths", "values", "strides"][: 3 if variable_stride_per_key else 2]
    due = len(labels)
    if len(tensors) not in (due, due + 1):
        raise ValueError(
            f"{_BATCH}.dist_init: {len(tensors)} tensors; pass {due} ({', '.join(labels)}), or "
            f"{due + 1} with weights"
        )
    parts = dict(zip([*labels, "weights"], tensors, strict=False))
    require_tensors(f"{_BATCH}.dist_init", parts, optional=True)
    lengths, values = tensors[:2]
    weights = tensors[due] if len(tensors) > due else None
    stride = strides = None
    if variable_stride_per_key:
        sizes = tensors[2]
        ranks = torch.arange(num_workers).view(stagger, -1).t().reshape(-1)
        strides = sizes.cpu().view(num_workers, len(keys))[ranks].t()
    elif stride_per_rank is None:
        raise ValueError(
            f"{_BATCH}.dist_init: stride_per_rank is None; without strides it says B of each rank"
        )
    else:
        stride, sizes = sum(stride_per_rank), torch.ones_like(lengths)
        if len(set(stride_per_rank)) == 1:
            sizes = lengths.new_full([len(keys) * num_workers], stride_per_rank[0])
    if recat is not None:
        # each segment that arrived is a feature of its own
        segments, sizes = [""] * len(recat), sizes.view(-1, 1)
        arrived = KeyedJaggedTensor._from_parts(
            segments, values, weights, lengths, None, None, None, sizes
        ).permute(recat.tolist())
        values = arrived._values
        weights = arrived._weights
        lengths = arrived._lengths
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
    joined, all_lengths = torch.cat(values), torch.cat(lengths)
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
    lists = jagged_from_parts(kjt._values, kjt._weights, kjt._lengths, kjt._offsets)
    lists = JaggedTensor.empty_like(lists, device)
    values, weights, lengths = lists._values, lists._weights, lists._lengths
    inverse, strides = kjt._inverse_indices, kjt._stride_per_key_per_rank
    if device is None:
        keys: list[str] = []
        counts: list[int] = []
        return kjt._derive(keys, values, weights, lengths, None, kjt.stride(), counts, strides)
    if inverse is not None:
        inverse = (inverse[0], torch.empty_like(inverse[1], device=device))
    made = kjt._with_tensors(values, weights, lengths, lists._offsets, inverse)
    made._unchecked = None
    return made


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
