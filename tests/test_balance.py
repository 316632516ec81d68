"""The load balancer of the CachedEmbedding playground: the document's numbers, and every row owned
once.
"""

from __future__ import annotations

from itertools import accumulate, combinations

import numpy as np
import pytest
import torch

from tutorec.balance import (
    LoadBalanceManager,
    OwnedRows,
    fair_initialize,
    lbmgr_fair_divide,
    owned_rows,
)

SMALL = [100, 2020, 3203, 3434, 3023, 4545, 123, 4566]
LARGE = [100, 2020, 3203, 3434302, 3023, 45459, 123, 4566]
IDS = torch.tensor(
    [
        [69, 1590, 2101, 3002450, 1443, 18711, 3, 4532],
        [83, 1153, 2446, 1065773, 561, 31027, 58, 3101],
        [40, 396, 967, 1962002, 1553, 24817, 54, 77],
        [38, 888, 843, 2855171, 1787, 22663, 107, 395],
        [42, 1190, 2661, 1749865, 2260, 2255, 96, 2929],
        [76, 821, 1003, 1770283, 2643, 13591, 118, 2505],
        [58, 1583, 151, 1194557, 109, 35343, 109, 3112],
        [36, 1546, 2257, 2188749, 462, 29215, 51, 226],
    ]
)


def small_cases(count: int) -> list[tuple[list[int], int]]:
    """Sizes of two to six features, at most 30 rows each, and at most as many groups: the same in
    every run.
    """
    random = np.random.RandomState(19)
    cases = []
    for _ in range(count):
        features = random.randint(2, 7)
        rows = [int(each) for each in random.randint(1, 31, size=features)]
        cases.append((rows, int(random.randint(1, features + 1))))
    return cases


# --- the document's numbers


def test_the_document_divides_six_fields():
    assert (
        str(lbmgr_fair_divide([10, 200, 400, 2000, 1000, 500], 4))
        == "({3: [417, 1444], 4: [471]}, 1027)"
    )


def test_the_document_divides_eight_features():
    rows, cuts, groups, offsets = fair_initialize(SMALL, 4)
    assert str((rows, cuts)) == "(5253, {2: [3133], 4: [1749], 5: [3979]})"
    assert str(groups) == "[[0, 1, 2], [2, 3, 4], [4, 5], [5, 6, 7]]"
    assert [each.tolist() for each in offsets] == [
        [0, 100, 2120],
        [0, 70, 3504],
        [0, 1274],
        [0, 566, 689],
    ]


@pytest.mark.parametrize("compat", [False, True])
def test_whole_features_are_shuffled_as_in_the_document(compat):
    manager = LoadBalanceManager(LARGE, 4, 128, False, compat=compat)
    assert manager.embeddings_per_feat == LARGE
    assert str(manager.groups) == "[array([3, 0]), array([1, 2]), array([5, 6]), array([7, 4])]"
    assert [each.tolist() for each in manager.offsets] == [
        [0, 3434302],
        [0, 2020],
        [0, 45459],
        [0, 4566],
    ]
    assert [manager.get_num_embeddings_on_rank(rank) for rank in range(4)] == [
        3434402,
        5223,
        45582,
        7589,
    ]
    assert [manager.get_block_dim(rank) for rank in range(4)] == [128, 2, 2, 2]
    assert [manager.get_qr_bucket_size(rank) for rank in range(4)] == [1854, 73, 214, 88]
    assert manager.shard_tensor(IDS, rank=0).tolist() == [
        [3002450, 3434371],
        [1065773, 3434385],
        [1962002, 3434342],
        [2855171, 3434340],
        [1749865, 3434344],
        [1770283, 3434378],
        [1194557, 3434360],
        [2188749, 3434338],
    ]


@pytest.mark.parametrize("compat", [False, True])
def test_rows_that_divide_evenly_are_the_same_in_both_modes(compat):
    assert sum(LARGE) % 4 == 0
    manager = LoadBalanceManager(LARGE, compat=compat)
    assert manager.cuts == {3: [867876, 1741075, 2614274]}
    assert manager.groups == [[0, 1, 2, 3], [3], [3], [3, 4, 5, 6, 7]]
    offsets = [[0, 100, 2120, 5323], [0], [0], [0, 820028, 823051, 868510, 868633]]
    assert [manager.get_offsets(rank).tolist() for rank in range(4)] == offsets
    assert manager.get_group(3) == [3, 4, 5, 6, 7]
    assert {manager.get_num_embeddings_on_rank(rank) for rank in range(4)} == {873199}
    assert (manager.get_block_dim(0), manager.get_qr_bucket_size(0)) == (32, 935)


def test_the_document_sorts_ascending_where_it_does_not_shuffle():
    manager = LoadBalanceManager(SMALL, 4, 128, False, disable_random_behavior=True, compat=True)
    assert [group.tolist() for group in manager.groups] == [[0, 6], [1, 4], [2, 3], [5, 7]]


def as_in_the_document(rows: list[int], num_groups: int) -> tuple[int, dict, list, list]:
    """The document's loop, name by name, but for its tensors."""
    rows_per_rank = sum(rows) // num_groups
    groups, offsets, _curr_grp, _curr_offs = [], [], [], [0]
    cuts, _num_cuts, _agg = {}, 0, rows_per_rank
    for ind in range(len(rows)):
        while rows[ind] > _agg:
            if _num_cuts >= num_groups - 1:
                break
            if ind in cuts:
                cuts[ind].append(_agg)
            else:
                cuts[ind] = [_agg]
            _num_cuts += 1
            offsets.append(_curr_offs)
            _curr_offs = [0]
            _curr_grp.append(ind)
            groups.append(_curr_grp)
            _curr_grp = []
            _agg += rows_per_rank
        if _agg >= rows[ind] and len(_curr_offs) == 1:
            _curr_offs.append(rows[ind] - (_agg - rows_per_rank))
        else:
            _curr_offs.append(rows[ind])
        _agg -= rows[ind]
        _curr_grp.append(ind)
    offsets.append(_curr_offs[:-1])
    groups.append(_curr_grp)
    return rows_per_rank, cuts, groups, [list(accumulate(each)) for each in offsets]


def test_the_document_s_division_is_kept_and_differs_from_row_ranges_where_it_did():
    differs = 0
    for rows, num_groups in small_cases(20_000):
        per_rank, cuts, groups, offsets = fair_initialize(rows, num_groups)
        offsets = [each.tolist() for each in offsets]
        assert (per_rank, cuts, groups, offsets) == as_in_the_document(rows, num_groups)
        # What it is meant to be: sum // W rows for each rank, and the remainder for the last one.
        meant = owned_rows(rows, [rank * per_rank for rank in range(num_groups)] + [sum(rows)])
        meant_groups = [[own.feature for own in of_rank] for of_rank in meant]
        differs += (groups, offsets) != (
            meant_groups,
            [[own.offset for own in of_rank] for of_rank in meant],
        )
    assert differs == 1900


@pytest.mark.parametrize(
    ("rows", "num_groups", "groups", "last_offsets"),
    [([24, 24], 2, [[0, 1], [1]], [0]), ([5, 26, 1], 3, [[0, 1], [1], [1, 2]], [0, 26])],
)
def test_defects_of_the_document_are_kept_in_compat_only(rows, num_groups, groups, last_offsets):
    manager = LoadBalanceManager(rows, num_groups, compat=True)
    assert (manager.groups, manager.get_offsets(num_groups - 1).tolist()) == (groups, last_offsets)
    exact = LoadBalanceManager(rows, num_groups)
    assert (exact.groups, exact.offsets[-1].tolist()) != (groups, last_offsets)


def test_compat_clamps_and_leaves_the_remainder_out():
    compat, exact = LoadBalanceManager(SMALL, 4, compat=True), LoadBalanceManager(SMALL, 4)
    last = torch.tensor([[rows - 1 for rows in SMALL]])
    assert compat.get_num_embeddings_on_rank(3) == 5253
    assert compat.shard_tensor(last, rank=3).tolist() == [[565, 688, 5254]]
    assert exact.get_num_embeddings_on_rank(3) == 5254
    assert exact.shard_tensor(last, rank=3).tolist() == [[564, 687, 5253]]
    # Rank 0 owns the first rows of feature 2: the last id becomes its last row, or nothing.
    assert compat.shard_tensor(last, rank=0).tolist() == [[99, 2119, 5252]]
    assert exact.shard_tensor(last, rank=0).tolist() == [[99, 2119, -1]]


# --- every row is owned once


def test_fair_ranges_are_those_of_counting_row_by_row():
    for rows, num_groups in small_cases(20_000):
        manager = LoadBalanceManager(rows, num_groups)
        owned, loads = [], []
        for rank, members in enumerate(manager._owned):
            assert [own.feature for own in members] == manager.groups[rank]
            local = [
                (own.feature, own.first + n, own.offset + n)
                for own in members
                for n in range(own.rows)
            ]
            assert [place for _, _, place in local] == list(range(len(local)))
            assert all(own.rows for own in members)
            owned += [(feature, row) for feature, row, _ in local]
            loads.append(len(local))
        assert owned == [
            (feature, row) for feature, count in enumerate(rows) for row in range(count)
        ]
        assert max(loads) - min(loads) <= 1
        cuts = [(feature, at) for feature, of_feature in manager.cuts.items() for at in of_feature]
        begins = [(members[0].feature, members[0].first) for members in manager._owned if members]
        assert cuts == [(feature, first) for feature, first in begins if first]


@pytest.mark.parametrize("do_fair", [True, False])
def test_every_id_has_one_place(do_fair):
    for rows, num_groups in small_cases(300):
        manager = LoadBalanceManager(rows, num_groups, do_fair=do_fair)
        # All ids of all features: shorter columns are filled with their last id.
        x = torch.stack([torch.arange(max(rows)).clamp(max=count - 1) for count in rows], dim=1)
        places: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for rank in range(num_groups):
            local = manager.shard_tensor(x, rank)
            assert local.shape == (max(rows), len(manager.get_group(rank)))
            for column, feature in enumerate(manager.get_group(rank)):
                for identifier, row in zip(
                    x[:, feature].tolist(), local[:, column].tolist(), strict=True
                ):
                    if row >= 0:
                        places.setdefault((int(feature), identifier), set()).add((rank, row))
        assert all(len(each) == 1 for each in places.values())
        taken = {place for each in places.values() for place in each}
        loads = [manager.get_num_embeddings_on_rank(rank) for rank in range(num_groups)]
        assert taken == {(rank, row) for rank, load in enumerate(loads) for row in range(load)}
        assert len(places) == sum(rows)


def test_more_ranks_than_rows_leaves_ranks_empty():
    manager = LoadBalanceManager([1, 1], num_groups=4)
    assert sorted(manager.get_num_embeddings_on_rank(rank) for rank in range(4)) == [0, 0, 1, 1]
    empty = manager.groups.index([])
    assert manager.shard_tensor(torch.zeros(3, 2, dtype=torch.int64), empty).shape == (3, 0)


# --- whole features by size


def test_the_largest_feature_goes_to_the_rank_with_the_fewest_rows():
    manager = LoadBalanceManager(SMALL, 4, do_fair=False, disable_random_behavior=True)
    assert [group.tolist() for group in manager.groups] == [[7, 0], [5, 6], [3, 1], [2, 4]]
    assert [manager.get_num_embeddings_on_rank(rank) for rank in range(4)] == [
        4666,
        4668,
        5454,
        6226,
    ]


def largest_of_the_best(rows: list[int], num_groups: int) -> int:
    """The smallest possible largest load, by trying all placements of whole features."""
    if num_groups == 1:
        return sum(rows)
    members = range(len(rows))
    return min(
        max(
            sum(rows[m] for m in first),
            largest_of_the_best([rows[m] for m in members if m not in first], num_groups - 1),
        )
        for count in range(len(rows) + 1)
        for first in combinations(members, count)
    )


def test_placement_by_size_is_within_graham_s_bound_of_the_best():
    for rows, num_groups in small_cases(60):
        manager = LoadBalanceManager(rows, num_groups, do_fair=False, disable_random_behavior=True)
        largest = max(manager.get_num_embeddings_on_rank(rank) for rank in range(num_groups))
        assert 3 * num_groups * largest <= (4 * num_groups - 1) * largest_of_the_best(
            rows, num_groups
        )


# --- what is refused


def test_what_cannot_be_divided_says_why():
    with pytest.raises(
        ValueError,
        match=r"features \[1\].*no.*embeddings_per_feat=\[5, 0\]",
    ):
        LoadBalanceManager([5, 0], 2)
    with pytest.raises(ValueError, match=r"num_groups=0.* at least one"):
        LoadBalanceManager([5, 7], 0)
    with pytest.raises(ValueError, match=r"2 features.*3.*features.*do_fair=True"):
        LoadBalanceManager([5, 7], 3, do_fair=False)
    assert LoadBalanceManager([5, 7], 3).groups == [[0], [0, 1], [1]]


def test_ids_outside_of_their_feature_are_refused():
    manager = LoadBalanceManager([5, 7], 2)
    with pytest.raises(
        ValueError,
        match=r"feature 1, sample 2.*id 7.*7 rows.*0 to 6",
    ):
        manager.shard_tensor(torch.tensor([[0, 0], [4, 6], [4, 7]]), rank=0)
    with pytest.raises(ValueError, match=r"ids have shape \(3,\): expected \[B, 2\]"):
        manager.shard_tensor(torch.tensor([1, 2, 3]), rank=0)


def test_sizes_may_be_numbers_of_numpy():
    manager = LoadBalanceManager(np.array([5, 26, 1]), 3)
    assert str(manager.cuts) == "{1: [5, 16]}"
    assert owned_rows([2, 1], [0, 3]) == [[OwnedRows(0, 0, 2, 0), OwnedRows(1, 0, 1, 2)]]
