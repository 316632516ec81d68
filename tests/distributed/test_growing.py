"""Growing tables over several ranks: rows and values equal the unsharded ones, whatever the number
of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed.cases import group
from modules.test_growing import stream
from process_memory import measurable, peak_during, resident
from torch import Tensor

from tutorec._kernels.memory import is_all_zero
from tutorec.distributed.checkpoint import load_checkpoint, save_checkpoint
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.modules.changed_rows import changed_rows
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.growing import GrowingManagedCollisionModule
from tutorec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks, device

ROWS, COLUMNS, SAMPLES, STEPS = 256, 4, 24, 12


def unsharded(
    rows: int = ROWS, columns: int = COLUMNS, optimizer: Any = torch.optim.Adagrad
) -> ManagedCollisionEmbeddingBagCollection:
    def filled(weight: Tensor) -> Tensor:
        return weight.fill_(0.25)

    tables = [
        EmbeddingBagConfig(
            rows, columns, "t", feature_names=["a", "b"], init_fn=filled, use_virtual_table=True
        )
    ]
    growing = GrowingManagedCollisionModule(
        rows, device(), admit_after=2, eviction_interval=3, buckets=8
    )
    collection = EmbeddingBagCollection(tables, device=device())
    apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": 0.5})
    return ManagedCollisionEmbeddingBagCollection(
        collection, ManagedCollisionCollection({"t": growing}, tables), True
    )


def sharded(kind: str, *made: Any) -> Any:
    env, module = ShardingEnv.from_process_group(group()), unsharded(*made)
    sharder = ManagedCollisionEmbeddingBagCollectionSharder()
    words = {"row_wise": row_wise(), "table_wise": table_wise(env.world_size - 1)}[kind]
    plan = construct_module_sharding_plan(module, {"t": words}, sharder, env.local_size)
    return sharder.shard(module, plan, env)


def batches(steps: int) -> list[Tensor]:
    """Of each step the ids of four ranks [4, 2 * SAMPLES]."""
    return [ids.view(4, -1) for ids in stream(batches=steps, size=8 * SAMPLES, ids=600)]


def step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Look up ids of several ranks [r, 2 * SAMPLES], and train -> pooled rows and rows, in the
    order of samples.
    """
    ids = ids.view(-1, 2, SAMPLES).transpose(0, 1).reshape(-1)
    batch = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    pooled, rows = model(batch.to(device()))
    values, rows = pooled.values(), rows.values()
    if model.training:
        (values * torch.linspace(-1, 1, values.shape[1], device=values.device)).sum().backward()
    return values.detach().cpu(), rows.view(2, -1).T.reshape(-1).cpu()


def mine(ids: Tensor) -> Tensor:
    """The ids of this rank."""
    return ids.chunk(group().size())[group().rank()]


def trained(kind: str, folder: str = "") -> list[Any]:
    model = sharded(kind)
    seen: list[Any] = [step(model, mine(ids)) for ids in batches(STEPS)]
    if folder:
        save_checkpoint(folder, model)
    return [*seen, changed_rows(model, STEPS - 3)]


def loaded(kind: str, folder: str) -> list[Any]:
    model = sharded(kind).eval()
    load_checkpoint(folder, model)
    return [step(model, mine(ids)) for ids in batches(3)]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_rows_are_those_of_one_process(ranks: Any, kind: str, world: int) -> None:
    of_ranks = ranks(world).run(trained, kind)
    model = unsharded()
    for number, ids in enumerate(batches(STEPS)):
        _, rows = step(model, ids)
        assert torch.cat([seen[number][1] for seen in of_ranks]).tolist() == rows.tolist()
    version, changes = changed_rows(model, STEPS - 3)
    found: dict[int, tuple[int, bool]] = {}
    for *_, (of_rank, exported) in of_ranks:
        if "t" in exported:
            assert of_rank == version
            part = exported["t"]
            found |= dict(
                zip(
                    part.rows.tolist(),
                    zip(part.ids.tolist(), part.shared.tolist(), strict=True),
                    strict=True,
                )
            )
    whole = changes["t"]
    assert found == dict(
        zip(
            whole.rows.tolist(),
            zip(whole.ids.tolist(), whole.shared.tolist(), strict=True),
            strict=True,
        )
    )


@pytest.mark.parametrize(("saved", "loading"), [(2, 4), (4, 2)])
def test_a_checkpoint_is_loaded_by_other_numbers_of_ranks(
    ranks: Any, tmp_path: Any, saved: int, loading: int
) -> None:
    folder = str(tmp_path / "saved")
    ranks(saved).run(trained, "row_wise", folder)
    by_others = ranks(loading).run(loaded, "row_wise", folder)
    by_same = ranks(saved).run(loaded, "row_wise", folder)
    for number in range(3):
        for part in range(2):
            expected = torch.cat([seen[number][part] for seen in by_same])
            torch.testing.assert_close(
                torch.cat([seen[number][part] for seen in by_others]), expected
            )


def unused_rows() -> tuple[bool, bool]:
    """Whether rows not in use, and their optimizer state, are as they were made."""
    model = sharded("row_wise", 1 << 18)
    for ids in batches(2):
        step(model, ids[group().rank() : group().rank() + 1])
    [held] = model._embedding_module.local_shards()
    weight = held.rows[0]
    [state] = [
        value
        for optimizer in weight._in_backward_optimizers
        for value in optimizer.state[weight].values()
        if value.shape == weight.shape
    ]
    bucket = weight.view(4, -1, COLUMNS)
    of_state = state.view(4, -1, COLUMNS)
    used = bool((bucket[:, 0] != 0).all() and (of_state[:, 0] != 0).all())
    return used, is_all_zero(bucket[:, 1000:-1].reshape(-1, 1)) and is_all_zero(
        of_state[:, 1000:-1].reshape(-1, 1)
    )


def test_rows_not_in_use_are_not_written(ranks: Any) -> None:
    assert ranks(2).run(unused_rows) == [(True, True)] * 2


def peak_per_row(rank: int, world_size: int, rows: int) -> float:
    """Bytes that training takes on this rank for each row in use, with room for a million."""
    torch.set_num_threads(1)

    def grow(rows: int) -> Any:
        # not torch's Adagrad, which writes the state of every row when it is made
        model = sharded("row_wise", 2_000_000, 64, RowWiseAdagrad)
        draw = torch.Generator().manual_seed(rank)
        for _ in range(rows // world_size // (40 * SAMPLES)):
            ids = torch.randint(-(2**63), 2**63 - 1, (20, 2 * SAMPLES), generator=draw)
            for _ in range(2):  # an id gets its row when it is seen again
                step(model, ids)
        return model

    kept = [grow(rows // 10)]
    kept.clear()
    before = resident()
    peak = peak_during(lambda: kept.append(grow(rows)))
    [growing] = (
        part for part in kept[0].modules() if isinstance(part, GrowingManagedCollisionModule)
    )
    return (peak - before) / growing.report("t").occupied


@pytest.mark.slow
@pytest.mark.skipif(not measurable(), reason="reads and resets the peak in /proc, which Linux has")
def test_memory_of_each_rank_follows_its_rows_in_use(monkeypatch: Any) -> None:
    # else torch keeps a record of the last 2,000 collectives, 2.7 MB on a rank
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with Ranks(2) as world:
        found = world.run(peak_per_row, rows=384_000)  # soon after the index has doubled
    assert max(found) <= 1.3 * (64 * 4 + 4)
