"""Ids from a seeded generator with a known distribution: uniform or a power law."""

from collections.abc import Callable

import torch
from torch import Tensor

from tutorec._check import require_finite, require_int

_EXACT = 2**53  # float64 tells whole numbers apart up to here


def uniform_ids(count: int, rows: int, generator: torch.Generator | None = None) -> Tensor:
    """Ids of which each of the R is as likely as the others: ``P(id) = 1 / R``.

    Args:
        count: N, how many are drawn, independently of one another.
        rows: R; ids are 0 to R - 1.
        generator: Where the randomness comes from, and the device of the ids; by default torch's
            global one.

    Returns:
        Ids [N], int64; the same for the same state of the generator.

    Raises:
        ValueError: ``count`` is negative, or ``rows`` is not positive.

    Example:
        >>> import torch
        >>> ids = uniform_ids(1000, 4, torch.Generator().manual_seed(0))
        >>> ids.unique().tolist(), ids.shape
        ([0, 1, 2, 3], torch.Size([1000]))
    """
    require_int("uniform_ids: count", count, 0)
    require_int("uniform_ids: rows", rows, 1)
    return torch.randint(
        rows, (count,), generator=generator, device=None if generator is None else generator.device
    )


def power_law_ids(
    count: int, rows: int, exponent: float, generator: torch.Generator | None = None
) -> Tensor:
    """Ids of a power law, as users and products follow: id 0 is the most frequent one.

    ``P(k) = (k + 1)**-s / (1**-s + 2**-s + ... + R**-s)`` for k = 0, ..., R - 1.

    The law is exact, for every exponent; nothing of size R is made, so R may be a billion. Where an
    id must not tell how popular it is, deal new ones out: ``torch.randperm(rows)[ids]``.

    Args:
        count: N, how many are drawn, independently of one another.
        rows: R; ids are 0 to R - 1.
        exponent: s; 0 makes all ids alike, about 1 is usual for users and products.
        generator: Where the randomness comes from, and the device of the ids; by default torch's
            global one.

    Returns:
        Ids [N], int64; the same for the same state of the generator.

    Raises:
        ValueError: ``count`` or ``exponent`` is negative, ``rows`` is not positive or above 2**53.

    Example:
        >>> import torch
        >>> ids = power_law_ids(10_000, 3, 1.0, torch.Generator().manual_seed(0))
        >>> [round(count / 10_000, 1) for count in ids.bincount().tolist()]  # 6/11, 3/11, 2/11
        [0.5, 0.3, 0.2]

    Source:
        Rejection-inversion (Hormann and Derflinger, *Rejection-inversion to generate variates from
        monotone discrete distributions*, 1996): an area under the smooth curve ``x ** -s`` is drawn
        and turned into a whole number; the few that fall between the curve and the steps of the law
        are drawn again.
    """
    require_int("power_law_ids: count", count, 0)
    require_finite("power_law_ids: exponent", exponent, 0)
    require_int("power_law_ids: rows", rows, 1, _EXACT)
    device = None if generator is None else generator.device

    law = _Curve(exponent)
    first, last, two, half = (
        torch.tensor(x, dtype=torch.float64, device=device) for x in (1.5, rows + 0.5, 2.0, 2.5)
    )
    # The step of 1 is as wide as the area to its right allows, so that it is never rejected.
    low = law.area(first) - 1.0
    high = law.area(last)
    sure = 2.0 - law.at_area(law.area(half) - law.height(two))
    drawn = torch.empty(count, dtype=torch.float64, device=device)
    missing = torch.arange(count, device=device)

    while missing.numel():
        share = torch.rand(missing.numel(), dtype=torch.float64, device=device, generator=generator)
        area = high + share * (low - high)
        point = law.at_area(area)
        step = point.round().clamp(1, rows)
        accepted = (step - point <= sure) | (area >= law.area(step + 0.5) - law.height(step))
        drawn[missing[accepted]] = step[accepted]
        missing = missing[~accepted]
    return drawn.long() - 1


def drifting_ids(
    batches: int,
    ids: int,
    rows: int,
    exponent: float,
    *,
    seed: int = 5,
    all_move_at: int | None = None,
    moving: int = 0,
) -> list[Tensor]:
    """Batches of ids of a power law, whose popularity may move to other rows.

    Popular rows are anywhere among the R, as in a table whose ids were assigned in the order in
    which users and products came.

    Args:
        batches: How many there are.
        ids: N of each batch.
        rows: R; ids are 0 to R - 1.
        exponent: s of the power law; see :func:`power_law_ids`.
        seed: The ids are a function of it and of the other arguments.
        all_move_at: The number of a batch, from 0: from it on each row has the popularity of
            another row, drawn at random.
        moving: In each batch, so many rows drawn at random pass their popularity on to one another.

    Returns:
        Ids [N] of each batch, int64.

    Raises:
        ValueError: A number is out of range.

    Example:
        >>> still = drifting_ids(100, 50, rows=1000, exponent=1.2)
        >>> moved = drifting_ids(100, 50, rows=1000, exponent=1.2, all_move_at=60)
        >>> [one.equal(other) for one, other in zip(still, moved, strict=True)].index(False)
        60
    """
    require_int("drifting_ids: batches", batches, 0)
    require_int("drifting_ids: ids", ids, 0)
    require_int("drifting_ids: rows", rows, 1)
    require_int("drifting_ids: moving", moving, 0, rows)
    if all_move_at is not None:
        require_int("drifting_ids: all_move_at", all_move_at, 0)

    random = torch.Generator().manual_seed(seed)
    row_of_rank = torch.randperm(rows, generator=random)
    ranks = power_law_ids(batches * ids, rows, exponent, random).view(batches, ids)

    drawn: list[Tensor] = []
    for number, ranks_of_batch in enumerate(ranks):
        if number == all_move_at:
            row_of_rank = row_of_rank[torch.randperm(rows, generator=random)]
        if moving:
            moved_ranks = torch.randperm(rows, generator=random)[:moving]
            row_of_rank[moved_ranks] = row_of_rank[moved_ranks.roll(1)]
        drawn.append(row_of_rank[ranks_of_batch])

    return drawn


class _Curve:
    """The density ``x ** -s`` for x >= 0.5: value, integral from 1 to x, and its inverse."""

    def __init__(self, exponent: float) -> None:
        self._exponent = exponent

    def height(self, x: Tensor) -> Tensor:
        return torch.exp(-self._exponent * x.log())

    def area(self, x: Tensor) -> Tensor:
        # (x ** (1 - s) - 1) / (1 - s), written so that s = 1 is not special: there it is log x
        log = x.log()
        return _ratio(torch.expm1, (1.0 - self._exponent) * log) * log

    def at_area(self, area: Tensor) -> Tensor:
        scaled = ((1.0 - self._exponent) * area).clamp(min=-1.0)
        return torch.exp(_ratio(torch.log1p, scaled) * area)


def _ratio(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """``function(t) / t`` of a function that is t near 0; there, 1 and half of its curvature."""
    small = t.abs() < 1e-8
    curvature = 0.5 if function is torch.expm1 else -0.5
    return torch.where(
        small, 1.0 + curvature * t, function(t) / torch.where(small, torch.ones_like(t), t)
    )
