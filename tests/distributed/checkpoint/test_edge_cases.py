"""Uses of checkpoints that are unusual and allowed, and some that are nonsense: one process, small
models.
"""

from __future__ import annotations

import pytest
import torch
from distributed.cases import group, on_rank
from torch import nn

from tutorec.distributed.checkpoint import (
    full_state_dict,
    load_checkpoint,
    read_info,
    read_state_dict,
    save_checkpoint,
)
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from tutorec.errors import CheckpointError
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.keyed import KeyedOptimizerWrapper
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@pytest.mark.parametrize("name", ["position", "extra"])
@pytest.mark.parametrize(
    "value", [{2: "a", 10: "b"}, {1: "a", "b": 2}, {"shards": [{3: 1}]}, {None: 1}]
)
def test_keys_that_json_would_turn_into_text_are_refused(tmp_path, name, value):
    with pytest.raises(
        CheckpointError,
        match=rf"{name} cannot be stored as JSON \(.* is a key\).*dicts with text as keys",
    ):
        save_checkpoint(tmp_path / "model", nn.Linear(2, 1), **{name: value})
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_checkpoint_is_saved_through_again_and_again(tmp_path):
    save_checkpoint(tmp_path / "real", nn.Linear(2, 1), step=0)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "early").symlink_to(tmp_path / "later")
    for step in (1, 2, 3):
        for name, place in (("link", "real"), ("early", "later")):
            save_checkpoint(tmp_path / name, nn.Linear(2, 1), step=step)
            assert read_info(tmp_path / name).step == read_info(tmp_path / place).step == step
    assert sorted(each.name for each in tmp_path.iterdir()) == ["early", "later", "link", "real"]


class Empties(nn.Module):
    """Tensors without numbers, and one with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", torch.empty(0, dtype=torch.int64))
        self.register_buffer("flat", torch.empty(3, 0))
        self.weight = nn.Parameter(torch.randn(4, 3).t())


class Kept(nn.Module):
    """A buffer of any dtype."""

    def __init__(self, numbers: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("numbers", numbers)


CHANGED = {
    (torch.int64, torch.int8): 300,
    (torch.int32, torch.uint32): -1,
    (torch.int16, torch.float32): 3,
    (torch.bool, torch.int64): True,
    (torch.float16, torch.int64): float("inf"),
    (torch.float32, torch.bool): 0.5,
    (torch.float32, torch.complex64): 0.5,
    (torch.complex64, torch.float32): 1 + 2j,
}


@pytest.mark.parametrize(("stored", "here"), CHANGED)
def test_a_dtype_that_would_change_numbers_is_refused(tmp_path, stored, here):
    save_checkpoint(tmp_path / "a", Kept(torch.tensor([CHANGED[stored, here]], dtype=stored)))
    model = Kept(torch.ones(1).to(here))
    message = (
        rf"'model.numbers' is {here} here and {stored} in what is loaded, and a conversion can"
    )
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "a", model)
    assert bool((model.numbers == torch.ones(1).to(here)).all())
    # The two remedies of the message.
    read = read_state_dict(tmp_path / "a")["model"]
    numbers = read["numbers"].real if stored.is_complex else read["numbers"]
    model.load_state_dict({"numbers": numbers.to(here)})
    load_checkpoint(tmp_path / "a", Kept(torch.ones(1).to(stored)))


WIDER = [
    (torch.uint8, torch.int16),
    (torch.int8, torch.int64),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.complex64, torch.complex128),
    (torch.float32, torch.bfloat16),  # rounds
    (torch.float64, torch.float32),  # rounds
]


@pytest.mark.parametrize(("stored", "here"), WIDER)
def test_wider_numbers_and_rounded_floats_are_loaded(tmp_path, stored, here):
    numbers = torch.tensor([100.0, 0.1, 3]).to(stored)
    save_checkpoint(tmp_path / "a", Kept(numbers))
    model = Kept(torch.zeros(3).to(here))
    load_checkpoint(tmp_path / "a", model)
    assert torch.equal(model.numbers, numbers.to(here))


@pytest.mark.parametrize(
    ("stored", "here"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float8_e4m3fn),
        (torch.complex128, torch.complex64),
    ],
)
def test_a_number_that_would_be_infinite_is_refused_before_anything_is_loaded(
    tmp_path, stored, here
):
    large = 1e300 if stored in (torch.float64, torch.complex128) else 1e6
    numbers = torch.tensor([[1.0, float("inf")], [large, 2.0]], dtype=torch.float64).to(stored)
    model = nn.Sequential(nn.Linear(2, 2), Kept(numbers))
    save_checkpoint(tmp_path / "a", model)
    other = nn.Sequential(nn.Linear(2, 2), Kept(torch.zeros(2, 2).to(here)))
    before = other[0].weight.detach().clone()
    with pytest.raises(
        CheckpointError,
        match=rf"'model.1.numbers' is {here} here, and 1 of the loaded numbers does not fit: ",
    ):
        load_checkpoint(tmp_path / "a", other)
    assert torch.equal(other[0].weight, before)
    if here is not torch.float8_e4m3fn:  # which has no infinity
        model[1].numbers[1, 0] = 3.0
        save_checkpoint(tmp_path / "a", model)
        load_checkpoint(tmp_path / "a", other)
        assert torch.equal(other[1].numbers, model[1].numbers.to(here))


def test_a_single_number_of_another_kind_is_loaded_if_it_fits(tmp_path):
    save_checkpoint(tmp_path / "a", Kept(torch.tensor(7.0)))
    model = Kept(torch.tensor(0))
    load_checkpoint(tmp_path / "a", model)
    assert int(model.numbers) == 7
    save_checkpoint(tmp_path / "a", Kept(torch.tensor(7.5)))
    with pytest.raises(CheckpointError, match=r"torch.int64.*1.*not.*7.5"):
        load_checkpoint(tmp_path / "a", model)


def test_optimizer_state_is_not_converted_to_another_kind(tmp_path):
    layer = nn.Linear(2, 1)
    optimizer = KeyedOptimizerWrapper(dict(layer.named_parameters()), torch.optim.Adagrad)
    optimizer.state[layer.weight]["sum"] = torch.full((1, 2), 1e6)
    save_checkpoint(tmp_path / "a", layer, optimizer)
    optimizer.state[layer.weight]["sum"] = torch.zeros(1, 2, dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"weight.sum'.*torch.float16.*1000000.0"):
        load_checkpoint(tmp_path / "a", layer, optimizer)
    optimizer.state[layer.weight]["sum"] = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"weight.sum'.*torch.int32.*torch.fl"):
        load_checkpoint(tmp_path / "a", layer, optimizer)


def test_tensors_without_numbers_are_kept(tmp_path):
    first, second = Empties(), Empties()
    save_checkpoint(tmp_path / "model", first)
    load_checkpoint(tmp_path / "model", second)
    stored = read_state_dict(tmp_path / "model")["model"]
    assert torch.equal(first.weight, second.weight)
    assert {name: (value.shape, value.dtype) for name, value in stored.items()} == {
        name: (value.shape, value.dtype) for name, value in first.state_dict().items()
    }
    with pytest.raises(CheckpointError, match=r"'model.none'.*\[2\].*\[0\]"):
        other = Empties()
        other.none = torch.zeros(2, dtype=torch.int64)
        load_checkpoint(tmp_path / "model", other)


def sparse() -> nn.Module:
    layer = nn.Linear(2, 1)
    layer.register_buffer("eye", torch.eye(2).to_sparse())
    return layer


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: nn.Linear(2, 1, device="meta"), "weight"),
        (lambda: nn.LazyLinear(1), "weight"),
        (sparse, "eye"),
    ],
)
def test_a_model_without_numbers_is_refused_by_name(tmp_path, model, name):
    save_checkpoint(tmp_path / "whole", nn.Linear(2, 1))
    message = f"'{name}' of the model has no size yet, is on the meta device, or is sparse"
    for use in (
        lambda: save_checkpoint(tmp_path / "model", model()),
        lambda: load_checkpoint(tmp_path / "whole", model()),
        lambda: full_state_dict(model()),
    ):
        with pytest.raises(CheckpointError, match=message):
            use()
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("name", ["file", "file/below", "a" * 300])
def test_a_path_that_cannot_be_read_is_not_called_damaged(tmp_path, name):
    (tmp_path / "file").write_text("x")
    for use in (read_info, read_state_dict, lambda path: load_checkpoint(path, nn.Linear(2, 1))):
        with pytest.raises(CheckpointError, match=r"manifest.json cannot be read \(.*load another"):
            use(tmp_path / name)


def one_row(optimizer: type[torch.optim.Optimizer]) -> DistributedModelParallel:
    """A table of one row over all ranks: all but one hold a piece without rows."""
    table = EmbeddingBagConfig(num_embeddings=1, embedding_dim=8, name="one", feature_names=["f"])
    tables = EmbeddingBagCollection([table])
    apply_optimizer_in_backward(optimizer, tables.parameters(), {"lr": 0.1})
    env = ShardingEnv.from_process_group(group())
    plan = construct_module_sharding_plan(tables, {"one": row_wise()}, local_size=env.local_size)
    return DistributedModelParallel(tables, plan=ShardingPlan({"": plan}))


def saved_and_loaded(path: str, optimizer: type[torch.optim.Optimizer]) -> None:
    model = one_row(optimizer)
    ids = KeyedJaggedTensor(["f"], torch.zeros(2, dtype=torch.int64), lengths=torch.tensor([1, 1]))
    model(on_rank(ids)).values().square().sum().backward()
    save_checkpoint(path, model)
    again = one_row(optimizer)
    load_checkpoint(path, again)
    save_checkpoint(f"{path}-again", again)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_more_ranks_than_rows(ranks, tmp_path, optimizer):
    ranks(2).run(saved_and_loaded, str(tmp_path / "model"), optimizer)
    first, again = read_state_dict(tmp_path / "model"), read_state_dict(tmp_path / "model-again")
    assert torch.equal(
        first["model"]["embedding_bags.one.weight"], again["model"]["embedding_bags.one.weight"]
    )
    (states,), (kept,) = first["optimizer"]["state"].values(), again["optimizer"]["state"].values()
    assert states["one.momentum1"].abs().sum() > 0
    assert all(torch.equal(value, kept[name]) for name, value in states.items())
