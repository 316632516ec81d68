"""The arithmetic of the flat layout, as pure functions over keys, lengths, offsets and strides.

A batch of F features and B samples is F * B lists of ids, laid end to end, feature after feature::

    lengths  [F * B]      ids in list i
    offsets  [F * B + 1]  where list i starts: the running sum of lengths
    list i = f * B + b    feature f, sample b

Where features have different numbers of samples (``kjt_variable.py``), feature f has ``stride_per_key[f]`` lists, and
the lists of the features before it come first.

Nothing here knows a class, so that TorchScript compiles these functions as they stand.
"""

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.jagged import lengths_to_offsets


def offsets_of_lengths(lengths: Tensor) -> Tensor:
    """Where each list starts: the running sum of lengths [L], with a 0 in front, [L + 1]."""
    if is_scripting():
        return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), [1, 0])
    else:
        return lengths_to_offsets(lengths)


def lengths_of_offsets(offsets: Tensor) -> Tensor:
    """Ids per list [L] from offsets [L + 1]."""
    return offsets[1:] - offsets[:-1]


def as_int64(numbers: Tensor) -> Tensor:
    """The numbers as TorchScript wants them before it makes a list of them; eager code takes them as they are."""
    if is_scripting():
        return numbers.to(torch.int64)
    else:
        return numbers


def offset_per_key_of(offsets: Tensor, keys: int, stride: int) -> list[int]:
    """Where each key's ids start, and the end of the last: every B-th entry of the offsets. A sync point."""
    if stride == 0:
        return [0] * (keys + 1)
    starts: list[int] = as_int64(offsets[::stride]).tolist()
    return starts


def offsets_at(offsets: Tensor, bounds: list[int]) -> list[int]:
    """Where each key's ids start, and the end of the last, if key f's lists start at ``bounds[f]``. A sync point."""
    at = torch.tensor(bounds, dtype=torch.int64, device=offsets.device)
    found: list[int] = as_int64(offsets[at]).tolist()
    return found


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
    """Sums over consecutive runs of ``counts``; segment i holds the next ``segments[i]`` of them."""
    if segments.count(1) == len(segments):
        return counts[: len(segments)]
    starts = running_sum(counts)
    out: list[int] = []
    position = 0
    for segment in segments:
        out.append(starts[position + segment] - starts[position])
        position += segment
    return out


def positions(keys: list[str]) -> dict[str, int]:
    """Position of each key."""
    out: dict[str, int] = {}
    for position, key in enumerate(keys):
        out[key] = position
    return out


def offsets_by_key(lengths: Tensor, offsets: Tensor | None, keys: int, stride: int) -> list[Tensor]:
    """Each key's own offsets, F times [B + 1], starting at 0: in one operation for all keys.

    From lengths [F * B] they are running sums along the rows of a matrix. Where the batch's offsets [F * B + 1] are
    known, neighbouring keys share one entry of them, so these are overlapping windows, each less its first entry.

    Args:
        lengths: ``[F * B]``.
        offsets: ``[F * B + 1]`` where they are known.
        keys: F.
        stride: B.

    Returns:
        F tensors.
    """
    if stride == 0 or keys == 0:
        return list(lengths.new_zeros([keys, 1]).unbind(0))
    if offsets is not None:
        windows = offsets.unfold(0, stride + 1, stride)
        return list((windows - windows[:, :1]).unbind(0))
    rows = lengths.view(keys, stride)
    if is_scripting():
        return list(torch.nn.functional.pad(rows.cumsum(1, dtype=lengths.dtype), [1, 0]).unbind(0))
    else:
        return list(lengths_to_offsets(rows).unbind(0))


def split_optional(tensor: Tensor | None, sizes: list[int], count: int) -> list[Tensor | None]:
    """The next ``sizes[i]`` rows for each of ``count`` parts: views, or None for each part where there is no tensor."""
    out: list[Tensor | None] = []
    if tensor is None:
        for _ in range(count):
            out.append(None)
    else:
        pieces = tensor.split_with_sizes(sizes)
        for position in range(count):
            out.append(pieces[position])
    return out


def check_all_cut(segments: list[int], keys: list[str]) -> None:
    """Check that segments hold all keys; for TorchScript, which cannot compile ``check_segments``.

    Raises:
        ValueError: They do not.
    """
    if sum(segments) != len(keys):
        raise ValueError(f"KeyedJaggedTensor.split: segments {segments}, and the keys are {keys}")


def optional_to(
    tensor: Tensor | None, device: torch.device, non_blocking: bool, dtype: torch.dtype | None = None
) -> Tensor | None:
    """The tensor on a device, or None where there is none.

    Args:
        tensor: Of any shape.
        device: Where to.
        non_blocking: Whether a copy from page-locked memory may overlap with what follows.
        dtype: Another dtype, if it is to have one.

    Returns:
        The tensor itself where it is there already.
    """
    if tensor is None:
        return None
    return tensor.to(device, dtype=dtype, non_blocking=non_blocking)


def permute_pieces(tensor: Tensor, sizes: list[int], indices: list[int]) -> Tensor:
    """The tensor's pieces of ``sizes``, with piece ``indices[i]`` at position i: joining slices beats a gather."""
    if len(indices) == 0:
        return tensor[:0]
    pieces = tensor.split_with_sizes(sizes)
    return torch.cat([pieces[index] for index in indices])
