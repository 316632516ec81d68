"""Load balancing of embedding rows by arithmetic: which rows of which feature each rank owns.

F features have a table each. All their rows, one feature after the other, are divided among ranks::

    rows of all features    | 0 ........ | 1 | 2 ............................ | 3 .. |
    fair, 3 ranks           | rank 0           | rank 1            | rank 2          |  equal ranges
    whole features          | rank 1     | 2 | rank 0                         | 1    |  undivided

`LoadBalanceManager` is the class of the document *CachedEmbedding playground*, with its names. Its
rules are corrected; with ``compat=True`` its numbers are the document's, defects included, which
chapter 19 takes apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["LoadBalanceManager", "OwnedRows", "fair_initialize", "lbmgr_fair_divide", "owned_rows"]

_SHUFFLE_SEED = 111  # np.random.seed(111), which the document's module calls when it is imported


@dataclass(frozen=True)
class OwnedRows:
    """Consecutive rows of one feature that one rank owns.

    Args:
        feature: Which feature.
        first: The first of these rows in the feature.
        rows: How many.
        offset: The row of the rank that the first of them is.
    """

    feature: int
    first: int
    rows: int
    offset: int


def owned_rows(embeddings_per_feat: Sequence[int], bounds: Sequence[int]) -> list[list[OwnedRows]]:
    """The rows of each rank when the concatenated rows of all features are cut at ``bounds``.

    Args:
        embeddings_per_feat: R of each of the F features.
        bounds: W + 1 rows, ascending from 0 to the sum: rank r owns rows ``bounds[r]`` to
            ``bounds[r + 1] - 1``.

    Returns:
        For each rank the features of which it owns a row, in order.

    Example:
        >>> for rank in owned_rows([5, 26, 1], bounds=[0, 10, 20, 32]):
        ...     print([(own.feature, own.first, own.rows, own.offset) for own in rank])
        [(0, 0, 5, 0), (1, 0, 5, 5)]
        [(1, 5, 10, 0)]
        [(1, 15, 11, 0), (2, 0, 1, 11)]
    """
    features = list(enumerate(pairwise(accumulate(embeddings_per_feat, initial=0))))

    ranks = []
    for low, high in pairwise(bounds):
        overlaps = [
            (feature, start, max(start, low), min(end, high)) for feature, (start, end) in features
        ]
        ranks.append(
            [OwnedRows(f, a - start, b - a, a - low) for f, start, a, b in overlaps if a < b]
        )
    return ranks


def fair_initialize(
    embeddings_per_feat: Sequence[int], num_groups: int
) -> tuple[int, dict[int, list[int]], list[list[int]], list[Tensor]]:
    """The document's fair division, unchanged; to look rows up use `owned_rows` instead.

    Its results have four defects, which `LoadBalanceManager` corrects unless ``compat`` is set:

    - The cuts do not say who owns an id: its lookup *clamps* ids that a rank does not own to rows
      that it does.
    - The *remainder* of ``sum // num_groups`` belongs to the last rank, and is not counted there.
    - A cut between two features leaves a *member without rows*: ``[24, 24]`` in two groups is
      ``[[0, 1], [1]]``.
    - The *last offsets* are wrong where the last cut feature is not the last one: ``[5, 26, 1]`` in
      three groups has ``[0, 26]`` for ``[0, 11]``.

    Args:
        embeddings_per_feat: R of each of the F features.
        num_groups: W.

    Returns:
        Rows of each rank; the rows inside each feature at which it is cut; the features of each
        rank; the first row on the rank of each of these.

    Example:
        >>> rows, cuts, features, offsets = fair_initialize([5, 26, 1], 3)
        >>> rows, cuts, features
        (10, {1: [5, 15]}, [[0, 1], [1], [1, 2]])
        >>> offsets
        [tensor([0, 5]), tensor([0]), tensor([ 0, 26])]
    """
    rows_per_rank = sum(embeddings_per_feat) // num_groups
    cuts: dict[int, list[int]] = {}
    groups: list[list[int]] = [[]]
    sizes: list[list[int]] = [[]]
    left = rows_per_rank  # rows that the present rank still lacks
    cuts_made = 0

    for feature, rows in enumerate(embeddings_per_feat):
        while rows > left and cuts_made < num_groups - 1:
            cuts.setdefault(feature, []).append(left)
            groups[-1].append(feature)
            groups.append([])
            sizes.append([])
            left = left + rows_per_rank
            cuts_made = cuts_made + 1

        begins_here = left >= rows and not sizes[-1]
        sizes[-1].append(rows - (left - rows_per_rank) if begins_here else rows)
        groups[-1].append(feature)
        left -= rows

    # A rank whose last member is cut has no size for it; of the last rank's members the last size
    # is not an offset.
    sizes[-1].pop()
    return (
        rows_per_rank,
        cuts,
        groups,
        [torch.tensor([0, *accumulate(rank_sizes)]) for rank_sizes in sizes],
    )


def lbmgr_fair_divide(
    field_dims: Sequence[int], num_groups: int
) -> tuple[dict[int, list[int]], int]:
    """The first half of `fair_initialize`: the cuts, and each rank's rows (the document's emb_dim).

    Args:
        field_dims: R of each of the F features.
        num_groups: W.

    Example:
        >>> lbmgr_fair_divide([10, 200, 400, 2000, 1000, 500], 4)
        ({3: [417, 1444], 4: [471]}, 1027)
    """
    rows_per_rank, cuts, _, _ = fair_initialize(field_dims, num_groups)
    return cuts, rows_per_rank


def check_feature_rows(embeddings_per_feat: Sequence[int]) -> None:
    """Check that every feature has rows.

    Raises:
        ValueError: One has none, or there is no feature.
    """
    empty = [feature for feature, rows in enumerate(embeddings_per_feat) if rows < 1]
    if empty or not embeddings_per_feat:
        raise ValueError(
            f"features {empty} have no rows in embeddings_per_feat={list(embeddings_per_feat)}: "
            "leave them out"
        )


def check_id_columns(x: Tensor, features: int) -> None:
    """Check that ids ``[B, F]`` have a column for each feature.

    Raises:
        ValueError: They do not.
    """
    if x.dim() != 2 or x.shape[1] != features:
        raise ValueError(
            f"ids have shape {tuple(x.shape)}: expected [B, {features}], a column for each feature"
        )


class LoadBalanceManager:
    """Divides the rows of F features among W ranks, and turns ids into rows of a rank.

    *Fair* (``do_fair``): every rank owns one range of the rows of all features, W ranges that are
    equal to within one row; features are cut where ranges end. *Whole features*
    (``do_fair=False``): the features are shuffled, and each rank gets ``F // W`` of them, the last
    one the rest. Where ``disable_random_behavior`` is set, the largest feature that is left goes to
    the rank with the fewest rows instead (LPT; Graham 1969), whose largest rank has at most ``4/3 -
    1/(3W)`` times the rows of the best possible one.

    Every id of every feature belongs to exactly one rank.

    Args:
        embeddings_per_feat: R of each of the F features.
        num_groups: W.
        base_emb_dim: D of the rank that has all rows; see `get_block_dim`.
        do_fair: Whether features may be cut.
        device: Of the offsets, by default torch's default device.
        disable_random_behavior: Whether whole features are placed by size instead of shuffled.
        compat: Whether to return the document's numbers, with the defects that `fair_initialize`
            lists. Whole features by size are then the document's, too: ascending, ``F // W`` for
            each rank.

    Attributes:
        embeddings_per_feat: As given.
        groups: The features of each rank; lists where ranges are fair, arrays of whole features.
        offsets: For each rank the row on it at which each of its features begins, ``[len(group)]``.
        cuts: Feature -> rows at which it is cut; those that are not cut are left out.

    Raises:
        ValueError: A feature has no rows, or whole features are fewer than ranks.

    Example:
        >>> manager = LoadBalanceManager([5, 26, 1], num_groups=3)
        >>> (
        ...     manager.groups,
        ...     manager.cuts,
        ...     [manager.get_num_embeddings_on_rank(rank) for rank in range(3)],
        ... )
        ([[0, 1], [1], [1, 2]], {1: [5, 16]}, [10, 11, 11])
        >>> manager.shard_tensor(torch.tensor([[4, 16, 0]]), rank=2)
        tensor([[ 0, 10]])

    Source:
        ``recsys.modules.embeddings.LoadBalanceManager`` of CachedEmbedding.
    """

    def __init__(
        self,
        embeddings_per_feat: Sequence[int],
        num_groups: int = 4,
        base_emb_dim: int = 128,
        do_fair: bool = True,
        device: torch.device | str | None = None,
        disable_random_behavior: bool = False,
        compat: bool = False,
    ) -> None:
        self.embeddings_per_feat = [int(rows) for rows in embeddings_per_feat]
        self._num_groups = num_groups
        self._base_emb_dim = base_emb_dim
        self._do_fair = do_fair
        self._compat = compat
        self._check_division()
        self.cuts: dict[int, list[int]] = {}

        if do_fair and compat:
            self._rows, self.cuts, self.groups, offsets = fair_initialize(
                self.embeddings_per_feat, num_groups
            )
            self._owned = self._as_cut(self.cuts, self.groups, offsets)
        elif do_fair:
            total = sum(self.embeddings_per_feat)
            bounds = [rank * total // num_groups for rank in range(num_groups + 1)]
            self._owned = owned_rows(self.embeddings_per_feat, bounds)
            self.groups = [[owned.feature for owned in rank_rows] for rank_rows in self._owned]
            for owned in (owned for rank_rows in self._owned for owned in rank_rows if owned.first):
                self.cuts.setdefault(owned.feature, []).append(owned.first)
        else:
            by_load = disable_random_behavior and not compat
            features_by_rank = (
                self._largest_first() if by_load else self._chunks(by_size=disable_random_behavior)
            )
            self.groups = [np.array(group) for group in features_by_rank]
            self._owned = [self._whole(group) for group in features_by_rank]

        self.offsets = [
            torch.tensor([owned.offset for owned in rank_rows], device=device)
            for rank_rows in self._owned
        ]

    def get_num_embeddings_on_rank(self, rank: int) -> int:
        """Rows of a rank; in ``compat`` all fair ranks have as many: no remainder is counted."""
        if self._do_fair and self._compat:
            return self._rows
        return sum(owned.rows for owned in self._owned[rank])

    def shard_tensor(self, x: Tensor, rank: int) -> Tensor:
        """Ids of all features ``[B, F]`` to a rank's rows ``[B, len(group)]``, -1 for ids it lacks.

        In ``compat`` an id of another rank is clamped to the nearest row of the feature that this
        rank owns.

        Args:
            x: Integers.
            rank: Of which rank.

        Raises:
            ValueError: An id is not a row of its feature.
        """
        self._check_ids(x)
        columns = []
        for owned in self._owned[rank]:
            local = x[:, owned.feature] - owned.first
            if self._compat:
                columns.append(local.clamp(0, max(owned.rows - 1, 0)) + owned.offset)
            else:
                columns.append(
                    torch.where((local >= 0) & (local < owned.rows), local + owned.offset, -1)
                )

        return torch.stack(columns, dim=1) if columns else x.new_empty(len(x), 0)

    def get_group(self, rank: int) -> list[int] | NDArray[np.int64]:
        """The features of a rank."""
        return self.groups[rank]

    def get_offsets(self, rank: int) -> Tensor:
        """The rows on the rank at which its features begin, ``[len(group)]``."""
        return self.offsets[rank]

    def get_owned_rows(self, rank: int) -> list[OwnedRows]:
        """The rows of each feature that a rank owns; in ``compat`` with the document's offsets.

        Example:
            >>> LoadBalanceManager([5, 26, 1], num_groups=3).get_owned_rows(rank=1)
            [OwnedRows(feature=1, first=5, rows=11, offset=0)]
        """
        return list(self._owned[rank])

    def get_block_dim(self, rank: int) -> int:
        """D of a rank's rows: ``base_emb_dim``, halved for each doubling of total over own rows."""
        rows = self.get_num_embeddings_on_rank(rank)
        ratio = self._num_groups if self._do_fair else sum(self.embeddings_per_feat) / rows
        return max(2, int(self._base_emb_dim / 2 ** int(math.log2(ratio))))

    def get_qr_bucket_size(self, rank: int) -> int:
        """Rows of the two tables of a quotient-remainder table that replaces a rank's rows."""
        return math.ceil(math.sqrt(self.get_num_embeddings_on_rank(rank)))

    def _check_division(self) -> None:
        check_feature_rows(self.embeddings_per_feat)
        if self._num_groups < 1:
            raise ValueError(f"num_groups={self._num_groups}: there must be at least one")
        if not self._do_fair and len(self.embeddings_per_feat) < self._num_groups:
            raise ValueError(
                f"{len(self.embeddings_per_feat)} features are too few for {self._num_groups} "
                "groups of whole features: take fewer groups, or do_fair=True, which cuts features"
            )

    def _check_ids(self, x: Tensor) -> None:
        rows = torch.tensor(self.embeddings_per_feat, device=x.device)
        check_id_columns(x, len(rows))
        outside = (x < 0) | (x >= rows)

        if outside.any():
            sample, feature = outside.nonzero()[0].tolist()
            raise ValueError(
                f"feature {feature}, sample {sample}, holds id {int(x[sample, feature])}, and the "
                f"feature has {self.embeddings_per_feat[feature]} rows: ids count from 0 to "
                f"{self.embeddings_per_feat[feature] - 1}"
            )

    def _chunks(self, by_size: bool) -> list[list[int]]:
        """F // W features for each rank in the document's order; the last rank gets the rest."""
        order = np.arange(len(self.embeddings_per_feat))
        if by_size:
            order = np.argsort(self.embeddings_per_feat, kind="stable")
        else:
            np.random.RandomState(_SHUFFLE_SEED).shuffle(order)

        count = len(order) // self._num_groups
        starts = [rank * count for rank in range(self._num_groups)]
        return [order[start:end].tolist() for start, end in pairwise([*starts, len(order)])]

    def _largest_first(self) -> list[list[int]]:
        """LPT: in descending order of rows, each feature goes to the rank that has the fewest."""
        groups: list[list[int]] = [[] for _ in range(self._num_groups)]
        loads = [0] * self._num_groups

        for feature in sorted(
            range(len(self.embeddings_per_feat)), key=lambda f: -self.embeddings_per_feat[f]
        ):
            rank = loads.index(min(loads))
            groups[rank].append(feature)
            loads[rank] += self.embeddings_per_feat[feature]
        return groups

    def _whole(self, group: Sequence[int]) -> list[OwnedRows]:
        rows = [self.embeddings_per_feat[feature] for feature in group]
        starts = accumulate(rows[:-1], initial=0)
        return [
            OwnedRows(feature, 0, n, start)
            for feature, n, start in zip(group, rows, starts, strict=True)
        ]

    def _as_cut(
        self, cuts: dict[int, list[int]], groups: list[list[int]], offsets: list[Tensor]
    ) -> list[list[OwnedRows]]:
        """The document's division in our form: its cuts in the order of ranks, its offsets."""
        ends = {
            feature: iter([*at, self.embeddings_per_feat[feature]]) for feature, at in cuts.items()
        }
        begun = dict.fromkeys(range(len(self.embeddings_per_feat)), 0)

        ranks = []
        for group, starts in zip(groups, offsets, strict=True):
            rank_rows = []
            for feature, offset in zip(group, starts.tolist(), strict=True):
                end = next(ends[feature]) if feature in ends else self.embeddings_per_feat[feature]
                rank_rows.append(OwnedRows(feature, begun[feature], end - begun[feature], offset))
                begun[feature] = end
            ranks.append(rank_rows)
        return ranks
