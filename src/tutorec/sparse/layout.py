"""The arithmetic of the flat layout, as pure functions over keys, lengths, offsets and strides.

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

No function here knows a class, so that TorchScript compiles them as they stand.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend
from tutorec._kernels.jagged import lengths_to_offsets
from tutorec._kernels.older_torch import counts_of_rows, exports_counts
from tutorec.errors import BackendError

# Up to this many lists are counted in Python, which takes 10 ns each where a tensor operation takes
# 2 us.
FEW_LISTS = 256
LARGEST_INT32 = torch.iinfo(torch.int32).max

# ``torch.ops.fbgemm`` is there after the first import of a jagged type, as after ``import
# torchrec``. A backend that was demanded and cannot be had is named by the first operation, not by
# an import.
with suppress(BackendError, ValueError):
    backend()


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
        if exports_counts() and all([one == stride_per_key[0] for one in stride_per_key]):
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
    if lengths.numel() <= FEW_LISTS and lengths.is_cpu:
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
    out: list[int] = []
    start = 0
    for segment in segments:
        end = start + segment
        out.append(sum(counts[start:end]))
        start = end
    return out


def positions(keys: list[str]) -> dict[str, int]:
    """Position of each key."""
    out: dict[str, int] = {}
    for position, key in enumerate(keys):
        out[key] = position
    return out


def split_optional(tensor: Tensor | None, sizes: list[int], count: int) -> list[Tensor | None]:
    """The next ``sizes[i]`` rows for each of ``count`` parts: views, or None without a tensor."""
    nothing: Tensor | None = None
    out: list[Tensor | None] = [nothing] * count
    if tensor is not None:
        parts = parts_of(tensor, sizes, count)
        for position in range(count):
            out[position] = parts[position]
    return out


# While a graph is traced, `is not None` is true of weights that the batch may lack when the graph
# runs. So the next functions, each of them one call in the graph, give None for None. TorchScript
# sees a tensor in both places.


@torch.fx.wrap
def parts_of(tensor: Tensor, sizes: list[int], count: int) -> list[Tensor]:
    """The next ``sizes[i]`` rows for each of ``count`` parts: views."""
    if tensor is None:
        return [tensor] * count
    return list(tensor.split_with_sizes(sizes))


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
    segments = tensor.split_with_sizes(sizes)
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


def strides_of_ranks(given: Tensor | list[list[int]]) -> Tensor:
    """Lists of each key (rows) and rank (columns) as a tensor of the CPU [F, W]."""
    if isinstance(given, Tensor):
        return given.cpu()
    else:
        if is_scripting():
            return torch.tensor(given, dtype=torch.int32)
        else:
            return _matrix(given)


def _matrix(given: list[list[int]]) -> Tensor:
    """The numbers as a tensor [F, W]."""
    try:
        return torch.tensor(given, dtype=torch.int32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"KeyedJaggedTensor: stride_per_key_per_rank {given} must hold one list for each key, "
            f"with one number of samples for each rank, such as [[2], [3]]: {error}"
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


def strides_as_lists(strides: Tensor | None) -> list[list[int]]:
    """Lists of each key and rank in Python; an empty list where every key has B."""
    if strides is None:
        return []
    out: list[list[int]] = strides.long().tolist()
    return out
