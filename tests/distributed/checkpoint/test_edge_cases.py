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


def test_tensors_without_numbers_are_kept(tmp_path):
    first, second = Empties(), Empties()
    save_checkpoint(tmp_path / "model", first)
    load_checkpoint(tmp_path / "model", second)
    stored = read_state_dict(tmp_path / "model")["model"]
    assert torch.equal(first.weight, second.weight)
    assert {name: (value.shape, value.dtype) for name, value in stored.items()} == {
        name: (value.shape, value.dtype) for name, value in first.state_dict().items()
    }
    with pytest.raises(
        CheckpointError, match=r"'model.none' is \[2\] here and \[0\] in the checkpoint"
    ):
        other = Empties()
        other.none = torch.zeros(2, dtype=torch.int64)
        load_checkpoint(tmp_path / "model", other)


def sparse() -> nn.Module:
    layer = nn.Linear(2, 1)
    layer.register_buffer("eye", torch.eye(2).to_sparse())
    return layer


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(2, 1, device="meta"), "'weight' of the model is on the meta device"),
        (lambda: nn.LazyLinear(1), "'weight' of the model has no size yet"),
        (sparse, "'eye' of the model is sparse"),
    ],
)
def test_a_model_without_numbers_is_refused_by_name(tmp_path, model, words):
    save_checkpoint(tmp_path / "whole", nn.Linear(2, 1))
    for use in (
        lambda: save_checkpoint(tmp_path / "model", model()),
        lambda: load_checkpoint(tmp_path / "whole", model()),
        lambda: full_state_dict(model()),
    ):
        with pytest.raises(CheckpointError, match=words):
            use()
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


@pytest.mark.parametrize("name", ["file", "file/below", "a" * 300])
def test_a_path_that_cannot_be_read_is_not_called_damaged(tmp_path, name):
    (tmp_path / "file").write_text("x")
    for use in (read_info, read_state_dict, lambda path: load_checkpoint(path, nn.Linear(2, 1))):
        with pytest.raises(
            CheckpointError, match=r"manifest.json cannot be read \(.*\): load another checkpoint"
        ):
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
