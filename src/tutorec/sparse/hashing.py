"""Hashing ids to rows: from names and numbers without end to a table that has an end."""

from collections.abc import Callable

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    """The low 64 bits as torch's signed number: torch has no unsigned arithmetic."""
    bits &= (1 << 64) - 1
    return bits - (1 << 64) if bits >> 63 else bits


# The constants of splitmix64.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _check(ids: Tensor, rows: int) -> None:
    if rows <= 0:
        raise ValueError(f"ids are hashed to rows 0 to rows - 1, so rows must be positive, got {rows}")
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"ids are whole numbers, got {ids.dtype} of shape {list(ids.shape)}: convert them, ids.long()")


def modulo_hash(ids: Tensor, rows: int) -> Tensor:
    """Row of each id: the remainder. Neighbours stay neighbours, and ids that differ by ``rows`` always collide.

    Args:
        ids: Any int64 ids, negative ones too, any shape.
        rows: R, rows of the table.

    Returns:
        Rows from 0 to R - 1, int64, same shape.

    Raises:
        ValueError: ``rows`` is not positive, or ids are not integers.

    Example:
        >>> import torch
        >>> modulo_hash(torch.tensor([7, 17, 23]), 10)
        tensor([7, 7, 3])
    """
    _check(ids, rows)
    return ids.to(torch.int64).remainder(rows)


def mixing_hash(ids: Tensor, rows: int, seed: int = 0) -> Tensor:
    """Row of each id after its bits are mixed, so that no pattern of the ids is left in the rows.

    Args:
        ids: Any int64 ids, any shape.
        rows: R, rows of the table.
        seed: Another seed is another hash.

    Returns:
        Rows from 0 to R - 1, int64, same shape; the same on every machine.

    Raises:
        ValueError: ``rows`` is not positive, or ids are not integers.

    Source:
        The finalizer of splitmix64 (Steele, Lea and Flood, 2014).

    Example:
        >>> import torch
        >>> mixing_hash(torch.tensor([0, 10, 20]), 10)
        tensor([9, 6, 4])
    """
    _check(ids, rows)
    bits = ids.to(torch.int64) + _signed(_GOLDEN * (seed + 1))
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return (bits ^ _shift(bits, 31)).remainder(rows)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift copies the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def collision_rate(ids: Tensor, rows: int, hash: Callable[[Tensor, int], Tensor] = mixing_hash) -> float:
    """Share of distinct ids whose row another distinct id has taken already.

    Args:
        ids: Ids; repeated ones count once.
        rows: R, rows of the table.
        hash: What maps ids and R to rows.

    Returns:
        ``1 - occupied rows / distinct ids``, 0 for no ids.

    Example:
        >>> import torch
        >>> collision_rate(torch.tensor([1, 2, 11, 11]), 10, modulo_hash)  # 11 falls on 1
        0.33333333333333337
    """
    distinct = ids.unique()
    if distinct.numel() == 0:
        return 0.0
    return 1.0 - hash(distinct, rows).unique().numel() / distinct.numel()
