"""State of a sharded module: every table under its unsharded name, in and out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import (
    batch,
    collection,
    group,
    home,
    local_weights,
    on_rank,
    shard,
    tables_of,
    word,
)
from distributed.cases import local_state as state_here
from torch import nn
from torch.distributed import checkpoint
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tutorec.distributed.checkpoint import full_state_dict
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.tables import Table
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.geometry import (
    TableShard,
    column_wise_shards,
    data_parallel_shards,
    grid_shards,
    row_wise_shards,
)
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.distributed.state.state_dict import local_state, sharded_state
from tutorec.quant.whole_model import quantize
from tutorec.spmd import device


def stored(rank: int, world_size: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = shard(collection(), "exact_row_wise_adagrad")
        state = sharded.state_dict()
    before = local_weights(sharded)
    kinds = {type(value).__name__ for value in state.values()}
    shapes = {name: list(value.size()) for name, value in state.items()}
    shards = {
        name: [list(s.metadata.shard_sizes) for s in value.local_shards()]
        for name, value in state.items()
    }
    copies = {
        name: [s.tensor.clone() for s in value.local_shards()] for name, value in state.items()
    }
    sharded(batch(rank, 3)).values().sum().backward()
    live = all(
        torch.equal(s.tensor.cpu(), local_weights(sharded)[name.split(".")[1]])
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
        assert found["shapes"] == {
            f"embedding_bags.{name}.weight": size for name, size in sizes.items()
        }
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
        assert message == "table 't0' is [11, 8], and the loaded table is [2, 2]"


def without_changed_numbers(rank: int, world_size: int) -> list[str]:
    ebc, sharded, messages = collection(), shard(collection()), []
    model = DistributedModelParallel(nn.Sequential(collection(), nn.Linear(2, 2)))
    state = model.state_dict()
    before = local_weights(sharded)
    name = "embedding_bags.t0.weight"
    for load, changed in (
        (sharded.load_state_dict, {**ebc.state_dict(), name: torch.ones(11, 8).long()}),
        (
            sharded.load_state_dict,
            {**ebc.state_dict(), name: torch.full((11, 8), 1e300, dtype=torch.float64)},
        ),
        (model.load_state_dict, {**state, "1.weight": torch.ones(2, 2, dtype=torch.complex64)}),
    ):
        try:
            load(changed)
            messages.append("loaded")
        except ValueError as error:
            messages.append(str(error))
    assert all(torch.equal(rows, before[name]) for name, rows in local_weights(sharded).items())
    return messages


def test_a_sharded_module_loads_no_numbers_that_a_conversion_changes(ranks):
    # Of two ranks the first holds t1 alone, and looks at t1 alone.
    _, (other_kind, infinite, dense) = ranks(2).run(without_changed_numbers)
    assert other_kind.startswith("table 't0' is torch.float32 here and torch.int64 in what is load")
    assert infinite.startswith("table 't0' is torch.float32 here, and ")
    assert "of the loaded numbers does not fit: inf" not in infinite
    assert dense.startswith(
        "'1.weight' is torch.float32 here and torch.complex64 in what is loaded"
    )


class Whole(nn.Module):
    """A user's model, which is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.top = collection(), nn.Linear(18, 1)


def into_plain_modules(rank: int, world_size: int) -> tuple[list[str], bool]:
    sharded, messages = shard(collection()), []
    tables = sharded.state_dict()
    whole = {f"tables.{name}": value for name, value in tables.items()}
    quantized = quantize(collection())
    for module, state in (
        (collection(), tables),
        (Whole(), {**Whole().state_dict(), **whole}),
        (quantized, tables),
        (quantize(Whole()), whole),
    ):
        for strict in (True, False):
            try:
                module.load_state_dict(state, strict=strict)
                messages.append("loaded")
            except ValueError as error:
                messages.append(str(error))
    remedy, plain = full_state_dict(sharded), collection()
    if rank == 0:
        plain.load_state_dict(remedy)
    return messages, rank > 0 or all(
        torch.equal(value, remedy[name]) for name, value in plain.state_dict().items()
    )


def test_a_sharded_state_is_refused_by_plain_modules_with_the_remedy(ranks):
    for messages, same in ranks(2).run(into_plain_modules):
        assert len(messages) == 8 and same
        for message in messages:
            assert "ShardedTensor" in message
            assert "load tutorec.distributed.checkpoint.full_state_dict(sharded_model)" in message
        assert messages[2].startswith("'tables.embedding_bags.t0.weight' is a ShardedTensor")


def test_a_plain_collection_loads_no_numbers_that_a_conversion_changes():
    ebc = collection()
    state = ebc.state_dict()
    name = "embedding_bags.t0.weight"
    with pytest.raises(ValueError, match=f"'{name}' is torch.float32 here and torch.int64 in what"):
        ebc.load_state_dict({**state, name: torch.ones(11, 8, dtype=torch.int64)})
    with pytest.raises(ValueError, match=f"'0.{name}' is torch.float32 here, and 88 of the loaded"):
        nn.Sequential(ebc).load_state_dict(
            {f"0.{key}": value for key, value in state.items()}
            | {f"0.{name}": torch.full((11, 8), 1e300, dtype=torch.float64)}
        )
    ebc.load_state_dict({**state, name: state[name].half()})
    ebc.load_state_dict({**state, name: state[name].double()}, assign=True)
    assert ebc.state_dict()[name].dtype is torch.float64


def other_plan(rank: int, world_size: int) -> str:
    ebc = collection()
    sharded = shard(ebc)
    moved = list(tables_of(sharded))
    # The same tables as if rank 0 and rank 1 had changed places: what is stored there is not what
    # is held here.
    held = {
        table.name: [torch.zeros(table.rows, table.columns, device=device())]
        for table in moved
        if table.shards[0].rank == rank
    }
    state: dict[str, Any] = {
        f"embedding_bags.{name}.weight": value
        for name, value in sharded_state(moved, held, sharded._env, device()).items()
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
        assert "it was saved under another plan; load it under that plan" in message


def assigned(rank: int, world_size: int, kind: str) -> list[bool]:
    ebc = collection()
    state = {name: torch.ones_like(weight) for name, weight in ebc.state_dict().items()}
    sharded = shard(ebc, kind=kind)
    sharded.load_state_dict(state, assign=True)
    features = batch(rank, 3)
    pooled = sharded(features)
    expected = on_rank(collection())
    expected.load_state_dict(state)
    found = [torch.equal(pooled.values(), expected(features).values())]
    before = {name: weight.clone() for name, weight in sharded.named_parameters()}
    pooled.values().sum().backward()
    return [
        *found,
        *(not torch.equal(weight, before[name]) for name, weight in sharded.named_parameters()),
    ]


@pytest.mark.parametrize("kind", ["table_wise", "data_parallel"])
def test_state_loaded_by_assignment_is_looked_up_and_trained(ranks, kind):
    for found in ranks(2).run(assigned, kind=kind):
        assert all(found)


def written_into(rank: int, world_size: int, kernel: str, path: str) -> dict[str, bool]:
    stored, other = (shard(collection(), "exact_adagrad", kernel) for _ in range(2))
    stored(batch(rank, 3)).values().sum().backward()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    # A dense kernel has no state, and torch stores no empty dict.
    states = [
        {
            "rows": each.state_dict(),
            **(each.fused_optimizer.state_dict() if kernel == "fused" else {}),
        }
        for each in (stored, other)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(states[0], checkpoint_id=path)
        # Into the tensors of the state dict: nobody calls load_state_dict.
        checkpoint.load(states[1], checkpoint_id=path)
    wanted, found = ({**local_weights(each), **state_here(each)} for each in (stored, other))
    return {name: torch.equal(value, wanted[name]) for name, value in found.items()}


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_what_is_written_into_a_state_dict_is_in_the_tables_those_of_padded_rows_too(
    ranks, tmp_path, kernel
):
    found = ranks(2).run(written_into, kernel=kernel, path=str(tmp_path))
    for each in found:
        assert all(each.values()), each
    names = {name for each in found for name in each}
    assert names >= {"t0", "t1", "t2"}
    assert (kernel == "dense") or "t2.momentum1" in names


def on_a_part_of_the_ranks(rank: int, world_size: int, kind: str) -> bool:
    parts: list[Any] = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    env = ShardingEnv.from_process_group(parts[rank % 2])
    ebc, empty = collection(), collection()
    empty.load_state_dict(
        {name: torch.zeros_like(weight) for name, weight in ebc.state_dict().items()}
    )
    words = {name: word(kind, index, 2, 2) for index, name in enumerate(ebc.embedding_bags)}
    plan = construct_module_sharding_plan(ebc, words, local_size=2, world_size=2)
    stored, loaded = (
        EmbeddingBagCollectionSharder().shard(each, plan, env) for each in (ebc, empty)
    )
    loaded.load_state_dict(stored.state_dict())
    return torch.equal(loaded(batch(0, 3)).values(), stored(batch(0, 3)).values())


@pytest.mark.world4
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "mixed"])
def test_tables_on_a_part_of_the_ranks_are_stored_and_loaded(ranks, kind):
    assert all(ranks(4).run(on_a_part_of_the_ranks, kind=kind))


def placed(kind: ShardingType, shards: list[TableShard], rows: int = 5, columns: int = 4) -> Table:
    kernel = EmbeddingComputeKernel.FUSED
    return Table(
        "t",
        rows,
        columns,
        torch.float32,
        "sum",
        False,
        ("f",),
        ("f",),
        kind,
        kernel,
        None,
        tuple(shards),
    )


WHOLE = torch.arange(20.0).view(5, 4)
PLANS = {
    "rows on 4 ranks, the last one's empty": placed(
        ShardingType.ROW_WISE, row_wise_shards(5, 4, range(4))
    ),
    "columns, two shards on rank 2": placed(
        ShardingType.COLUMN_WISE, column_wise_shards(5, [1, 2, 1], [2, 0, 2])
    ),
    "a grid of two slices on one host": placed(
        ShardingType.GRID_SHARD, grid_shards(5, [2, 2], [1, 1], 2)
    ),
    "a replicated table": placed(ShardingType.DATA_PARALLEL, data_parallel_shards(5, 4, 4)),
}


def pieces_there_and_back(rank: int, world_size: int) -> dict[str, list[Any]]:
    """For each plan: what a stored state holds here, whether it and the whole table load, and who
    refuses it.
    """
    env, stored = ShardingEnv.from_process_group(group()), on_rank(WHOLE)
    found: dict[str, list[Any]] = {}
    states: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, table in PLANS.items():
            mine = [
                stored[
                    p.row_offset : p.row_offset + p.rows,
                    p.column_offset : p.column_offset + p.columns,
                ].contiguous()
                for p in table.shards
                if p.rank == rank
            ]
            states[name] = sharded_state([table], {"t": mine}, env, device())
            held = [
                local_state([table], loaded, rank).get("t", [])
                for loaded in (states[name], {"t": stored}, {"t": None})
            ]
            same = [
                len(each) == len(mine)
                and all(torch.equal(a, b) for a, b in zip(each, mine, strict=True))
                for each in held[:2]
            ]
            found[name] = [
                type(states[name]["t"]).__name__,
                [list(rows.shape) for rows in mine],
                same,
                held[2],
            ]
        for name, table in PLANS.items():
            refused = []
            for other, state in states.items():
                try:
                    local_state([table], state, rank)
                except ValueError:
                    refused.append(other)
            found[name].append(refused)
    return found


@pytest.mark.world4
def test_several_empty_and_replicated_pieces_are_stored_and_loaded(ranks):
    results = ranks(4, hosts=2).run(pieces_there_and_back)
    rows, columns, grid, replicated = PLANS
    for found in results:
        assert {name: kind for name, (kind, *_) in found.items()} == {
            rows: "ShardedTensor",
            columns: "ShardedTensor",
            grid: "ShardedTensor",
            replicated: "Tensor",
        }
        assert all(
            same == [True, True] and absent == [] for _, _, same, absent, _ in found.values()
        )
        # A replicated table's rows are a plain tensor, which every plan can take its part of.
        assert all(replicated not in refused for *_, refused in found.values())
        assert found[replicated][-1] == [rows, columns, grid]
    assert [found[rows][1] for found in results] == [[[2, 4]], [[2, 4]], [[1, 4]], [[0, 4]]]
    assert [found[columns][1] for found in results] == [[[5, 2]], [], [[5, 1], [5, 1]], []]
    assert [found[grid][1] for found in results] == [[], [], [[3, 2], [3, 2]], [[2, 2], [2, 2]]]
    # A plan under which a rank holds nothing has nothing to refuse there.
    assert [found[columns][-1] for found in results] == [[rows, grid], [], [rows, grid], []]


def test_what_is_no_tensor_is_refused_with_the_table():
    table = placed(ShardingType.ROW_WISE, row_wise_shards(5, 4, range(1)))
    with pytest.raises(TypeError, match=r"table 't'.*not"):
        local_state([table], {"t": [1, 2]}, 0)


def test_without_a_group_a_table_that_is_cut_up_is_put_together():
    env = ShardingEnv.from_local(world_size=1, rank=0)
    for kind, shards in (
        (ShardingType.COLUMN_WISE, column_wise_shards(5, [1, 2, 1], [0, 0, 0])),
        (ShardingType.ROW_WISE, row_wise_shards(5, 4, [0])),
        (ShardingType.GRID_SHARD, grid_shards(5, [2, 2], [0, 0], 1)),
        (ShardingType.DATA_PARALLEL, data_parallel_shards(5, 4, 1)),
    ):
        table = placed(kind, shards)
        held = local_state([table], {"t": WHOLE}, 0)
        state = sharded_state([table], held, env, WHOLE.device)
        assert type(state["t"]) is torch.Tensor
        assert torch.equal(state["t"], WHOLE)
        # One shard is live, as of an unsharded module.
        assert (state["t"].data_ptr() == WHOLE.data_ptr()) == (len(shards) == 1)
