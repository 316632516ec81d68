"""The ranks of a sharded module, and which of them share a host."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist

from tutorec.distributed.comm import get_local_size
from tutorec.distributed.core.env import ShardingEnv, local_world_size
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_row_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection


def local_sizes(rank: int, world_size: int) -> list[int]:
    world = dist.group.WORLD
    assert world is not None, "a rank of a pool has a process group"
    sizes = [
        ShardingEnv.from_process_group(world).local_size,
        ShardingEnv(world_size, rank, world, local_size=1).local_size,
    ]
    for members in ([0, 1], [1, 2], [0, 1, 2], [0, 2, 3]):
        group = dist.new_group(members)
        if isinstance(group, dist.ProcessGroup) and rank in members:
            sizes.append(ShardingEnv.from_process_group(group).local_size)
        else:
            sizes.append(0)
    with mock.patch.dict(os.environ):
        del os.environ["LOCAL_WORLD_SIZE"]
        sizes.append(ShardingEnv.from_process_group(world).local_size)
    return sizes


@pytest.mark.world4
def test_ranks_per_host_are_those_of_the_group(ranks):
    found = ranks(4, hosts=2).run(local_sizes)
    # Two of one host; two of two hosts; hosts that differ in size count as one.
    assert found[0] == [2, 1, 2, 0, 3, 3, 4]
    assert found[2] == [2, 1, 0, 1, 3, 3, 4]


def test_without_a_group_all_ranks_share_a_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ShardingEnv.from_local(world_size=4, rank=0).local_size == 4


@pytest.mark.parametrize("local_size", [0, 3])
def test_hosts_that_do_not_divide_the_ranks_are_refused(local_size):
    with pytest.raises(ValueError, match=f"4 ranks cannot be split into hosts of {local_size}"):
        ShardingEnv(4, 0, local_size=local_size)


@pytest.mark.parametrize(("text", "ranks"), [("2", 2), ("0", None)])
def test_ranks_per_host_are_read_from_the_environment(monkeypatch, text, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert local_world_size() == ranks
    plan = construct_module_sharding_plan(one_table(), {"item": table_row_wise(0)}, world_size=4)
    assert plan["item"].ranks == list(range(ranks or 4))


def test_what_is_no_number_of_ranks_per_host_is_named(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE.*'two', not"):
        construct_module_sharding_plan(one_table(), {"item": table_row_wise(0)}, world_size=4)


@pytest.mark.parametrize(("here", "ranks"), [("2", None), ("4", None), ("3", 3)])
def test_hosts_of_different_sizes_under_torchrun_count_as_one_on_every_rank(
    monkeypatch, here, ranks
):
    """Hosts of two and of four ranks: each of them says its own number, and neither is
    that of all.
    """
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "WORLD_SIZE": "6",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert local_world_size() == ranks
    if ranks is None:
        with pytest.warns(
            UserWarning, match=f"LOCAL_WORLD_SIZE={here} is not that of every host: all ranks are"
        ):
            assert get_local_size(6) == 6
    else:
        assert get_local_size(6) == ranks


def one_table() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item", feature_names=["f"])])
