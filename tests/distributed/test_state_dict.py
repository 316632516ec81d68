"""State of a sharded module: every table under its unsharded name, in and out."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from distributed.cases import batch, collection, home, local_weights, shard
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tutorec.distributed.state_dict import sharded_state


def stored(rank: int, world_size: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = shard(collection(), "exact_row_wise_adagrad")
        state = sharded.state_dict()
    before = local_weights(sharded)
    kinds = {type(value).__name__ for value in state.values()}
    shapes = {name: list(value.size()) for name, value in state.items()}
    shards = {name: [list(s.metadata.shard_sizes) for s in value.local_shards()] for name, value in state.items()}
    copies = {name: [s.tensor.clone() for s in value.local_shards()] for name, value in state.items()}
    sharded(batch(rank, 3)).values().sum().backward()
    live = all(
        torch.equal(s.tensor, local_weights(sharded)[name.split(".")[1]])
        for name, value in state.items()
        for s in value.local_shards()
    )
    for name, value in state.items():
        for held, copied in zip(value.local_shards(), copies[name], strict=True):
            held.tensor.copy_(copied)
    other = shard(collection(), "exact_row_wise_adagrad")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded = other.load_state_dict(state)
    same = all(torch.equal(rows, before[name]) for name, rows in local_weights(other).items())
    return {
        "kinds": kinds,
        "shapes": shapes,
        "shards": shards,
        "live": live,
        "same": same,
        "loaded": [loaded.missing_keys, loaded.unexpected_keys],
    }


def test_every_rank_names_every_table_and_loads_its_own(ranks):
    for rank, found in enumerate(ranks(2).run(stored)):
        assert found["kinds"] == {"ShardedTensor"}
        sizes = {"t0": [11, 8], "t1": [7, 4], "t2": [9, 6]}
        assert found["shapes"] == {f"embedding_bags.{name}.weight": size for name, size in sizes.items()}
        assert found["shards"] == {
            f"embedding_bags.{name}.weight": [size] if home(index, 2) == rank else []
            for index, (name, size) in enumerate(sizes.items())
        }
        assert found["live"]
        assert found["same"]
        assert found["loaded"] == [[], []]


def from_unsharded(rank: int, world_size: int) -> tuple[bool, str]:
    ebc = collection()
    with torch.no_grad():
        for parameter in ebc.parameters():
            parameter.fill_(3.0)
    sharded = shard(collection())
    sharded.load_state_dict(ebc.state_dict())
    filled = all(bool((rows == 3).all()) for rows in local_weights(sharded).values())
    wrong = ebc.state_dict() | {"embedding_bags.t0.weight": torch.zeros(2, 2)}
    try:
        sharded.load_state_dict(wrong)
    except ValueError as error:
        return filled, str(error)
    return filled, ""


def test_state_of_the_unsharded_module_loads_and_wrong_shapes_are_refused(ranks):
    for filled, message in ranks(2).run(from_unsharded):
        assert filled
        assert message == "table 't0' is [11, 8], and what is loaded is [2, 2]"


def other_plan(rank: int, world_size: int) -> str:
    ebc = collection()
    sharded = shard(ebc)
    moved = [table for table in sharded._tables]
    # The same tables as if rank 0 and rank 1 had changed places: what is stored there is not what is held here.
    held = {table.name: torch.zeros(table.rows, table.columns) for table in moved if table.pieces[0].rank == rank}
    state: dict[str, Any] = {
        f"embedding_bags.{name}.weight": value
        for name, value in sharded_state(moved, held, sharded._env, torch.device("cpu")).items()
    }
    for value in state.values():
        assert isinstance(value, ShardedTensor), "the state is sharded"
        value._local_shards = []
    try:
        sharded.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return ""


def test_state_of_another_plan_is_refused_with_the_table(ranks):
    for message in ranks(2).run(other_plan):
        assert message.startswith("table 't")
        assert "it was stored under another plan; load it under that plan" in message
