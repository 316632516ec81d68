"""Lists of one feature as pieces, as rows of equal length, and back: pure functions, which TorchScript compiles."""

from collections.abc import Sequence
from math import isfinite

import numpy as np
import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.jagged import jagged_to_padded_dense
from tutorec.sparse.validate import checkable

# Up to this many lists their numbers are read into Python, which takes 10 ns each where a tensor operation takes 2 us.
# The numbers of so few are checked as a batch is built; those of more where they are first used (``kjt_checks.py``).
FEW_LISTS = 256


def pieces_of(values: Tensor, lengths: Tensor) -> list[Tensor]:
    """The next ``lengths[b]`` values for each sample b: views. A sync point."""
    if is_scripting():
        lengths = lengths.long()  # TorchScript's tolist() makes integers of int64 only.
    sizes: list[int] = lengths.tolist()
    return list(values.split_with_sizes(sizes))


def int_tensor(numbers: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of the CPU from integers, by way of numpy, which reads a list in a third of torch's time."""
    return torch.from_numpy(np.array(numbers, dtype=np.int32 if dtype == torch.int32 else np.int64))


def ints_on_device(
    numbers: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """A tensor on a device from integers, without waiting for what the device still computes.

    A copy to a GPU from ordinary memory waits for the device; from page-locked memory it is queued.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def longest(lengths: Tensor) -> int:
    """The largest length, 0 without samples. A sync point."""
    if lengths.numel() == 0:
        return 0
    if is_scripting():
        return int(lengths.max().item())
    else:
        if lengths.numel() <= FEW_LISTS and lengths.is_cpu and not torch.compiler.is_compiling():
            return max(lengths.tolist())
        # Without int(): while a program is exported this is a symbol, and int() would ask for its value.
        return lengths.max().item()  # pyright: ignore[reportReturnType]


def padded_rows(values: Tensor, offsets: Tensor, width: int, padding: float) -> Tensor:
    """Rows of equal length, cut or padded at their ends.

    Args:
        values: ``[N, ...]``.
        offsets: ``[B + 1]``.
        width: Of a row.
        padding: What fills a shorter row.

    Returns:
        ``[B, width, ...]``.
    """
    if is_scripting():
        return gathered_rows(values, offsets, width, padding)
    else:
        if torch.compiler.is_compiling():
            return gathered_rows(values, offsets, width, padding)
        return jagged_to_padded_dense(values, offsets, width, padding)


def gathered_rows(values: Tensor, offsets: Tensor, width: int, padding: float) -> Tensor:
    """``padded_rows`` in operators whose shapes depend on no number: a gather from the values and one padding row.

    Args:
        values: ``[N, ...]``.
        offsets: ``[B + 1]``.
        width: Of a row.
        padding: What fills a shorter row.

    Returns:
        ``[B, width, ...]``.
    """
    count = values.size(0)
    place = torch.arange(width, device=values.device)
    source = offsets[:-1].unsqueeze(1) + place
    source = torch.where(source < offsets[1:].unsqueeze(1), source, torch.full_like(source, count))
    rest = list(values.shape[1:])
    padded = torch.cat([values, torch.full([1] + rest, padding, dtype=values.dtype, device=values.device)])  # noqa: RUF005
    return padded.index_select(0, source.reshape(-1)).view([source.size(0), width] + rest)  # noqa: RUF005


def first_entries(values: Tensor, lengths: Tensor) -> Tensor:
    """A mask [B, longest] of the first ``lengths[b]`` entries of each row of ``values`` [B, longest, ...]."""
    return torch.arange(values.size(1), device=values.device) < lengths.unsqueeze(1)


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """The entries that a mask [B, longest] keeps of values [B, longest, ...], end to end."""
    if values.dim() == mask.dim():
        return torch.masked_select(values, mask)
    return values[mask]


def masked(values: Tensor | None, mask: Tensor) -> Tensor | None:
    """``kept`` for values that may be None."""
    if values is None:
        return None
    return kept(values, mask)


def check_dense_weights(values: list[Tensor], weights: list[Tensor]) -> None:
    """Check that there is one weight for each value of each sample.

    Raises:
        ValueError: There is not.
    """
    if len(values) != len(weights):
        raise ValueError(f"JaggedTensor.from_dense: values of {len(values)} samples and weights of {len(weights)}")
    for sample, (value, weight) in enumerate(zip(values, weights, strict=True)):
        if value.shape[0] != weight.shape[0]:
            raise ValueError(
                f"JaggedTensor.from_dense: sample {sample} has {value.shape[0]} values and {weight.shape[0]} weights; "
                "give one weight for each value"
            )


def check_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None) -> None:
    """Check that dense rows [B, longest] have one length each, none longer than a row, and weights of their shape.

    Raises:
        ValueError: They have not.
    """
    where = "JaggedTensor.from_dense_lengths"
    if not isinstance(values, Tensor) or not checkable(values):
        return
    if values.dim() < 2 or lengths.shape != values.shape[:1]:
        raise ValueError(
            f"{where}: values have shape {list(values.shape)} and lengths {list(lengths.shape)}; give one row for each "
            "sample, [B, longest], and one length for each row, [B]"
        )
    if weights is not None and weights.shape[:2] != values.shape[:2]:
        raise ValueError(
            f"{where}: weights have shape {list(weights.shape)} and values {list(values.shape)}; give one weight for "
            "each value"
        )
    if lengths.is_cpu and lengths.numel() and int(lengths.max()) > values.shape[1]:
        sample = int(lengths.argmax())
        raise ValueError(
            f"{where}: lengths[{sample}] = {int(lengths[sample])}, and a row has {values.shape[1]} values (sample "
            f"{sample})"
        )


def check_padding(values: Tensor, width: int, padding: float) -> None:
    """Check that rows can be so wide, and that integers are not padded with a number that is none of theirs.

    Raises:
        ValueError: The width is negative or no whole number, or integers are to be padded with infinity or NaN.
    """
    where = "JaggedTensor.to_padded_dense"
    if not isinstance(values, Tensor) or not checkable(values):
        return
    if not isinstance(width, int | torch.SymInt) or width < 0:
        raise ValueError(f"{where}: desired_length must be a whole number from 0 on, got {width!r}")
    if isinstance(padding, float) and not isfinite(padding) and not values.is_floating_point():
        raise ValueError(
            f"{where}: padding_value {padding!r} is no {values.dtype}, which the values are; pad them with a whole "
            "number, or convert them first: values.float()"
        )
