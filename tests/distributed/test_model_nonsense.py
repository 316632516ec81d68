"""Arguments of another kind than DistributedModelParallel asks for: an error that says which, before anything moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tutorec.distributed.data_parallel import DefaultDataParallelWrapper
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

ALONE = ShardingEnv.from_local(1, 0)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "got a NoneType"),
        ("model", "got a str"),
        (nn.Linear, "got the class Linear"),
        ([nn.Linear(1, 1)], "list"),
    ],
)
def test_what_is_no_model_is_refused_with_and_without_ranks(model: Any, said: str) -> None:
    for env in (None, ALONE):
        with pytest.raises(TypeError, match=rf"shards a torch.nn.Module, .*{said}: pass the model"):
            DistributedModelParallel(model, env)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": "x"}, r"env is a str and no ShardingEnv: ShardingEnv.from_process_group\(group\)"),
        ({"env": ShardingEnv}, "env is the class ShardingEnv"),
        ({"env": dist.ProcessGroup(0, 1)}, "env is a ProcessGroup and no ShardingEnv: ShardingEnv.from_process_group"),
        ({"sharders": EmbeddingBagCollectionSharder()}, "sharders is a EmbeddingBagCollectionSharder: pass a list"),
        ({"sharders": [EmbeddingBagCollectionSharder]}, "sharders holds the class EmbeddingBagCollectionSharder"),
        ({"sharders": "x"}, "sharders holds a str and no ModuleSharder"),
        ({"data_parallel_wrapper": DefaultDataParallelWrapper}, "is the class DefaultDataParallelWrapper"),
        ({"data_parallel_wrapper": "ddp"}, "is a str and no DataParallelWrapper"),
    ],
)
def test_other_arguments_are_of_their_kind(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        DistributedModelParallel(nn.Linear(1, 1), **{"env": ALONE, **options})


@pytest.mark.parametrize("given", [None, "x", [1], {1: torch.ones(1)}])
def test_what_is_no_state_dict_is_refused(given: Any) -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, name="t", feature_names=["f"])])
    model = DistributedModelParallel(nn.Sequential(ebc), ALONE)
    with pytest.raises(TypeError, match=r"what is loaded is a \w+: pass a dict from names to tensors, as state_dict"):
        model.load_state_dict(given)
