"""Managed collisions over several ranks: rows, values and state equal those of one mapping for each
row range.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import group
from torch import Tensor, nn
from torch.testing import assert_close

from tutorec.distributed.checkpoint import full_state_dict, load_checkpoint, save_checkpoint
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from tutorec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from tutorec.distributed.state.sharded_tensor import ShardedTensor
from tutorec.distributed.traffic import count_traffic
from tutorec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from tutorec.errors import RankError
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule
from tutorec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tutorec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

IDS = 4000  # raw ids are below this
ROWS = {"t0": 12, "t1": 10}
FEATURES = {"t0": ["a", "b"], "t1": ["c"]}
RATE, NEW_ROW, STEPS = 0.5, 0.25, 6
KINDS = ("row_wise", "table_wise", "table_row_wise")


def new_rows(weight: Tensor) -> Tensor:
    return weight.fill_(NEW_ROW)


def configs(pooled: bool) -> list[Any]:
    if pooled:
        poolings = {"t0": PoolingType.SUM, "t1": PoolingType.MEAN}
        return [
            EmbeddingBagConfig(
                ROWS[t], 4, t, feature_names=FEATURES[t], pooling=poolings[t], init_fn=new_rows
            )
            for t in ROWS
        ]
    return [
        EmbeddingConfig(ROWS[t], 4, t, feature_names=FEATURES[t], init_fn=new_rows) for t in ROWS
    ]


def mapping(
    rows: int, first: int = 0, where: torch.device | None = None
) -> MCHManagedCollisionModule:
    policy = LFU_EvictionPolicy()
    return MCHManagedCollisionModule(
        rows,
        where or device(),
        policy,
        2,
        IDS,
        output_global_offset=first,
        output_segments=[first, first + rows],
    )


def unsharded(pooled: bool, returned: bool = True, in_place: bool = False) -> Any:
    tables = configs(pooled)
    mappings = ManagedCollisionCollection({t: mapping(ROWS[t]) for t in ROWS}, tables)
    if pooled:
        return ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables, device=device()), mappings, returned, in_place
        )
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables, device=device()), mappings, returned, in_place
    )


def sharder_of(pooled: bool, use_index_dedup: bool = False, **params: Any) -> Any:
    params = {"optimizer": "exact_sgd", "learning_rate": RATE, **params}
    if use_index_dedup:
        return ManagedCollisionEmbeddingCollectionSharder(
            EmbeddingCollectionSharder(params, use_index_dedup=True)
        )
    kind = (
        ManagedCollisionEmbeddingBagCollectionSharder
        if pooled
        else ManagedCollisionEmbeddingCollectionSharder
    )
    return kind(fused_params=params)


def sharded(
    pooled: bool, kind: str, module: Any = None, kernel: str = "fused", **params: Any
) -> Any:
    env = ShardingEnv.from_process_group(group())
    module = unsharded(pooled) if module is None else module
    last = env.world_size - 1
    words = {
        "row_wise": lambda index: row_wise(compute_kernel=kernel),
        "table_wise": lambda index: table_wise(
            (last - index) % env.world_size, compute_kernel=kernel
        ),
        "table_row_wise": lambda index: table_row_wise(0, compute_kernel=kernel),
    }[kind]
    sharder = sharder_of(pooled, **params)
    plan = construct_module_sharding_plan(
        module, {t: words(i) for i, t in enumerate(ROWS)}, sharder, env.local_size
    )
    return sharder.shard(module, plan, env)


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    """Lists of 0 to 3 raw ids of three samples; some ids come again and again, the others once."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (9,), generator=draw)
    often = torch.randint(0, 8, (int(lengths.sum()),), generator=draw) * 499
    seldom = torch.randint(0, IDS, often.shape, generator=draw)
    values = torch.where(torch.rand(often.shape, generator=draw) < 0.7, often, seldom)
    return KeyedJaggedTensor(["c", "a", "b"], values, lengths=lengths)


def results(pooled: bool, out: Any) -> dict[str, Tensor]:
    return {key: (out[key] if pooled else out[key].values()).cpu() for key in ("a", "b", "c")}


def loss_of(found: dict[str, Tensor]) -> Tensor:
    return sum(((1 + i) * rows.sum() for i, rows in enumerate(found.values())), torch.zeros(()))


def train(pooled: bool, kind: str, steps: int, **params: Any) -> list[Any]:
    module, seen = sharded(pooled, kind, **params), []
    for step in range(steps):
        out, remapped = module(batch(dist.get_rank(), step).to(device()))
        found = results(pooled, out)
        loss_of(found).backward()
        seen.append(
            (
                {key: rows.detach() for key, rows in found.items()},
                {k: remapped[k].values().cpu() for k in "abc"},
            )
        )
    return seen


class Reference:
    """One mapping for each row range, fed with the ids of all ranks that fall into it; tables in
    plain torch.
    """

    def __init__(self, pooled: bool, ranges: int) -> None:
        self.pooled, self.width = pooled, -(-IDS // ranges)
        self.tables = {t: torch.full((rows, 4), NEW_ROW) for t, rows in ROWS.items()}
        self.mappings = {}
        for table, rows in ROWS.items():
            step = -(-rows // ranges)
            firsts = [first for first in range(0, rows, step)]
            self.mappings[table] = [
                mapping(min(step, rows - f), f, torch.empty(0).device) for f in firsts
            ]

    def remap(self, table: str, ids: Tensor) -> Tensor:
        rows = torch.empty_like(ids)
        for number, own in enumerate(self.mappings[table]):
            mine = ids // self.width == number
            lists = {table: JaggedTensor(ids[mine], lengths=torch.tensor([int(mine.sum())]))}
            rows[mine] = own.remap(own.profile(lists))[table].values()
            if (evicted := own.evict()) is not None:
                self.tables[table][evicted] = NEW_ROW
        return rows

    def step(
        self, batches: list[KeyedJaggedTensor]
    ) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = [({}, {}) for _ in batches]
        losses = torch.zeros(())
        for table, features in FEATURES.items():
            lists = [one[feature] for feature in features for one in batches]
            rows = self.remap(table, torch.cat([each.values() for each in lists]))
            weight = self.tables[table].clone().requires_grad_()
            parts = rows.split([each.values().numel() for each in lists])
            for index, (part, each) in enumerate(zip(parts, lists, strict=True)):
                feature, rank = features[index // len(batches)], index % len(batches)
                looked_up = weight[part]
                if self.pooled:
                    mode = "mean" if table == "t1" else "sum"
                    looked_up = nn.functional.embedding_bag(
                        part, weight, each.offsets()[:-1], mode=mode
                    )
                found[rank][0][feature], found[rank][1][feature] = looked_up.detach(), part
                losses = losses + (1 + "abc".index(feature)) * looked_up.sum() / len(batches)
            (gradient,) = torch.autograd.grad(losses, weight)
            losses = torch.zeros(())
            self.tables[table] = self.tables[table] - RATE * gradient
        return found


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(2, "row_wise"), (2, "table_wise"), (4, "row_wise"), (4, "table_row_wise")],
)
def test_ranks_give_what_one_mapping_for_each_row_range_gives(ranks, pooled, world_size, kind):
    seen = ranks(world_size).run(train, pooled, kind, STEPS)
    reference = Reference(pooled, 1 if kind == "table_wise" else world_size)
    for step in range(STEPS):
        expected = reference.step([batch(rank, step) for rank in range(world_size)])
        for rank in range(world_size):
            for key in "abc":
                assert torch.equal(seen[rank][step][1][key], expected[rank][1][key]), (
                    step,
                    rank,
                    key,
                )
                assert_close(
                    seen[rank][step][0][key], expected[rank][0][key], msg=f"{step, rank, key}"
                )
    assert any(
        int((one._mch_sorted_raw_ids != torch.iinfo(torch.int64).max).sum())
        for one in reference.mappings["t0"]
    )


def eval_twice(kind: str) -> list[Any]:
    module = sharded(True, kind)
    for step in range(2):
        module(batch(dist.get_rank(), step).to(device()))
    module.eval()
    before = {
        k: v.clone()
        for k, v in module._managed_collision_collection._managed_collision_modules.state_dict().items()  # noqa: E501
    }
    weights = [
        held.rows[0].clone() for held in module._embedding_module.local_shards() if held.rows
    ]
    first = results(True, module(batch(9, 9).to(device()))[0])
    second = results(True, module(batch(9, 9).to(device()))[0])
    after = module._managed_collision_collection._managed_collision_modules.state_dict()
    same = all(torch.equal(after[k], v) for k, v in before.items())
    kept = [held.rows[0] for held in module._embedding_module.local_shards() if held.rows]
    same = same and all(map(torch.equal, kept, weights))
    return [same, all(torch.equal(first[key], second[key]) for key in first), module.training]


def test_eval_mode_changes_nothing(ranks):
    assert ranks(2).run(eval_twice, "row_wise") == [[True, True, False]] * 2


def reset_rows_have_no_state() -> list[bool]:
    module = sharded(True, "row_wise", optimizer="exact_row_wise_adagrad")
    found = []
    for step in range(STEPS):
        ctx = module.create_context()
        arrived = module.input_dist(ctx, batch(dist.get_rank(), step).to(device())).wait().wait()
        out, _ = module.output_dist(ctx, module.compute(ctx, arrived))
        for held in module._embedding_module.local_shards():
            rows = ctx.evictions_per_table.get(held.table.name)
            if rows is not None and rows.numel():
                (optimizer,) = held.rows[0]._in_backward_optimizers
                (state,) = optimizer.state[held.rows[0]].values()
                found.append(
                    bool((state[rows] == 0).all() and (held.rows[0][rows] == NEW_ROW).all())
                )
                found.append(step < 3 or bool((state != 0).any()))
        loss_of(results(True, out)).backward()
    return found


def test_rows_that_change_hands_lose_their_values_and_optimizer_state(ranks):
    for found in ranks(2).run(reset_rows_have_no_state):
        assert len(found) >= 4
        assert all(found)


def in_memory_and_in_a_file(pooled: bool, kind: str, kernel: str, **cache: float) -> list[Any]:
    """Results, rows and their state, of tables in memory and of tables in a file."""
    found = []
    for words in ({}, {"kernel": kernel, **cache}):
        module = sharded(pooled, kind, optimizer="exact_row_wise_adagrad", **words)
        numbers = []
        for step in range(STEPS):
            out, _ = module(batch(dist.get_rank(), step).to(device()))
            seen = results(pooled, out)
            loss_of(seen).backward()
            numbers += [rows.detach() for rows in seen.values()]
        for held in module._embedding_module.local_shards():
            for rows in held.rows:
                (optimizer,) = rows._in_backward_optimizers
                numbers += [rows.detach().clone(), *optimizer.state[rows].values()]
        found.append(numbers)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="tables in files are on the CPU")
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
@pytest.mark.parametrize(
    ("kernel", "cache"),
    [
        ("fused_uvm", {}),
        ("fused_uvm_caching", {"cache_load_factor": 1e-6}),
        ("fused_uvm_caching", {"cache_load_factor": 0.5}),
    ],
)
def test_rows_that_change_hands_in_a_file_are_those_in_memory(ranks, pooled, kind, kernel, cache):
    for in_memory, in_file in ranks(2).run(in_memory_and_in_a_file, pooled, kind, kernel, **cache):
        assert len(in_memory) > 3 * STEPS
        for one, other in zip(in_memory, in_file, strict=True):
            assert torch.equal(one, other)


def backward_after_eviction(in_place: bool) -> str:
    module = sharded(True, "row_wise", unsharded(True, in_place=in_place))
    first, _ = module(batch(0, 0).to(device()))
    loss = loss_of(results(True, first))
    out, _ = module(batch(0, 1).to(device()))
    loss_of(results(True, out)).backward()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_backward_after_rows_were_reset_is_refused_unless_allowed(ranks):
    for text in ranks(2).run(backward_after_eviction, False):
        assert "modified by an inplace operation" in text
    assert ranks(2).run(backward_after_eviction, True) == ["", ""]


def state_names(kind: str) -> list[Any]:
    module, plain = sharded(True, kind), unsharded(True)
    for step in range(2):
        module(batch(dist.get_rank(), step).to(device()))
    state = module.state_dict()
    rows = state["_managed_collision_collection._managed_collision_modules.t0._mch_counts"]
    held = module._managed_collision_collection._managed_collision_modules["t0"]._mch_counts
    before = held.clone()
    kept = {k: v.clone() if not isinstance(v, ShardedTensor) else v for k, v in state.items()}
    local = rows.local_shards()[0].tensor.clone()
    module(batch(dist.get_rank(), 2).to(device()))
    module(batch(dist.get_rank(), 3).to(device()))
    changed = not torch.equal(held, before)
    rows.local_shards()[0].tensor.copy_(local)
    module.load_state_dict(kept)
    return [
        set(plain.state_dict()) == set(state),
        isinstance(rows, ShardedTensor),
        list(rows.metadata().size),
        changed,
        torch.equal(held, before),
    ]


def test_state_dict_has_the_names_of_the_unsharded_module_and_is_loaded(ranks):
    assert ranks(2).run(state_names, "row_wise") == [[True, True, [ROWS["t0"]], True, True]] * 2


PROBE = torch.arange(0, IDS, 499)


def look_up(module: Any, pooled: bool) -> dict[str, Tensor]:
    """What every id that may have a row gives in eval mode."""
    module.eval()
    ones = torch.ones(3 * PROBE.numel(), dtype=torch.int64)
    out, remapped = module(
        KeyedJaggedTensor(["a", "b", "c"], PROBE.repeat(3), lengths=ones).to(device())
    )
    found = results(pooled, out)
    module.train()
    return {
        key: torch.cat([rows.detach(), remapped[key].values().cpu().view(-1, 1)], 1)
        for key, rows in found.items()
    }


def save_trained(path: str, kind: str) -> dict[str, Tensor]:
    module = sharded(True, kind, optimizer="exact_row_wise_adagrad")
    for step in range(STEPS):
        out, _ = module(batch(dist.get_rank(), step).to(device()))
        loss_of(results(True, out)).backward()
    save_checkpoint(path, module)
    return look_up(module, True)


def load_trained(path: str, kind: str) -> dict[str, Tensor]:
    module = sharded(True, kind, optimizer="exact_row_wise_adagrad")
    load_checkpoint(path, module)
    return look_up(module, True)


def load_unsharded(path: str) -> dict[str, Tensor]:
    module = unsharded(True)
    load_checkpoint(path, module, optimizer_state=False)
    return look_up(module, True)


def with_rows(looked_up: dict[str, Tensor], ranges: int) -> dict[str, dict[int, Tensor]]:
    """Ids that have a row of their own -> its values."""
    found: dict[str, dict[int, Tensor]] = {}
    for table, features in FEATURES.items():
        step = -(-ROWS[table] // ranges)
        lasts = {min(first + step, ROWS[table]) - 1 for first in range(0, ROWS[table], step)}
        rows = looked_up[features[0]]
        found[table] = {
            int(i): row[:4] for i, row in zip(PROBE, rows, strict=True) if int(row[4]) not in lasts
        }
    return found


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, "row_wise"), (2, "table_wise")),
        ((2, "table_wise"), (2, "row_wise")),
        ((4, "row_wise"), (2, "row_wise")),
        ((2, "row_wise"), (4, "row_wise")),
    ],
)
def test_ids_keep_their_rows_under_another_plan_on_other_ranks(ranks, tmp_path, saved, loaded):
    path = str(tmp_path / "saved")
    before = ranks(saved[0]).run(save_trained, path, saved[1])[0]
    after = ranks(loaded[0]).run(load_trained, path, loaded[1])
    had = with_rows(before, 1 if saved[1] == "table_wise" else saved[0])
    ranges = 1 if loaded[1] == "table_wise" else loaded[0]
    has = with_rows(after[0], ranges)
    for table in ROWS:
        assert len(had[table]) >= 3
        assert has[table].keys() <= had[table].keys()
        assert len(has[table]) >= 3
        for raw, row in has[table].items():
            assert torch.equal(row, had[table][raw]), (table, raw)
    assert all(torch.equal(after[0][key], other[key]) for other in after for key in other)


def test_an_unsharded_module_loads_the_checkpoint_of_sharded_ones(ranks, tmp_path):
    path = str(tmp_path / "saved")
    before = ranks(2).run(save_trained, path, "row_wise")[0]
    after = ranks(2).run(load_unsharded, path)[0]
    had, has = with_rows(before, 2), with_rows(after, 1)
    for table in ROWS:
        assert had[table].keys() <= has[table].keys()
        assert all(torch.equal(has[table][raw], row) for raw, row in had[table].items())


def gathered(rank: int, world_size: int) -> dict[str, Tensor]:
    return full_state_dict(sharded(True, "table_wise"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_managed_collisions_are_not_gathered_and_the_error_names_the_way(ranks, world_size):
    message = r"depends on the ranks that hold table 't0'.*load_checkpoint\(path, unsharded"
    with pytest.raises(RankError, match=message):
        ranks(world_size).run(gathered)


def shard_trained(kind: str) -> bool:
    plain = unsharded(True)
    for step in range(STEPS):
        plain(batch(0, step).to(device()))
    with torch.no_grad():
        for table in plain._embedding_bag_collection.embedding_bags.values():
            table.weight.copy_(torch.arange(table.weight.numel()).view_as(table.weight))
    had = with_rows(look_up(plain, True), 1)
    has = with_rows(look_up(sharded(True, kind, plain), True), 2 if kind == "row_wise" else 1)
    return all(
        len(has[t]) >= 3 and all(torch.equal(had[t][raw], row) for raw, row in has[t].items())
        for t in ROWS
    )


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_sharding_keeps_the_rows_of_ids(ranks, kind):
    assert ranks(2).run(shard_trained, kind) == [True, True]


def varied_batch(rank: int, step: int, weighted: bool, variable: bool) -> KeyedJaggedTensor:
    """Of four samples; with a variable batch features have 2, 3 and 1 lists, and a sample means one
    of each.
    """
    draw = torch.Generator().manual_seed(50 * step + rank)
    strides = [2, 3, 1] if variable else [4, 4, 4]
    lengths = torch.randint(0, 4, (sum(strides),), generator=draw)
    values = torch.randint(0, 8, (int(lengths.sum()),), generator=draw) * 499
    weights = torch.rand(values.shape, generator=draw) if weighted else None
    if not variable:
        return KeyedJaggedTensor(["c", "a", "b"], values, weights, lengths=lengths)
    means = torch.stack([torch.randint(0, stride, (4,), generator=draw) for stride in strides])
    return KeyedJaggedTensor(
        ["c", "a", "b"],
        values,
        weights,
        lengths=lengths,
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(["c", "a", "b"], means),
    )


def look_up_varied(kind: str, weighted: bool, variable: bool) -> tuple[Any, ...]:
    tables = [
        EmbeddingBagConfig(
            ROWS[t], 4, t, feature_names=FEATURES[t], init_fn=lambda rows: rows.normal_()
        )
        for t in ROWS
    ]
    mappings = ManagedCollisionCollection({t: mapping(ROWS[t]) for t in ROWS}, tables)
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted, device=device())
    module = sharded(True, kind, ManagedCollisionEmbeddingBagCollection(ebc, mappings, True))
    with torch.no_grad():
        for step in range(3):
            out, remapped = module(
                varied_batch(dist.get_rank(), step, weighted, variable).to(device())
            )
            pooled = results(True, out)
    held = {
        (one.table.name, shard.row_offset): rows.detach().cpu()
        for one in module._embedding_module.local_shards()
        for shard, rows in zip(one.shards, one.rows, strict=True)
        if shard.rows
    }
    return pooled, {key: remapped[key].values().cpu() for key in "abc"}, held


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
@pytest.mark.parametrize(("weighted", "variable"), [(True, False), (False, True), (True, True)])
def test_weighted_and_variable_batches_give_the_sums_of_their_rows(ranks, kind, weighted, variable):
    seen = ranks(2).run(look_up_varied, kind, weighted, variable)
    held = {place: rows for _, _, of_rank in seen for place, rows in of_rank.items()}
    tables = {t: torch.cat([held[place] for place in sorted(held) if place[0] == t]) for t in ROWS}
    table_of = {feature: table for table, features in FEATURES.items() for feature in features}
    for rank, (found, rows, _) in enumerate(seen):
        features = varied_batch(rank, 2, weighted, variable)
        for index, key in enumerate(["c", "a", "b"]):
            lists = features[key]
            assert all(
                rows[key][lists.values() == raw].unique().numel() == 1
                for raw in lists.values().unique()
            )
            one_each = (
                torch.ones(lists.values().numel())
                if lists.weights_or_none() is None
                else lists.weights()
            )
            scaled = tables[table_of[key]][rows[key]] * one_each.unsqueeze(1)
            sums = torch.stack([part.sum(0) for part in scaled.split(lists.lengths().tolist())])
            inverse = features.inverse_indices_or_none()
            assert_close(found[key], sums if inverse is None else sums[inverse[1][index]])
    # More rows than those that ids without a row share.
    assert torch.cat([rows["a"] for _, rows, _ in seen]).unique().numel() > 2


def sent_once(kind: str) -> list[Any]:
    plain = unsharded(False)
    for step in range(STEPS):
        plain(batch(0, step).to(device()))
    often, once = sharded(False, kind, plain), sharded(False, kind, plain, use_index_dedup=True)
    features, found = batch(dist.get_rank(), 0), []
    repeated = KeyedJaggedTensor(
        features.keys(), features.values().repeat_interleave(3), lengths=3 * features.lengths()
    )
    for module in (often, once):
        module.eval()
        with count_traffic() as traffic:
            out, remapped = module(repeated.to(device()))
            found.append((results(False, out), remapped.values().cpu()))
        found.append(
            [sum(traffic.row(2, stage)) for stage in ("input ids", "output rows", "remapped ids")]
        )
    (rows, remapped), sent, (same, again), less = found
    once.train()
    for _ in range(2):
        once(
            KeyedJaggedTensor(
                ["c", "a", "b"], torch.tensor([3990] * 4), lengths=torch.tensor([4, 0, 0])
            ).to(device())
        )
    state = once._managed_collision_collection._managed_collision_modules.state_dict()
    counts = (
        [int(n) for n in state["t1._mch_counts"][state["t1._mch_sorted_raw_ids"] == 3990]]
        if "t1._mch_counts" in state
        else []
    )
    return [
        all(map(torch.equal, rows.values(), same.values())),
        torch.equal(remapped, again),
        sent,
        less,
        counts,
    ]


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_raw_ids_sent_once_have_the_same_rows_and_are_counted_once_a_rank(ranks, kind):
    counts = []
    for rows_equal, remapped_equal, sent, less, counted in ranks(2).run(sent_once, kind):
        assert rows_equal and remapped_equal
        assert all(few < many for few, many in zip(less, sent, strict=True) if many)
        counts += counted
    assert counts == [4]


class Model(nn.Module):
    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.sparse, self.over, self.pooled = (
            unsharded(pooled, returned=False),
            nn.Linear(4, 1, device=device()),
            pooled,
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out, _ = self.sparse(features)
        rows = [out[key] if self.pooled else out[key].values() for key in ("a", "b", "c")]
        answer = self.over(torch.cat(rows))
        return answer.sum(), answer


def planned(pooled: bool) -> tuple[str, list[str]]:
    model = DistributedModelParallel(Model(pooled))
    return type(model.module.sparse).__name__, sorted(model.plan.plan["sparse"])


@pytest.mark.parametrize("pooled", [True, False])
def test_planner_and_default_sharders_cover_managed_collisions(ranks, pooled):
    name = (
        "ShardedManagedCollisionEmbeddingBagCollection"
        if pooled
        else "ShardedManagedCollisionEmbeddingCollection"
    )
    assert ranks(2).run(planned, pooled) == [(name, ["t0", "t1"])] * 2


def pipelined(pooled: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    plain, other = DistributedModelParallel(Model(pooled)), DistributedModelParallel(Model(pooled))
    other.module.over.load_state_dict(plain.module.over.state_dict())
    batches = [batch(dist.get_rank(), step).to(device()) for step in range(STEPS)]
    losses = []
    optimizer = torch.optim.SGD(plain.module.over.parameters(), lr=0.1)
    for one in batches:
        optimizer.zero_grad()
        loss, _ = plain(one)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    answers = []
    pipeline = TrainPipelineSparseDist(
        other, torch.optim.SGD(other.module.over.parameters(), lr=0.1), device()
    )
    iterator = iter(batches)
    for _ in batches:
        answers.append(pipeline.progress(iterator).detach().sum().cpu())
    return losses, answers


@pytest.mark.parametrize("pooled", [True, False])
def test_a_pipeline_gives_what_the_plain_loop_gives(ranks, pooled):
    for losses, answers in ranks(2).run(pipelined, pooled):
        assert_close(torch.stack(losses), torch.stack(answers))


def counted(returned: bool) -> dict[str, int]:
    module = sharded(True, "row_wise", unsharded(True, returned=returned))
    module(batch(dist.get_rank(), 0).to(device()))
    with count_traffic() as traffic:
        out, remapped = module(batch(dist.get_rank(), 1).to(device()))
        _ = out.values(), None if remapped is None else remapped.values()
    return traffic.by_stage()


def test_ids_are_sent_once_and_rows_return_only_where_asked_for(ranks):
    plain, returned = ranks(2).run(counted, False), ranks(2).run(counted, True)
    for rank in range(2):
        ids = batch(rank, 1)
        away = int((ids.values() // (IDS // 2) != rank).sum())
        assert plain[rank]["input ids"] == 8 * (9 + away)
        came = int((batch(1 - rank, 1).values() // (IDS // 2) == rank).sum())
        assert returned[rank] == {**plain[rank], "remapped ids": 4 * came}


def hashed(_: None) -> list[Any]:
    tables = configs(True)[:1]
    where = device()
    scattered = MCHManagedCollisionModule(
        12, where, LFU_EvictionPolicy(), 1, IDS, lambda ids, size: ids * 7919 % size
    )
    module = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables, device=where),
        ManagedCollisionCollection({"t0": scattered}, tables),
        True,
    )
    env, sharder = ShardingEnv.from_process_group(group()), sharder_of(True)
    plan = construct_module_sharding_plan(module, {"t0": row_wise()}, sharder)
    made = sharder.shard(module, plan, env)
    ids = torch.tensor([0, 1, 2, 3] * 2)
    _, rows = made(
        KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(8, dtype=torch.int64)).to(where)
    )
    return rows.values().cpu().tolist()


def test_ids_are_hashed_before_they_find_their_rank(ranks):
    owners = [value * 7919 % IDS // (IDS // 2) for value in range(4)]
    for rows in ranks(2).run(hashed, None):
        assert [row // 6 for row in rows[:4]] == owners
        assert len(set(rows[:4])) == 4
        assert rows[:4] == rows[4:]


def hash_buckets(buckets: int) -> list[int]:
    tables, where = configs(True)[:1], device()
    tables[0].num_embeddings = 16
    mapped = HashZchManagedCollisionModule(16, where, buckets)
    module = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables, device=where),
        ManagedCollisionCollection({"t0": mapped}, tables),
        True,
    )
    env, sharder = ShardingEnv.from_process_group(group()), sharder_of(True)
    made = sharder.shard(
        module, construct_module_sharding_plan(module, {"t0": row_wise()}, sharder), env
    )
    ids = torch.tensor([10**12 + each for each in range(8)])
    lengths = torch.ones(8, dtype=torch.int64)
    _, rows = made(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths).to(where))
    plain, _ = HashZchManagedCollisionModule(16, where, buckets), None
    lists = KeyedJaggedTensor(["t0"], ids, lengths=torch.tensor([8])).to(where).to_dict()
    return [rows.values().cpu().tolist(), plain(lists)["t0"].values().cpu().tolist()]


@pytest.mark.parametrize("buckets", [2, 4])
def test_unbounded_ids_find_the_rank_of_their_bucket(ranks, buckets):
    for rows, expected in ranks(2).run(hash_buckets, buckets):
        assert rows == expected


def ids_without_rows(pooled: bool, weighted: bool, returned: bool) -> str:
    """The error of a batch of which a mapping takes ids out of their lists."""
    table, where = configs(pooled)[0], device()
    table.num_embeddings = 16
    mapped = HashZchManagedCollisionModule(16, where, 2, max_probe=1, disable_fallback=True)
    mappings = ManagedCollisionCollection({"t0": mapped}, [table])
    if pooled:
        tables = EmbeddingBagCollection([table], is_weighted=weighted, device=where)
        module = ManagedCollisionEmbeddingBagCollection(tables, mappings, returned)
    else:
        tables = EmbeddingCollection([table], device=where)
        module = ManagedCollisionEmbeddingCollection(tables, mappings, returned)

    sharder = sharder_of(pooled)
    plan = construct_module_sharding_plan(module, {"t0": row_wise()}, sharder)
    made = sharder.shard(module, plan, ShardingEnv.from_process_group(group()))
    ids = torch.arange(40)
    batch = KeyedJaggedTensor(
        ["a", "b"], ids, ids.float() if weighted else None, torch.full((8,), 5)
    )
    try:
        made(batch.to(where))[0].wait()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("pooled", "weighted", "returned", "is_refused"),
    [
        (False, False, False, True),
        (True, True, False, True),
        (True, False, True, True),
        (True, False, False, False),
    ],
)
def test_ids_without_a_row_are_refused_where_each_needs_one(
    ranks, pooled, weighted, returned, is_refused
):
    for text in ranks(2).run(ids_without_rows, pooled, weighted, returned):
        assert bool(text) == is_refused
        assert not text or all(
            fact in text for fact in ("'a', 'b'", "'t0'", "disable_fallback=False")
        )


def refused(kind: str) -> str:
    try:
        if kind == "replicas":
            DMPCollection(Model(True), None, None, 2, 1, group())
        elif kind == "bucket":
            hash_buckets(1)
        else:
            module, sharder = unsharded(True), sharder_of(True)
            word = column_wise() if kind == "column_wise" else row_wise(compute_kernel="dense")
            plan = construct_module_sharding_plan(module, dict.fromkeys(ROWS, word), sharder)
            sharder.shard(module, plan, ShardingEnv.from_process_group(group()))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("column_wise", "use one of ['row_wise', 'table_wise', 'table_row_wise']"),
        ("dense", "use 'fused'"),
        ("bucket", "row_wise(num_buckets=1)"),
        ("replicas", "use DistributedModelParallel"),
    ],
)
def test_plans_that_split_the_row_of_an_id_are_refused(ranks, kind, words):
    for text in ranks(2).run(refused, kind):
        assert words in text
