"""Counted bytes: which stay on a host, which cross, and what all ranks sent together."""

from __future__ import annotations

import pytest
import torch

from tutorec.distributed import comm
from tutorec.distributed.collectives.host_groups import host_groups
from tutorec.distributed.traffic import Traffic, count_traffic


def send_to_all(rank: int, world_size: int) -> Traffic:
    """Rank r sends 10 r + s bytes to rank s, in a group of all, and 1 byte to its neighbours in a
    group of its host.
    """
    world = comm.default_group()
    assert world is not None, "tests of several ranks run inside a pool"
    out = [10 * rank + peer for peer in range(world_size)]
    into = [10 * peer + rank for peer in range(world_size)]
    with count_traffic() as traffic:
        comm.all_to_all(torch.zeros(sum(out), dtype=torch.uint8), out, into, world, "all").wait()
        intra = host_groups(world, 2).intra
        comm.all_gather(torch.zeros(1, dtype=torch.uint8), [1, 1], intra, "host").wait()
    return traffic


def host(rank: int) -> int:
    return rank // 2


@pytest.mark.world4
def test_bytes_that_cross_between_hosts_are_counted_apart(ranks):
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    by_rank = ranks(4, hosts=2).run(send_to_all)
    for rank, traffic in enumerate(by_rank):
        crossing = sum(10 * a + b for a, b in pairs if a == rank and host(a) != host(b))
        staying = sum(10 * a + b for a, b in pairs if a == rank and host(a) == host(b))
        assert traffic.local_size == 2
        assert traffic.by_stage(crossing=True) == {"all": crossing, "host": 0}
        assert traffic.by_stage(crossing=False) == {"all": staying, "host": 1}
        assert traffic.total() == crossing + staying + 1
        away = [10 * rank + peer if host(peer) != host(rank) else 0 for peer in range(4)]
        assert traffic.row(4, crossing=True) == traffic.row(4, "all", crossing=True) == away
    merged = Traffic.merge(by_rank)
    assert merged.issues == {"all": 1, "host": 1}
    assert merged.matrix(4, "all") == [
        [10 * a + b if a != b else 0 for b in range(4)] for a in range(4)
    ]
    assert merged.matrix(4, "host") == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]]
    assert merged.total("all", crossing=True) == sum(
        10 * a + b for a, b in pairs if host(a) != host(b)
    )


@pytest.mark.world4
def test_nothing_crosses_where_all_ranks_share_a_host(ranks):
    assert all(traffic.total(crossing=True) == 0 for traffic in ranks(4).run(send_to_all))


def test_merging_traffic_of_other_hosts_is_refused():
    with pytest.raises(ValueError, match=r"2.*4 ranks.*cannot"):
        Traffic.merge([Traffic(local_size=4), Traffic(local_size=2)])


def test_merging_nothing_is_nothing():
    assert Traffic.merge([]).total() == 0


def test_merging_keeps_the_parts_as_they_are():
    part = Traffic()
    part.record(comm.Issue("ids", 0, ((1, 8),)))
    merged = Traffic.merge([part, part])
    merged.record(comm.Issue("ids", 0, ((1, 8),)))
    assert (part.total(), merged.total(), part.issues["ids"]) == (8, 24, 1)
