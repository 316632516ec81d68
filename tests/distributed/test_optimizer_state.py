"""State of fused optimizers: every table once, whole, under its unsharded name; in and out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from distributed.cases import KINDS, collection, column_slices, shard
from distributed.checkpoint_cases import by_column, held, sharded, train
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

KIND_OF_STATE = {
    "sgd": set(),
    "adagrad": {"momentum1"},
    "rowwise": {"momentum1"},
    "adam": {"momentum1", "exp_avg_sq", "step"},
    "partial": {"momentum1", "exp_avg_sq", "step"},
    "ec": {"momentum1"},
}


def there_and_back(rank: int, world_size: int, shift: int) -> dict[str, Any]:
    """What is stored here: shapes and pieces; and whether another model of the plan has it after
    loading.
    """
    model, optimizer = sharded(shift)
    train(model, optimizer, rank, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.fused_optimizer.state_dict()["state"]
        other, _ = sharded(shift)
        other.fused_optimizer.load_state_dict({"state": state})
    mine, theirs = held(model), held(other)
    same = all(
        torch.equal(value, after[key])
        for name, pieces in mine.items()
        for (_, before), (_, after) in zip(pieces, theirs[name], strict=True)
        for key, value in before.items()
        if key != "weight"
    )
    shards: dict[str, dict[str, Any]] = {}
    for name, of_table in state.items():
        for key, value in of_table.items():
            is_sharded = isinstance(value, ShardedTensor)
            shards.setdefault(name, {})[key.rpartition(".")[2]] = (
                list(value.metadata().size if is_sharded else value.shape),
                [(list(s.metadata.shard_offsets), s.tensor.clone()) for s in value.local_shards()]
                if is_sharded
                else [([0] * value.dim(), value.clone())],
            )
            assert all(part.partition(".")[0] == name.split(".")[-2] for part in [key]), (
                "TorchRec's names"
            )
    return {"same": same, "shards": shards, "held": mine}


@pytest.mark.parametrize("shift", range(len(KINDS)))
def test_states_are_whole_tables_of_which_each_rank_has_its_pieces(ranks, shift):
    results = ranks(2).run(there_and_back, shift=shift)
    assert all(found["same"] for found in results)
    truth = by_column([found["held"] for found in results])
    seen = set()
    for found in results:
        for name, states in found["shards"].items():
            table = name.split(".")[-2]
            stem, index = table[:-1], int(table[-1])
            assert states.keys() == KIND_OF_STATE[stem], name
            rows, columns = truth[name]["weight"].shape
            slices = column_slices(KINDS[(index + shift) % len(KINDS)], 0, columns)
            for key, (size, pieces) in states.items():
                by_row = (stem, key) in {("rowwise", "momentum1"), ("partial", "exp_avg_sq")}
                seen.add((stem, key, len(slices)))
                if key == "step":
                    assert size == []
                    continue
                assert size == ([len(slices) * rows] if by_row else [rows, columns]), name
                whole = truth[name][key]
                if by_row:
                    whole = torch.cat([whole[:, part.start] for part in slices])
                for offsets, tensor in pieces:
                    part = whole[
                        tuple(slice(o, o + s) for o, s in zip(offsets, tensor.shape, strict=True))
                    ]
                    assert torch.equal(tensor, part), f"{key} of {name} at {offsets}"
    assert {
        ("rowwise", "momentum1", 2),
        ("adam", "exp_avg_sq", 2),
        ("partial", "exp_avg_sq", 2),
    } <= seen


def other_plan(optimizer: str) -> str:
    state = shard(collection(), optimizer, kind="row_wise").fused_optimizer.state_dict()
    other = shard(collection(), optimizer, kind="grid_shard")
    try:
        other.fused_optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_states_of_another_plan_are_refused_and_the_way_that_takes_them_is_named(ranks):
    for rank, message in enumerate(ranks(2).run(other_plan, "exact_adagrad")):
        assert message == (
            "optimizer state 't0.momentum1' of 'embedding_bags.t0.weight': this rank holds the "
            f"shard at [{6 * rank}, 0] of size [{6 - rank}, 4], and the loaded tensor has shards "
            f"(offsets, sizes) [([{6 * rank}, 0], [{6 - rank}, 8])] here: it was saved under "
            "another plan; load it under that plan, or save and load with "
            "tutorec.distributed.checkpoint"
        )
    for message in ranks(2).run(other_plan, "exact_row_wise_adagrad"):
        assert (
            "is [22] as a whole, and the loaded state is [11]" in message
            or "saved under another plan" in message
        )


def from_whole(rank: int) -> tuple[bool, str]:
    """Plain tensors of whole tables, as one process would have them."""
    model, optimizer = sharded(2)
    train(model, optimizer, rank, range(1))
    state: dict[str, Any] = {}
    for name, of_table in model.fused_optimizer.state_dict()["state"].items():
        state[name] = {}
        for key, value in of_table.items():
            size = list(value.metadata().size if isinstance(value, ShardedTensor) else value.shape)
            state[name][key] = torch.full(size, 3.0)
    model.fused_optimizer.load_state_dict({"state": state})
    filled = all(
        bool((t == 3).all()) for of in model.fused_optimizer.state.values() for t in of.values()
    )
    name = next(name for name in state if "rowwise" in name)
    key = next(iter(state[name]))
    try:
        model.fused_optimizer.load_state_dict({"state": state | {name: {key: torch.zeros(5)}}})
    except ValueError as error:
        return filled, str(error)
    return filled, "loaded"


def test_whole_tensors_load_and_other_shapes_are_refused(ranks):
    for filled, message in ranks(2).run(from_whole):
        assert filled
        assert message.startswith("optimizer state 'rowwise")
        assert message.endswith("as a whole, and the loaded state is [5]")
