"""The door to torch.distributed: sums, collections, broadcasts, the groups of a host, and what each
of them counts.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.traffic import count_traffic
from tutorec.spmd import device


def group() -> dist.ProcessGroup:
    world = comm.default_group()
    assert world is not None, "tests of several ranks run inside a pool"
    return world


COUNTS = ([3, 2], [0, 4], [0, 0])
WORLD4_COUNTS = ([1, 2, 3, 4], [0, 5, 0, 2])


def slices_of(rank: int, counts: list[int], dtype: torch.dtype) -> torch.Tensor:
    """What each rank sends: numbers that differ by rank and place."""
    return (torch.arange(sum(counts)) + 100 * rank).to(dtype)


def scatter_sums(rank: int, world_size: int, counts: list[int], dtype: torch.dtype) -> tuple:
    send = slices_of(rank, counts, dtype).to(device())
    with count_traffic() as traffic:
        mine = comm.reduce_scatter(send, counts, group(), "sum").wait()
    return mine, traffic.row(world_size), dict(traffic.issues)


def check_sums(results: list[tuple], counts: list[int], dtype: torch.dtype) -> None:
    itemsize = torch.tensor([], dtype=dtype).element_size()
    world_size = len(counts)
    due = (
        torch.stack([slices_of(rank, counts, dtype).double() for rank in range(world_size)])
        .sum(0)
        .split(counts)
    )
    for rank, (mine, row, issues) in enumerate(results):
        assert torch.equal(mine.double(), due[rank])
        assert mine.dtype == dtype
        assert row == [0 if peer == rank else itemsize * counts[peer] for peer in range(world_size)]
        assert issues == {"sum": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
def test_reduce_scatter_leaves_each_rank_the_sum_of_its_slice(ranks, dtype):
    for counts in COUNTS:
        check_sums(ranks(2).run(scatter_sums, counts=counts, dtype=dtype), counts, dtype)


@pytest.mark.world4
def test_reduce_scatter_sums_over_four_ranks(ranks):
    for counts in WORLD4_COUNTS:
        check_sums(
            ranks(4).run(scatter_sums, counts=counts, dtype=torch.float32), counts, torch.float32
        )


def cancelling(rank: int, world_size: int, dtype: torch.dtype) -> float:
    parts = (
        [1.0, 2048.0, 1.0, -2048.0] if dtype == torch.float16 else [1.0, 2.0**25, 1.0, -(2.0**25)]
    )
    send = torch.full((world_size,), parts[rank], dtype=dtype, device=device())
    return comm.reduce_scatter(send, [1] * world_size, group(), "sum").wait().item()


@pytest.mark.world4
def test_reduce_scatter_adds_in_rank_order_and_half_precision_in_float32(ranks):
    # ((1 + 2^25) + 1) - 2^25 loses both ones in float32; any other order keeps one of them.
    assert ranks(4).run(cancelling, dtype=torch.float32) == [0.0] * 4
    # In float16 1 + 2048 would be 2048 and the result 0; in float32 nothing is lost.
    assert ranks(4).run(cancelling, dtype=torch.float16) == [2.0] * 4


def collect(rank: int, world_size: int, counts: list[int]) -> tuple:
    with count_traffic() as traffic:
        mine = torch.arange(counts[rank], device=device()) + 100 * rank
        return comm.all_gather(mine, counts, group(), "collect").wait().tolist(), traffic.row(
            world_size
        )


def check_collected(results: list[tuple], counts: list[int]) -> None:
    due = [100 * rank + number for rank, count in enumerate(counts) for number in range(count)]
    for rank, (everything, row) in enumerate(results):
        assert everything == due
        assert row == [0 if peer == rank else 8 * counts[rank] for peer in range(len(counts))]


def test_all_gather_puts_everything_everywhere_in_rank_order(ranks):
    for counts in COUNTS:
        check_collected(ranks(2).run(collect, counts=counts), counts)


@pytest.mark.world4
def test_all_gather_collects_from_four_ranks(ranks):
    for counts in WORLD4_COUNTS:
        check_collected(ranks(4).run(collect, counts=counts), counts)


def spread(rank: int, world_size: int, source: int) -> tuple:
    with count_traffic() as traffic:
        tensor = torch.full((2, 3), float(rank), device=device())
        comm.broadcast(tensor, source, group(), "spread")
    return tensor.unique().tolist(), traffic.row(world_size), dict(traffic.issues)


def test_broadcast_overwrites_with_the_source_and_counts_at_the_source(ranks):
    assert ranks(2).run(spread, source=1) == [
        ([1.0], [0, 0], {"spread": 1}),
        ([1.0], [24, 0], {"spread": 1}),
    ]


def of_a_host(rank: int, world_size: int, local_size: int) -> tuple:
    hosts = host_groups(group(), local_size)
    again = host_groups(group(), local_size)
    members = [dist.get_process_group_ranks(each) for each in (hosts.intra, hosts.cross)]
    with count_traffic() as traffic:
        inside = (
            comm.all_gather(
                torch.tensor([rank], device=device()), [1] * local_size, hosts.intra, "inside"
            )
            .wait()
            .tolist()
        )
        count = world_size // local_size
        across = (
            comm.all_gather(
                torch.tensor([rank], device=device()), [1] * count, hosts.cross, "across"
            )
            .wait()
            .tolist()
        )
    same = hosts.intra is again.intra and hosts.cross is again.cross
    return members, inside, across, same, dict(traffic.bytes)


@pytest.mark.world4
@pytest.mark.parametrize("local_size", [1, 2, 4])
def test_host_groups_are_the_ranks_of_a_host_and_those_of_one_number(ranks, local_size):
    for rank, (members, inside, across, same, sent) in enumerate(
        ranks(4).run(of_a_host, local_size=local_size)
    ):
        first = rank - rank % local_size
        mine = list(range(first, first + local_size)), list(range(rank % local_size, 4, local_size))
        assert tuple(members) == mine
        assert (inside, across) == mine
        assert same
        # Counted by the ranks of the program, not by their numbers in the subgroup.
        due = {("inside", rank, peer): 8 for peer in mine[0] if peer != rank}
        assert sent == due | {("across", rank, peer): 8 for peer in mine[1] if peer != rank}


def of_a_part(rank: int, world_size: int) -> list[list[int]] | None:
    """Groups inside a group of ranks 1 and 3, which are in different numbers of groups."""
    dist.new_group([0, 1])
    part = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    assert isinstance(part, dist.ProcessGroup), "this rank is one of the part"
    hosts = host_groups(part, 1)
    both = (
        comm.all_gather(torch.tensor([rank], device=device()), [1, 1], hosts.cross, "across")
        .wait()
        .tolist()
    )
    one = (
        comm.all_gather(torch.tensor([rank], device=device()), [1], hosts.intra, "inside")
        .wait()
        .tolist()
    )
    return [both, one, dist.get_process_group_ranks(hosts.intra)]


@pytest.mark.world4
def test_host_groups_of_some_ranks_leave_the_others_out(ranks):
    assert ranks(4).run(of_a_part) == [None, [[1, 3], [1], [1]], None, [[1, 3], [3], [3]]]


def of_another_group(rank: int, world_size: int) -> list[list[int]]:
    """All ranks in a group that is not the default one, after some have been in more groups than
    others.
    """
    dist.new_group([0, 2])
    dist.new_group([0])
    everyone = dist.new_group(list(range(world_size)))
    assert isinstance(everyone, dist.ProcessGroup), "all ranks are in it"
    hosts = host_groups(everyone, 2)
    inside = (
        comm.all_gather(torch.tensor([rank], device=device()), [1, 1], hosts.intra, "inside")
        .wait()
        .tolist()
    )
    return [
        inside,
        comm.all_gather(torch.tensor([rank], device=device()), [1, 1], hosts.cross, "across")
        .wait()
        .tolist(),
    ]


@pytest.mark.world4
def test_host_groups_are_made_where_ranks_are_in_different_numbers_of_groups(ranks):
    assert ranks(4).run(of_another_group) == [
        [[0, 1], [0, 2]],
        [[0, 1], [1, 3]],
        [[2, 3], [0, 2]],
        [[2, 3], [1, 3]],
    ]


def uneven_hosts(rank: int, world_size: int) -> str:
    try:
        host_groups(group(), 3)
    except ValueError as error:
        return str(error)
    return ""


def test_host_groups_refuse_hosts_of_unequal_size(ranks):
    for message in ranks(2).run(uneven_hosts):
        assert message == (
            "2 ranks cannot be split into hosts of 3: local_size (LOCAL_WORLD_SIZE) may be one of "
            "[1, 2]"
        )


def places(rank: int) -> tuple[int, int]:
    return comm.get_local_size(), comm.get_local_rank()


@pytest.mark.world4
def test_local_size_and_rank_are_those_of_the_launcher(ranks):
    assert ranks(4, hosts=2).run(places) == [(2, 0), (2, 1), (2, 0), (2, 1)]
    assert ranks(4).run(places) == [(4, 0), (4, 1), (4, 2), (4, 3)]


def test_local_size_without_a_launcher_is_the_world(monkeypatch):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (comm.get_local_size(6), comm.get_local_rank(6, rank=4)) == (6, 4)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
    assert (comm.get_local_size(6), comm.get_local_rank(6, rank=4)) == (3, 1)


def test_local_size_that_does_not_divide_is_warned_of(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.warns(UserWarning, match=r"LOCAL_WORLD_SIZE=4.*not.*6 ranks"):
        assert comm.get_local_size(6) == 6


def test_an_environment_without_a_number_is_named(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE='two' is not"):
        comm.get_local_size(4)
