"""What is done with a sharded model besides training it: looked at without memory, asked for
attributes, frozen.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from distributed.cases import batch, collection, local_weights, shard
from distributed.test_model_parallel import Model, data, parallel
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from tutorec.distributed import model_parallel, sharding_plan
from tutorec.distributed.types import ShardedTensor
from tutorec.errors import AgreementError


def test_default_sharders_are_found_where_torchrec_has_them():
    assert model_parallel.get_default_sharders is sharding_plan.get_default_sharders
    kinds = sharding_plan.get_module_to_default_sharders()
    assert [sharder.module_type for sharder in sharding_plan.get_default_sharders()] == list(kinds)


def shapes_only(rank: int, world_size: int) -> dict[str, Any]:
    model = parallel(Model(), world_size)
    ghost = parallel(Model(), world_size, device=torch.device("meta"))

    def sizes(state: dict[str, Any]) -> dict[str, Any]:
        return {
            name: [shard.tensor.shape for shard in value.local_shards()]
            if isinstance(value, ShardedTensor)
            else value.shape
            for name, value in state.items()
        }

    with pytest.raises(ValueError, match=r"tables.*device=torch.device\('cpu'\)"):
        ghost(*data(rank, 0))
    return {
        "same": sizes(model.state_dict()) == sizes(ghost.state_dict()),
        "tables": {
            p.device.type for name, p in ghost.named_parameters() if "embedding_bags" in name
        },
        "dense on meta": ghost.module.get_parameter("over.weight").is_meta,
    }


def test_on_the_meta_device_a_model_has_the_shapes_of_the_real_one_and_looks_nothing_up(ranks):
    for found in ranks(2).run(shapes_only):
        assert found == {"same": True, "tables": {"meta"}, "dense on meta": False}


def attributes(rank: int, world_size: int) -> dict[str, Any]:
    model, other = parallel(Model(), world_size), parallel(Model(seed=6), world_size)
    model(*data(rank, 0)).backward()
    with pytest.raises(AttributeError, match=r"no 'sparse'.*write \.module\.sparse"):
        _ = model.sparse
    with pytest.raises(AttributeError, match="no attribute 'spares'"):
        _ = model.spares
    with pytest.raises(AttributeError, match=r"get_model_state_dict.*call state_dict\(\)"):
        get_model_state_dict(model)
    other.load_state_dict(model.state_dict())
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    return {name: torch.equal(one, two) for (name, one), (_, two) in pairs}


def test_an_attribute_of_the_model_inside_is_named_and_what_torchs_helpers_want_is_state_dict(
    ranks,
):
    for found in ranks(2).run(attributes):
        assert all(found.values()), found


def frozen(rank: int, world_size: int, kind: str, kernel: str, when: str) -> dict[str, Any]:
    ebc = collection()
    if when == "before":
        ebc.embedding_bags["t0"].requires_grad_(requires_grad=False)
    sharded = shard(ebc, kernel=kernel, kind=kind)
    if when == "after":
        sharded.embedding_bags["t0"].requires_grad_(requires_grad=False)
    before = local_weights(sharded)
    with torch.no_grad():
        quiet = sharded(batch(rank, 3)).values()
    assert not quiet.requires_grad
    said = ""
    try:
        pooled = sharded(batch(rank, 3)).values()
        assert torch.equal(pooled, quiet)
        pooled.sum().backward()
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        optimizer.step()
    except ValueError as error:
        said = str(error)
    after = local_weights(sharded)
    return {
        "said": said,
        "moved": sorted(
            name for name, rows in after.items() if not torch.equal(rows, before[name])
        ),
    }


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_a_frozen_table_with_the_dense_kernel_stays_and_the_others_train(ranks, kind, when):
    """Also where a rank holds nothing but the frozen one: its part of the exchanges of backward is
    made.
    """
    found = ranks(2).run(frozen, kind=kind, kernel="dense", when=when)
    assert [each["said"] for each in found] == ["", ""]
    assert {name for each in found for name in each["moved"]} == {"t1", "t2"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_a_frozen_table_with_the_fused_kernel_is_looked_up_and_refused_where_backward_would_move_it(
    ranks, kind, when
):
    for found in ranks(2).run(frozen, kind=kind, kernel="fused", when=when):
        assert "'embedding_bags.t0.weight' is frozen" in found["said"]
        assert (
            "under torch.no_grad(), or shard the table with compute_kernel='dense'" in found["said"]
        )
        assert found["moved"] == []


def exchanged(rank: int, world_size: int, kind: str) -> str:
    sharded = shard(collection(), kind=kind)
    sharded(batch(rank, 3)).values().sum().backward()
    for parameter in sharded.parameters():
        parameter.data = torch.ones_like(parameter)
    try:
        sharded(batch(rank, 3)).values()
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_rows_given_in_other_memory_are_not_passed_over(ranks, kind):
    for said in ranks(2).run(exchanged, kind=kind):
        assert "was given other memory (.data = ...)" in said
        assert "parameter.copy_(rows)" in said


def functionally(rank: int, world_size: int, kind: str, kernel: str) -> tuple[list[str], bool]:
    sharded, messages = shard(collection(), kernel=kernel, kind=kind), []
    own = dict(sharded.named_parameters())
    expected = sharded(batch(rank, 3)).values()
    for other in (torch.zeros_like, lambda rows: nn.Parameter(torch.zeros_like(rows))):
        try:
            given = {name: other(rows) for name, rows in own.items()}
            torch.func.functional_call(sharded, given, (batch(rank, 3),))
            messages.append("called")
        except ValueError as error:
            messages.append(str(error))
    copied = copy.deepcopy(dict(sharded.embedding_bags.named_parameters()))
    same = torch.func.functional_call(sharded, own, (batch(rank, 3),)).values()
    return messages, torch.equal(same, expected) and len(copied) == len(own)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("row_wise", "fused"), ("column_wise", "dense"), ("data_parallel", "dense")],
)
def test_rows_given_to_a_functional_call_are_not_passed_over(ranks, kind, kernel):
    for messages, same in ranks(2).run(functionally, kind=kind, kernel=kernel):
        assert same
        for said in messages:
            assert "'weight' of the sharded table 't0' cannot be exchanged" in said
            assert "torch.func.functional_call" in said
            assert "parameter.copy_(rows)" in said


def compiled(rank: int, world_size: int) -> dict[str, bool]:
    model, plain = parallel(Model(), world_size), parallel(Model(), world_size)
    called = torch.compile(model, backend="eager")
    for step in range(3):
        assert torch.equal(called(*data(rank, step)), plain(*data(rank, step)))
        called(*data(rank, step)).backward()
        plain(*data(rank, step)).backward()
    trained = zip(model.parameters(), plain.parameters(), strict=True)
    sharded = shard(collection())
    alone = torch.compile(sharded, backend="eager")(batch(rank, 3))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="compile the dense layers"):
        torch.compile(sharded, backend="eager", fullgraph=True)(batch(rank, 3))
    return {
        "trained": all(torch.equal(one, other) for one, other in trained),
        "alone": torch.equal(alone.values(), sharded(batch(rank, 3)).values()),
    }


def test_a_compiled_model_calls_its_sharded_collections_outside_of_the_graphs(ranks):
    for found in ranks(2).run(compiled):
        assert found == {"trained": True, "alone": True}


def freezing_differs(rank: int, world_size: int) -> str:
    ebc = collection()
    ebc.embedding_bags["t1"].requires_grad_(requires_grad=rank == 0)
    try:
        shard(ebc)
    except AgreementError as error:
        return str(error)
    return "nothing"


def test_ranks_that_freeze_other_tables_are_told(ranks):
    for said in ranks(2).run(freezing_differs):
        assert "table 't1': requires_grad" in said


def weight_shapes(rank: int, world_size: int) -> dict[str, list[int]]:
    sharded = shard(collection(), kind="table_wise")
    held = {name.split(".")[-2] for name, _ in sharded.named_parameters()}
    shapes = {name: list(bag.weight.shape) for name, bag in sharded.embedding_bags.items()}
    assert held == {name for name, shape in shapes.items() if shape != [0]} < set(shapes)
    return shapes


def test_a_table_on_other_ranks_shows_an_empty_weight_that_is_no_parameter(ranks):
    one, other = ranks(2).run(weight_shapes)
    for name, shape in one.items():
        assert ([0] in (shape, other[name])) and shape != other[name], (name, shape, other[name])
