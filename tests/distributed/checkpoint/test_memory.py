"""Saving and loading hold a few blocks beside the model, however large a shard is."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from distributed.cases import group
from process_memory import peak_during, resident
from torch import nn

from tutorec.distributed.checkpoint import entries, load_checkpoint, save_checkpoint
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
)
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd import Ranks

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs the /proc of Linux"
)

MIB = 2**20
COLUMNS = 64


def model_of(rows: int, word: ParameterShardingGenerator) -> nn.Module:
    config = EmbeddingBagConfig(rows, COLUMNS, "t", feature_names=["f"])
    ebc = EmbeddingBagCollection([config], device=torch.device("meta"))
    env = ShardingEnv.from_process_group(group())
    plan = construct_module_sharding_plan(ebc, {"t": word}, local_size=env.local_size)
    return EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad"}).shard(
        ebc, plan, env
    )


def growth(path: str, rank: int, rows: int, block_bytes: int) -> dict[str, int]:
    """Bytes by which a save and a load under another plan raise the memory of a rank that holds the
    model.
    """
    entries.BLOCK_BYTES = block_bytes
    found: dict[str, int] = {}
    for size, name in ((1000, f"{path}/small"), (rows, f"{path}/large")):  # The first warms up.
        model = model_of(size, row_wise())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank + 1)
        before = resident()
        found["save"] = peak_during(lambda m=model, n=name: save_checkpoint(n, m)) - before
        del model
        gc.collect()
        model = model_of(size, column_wise(ranks=[1, 0]))
        before = resident()
        found["load"] = peak_during(lambda m=model, n=name: load_checkpoint(n, m)) - before
        [weight] = [parameter.detach() for parameter in model.parameters()]
        assert bool((weight[: size // 2] == 1).all()), "rank 0's rows"
        assert bool((weight[size // 2 :] == 2).all()), "rank 1's rows"
        found["shard"] = weight.numel() * weight.element_size()
        del model, weight
        gc.collect()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("block", "most"), [(4 * MIB, 40 * MIB), (512 * MIB, None)])
def test_saving_and_loading_take_a_few_blocks(tmp_path, block, most):
    with Ranks(2, timeout=120, backend="gloo") as world:
        results = world.run(lambda rank: growth(str(tmp_path), rank, 600_000, block))
    for found in results:
        assert found["shard"] > 70 * MIB
        if most is None:  # What would be seen if a shard were one block.
            assert found["load"] > 0.6 * found["shard"] > 40 * MIB
        else:
            assert found["save"] < most, found
            assert found["load"] < most, found
    assert entries.BLOCK_BYTES == 4 * MIB
