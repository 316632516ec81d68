"""``KeyedLayout``: where the id lists of a batch are, and the arithmetic of lengths and offsets.

A batch of F features and B samples is F * B lists of ids, laid end to end, feature after feature::

    lengths  [F * B]      ids in list i
    offsets  [F * B + 1]  where list i starts: the running sum of lengths
    list i = f * B + b    feature f, sample b

**Variable batch**: features may have different numbers of samples. A feature that changes rarely (a
user's country, beside the items of a session) is then not stored once for every sample. Its lists
are stored once each, feature f has ``stride_per_key[f]`` lists, and ``inverse_indices`` say which
of a feature's lists each sample of the batch means::

    keys                     ["user", "item"]
    stride_per_key_per_rank  [[2],                 user has 2 lists
                              [3]]                 item has 3
    inverse_indices          (["user", "item"],    sample 0: list 0 of user, 1 and 2: list 1
                              [[0, 1, 1],
                               [0, 1, 2]])

Columns of ``stride_per_key_per_rank`` are ranks: after an exchange a feature's lists are those of
rank 0, then those of rank 1. Before an exchange there is one column.

TorchScript compiles the class and the functions as they are.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch._C import _is_tracing
from torch.compiler import is_compiling
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend
from tutorec._kernels.jagged import lengths_to_offsets
from tutorec._kernels.older_torch import counts_of_rows, exports_counts
from tutorec._validation import validation_enabled
from tutorec.errors import BackendError

# Up to this many lists are counted in Python, which takes 10 ns each where a tensor operation takes
# 2 us.
FEW_LISTS = 256
LARGEST_INT32 = torch.iinfo(torch.int32).max

# A traced graph has these as calls: they read numbers or shapes, which a tracer does not have.
for _name in (
    "lengths_of_offsets moved moved_inverse offsets_of_lengths permute_segments running_sum "
    "segment_sums stride_of strides_of strides_that_differ"
).split():
    torch.fx.wrap(_name)

# ``torch.ops.fbgemm`` is there after the first import of a jagged type, as after ``import
# torchrec``. A backend that was demanded and cannot be had is named by the first operation, not by
# an import.
with suppress(BackendError, ValueError):
    backend()


def checkable(values: Tensor) -> bool:
    """Whether a tensor's numbers may be read now: checks are on, and nothing is traced."""
    return (
        validation_enabled()
        and type(values) is Tensor
        and not values.is_meta
        and not is_compiling()
        and not _is_tracing()
    )


class KeyedLayout:
    """Where the id lists of a batch are: keys, lengths or offsets, and samples of each key.

    Batches share a layout, so it does not change: what follows from it is computed at the first
    request and stored, and a batch with other lists gets another layout. ``check_layout`` and
    ``check_numbers`` of ``validate.py`` check it, each once. Attributes are what is known, methods
    what can be known; the arguments of ``KeyedJaggedTensor`` have the same names.
    """

    # fmt: off
    __slots__ = (
        "_checked", "_index_per_key", "_inverse_indices", "_keys", "_length_per_key", "_lengths",
        "_lengths_offset_per_key", "_offset_per_key", "_offsets", "_stride", "_stride_per_key",
        "_stride_per_key_per_rank",
    )
    # fmt: on

    def __init__(
        self,
        keys: list[str],
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        stride_per_key_per_rank: Tensor | None,
        length_per_key: list[int] | None,
        inverse_indices: tuple[list[str], Tensor] | None,
    ) -> None:
        self._keys = keys
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride
        self._stride_per_key_per_rank = stride_per_key_per_rank
        self._length_per_key = length_per_key
        self._inverse_indices = inverse_indices
        # False until the first use compares the lists with the ids, for a batch to be checked.
        self._checked = True

        # Named for TorchScript, which else takes them for None.
        numbers: list[int] | None = None
        positions_of_keys: dict[str, int] | None = None
        self._stride_per_key = numbers
        self._lengths_offset_per_key = numbers
        self._offset_per_key = numbers
        self._index_per_key = positions_of_keys

    def lengths(self) -> Tensor:
        """Ids per list [F * B]."""
        lengths = self._lengths
        if lengths is None:
            lengths = lengths_of_offsets(self._offsets)
            self._lengths = lengths
        return lengths

    def offsets(self) -> Tensor:
        """Where each list starts [F * B + 1]."""
        offsets = self._offsets
        if offsets is None:
            offsets = offsets_of_lengths(self._lengths)
            self._offsets = offsets
        return offsets

    def stride(self) -> int:
        """B, samples in the batch, as ``stride_of`` defines it."""
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
        """Samples of each key."""
        strides = self._stride_per_key
        if strides is None:
            strides = strides_of(self._keys, self.stride(), self._stride_per_key_per_rank)
            self._stride_per_key = strides
        return strides

    def lengths_offset_per_key(self) -> list[int]:
        """Where each key's lists start among the lists, and the end of the last."""
        bounds = self._lengths_offset_per_key
        if bounds is None:
            bounds = running_sum(self.stride_per_key())
            self._lengths_offset_per_key = bounds
        return bounds

    def offset_per_key(self) -> list[int]:
        """Where each key's ids start, and the last one's end; their numbers are known already."""
        starts = self._offset_per_key
        if starts is None:
            counts = self._length_per_key
            assert counts is not None, "KeyedJaggedTensor.length_per_key counts the ids"
            starts = running_sum(counts)
            self._offset_per_key = starts
        return starts

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        index = self._index_per_key
        if index is None:
            index = positions(self._keys)
            self._index_per_key = index
        return index

    @torch.jit.unused
    def vary(self, stride_per_key: list[int]) -> None:
        """While the layout is built: samples that differ between keys make a variable batch."""
        if self._stride_per_key_per_rank is None:
            self._stride_per_key_per_rank = strides_that_differ(stride_per_key)

    def cut(
        self, segments: list[int], lengths: Tensor, with_offsets: bool
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Lengths and offsets of the next ``segments[i]`` keys: views.

        ``lengths`` are those of the batch, which in a traced graph are not known before it runs.
        Offsets are computed for many single keys in one operation. For fewer keys, where one
        operation for each key that is used is faster, they are None.
        """
        # Views that autograd does not track, which it need not for integers. TorchScript's operator
        # returns a list, Python's a tuple.
        count = len(segments)
        if self._stride_per_key_per_rank is not None:
            sizes = segment_sums(self.stride_per_key(), segments)
        else:
            stride = self.stride()
            sizes = [segment * stride for segment in segments]
            if with_offsets and count > 3 and segments.count(1) == len(self._keys) == count:
                starts = offsets_of_lengths(lengths.view(count, stride)).view(-1)
                views = starts.unsafe_split_with_sizes([stride + 1] * count)
                offsets: list[Tensor | None] = [views[position] for position in range(count)]
                return lengths.unsafe_split_with_sizes(sizes), offsets  # pyright: ignore[reportReturnType]

        no_offsets: Tensor | None = None
        return lengths.unsafe_split_with_sizes(sizes), [no_offsets] * count  # pyright: ignore[reportReturnType]

    def to(self, device: torch.device, non_blocking: bool) -> "KeyedLayout":
        """The layout with its tensors on a device; itself where they are there already."""
        lengths = optional_to(self._lengths, device, non_blocking)
        offsets = optional_to(self._offsets, device, non_blocking)
        inverse = self._inverse_indices
        if inverse is not None:
            inverse = moved_inverse(inverse, device, non_blocking)
        elif lengths is self._lengths and offsets is self._offsets:
            return self

        layout = self.with_tensors(lengths, offsets, inverse)
        # On the CPU an unchecked batch is counted, whatever its maker says.
        if not self._checked and device.type == "cpu":
            return layout.without_counts()
        return layout

    def with_tensors(
        self,
        lengths: Tensor | None,
        offsets: Tensor | None,
        inverse_indices: tuple[list[str], Tensor] | None,
    ) -> "KeyedLayout":
        """The layout with other tensors of the same numbers."""
        layout = KeyedLayout(
            self._keys,
            lengths,
            offsets,
            self._stride,
            self._stride_per_key_per_rank,
            self._length_per_key,
            inverse_indices,
        )
        layout._stride_per_key = self._stride_per_key
        layout._lengths_offset_per_key = self._lengths_offset_per_key
        layout._offset_per_key = self._offset_per_key
        layout._index_per_key = self._index_per_key
        layout._checked = self._checked

        return layout

    def without_counts(self) -> "KeyedLayout":
        """The layout without the ids of each key, which are counted again when they are used."""
        layout = self.with_tensors(self._lengths, self._offsets, self._inverse_indices)
        layout._length_per_key = None
        layout._offset_per_key = None
        return layout


def offsets_of_lengths(lengths: Tensor | None) -> Tensor:
    """Where each list starts: the running sum of lengths [L], with a 0 in front, [L + 1].

    Of a matrix ``[F, B]`` those of each row, ``[F, B + 1]``.
    """
    assert lengths is not None, "lengths or offsets are always there"
    return lengths_to_offsets(lengths)


def lengths_of_offsets(offsets: Tensor | None) -> Tensor:
    """Ids per list [L] from offsets [L + 1]."""
    assert offsets is not None, "lengths or offsets are always there"
    return offsets[1:] - offsets[:-1]


def starts_of_keys(offsets: Tensor, stride_per_key: list[int]) -> Tensor:
    """Where each key's ids start, and the last one's end [F + 1], int64, without a sync point."""
    stride = stride_per_key[0] if len(stride_per_key) > 0 else 0
    if stride > 0 and stride_per_key.count(stride) == len(stride_per_key):
        return offsets[::stride].long()

    bounds = running_sum(stride_per_key)
    if is_scripting():
        return offsets[torch.tensor(bounds, device=offsets.device)].long()
    else:
        return offsets[ints_on_device(bounds, torch.int64, offsets.device)].long()


def ids_by_offsets(offsets: Tensor, stride_per_key: list[int]) -> list[int]:
    """Ids of each key. A sync point."""
    if not is_scripting():  # noqa: SIM102 (alone, so that it is not compiled)
        # compared one by one: the sizes of an exported batch have no hash
        if exports_counts() and all([stride == stride_per_key[0] for stride in stride_per_key]):
            return counts_of_rows(offsets, len(stride_per_key))

    starts: list[int] = starts_of_keys(offsets, stride_per_key).tolist()
    return differences(starts)


def ids_per_key(lengths: Tensor, stride_per_key: list[int], most: int) -> list[int]:
    """Ids of each key. A sync point.

    Args:
        lengths: ``[L]``, not negative.
        stride_per_key: Samples of each key, F numbers.
        most: No key has more ids.

    Returns:
        F numbers.
    """
    if lengths.numel() <= FEW_LISTS:
        return segment_sums(lengths.tolist(), stride_per_key)
    if len(set(stride_per_key)) != 1 or lengths.numel() == 0:
        return ids_by_offsets(offsets_of_lengths(lengths.long()), stride_per_key)

    # A sum in int32, where that holds it, is five times as fast as one in int64.
    fits = lengths.dtype is torch.int32 and most <= LARGEST_INT32
    rows = lengths.view(len(stride_per_key), -1)
    counts: list[int] = rows.sum(1, dtype=torch.int32 if fits else torch.int64).tolist()
    return counts


def differences(offset_per_key: list[int]) -> list[int]:
    """Ids per key from the keys' starts: the inverse of ``running_sum``."""
    out: list[int] = []
    for index in range(len(offset_per_key) - 1):
        out.append(offset_per_key[index + 1] - offset_per_key[index])
    return out


def running_sum(counts: list[int]) -> list[int]:
    """Running sum with a 0 in front: ``[3, 4]`` gives ``[0, 3, 7]``."""
    total = 0
    out: list[int] = [0]
    for count in counts:
        total = total + count  # not in place: a tracer's numbers are tensors
        out.append(total)
    return out


def segment_sums(counts: list[int], segments: list[int]) -> list[int]:
    """Sums over consecutive runs of ``counts``; segment i has ``segments[i]`` of them."""
    if segments.count(1) == len(segments):
        return counts[: len(segments)]

    sums: list[int] = []
    start = 0
    for segment in segments:
        end = start + segment
        sums.append(sum(counts[start:end]))
        start = end
    return sums


def positions(keys: list[str]) -> dict[str, int]:
    """Position of each key."""
    out: dict[str, int] = {}
    for position, key in enumerate(keys):
        out[key] = position
    return out


def split_optional(tensor: Tensor | None, sizes: list[int], count: int) -> list[Tensor | None]:
    """The next ``sizes[i]`` rows for each of ``count`` parts: views, or None without a tensor."""
    nothing: Tensor | None = None
    if tensor is None:
        return [nothing] * count
    segments = split_rows(tensor, sizes, count)
    views: list[Tensor | None] = [segments[position] for position in range(count)]
    return views


# While a graph is traced, `is not None` is true of weights that the batch may lack when the graph
# runs. So the next functions, each of them one call in the graph, give None for None. TorchScript
# sees a tensor in both places.


@torch.fx.wrap
def split_rows(tensor: Tensor, sizes: list[int], count: int) -> list[Tensor]:
    """The next ``sizes[i]`` rows for each of ``count`` parts: views."""
    if tensor is None:
        return [tensor] * count
    return tensor.split_with_sizes(sizes)  # pyright: ignore[reportReturnType]


def optional_to(tensor: Tensor | None, device: torch.device, non_blocking: bool) -> Tensor | None:
    """The tensor on a device, itself if it is there already; None for None."""
    if tensor is None:
        return None
    return moved(tensor, device, non_blocking)


def moved(tensor: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
    """The tensor on a device, itself if it is there already."""
    if tensor is None:
        return tensor
    return tensor.to(device, non_blocking=non_blocking)


def moved_inverse(
    inverse: tuple[list[str], Tensor] | None, device: torch.device, non_blocking: bool
) -> tuple[list[str], Tensor] | None:
    """Inverse indices on a device; None for None."""
    if inverse is None:
        return None
    return inverse[0], inverse[1].to(device, non_blocking=non_blocking)


def rows_between(tensor: Tensor, start: int, end: int) -> Tensor:
    """Rows from ``start`` to before ``end``: a view."""
    if tensor is None:
        return tensor
    return tensor[start:end]


def permute_segments(tensor: Tensor, sizes: list[int], indices: list[int]) -> Tensor:
    """Segments of ``sizes`` with segment ``indices[i]`` at i; joined slices beat a gather."""
    if tensor is None:
        return tensor
    if len(indices) == 0:
        return tensor[:0]

    # Not views to autograd, which are faster: no one but cat sees them.
    segments = tensor.unsafe_split_with_sizes(sizes)
    return torch.cat([segments[index] for index in indices])


def ints_on_device(
    numbers: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor on a device from integers, without waiting for what the device still computes.

    A copy to a GPU from ordinary memory waits for the device; from page-locked memory it is queued.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def strides_of_ranks(strides: Tensor | list[list[int]]) -> Tensor:
    """Lists of each key (rows) and rank (columns) as a tensor of the CPU [F, W]."""
    if isinstance(strides, Tensor):
        return strides.cpu()
    else:
        if is_scripting():
            return torch.tensor(strides, dtype=torch.int32)
        else:
            return _matrix(strides)


def _matrix(strides: list[list[int]]) -> Tensor:
    """The numbers as a tensor [F, W]."""
    try:
        return torch.tensor(strides, dtype=torch.int32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"KeyedJaggedTensor: stride_per_key_per_rank {strides} must hold one list for each "
            f"key, with one number of samples for each rank, such as [[2], [3]]: {error}"
        ) from None


def lengths_of_either(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Ids per list [L], given or derived."""
    return lengths_of_offsets(offsets) if lengths is None else lengths


def offsets_of_either(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Where each list starts [L + 1], given or derived."""
    return offsets_of_lengths(lengths) if offsets is None else offsets


def stride_of(
    keys: list[str],
    lengths: Tensor | None,
    offsets: Tensor | None,
    strides: Tensor | None,
    inverse_indices: tuple[list[str], Tensor] | None,
) -> int:
    """B, samples of the whole batch; 0 without keys.

    Args:
        keys: F feature names.
        lengths: ``[F * B]`` or None.
        offsets: ``[F * B + 1]`` or None.
        strides: Lists of each key and rank ``[F, W]``, or None where every key has B.
        inverse_indices: Keys, and which list each sample means ``[F, B]``.

    Returns:
        B: with inverse indices their number of columns, with variable batch otherwise the most
        lists of a key, else the number of lists over F, rounded down.
    """
    if len(keys) == 0:
        return 0

    if strides is not None:
        if inverse_indices is not None and inverse_indices[1].numel() > 0:
            return inverse_indices[1].shape[-1]
        return max(strides_of(keys, 0, strides))

    if lengths is None:
        assert offsets is not None, "lengths or offsets are always there"
        return max(offsets.numel() - 1, 0) // len(keys)
    return lengths.numel() // len(keys)


def strides_of(keys: list[str], stride: int, strides: Tensor | None) -> list[int]:
    """Lists of each key: B each, or with variable batch the sums over the ranks."""
    if strides is None or len(keys) == 0:
        return [stride] * len(keys)
    out: list[int] = strides.sum(dim=1).tolist()
    return out


def strides_that_differ(stride_per_key: list[int]) -> Tensor | None:
    """Samples of each key as those of one rank [F, 1]; None where all keys have as many."""
    if not stride_per_key or stride_per_key.count(stride_per_key[0]) == len(stride_per_key):
        return None
    return strides_of_ranks([[count] for count in stride_per_key])


def strides_as_lists(strides: Tensor | None) -> list[list[int]]:
    """Lists of each key and rank in Python; an empty list where every key has B."""
    if strides is None:
        return []
    out: list[list[int]] = strides.long().tolist()
    return out
