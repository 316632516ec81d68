"""Hashing ids to rows: from names and numbers without end to a table that has an end."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

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
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids are a tensor of whole numbers, got {type(ids).__name__}: torch.tensor(ids)")
    if not 0 < rows < 2**63:
        raise ValueError(f"ids are hashed to rows 0 to rows - 1, so rows must be from 1 to 2**63 - 1, got {rows}")
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
        ValueError: ``rows`` is not positive or larger than an int64, or ids are not integers.

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
        crowd: The colliding ids, those of one row side by side, rising.
        crowd_sizes: Ids in each row that several share, in the same order.
    """

    rows: int
    ids: int
    lookups: int
    occupied_rows: int
    colliding_ids: int
    colliding_lookups: int
    crowd: Tensor = field(repr=False, compare=False)
    crowd_sizes: Tensor = field(repr=False, compare=False)

    @property
    def id_share(self) -> float:
        """Share of distinct ids that do not have a row for themselves."""
        return self.colliding_ids / self.ids if self.ids else 0.0

    @property
    def lookup_share(self) -> float:
        """Share of look-ups that read a row which other ids train, too."""
        return self.colliding_lookups / self.lookups if self.lookups else 0.0

    @property
    def expected_share(self) -> float:
        """What both are on average for a hash without a pattern: ``1 - (1 - 1/R)**(n - 1)``, the birthday formula."""
        return _chance_of_company(self.rows, self.ids - 1)

    @property
    def displaced_share(self) -> float:
        """Share of distinct ids beyond the first of their row, as ``collision_rate``."""
        return 1.0 - self.occupied_rows / self.ids if self.ids else 0.0

    @property
    def expected_displaced_share(self) -> float:
        """What that is on average for a hash without a pattern: ``1 - R * (1 - (1 - 1/R)**n) / n``."""
        return 1.0 - self.rows * _chance_of_company(self.rows, self.ids) / self.ids if self.ids else 0.0

    def groups(self, most: int = 10) -> list[list[int]]:
        """The ids of the most crowded rows that several ids share, the largest group first."""
        starts = self.crowd_sizes.cumsum(0) - self.crowd_sizes
        largest = torch.argsort(self.crowd_sizes, descending=True, stable=True)[:most]
        return [self.crowd[starts[row] : starts[row] + self.crowd_sizes[row]].tolist() for row in largest]

    def partners(self, id: int) -> list[int]:
        """The other ids in the row of this one."""
        place = (self.crowd == id).nonzero().view(-1)
        if place.numel() == 0:
            return []
        ends = self.crowd_sizes.cumsum(0)
        row = int(torch.searchsorted(ends, place, right=True))
        group = self.crowd[ends[row] - self.crowd_sizes[row] : ends[row]]
        return [other for other in group.tolist() if other != id]

    def __str__(self) -> str:
        lines = [
            f"{self.ids:,} distinct ids in {self.rows:,} rows: {self.occupied_rows:,} rows are used",
            f"ids that share a row       {self.id_share:7.2%}   expected {self.expected_share:7.2%}",
            f"look-ups of a shared row   {self.lookup_share:7.2%}   expected {self.expected_share:7.2%}",
            f"ids beyond a row's first   {self.displaced_share:7.2%}   expected {self.expected_displaced_share:7.2%}",
        ]
        for group in self.groups(1):
            lines.append(f"most crowded row: {len(group)} ids: {_few(group)}")
        return "\n".join(lines)


def collision_meter(ids: Tensor, rows: int, hash: Callable[[Tensor, int], Tensor] = mixing_hash) -> Collisions:
    """Measure which ids a hash puts into one row, beside what chance alone would do.

    Two ids in one row are one id to the model: they are looked up alike and train each other. How many do depends on R
    and on the number n of distinct ids; a hash that follows a pattern of the ids does worse (or better) than chance.

    Args:
        ids: Ids as they are looked up, any shape; those that come often weigh more in ``lookup_share``.
        rows: R, rows of the table.
        hash: What maps ids and R to rows.

    Returns:
        The shares measured and expected, and who shares a row with whom.

    Raises:
        ValueError: ``rows`` is not positive or larger than an int64, ids are not integers, or ``hash`` gives
            something else than rows.

    Example:
        >>> import torch
        >>> found = collision_meter(torch.tensor([1, 11, 11, 11, 2, 3]), 10, modulo_hash)
        >>> found.id_share, found.lookup_share, round(found.expected_share, 3)  # 1 and 11: 2 of 4 ids, 4 of 6 look-ups
        (0.5, 0.6666666666666666, 0.271)
        >>> found.partners(11), found.groups()
        ([1], [[1, 11]])
    """
    _check(ids, rows)
    distinct, times = ids.reshape(-1).unique(return_counts=True)
    row = hash(distinct, rows)
    if row.shape != distinct.shape or row.is_floating_point() or bool(((row < 0) | (row >= rows)).any()):
        raise ValueError(
            f"the hash gives {row.dtype} of shape {list(row.shape)} for {distinct.numel()} ids; it must give one row "
            f"from 0 to {rows - 1} for each id"
        )
    _, index, sizes = row.unique(return_inverse=True, return_counts=True)
    collides = sizes[index] > 1
    order = torch.argsort(index[collides], stable=True)
    return Collisions(
        rows=rows,
        ids=distinct.numel(),
        lookups=ids.numel(),
        occupied_rows=sizes.numel(),
        colliding_ids=int(collides.sum()),
        colliding_lookups=int(times[collides].sum()),
        crowd=distinct[collides][order],
        crowd_sizes=sizes[sizes > 1],
    )


def _chance_of_company(rows: int, others: int) -> float:
    """The chance that at least one of so many ids falls on a given row."""
    if others <= 0:
        return 0.0
    return 1.0 if rows == 1 else -math.expm1(others * math.log1p(-1.0 / rows))


def _few(ids: list[int], most: int = 5) -> str:
    return ", ".join(map(str, ids[:most])) + (", ..." if len(ids) > most else "")
