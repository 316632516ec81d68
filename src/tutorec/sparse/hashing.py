"""Hashing ids to rows: unbounded ids to a fixed number of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
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
    if not 0 < rows < 2**63:
        raise ValueError(
            f"ids are hashed to rows 0 to rows - 1, so rows must be from 1 to 2**63 - 1, got {rows}"
        )
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(
            f"ids are whole numbers, got {ids.dtype} of shape {list(ids.shape)}: convert them, "
            "ids.long()"
        )


def modulo_hash(ids: Tensor, rows: int) -> Tensor:
    """Row of each id: the remainder. Ids that differ by a multiple of ``rows`` collide.

    Args:
        ids: Any int64 ids, negative ones too, any shape.
        rows: R, rows of the table.

    Returns:
        Rows from 0 to R - 1, int64, same shape.

    Raises:
        ValueError: ``rows`` is not positive or larger than an int64, or ids are not integers.

    Example:
        >>> import torch
        >>> modulo_hash(torch.tensor([7, 17, 23]), 10)
        tensor([7, 7, 3])
    """
    _check(ids, rows)
    return ids.to(torch.int64).remainder(rows)


def bucket_of(ids: Tensor, width: Tensor, buckets: Tensor) -> Tensor:
    """The bucket of each raw id [N]: equal ranges, or the remainder outside of all ranges.

    Args:
        ids: int64.
        width: Ids of a bucket, one number or [N]; 0: the ids are unbounded.
        buckets: K, likewise.

    Example:
        >>> import torch
        >>> bucket_of(torch.tensor([1999, 2000, 4001]), torch.tensor(2000), torch.tensor(2))
        tensor([0, 1, 1])
    """
    bucket = torch.div(ids, width.clamp(min=1), rounding_mode="floor")
    outside = (width == 0) | (bucket < 0) | (bucket >= buckets)
    return torch.where(outside, ids.remainder(buckets), bucket)


def mixing_hash(ids: Tensor, rows: int, seed: int = 0) -> Tensor:
    """Row of each id after its bits are mixed, so that no pattern of the ids is left in the rows.

    Args:
        ids: Any ids of up to 64 bits, any shape. A number has one row, whatever its type; uint64
            from 2**63 on has that of the int64 with the same bits.
        rows: R, rows of the table.
        seed: Another seed is another hash.

    Returns:
        Rows from 0 to R - 1, int64, same shape; the same on every machine.

    Raises:
        ValueError: ``rows`` is not positive or larger than an int64, or ids are not integers.

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


# The constants of FNV-1a with 64 bits.
_FNV_BASIS = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)


def hash_strings(strings: Sequence[str] | NDArray[np.str_]) -> Tensor:
    """A 64-bit id of each string, the same in every process and on every machine.

    All strings are hashed together, byte by byte: a million of 10 bytes take about a second on one
    core. `mixing_hash` then gives the rows of a table.

    Args:
        strings: N strings.

    Returns:
        [N] int64; negative where the highest bit is set.

    Raises:
        ValueError: one is not a string.

    Source:
        FNV-1a with 64 bits (Fowler, Noll and Vo, 1991) of the UTF-8 bytes.

    Example:
        >>> ids = hash_strings(["red shoe", "blue shoe", "red shoe"])
        >>> bool(ids[0] == ids[2]), bool(ids[0] == ids[1])
        (True, False)
        >>> mixing_hash(ids, 100)
        tensor([74, 11, 74])
    """
    encoded = []
    for position, string in enumerate(strings):
        if not isinstance(string, str):
            raise ValueError(
                f"hash_strings: number {position} is {string!r}, not a string: numbers go to "
                "mixing_hash as they are"
            )
        encoded.append(string.encode("utf-8", "surrogatepass"))

    data = np.frombuffer(b"".join(encoded), dtype=np.uint8)
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    return torch.from_numpy(_fnv(data, lengths).view(np.int64))


def _fnv(data: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """FNV-1a of consecutive byte strings with these lengths."""
    longest_first = np.argsort(-lengths, kind="stable")
    starts = (np.cumsum(lengths) - lengths)[longest_first]
    ascending = np.sort(lengths)
    hashes = np.full(len(lengths), _FNV_BASIS)
    for position in range(int(ascending[-1]) if len(ascending) else 0):
        # Strings with a byte at this position are the first ones.
        count = len(lengths) - int(np.searchsorted(ascending, position, side="right"))
        byte = data[starts[:count] + position]
        hashes[:count] = (hashes[:count] ^ byte) * _FNV_PRIME

    in_order = np.empty_like(hashes)
    in_order[longest_first] = hashes
    return in_order


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift copies the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


# Fibonacci hashing: the golden ratio's bits, an odd factor, and what undoes it modulo 2**64.
_FACTOR = _signed(_GOLDEN)
_FACTOR_UNDONE = _signed(pow(_GOLDEN, -1, 1 << 64))


def mix_bits(ids: Tensor) -> Tensor:
    """Ids with mixed bits: distinct ids stay distinct; low and high bits depend on all.

    Twice a multiplication (Knuth, The Art of Computer Programming, volume 3, section 6.4), after
    which the upper half is folded onto the lower one.

    Args:
        ids: Any int64 ids, any shape.

    Example:
        >>> import torch
        >>> ids = torch.tensor([0, 1, -(2**63)])
        >>> torch.equal(unmix_bits(mix_bits(ids)), ids)
        True
    """
    for _ in range(2):
        ids = ids * _FACTOR
        ids ^= (ids >> 32).bitwise_and_(0xFFFFFFFF)
    return ids


def unmix_bits(bits: Tensor) -> Tensor:
    """The ids whose mixed bits these are."""
    for _ in range(2):
        bits = (bits ^ _shift(bits, 32)) * _FACTOR_UNDONE
    return bits


@dataclass(frozen=True)
class Collisions:
    """Which ids share a row after hashing; made by :func:`collision_meter`.

    Attributes:
        rows: R, rows of the table.
        ids: n, distinct ids.
        lookups: N, ids as they came, repeated ones included.
        occupied_rows: Rows that at least one id was hashed to.
        colliding_ids: Distinct ids whose row another one has, too.
        colliding_lookups: Look-ups of those ids.
        distinct: The distinct ids ``[n]``, rising.
        row_of_id: The row of each ``[n]``.
    """

    rows: int
    ids: int
    lookups: int
    occupied_rows: int
    colliding_ids: int
    colliding_lookups: int
    distinct: Tensor = field(repr=False, compare=False)
    row_of_id: Tensor = field(repr=False, compare=False)

    @property
    def id_share(self) -> float:
        """Share of distinct ids that do not have a row for themselves."""
        return self.colliding_ids / max(self.ids, 1)

    @property
    def lookup_share(self) -> float:
        """Share of look-ups that read a row which other ids train, too."""
        return self.colliding_lookups / max(self.lookups, 1)

    @property
    def expected_share(self) -> float:
        """The mean of both for a random hash: ``1 - (1 - 1/R)**(n - 1)``, the birthday formula."""
        return 1 - (1 - 1 / self.rows) ** max(self.ids - 1, 0)

    def partners(self, id: int) -> list[int]:
        """The other ids in the row of this one."""
        rows = self.row_of_id[self.distinct == id]

        shared = torch.isin(self.row_of_id, rows) & (self.distinct != id)
        return self.distinct[shared].tolist()


def collision_meter(
    ids: Tensor, rows: int, hash: Callable[[Tensor, int], Tensor] = mixing_hash
) -> Collisions:
    """Measure which ids a hash puts into one row, beside what chance alone would do.

    Two ids in one row are one id to the model: they are looked up alike and train each other. How
    many do depends on R and on the number n of distinct ids; a hash that follows a pattern of the
    ids does worse (or better) than chance.

    Args:
        ids: Ids as they are looked up, any shape; those that come often weigh more in
            ``lookup_share``.
        rows: R, rows of the table.
        hash: What maps ids and R to rows.

    Returns:
        The shares measured and expected, and who shares a row with whom.

    Raises:
        ValueError: ``rows`` is not positive or larger than an int64, or ids are not integers.

    Example:
        >>> import torch
        >>> meter = collision_meter(torch.tensor([1, 11, 11, 11, 2, 3]), 10, modulo_hash)
        >>> (
        ...     meter.id_share,
        ...     meter.lookup_share,
        ...     round(meter.expected_share, 3),
        ... )  # 1 and 11: 2 of 4 ids, 4 of 6 look-ups
        (0.5, 0.6666666666666666, 0.271)
        >>> meter.partners(11)
        [1]
    """
    distinct, times = ids.reshape(-1).unique(return_counts=True)
    row_of_id = hash(distinct, rows)
    occupied, index, sizes = row_of_id.unique(return_inverse=True, return_counts=True)
    collides = sizes[index] > 1

    return Collisions(
        rows=rows,
        ids=distinct.numel(),
        lookups=ids.numel(),
        occupied_rows=occupied.numel(),
        colliding_ids=int(collides.sum()),
        colliding_lookups=int(times[collides].sum()),
        distinct=distinct,
        row_of_id=row_of_id,
    )
