"""ShardedEmbeddingCollection: its printed form, names, weights, laziness, batches in flight,
traffic, in a model.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from distributed.cases import (
    FEATURES,
    KINDS,
    batch,
    group,
    on_rank,
    operator_name,
    samples_of,
    seed_of,
    word,
)
from distributed.row_cases import KEYS, RowsReference, collection, held, loss, plain, shard, tables
from torch import Tensor, nn
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import CommType, QCommsConfig, get_qcomm_codecs_registry
from tutorec.distributed.embedding import EmbeddingCollectionAwaitable, EmbeddingCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from tutorec.distributed.traffic import count_traffic
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

BEFORE = """ShardedEmbeddingCollection(
  (lookups): 
   GroupedEmbeddingsLookup(
      (_emb_modules): ModuleList(
        (0): BatchedFusedEmbedding(
          (_emb_module): {kernel}()
        )
      )
    )
   (_output_dists): 
   SlotSequenceEmbeddingDist()
  (embeddings): ModuleDict(
    (product_table): Module()
    (user_table): Module()
  )
)"""  # noqa: W291 - the printed form has these spaces


def small_collection(**options: Any) -> EmbeddingCollection:
    configs = [
        EmbeddingConfig(
            num_embeddings=4096, embedding_dim=64, name="product_table", feature_names=["product"]
        ),
        EmbeddingConfig(
            num_embeddings=4096, embedding_dim=64, name="user_table", feature_names=["user"]
        ),
    ]
    return EmbeddingCollection(configs, **options).to(device())


def small_batch(weights: Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["product", "user"],
        torch.tensor([1, 2, 1, 5, 2, 3, 4, 1]),
        weights,
        lengths=torch.tensor([3, 1, 2, 2]),
    ).to(device())


def alone(ec: EmbeddingCollection, **fused_params: Any):
    plan = construct_module_sharding_plan(
        ec, {config.name: table_wise(rank=0) for config in ec.embedding_configs()}
    )
    return EmbeddingCollectionSharder(fused_params).shard(ec, plan, ShardingEnv.from_local(1, 0))


def rows_of(found: dict[str, JaggedTensor]) -> dict[str, Tensor]:
    return {key: one.values().detach() for key, one in found.items()}


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_printed_form_gains_dists_at_the_first_batch(backend):
    with use_backend(backend):
        sharded = alone(small_collection())
    assert repr(sharded) == BEFORE.format(kernel=operator_name(backend))
    sharded(small_batch())
    assert "TwSparseFeaturesDist(\n      (_dist): KJTAllToAll()" in repr(sharded)
    assert "SlotSequenceEmbeddingDist(\n      (_dist): SequenceEmbeddingsAllToAll()" in repr(
        sharded
    )


def test_result_is_lazy_and_prints_without_waiting():
    result = alone(small_collection())(small_batch())
    assert type(result) is EmbeddingCollectionAwaitable
    assert repr(result).startswith(
        "<tutorec.distributed.embedding.EmbeddingCollectionAwaitable object at 0x"
    )
    assert result.wait() is result.wait()
    assert (list(result), "user" in result, len(result)) == (["product", "user"], True, 2)
    assert type(result["user"]) is JaggedTensor
    assert (result["product"].lengths().tolist(), list(result["product"].values().shape)) == (
        [3, 1],
        [4, 64],
    )


def test_weights_are_those_of_the_module_and_move_apart_from_it():
    ec = small_collection()
    before = {name: parameter.detach().clone() for name, parameter in ec.named_parameters()}
    sharded = alone(ec)
    assert [name for name, _ in sharded.named_parameters()] == list(before)
    wanted = rows_of(ec(small_batch()))
    found = sharded(small_batch()).wait()
    assert all(torch.equal(rows, wanted[key]) for key, rows in rows_of(found).items())
    torch.cat([found["product"].values(), found["user"].values()]).sum().backward()
    assert all(torch.equal(parameter, before[name]) for name, parameter in ec.named_parameters())
    name = "embeddings.user_table.weight"
    assert (sharded.get_parameter(name) != before[name]).any(1).nonzero().view(-1).tolist() == [
        1,
        2,
        3,
        4,
    ]


def test_questions_are_answered_as_by_the_unsharded_module():
    ec = small_collection(need_indices=True)
    sharded = alone(ec)
    assert (sharded.embedding_configs(), sharded.embedding_dim()) == (ec.embedding_configs(), 64)
    assert sharded.need_indices()
    assert sharded(small_batch())["user"].weights().tolist() == [2, 3, 4, 1]
    with pytest.raises(ValueError, match=r"no common embedding_dim.*'t0': 8, 't1': 4"):
        alone(collection()).embedding_dim()


def test_weights_of_the_batch_have_no_effect():
    sharded = alone(small_collection())
    weighted = sharded(small_batch(torch.arange(8.0))).wait()
    assert all(
        torch.equal(rows, rows_of(sharded(small_batch()))[key])
        for key, rows in rows_of(weighted).items()
    )
    assert all(one.weights_or_none() is None for one in weighted.values())


@pytest.mark.skipif(
    "TUTOREC_PRETEND_GPUS" in os.environ, reason="a pretended GPU has no nested tensors"
)
def test_a_tensor_dict_is_a_batch():
    tensordict = pytest.importorskip("tensordict")
    features = small_batch()
    nested = {
        key: torch.nested.nested_tensor_from_jagged(one.values(), one.offsets())
        for key, one in features.to_dict().items()
    }
    ec = small_collection()
    found = alone(ec)(tensordict.TensorDict(source=nested, batch_size=[2])).wait()
    assert all(
        torch.equal(rows, rows_of(found)[key]) for key, rows in rows_of(ec(features)).items()
    )


def test_keys_may_change_their_order_and_surplus_keys_stay_unused():
    ec = small_collection()
    sharded = alone(ec)
    for keys in (["user", "more", "product"], ["product", "user"], ["more", "product", "user"]):
        features = KeyedJaggedTensor(
            keys, torch.arange(4 * len(keys)), lengths=torch.tensor([1, 3] * len(keys))
        )
        features = features.to(device())
        found, wanted = rows_of(sharded(features)), rows_of(ec(features))
        assert set(found) == {"product", "user"}
        assert all(torch.equal(rows, wanted[key]) for key, rows in found.items())
    with pytest.raises(KeyError, match=r"no feature 'user'.*table 'user_table'"):
        sharded(
            KeyedJaggedTensor(["product"], torch.tensor([1]), lengths=torch.tensor([1])).to(
                device()
            )
        )
    with pytest.raises(ValueError, match=r"4096"):
        alone(ec)(
            KeyedJaggedTensor(
                ["product", "user"], torch.tensor([1, 4096]), lengths=torch.tensor([1, 1])
            ).to(device())
        )


def test_optimizer_names_begin_with_the_path_of_the_tables():
    sharded = alone(small_collection(), optimizer="exact_row_wise_adagrad", learning_rate=0.5)
    sharded(small_batch())["user"].values().sum().backward()
    state = sharded.fused_optimizer.state_dict()["state"]
    assert {
        name: {key: list(value.shape) for key, value in of.items()} for name, of in state.items()
    } == {
        "embeddings.product_table.weight": {"product_table.momentum1": [4096]},
        "embeddings.user_table.weight": {"user_table.momentum1": [4096]},
    }
    assert state["embeddings.user_table.weight"]["user_table.momentum1"][:6].tolist() == [
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
        0.0,
    ]
    assert sharded.fused_optimizer.param_groups[0]["lr"] == 0.5


def test_a_collection_without_tables_gives_no_results():
    sharded = alone(EmbeddingCollection([]))
    assert sharded(small_batch()).wait() == {}


def test_moving_the_module_keeps_parameters_and_rows_together():
    sharded = alone(small_collection()).to(device()).share_memory()
    sharded(small_batch())
    with torch.no_grad():
        sharded.get_parameter("embeddings.product_table.weight").zero_()
    assert not sharded(small_batch())["product"].values().any()
    assert sharded(small_batch())["user"].values().any()


def test_a_batch_of_another_kind_is_refused():
    with pytest.raises(
        TypeError, match="a ShardedEmbeddingCollection takes a KeyedJaggedTensor, got Tensor"
    ):
        alone(small_collection())(torch.ones(2))


def test_state_dict_is_loaded_under_the_unsharded_names():
    ec = small_collection()
    sharded = alone(small_collection())
    sharded.load_state_dict(ec.state_dict())
    assert all(
        torch.equal(rows, rows_of(ec(small_batch()))[key])
        for key, rows in rows_of(sharded(small_batch())).items()
    )


def looked_at_first(rank: int, world_size: int) -> list[Any]:
    """Results that are first touched under no_grad, or made under inference_mode."""
    sharded = shard(collection(), kind="mixed")
    before = [own[1] for pieces in held(sharded).values() for own in pieces]
    result = sharded(batch(rank, 3))
    with torch.no_grad():
        first = rows_of(result)
    loss(result.wait(), 0).backward()
    after = [own[1] for pieces in held(sharded).values() for own in pieces]
    with torch.inference_mode():
        inferred = sharded(batch(rank, 3)).wait()
    with torch.no_grad():
        unrecorded = sharded(batch(rank, 3)).wait()
    return [
        any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        all(rows.numel() for rows in first.values()),
        all(torch.equal(inferred[key].values(), unrecorded[key].values()) for key in KEYS),
        any(one.values().requires_grad for one in [*inferred.values(), *unrecorded.values()]),
    ]


def test_a_result_that_is_first_looked_at_without_grad_still_trains(ranks):
    assert ranks(2).run(looked_at_first) == [[True, True, True, False]] * 2


def two_in_flight(rank: int, world_size: int, kind: str, overlapped: bool) -> list[Tensor]:
    sharded = shard(collection(), "exact_row_wise_adagrad", kind=kind)
    results = []
    for step in range(2):
        pair = [batch(100 * step + 10 * i + rank, samples_of(rank, step + i)) for i in range(2)]
        if overlapped:
            contexts = [sharded.create_context() for _ in pair]
            sizes = [
                sharded.input_dist(ctx, each) for ctx, each in zip(contexts, pair, strict=True)
            ]
            arriving = [each.wait() for each in sizes]
            features = [each.wait() for each in arriving]
            looked_up = [
                sharded.compute(ctx, each) for ctx, each in zip(contexts, features, strict=True)
            ]
            lazy = [
                sharded.output_dist(ctx, each)
                for ctx, each in zip(contexts, looked_up, strict=True)
            ]
        else:
            lazy = [sharded(each) for each in pair]
        for each in lazy:
            loss(each.wait(), step).backward()
            results += rows_of(each).values()
    return [*results, *(own[1] for pieces in held(sharded).values() for own in pieces)]


@pytest.mark.parametrize("kind", ["table_wise", "mixed"])
def test_two_batches_in_flight_equal_one_after_the_other(ranks, kind):
    apart = ranks(2).run(two_in_flight, kind=kind, overlapped=False)
    together = ranks(2).run(two_in_flight, kind=kind, overlapped=True)
    for a, b in zip(apart, together, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def one_key_each(rank: int, world_size: int) -> dict[str, Any]:
    """Each rank learns from another feature, whose table is sharded in another way."""
    sharded = shard(collection(), kind="mixed")
    loss({KEYS[rank]: sharded(batch(rank, 3))[KEYS[rank]]}, 0).backward()
    return held(sharded)


@pytest.mark.parametrize(
    ("world_size", "hosts"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.world4)]
)
def test_ranks_may_learn_from_different_features(ranks, world_size, hosts):
    reference = RowsReference(collection(), "exact_sgd", world_size)
    batches = [batch(rank, 3) for rank in range(world_size)]
    total = sum(
        loss({KEYS[rank]: reference.ebc(each)[KEYS[rank]]}, 0) for rank, each in enumerate(batches)
    )
    weights = reference.weights()
    gradients = torch.autograd.grad(
        total, list(weights.values()), allow_unused=True, materialize_grads=True
    )
    reference.update(dict(zip(weights, gradients, strict=True)))
    for found in ranks(world_size, hosts=hosts).run(one_key_each):
        for name, pieces in found.items():
            for (row, column), rows, _ in pieces:
                wanted = weights[name].detach()[
                    row : row + rows.shape[0], column : column + rows.shape[1]
                ]
                assert_close(rows, wanted, rtol=1e-5, atol=1e-6)


def ids_of(samples: int, ids: list[int]) -> KeyedJaggedTensor:
    """The same ids in the first sample of each feature."""
    lengths = ([len(ids)] + [0] * (samples - 1)) * len(FEATURES) if samples else []
    made = KeyedJaggedTensor(
        list(FEATURES),
        torch.tensor(ids * (len(FEATURES) if samples else 0), dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=samples,
    )
    return on_rank(made)


EMPTY = {
    "no samples on rank 0": [(0, []), (2, [3, 1, 3])],
    "no ids on rank 1": [(1, [6]), (3, [])],
    "no ids anywhere": [(2, []), (2, [])],
    "no samples anywhere": [(0, []), (0, [])],
}


def empty_steps(rank: int, world_size: int, kind: str, kernel: str) -> list[Any]:
    found = []
    for of_ranks in EMPTY.values():
        sharded = shard(collection(), kernel=kernel, kind=kind)
        rows = sharded(ids_of(*of_ranks[rank])).wait()
        loss(rows, rank).backward()
        found.append((plain(rows), held(sharded)))
    return found


@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize("kind", ["row_wise", "mixed"])
def test_ranks_without_ids_or_samples_take_part(ranks, kind, kernel):
    of_ranks = ranks(2).run(empty_steps, kind=kind, kernel=kernel)
    for case, sizes in enumerate(EMPTY.values()):
        reference = RowsReference(collection(), "exact_sgd", 2)
        results = [reference.ebc(ids_of(*size)) for size in sizes]
        total = torch.stack([loss(rows, rank) for rank, rows in enumerate(results)]).sum()
        weights = reference.weights()
        gradients = torch.autograd.grad(total, list(weights.values()))
        if kernel == "fused":
            reference.update(dict(zip(weights, gradients, strict=True)))
        for rank in range(2):
            found, pieces = of_ranks[rank][case]
            for key, (values, lengths, _) in found.items():
                assert torch.equal(values, results[rank][key].values()), (case, key)
                assert torch.equal(lengths, results[rank][key].lengths()), (case, key)
            for name, own in pieces.items():
                for (row, column), rows, _ in own:
                    wanted = weights[name].detach()[
                        row : row + rows.shape[0], column : column + rows.shape[1]
                    ]
                    assert_close(rows, wanted, rtol=1e-5, atol=1e-6)


def one_row(rank: int, world_size: int) -> tuple[list[float], list[tuple[str, list[int]]]]:
    ec = EmbeddingCollection([EmbeddingConfig(1, 1, "bit", feature_names=["f"])])
    with torch.no_grad():
        ec.embeddings["bit"].weight.fill_(3.0)
    plan = construct_module_sharding_plan(ec, {"bit": row_wise()})
    sharded = EmbeddingCollectionSharder({"learning_rate": 1.0}).shard(
        ec, plan, ShardingEnv.from_process_group(group())
    )
    ids = KeyedJaggedTensor(
        ["f"], torch.zeros(rank + 1, dtype=torch.int64), lengths=torch.tensor([rank + 1])
    )
    ids = ids.to(device())
    sharded(ids)["f"].values().sum().backward()
    found = sharded(ids)["f"].values().view(-1).tolist()
    return found, [(name, list(parameter.shape)) for name, parameter in sharded.named_parameters()]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.world4)])
def test_more_ranks_than_rows(ranks, world_size):
    mean = sum(range(1, world_size + 1)) / world_size
    for rank, (found, parameters) in enumerate(ranks(world_size).run(one_row)):
        assert found == [3.0 - mean] * (rank + 1)
        assert parameters == [("embeddings.bit.weight", [1 if rank == 0 else 0, 1])]


def counted_step(
    rank: int, world_size: int, kind: str, dedup: bool = False
) -> dict[str, list[int]]:
    sharded = shard(collection(), kind=kind, dedup=dedup)
    loss(sharded(batch(rank, 2)).wait(), 0).backward()
    with count_traffic() as traffic:
        loss(sharded(batch(5 + rank, 3 + rank)).wait(), 0).backward()
    return {stage: traffic.row(world_size, stage) for stage in traffic.issues} | {
        "rounds": [traffic.issues[stage] for stage in traffic.issues]
    }


def due_bytes(
    kind: str, world_size: int, local_size: int, dedup: bool = False
) -> list[dict[str, list[int]]]:
    """What each rank sends: counted id by id, from where each id's row lies."""
    ec, batches = collection(), [batch(5 + rank, 3 + rank) for rank in range(world_size)]
    words = {t.name: word(kind, i, world_size, local_size) for i, t in enumerate(tables())}
    plan = construct_module_sharding_plan(ec, words, world_size=world_size, local_size=local_size)
    sent = {
        s: [[0] * world_size for _ in range(world_size)]
        for s in ("input ids", "output rows", "output gradients")
    }
    for table in tables():
        shards = plan[table.name].shards()
        for source, features in enumerate(batches):
            for feature in table.feature_names:
                ids = features[feature].values().tolist()
                ids, samples = ([*{*ids}], 1) if dedup else (ids, features.stride())
                for one in shards:
                    row, (rows, columns) = one.shard_offsets[0], one.shard_sizes
                    holder = int(str(one.placement).split("/")[0].removeprefix("rank:"))
                    hits = sum(row <= number < row + rows for number in ids)
                    sent["input ids"][source][holder] += 4 * (hits + samples)
                    sent["output rows"][holder][source] += 4 * hits * columns
                    sent["output gradients"][source][holder] += 4 * hits * columns
    for of_stage in sent.values():
        for rank in range(world_size):
            of_stage[rank][rank] = 0
    sizes = [[24 * (other != rank) for other in range(world_size)] for rank in range(world_size)]
    return [
        {"input sizes": sizes[rank]}
        | {stage: of_stage[rank] for stage, of_stage in sent.items()}
        | {"rounds": [1] * 4}
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "data_parallel"])
@pytest.mark.parametrize(
    ("world_size", "hosts"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.world4)]
)
def test_counted_bytes_equal_the_formula(ranks, kind, world_size, hosts):
    counted = ranks(world_size, hosts=hosts).run(counted_step, kind=kind)
    assert counted == due_bytes(kind, world_size, world_size // hosts)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "column_wise"])
def test_an_id_is_sent_once_where_that_is_wanted(ranks, kind):
    counted = ranks(2).run(counted_step, kind=kind, dedup=True)
    assert counted == due_bytes(kind, 2, 2, dedup=True)
    for once, often in zip(counted, due_bytes(kind, 2, 2), strict=True):
        assert all(
            sum(once[stage]) < sum(often[stage])
            for stage in ("input ids", "output rows", "output gradients")
        )


def narrow_step(rank: int, world_size: int, narrow: bool) -> tuple[dict[str, Tensor], list[int]]:
    registry = (
        get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16)) if narrow else None
    )
    sharded = shard(collection(), codecs=registry)
    with count_traffic() as traffic:
        rows = sharded(batch(rank, 3)).wait()
        loss(rows, 0).backward()
    return rows_of(rows), [
        sum(traffic.row(world_size, stage)) for stage in ("output rows", "output gradients")
    ]


def test_rows_and_gradients_may_travel_in_16_bits(ranks):
    wide, half = (ranks(2).run(narrow_step, narrow=narrow) for narrow in (False, True))
    for (rows, sent), (rounded, sent_less) in zip(wide, half, strict=True):
        assert [2 * size for size in sent_less] == sent
        assert sum(sent) > 0
        for key, values in rows.items():
            assert ((rounded[key] - values).abs() <= values.abs() * 2**-11).all()


class Model(nn.Module):
    """Sequences and bags side by side, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences = collection()
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="b0", feature_names=["f3"])]
        )
        self.over = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        sequences, bags = self.sequences(features), self.bags(features)
        hidden = self.over(sequences["f0"].values()).sum() + sequences["f2"].values().square().sum()
        return (
            hidden + bags.values().sum() + loss({key: sequences[key] for key in ("f1@t0", "f3")}, 0)
        )


def model() -> Model:
    torch.manual_seed(11)
    return Model()


RATE = 0.125


def in_a_model(rank: int, world_size: int) -> dict[str, Any]:
    whole = model()
    env = ShardingEnv.from_process_group(group())
    words = {t.name: word("mixed", i, world_size, env.local_size) for i, t in enumerate(tables())}
    plan = ShardingPlan(
        {
            "sequences": construct_module_sharding_plan(
                whole.sequences, words, local_size=env.local_size
            ),
            "bags": construct_module_sharding_plan(whole.bags, {"b0": table_wise(rank=0)}),
        }
    )
    parallel = DistributedModelParallel(whole, env=env, plan=plan)
    for group_ in parallel.fused_optimizer.param_groups:
        group_["lr"] = RATE
    for step in range(2):
        parallel.zero_grad()
        parallel(batch(seed_of(rank, step), 2)).backward()
        with torch.no_grad():
            for _, dense in in_backward_optimizer_filter(parallel.named_parameters()):
                dense -= RATE * dense.grad
    sequences: Any = parallel.module.sequences
    names = [name for name, _ in parallel.named_parameters() if "embeddings." in name]
    assert set(parallel.fused_optimizer.params) >= {name for name in names}
    return {"held": held(sequences), "dense": parallel.module.over.weight.detach().clone()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_in_a_model_beside_bags_it_trains_as_one_process_does(ranks, world_size):
    whole = model()
    for step in range(2):
        whole.zero_grad()
        torch.stack(
            [whole(batch(seed_of(rank, step), 2)) for rank in range(world_size)]
        ).mean().backward()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= RATE * parameter.grad
    for found in ranks(world_size).run(in_a_model):
        assert_close(found["dense"], whole.over.weight.detach())
        for name, pieces in found["held"].items():
            for (row, column), rows, _ in pieces:
                wanted = whole.sequences.embeddings[name].weight.detach()
                assert_close(
                    rows, wanted[row : row + rows.shape[0], column : column + rows.shape[1]]
                )


def stored_and_loaded(rank: int, world_size: int) -> bool:
    first, second = (shard(collection(), kind="mixed", learning_rate=1.0) for _ in range(2))
    loss(first(batch(rank, 3)).wait(), 0).backward()
    second.load_state_dict(first.state_dict())
    pairs = zip(held(first).items(), held(second).items(), strict=True)
    return all(
        torch.equal(a[1], b[1])
        for (_, own), (_, other) in pairs
        for a, b in zip(own, other, strict=True)
    )


def test_state_of_one_sharded_collection_is_loaded_by_another(ranks):
    assert ranks(2).run(stored_and_loaded) == [True, True]


def drawn_here(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    torch.manual_seed(3)
    return held(shard(EmbeddingCollection(tables(), device=torch.device("meta")), kind=kind))


def test_rows_drawn_for_a_meta_module_do_not_depend_on_the_plan(ranks):
    whole: dict[str, dict[str, Tensor]] = {}
    for kind in ("row_wise", "column_wise"):
        whole[kind] = {
            t.name: torch.full((t.num_embeddings, t.embedding_dim), torch.nan) for t in tables()
        }
        for found in ranks(2).run(drawn_here, kind=kind):
            for name, pieces in found.items():
                for (row, column), rows, _ in pieces:
                    whole[kind][name][
                        row : row + rows.shape[0], column : column + rows.shape[1]
                    ] = rows
    for name, rows in whole["row_wise"].items():
        assert rows.isfinite().all()
        assert torch.equal(rows, whole["column_wise"][name])
